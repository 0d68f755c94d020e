//! DeleteContainer: kills, waits, unmounts, removes the cgroup. Events of the loop drive it.
//!
//! Each attempt kills all processes of the container. Then it determines the event to wait for: the exit of the first
//! process (SIGCHLD), the exits of other processes in the cgroup (their pidfds), or the release of the cgroup by the
//! kernel. The kernel releases a cgroup shortly after its last process is reaped, and sends no event. So a timer
//! triggers the next attempt. A timer is also used while a creator or restorer ends, and if the exits of processes
//! cannot be watched.

use std::time::{Duration, Instant};

use super::{CallId, CallResult, Shim, done};
use crate::call_error::{self, CallError};
use crate::cgroup::{self, CgroupError, Removed};
use crate::container::{Deletion, Phase};
use crate::creator;
use crate::kernel;
use crate::report::note;

/// Maximum back-off between attempts. The back-off starts at two milliseconds and doubles.
const MAX_BACKOFF: Duration = Duration::from_millis(200);
/// Attempts (half a minute) after which a busy cgroup is reported as an error.
const MAX_ATTEMPTS: u32 = 160;

impl Shim {
    pub(super) fn delete(&mut self, call_id: CallId, id: &str) -> Option<CallResult> {
        // An absent container counts as deleted, as in CRI's RemoveContainer.
        let Ok(serial) = self.serial_of(id) else { return Some(done()) };
        self.begin_deletion(serial, Some(call_id));
        None
    }

    pub(super) fn begin_deletion(&mut self, serial: u32, call_id: Option<CallId>) {
        let Some(container) = self.containers.get_mut(&serial) else { return };
        let deletion = container.deletion.get_or_insert_default();
        deletion.calls.extend(call_id);
        self.continue_deletion(serial);
    }

    /// Makes one attempt.
    pub(super) fn continue_deletion(&mut self, serial: u32) {
        let hierarchies = &self.pod.hierarchies;
        let Some(container) = self.containers.get_mut(&serial) else { return };
        let Some(deletion) = container.deletion.as_mut() else { return };
        deletion.retry_at = None;
        deletion.dying.clear();
        match container.phase {
            Phase::Creating { creator, .. } => end(creator),
            Phase::Restoring { restorer, .. } => end(restorer),
            Phase::Created | Phase::Starting { .. } | Phase::Running => end(container.pid),
            Phase::Draining { .. } | Phase::Exited { .. } => {}
        }
        // rmdir(2) shows at the lowest cost whether processes are left, because on v1 the list of a cgroup's processes
        // is slow.
        let removed = match container.phase {
            Phase::Exited { .. } => Some(cgroup::remove(hierarchies, &container.cgroup)),
            _ => None,
        };
        if let Some(result) = removed.as_ref().and_then(removal_result) {
            return self.deleted(serial, result);
        }
        let others = cgroup::signal(hierarchies, &container.cgroup, libc::SIGKILL);
        match container.phase {
            Phase::Exited { .. } if !others.is_empty() => deletion.wait_for(&others),
            Phase::Exited { .. } if deletion.attempts < MAX_ATTEMPTS => deletion.back_off(),
            Phase::Exited { .. } => {
                let error = CallError::new(
                    Default::default(),
                    "remove the container's cgroup: it is still busy; processes in it cannot be killed",
                );
                self.deleted(serial, Err(error));
            }
            // The end of the creator's report triggers the next attempt. A process of the library can outlive the
            // creator and keep the report open. This process enters the cgroup later, where the next attempt finds it.
            // So there is a timer, too. A restorer is treated in the same way.
            Phase::Creating { .. } | Phase::Restoring { .. } => deletion.back_off(),
            // The end of the first process and of its output triggers the next attempt.
            Phase::Created | Phase::Starting { .. } | Phase::Running | Phase::Draining { .. } => {}
        }
    }

    fn remove_execs(&mut self, container: u32) {
        let (gone, left) =
            std::mem::take(&mut self.execs).into_iter().partition(|(_, e)| e.container == container);
        self.execs = left;
        let gone: std::collections::BTreeMap<u32, crate::exec::Exec> = gone;
        for exec in gone.into_values() {
            if let Some(call_id) = exec.call_id {
                self.reply(call_id, Err(CallError::wrong_state(&exec.container_id, "deleted")));
            }
        }
    }

    /// Removes all other resources even if the cgroup could not be removed, so that a second deletion has less work.
    fn deleted(&mut self, serial: u32, result: Result<(), CallError>) {
        coracle_fault::point("shim.deleting");
        self.unmount_root(serial);
        let Deletion { calls, failed, .. } = match self.containers.get_mut(&serial) {
            Some(container) => container.deletion.take().unwrap_or_default(),
            None => return,
        };
        let id = self.containers.get(&serial).map(|container| container.id.clone()).unwrap_or_default();
        let removed = creator::remove_files(&self.container_dir(&id), &self.state_dir(&id));
        if let Err(error) = removed {
            note(&format!("cannot remove the directories of container {id}: {}", call_error::chain(&error)));
        }
        let _ = std::fs::remove_file(self.dir.join("exits").join(&id));
        if result.is_ok() || self.shutdown.is_some() {
            self.containers.remove(&serial);
            self.events.remove_container(&id);
            self.remove_execs(serial);
        }
        if let Some((call_id, error)) = failed {
            self.reply(call_id, Err(error));
        }
        for call_id in calls {
            let answer = result.clone().and_then(|()| done());
            self.reply(call_id, answer);
        }
    }
}

/// The result of a cgroup's removal. `None` while the cgroup is busy.
fn removal_result(removed: &Result<Removed, CgroupError>) -> Option<Result<(), CallError>> {
    match removed {
        Ok(Removed::Busy) => None,
        Ok(Removed::All) => Some(Ok(())),
        Err(error) => Some(Err(CallError::internal(error))),
    }
}

/// Kills a child of the shim. The child may have ended already.
pub(super) fn end(pid: i32) {
    let _ended = super::signal::send(pid, libc::SIGKILL);
}

impl Deletion {
    /// Waits for the ends of these processes, or for the timer if they cannot be watched. After three attempts only the
    /// timer counts: the pidfd of a dead process that is still listed would always be ready.
    fn wait_for(&mut self, pids: &std::collections::BTreeSet<i32>) {
        self.attempts += 1;
        self.dying = pids.iter().filter_map(|pid| kernel::pidfd_open(*pid).ok()).collect();
        if self.dying.len() < pids.len() || self.attempts > 3 {
            self.dying.clear();
            self.back_off();
        }
    }

    /// Sets the time of the next attempt.
    fn back_off(&mut self) {
        self.attempts += 1;
        let backoff = Duration::from_millis(1 << self.attempts.min(8));
        self.retry_at = Some(Instant::now() + backoff.min(MAX_BACKOFF));
    }
}

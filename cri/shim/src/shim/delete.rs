//! DeleteContainer: killed, awaited, unmounted, its cgroup removed; driven by what happens.
//!
//! One look kills what is there and says what to wait for: the first process (a signal tells), the
//! others in its cgroup (their pidfds tell), or the kernel itself, which lets go of a cgroup a
//! moment after the last process in it was reaped and tells nobody: only for that there is a timer.

use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::{Answer, Shim, Ticket, done};
use crate::cgroup::{self, CgroupError, Removed};
use crate::container::{Deletion, Phase};
use crate::creator;
use crate::fault::{self, Fault};
use crate::kernel;
use crate::report::note;

/// From the second on, looks wait by the clock: a millisecond, doubled up to this.
const LONGEST_PAUSE: Duration = Duration::from_millis(200);
/// A cgroup that stays busy so often (half a minute) is reported instead of awaited.
const MOST_LOOKS: u32 = 160;

impl Shim {
    pub(super) fn delete(&mut self, ticket: Ticket, id: &str) -> Option<Answer> {
        // Absent is deleted, as CRI's RemoveContainer has it.
        let Ok(serial) = self.serial_of(id) else { return Some(done()) };
        self.begin_deleting(serial, Some(ticket));
        None
    }

    pub(super) fn begin_deleting(&mut self, serial: u32, ticket: Option<Ticket>) {
        let Some(container) = self.containers.get_mut(&serial) else { return };
        let deletion = container.deletion.get_or_insert_default();
        deletion.tickets.extend(ticket);
        self.go_on_deleting(serial);
    }

    /// One look.
    pub(super) fn go_on_deleting(&mut self, serial: u32) {
        let hierarchies = &self.pod.hierarchies;
        let Some(container) = self.containers.get_mut(&serial) else { return };
        let Some(deletion) = container.deletion.as_mut() else { return };
        deletion.again = None;
        deletion.dying.clear();
        match container.phase {
            Phase::Creating { creator, .. } => end(creator),
            Phase::Restoring { restorer, .. } => end(restorer),
            Phase::Created | Phase::Starting { .. } | Phase::Running => end(container.pid),
            Phase::Draining { .. } | Phase::Exited { .. } => {}
        }
        // Whether anybody is left the kernel knows best: on v1 it makes a list of a cgroup's processes for whoever asks,
        // and is busy with it for a while.
        let removed = match container.phase {
            Phase::Exited { .. } => Some(cgroup::remove(hierarchies, &container.cgroup)),
            _ => None,
        };
        if let Some(result) = removed.as_ref().and_then(ended) {
            return self.deleted(serial, result);
        }
        let others = cgroup::processes(hierarchies, &container.cgroup);
        others.iter().copied().for_each(end);
        match container.phase {
            Phase::Exited { .. } if !others.is_empty() => deletion.wait_for(&others),
            Phase::Exited { .. } if deletion.looks < MOST_LOOKS => deletion.pause(),
            Phase::Exited { .. } => {
                let fault = Fault::new(Default::default(), "the container's cgroup stays busy");
                self.deleted(serial, Err(fault));
            }
            // Its report brings us back, unless a process of the library's outlives the creator
            // and holds it: that one enters the cgroup later, where the next look finds it. A restorer's end
            // does as well.
            Phase::Creating { .. } | Phase::Restoring { .. } => deletion.pause(),
            // Its exit brings us back.
            Phase::Created | Phase::Starting { .. } | Phase::Running | Phase::Draining { .. } => {}
        }
    }

    fn forget_execs(&mut self, container: u32) {
        let (gone, left) =
            std::mem::take(&mut self.execs).into_iter().partition(|(_, e)| e.container == container);
        self.execs = left;
        let gone: std::collections::BTreeMap<u32, crate::exec::Exec> = gone;
        for exec in gone.into_values() {
            if let Some(ticket) = exec.ticket {
                self.reply(ticket, Err(Fault::wrong_state(&exec.container_id, "deleted")));
            }
        }
    }

    /// Everything but the cgroup is removed even when that could not be: a second deletion finds
    /// less to do.
    fn deleted(&mut self, serial: u32, result: Result<(), Fault>) {
        coracle_fault::point("shim.deleting");
        self.unmount_root(serial);
        let Deletion { tickets, failed, .. } = match self.containers.get_mut(&serial) {
            Some(container) => container.deletion.take().unwrap_or_default(),
            None => return,
        };
        let id = self.containers.get(&serial).map(|container| container.id.clone()).unwrap_or_default();
        let forgotten = creator::forget(&self.container_dir(&id), &self.state_dir(&id));
        if let Err(error) = forgotten {
            note(&format!("remove the directories of {id}: {}", fault::chain(&error)));
        }
        let _ = std::fs::remove_file(self.dir.join("exits").join(&id));
        if result.is_ok() || self.ending.is_some() {
            self.containers.remove(&serial);
            self.events.forget(&id);
            self.forget_execs(serial);
        }
        if let Some((ticket, fault)) = failed {
            self.reply(ticket, Err(fault));
        }
        for ticket in tickets {
            let answer = result.clone().and_then(|()| done());
            self.reply(ticket, answer);
        }
    }
}

/// What came of the removal of a cgroup; nothing while somebody is in it.
fn ended(removed: &Result<Removed, CgroupError>) -> Option<Result<(), Fault>> {
    match removed {
        Ok(Removed::Busy) => None,
        Ok(Removed::All) => Some(Ok(())),
        Err(error) => Some(Err(Fault::internal(error))),
    }
}

/// It may be gone already. Zero and negative numbers mean groups of processes, 1 is the machine's.
pub(super) fn end(pid: i32) {
    if pid <= 1 {
        return;
    }
    let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
}

impl Deletion {
    /// For the ends of those, or for a moment where they cannot be watched any more: one that is
    /// dead already and still in the list would be ready for ever.
    fn wait_for(&mut self, pids: &std::collections::BTreeSet<i32>) {
        self.looks += 1;
        self.dying = pids.iter().filter_map(|pid| kernel::pidfd_open(*pid).ok()).collect();
        if self.dying.len() < pids.len() || self.looks > 3 {
            self.dying.clear();
            self.pause();
        }
    }

    fn pause(&mut self) {
        self.looks += 1;
        let pause = Duration::from_millis(1 << self.looks.min(8));
        self.again = Some(Instant::now() + pause.min(LONGEST_PAUSE));
    }
}

//! Process exits: reaped, matched with their container or exec, and reported after the output is read.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use coracle_proto::shim::Exit;
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use prost::Message as _;

use super::{Shim, create};
use crate::cgroup::{self, Hierarchy};
use crate::container::{Container, Phase};
use crate::log::Output;
use crate::report::note;

/// Maximum time that an exit event waits for output whose pipe other processes still have open.
const DRAIN_TIMEOUT: Duration = Duration::from_millis(100);
/// Exit statuses of processes that no container or exec has claimed yet. The list is empty while no pid is awaited, and
/// never longer than the number of pids.
#[derive(Debug, Default)]
pub(super) struct UnclaimedExits(BTreeMap<i32, i32>);

impl UnclaimedExits {
    /// Adds an exit status. A second exit of the same pid replaces the first exit. A pid is reported as soon as it is
    /// assigned, so a report refers to the later process.
    fn insert(&mut self, pid: i32, status: i32) {
        self.0.insert(pid, status);
    }

    pub(super) fn take(&mut self, pid: i32) -> Option<i32> {
        self.0.remove(&pid)
    }

    fn clear(&mut self) {
        self.0.clear();
    }
}

impl Shim {
    pub(super) fn reap(&mut self) {
        loop {
            let (pid, status) = match waitpid(None, Some(WaitPidFlag::WNOHANG)) {
                Ok(WaitStatus::Exited(pid, code)) => (pid.as_raw(), code),
                // Signals are negative here until `exit_of` makes an `Exit` of them.
                Ok(WaitStatus::Signaled(pid, signal, _)) => (pid.as_raw(), -(signal as i32)),
                Ok(WaitStatus::StillAlive) => return,
                Err(nix::Error::EINTR) => continue,
                Err(_) => return,
                Ok(_) => continue,
            };
            self.ended(pid, status);
        }
    }

    fn ended(&mut self, pid: i32, status: i32) {
        if self.pod.init.as_ref().is_some_and(|init| init.pid() == pid) {
            return self.init_ended();
        }
        if self.handle_restore_exit(pid, status) {
            return;
        }
        self.forget_creator(pid);
        let container =
            self.containers.iter().find(|(_, c)| c.pid == pid && c.is_alive()).map(|(serial, _)| *serial);
        if let Some(serial) = container {
            coracle_fault::point("shim.exit-reaped");
            return self.container_ended(serial, status);
        }
        let exec = self.execs.iter().find(|(_, exec)| exec.pid == pid).map(|(serial, _)| *serial);
        if let Some(serial) = exec {
            return match self.execs.get_mut(&serial) {
                Some(exec) if exec.call_id.is_some() => exec.exit = Some(exit_of(status)),
                _ => self.exec_exited(serial, exit_of(status)),
            };
        }
        // The process is a creator, a first fork, an orphan, or a process whose pid is about to be reported.
        let has_unknown_pid =
            |phase: &Phase| matches!(phase, Phase::Creating { .. } | Phase::Restoring { .. });
        let awaited = self.containers.values().any(|container| has_unknown_pid(&container.phase))
            || self.execs.values().any(|exec| exec.pid == 0);
        if awaited {
            self.unclaimed.insert(pid, status);
        } else {
            self.unclaimed.clear();
        }
    }

    /// Clears the pid of a reaped creator: the pid may be reused, and a deletion must not kill the new process.
    fn forget_creator(&mut self, pid: i32) {
        for container in self.containers.values_mut() {
            if let Phase::Creating { creator, .. } = &mut container.phase
                && *creator == pid
            {
                *creator = 0;
            }
        }
    }

    /// Whether the process has ended before a container claimed it.
    pub(super) fn has_ended(&self, pid: i32) -> bool {
        self.unclaimed.0.contains_key(&pid)
    }

    /// Applies an exit that happened before the pid of the container's first process was reported.
    pub(super) fn claim(&mut self, pid: i32) {
        if let Some(status) = self.unclaimed.take(pid) {
            self.ended(pid, status);
        }
    }

    pub(super) fn container_ended(&mut self, serial: u32, status: i32) {
        let hierarchies = &self.pod.hierarchies;
        let Some(container) = self.containers.get_mut(&serial) else { return };
        let mut exit = exit_of(status);
        exit.oom_killed = exit.code != 0 && was_oom_killed(hierarchies, container, exit);
        // The report is read first, because it may have the reason why the program could not start.
        if container.report.is_some() {
            self.read_creator_report(serial);
        }
        let unanswered = self.containers.get(&serial).and_then(|container| match container.phase {
            Phase::Starting { call_id } => Some(call_id),
            _ => None,
        });
        if let Some(call_id) = unanswered {
            self.started(serial, call_id);
        }
        let Some(container) = self.containers.get_mut(&serial) else { return };
        container.report = None;
        container.phase = Phase::Draining { exit, until: Instant::now() + DRAIN_TIMEOUT };
        if container.shares_pids {
            // Without a shared pid namespace, the kernel kills the container's other processes.
            cgroup::kill(&self.pod.hierarchies, &container.cgroup);
        }
        for output in [Output::Stdout, Output::Stderr] {
            container.stdio.forward_output(output, &mut self.buffer);
        }
        self.end_draining(serial);
    }

    /// Queues the exit event when all output is read, or [`DRAIN_TIMEOUT`] is over.
    pub(super) fn end_draining(&mut self, serial: u32) {
        let Some(container) = self.containers.get_mut(&serial) else { return };
        let Phase::Draining { exit, until } = container.phase else { return };
        if !container.stdio.is_drained() && Instant::now() < until {
            return;
        }
        container.stdio.finish();
        container.phase = Phase::Exited { exit };
        let id = container.id.clone();
        self.queue_exit(&id, "", exit);
        self.continue_deletion(serial);
    }

    pub(super) fn exec_exited(&mut self, serial: u32, exit: Exit) {
        let Some(exec) = self.execs.remove(&serial) else { return };
        let known = self.containers.contains_key(&exec.container);
        if known {
            self.queue_exit(&exec.container_id, &exec.exec_id, exit);
        }
    }

    fn queue_exit(&mut self, container_id: &str, exec_id: &str, exit: Exit) {
        let event = self.events.push(container_id, exec_id, exit);
        if exec_id.is_empty() {
            let path = self.dir.join("exits").join(container_id);
            if let Err(error) = std::fs::write(&path, event.encode_to_vec()) {
                note(&format!("cannot record the exit of container {container_id}: {error}"));
            }
        }
        if !self.greeted {
            return;
        }
        if let Some(agent) = self.agent.as_mut() {
            let sent = agent.event(event);
            self.disconnect_on_error(sent);
        }
    }
}

/// Whether the kernel killed a process of the container because of an OOM. If systemd has already removed the scope's
/// cgroup, another source is used. On v2 the source is the pod's counter, which includes the container. So the result
/// is true if the first process was killed and the counter has grown since the creation. On v1 the source is the
/// container's OOM events.
fn was_oom_killed(hierarchies: &[Hierarchy], container: &Container, exit: Exit) -> bool {
    if let Some(kills) = cgroup::oom_kills(hierarchies, &container.cgroup) {
        return kills > 0;
    }
    match &container.oom_events {
        Some(events) => exit.code == 128 + libc::SIGKILL && events.has_occurred(),
        None => {
            let pod = cgroup::oom_kills(hierarchies, cgroup::parent(&container.cgroup));
            exit.signal == libc::SIGKILL && pod.is_some_and(|kills| kills > container.pod_oom_kills)
        }
    }
}

/// An `Exit` from a status of [`Shim::reap`]: an exit code, or the negative of a signal. A signal gives code
/// 128 plus the signal, as in a shell.
pub(super) fn exit_of(status: i32) -> Exit {
    let (code, signal) = if status < 0 { (128 - status, -status) } else { (status, 0) };
    Exit { code, signal, oom_killed: false, at: create::nanos() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unclaimed_exit_is_kept_while_others_end() {
        let mut unclaimed = UnclaimedExits::default();
        unclaimed.insert(7, 3);
        (1000..9000).for_each(|orphan| unclaimed.insert(orphan, 0));
        assert_eq!((unclaimed.take(7), unclaimed.take(7)), (Some(3), None));
        unclaimed.clear();
        assert_eq!(unclaimed.take(1000), None);
    }

    #[test]
    fn a_signal_adds_128_to_the_exit_code() {
        assert_eq!((exit_of(-9).code, exit_of(-9).signal), (137, 9));
        assert_eq!((exit_of(17).code, exit_of(17).signal), (17, 0));
    }
}

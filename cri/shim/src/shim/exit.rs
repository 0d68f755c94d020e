//! Ends of processes: reaped, matched with what they were, drained, told.

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

/// How long an exit waits for output that somebody else still holds open.
const GRACE: Duration = Duration::from_millis(100);
/// Statuses of processes that nobody has claimed yet. There are as many as there are numbers of processes, at most, and
/// none while none is awaited.
#[derive(Debug, Default)]
pub(super) struct Early(BTreeMap<i32, i32>);

impl Early {
    /// Of two processes that had one number, the later one is asked for: a number is told as soon as it is given.
    fn keep(&mut self, pid: i32, status: i32) {
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
                // As a shell counts, negative until it becomes an `Exit`.
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
        if self.ended_restoring(pid, status) {
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
                Some(exec) if exec.ticket.is_some() => exec.exit = Some(exit_of(status)),
                _ => self.exec_exited(serial, exit_of(status)),
            };
        }
        // A creator, a first fork, an orphan; or one whose pid we are about to be told.
        let unnamed = |phase: &Phase| matches!(phase, Phase::Creating { .. } | Phase::Restoring { .. });
        let awaited = self.containers.values().any(|container| unnamed(&container.phase))
            || self.execs.values().any(|exec| exec.pid == 0);
        if awaited {
            self.early.keep(pid, status);
        } else {
            self.early.clear();
        }
    }

    /// The number of a creator that was waited for may become another process's, which a deletion must not kill.
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
        self.early.0.contains_key(&pid)
    }

    /// A container's first process has just been named: it may have ended before.
    pub(super) fn claim(&mut self, pid: i32) {
        if let Some(status) = self.early.take(pid) {
            self.ended(pid, status);
        }
    }

    pub(super) fn container_ended(&mut self, serial: u32, status: i32) {
        let hierarchies = &self.pod.hierarchies;
        let Some(container) = self.containers.get_mut(&serial) else { return };
        let mut exit = exit_of(status);
        exit.oom_killed = exit.code != 0 && was_short_of_memory(hierarchies, container, exit);
        // What its report still holds, the reason why it could not start, comes first.
        if container.report.is_some() {
            self.hear_creator(serial);
        }
        let unanswered = self.containers.get(&serial).and_then(|container| match container.phase {
            Phase::Starting { ticket } => Some(ticket),
            _ => None,
        });
        if let Some(ticket) = unanswered {
            self.started(serial, ticket);
        }
        let Some(container) = self.containers.get_mut(&serial) else { return };
        container.report = None;
        container.phase = Phase::Draining { exit, until: Instant::now() + GRACE };
        if container.shares_pids {
            // With a pid namespace of its own the kernel does it.
            cgroup::kill(&self.pod.hierarchies, &container.cgroup);
        }
        for output in [Output::Stdout, Output::Stderr] {
            container.stdio.pump(output, &mut self.buffer);
        }
        self.end_draining(serial);
    }

    /// Tells of the exit once all output is read, or the time for it is over.
    pub(super) fn end_draining(&mut self, serial: u32) {
        let Some(container) = self.containers.get_mut(&serial) else { return };
        let Phase::Draining { exit, until } = container.phase else { return };
        if !container.stdio.is_drained() && Instant::now() < until {
            return;
        }
        container.stdio.finish();
        container.phase = Phase::Exited { exit };
        let id = container.id.clone();
        self.tell(&id, "", exit);
        self.go_on_deleting(serial);
    }

    pub(super) fn exec_exited(&mut self, serial: u32, exit: Exit) {
        let Some(exec) = self.execs.remove(&serial) else { return };
        let known = self.containers.contains_key(&exec.container);
        if known {
            self.tell(&exec.container_id, &exec.exec_id, exit);
        }
    }

    fn tell(&mut self, container_id: &str, exec_id: &str, exit: Exit) {
        let event = self.events.push(container_id, exec_id, exit);
        if exec_id.is_empty() {
            let path = self.dir.join("exits").join(container_id);
            if let Err(error) = std::fs::write(&path, event.encode_to_vec()) {
                note(&format!("record the exit of {container_id}: {error}"));
            }
        }
        if !self.greeted {
            return;
        }
        if let Some(agent) = self.agent.as_mut() {
            let sent = agent.event(event);
            self.keep_agent(sent);
        }
    }
}

/// Whether the kernel killed for want of memory in the container. A scope of systemd's may be gone by now: on v2 the
/// pod's count has it still, and tells of a first process that was killed after the container was made; on v1 there were
/// events.
fn was_short_of_memory(hierarchies: &[Hierarchy], container: &Container, exit: Exit) -> bool {
    if let Some(kills) = cgroup::oom_kills(hierarchies, &container.cgroup) {
        return kills > 0;
    }
    match &container.oom_events {
        Some(events) => exit.code == 128 + libc::SIGKILL && events.happened(),
        None => {
            let pod = cgroup::oom_kills(hierarchies, cgroup::parent(&container.cgroup));
            exit.signal == libc::SIGKILL && pod.is_some_and(|kills| kills > container.pod_oom_kills)
        }
    }
}

/// Of a status as [`Shim::reap`] has it: a code, or the negative of a signal.
pub(super) fn exit_of(status: i32) -> Exit {
    let (code, signal) = if status < 0 { (128 - status, -status) } else { (status, 0) };
    Exit { code, signal, oom_killed: false, at: create::nanos() }
}

/// For a container that failed to be created: nobody is told.
pub(super) fn never_ran() -> Exit {
    Exit { code: 128, signal: 0, oom_killed: false, at: 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_is_kept_whatever_else_ends_meanwhile() {
        let mut early = Early::default();
        early.keep(7, 3);
        (1000..9000).for_each(|orphan| early.keep(orphan, 0));
        assert_eq!((early.take(7), early.take(7)), (Some(3), None));
        early.clear();
        assert_eq!(early.take(1000), None);
    }

    #[test]
    fn a_signal_counts_128_more() {
        assert_eq!((exit_of(-9).code, exit_of(-9).signal), (137, 9));
        assert_eq!((exit_of(17).code, exit_of(17).signal), (17, 0));
    }
}

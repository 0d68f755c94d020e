//! Signal and Resize.

use coracle_proto::shim::error::Kind;
use coracle_proto::shim::{self as wire};

use super::Shim;
use crate::call_error::CallError;
use crate::cgroup;
use crate::container::Phase;
use crate::kernel;

impl Shim {
    pub(super) fn signal(&mut self, signal: &wire::Signal) -> Result<(), CallError> {
        let id = &signal.container_id;
        let serial = self.serial_of(id)?;
        if !signal.exec_id.is_empty() {
            let exec = self.exec_of(id, &signal.exec_id)?;
            return send(exec.pid, signal.signal);
        }
        let Some(container) = self.containers.get(&serial) else { return Err(CallError::no_container(id)) };
        // Signals all processes of the cgroup. During a restore, CRIU is one of these processes. The start then fails,
        // and the failure ends the container.
        if signal.all || matches!(container.phase, Phase::Restoring { .. }) {
            cgroup::signal(&self.pod.hierarchies, &container.cgroup, signal.signal);
            return Ok(());
        }
        match container.phase {
            Phase::Created | Phase::Starting { .. } | Phase::Running => send(container.pid, signal.signal),
            Phase::Creating { .. }
            | Phase::Restoring { .. }
            | Phase::Draining { .. }
            | Phase::Exited { .. } => Err(CallError::wrong_state(id, container.description())),
        }
    }

    pub(super) fn resize(&mut self, resize: &wire::Resize) -> Result<(), CallError> {
        let id = &resize.container_id;
        let master = self.container(id)?.stdio.master();
        let master =
            master.ok_or_else(|| CallError::new(Kind::WrongState, format!("{id} has no terminal")))?;
        let side = |value: u32| u16::try_from(value).unwrap_or(u16::MAX);
        kernel::set_window(master, side(resize.width), side(resize.height))
            .map_err(|error| CallError::cannot("set the terminal's size", &error))
    }
}

/// Sends a signal to a child of the shim, whose pid is not reused before the shim reaps it. A pid of any other process
/// is refused. `signal` is a number, because a container may be stopped by a real-time signal, which has no name.
pub(super) fn send(pid: i32, signal: i32) -> Result<(), CallError> {
    if pid <= 1 {
        return Err(CallError::new(Kind::WrongState, "the process has not started yet"));
    }
    let process = match kernel::pidfd_open(pid) {
        Ok(process) => process,
        // The process has just ended.
        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => return Ok(()),
        Err(error) => return Err(CallError::cannot("open the process", &error)),
    };
    if !kernel::is_child(&process) {
        return Err(CallError::new(
            Kind::WrongState,
            format!("process {pid} is not a child of this pod's shim"),
        ));
    }
    let sent = kernel::send_signal(&process, signal);
    match sent.map_err(|error| (error.raw_os_error(), error)) {
        Ok(()) | Err((Some(libc::ESRCH), _)) => Ok(()),
        Err((Some(libc::EINVAL), _)) => {
            Err(CallError::new(Kind::Invalid, format!("invalid signal number {signal}")))
        }
        Err((_, error)) => Err(CallError::cannot("send the signal", &error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_is_not_a_child_gets_no_signal() {
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        assert!(send(std::os::unix::process::parent_id().cast_signed(), 0).is_err());
        assert!(send(pid, libc::SIGKILL).is_ok());
        assert!(!child.wait().unwrap().success());
        assert!(send(pid, libc::SIGKILL).is_ok(), "it has ended");
        assert!(send(0, libc::SIGKILL).is_err() && send(-1, libc::SIGKILL).is_err());
    }
}

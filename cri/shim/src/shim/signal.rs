//! Signal and Resize.

use coracle_proto::shim::error::Kind;
use coracle_proto::shim::{self as wire};

use super::Shim;
use crate::cgroup;
use crate::container::Phase;
use crate::fault::Fault;
use crate::kernel;

impl Shim {
    pub(super) fn signal(&mut self, signal: &wire::Signal) -> Result<(), Fault> {
        let id = &signal.container_id;
        let serial = self.serial_of(id)?;
        if !signal.exec_id.is_empty() {
            let exec = self.exec_of(id, &signal.exec_id)?;
            return send(exec.pid, signal.signal);
        }
        let Some(container) = self.containers.get(&serial) else { return Err(Fault::no_container(id)) };
        // What of it is there by now, CRIU included: the start fails, and that ends the container.
        if signal.all || matches!(container.phase, Phase::Restoring { .. }) {
            cgroup::signal(&self.pod.hierarchies, &container.cgroup, signal.signal);
            return Ok(());
        }
        match container.phase {
            Phase::Created | Phase::Starting { .. } | Phase::Running => send(container.pid, signal.signal),
            Phase::Creating { .. }
            | Phase::Restoring { .. }
            | Phase::Draining { .. }
            | Phase::Exited { .. } => Err(Fault::wrong_state(id, container.words())),
        }
    }

    pub(super) fn resize(&mut self, resize: &wire::Resize) -> Result<(), Fault> {
        let id = &resize.container_id;
        let master = self.container(id)?.stdio.master();
        let master = master.ok_or_else(|| Fault::new(Kind::WrongState, format!("{id} has no terminal")))?;
        let side = |value: u32| u16::try_from(value).unwrap_or(u16::MAX);
        kernel::set_window(master, side(resize.width), side(resize.height))
            .map_err(|error| Fault::doing("set the terminal's size", &error))
    }
}

/// Sends a signal to a child of the shim. Its number is its own until the shim waits for it; a number that is no
/// child's, whoever said it, is refused. Real-time signals have no name, but a container may be stopped by one.
pub(super) fn send(pid: i32, signal: i32) -> Result<(), Fault> {
    if pid <= 1 {
        return Err(Fault::new(Kind::WrongState, "the process has not started yet"));
    }
    let process = match kernel::pidfd_open(pid) {
        Ok(process) => process,
        // It has just ended: nothing is left to signal.
        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => return Ok(()),
        Err(error) => return Err(Fault::doing("open the process", &error)),
    };
    if !kernel::is_child(&process) {
        return Err(Fault::new(Kind::WrongState, format!("process {pid} is none of this pod's")));
    }
    let sent = kernel::send_signal(&process, signal);
    match sent.map_err(|error| (error.raw_os_error(), error)) {
        Ok(()) | Err((Some(libc::ESRCH), _)) => Ok(()),
        Err((Some(libc::EINVAL), _)) => {
            Err(Fault::new(Kind::Invalid, format!("there is no signal {signal}")))
        }
        Err((_, error)) => Err(Fault::doing("send the signal", &error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_is_no_child_gets_no_signal() {
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        assert!(send(std::os::unix::process::parent_id().cast_signed(), 0).is_err());
        assert!(send(pid, libc::SIGKILL).is_ok());
        assert!(!child.wait().unwrap().success());
        assert!(send(pid, libc::SIGKILL).is_ok(), "it has ended");
        assert!(send(0, libc::SIGKILL).is_err() && send(-1, libc::SIGKILL).is_err());
    }
}

//! Signal and Resize.

use coracle_proto::shim::error::Kind;
use coracle_proto::shim::{self as wire};
use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

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
            let pids = cgroup::processes(&self.pod.hierarchies, &container.cgroup);
            return pids.into_iter().try_for_each(|pid| send(pid, signal.signal));
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

/// Real-time signals have no name in `Signal`, but a container may be stopped by one.
pub(super) fn send(pid: i32, signal: i32) -> Result<(), Fault> {
    if pid <= 1 {
        return Err(Fault::new(Kind::WrongState, "the process has not started yet"));
    }
    let sent = match Signal::try_from(signal) {
        Ok(signal) => kill(Pid::from_raw(pid), signal),
        Err(_) => kernel::kill(pid, signal),
    };
    match sent {
        // It has just ended: nothing is left to signal.
        Ok(()) | Err(Errno::ESRCH) => Ok(()),
        Err(Errno::EINVAL) => Err(Fault::new(Kind::Invalid, format!("there is no signal {signal}"))),
        Err(errno) => Err(Fault::doing("send the signal", &errno)),
    }
}

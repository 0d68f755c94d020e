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
            // Of one that was waited for the number may be another process's.
            return if exec.exit.is_some() { Ok(()) } else { send(exec.pid, signal.signal) };
        }
        let Some(container) = self.containers.get(&serial) else { return Err(Fault::no_container(id)) };
        // What of it is there by now, CRIU included: the start fails, and that ends the container.
        if signal.all || matches!(container.phase, Phase::Restoring { .. }) {
            let members = cgroup::members(&self.pod.hierarchies, &container.cgroup);
            return members.iter().try_for_each(|member| sent(member.signal(signal.signal), signal.signal));
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

/// To a child that was not waited for. Real-time signals have no name in `Signal`, but a container may be stopped by one.
pub(super) fn send(pid: i32, signal: i32) -> Result<(), Fault> {
    if pid <= 1 {
        return Err(Fault::new(Kind::WrongState, "the process has not started yet"));
    }
    sent(kernel::kill(pid, signal).map_err(std::io::Error::from), signal)
}

fn sent(result: std::io::Result<()>, signal: i32) -> Result<(), Fault> {
    match result {
        Ok(()) => Ok(()),
        Err(error) => match error.raw_os_error() {
            // It has just ended: nothing is left to signal.
            Some(libc::ESRCH) => Ok(()),
            Some(libc::EINVAL) => Err(Fault::new(Kind::Invalid, format!("there is no signal {signal}"))),
            _ => Err(Fault::doing("send the signal", &error)),
        },
    }
}

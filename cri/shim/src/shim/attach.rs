//! Attach, CloseStdin and ReopenLog.

use coracle_proto::shim::{Attach, reply};

use super::{Answer, Shim};
use crate::container::Phase;
use crate::fault::Fault;

impl Shim {
    pub(super) fn attach(&mut self, attach: &Attach) -> Answer {
        let container = self.container(&attach.container_id)?;
        match container.phase {
            Phase::Created | Phase::Starting { .. } | Phase::Restoring { .. } | Phase::Running => {}
            Phase::Creating { .. } | Phase::Draining { .. } | Phase::Exited { .. } => {
                return Err(Fault::wrong_state(&container.id, container.words()));
            }
        }
        let (attached, fds) = container.stdio.attach(attach)?;
        Ok((reply::Result::Attached(attached), fds))
    }

    pub(super) fn close_stdin(&mut self, id: &str) -> Result<(), Fault> {
        self.container(id)?.stdio.close_stdin();
        Ok(())
    }

    pub(super) fn reopen_log(&mut self, id: &str) -> Result<(), Fault> {
        self.container(id)?.stdio.reopen_log().map_err(|error| Fault::doing("reopen the log", &error))?;
        coracle_fault::point("shim.log-reopened");
        Ok(())
    }
}

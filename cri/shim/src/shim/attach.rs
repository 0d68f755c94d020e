//! Attach, CloseStdin and ReopenLog.

use coracle_proto::shim::error::Kind;
use coracle_proto::shim::{Attach, reply};

use super::{Answer, Shim};
use crate::container::Phase;
use crate::fault::Fault;

/// As many descriptors are held for all who are attached: enough are left for what is to be made and run in the pod.
const MOST_ATTACHED: usize = 256;

impl Shim {
    pub(super) fn attach(&mut self, attach: &Attach) -> Answer {
        let attached: usize = self.containers.values().map(|container| container.stdio.attached()).sum();
        if attached >= MOST_ATTACHED {
            let message = "so many are attached to the pod's containers that no more can be";
            return Err(Fault::new(Kind::Internal, message));
        }
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

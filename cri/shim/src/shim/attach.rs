//! Attach, CloseStdin and ReopenLog.

use coracle_proto::shim::error::Kind;
use coracle_proto::shim::{Attach, reply};

use super::{CallResult, Shim};
use crate::call_error::CallError;
use crate::container::Phase;

/// Maximum descriptors of all attached clients of a pod. It leaves descriptors for creates and execs.
const MAX_ATTACHED: usize = 256;

impl Shim {
    pub(super) fn attach(&mut self, attach: &Attach) -> CallResult {
        let attached: usize =
            self.containers.values().map(|container| container.stdio.attached_descriptors()).sum();
        if attached >= MAX_ATTACHED {
            let message = format!(
                "the clients that are attached to the pod have {attached} streams, the maximum is {MAX_ATTACHED}"
            );
            return Err(CallError::new(Kind::Internal, message));
        }
        let container = self.container(&attach.container_id)?;
        match container.phase {
            Phase::Created | Phase::Starting { .. } | Phase::Restoring { .. } | Phase::Running => {}
            Phase::Creating { .. } | Phase::Draining { .. } | Phase::Exited { .. } => {
                return Err(CallError::wrong_state(&container.id, container.description()));
            }
        }
        let (attached, fds) = container.stdio.attach(attach)?;
        Ok((reply::Result::Attached(attached), fds))
    }

    pub(super) fn close_stdin(&mut self, id: &str) -> Result<(), CallError> {
        self.container(id)?.stdio.close_stdin();
        Ok(())
    }

    pub(super) fn reopen_log(&mut self, id: &str) -> Result<(), CallError> {
        self.container(id)?
            .stdio
            .reopen_log()
            .map_err(|error| CallError::cannot("reopen the log", &error))?;
        coracle_fault::point("shim.log-reopened");
        Ok(())
    }
}

//! Check of the machine's shutdown: a node that is shutting down rejects all new pods. Reason and message are
//! upstream's (`Admit` of `pkg/kubelet/nodeshutdown`, with the prefix of `rejectPod`).

use super::input::{AdmissionInput, refuse};
use crate::pod::state::Verdict;

pub(super) fn check(input: &AdmissionInput<'_>) -> Result<(), Verdict> {
    if input.is_shutting_down {
        let message = "Pod was rejected: Pod was rejected as the node is shutting down.";
        return Err(refuse("NodeShutdown", message));
    }
    Ok(())
}

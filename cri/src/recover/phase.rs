//! What became of containers while no runtime was there, by their records and their shims' word.

use std::sync::Arc;

use coracle_proto::cri::ContainerEventType::{self, ContainerStartedEvent, ContainerStoppedEvent};
use coracle_proto::shim::ContainerState;
use coracle_proto::shim::container_state::Phase;

use crate::container::Container;
use crate::records::{ContainerPhase, ExitRecord};

/// A transition that nobody was told of.
pub(super) struct Missed {
    pub(super) at: i64,
    pub(super) container: Arc<Container>,
    pub(super) what: ContainerEventType,
}

/// What a container went through between the phase on record and the one that it is in.
pub(super) fn missed(before: &ContainerPhase, container: &Arc<Container>) -> Vec<Missed> {
    let missed = |at, what| Missed { at, container: Arc::clone(container), what };
    let started = || missed(container.started_at(), ContainerStartedEvent);
    let stopped = |exit: &ExitRecord| missed(exit.finished_at, ContainerStoppedEvent);
    match (before, container.phase()) {
        (ContainerPhase::Created, ContainerPhase::Running { .. }) => vec![started()],
        // Not every one that ended was started.
        (ContainerPhase::Created, ContainerPhase::Exited(exit)) if exit.started_at == 0 => {
            vec![stopped(&exit)]
        }
        (ContainerPhase::Created, ContainerPhase::Exited(exit)) => vec![started(), stopped(&exit)],
        (ContainerPhase::Running { .. }, ContainerPhase::Exited(exit)) => vec![stopped(&exit)],
        _ => Vec::new(),
    }
}

/// The phase that a container is in by its shim's word. An end is noted by the caller.
pub(super) fn phase_now(before: &ContainerPhase, seen: &ContainerState) -> ContainerPhase {
    match (before, seen.phase()) {
        (ContainerPhase::Exited(_), _) => before.clone(),
        (_, Phase::Created) => ContainerPhase::Created,
        (ContainerPhase::Running { .. }, Phase::Running | Phase::Exited) => before.clone(),
        (_, Phase::Running | Phase::Exited) => ContainerPhase::Running { started_at: seen.started_at },
    }
}

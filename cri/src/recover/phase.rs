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
    match (before, known_phase(seen)) {
        (ContainerPhase::Exited(_), _) => before.clone(),
        (_, Phase::Created) => ContainerPhase::Created,
        (ContainerPhase::Running { .. }, Phase::Running | Phase::Exited) => before.clone(),
        (_, Phase::Running | Phase::Exited) => ContainerPhase::Running { started_at: seen.started_at },
    }
}

/// A phase that a later version has is the one that it is part of, by what else is said.
fn known_phase(seen: &ContainerState) -> Phase {
    Phase::try_from(seen.phase).unwrap_or(match seen {
        ContainerState { exit: Some(_), .. } => Phase::Exited,
        ContainerState { started_at: 1.., .. } => Phase::Running,
        _ => Phase::Created,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_phase_that_only_a_later_version_knows_is_part_of_one() {
        let running = ContainerPhase::Running { started_at: 7 };
        let seen = |phase, started_at| ContainerState { phase, started_at, ..ContainerState::default() };
        assert_eq!(phase_now(&running, &seen(9, 7)), running);
        assert_eq!(phase_now(&ContainerPhase::Created, &seen(9, 7)), running);
        assert_eq!(phase_now(&ContainerPhase::Created, &seen(9, 0)), ContainerPhase::Created);
    }
}

//! Phases of containers after a restart: compares the recorded phase with the shim's answer.

use std::sync::Arc;

use coracle_proto::cri::ContainerEventType::{self, ContainerStartedEvent, ContainerStoppedEvent};
use coracle_proto::shim::ContainerState;
use coracle_proto::shim::container_state::Phase;

use crate::container::Container;
use crate::records::{ContainerPhase, ExitRecord};

/// A transition that happened while no runtime was running.
pub(crate) struct MissedTransition {
    pub(crate) at: i64,
    pub(crate) container: Arc<Container>,
    pub(crate) what: ContainerEventType,
}

/// Transitions from the recorded phase of a container to its current phase.
pub(crate) fn missed_transitions(
    before: &ContainerPhase,
    container: &Arc<Container>,
) -> Vec<MissedTransition> {
    let transition = |at, what| MissedTransition { at, container: Arc::clone(container), what };
    let started = || transition(container.started_at(), ContainerStartedEvent);
    let stopped = |exit: &ExitRecord| transition(exit.finished_at, ContainerStoppedEvent);
    match (before, container.phase()) {
        (ContainerPhase::Created, ContainerPhase::Running { .. }) => vec![started()],
        // A container that ended without being started.
        (ContainerPhase::Created, ContainerPhase::Exited(exit)) if exit.started_at == 0 => {
            vec![stopped(&exit)]
        }
        (ContainerPhase::Created, ContainerPhase::Exited(exit)) => vec![started(), stopped(&exit)],
        (ContainerPhase::Running { .. }, ContainerPhase::Exited(exit)) => vec![stopped(&exit)],
        _ => Vec::new(),
    }
}

/// Current phase of a container according to its shim. The caller records an exit.
pub(crate) fn current_phase(before: &ContainerPhase, found: &ContainerState) -> ContainerPhase {
    match (before, known_phase(found)) {
        (ContainerPhase::Exited(_), _) => before.clone(),
        (_, Phase::Created) => ContainerPhase::Created,
        (ContainerPhase::Running { .. }, Phase::Running | Phase::Exited) => before.clone(),
        (_, Phase::Running | Phase::Exited) => ContainerPhase::Running { started_at: found.started_at },
    }
}

/// The shim's phase. An unknown phase (of a later version) is derived from the other fields.
fn known_phase(found: &ContainerState) -> Phase {
    Phase::try_from(found.phase).unwrap_or(match found {
        ContainerState { exit: Some(_), .. } => Phase::Exited,
        ContainerState { started_at: 1.., .. } => Phase::Running,
        _ => Phase::Created,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_phase_is_derived_from_the_other_fields() {
        let running = ContainerPhase::Running { started_at: 7 };
        let found = |phase, started_at| ContainerState { phase, started_at, ..ContainerState::default() };
        assert_eq!(current_phase(&running, &found(9, 7)), running);
        assert_eq!(current_phase(&ContainerPhase::Created, &found(9, 7)), running);
        assert_eq!(current_phase(&ContainerPhase::Created, &found(9, 0)), ContainerPhase::Created);
    }
}

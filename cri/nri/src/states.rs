//! The events already sent for each pod and container. So each stop and each removal is sent only once. The cause can
//! be a call, an exit or the removal of the pod.

use std::collections::HashMap;

use coracle_proto::nri::{Container, ContainerState};

/// The events already sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SentState {
    /// Stop and removal are still to be sent.
    Alive,
    /// The removal is still to be sent.
    Stopped,
}

/// The state of all pods and containers. Empty while no plugin is connected.
#[derive(Debug, Default)]
pub(crate) struct States {
    sent: HashMap<String, SentState>,
}

// === impl States ===

impl States {
    pub(crate) fn set(&mut self, id: &str, sent: SentState) {
        self.sent.insert(id.to_owned(), sent);
    }

    /// Marks the stop as sent. Returns false if it was sent before, or the object is unknown.
    pub(crate) fn stop(&mut self, id: &str) -> bool {
        match self.sent.get_mut(id) {
            Some(sent @ SentState::Alive) => {
                *sent = SentState::Stopped;
                true
            }
            Some(SentState::Stopped) | None => false,
        }
    }

    /// Marks the removal as sent. Returns false if it was sent before, or the object is unknown.
    pub(crate) fn remove(&mut self, id: &str) -> bool {
        self.sent.remove(id).is_some()
    }

    pub(crate) fn clear(&mut self) {
        self.sent = HashMap::new();
    }
}

/// The state that a container has when a plugin joins.
pub(crate) fn sent_state(container: &Container) -> SentState {
    if container.state == i32::from(ContainerState::ContainerStopped) {
        SentState::Stopped
    } else {
        SentState::Alive
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stop_and_a_removal_are_sent_once() {
        let mut states = States::default();
        assert!(!states.stop("a") && !states.remove("a"));
        states.set("a", SentState::Alive);
        assert!(states.stop("a") && !states.stop("a"));
        assert!(states.remove("a") && !states.remove("a"));
    }
}

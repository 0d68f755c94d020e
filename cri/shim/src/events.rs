//! Queue of exit events that the agent has not acknowledged yet.

use std::collections::VecDeque;

use coracle_proto::shim::{Event, Exit};

/// The queue, oldest first.
#[derive(Debug, Default)]
pub(crate) struct Events {
    last: u64,
    pending: VecDeque<Event>,
}

// === impl Events ===

impl Events {
    pub(crate) fn push(&mut self, container_id: &str, exec_id: &str, exit: Exit) -> &Event {
        self.last += 1;
        let event = Event {
            sequence: self.last,
            container_id: container_id.to_owned(),
            exec_id: exec_id.to_owned(),
            exited: Some(exit),
        };
        self.pending.push_back(event);
        // The queue has the new event, so the index is valid.
        &self.pending[self.pending.len() - 1]
    }

    pub(crate) fn acknowledge(&mut self, sequence: u64) {
        while self.pending.front().is_some_and(|event| event.sequence <= sequence) {
            self.pending.pop_front();
        }
        if self.pending.is_empty() {
            self.pending = VecDeque::new();
        }
    }

    /// Drops the events of a deleted container.
    pub(crate) fn remove_container(&mut self, container_id: &str) {
        self.pending.retain(|event| event.container_id != container_id);
    }

    pub(crate) fn pending(&self) -> impl ExactSizeIterator<Item = &Event> {
        self.pending.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_stay_until_acknowledged_and_sequence_numbers_only_grow() {
        let mut events = Events::default();
        ["a", "b", "c"].iter().for_each(|id| drop(events.push(id, "", Exit::default()).clone()));
        events.acknowledge(2);
        assert_eq!(events.pending().map(|e| e.sequence).collect::<Vec<_>>(), [3]);
        events.acknowledge(3);
        assert_eq!(events.push("d", "", Exit::default()).sequence, 4);
        events.remove_container("d");
        assert_eq!(events.pending().len(), 0);
    }
}

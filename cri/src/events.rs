//! Container events, sent to every listener at once and in order. A listener that does not read is
//! dropped rather than waited for: its stream ends, and it lists again.

use std::sync::Mutex;

use coracle_proto::cri::ContainerEventResponse;
use tokio::sync::mpsc;

use crate::lock::locked;

/// Events that may wait for one listener.
const BACKLOG: usize = 1024;

/// Who listens.
#[derive(Debug, Default)]
pub(crate) struct Events {
    listeners: Mutex<Vec<mpsc::Sender<ContainerEventResponse>>>,
}

// === impl Events ===

impl Events {
    pub(crate) fn listen(&self) -> mpsc::Receiver<ContainerEventResponse> {
        let (sender, receiver) = mpsc::channel(BACKLOG);
        locked(&self.listeners).push(sender);
        receiver
    }

    /// Whether an event would reach anybody. One that is gone counts until the next event.
    pub(crate) fn wanted(&self) -> bool {
        !locked(&self.listeners).is_empty()
    }

    pub(crate) fn send(&self, event: &ContainerEventResponse) {
        locked(&self.listeners).retain(|listener| listener.try_send(event.clone()).is_ok());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn every_listener_gets_every_event_in_order_and_a_gone_one_is_forgotten() {
        let events = Events::default();
        let mut first = events.listen();
        drop(events.listen());
        for created_at in 1..=3 {
            events.send(&ContainerEventResponse { created_at, ..Default::default() });
        }
        for created_at in 1..=3 {
            assert_eq!(first.recv().await.map(|event| event.created_at), Some(created_at));
        }
        drop(first);
        events.send(&ContainerEventResponse::default());
        assert!(!events.wanted());
    }
}

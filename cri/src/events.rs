//! Container events, sent to every listener at once and in order. A listener that does not read is
//! dropped rather than waited for: its stream ends with an error, and it lists again.
//!
//! What happens between the runtime's start and its first listener is kept for that one: what ended
//! while no runtime was there is found before anybody can listen.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use coracle_proto::cri::ContainerEventResponse;
use futures::{Stream, StreamExt, stream};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use crate::lock::locked;

/// Events that may wait for one listener.
const BACKLOG: usize = 1024;
/// Events that may wait for the first listener. With more, it is not waited for any longer.
const EARLY: usize = 256;

/// Who listens.
#[derive(Debug)]
pub(crate) struct Events {
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    listeners: Vec<Listener>,
    /// What the first listener will be told. None once it came.
    early: Option<VecDeque<ContainerEventResponse>>,
    ended: bool,
}

#[derive(Debug)]
struct Listener {
    sender: mpsc::Sender<ContainerEventResponse>,
    lost: Arc<AtomicBool>,
}

/// Why a listener's stream ended before its time: it left more than so many events unread.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("more than {BACKLOG} events were not read: list, and listen again")]
pub(crate) struct TooSlow;

// === impl Events ===

impl Default for Events {
    fn default() -> Self {
        let state = State { listeners: Vec::new(), early: Some(VecDeque::new()), ended: false };
        Self { state: Mutex::new(state) }
    }
}

impl Events {
    /// All events from now on, and to the first caller those since the start.
    pub(crate) fn listen(&self) -> impl Stream<Item = Result<ContainerEventResponse, TooSlow>> + use<> {
        let (sender, receiver) = mpsc::channel(BACKLOG);
        let lost = Arc::new(AtomicBool::new(false));
        let mut state = locked(&self.state);
        let early = state.early.take().unwrap_or_default();
        if !state.ended {
            state.listeners.push(Listener { sender, lost: Arc::clone(&lost) });
        }
        drop(state);
        let end = stream::once(async move { lost.load(Ordering::Acquire).then_some(Err(TooSlow)) });
        stream::iter(early)
            .chain(ReceiverStream::new(receiver))
            .map(Ok)
            .chain(end.filter_map(async |end| end))
    }

    /// Whether an event would reach anybody. One that is gone counts until the next event.
    pub(crate) fn wanted(&self) -> bool {
        let state = locked(&self.state);
        !state.listeners.is_empty() || state.early.is_some()
    }

    pub(crate) fn send(&self, event: &ContainerEventResponse) {
        let mut state = locked(&self.state);
        state.listeners.retain(|listener| listener.send(event.clone()));
        match &mut state.early {
            Some(early) if early.len() < EARLY => early.push_back(event.clone()),
            // Nobody listens on this node.
            _ => state.early = None,
        }
    }

    /// Ends all streams, and those that are still to come: the server stops.
    pub(crate) fn end(&self) {
        let mut state = locked(&self.state);
        state.listeners.clear();
        state.ended = true;
    }
}

// === impl Listener ===

impl Listener {
    /// False when it is not to be told any more.
    fn send(&self, event: ContainerEventResponse) -> bool {
        let sent = self.sender.try_send(event);
        if matches!(sent, Err(mpsc::error::TrySendError::Full(_))) {
            self.lost.store(true, Ordering::Release);
        }
        sent.is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(created_at: i64) -> ContainerEventResponse {
        ContainerEventResponse { created_at, ..Default::default() }
    }

    async fn all(
        events: Events,
        stream: impl Stream<Item = Result<ContainerEventResponse, TooSlow>>,
    ) -> Vec<Result<i64, TooSlow>> {
        events.end();
        stream.map(|event| event.map(|event| event.created_at)).collect().await
    }

    #[tokio::test]
    async fn every_listener_gets_every_event_in_order_and_a_gone_one_is_forgotten() {
        let events = Events::default();
        let first = events.listen();
        drop(events.listen());
        (1..=3).for_each(|number| events.send(&event(number)));
        let second = events.listen();
        events.send(&event(4));
        drop(second);
        events.send(&event(5));
        assert_eq!(locked(&events.state).listeners.len(), 1);
        assert_eq!(all(events, first).await, (1..=5).map(Ok).collect::<Vec<_>>());
    }

    #[tokio::test]
    async fn what_happened_before_the_first_listener_is_told_to_it_alone() {
        let events = Events::default();
        events.send(&event(1));
        let (first, second) = (events.listen(), events.listen());
        events.send(&event(2));
        assert_eq!(
            second.take(1).map(|event| event.expect("event").created_at).collect::<Vec<_>>().await,
            [2]
        );
        assert_eq!(all(events, first).await, [Ok(1), Ok(2)]);
    }

    #[tokio::test]
    async fn a_listener_that_does_not_read_is_told_so_in_the_end() {
        let events = Events::default();
        let slow = events.listen();
        let many = i64::try_from(BACKLOG).expect("a small number");
        (0..many + 2).for_each(|number| events.send(&event(number)));
        assert!(!events.wanted());
        let seen = all(events, slow).await;
        assert_eq!(seen.len(), BACKLOG + 1);
        assert_eq!(seen.last(), Some(&Err(TooSlow)));
    }

    #[test]
    fn nobody_is_waited_for_forever() {
        let events = Events::default();
        (0..300).for_each(|number| events.send(&event(number)));
        assert!(!events.wanted());
    }
}

//! Delivery of container events to all listeners, in order.
//!
//! A listener that does not read is dropped: its stream ends with an error, and the client lists the containers again.
//!
//! Events before the first listener are kept for that listener. Among them are the events that the recovery found at
//! the start.
//!
//! Every event has a number, which is in the record of its object before the event is sent. The number of the last delivered
//! event is kept in a file. The next start of the runtime replays events with higher numbers, see `event_outbox`. An event is
//! delivered when its stream hands it to the transport.

mod delivered;
mod item;

use std::collections::VecDeque;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use coracle_proto::cri::ContainerEventResponse;
use futures::{Stream, StreamExt, stream};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use self::delivered::Delivered;
pub(crate) use self::item::Item;
use crate::error::Error;
use crate::lock::locked;

/// Maximum undelivered events of one listener.
const BACKLOG: usize = 1024;
/// Maximum events that are kept for the first listener after the start. If there are more, all are dropped, because no
/// client listens.
const MAX_EARLY_EVENTS: usize = 256;

/// The listeners of container events.
#[derive(Debug)]
pub(crate) struct Events {
    state: Mutex<State>,
    /// The last number. Locked from the allocation of a number until its event is sent, so that events are sent in order.
    numbers: Mutex<u64>,
    delivered: Arc<Delivered>,
}

#[derive(Debug)]
struct State {
    listeners: Vec<Listener>,
    /// Events for the first listener. `None` after the first listener has connected.
    early: Option<VecDeque<Item>>,
    /// Maximum length of `early`. `None` during the recovery: there is no limit.
    room: Option<usize>,
    /// Set when the server ends. `true` means that later events are recorded for the next start.
    ended: Option<bool>,
}

#[derive(Debug)]
struct Listener {
    /// Listeners share the events, so a slow listener needs no copies of them.
    sender: mpsc::Sender<Arc<Item>>,
    lost: Arc<AtomicBool>,
}

/// The exclusive right to number and send events.
#[derive(Debug)]
pub(crate) struct SendGuard<'a> {
    events: &'a Events,
    last: MutexGuard<'a, u64>,
}

/// The error at the end of a slow listener's stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("more than {BACKLOG} events were not read; list the containers and subscribe again")]
pub(crate) struct TooSlow;

// === impl Events ===

impl Events {
    /// Opens the file `delivered`, and continues after the last delivered event of an earlier start.
    pub(crate) fn open(delivered: &Path) -> Result<Self, Error> {
        let delivered = Delivered::open(delivered)?;
        let state = State { listeners: Vec::new(), early: Some(VecDeque::new()), room: None, ended: None };
        Ok(Self {
            state: Mutex::new(state),
            numbers: Mutex::new(delivered.last()),
            delivered: Arc::new(delivered),
        })
    }

    /// The number of the last delivered event. Events of earlier starts count, too.
    pub(crate) fn last_delivered(&self) -> u64 {
        self.delivered.last()
    }

    /// A stream of all events from now on. The first caller also gets the events since the start.
    pub(crate) fn listen(&self) -> impl Stream<Item = Result<ContainerEventResponse, TooSlow>> + use<> {
        let (sender, receiver) = mpsc::channel(BACKLOG);
        let lost = Arc::new(AtomicBool::new(false));
        let mut state = locked(&self.state);
        let early = state.early.take().unwrap_or_default();
        if state.ended.is_none() {
            state.listeners.push(Listener { sender, lost: Arc::clone(&lost) });
        }
        drop(state);
        let end = stream::once(async move { lost.load(Ordering::Acquire).then_some(Err(TooSlow)) });
        let delivered = Arc::clone(&self.delivered);
        let deliver = move |item: Arc<Item>| {
            delivered.set_last(item.number);
            Ok(Arc::unwrap_or_clone(item).event)
        };
        stream::iter(early.into_iter().map(Arc::new))
            .chain(ReceiverStream::new(receiver))
            .map(deliver)
            .chain(end.filter_map(async |end| end))
    }

    /// Whether an event has a current or future listener.
    fn wanted(&self) -> bool {
        let mut state = locked(&self.state);
        state.listeners.retain(|listener| !listener.sender.is_closed());
        state.ended.unwrap_or_else(|| state.has_listeners())
    }

    /// Waits until no other event is being numbered and sent.
    pub(crate) fn send_guard(&self) -> SendGuard<'_> {
        SendGuard { events: self, last: locked(&self.numbers) }
    }

    /// Queues events of earlier starts before all events of this start.
    pub(crate) fn send_first(&self, items: Vec<Item>) {
        items.iter().for_each(|item| self.delivered.keep(item));
        if let Some(early) = &mut locked(&self.state).early {
            items.into_iter().rev().for_each(|item| early.push_front(item));
        }
    }

    /// Ends the recovery: listeners can connect, and the queue for the first listener is limited.
    pub(crate) fn open_to_listeners(&self) {
        let mut state = locked(&self.state);
        state.room = state.early.as_ref().map(|early| early.len() + MAX_EARLY_EVENTS);
    }

    /// Ends all current and future streams: the server stops.
    pub(crate) fn end(&self) {
        let mut state = locked(&self.state);
        state.ended = Some(state.has_listeners());
        state.listeners.clear();
    }
}

// === impl State ===

impl State {
    fn has_listeners(&self) -> bool {
        !self.listeners.is_empty() || self.early.is_some()
    }
}

// === impl SendGuard ===

impl SendGuard<'_> {
    /// The next number. `None` without listeners.
    pub(crate) fn number(&mut self) -> Option<u64> {
        self.events.wanted().then(|| {
            *self.last += 1;
            *self.last
        })
    }

    /// Ensures that the next number is above this one.
    pub(crate) fn skip(&mut self, number: u64) {
        *self.last = number.max(*self.last);
    }

    pub(crate) fn last(&self) -> u64 {
        *self.last
    }

    pub(crate) fn send(&self, item: Item) {
        let mut state = locked(&self.events.state);
        if state.ended.is_some() {
            return;
        }
        self.events.delivered.keep(&item);
        let shared = Arc::new(item);
        state.listeners.retain(|listener| listener.send(Arc::clone(&shared)));
        let room = state.room;
        match &mut state.early {
            Some(early) if room.is_none_or(|room| early.len() < room) => {
                early.push_back(Arc::unwrap_or_clone(shared));
            }
            Some(_) => {
                // The queue is full, so no client subscribes to events on this node.
                self.events.delivered.set_last(shared.number);
                state.early = None;
            }
            None => {}
        }
    }
}

// === impl Listener ===

impl Listener {
    /// Queues an event. False if the listener is gone or too slow.
    fn send(&self, item: Arc<Item>) -> bool {
        let sent = self.sender.try_send(item);
        if matches!(sent, Err(mpsc::error::TrySendError::Full(_))) {
            self.lost.store(true, Ordering::Release);
        }
        sent.is_ok()
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use tempfile::TempDir;

    use super::*;

    fn open(dir: &TempDir) -> Events {
        Events::open(&dir.path().join("delivered")).expect("events")
    }

    fn events() -> Events {
        open(&tempfile::tempdir().expect("directory"))
    }

    fn send(events: &Events, created_at: i64) {
        let mut send_guard = events.send_guard();
        let Some(number) = send_guard.number() else { return };
        let event = ContainerEventResponse { created_at, ..Default::default() };
        send_guard.send(Item { number, event, removed: None });
    }

    async fn all(
        events: Events,
        stream: impl Stream<Item = Result<ContainerEventResponse, TooSlow>>,
    ) -> Vec<Result<i64, TooSlow>> {
        events.end();
        stream.map(|event| event.map(|event| event.created_at)).collect().await
    }

    #[tokio::test]
    async fn every_listener_gets_every_event_in_order() {
        let events = events();
        let first = events.listen();
        drop(events.listen());
        (1..=3).for_each(|number| send(&events, number));
        let second = events.listen();
        send(&events, 4);
        drop(second);
        send(&events, 5);
        assert_eq!(locked(&events.state).listeners.len(), 1);
        assert_eq!(all(events, first).await, (1..=5).map(Ok).collect::<Vec<_>>());
    }

    #[tokio::test]
    async fn early_events_are_delivered_to_the_first_listener_only() {
        let events = events();
        send(&events, 1);
        let (first, second) = (events.listen(), events.listen());
        send(&events, 2);
        assert_eq!(
            second.take(1).map(|event| event.expect("event").created_at).collect::<Vec<_>>().await,
            [2]
        );
        assert_eq!(all(events, first).await, [Ok(1), Ok(2)]);
    }

    #[tokio::test]
    async fn a_slow_listener_gets_an_error_at_the_end() {
        let events = events();
        let slow = events.listen();
        let many = i64::try_from(BACKLOG).expect("a small number");
        (0..many + 2).for_each(|number| send(&events, number));
        assert!(!events.wanted());
        let received = all(events, slow).await;
        assert_eq!(received.len(), BACKLOG + 1);
        assert_eq!(received.last(), Some(&Err(TooSlow)));
    }

    #[test]
    fn the_queue_for_the_first_listener_is_limited() {
        let dir = tempfile::tempdir().expect("directory");
        let events = open(&dir);
        events.open_to_listeners();
        let removed = dir.path().join("1.container");
        std::fs::write(&removed, "").expect("write");
        let number = events.send_guard().number().expect("a number");
        events.send_guard().send(Item { number, event: Default::default(), removed: Some(removed.clone()) });
        (0..300).for_each(|number| send(&events, number));
        assert!(!events.wanted());
        // Dropped events are not replayed by the next start.
        assert!(!removed.exists());
        assert_eq!((open(&dir).last_delivered(), events.send_guard().last()), (257, 257));
    }

    #[tokio::test]
    async fn removed_records_are_deleted_with_the_next_delivered_event() {
        let dir = tempfile::tempdir().expect("directory");
        let events = open(&dir);
        let leaves = events.listen();
        let removed: Vec<PathBuf> = (1..=3).map(|number| dir.path().join(format!("{number}"))).collect();
        let send = |file: &PathBuf| {
            std::fs::write(file, "").expect("write");
            let number = events.send_guard().number().expect("a number");
            events.send_guard().send(Item { number, event: Default::default(), removed: Some(file.clone()) });
        };
        removed[..2].iter().for_each(send);
        drop(leaves);
        assert!(removed[0].exists() && removed[1].exists(), "the next start replays them");
        let mut next = Box::pin(events.listen());
        send(&removed[2]);
        next.next().await.expect("an event").expect("event");
        assert_eq!(removed.iter().filter(|file| file.exists()).count(), 0);
    }

    #[tokio::test]
    async fn the_next_start_reads_the_last_delivered_event() {
        let dir = tempfile::tempdir().expect("directory");
        let events = open(&dir);
        (1..=12).for_each(|number| send(&events, number));
        let mut listener = Box::pin(events.listen());
        for _ in 0..11 {
            listener.next().await.expect("an event").expect("event");
        }
        let next = open(&dir);
        assert_eq!(next.last_delivered(), 11);
        next.send_guard().skip(12);
        assert_eq!(next.send_guard().number(), Some(13));
    }

    #[tokio::test]
    async fn replayed_events_come_first_without_a_limit() {
        let events = events();
        send(&events, 999);
        let left = (0..400).map(|created_at| {
            let event = ContainerEventResponse { created_at, ..Default::default() };
            Item { number: 1, event, removed: None }
        });
        events.send_first(left.collect());
        // Events of the recovery are not limited.
        (1000..1400).for_each(|number| send(&events, number));
        events.open_to_listeners();
        send(&events, 1400);
        let listener = events.listen();
        let expected: Vec<_> = (0..400).chain(999..=1400).map(Ok).collect();
        assert_eq!(all(events, listener).await, expected);
    }

    #[test]
    fn no_number_is_allocated_without_listeners() {
        let events = events();
        drop(events.listen());
        assert_eq!(events.send_guard().number(), None);
    }

    #[test]
    fn events_after_the_end_are_numbered_for_the_next_start() {
        let events = events();
        let _listener = events.listen();
        events.end();
        assert_eq!(events.send_guard().number(), Some(1));
    }
}

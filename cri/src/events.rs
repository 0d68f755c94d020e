//! Container events, sent to every listener at once and in order. A listener that does not read is
//! dropped rather than waited for: its stream ends with an error, and it lists again.
//!
//! What happens between the runtime's start and its first listener is kept for that one: what ended
//! while no runtime was there is found before anybody can listen, and all of it is kept.
//!
//! Every event has a number, which the record of its object has too, written before the event is sent. What
//! is numbered above the last that a listener took is told by the next life of the runtime, see `telling`. An event is
//! taken when its stream hands it to the transport.

mod delivered;

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use coracle_proto::cri::ContainerEventResponse;
use futures::{Stream, StreamExt, stream};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use self::delivered::Delivered;
use crate::error::Error;
use crate::lock::locked;

/// Events that may wait for one listener.
const BACKLOG: usize = 1024;
/// Events that may wait for the first listener, beside those of earlier lives and what was found at the start. With
/// more, it is not waited for any longer.
const EARLY: usize = 256;

/// Who listens.
#[derive(Debug)]
pub(crate) struct Events {
    state: Mutex<State>,
    /// The last number given. Held from a number's giving to its sending, so that they are sent in their order.
    numbers: Mutex<u64>,
    delivered: Arc<Delivered>,
}

#[derive(Debug)]
struct State {
    listeners: Vec<Listener>,
    /// What the first listener will be told. None once it came.
    early: Option<VecDeque<Item>>,
    /// How many of those may be. None while nobody can listen yet.
    room: Option<usize>,
    /// Set by the server's end: whether what comes after it is for the next life's listeners.
    ended: Option<bool>,
}

/// An event, and what there is to do when it was taken.
#[derive(Debug, Clone)]
pub(crate) struct Item {
    pub(crate) number: u64,
    pub(crate) event: ContainerEventResponse,
    /// The record of what was removed, kept until somebody was told so.
    pub(crate) removed: Option<PathBuf>,
}

#[derive(Debug)]
struct Listener {
    sender: mpsc::Sender<Item>,
    lost: Arc<AtomicBool>,
}

/// The right to send events. Nobody else has it meanwhile.
#[derive(Debug)]
pub(crate) struct Turn<'a> {
    events: &'a Events,
    last: MutexGuard<'a, u64>,
}

/// Why a listener's stream ended before its time: it left more than so many events unread.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("more than {BACKLOG} events were not read: list, and listen again")]
pub(crate) struct TooSlow;

// === impl Events ===

impl Events {
    /// Goes on where the life before ended, as a file says.
    pub(crate) fn open(delivered: &Path) -> Result<Self, Error> {
        let delivered = Delivered::open(delivered)?;
        let state = State { listeners: Vec::new(), early: Some(VecDeque::new()), room: None, ended: None };
        Ok(Self {
            state: Mutex::new(state),
            numbers: Mutex::new(delivered.last()),
            delivered: Arc::new(delivered),
        })
    }

    /// The number of the last event that a listener took, in this life or an earlier one.
    pub(crate) fn last_delivered(&self) -> u64 {
        self.delivered.last()
    }

    /// All events from now on, and to the first caller those since the start.
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
        let taken = move |item: Item| {
            delivered.pass(item.number);
            Ok(item.event)
        };
        stream::iter(early)
            .chain(ReceiverStream::new(receiver))
            .map(taken)
            .chain(end.filter_map(async |end| end))
    }

    /// Whether an event would reach anybody.
    fn wanted(&self) -> bool {
        let mut state = locked(&self.state);
        state.listeners.retain(|listener| !listener.sender.is_closed());
        state.ended.unwrap_or_else(|| state.somebody())
    }

    /// Waits until nobody else is about to send.
    pub(crate) fn turn(&self) -> Turn<'_> {
        Turn { events: self, last: locked(&self.numbers) }
    }

    /// What earlier lives left to tell, in order: before all that this one found.
    pub(crate) fn send_first(&self, items: Vec<Item>) {
        items.iter().for_each(|item| self.delivered.keep(item));
        if let Some(early) = &mut locked(&self.state).early {
            items.into_iter().rev().for_each(|item| early.push_front(item));
        }
    }

    /// From now on somebody can listen, and is not waited for without end.
    pub(crate) fn open_to_listeners(&self) {
        let mut state = locked(&self.state);
        state.room = state.early.as_ref().map(|early| early.len() + EARLY);
    }

    /// Ends all streams, and those that are still to come: the server stops.
    pub(crate) fn end(&self) {
        let mut state = locked(&self.state);
        state.ended = Some(state.somebody());
        state.listeners.clear();
    }
}

// === impl State ===

impl State {
    fn somebody(&self) -> bool {
        !self.listeners.is_empty() || self.early.is_some()
    }
}

// === impl Turn ===

impl Turn<'_> {
    /// The next number, if anybody is to be told.
    pub(crate) fn number(&mut self) -> Option<u64> {
        self.events.wanted().then(|| {
            *self.last += 1;
            *self.last
        })
    }

    /// No number up to this one is given again.
    pub(crate) fn skip(&mut self, number: u64) {
        *self.last = number.max(*self.last);
    }

    pub(crate) fn last(&self) -> u64 {
        *self.last
    }

    pub(crate) fn send(&self, item: &Item) {
        let mut state = locked(&self.events.state);
        if state.ended.is_some() {
            return;
        }
        self.events.delivered.keep(item);
        state.listeners.retain(|listener| listener.send(item.clone()));
        let room = state.room;
        match &mut state.early {
            Some(early) if room.is_none_or(|room| early.len() < room) => early.push_back(item.clone()),
            Some(_) => {
                // Nobody listens on this node.
                self.events.delivered.pass(item.number);
                state.early = None;
            }
            None => {}
        }
    }
}

// === impl Listener ===

impl Listener {
    /// False when it is not to be told any more.
    fn send(&self, item: Item) -> bool {
        let sent = self.sender.try_send(item);
        if matches!(sent, Err(mpsc::error::TrySendError::Full(_))) {
            self.lost.store(true, Ordering::Release);
        }
        sent.is_ok()
    }
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::*;

    fn open(dir: &TempDir) -> Events {
        Events::open(&dir.path().join("told")).expect("events")
    }

    fn events() -> Events {
        open(&tempfile::tempdir().expect("directory"))
    }

    fn send(events: &Events, created_at: i64) {
        let mut turn = events.turn();
        let Some(number) = turn.number() else { return };
        let event = ContainerEventResponse { created_at, ..Default::default() };
        turn.send(&Item { number, event, removed: None });
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
    async fn what_happened_before_the_first_listener_is_told_to_it_alone() {
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
    async fn a_listener_that_does_not_read_is_told_so_in_the_end() {
        let events = events();
        let slow = events.listen();
        let many = i64::try_from(BACKLOG).expect("a small number");
        (0..many + 2).for_each(|number| send(&events, number));
        assert!(!events.wanted());
        let seen = all(events, slow).await;
        assert_eq!(seen.len(), BACKLOG + 1);
        assert_eq!(seen.last(), Some(&Err(TooSlow)));
    }

    #[test]
    fn nobody_is_waited_for_forever() {
        let dir = tempfile::tempdir().expect("directory");
        let events = open(&dir);
        events.open_to_listeners();
        let removed = dir.path().join("1.container");
        std::fs::write(&removed, "").expect("write");
        let number = events.turn().number().expect("a number");
        events.turn().send(&Item { number, event: Default::default(), removed: Some(removed.clone()) });
        (0..300).for_each(|number| send(&events, number));
        assert!(!events.wanted());
        // What waited is waived, also for the next life.
        assert!(!removed.exists());
        assert_eq!((open(&dir).last_delivered(), events.turn().last()), (257, 257));
    }

    #[tokio::test]
    async fn what_a_listener_left_when_it_went_is_forgotten_with_what_the_next_one_takes() {
        let dir = tempfile::tempdir().expect("directory");
        let events = open(&dir);
        let leaves = events.listen();
        let removed: Vec<PathBuf> = (1..=3).map(|number| dir.path().join(format!("{number}"))).collect();
        let send = |file: &PathBuf| {
            std::fs::write(file, "").expect("write");
            let number = events.turn().number().expect("a number");
            events.turn().send(&Item { number, event: Default::default(), removed: Some(file.clone()) });
        };
        removed[..2].iter().for_each(send);
        drop(leaves);
        assert!(removed[0].exists() && removed[1].exists(), "the next life tells it");
        let mut next = Box::pin(events.listen());
        send(&removed[2]);
        next.next().await.expect("an event").expect("event");
        assert_eq!(removed.iter().filter(|file| file.exists()).count(), 0);
    }

    #[tokio::test]
    async fn the_next_life_knows_what_was_taken() {
        let dir = tempfile::tempdir().expect("directory");
        let events = open(&dir);
        (1..=12).for_each(|number| send(&events, number));
        let mut listener = Box::pin(events.listen());
        for _ in 0..11 {
            listener.next().await.expect("an event").expect("event");
        }
        let next = open(&dir);
        assert_eq!(next.last_delivered(), 11);
        next.turn().skip(12);
        assert_eq!(next.turn().number(), Some(13));
    }

    #[tokio::test]
    async fn what_earlier_lives_left_comes_first_and_is_not_too_much() {
        let events = events();
        send(&events, 999);
        let left = (0..400).map(|created_at| {
            let event = ContainerEventResponse { created_at, ..Default::default() };
            Item { number: 1, event, removed: None }
        });
        events.send_first(left.collect());
        // What is found at the start, however much it is.
        (1000..1400).for_each(|number| send(&events, number));
        events.open_to_listeners();
        send(&events, 1400);
        let listener = events.listen();
        let expected: Vec<_> = (0..400).chain(999..=1400).map(Ok).collect();
        assert_eq!(all(events, listener).await, expected);
    }

    #[test]
    fn nothing_is_numbered_for_who_is_gone() {
        let events = events();
        drop(events.listen());
        assert_eq!(events.turn().number(), None);
    }

    #[test]
    fn what_comes_after_the_end_is_numbered_for_the_next_life() {
        let events = events();
        let _listener = events.listen();
        events.end();
        assert_eq!(events.turn().number(), Some(1));
    }
}

//! Watches. The collection queues events for each watcher. A watch ends when its client drops the receiver, or when the
//! collection removes the watcher.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, OnceLock, Weak,
        atomic::{AtomicUsize, Ordering},
    },
};

use tokio::sync::mpsc;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::{Object, Scope, Shared};
use crate::unread_events::UnreadEvents;

/// Maximum number of queued events of a watcher. A slower watcher is disconnected and can resume.
const MAX_QUEUED_EVENTS: usize = 4096;
/// Maximum bytes of the queued events of a watcher. The queue may be the only owner of these objects.
const MAX_QUEUED_BYTES: usize = 4 << 20;

/// An event of a watch.
#[derive(Clone, Debug)]
pub(crate) enum Event {
    Added(Arc<Object>),
    Modified(Arc<Object>),
    Deleted(Arc<Object>),
    /// All events up to this revision were sent.
    Bookmark(u64),
    /// The initial objects at this revision were sent.
    InitialEnd(u64),
}

/// The sending half of a watch.
pub(crate) struct Watcher {
    pub(crate) scope: Scope,
    pub(crate) bookmarks: bool,
    /// Revision of the newest queued event, or of the watch's start if there is none.
    pub(super) sent: u64,
    /// The watch begins after this revision, which may be in the future. Events up to it are not queued.
    pub(super) after: u64,
    events: mpsc::Sender<Event>,
    link: Arc<Link>,
    /// Cancelled when the collection removes the watcher.
    _cut: DropGuard,
}

/// The receiving half of a watch. Dropping it locks the collection and removes the watcher, so it must not be dropped
/// while the caller holds that lock.
pub(crate) struct Events {
    pub(super) events: mpsc::Receiver<Event>,
    link: Arc<Link>,
    /// Cancelled when no more events will be queued.
    pub(crate) cut: CancellationToken,
}

/// State that both halves share.
#[derive(Default)]
struct Link {
    /// Bytes of the queued events.
    queued: AtomicUsize,
    /// The unread events of the watch's owner. `None` without a limit.
    unread: Option<Arc<UnreadEvents>>,
    /// Set when the collection adds the watcher.
    registration: OnceLock<Registration>,
}

/// A watcher's registration in a collection.
struct Registration {
    collection: Weak<Shared>,
    number: u64,
}

/// The watchers of a collection.
#[derive(Default)]
pub(super) struct Watchers {
    /// By number, in the order of their start.
    running: BTreeMap<u64, Watcher>,
    next: u64,
    collection: Weak<Shared>,
}

// === impl Watcher ===

impl Watcher {
    /// A watch without a limit for its owner.
    pub(crate) fn new(scope: Scope, bookmarks: bool) -> (Self, Events) {
        Self::counted(scope, bookmarks, None)
    }

    /// A watch whose queued events count as unread events of its owner.
    pub(crate) fn counted(
        scope: Scope,
        bookmarks: bool,
        unread: Option<Arc<UnreadEvents>>,
    ) -> (Self, Events) {
        let (events, receiver) = mpsc::channel(MAX_QUEUED_EVENTS);
        let (link, cut) = (Arc::new(Link { unread, ..Link::default() }), CancellationToken::new());
        let received = Events { events: receiver, link: link.clone(), cut: cut.clone() };
        (Self { scope, bookmarks, sent: 0, after: 0, events, link, _cut: cut.drop_guard() }, received)
    }

    /// Queues an event, if the watch has begun. Returns false if the queue is full, or if the owner has too many unread
    /// events: the collection then removes the watcher.
    pub(super) fn send(&mut self, event: Event, revision: u64) -> bool {
        if revision <= self.after {
            return true;
        }
        self.sent = revision;
        let weight = event.weight();
        let before = self.link.queued.fetch_add(weight, Ordering::Relaxed);
        let is_within = self.link.unread.as_ref().is_none_or(|unread| unread.add(weight));
        is_within && before <= MAX_QUEUED_BYTES && self.events.try_send(event).is_ok()
    }
}

// === impl Events ===

impl Events {
    pub(crate) async fn recv(&mut self) -> Option<Event> {
        let event = self.events.recv().await?;
        self.link.remove(event.weight());
        Some(event)
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        if let Some(place) = self.link.registration.get()
            && let Some(collection) = place.collection.upgrade()
        {
            collection.lock().end_watch(place.number);
        }
        // No more events are queued. Those that the client did not read count no longer.
        self.link.remove(self.link.queued.load(Ordering::Relaxed));
    }
}

// === impl Link ===

impl Link {
    /// Ends the count of queued bytes.
    fn remove(&self, bytes: usize) {
        self.queued.fetch_sub(bytes, Ordering::Relaxed);
        if let Some(unread) = &self.unread {
            unread.remove(bytes);
        }
    }
}

// === impl Event ===

impl Event {
    /// Bytes that the event may keep in memory.
    fn weight(&self) -> usize {
        match self {
            Event::Added(object) | Event::Modified(object) | Event::Deleted(object) => object.json_len(),
            Event::Bookmark(_) | Event::InitialEnd(_) => 0,
        }
    }
}

// === impl Watchers ===

impl Watchers {
    /// An empty set of watchers for a collection.
    pub(super) fn of(collection: Weak<Shared>) -> Self {
        Self { collection, ..Self::default() }
    }

    pub(super) fn add(&mut self, watcher: Watcher) {
        let place = Registration { collection: self.collection.clone(), number: self.next };
        // A watcher is added to one collection only, so the value is not set yet.
        let _added = watcher.link.registration.set(place);
        self.running.insert(self.next, watcher);
        self.next += 1;
    }

    pub(super) fn remove(&mut self, number: u64) {
        self.running.remove(&number);
    }

    /// Removes the watchers for which `keep` returns false.
    pub(super) fn retain(&mut self, mut keep: impl FnMut(&mut Watcher) -> bool) {
        self.running.retain(|_, watcher| keep(watcher));
    }

    pub(super) fn clear(&mut self) {
        self.running.clear();
    }

    pub(super) fn len(&self) -> usize {
        self.running.len()
    }
}

#[cfg(test)]
mod tests {
    use coracle_kinds::kind::by_kind;

    use super::*;
    use crate::cache::Cache;

    #[tokio::test]
    async fn a_watch_ends_with_either_of_its_ends() {
        let (cache, kind) = (Cache::new(1), by_kind("v1", "ConfigMap").unwrap());
        let collection = cache.of(kind).unwrap();
        let watch = || {
            let (watcher, events) = Watcher::new(Scope::default(), false);
            collection.lock().watch_from_now(watcher, 1);
            events
        };
        let (first, mut second, third) = (watch(), watch(), watch());
        assert_eq!(collection.lock().watchers(), 3);
        drop(first);
        drop(third);
        assert_eq!(collection.lock().watchers(), 1, "without an event");
        cache.remove("", "configmaps");
        assert!(second.recv().await.is_none() && second.cut.is_cancelled());
        drop(second);
        assert_eq!(collection.lock().watchers(), 0);
    }

    #[tokio::test]
    async fn the_unread_events_of_an_owner_are_limited() {
        let unread = Arc::<UnreadEvents>::default();
        let kind = by_kind("v1", "ConfigMap").unwrap();
        let value = serde_json::json!({"metadata": {"name": "n"}, "data": {"a": "x".repeat(1 << 20)}});
        let object = Arc::new(Object::of(kind, "k".into(), 1, &value));
        let watches = (0..30).map(|_| Watcher::counted(Scope::default(), false, Some(unread.clone())));
        let mut watches: Vec<_> = watches.collect();
        let mut send = |revision: u64| {
            let of_one = |(watcher, _): &mut (Watcher, Events)| {
                watcher.send(Event::Modified(object.clone()), revision)
            };
            watches.iter_mut().map(of_one).filter(|is_sent| *is_sent).count()
        };
        assert_eq!([send(1), send(2)], [30, 30]);
        assert!(send(3) < 10, "the limit of all watches is below the sum of their limits");
        for (_, events) in &mut watches {
            events.recv().await.unwrap();
        }
        drop(watches);
        assert!(unread.add(0) && Arc::strong_count(&unread) == 1);
        assert_eq!(format!("{unread:?}"), "UnreadEvents(0)");
    }

    #[test]
    fn an_end_that_was_not_registered_is_dropped() {
        let (watcher, events) = Watcher::new(Scope::default(), false);
        drop(events);
        assert!(watcher.events.is_closed());
    }
}

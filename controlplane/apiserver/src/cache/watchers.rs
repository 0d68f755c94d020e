//! Watches. The collection queues events for each watcher. A watch ends when its client drops the receiver, or when the
//! collection removes the watcher.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::{
        Arc, OnceLock, Weak,
        atomic::{AtomicUsize, Ordering},
    },
};

use tokio::sync::mpsc;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::{Object, Scope, Shared};
use crate::unread_bytes::Reader;

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
    events: mpsc::Sender<Queued>,
    link: Arc<Link>,
    /// The reader of the watch. `None` without a limit.
    reader: Option<Arc<Reader>>,
    /// Cancelled when the collection removes the watcher.
    _cut: DropGuard,
}

/// The receiving half of a watch. Dropping it locks the collection and removes the watcher, so it must not be dropped
/// while the caller holds that lock.
pub(crate) struct Events {
    events: mpsc::Receiver<Queued>,
    link: Arc<Link>,
    /// Cancelled when no more events will be queued.
    pub(crate) cut: CancellationToken,
}

/// An event in the queue of a watch. Its bytes count as unread until it is dropped.
struct Queued {
    event: Event,
    reader: Option<Arc<Reader>>,
}

/// State that both halves share.
#[derive(Default)]
struct Link {
    /// Bytes of the queued events.
    queued: AtomicUsize,
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
    running: BTreeMap<u64, Running>,
    /// Numbers of the watchers that select the pods of one node, by node.
    of_nodes: HashMap<Box<str>, BTreeSet<u64>>,
    /// Numbers of the other watchers.
    others: BTreeSet<u64>,
    next: u64,
    collection: Weak<Shared>,
}

/// A watcher in a collection.
struct Running {
    watcher: Watcher,
    /// The node, if the watcher selects the pods of one node.
    node: Option<Box<str>>,
}

// === impl Watcher ===

impl Watcher {
    /// A watch without a limit on its unread bytes.
    pub(crate) fn new(scope: Scope, bookmarks: bool) -> (Self, Events) {
        Self::counted(scope, bookmarks, None)
    }

    /// A watch whose queued events count as unread bytes of its reader.
    pub(crate) fn counted(scope: Scope, bookmarks: bool, reader: Option<Arc<Reader>>) -> (Self, Events) {
        let (events, receiver) = mpsc::channel(MAX_QUEUED_EVENTS);
        let (link, cut) = (Arc::<Link>::default(), CancellationToken::new());
        let received = Events { events: receiver, link: link.clone(), cut: cut.clone() };
        (Self { scope, bookmarks, sent: 0, after: 0, events, link, reader, _cut: cut.drop_guard() }, received)
    }

    /// Queues an event, if the watch has begun. Returns false if the queue is full, or if the reader has lost to other
    /// owners of unread bytes: the collection then removes the watcher.
    pub(super) fn send(&mut self, event: Event, revision: u64) -> bool {
        if revision <= self.after {
            return true;
        }
        self.sent = revision;
        let before = self.link.queued.fetch_add(event.weight(), Ordering::Relaxed);
        before <= MAX_QUEUED_BYTES
            && Queued::new(event, self.reader.as_ref())
                .is_some_and(|queued| self.events.try_send(queued).is_ok())
    }
}

// === impl Events ===

impl Events {
    pub(crate) async fn recv(&mut self) -> Option<Event> {
        let queued = self.events.recv().await?;
        Some(self.received(&queued))
    }

    #[cfg(test)]
    pub(super) fn try_recv(&mut self) -> Result<Event, mpsc::error::TryRecvError> {
        let queued = self.events.try_recv()?;
        Ok(self.received(&queued))
    }

    fn received(&self, queued: &Queued) -> Event {
        self.link.queued.fetch_sub(queued.event.weight(), Ordering::Relaxed);
        queued.event.clone()
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        if let Some(place) = self.link.registration.get()
            && let Some(collection) = place.collection.upgrade()
        {
            collection.lock().end_watch(place.number);
        }
    }
}

// === impl Queued ===

impl Queued {
    /// Counts the event as unread. `None` if its reader has lost to other owners of unread bytes.
    fn new(event: Event, reader: Option<&Arc<Reader>>) -> Option<Self> {
        let counted = reader.zip(event.object());
        let is_within = counted.is_none_or(|(reader, object)| reader.add(object.stored()));
        is_within.then(|| Self { event, reader: reader.cloned() })
    }
}

impl Drop for Queued {
    fn drop(&mut self) {
        if let Some((reader, object)) = self.reader.as_ref().zip(self.event.object()) {
            reader.remove(object.stored());
        }
    }
}

// === impl Event ===

impl Event {
    fn object(&self) -> Option<&Arc<Object>> {
        match self {
            Event::Added(object) | Event::Modified(object) | Event::Deleted(object) => Some(object),
            Event::Bookmark(_) | Event::InitialEnd(_) => None,
        }
    }

    /// Bytes of the event, which it may keep in memory.
    pub(crate) fn weight(&self) -> usize {
        self.object().map_or(0, |object| object.json_len())
    }
}

// === impl Watchers ===

impl Watchers {
    /// An empty set of watchers for a collection.
    pub(super) fn of(collection: Weak<Shared>) -> Self {
        Self { collection, ..Self::default() }
    }

    /// Adds a watcher of a collection of pods, or of another one.
    pub(super) fn add(&mut self, watcher: Watcher, is_of_pods: bool) {
        let place = Registration { collection: self.collection.clone(), number: self.next };
        // A watcher is added to one collection only, so the value is not set yet.
        let _added = watcher.link.registration.set(place);
        let node: Option<Box<str>> = watcher.scope.node().filter(|_| is_of_pods).map(Into::into);
        match &node {
            Some(node) => self.of_nodes.entry(node.clone()).or_default().insert(self.next),
            None => self.others.insert(self.next),
        };
        self.running.insert(self.next, Running { watcher, node });
        self.next += 1;
    }

    pub(super) fn remove(&mut self, number: u64) {
        let Some(Running { node, .. }) = self.running.remove(&number) else { return };
        let Some(node) = node else {
            self.others.remove(&number);
            return;
        };
        if let Some(numbers) = self.of_nodes.get_mut(&node) {
            numbers.remove(&number);
            if numbers.is_empty() {
                self.of_nodes.remove(&node);
            }
        }
    }

    /// Removes the watchers for which `keep` returns false.
    pub(super) fn retain(&mut self, mut keep: impl FnMut(&mut Watcher) -> bool) {
        let all = self.running.iter_mut();
        let gone: Vec<u64> =
            all.filter_map(|(number, one)| (!keep(&mut one.watcher)).then_some(*number)).collect();
        gone.into_iter().for_each(|number| self.remove(number));
    }

    /// Whether a watcher selects the pods of one node.
    pub(super) fn select_nodes(&self) -> bool {
        !self.of_nodes.is_empty()
    }

    /// As [`Watchers::retain`], except the watchers of the pods of other nodes, which are not visited.
    pub(super) fn retain_of(&mut self, [new, old]: [&str; 2], mut keep: impl FnMut(&mut Watcher) -> bool) {
        let mut numbers: Vec<u64> = self.others.iter().copied().collect();
        numbers.extend(self.of_nodes.get(new).into_iter().flatten());
        if old != new {
            numbers.extend(self.of_nodes.get(old).into_iter().flatten());
        }
        for number in numbers {
            let is_kept = self.running.get_mut(&number).is_none_or(|one| keep(&mut one.watcher));
            if !is_kept {
                self.remove(number);
            }
        }
    }

    pub(super) fn clear(&mut self) {
        self.running.clear();
        self.of_nodes.clear();
        self.others.clear();
    }

    pub(super) fn len(&self) -> usize {
        self.running.len()
    }
}

#[cfg(test)]
mod tests {
    use coracle_kinds::{kind::by_kind, selector::FieldSelector};

    use super::*;
    use crate::{cache::Cache, unread_bytes::UnreadBytes};

    #[test]
    fn a_change_of_a_pod_visits_no_watchers_of_other_nodes() {
        let (kind, mut watchers) = (by_kind("v1", "Pod").unwrap(), Watchers::default());
        let add = |text: &str| {
            let fields = FieldSelector::parse(kind, text).unwrap();
            let (watcher, events) = Watcher::new(Scope { fields, ..Scope::default() }, false);
            watchers.add(watcher, true);
            events
        };
        let _events = ["spec.nodeName=a", "spec.nodeName=b", "spec.nodeName=", "spec.nodeName!=a"].map(add);
        let visited = |watchers: &mut Watchers, nodes: [&str; 2]| {
            let mut count = 0;
            watchers.retain_of(nodes, |_watcher| {
                count += 1;
                true
            });
            count
        };
        assert_eq!(visited(&mut watchers, ["a", "a"]), 2);
        assert_eq!(visited(&mut watchers, ["a", ""]), 3);
        assert_eq!(visited(&mut watchers, ["c", "b"]), 2);
        watchers.retain_of(["b", "b"], |watcher| watcher.scope.node().is_none());
        assert_eq!((watchers.len(), visited(&mut watchers, ["b", "b"])), (3, 1));
        watchers.retain(|watcher| watcher.scope.node() != Some("a"));
        watchers.remove(2);
        assert_eq!((watchers.len(), watchers.select_nodes()), (1, false));
        watchers.clear();
        assert_eq!(visited(&mut watchers, ["a", "b"]), 0);
    }

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
        let unread = Arc::<UnreadBytes>::default();
        let kind = by_kind("v1", "ConfigMap").unwrap();
        let value = serde_json::json!({"metadata": {"name": "n"}, "data": {"a": "x".repeat(1 << 20)}});
        // Each watch is at another version.
        let version = |revision: u64| Arc::new(Object::of(kind, "k".into(), revision, &value));
        let watches = (0..10).map(|_| Watcher::counted(Scope::default(), false, Some(unread.reader("eve"))));
        let mut watches: Vec<_> = watches.collect();
        let large = || bytes::Bytes::from(vec![0_u8; 1 << 20]);
        let others: Vec<_> = (0..40).map(|_| unread.reader("eve").hold(large()).unwrap()).collect();
        let mut send = |revision: u64| {
            let of_one = |(watcher, _): &mut (Watcher, Events)| {
                watcher.send(Event::Modified(version(revision)), revision)
            };
            watches.iter_mut().map(of_one).filter(|is_sent| *is_sent).count()
        };
        assert_eq!([send(1), send(2)], [10, 10]);
        assert!(send(3) < 5, "the limit of all watches is below the sum of their limits");
        for (_, events) in &mut watches {
            events.recv().await.unwrap();
        }
        drop((watches, others));
        assert_eq!((unread.bytes(), Arc::strong_count(&unread)), (0, 1));
    }

    /// One service account may have watches on every node of a cluster.
    #[test]
    fn watches_of_an_owner_share_the_bytes_of_an_event() {
        let unread = Arc::<UnreadBytes>::default();
        let kind = by_kind("v1", "ConfigMap").unwrap();
        let value = serde_json::json!({"metadata": {"name": "n"}, "data": {"a": "x".repeat(1 << 20)}});
        let object = Arc::new(Object::of(kind, "k".into(), 1, &value));
        let watches = (0..200).map(|_| Watcher::counted(Scope::default(), false, Some(unread.reader("eve"))));
        let mut watches: Vec<_> = watches.collect();
        for (watcher, _) in &mut watches {
            assert!(watcher.send(Event::Modified(object.clone()), 1));
            assert!(watcher.send(Event::Deleted(Arc::new(object.with_revision(2))), 2));
        }
        assert_eq!(unread.bytes(), object.stored_bytes());
        drop(watches);
        assert_eq!(unread.bytes(), 0);
    }

    #[test]
    fn an_end_that_was_not_registered_is_dropped() {
        let (watcher, events) = Watcher::new(Scope::default(), false);
        drop(events);
        assert!(watcher.events.is_closed());
    }
}

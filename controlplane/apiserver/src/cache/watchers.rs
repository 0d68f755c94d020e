//! Watches. The collection queues events for each watcher. A watch ends when its client drops the receiver, or when the
//! collection removes the watcher.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::{
        Arc, OnceLock, Weak,
        atomic::{AtomicUsize, Ordering},
    },
};

use bytes::Bytes;
use coracle_kinds::Resource;
use tokio::sync::mpsc;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::{Collection, Object, Scope, Shared};
use crate::unread_bytes::{Reader, SLOT_BYTES};

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
    /// Revision of the newest queued event, or of the start of the watch if no event is queued.
    pub(super) sent: u64,
    /// The watch begins after this revision, which may be in the future. Events up to this revision are not queued.
    pub(super) after: u64,
    events: mpsc::Sender<Queued>,
    link: Arc<Link>,
    /// The reader of the watch. `None` for requests of this process.
    reader: Option<Arc<Reader>>,
    /// Cancelled when the collection removes the watcher.
    _cut: DropGuard,
}

/// The receiving half of a watch. Dropping it locks the collection and removes the watcher, so the caller must not hold
/// that lock while this value is dropped.
pub(crate) struct Events {
    events: mpsc::Receiver<Queued>,
    link: Arc<Link>,
    /// Cancelled when no more events will be queued.
    pub(crate) cut: CancellationToken,
}

/// Acts on a watch from outside of its stream: ends it before its client does, or sends a bookmark.
#[derive(Clone)]
pub(crate) struct WatchHandle(Arc<Link>);

/// An event in the queue of a watch. Its bytes and its slot in the queue count as unread until the event is dropped.
struct Queued {
    event: Event,
    reader: Option<Arc<Reader>>,
}

// `SLOT_BYTES` covers an event and its share of the overhead of a block of the queue.
const _: () = assert!(size_of::<Queued>() < SLOT_BYTES);

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
    of_nodes: Numbers,
    /// Numbers of the other watchers, by the prefix of the keys that they select, or by the key of one object.
    of_keys: Numbers,
    /// The watchers with bookmarks. Each entry is a revision that the watcher has reached, and the number of the
    /// watcher. Meanwhile the watcher may have reached a later revision.
    reached: BTreeSet<(u64, u64)>,
    next: u64,
    collection: Weak<Shared>,
}

/// Numbers of watchers.
type Numbers = HashMap<Box<str>, BTreeSet<u64>>;

/// A watcher in a collection.
struct Running {
    watcher: Watcher,
    selection: Selection,
    /// The watcher's revision in [`Watchers::reached`]. `None` without bookmarks.
    reached: Option<u64>,
}

/// The objects that a watcher may select. The collection does not visit the watcher for changes of other objects.
enum Selection {
    /// The pods of a node.
    Node(Box<str>),
    /// If the text is empty or ends with `/`: the objects whose keys have this prefix. Otherwise the object with this
    /// key.
    Key(Box<str>),
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

    /// Queues an event, if the watch has begun. Returns false if the queue is full, or if the reader is evicted because
    /// of the limit on unread bytes. The collection then removes the watcher.
    pub(super) fn send(&mut self, event: Event, revision: u64) -> bool {
        revision <= self.after || self.queue(event, revision)
    }

    /// Queues a bookmark of the revision `newest`, or of the newest event if that is later. Returns the same as
    /// [`Watcher::send`].
    fn send_bookmark(&mut self, newest: u64) -> bool {
        let revision = newest.max(self.sent);
        self.queue(Event::Bookmark(revision), revision)
    }

    fn queue(&mut self, event: Event, revision: u64) -> bool {
        self.sent = revision;
        let before = self.link.queued.fetch_add(event.weight(), Ordering::Relaxed);
        before <= MAX_QUEUED_BYTES
            && Queued::new(event, self.reader.as_ref())
                .is_some_and(|queued| self.events.try_send(queued).is_ok())
    }
}

// === impl Events ===

impl Events {
    /// A handle of the watch.
    pub(crate) fn handle(&self) -> WatchHandle {
        WatchHandle(self.link.clone())
    }

    pub(crate) async fn recv(&mut self) -> Option<Event> {
        let queued = self.events.recv().await?;
        Some(self.received(queued))
    }

    #[cfg(test)]
    pub(super) fn try_recv(&mut self) -> Result<Event, mpsc::error::TryRecvError> {
        let queued = self.events.try_recv()?;
        Ok(self.received(queued))
    }

    fn received(&self, queued: Queued) -> Event {
        self.link.queued.fetch_sub(queued.event.weight(), Ordering::Relaxed);
        queued.into_event()
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        self.link.unregister();
    }
}

// === impl WatchHandle ===

/// Each method locks the collection, so the caller must not hold that lock.
impl WatchHandle {
    /// Ends the watch after the events that are queued now.
    pub(crate) fn stop(&self) {
        self.0.unregister();
    }

    /// Sends a bookmark of the newest revision, if the watch has asked for bookmarks.
    pub(crate) fn send_bookmark(&self) {
        self.0.with_collection(Collection::send_bookmark);
    }
}

// === impl Link ===

impl Link {
    /// Removes the watcher from its collection.
    fn unregister(&self) {
        self.with_collection(Collection::end_watch);
    }

    /// Calls `act` with the collection of the watcher and the number of the watcher. Does nothing if the watcher was
    /// not added to a collection.
    fn with_collection(&self, act: impl FnOnce(&mut Collection, u64)) {
        if let Some(place) = self.registration.get()
            && let Some(collection) = place.collection.upgrade()
        {
            act(&mut collection.lock(), place.number);
        }
    }
}

// === impl Queued ===

impl Queued {
    /// Counts the event as unread. `None` if its reader is evicted because of the limit on unread bytes.
    fn new(event: Event, reader: Option<&Arc<Reader>>) -> Option<Self> {
        let is_within = reader.is_none_or(|reader| reader.add_event(event.stored()));
        is_within.then(|| Self { event, reader: reader.cloned() })
    }

    /// Ends the count. The event is moved, not cloned: all watches would contend for the reference count of its object.
    fn into_event(mut self) -> Event {
        self.uncount();
        std::mem::replace(&mut self.event, Event::Bookmark(0))
    }

    fn uncount(&mut self) {
        if let Some(reader) = self.reader.take() {
            reader.remove_event(self.event.stored());
        }
    }
}

impl Drop for Queued {
    fn drop(&mut self) {
        self.uncount();
    }
}

// === impl Event ===

impl Event {
    /// The object. `None` for a bookmark.
    pub(crate) fn object(&self) -> Option<&Arc<Object>> {
        match self {
            Event::Added(object) | Event::Modified(object) | Event::Deleted(object) => Some(object),
            Event::Bookmark(_) | Event::InitialEnd(_) => None,
        }
    }

    fn stored(&self) -> Option<&Bytes> {
        self.object().map(|object| object.stored())
    }

    /// Bytes that the event may keep in memory.
    pub(crate) fn weight(&self) -> usize {
        self.object().map_or(0, |object| object.json_len())
    }
}

/// The nodes of a pod after and before a change. Empty if the pod is not bound.
#[derive(Clone, Copy, Default)]
pub(super) struct Nodes<'a> {
    pub(super) new: &'a str,
    pub(super) old: &'a str,
}

// === impl Watchers ===

impl Watchers {
    /// An empty set of watchers for a collection.
    pub(super) fn of(collection: Weak<Shared>) -> Self {
        Self { collection, ..Self::default() }
    }

    /// Adds a watcher of a collection of this kind.
    pub(super) fn add(&mut self, watcher: Watcher, kind: &Resource) {
        let number = self.next;
        self.next += 1;
        let place = Registration { collection: self.collection.clone(), number };
        // A watcher is added to one collection only, so the value is not set yet.
        let _added = watcher.link.registration.set(place);
        let selection = Selection::of(&watcher.scope, kind);
        let (numbers, name) = match &selection {
            Selection::Node(node) => (&mut self.of_nodes, node),
            Selection::Key(key) => (&mut self.of_keys, key),
        };
        numbers.entry(name.clone()).or_default().insert(number);
        let reached = watcher.bookmarks.then_some(watcher.sent);
        self.reached.extend(reached.map(|revision| (revision, number)));
        self.running.insert(number, Running { watcher, selection, reached });
    }

    pub(super) fn remove(&mut self, number: u64) {
        let Some(Running { selection, reached, .. }) = self.running.remove(&number) else { return };
        if let Some(revision) = reached {
            self.reached.remove(&(revision, number));
        }
        let (all, name) = match selection {
            Selection::Node(node) => (&mut self.of_nodes, node),
            Selection::Key(key) => (&mut self.of_keys, key),
        };
        if let Some(numbers) = all.get_mut(&name) {
            numbers.remove(&number);
            if numbers.is_empty() {
                all.remove(&name);
            }
        }
    }

    /// Whether a watcher selects the pods of one node.
    pub(super) fn select_nodes(&self) -> bool {
        !self.of_nodes.is_empty()
    }

    /// Visits the watchers that may select an object, and removes the watchers for which `keep` returns false.
    pub(super) fn retain_of(
        &mut self,
        key: &str,
        nodes: Nodes<'_>,
        mut keep: impl FnMut(&mut Watcher) -> bool,
    ) {
        let mut numbers = Vec::<u64>::new();
        for prefix in prefixes(key) {
            numbers.extend(self.of_keys.get(prefix).into_iter().flatten());
        }
        numbers.extend(self.of_nodes.get(nodes.new).into_iter().flatten());
        if nodes.old != nodes.new {
            numbers.extend(self.of_nodes.get(nodes.old).into_iter().flatten());
        }
        for number in numbers {
            let is_kept = self.running.get_mut(&number).is_none_or(|one| keep(&mut one.watcher));
            if !is_kept {
                self.remove(number);
            }
        }
    }

    /// Sends a bookmark of the revision `newest` to the watchers with bookmarks whose newest event is older than
    /// `oldest`. The other watchers are not visited.
    pub(super) fn send_bookmarks(&mut self, oldest: u64, newest: u64) {
        while let Some((revision, number)) = self.reached.first().copied()
            && revision < oldest
        {
            self.reached.remove(&(revision, number));
            let Some(one) = self.running.get_mut(&number) else { continue };
            let is_kept = one.watcher.sent >= oldest || one.watcher.send(Event::Bookmark(newest), newest);
            if !is_kept {
                self.remove(number);
                continue;
            }
            let reached = one.watcher.sent.max(oldest);
            one.reached = Some(reached);
            self.reached.insert((reached, number));
        }
    }

    /// Whether a watcher with bookmarks may have got no event of the revision `newest` yet. May also be true if the
    /// watcher has got this event since the last call of [`Watchers::send_bookmarks`].
    pub(super) fn may_lag(&self, newest: u64) -> bool {
        self.reached.first().is_some_and(|(revision, _)| *revision < newest)
    }

    /// Sends a bookmark to one watcher, if it has asked for bookmarks. The bookmark has the revision `newest`, or that
    /// of the watcher's newest event if that is later.
    pub(super) fn send_bookmark(&mut self, number: u64, newest: u64) {
        let one = self.running.get_mut(&number).filter(|one| one.watcher.bookmarks);
        if one.is_some_and(|one| !one.watcher.send_bookmark(newest)) {
            self.remove(number);
        }
    }

    /// Sends a bookmark with a revision to each watcher that has asked for bookmarks.
    pub(super) fn send_bookmark_to_all(&mut self, revision: u64) {
        let numbers: Vec<u64> = self.reached.iter().map(|(_, number)| *number).collect();
        for number in numbers {
            let one = self.running.get_mut(&number);
            if one.is_some_and(|one| !one.watcher.send(Event::Bookmark(revision), revision)) {
                self.remove(number);
            }
        }
    }

    pub(super) fn clear(&mut self) {
        self.running.clear();
        self.of_nodes.clear();
        self.of_keys.clear();
        self.reached.clear();
    }

    pub(super) fn len(&self) -> usize {
        self.running.len()
    }
}

// === impl Selection ===

impl Selection {
    fn of(scope: &Scope, kind: &Resource) -> Self {
        let is_pod = kind.group.is_empty() && kind.plural == "pods";
        if let Some(node) = scope.node().filter(|_| is_pod) {
            return Self::Node(node.into());
        }
        // Whether the prefix has group, resource, and the namespace of a namespaced kind: prefix and name are then a
        // key.
        let is_complete = scope.prefix.matches('/').count() == 2 + usize::from(kind.namespaced);
        Self::Key(match scope.fields.exact_name() {
            Some(name) if is_complete => format!("{}{name}", scope.prefix).into(),
            _ if scope.prefix.ends_with('/') => scope.prefix.as_str().into(),
            _ => "".into(),
        })
    }
}

/// The names in [`Watchers::of_keys`] of the watchers that may select an object with this key.
fn prefixes(key: &str) -> impl Iterator<Item = &str> {
    let parents = key.match_indices('/').map(move |(at, _)| &key[..=at]);
    std::iter::once("").chain(parents).chain([key])
}

#[cfg(test)]
mod tests {
    use coracle_kinds::{kind::by_kind, selector::FieldSelector};

    use super::*;
    use crate::{
        cache::{Cache, key_of, prefix_of},
        unread_bytes::UnreadBytes,
    };

    /// Number of watchers that the change of an object visits.
    fn visited(watchers: &mut Watchers, key: &str, [new, old]: [&str; 2]) -> usize {
        let mut count = 0;
        watchers.retain_of(key, Nodes { new, old }, |_watcher| {
            count += 1;
            true
        });
        count
    }

    #[test]
    fn a_change_of_a_pod_visits_no_watchers_of_other_nodes() {
        let (kind, mut watchers) = (by_kind("v1", "Pod").unwrap(), Watchers::default());
        let add = |text: &str| {
            let fields = FieldSelector::parse(kind, text).unwrap();
            let (watcher, events) = Watcher::new(Scope { fields, ..Scope::default() }, false);
            watchers.add(watcher, kind);
            events
        };
        let _events = ["spec.nodeName=a", "spec.nodeName=b", "spec.nodeName=", "spec.nodeName!=a"].map(add);
        let key = "/pods/ns/a";
        assert_eq!(visited(&mut watchers, key, ["a", "a"]), 2);
        assert_eq!(visited(&mut watchers, key, ["a", ""]), 3);
        assert_eq!(visited(&mut watchers, key, ["c", "b"]), 2);
        watchers.retain_of(key, Nodes { new: "b", old: "b" }, |watcher| watcher.scope.node().is_none());
        assert_eq!((watchers.len(), visited(&mut watchers, key, ["b", "b"])), (3, 1));
        watchers.remove(0);
        watchers.remove(2);
        assert_eq!((watchers.len(), watchers.select_nodes()), (1, false));
        watchers.clear();
        assert_eq!(visited(&mut watchers, key, ["a", "b"]), 0);
    }

    #[test]
    fn a_change_visits_no_watchers_of_other_namespaces_and_names() {
        let (kind, mut watchers) = (by_kind("v1", "ConfigMap").unwrap(), Watchers::default());
        let add = |(namespace, text): (&str, &str)| {
            let fields = FieldSelector::parse(kind, text).unwrap();
            let scope = Scope { prefix: prefix_of(kind, namespace), fields, ..Scope::default() };
            let (watcher, events) = Watcher::new(scope, false);
            watchers.add(watcher, kind);
            events
        };
        let scopes = [
            ("", ""),
            ("", "metadata.name=a"),
            ("ns", ""),
            ("ns", "metadata.name!=b"),
            ("ns", "metadata.name=a"),
            ("other", ""),
            ("other", "metadata.name=a"),
        ];
        let _events = scopes.map(add);
        let mut of =
            |namespace: &str, name: &str| visited(&mut watchers, &key_of(kind, namespace, name), [""; 2]);
        assert_eq!([of("ns", "a"), of("ns", "b"), of("n", "a"), of("other", "a")], [5, 4, 2, 4]);
        (0..7).for_each(|number| watchers.remove(number));
        assert!(watchers.of_keys.is_empty() && watchers.running.is_empty());
    }

    #[test]
    fn a_change_of_a_cluster_scoped_object_visits_the_watchers_of_its_name() {
        let (kind, mut watchers) = (by_kind("v1", "Node").unwrap(), Watchers::default());
        let add = |text: &str| {
            let fields = FieldSelector::parse(kind, text).unwrap();
            let (watcher, events) =
                Watcher::new(Scope { prefix: prefix_of(kind, ""), fields, ..Scope::default() }, false);
            watchers.add(watcher, kind);
            events
        };
        let _events = ["metadata.name=a", "metadata.name=b", ""].map(add);
        assert_eq!(visited(&mut watchers, &key_of(kind, "", "a"), [""; 2]), 2);
    }

    #[test]
    fn only_due_watchers_are_visited_for_a_bookmark() {
        let (kind, mut watchers) = (by_kind("v1", "ConfigMap").unwrap(), Watchers::default());
        let add = |bookmarks: bool| {
            let (watcher, events) = Watcher::new(Scope::default(), bookmarks);
            watchers.add(watcher, kind);
            events
        };
        let mut events = [true, true, false].map(add);
        watchers.running.get_mut(&0).unwrap().watcher.sent = 7;
        watchers.send_bookmarks(5, 9);
        let mut bookmarks = || {
            let received = |events: &mut Events| matches!(events.try_recv(), Ok(Event::Bookmark(9)));
            events.each_mut().map(received)
        };
        assert_eq!(bookmarks(), [false, true, false]);
        assert_eq!(watchers.reached, BTreeSet::from([(7, 0), (9, 1)]), "their next visits");
        watchers.send_bookmarks(7, 9);
        assert_eq!(bookmarks(), [false; 3]);
        watchers.send_bookmarks(8, 9);
        assert_eq!(bookmarks(), [true, false, false]);
        drop(events);
        watchers.send_bookmarks(10, 11);
        assert_eq!((watchers.len(), watchers.reached.len()), (1, 0), "clients that disconnected");
        watchers.remove(2);
        assert_eq!(watchers.len(), 0);
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
        // Each call makes a new object, so that the watches share no bytes.
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
        assert!(send(3) < 10, "the limit of all watches is below the sum of their limits");
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
        assert_eq!(unread.bytes(), object.stored_bytes() + 2 * watches.len() * SLOT_BYTES);
        drop(watches);
        assert_eq!(unread.bytes(), 0);
    }

    /// Readers of other owners that hold all unread bytes but 9 MiB.
    fn other_readers(unread: &Arc<UnreadBytes>) -> [(Arc<Reader>, Bytes); 3] {
        let owners = [("system:kube-scheduler", 32), ("system:node:a", 16), ("bob", 7)];
        owners.map(|(name, mebibytes)| {
            let reader = unread.reader(name);
            let held = reader.hold(Bytes::from(vec![0_u8; mebibytes << 20])).unwrap();
            (reader, held)
        })
    }

    /// The events themselves are small, and all watches share them.
    #[test]
    fn the_slots_of_small_events_of_many_watches_are_limited() {
        let unread = Arc::<UnreadBytes>::default();
        let kind = by_kind("v1", "ConfigMap").unwrap();
        let object =
            Arc::new(Object::of(kind, "k".into(), 1, &serde_json::json!({"metadata": {"name": "n"}})));
        let others = other_readers(&unread);
        let readers: Vec<_> = (0..100).map(|_| unread.reader("eve")).collect();
        let watches =
            readers.iter().map(|reader| Watcher::counted(Scope::default(), true, Some(reader.clone())));
        let mut watches: Vec<_> = watches.collect();
        for revision in (1..=3200).step_by(2) {
            for (watcher, _) in &mut watches {
                watcher.send(Event::Modified(object.clone()), revision);
                watcher.send(Event::Bookmark(revision), revision + 1);
            }
        }
        assert!(readers.iter().any(|reader| reader.evicted().is_cancelled()), "watches of the user end");
        assert!(!others.iter().any(|(reader, _)| reader.evicted().is_cancelled()), "those of others do not");
        drop((watches, others, readers));
        assert_eq!((unread.bytes(), Arc::strong_count(&unread)), (0, 1));
    }

    /// Each event of a collection reaches all its watches, so watches whose clients read slowly share the same bytes.
    #[test]
    fn few_of_many_equal_watches_end_at_the_limit() {
        let unread = Arc::<UnreadBytes>::default();
        let others = other_readers(&unread);
        let watches = (0..100).map(|_| Watcher::counted(Scope::default(), true, Some(unread.reader("eve"))));
        let mut watches: Vec<_> = watches.collect();
        let mut running = 0;
        for revision in 1..=3200 {
            let send =
                |(watcher, _): &mut (Watcher, Events)| watcher.send(Event::Bookmark(revision), revision);
            running = watches.iter_mut().map(send).filter(|is_sent| *is_sent).count();
        }
        assert!((50..100).contains(&running), "{running}");
        drop((watches, others));
        assert_eq!((unread.bytes(), Arc::strong_count(&unread)), (0, 1));
    }

    #[test]
    fn an_end_that_was_not_registered_is_dropped() {
        let (watcher, events) = Watcher::new(Scope::default(), false);
        drop(events);
        assert!(watcher.events.is_closed());
    }
}

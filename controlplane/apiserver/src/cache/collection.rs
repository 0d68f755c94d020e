//! The objects of one kind, their recent changes, and their watchers.

mod earlier;
mod unreadable;

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Arc, OnceLock, Weak},
    time::Duration,
};

use coracle_kinds::Resource;
use coracle_store::{Commit, Entry, UnreadableEntry};
use tokio::time::Instant;

use super::{
    Allocated, Change, NamespaceBytes, Object, References, Scope, Shared,
    snapshots::Snapshots,
    watchers::{Nodes, Watcher, Watchers},
};
use crate::{
    error::{ApiError, Result},
    superseded::SupersededObjects,
};

/// Maximum number of changes in the history of a kind, and maximum bytes of their superseded objects.
const MAX_HISTORY: usize = 1000;
const MAX_HISTORY_BYTES: usize = 384 << 10;
/// Age up to which the history keeps changes above these limits. During a burst of changes, a client that has listed
/// the objects can then still start its watch at the revision of the list.
pub(crate) const RECENT: Duration = Duration::from_secs(2);
/// Maximum bytes of the history including these recent changes. This also limits the number of recent changes, because
/// each change counts at least 256 bytes.
const MAX_RECENT_BYTES: usize = 4 << 20;

pub(crate) struct Collection {
    kind: Arc<Resource>,
    objects: BTreeMap<Arc<str>, Arc<Object>>,
    /// Stored objects whose newest state cannot be decrypted, by key. If a former state is known, `objects` has it.
    unreadable: BTreeMap<Arc<str>, UnreadableEntry>,
    changes: VecDeque<Change>,
    change_bytes: usize,
    /// Number of changes since the collection was created.
    received: u64,
    /// All changes after this revision are in `changes`.
    compacted: u64,
    /// Former states for continue tokens.
    pub(super) snapshots: Snapshots,
    watchers: Watchers,
    loading: Loading,
    /// Whether the resource was removed. A closed collection sends no events.
    is_closed: bool,
    /// The references of pods; empty for other kinds.
    references: References,
    /// Addresses, node ports and ranges of services, IPAddresses and ServiceCIDRs; empty for other kinds.
    allocated: Allocated,
    /// Counts the superseded objects that responses still refer to.
    pub(super) superseded: Arc<SupersededObjects>,
    /// Counts the bytes of the objects by namespace.
    pub(super) namespace_bytes: Arc<NamespaceBytes>,
}

/// Progress of the load of the stored objects.
enum Loading {
    /// The objects cannot be loaded now. Commits are not kept: a later list contains their effects.
    Waiting,
    /// The objects are being listed. The commits that arrive meanwhile are kept.
    Running(Vec<Commit>),
    Done,
}

// === impl Collection ===

impl Collection {
    pub(super) fn new(kind: Arc<Resource>, revision: u64) -> Self {
        Self {
            kind,
            objects: BTreeMap::new(),
            unreadable: BTreeMap::new(),
            changes: VecDeque::new(),
            change_bytes: 0,
            received: 0,
            compacted: revision,
            snapshots: Snapshots::default(),
            watchers: Watchers::default(),
            loading: Loading::Done,
            is_closed: false,
            references: References::default(),
            allocated: Allocated::default(),
            superseded: Arc::default(),
            namespace_bytes: Arc::default(),
        }
    }

    /// Adds or replaces an object. Returns the former object.
    fn put(&mut self, object: Arc<Object>) -> Option<Arc<Object>> {
        let (key, bytes) = (object.key.clone(), object.stored_bytes());
        let old = self.objects.insert(key.clone(), object);
        self.namespace_bytes.count(&key, old.as_ref().map_or(0, |old| old.stored_bytes()), bytes);
        old
    }

    /// Removes and returns an object.
    fn take(&mut self, key: &str) -> Option<Arc<Object>> {
        let old = self.objects.remove(key)?;
        self.namespace_bytes.count(key, old.stored_bytes(), 0);
        Some(old)
    }

    /// A collection that keeps commits until [`Collection::loaded`] is called.
    pub(super) fn loading(kind: Arc<Resource>) -> Self {
        Self { loading: Loading::Running(Vec::new()), ..Self::new(kind, 0) }
    }

    /// Sets the reference to the [`Shared`] that contains this collection. Watches keep this reference.
    pub(super) fn share_as(&mut self, itself: Weak<Shared>) {
        self.watchers = Watchers::of(itself);
    }

    /// The stored version of the resource.
    pub(crate) fn kind(&self) -> &Resource {
        &self.kind
    }

    /// The stored version of the resource.
    pub(crate) fn shared_kind(&self) -> Arc<Resource> {
        self.kind.clone()
    }

    /// Replaces the resource by its changed form. Objects keep the version in which they are stored.
    pub(super) fn replace(&mut self, kind: Arc<Resource>) {
        let names = |kind: &Resource| kind.fields.iter().map(|field| field.name.clone()).collect::<Vec<_>>();
        let mut replaced = Vec::new();
        if names(&self.kind) != names(&kind) {
            // The parsed attributes contain values of the former selectable fields.
            self.snapshots.clear(&self.superseded);
            let of_changes = self.changes.iter_mut();
            let of_changes = of_changes.flat_map(|change| change.old.iter_mut().chain([&mut change.new]));
            for object in self.objects.values_mut().chain(of_changes) {
                let new = Arc::new(object.without_attributes());
                replaced.push(std::mem::replace(object, new));
            }
        }
        self.kind = kind;
        if self.kind.strategy().completes_stored() {
            for object in self.objects.values_mut() {
                if let Some(complete) = object.completed(&self.kind) {
                    self.namespace_bytes.count(&object.key, object.stored_bytes(), complete.stored_bytes());
                    replaced.push(std::mem::replace(object, Arc::new(complete)));
                }
            }
        }
        self.share_objects(&mut replaced);
        self.count_replaced(replaced);
    }

    /// Makes the history refer to the new objects instead of the replaced objects. Otherwise the history would keep the
    /// replaced objects in memory, and [`Self::count_replaced`] would count them as objects that responses refer to.
    fn share_objects(&mut self, replaced: &mut Vec<Arc<Object>>) {
        for change in self.changes.iter_mut().filter(|change| !change.deleted) {
            if let Some(object) = self.objects.get(&change.new.key)
                && object.revision == change.new.revision
                && !Arc::ptr_eq(object, &change.new)
            {
                replaced.push(std::mem::replace(&mut change.new, object.clone()));
            }
        }
    }

    /// Counts replaced objects that responses refer to, even if a current object shares their bytes. After the next
    /// change of the current object, only the responses keep these bytes in memory.
    fn count_replaced(&self, mut replaced: Vec<Arc<Object>>) {
        // The same object may have been in the history and in the objects, so remove duplicates. Any further reference
        // then belongs to a response.
        replaced.sort_unstable_by_key(Arc::as_ptr);
        replaced.dedup_by(|one, other| Arc::ptr_eq(one, other));
        replaced.iter().for_each(|old| old.count_superseded(&self.superseded));
    }

    /// Ends all watches, so that their owners list the objects.
    pub(super) fn end_watches(&mut self) {
        self.watchers.clear();
    }

    /// Ends all watches: the resource was removed.
    pub(super) fn close(&mut self) {
        self.is_closed = true;
        self.watchers.clear();
        self.unreadable.clear();
        self.clear();
    }

    /// Removes all objects and changes.
    fn clear(&mut self) {
        self.snapshots.clear(&self.superseded);
        for change in self.changes.drain(..) {
            change.old.iter().for_each(|old| old.count_superseded(&self.superseded));
        }
        for object in std::mem::take(&mut self.objects).into_values() {
            self.namespace_bytes.count(&object.key, object.stored_bytes(), 0);
            object.count_superseded(&self.superseded);
        }
        self.change_bytes = 0;
    }

    /// Whether the resource was removed.
    pub(crate) fn is_closed(&self) -> bool {
        self.is_closed
    }

    pub(super) fn load(&mut self, entry: Entry) {
        let object = self.complete_object(entry);
        if self.has_references() {
            self.references.set(None, &object);
        }
        self.allocated.set(&self.kind, None, &object);
        self.put(Arc::new(object));
    }

    /// The object of an entry. Missing defaults are added.
    fn complete_object(&self, entry: Entry) -> Object {
        let object = Object::from_stored(entry.key, entry.modified, entry.value);
        let completes = self.kind.strategy().completes_stored();
        let complete = if completes { object.completed(&self.kind) } else { None };
        complete.unwrap_or(object)
    }

    /// Replaces all objects by the objects of a revision. Unreadable objects keep their former states. All watches end,
    /// because changes were missed.
    pub(super) fn reload(&mut self, entries: Vec<Entry>, revision: u64, unreadable: Vec<UnreadableEntry>) {
        if self.is_closed {
            return;
        }
        match &mut self.loading {
            Loading::Waiting => return,
            Loading::Running(pending) => {
                // The resource is listed again.
                pending.clear();
                self.unreadable.clear();
                return;
            }
            Loading::Done => {}
        }
        self.watchers.clear();
        let kept: Vec<Arc<Object>> = unreadable.iter().filter_map(|one| self.take(&one.key)).collect();
        self.clear();
        self.unreadable = unreadable.into_iter().map(|one| (one.key.clone(), one)).collect();
        self.references = References::default();
        self.allocated = Allocated::default();
        self.compacted = revision;
        entries.into_iter().for_each(|entry| self.load(entry));
        for object in kept {
            if self.has_references() {
                self.references.set(None, &object);
            }
            self.allocated.set(&self.kind, None, &object);
            self.put(object);
        }
    }

    /// Applies a commit and sends it to the watchers. `None` if the commit changes nothing, or if the objects are not
    /// loaded yet.
    pub(super) fn apply(&mut self, commit: &Commit) -> Option<Change> {
        match &mut self.loading {
            Loading::Waiting => return None,
            Loading::Running(pending) => {
                pending.push(commit.clone());
                return None;
            }
            Loading::Done => {}
        }
        self.forget_unreadable(&commit.key, commit.revision);
        // The list of a resource that was added later may contain commits that the watch has not delivered yet.
        if self.is_closed || commit.revision <= self.compacted {
            return None;
        }
        let (old, new) = match &commit.value {
            Some(value) => {
                let new = Arc::new(Object::from_stored(commit.key.clone(), commit.revision, value.clone()));
                (self.put(new.clone()), new)
            }
            None => {
                let old = self.take(&commit.key)?;
                let last = Arc::new(old.with_revision(commit.revision));
                (Some(old), last)
            }
        };
        let (revision, deleted) = (commit.revision, commit.value.is_none());
        let change = Change { revision, at: Instant::now(), old, new, deleted, left: OnceLock::new() };
        let change = self.publish(change);
        self.remove_old_changes(change.at);
        Some(change)
    }

    /// Sends a change to the watchers, and adds it to the history. After all changes of a revision, the caller must
    /// call [`Collection::remove_old_changes`].
    fn publish(&mut self, change: Change) -> Change {
        if self.has_references() {
            match change.deleted {
                true => self.references.remove(&change.new.key),
                false => self.references.set(change.old.as_deref(), &change.new),
            }
        }
        match change.deleted {
            true => self.allocated.remove(&change.new.key),
            false => self.allocated.set(&self.kind, change.old.as_deref(), &change.new),
        }
        let kind = &self.kind;
        let send = |watcher: &mut Watcher| {
            let event = watcher.scope.event(kind, &change);
            event.is_none_or(|event| watcher.send(event, change.revision))
        };
        // Nodes are looked up only if a watch selects the pods of one node, as kubelets do.
        let nodes = if self.watchers.select_nodes() { change.nodes(kind) } else { Nodes::default() };
        self.watchers.retain_of(&change.new.key, nodes, send);
        self.record_change(change.clone());
        change
    }

    /// Adds a change to the history.
    fn record_change(&mut self, change: Change) {
        self.received += 1;
        self.change_bytes += weight(&change);
        self.changes.push_back(change);
    }

    /// Removes the oldest changes above the limits. Must be called again while the history is above the usual limits.
    pub(super) fn remove_old_changes(&mut self, now: Instant) {
        while self.is_above_usual_limits() {
            let is_recent = self.changes.front().is_some_and(|oldest| now.duration_since(oldest.at) < RECENT);
            if is_recent && self.change_bytes <= MAX_RECENT_BYTES {
                break;
            }
            let Some(oldest) = self.changes.pop_front() else { break };
            self.change_bytes -= weight(&oldest);
            self.compacted = oldest.revision;
            self.snapshots.add(oldest, &self.superseded);
        }
        if self.changes.capacity() > 4 * MAX_HISTORY && !self.is_above_usual_limits() {
            self.changes.shrink_to(MAX_HISTORY);
        }
        // A client whose last event is older than the history could not resume, so it gets a bookmark.
        let (compacted, newest) = (self.compacted, self.newest());
        self.watchers.send_bookmarks(compacted, newest);
    }

    /// Whether a watch with bookmarks may have got no event of the newest change yet.
    pub(super) fn may_watches_lag(&self) -> bool {
        self.watchers.may_lag(self.newest())
    }

    /// Sends a bookmark to the watches with bookmarks that have got no event of the newest change.
    pub(super) fn send_bookmarks(&mut self) {
        let newest = self.newest();
        self.watchers.send_bookmarks(newest, newest);
    }

    /// Sends a bookmark to a watch, if it has asked for bookmarks.
    pub(super) fn send_bookmark(&mut self, number: u64) {
        let newest = self.newest();
        self.watchers.send_bookmark(number, newest);
    }

    /// Whether the history has recent changes above the usual limits.
    pub(super) fn is_above_usual_limits(&self) -> bool {
        self.changes.len() > MAX_HISTORY || self.change_bytes > MAX_HISTORY_BYTES
    }

    fn has_references(&self) -> bool {
        self.kind.group.is_empty() && self.kind.plural == "pods"
    }

    /// The references of the pods of each node.
    pub(crate) fn references(&self) -> &References {
        &self.references
    }

    /// Number of objects.
    pub(crate) fn len(&self) -> usize {
        self.objects.len()
    }

    /// Number of changes since the collection was created.
    pub(crate) fn received(&self) -> u64 {
        self.received
    }

    /// Number of running watches.
    pub(crate) fn watchers(&self) -> usize {
        self.watchers.len()
    }

    /// Removes a watch whose client has disconnected.
    pub(super) fn end_watch(&mut self, number: u64) {
        self.watchers.remove(number);
    }

    /// The addresses, node ports and ranges of the objects.
    pub(crate) fn allocated(&self) -> &Allocated {
        &self.allocated
    }

    pub(crate) fn get(&self, key: &str) -> Option<Arc<Object>> {
        self.objects.get(key).cloned()
    }

    /// The objects under a prefix, in key order.
    pub(crate) fn under<'a>(&'a self, prefix: &'a str) -> impl Iterator<Item = &'a Arc<Object>> {
        self.under_from(prefix, prefix)
    }

    /// The objects under a prefix, in key order, from the key `start` on.
    fn under_from<'a>(&'a self, prefix: &'a str, start: &'a str) -> impl Iterator<Item = &'a Arc<Object>> {
        let from = (std::ops::Bound::Included(prefix.max(start)), std::ops::Bound::Unbounded);
        self.objects
            .range::<str, _>(from)
            .take_while(move |(key, _)| key.starts_with(prefix))
            .map(|(_, object)| object)
    }

    /// The objects that a scope may select, in key order: the objects under its prefix. If the scope selects the pods
    /// of one node, only these pods are candidates.
    pub(crate) fn candidates(&self, scope: &Scope) -> Vec<Arc<Object>> {
        match scope.node().filter(|node| self.has_references() && !node.is_empty()) {
            Some(node) => {
                let keys = self.references.pods_of(node).filter(|key| key.starts_with(&scope.prefix));
                keys.filter_map(|key| self.objects.get(key)).cloned().collect()
            }
            None => self.under(&scope.prefix).cloned().collect(),
        }
    }

    /// Revision of the newest known change of this kind.
    pub(crate) fn newest(&self) -> u64 {
        self.changes.back().map_or(self.compacted, |change| change.revision)
    }

    /// The changes after a revision, the oldest first. `None` if the history does not have all of them, or if the store
    /// was restored to an earlier revision.
    pub(crate) fn changes_after(&self, revision: u64) -> Option<Vec<Change>> {
        if revision < self.compacted || revision > self.newest() {
            return None;
        }
        let at = self.changes.partition_point(|change| change.revision <= revision);
        Some(self.changes.range(at..).cloned().collect())
    }

    /// Registers a watcher. It gets the changes after `revision`. As upstream, `revision` may be in the future, because
    /// another server may have reached this revision already. The watcher gets no events up to `revision`.
    pub(crate) fn watch_after(&mut self, mut watcher: Watcher, revision: u64) -> Result<()> {
        if revision < self.compacted {
            return Err(too_old(revision, self.compacted));
        }
        (watcher.sent, watcher.after) = (revision, revision);
        for change in self.changes.iter().filter(|change| change.revision > revision) {
            if let Some(event) = watcher.scope.event(&self.kind, change)
                && !watcher.send(event, change.revision)
            {
                // The watcher is dropped. The client gets the queued events, and resumes after the last event. At least
                // one event is queued, unless the owner of the watch has too many unread bytes.
                return Ok(());
            }
        }
        self.watchers.add(watcher, &self.kind);
        Ok(())
    }

    /// Registers a watcher. Returns the current objects, which are at `revision` or newer.
    pub(crate) fn watch_from_now(&mut self, mut watcher: Watcher, revision: u64) -> Vec<Arc<Object>> {
        let mut initial = self.candidates(&watcher.scope);
        initial.retain(|object| watcher.scope.selects(&self.kind, object));
        watcher.sent = revision;
        self.watchers.add(watcher, &self.kind);
        initial
    }
}

fn weight(change: &Change) -> usize {
    // The new state is shared with the stored objects; only the history keeps the old state.
    256 + change.old.as_ref().map_or(0, |old| old.json_len())
}

fn too_old(asked: u64, oldest: u64) -> ApiError {
    ApiError::expired(format!("too old resource version: {asked} ({oldest})"))
}

#[cfg(test)]
mod tests {
    use coracle_kinds::{
        kind::by_kind,
        selector::{FieldSelector, LabelSelector},
    };
    use serde_json::json;

    use super::*;
    use crate::cache::tests::commit_large;
    use crate::cache::{Cache, Event, encode, key_of, parses, prefix_of};

    #[test]
    fn selectors_parse_each_object_once() {
        const PODS: u64 = 100;
        let (cache, kind) = (Cache::new(0), by_kind("v1", "Pod").unwrap());
        for number in 1..=PODS {
            let (name, app) = (format!("p{number}"), if number % 2 == 0 { "even" } else { "odd" });
            let pod = json!({"metadata": {"name": name, "namespace": "ns", "labels": {"app": app}}});
            let key = key_of(kind, "ns", &name).into();
            let value = Some(encode(kind, &pod));
            let commit = Commit { key, revision: number, value, created: number, guard_follows: false };
            cache.apply(&commit);
        }
        let labels = LabelSelector::parse("app=even").unwrap();
        let scope = Scope { prefix: prefix_of(kind, "ns"), labels, ..Scope::default() };
        let list = || {
            let before = parses::so_far();
            let shared = cache.of(kind).unwrap();
            let objects = shared.lock();
            let found = objects.under(&scope.prefix).filter(|object| scope.selects(kind, object)).count();
            (found, parses::so_far() - before)
        };
        assert_eq!(list(), (50, 100));
        assert_eq!(list(), (50, 0));
    }

    /// A client lists the objects, and starts its watch during a burst of changes.
    #[tokio::test(start_paused = true)]
    async fn recent_changes_stay_until_they_are_old() {
        let (cache, kind) = (Arc::new(Cache::new(0)), by_kind("v1", "ConfigMap").unwrap());
        let removing = cache.clone();
        tokio::spawn(async move { removing.remove_old_changes().await });
        let key: Arc<str> = key_of(kind, "ns", "a").into();
        let commit = |revision: u64, size: usize| {
            let data = json!({"metadata": {"name": "a", "namespace": "ns"}, "data": {"a": "x".repeat(size)}});
            let (key, value) = (key.clone(), Some(encode(kind, &data)));
            cache.apply(&Commit { key, revision, value, created: 1, guard_follows: false });
        };
        let shared = cache.of(kind).unwrap();
        let history = || {
            let objects = shared.lock();
            (objects.changes.len(), objects.change_bytes)
        };
        (1..=1500).for_each(|revision| commit(revision, 1000));
        assert_eq!(history().0, 1500);
        assert!(shared.lock().changes_after(1).is_some());
        (1501..=1600).for_each(|revision| commit(revision, 100_000));
        assert!(history().1 <= MAX_RECENT_BYTES, "{:?}", history());
        let (watcher, mut events) = Watcher::new(Scope::default(), true);
        shared.lock().watch_from_now(watcher, 1);
        assert!(events.try_recv().is_err());
        tokio::time::sleep(RECENT * 2).await;
        let (count, bytes) = history();
        assert!(
            count > 0 && count <= MAX_HISTORY && bytes <= MAX_HISTORY_BYTES,
            "{count} changes, {bytes} bytes"
        );
        assert!(shared.lock().changes_after(1).is_none());
        assert!(matches!(events.try_recv(), Ok(Event::Bookmark(1600))));
    }

    #[test]
    fn a_resumed_watch_with_many_bytes_ends_after_the_events_that_fit() {
        let (cache, kind) = (Cache::new(0), by_kind("v1", "ConfigMap").unwrap());
        (1..=6).for_each(|revision| commit_large(&cache, &format!("c{revision}"), revision, revision));
        let shared = cache.of(kind).unwrap();
        let mut received = 0;
        while received < 6 {
            let scope = Scope { prefix: prefix_of(kind, "ns"), ..Scope::default() };
            let (watcher, mut events) = Watcher::new(scope, false);
            shared.lock().watch_after(watcher, received).unwrap();
            let before = received;
            // All events that fit are in the queue.
            while let Ok(event) = events.try_recv() {
                let Event::Added(object) = event else { panic!("objects were created only") };
                received += 1;
                assert_eq!(object.revision, received, "no event is left out");
            }
            assert!(received > before);
            assert_eq!(events.cut.is_cancelled(), received < 6, "the time of an ended watch is limited");
        }
        assert_eq!(shared.lock().watchers(), 0, "the last resumed watch has ended with its receiver");
    }

    #[test]
    fn a_watch_from_a_future_revision_begins_after_it() {
        let (cache, kind) = (Cache::new(0), by_kind("v1", "ConfigMap").unwrap());
        let commit = |revision: u64| {
            let object =
                json!({"metadata": {"name": "a", "namespace": "ns"}, "data": {"a": revision.to_string()}});
            let (key, value) = (key_of(kind, "ns", "a").into(), Some(encode(kind, &object)));
            cache.apply(&Commit { key, revision, value, created: 1, guard_follows: false });
        };
        commit(1);
        let shared = cache.of(kind).unwrap();
        let scope = Scope { prefix: prefix_of(kind, "ns"), ..Scope::default() };
        let (watcher, mut events) = Watcher::new(scope, true);
        shared.lock().watch_after(watcher, 3).unwrap();
        commit(2);
        commit(3);
        assert!(events.try_recv().is_err(), "events up to the revision are not sent");
        commit(4);
        assert!(matches!(events.try_recv(), Ok(Event::Modified(object)) if object.revision == 4));
    }

    #[test]
    fn a_page_of_an_earlier_revision_has_the_former_objects_from_its_start() {
        let (cache, kind) = (Cache::new(0), by_kind("v1", "ConfigMap").unwrap());
        let commit = |revision: u64, name: &str, exists: bool| {
            let object = json!({"metadata": {"name": name, "namespace": "ns"}});
            let value = exists.then(|| encode(kind, &object));
            let key = key_of(kind, "ns", name).into();
            cache.apply(&Commit { key, revision, value, created: revision, guard_follows: false });
        };
        for (revision, name) in [(1, "a"), (2, "b"), (3, "c"), (4, "d")] {
            commit(revision, name, true);
        }
        commit(5, "b", false);
        commit(6, "c", true);
        commit(7, "c", true);
        commit(8, "e", true);
        commit(9, "b", true);
        let shared = cache.of(kind).unwrap();
        let states = |start: &str, revision: u64| {
            let found = shared.lock().under_at(&prefix_of(kind, "ns"), start, revision).unwrap();
            let states = found.iter().map(|object| format!("{}{}", object.name(), object.revision));
            states.collect::<Vec<_>>().join(" ")
        };
        assert_eq!(states("", 4), "a1 b2 c3 d4");
        assert_eq!(states("", 6), "a1 c6 d4");
        assert_eq!(states("", 9), "a1 b9 c7 d4 e8");
        let start = key_of(kind, "ns", "c");
        assert_eq!((states(&start, 4), states(&start, 9)), ("c3 d4".to_owned(), "c7 d4 e8".to_owned()));
        assert_eq!(states(&prefix_of(kind, "other"), 9), "");
    }

    #[test]
    fn an_object_of_a_response_counts_after_a_change_of_the_selectable_fields() {
        let (cache, kind) = (Cache::new(0), by_kind("v1", "ConfigMap").unwrap());
        let update = |revision: u64| commit_large(&cache, "a", revision, 1);
        let shared = cache.of(kind).unwrap();
        let replace = |kind: &Arc<Resource>| shared.lock().replace(kind.clone());
        update(1);
        update(2);
        replace(by_kind("v1", "Secret").unwrap());
        assert_eq!(cache.superseded.bytes(), 0, "neither the history nor the objects count");
        let listed = cache.list(kind, "ns");
        replace(kind);
        update(3);
        assert!((1 << 20..2 << 20).contains(&cache.superseded.bytes()), "{}", cache.superseded.bytes());
        drop(listed);
        assert_eq!(cache.superseded.bytes(), 0);
    }

    #[test]
    fn an_object_appears_when_it_is_initialized() {
        let (cache, kind) = (Cache::new(0), by_kind("v1", "ConfigMap").unwrap());
        let commit = |revision: u64, initializers: serde_json::Value| {
            let object = json!({"metadata": {"name": "a", "namespace": "ns", "initializers": initializers}});
            let (key, value) = (key_of(kind, "ns", "a").into(), Some(encode(kind, &object)));
            Commit { key, revision, value, created: 1, guard_follows: false }
        };
        let shared = cache.of(kind).unwrap();
        let watch = |initialized_only: bool| {
            let scope = Scope { prefix: prefix_of(kind, "ns"), initialized_only, ..Scope::default() };
            let (watcher, events) = Watcher::new(scope, false);
            assert!(shared.lock().watch_from_now(watcher, 0).is_empty());
            events
        };
        let (mut usual, mut all) = (watch(true), watch(false));
        let pending = json!({"pending": [{"name": "a.example.com"}, {"name": "b.example.com"}]});
        cache.apply(&commit(1, pending));
        cache.apply(&commit(2, json!({"pending": [{"name": "b.example.com"}]})));
        assert!(matches!(all.try_recv(), Ok(Event::Added(_))));
        assert!(matches!(all.try_recv(), Ok(Event::Modified(_))));
        assert!(usual.try_recv().is_err());
        let scope = Scope { initialized_only: true, ..Scope::default() };
        let selected: Vec<bool> = shared.lock().under("").map(|object| scope.selects(kind, object)).collect();
        assert_eq!(selected, [false]);
        cache.apply(&commit(3, json!(null)));
        assert!(matches!(usual.try_recv(), Ok(Event::Added(object)) if object.revision == 3));
        assert!(matches!(all.try_recv(), Ok(Event::Modified(_))));
    }

    #[test]
    fn watches_that_an_object_leaves_share_its_last_state() {
        let (cache, kind) = (Cache::new(0), by_kind("v1", "ConfigMap").unwrap());
        let commit = |revision: u64, app: &str| {
            let object = json!({"metadata": {"name": "a", "namespace": "ns", "labels": {"app": app}}});
            let (key, value) = (key_of(kind, "ns", "a").into(), Some(encode(kind, &object)));
            cache.apply(&Commit { key, revision, value, created: 1, guard_follows: false });
        };
        commit(1, "web");
        let shared = cache.of(kind).unwrap();
        let watch = || {
            let labels = LabelSelector::parse("app=web").unwrap();
            let scope = Scope { prefix: prefix_of(kind, "ns"), labels, ..Scope::default() };
            let (watcher, events) = Watcher::new(scope, false);
            shared.lock().watch_after(watcher, 1).unwrap();
            events
        };
        let mut watches = [watch(), watch()];
        commit(2, "db");
        let left = watches.each_mut().map(|events| match events.try_recv() {
            Ok(Event::Deleted(object)) => object,
            other => panic!("{other:?}"),
        });
        assert_eq!(left[0].revision, 2);
        assert!(Arc::ptr_eq(&left[0], &left[1]), "so it is encoded once");
    }

    #[test]
    fn the_pods_of_a_node_are_found_without_those_of_others() {
        const PODS: u64 = 100;
        let (cache, kind) = (Cache::new(0), by_kind("v1", "Pod").unwrap());
        let commit = |number: u64, revision: u64| {
            let (name, node) = (format!("p{number:02}"), format!("node-{}", number % 10));
            let pod = json!({"metadata": {"name": name, "namespace": "ns"}, "spec": {"nodeName": node}});
            let value = Some(encode(kind, &pod));
            let key = key_of(kind, "ns", &name).into();
            Commit { key, revision, value, created: number, guard_follows: false }
        };
        (1..=PODS).for_each(|number| cache.apply(&commit(number, number)));
        let fields = |text: &str| FieldSelector::parse(kind, text).unwrap();
        let scope = |namespace: &str, text: &str| Scope {
            prefix: prefix_of(kind, namespace),
            fields: fields(text),
            ..Scope::default()
        };
        let shared = cache.of(kind).unwrap();
        let names = |namespace: &str, text: &str| {
            let scope = scope(namespace, text);
            let mut found = shared.lock().candidates(&scope);
            found.retain(|object| scope.selects(kind, object));
            found.iter().map(|object| object.name().to_owned()).collect::<Vec<_>>()
        };
        let before = parses::so_far();
        assert_eq!(names("", "spec.nodeName=node-3").len(), 10);
        assert_eq!(names("ns", "spec.nodeName=node-3,metadata.name!=p03").first().unwrap(), "p13");
        assert!(names("other", "spec.nodeName=node-3").is_empty());
        assert_eq!(parses::so_far() - before, 10, "only the pods of the node are parsed");
        assert_eq!(names("", "spec.nodeName!=node-3").len(), 90);
        assert!(names("", "spec.nodeName=").is_empty());
        let (watcher, mut events) = Watcher::new(scope("", "spec.nodeName=node-3"), false);
        assert_eq!(shared.lock().watch_from_now(watcher, PODS).len(), 10);
        cache.apply(&commit(4, 101));
        cache.apply(&commit(3, 102));
        assert!(matches!(events.try_recv(), Ok(Event::Modified(pod)) if pod.revision == 102));
        assert!(events.try_recv().is_err());
    }
}

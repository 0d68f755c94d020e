//! The watch cache: the encoded bytes of every object once, shared by gets, lists and watches.
//!
//! One task watches the store and applies each commit in order. The cache also keeps the recent changes of each
//! resource. So a watch can start at an earlier revision. For a paged list it keeps the objects as they were at the
//! revision of the first page.

mod allocated;
mod bookmarks;
mod change;
mod collection;
mod conversions;
mod fields;
mod grace_ends;
mod ledger;
mod namespace_bytes;
mod object;
mod paid_claims;
mod progress;
mod references;
mod rendered_events;
mod snapshots;
mod unreadable;
mod watchers;

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
};

use arc_swap::{ArcSwap, ArcSwapOption};
use coracle_kinds::{Resource, kind::built_in};
use coracle_store::{
    Commit, Event as Stored, Expect, Guard, Page, Range, ReadablePage, Store, Unreadable, UnreadableEntry,
    Watch,
};
use tokio::{sync::Notify, time::Instant};

use crate::{
    error::{ApiError, Result},
    superseded::SupersededObjects,
};
pub(crate) use allocated::{Allocated, ServiceCidrRange};
pub(crate) use change::{Change, Scope};
pub(crate) use collection::Collection;
#[cfg(test)]
pub(crate) use collection::RECENT;
pub(crate) use conversions::Conversions;
pub(crate) use fields::Fields;
pub(crate) use ledger::Ledger;
pub(crate) use namespace_bytes::{ByteLimits, Full, NamespaceBytes, ReservedBytes};
#[cfg(test)]
pub(crate) use object::parses;
pub(crate) use object::{Object, encode, encode_fields, key_of, part_of, prefix_of};
use progress::Progress;
pub(crate) use references::{ReferenceKind, References};
pub(crate) use rendered_events::RenderedEvents;
use snapshots::Snapshots;
use unreadable::{LateObjects, UnreadableObject};
pub(crate) use watchers::{Event, Events, WatchHandle, Watcher};

/// Store key of the guard for service addresses and ports. Each write that allocates an address or a port also updates
/// the guard. The key contains no `/`, so no object has this key.
pub(crate) const ALLOCATIONS: &str = "allocations";
/// Number of guards of quotas, which all namespaces share. Changing it requires that all servers are replaced at once.
pub(crate) const QUOTA_GUARDS: usize = 64;
/// Prefix of the store keys of the guards of quotas; the number of the guard follows. With several servers, each write
/// that increases the use of a quota also updates a guard. These keys contain no `/`, so no object has such a key.
const QUOTA_GUARD: &str = "quotas-";

/// Collections by group and resource name.
type Collections = HashMap<Box<str>, HashMap<Box<str>, Arc<Shared>>>;
/// Items by the group and the name of their resource.
type ByResource<T> = HashMap<(Box<str>, Box<str>), Vec<T>>;

pub(crate) struct Cache {
    /// Replaced when a resource is added or removed; read without a lock.
    collections: ArcSwap<Collections>,
    revision: Progress,
    /// Revision of the guard [`ALLOCATIONS`]; 0 if the guard does not exist. The collections contain all allocations up
    /// to this revision.
    allocations: AtomicU64,
    /// Revisions of the guards of quotas; 0 for a guard that does not exist. The accounts contain all uses up to these
    /// revisions.
    quota_guards: [AtomicU64; QUOTA_GUARDS],
    /// Number of [`Stored::Resync`] events.
    resyncs: AtomicU64,
    /// Single objects that could not be decrypted when the cache first got them.
    late: LateObjects,
    /// Notified when a history exceeds its usual limits.
    bursts: Notify,
    /// Notified when a watch with bookmarks may have got no event of the newest change.
    lagging: Notify,
    /// Notified when a collection takes a snapshot.
    snapshots_taken: Notify,
    /// Bytes of the snapshots of all collections.
    snapshot_bytes: Arc<AtomicUsize>,
    /// The usage of quotas by the objects. Lock order: this lock before the lock of a collection.
    pub(crate) quotas: Ledger,
    /// Events that watches share.
    pub(crate) rendered: Arc<RenderedEvents>,
    /// Conversions of objects that watches share.
    pub(crate) conversions: Arc<Conversions>,
    /// Superseded objects that responses still refer to.
    pub(crate) superseded: Arc<SupersededObjects>,
    /// The encoded bytes of the objects in each namespace.
    pub(crate) namespace_bytes: Arc<NamespaceBytes>,
}

/// The counts that all collections share.
#[derive(Clone, Default)]
struct Counts {
    superseded: Arc<SupersededObjects>,
    namespace_bytes: Arc<NamespaceBytes>,
    snapshot_bytes: Arc<AtomicUsize>,
}

/// The collection of one resource.
pub(crate) struct Shared {
    collection: Mutex<Collection>,
    /// An object that cannot be decrypted. While there is such an object, the objects of the collection are not loaded.
    /// The field is set only at the start, for some built-in resources. Later, another object that cannot be decrypted
    /// may replace this one.
    unreadable: ArcSwapOption<UnreadableObject>,
}

impl Shared {
    /// Locks the collection. The guard must not be held over an await.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Collection> {
        self.collection.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Cache {
    /// Loads the objects of the built-in resources. Returns the cache and the watch for [`Cache::follow`]. Resources
    /// with unreadable objects are not loaded.
    pub(crate) async fn load(store: &dyn Store) -> std::result::Result<(Self, Watch), coracle_store::Error> {
        let ReadablePage { page, unreadable } = store.list_readable(Range::default()).await?;
        let watch = store.watch("", page.revision).await?;
        let cache = Self::new(page.revision);
        cache.mark_unreadable(unreadable)?;
        for entry in page.entries {
            if let Some(collection) = cache.by_key(&entry.key) {
                if collection.is_readable() {
                    collection.lock().load(entry);
                }
            } else {
                cache.note_guard(&entry.key, entry.modified);
            }
        }
        cache.quotas.lock().load(&cache);
        Ok((cache, watch))
    }

    /// An empty cache of the built-in resources at a revision.
    pub(crate) fn new(revision: u64) -> Self {
        let (mut collections, counts) = (Collections::new(), Counts::default());
        for kind in built_in().iter().filter(|kind| kind.is_stored() && kind.is_storage_version()) {
            insert(&mut collections, Collection::new(kind.clone(), revision), counts.clone());
        }
        let revision = Progress::new(revision);
        Self {
            collections: ArcSwap::from_pointee(collections),
            revision,
            allocations: AtomicU64::new(0),
            quota_guards: std::array::from_fn(|_| AtomicU64::new(0)),
            resyncs: AtomicU64::new(0),
            late: LateObjects::default(),
            bursts: Notify::new(),
            lagging: Notify::new(),
            snapshots_taken: Notify::new(),
            snapshot_bytes: counts.snapshot_bytes,
            quotas: Ledger::default(),
            rendered: Arc::default(),
            conversions: Arc::default(),
            superseded: counts.superseded,
            namespace_bytes: counts.namespace_bytes,
        }
    }

    /// Adds the collection of a resource with its stored objects, or replaces the resource of an existing collection.
    /// Only the registry calls it, one call at a time.
    pub(crate) async fn add(
        &self,
        store: &dyn Store,
        stored: &Arc<Resource>,
    ) -> std::result::Result<(), coracle_store::Error> {
        if let Ok(known) = self.collection(stored) {
            known.lock().replace(stored.clone());
            return Ok(());
        }
        // The collection keeps commits until the listed objects are loaded.
        let collection = Collection::loading(stored.clone());
        let mut collections = Collections::clone(&self.collections.load());
        let counts = Counts {
            superseded: self.superseded.clone(),
            namespace_bytes: self.namespace_bytes.clone(),
            snapshot_bytes: self.snapshot_bytes.clone(),
        };
        let collection = insert(&mut collections, collection, counts);
        self.collections.store(Arc::new(collections));
        let loaded = self.list_into(store, &collection, stored).await;
        if loaded.is_err() {
            self.remove(&stored.group, &stored.plural);
        }
        loaded
    }

    /// Loads the stored objects of a resource into its collection, which keeps commits meanwhile.
    async fn list_into(
        &self,
        store: &dyn Store,
        collection: &Shared,
        kind: &Resource,
    ) -> std::result::Result<(), coracle_store::Error> {
        loop {
            let resyncs = self.resyncs.load(Ordering::Acquire);
            let ReadablePage { page, unreadable } = Self::listed(store, kind).await?;
            // A resync counts itself before it takes this lock. So it cannot drop the kept commits between the
            // comparison and the load.
            let mut quotas = self.quotas.lock();
            // A resync happened during the list. The commits between the list and the resync are missing, so list
            // again.
            if self.resyncs.load(Ordering::Acquire) == resyncs {
                collection.lock().loaded(page, unreadable.iter().map(Unreadable::entry).collect());
                quotas.recount(self, kind);
                collection.unreadable.store(None);
                if !unreadable.is_empty() {
                    self.late.notify();
                }
                return Ok(());
            }
        }
    }

    /// Removes the collection of a resource. Its watches end.
    pub(crate) fn remove(&self, group: &str, plural: &str) {
        let mut collections = Collections::clone(&self.collections.load());
        let removed = collections.get_mut(group).and_then(|group| group.remove(plural));
        let mut quotas = self.quotas.lock();
        self.collections.store(Arc::new(collections));
        if let Some(removed) = removed {
            let mut removed = removed.lock();
            removed.close();
            quotas.recount(self, removed.kind());
        }
    }

    /// Applies the events of the store until the watch ends. Then the waits for further revisions fail.
    pub(crate) async fn follow(self: Arc<Self>, watch: Watch) {
        let _closing = self.revision.close_on_drop();
        tokio::select! {
            () = self.apply_events(watch) => (),
            () = self.remove_old_changes() => (),
            () = self.send_bookmarks() => (),
            () = self.drop_old_snapshots() => (),
        }
    }

    async fn apply_events(&self, mut watch: Watch) {
        while let Some(event) = watch.next().await {
            match event {
                Stored::Commit(commit) => self.apply(&commit),
                Stored::Progress(revision) => self.revision.advance(revision),
                Stored::Unreadable(entry) => self.note_unreadable(entry),
                Stored::Resync { page, unreadable } => self.resync(page, &unreadable),
            }
        }
    }

    /// Removes changes above the usual limits of a history when they are no longer recent. While there are no such
    /// changes, no timer runs.
    async fn remove_old_changes(&self) {
        loop {
            // The notification alone is not enough: after a pass, the histories may still have recent changes above the
            // usual limits.
            if !self.all().iter().any(|one| one.lock().is_above_usual_limits()) {
                self.bursts.notified().await;
            }
            tokio::time::sleep(collection::RECENT / 2).await;
            let now = Instant::now();
            for collection in self.all() {
                let mut objects = collection.lock();
                if objects.is_above_usual_limits() {
                    objects.remove_old_changes(now);
                }
            }
        }
    }

    pub(crate) fn apply(&self, commit: &Commit) {
        if *commit.key == *unreadable::LATE {
            self.apply_late(commit.revision);
        }
        if let Some(collection) = self.by_key(&commit.key) {
            self.change(&collection, |objects| objects.apply(commit));
        } else {
            self.note_guard(&commit.key, commit.revision);
        }
        // A request that waits for this revision may allocate next, and then needs the guard of the same revision. If
        // the commit of a guard follows, that commit advances the revision.
        if !commit.guard_follows {
            self.revision.advance(commit.revision);
        }
    }

    /// Changes a collection, and updates the usage of quotas.
    fn change<C>(&self, collection: &Shared, apply: impl FnOnce(&mut Collection) -> C)
    where
        C: IntoIterator<Item = Change>,
    {
        let mut quotas = self.quotas.lock();
        let mut objects = collection.lock();
        let changes = apply(&mut objects);
        let kind = objects.shared_kind();
        if objects.is_above_usual_limits() {
            self.bursts.notify_one();
        }
        if objects.may_watches_lag() {
            self.lagging.notify_one();
        }
        drop(objects);
        for change in changes {
            quotas.observe(self, &kind, &change);
        }
    }

    /// Replaces all objects, because commits were missed. Unreadable objects keep their former states. The watches of
    /// clients end, and clients list again.
    pub(crate) fn resync(&self, page: Page, unreadable: &[UnreadableEntry]) {
        self.resyncs.fetch_add(1, Ordering::AcqRel);
        let (mut found, guards) = by_resource(page.entries, |entry| &entry.key);
        let (mut lost, lost_guards) = by_resource(unreadable.iter().cloned(), |entry| &entry.key);
        let mut quotas = self.quotas.lock();
        for (group, plurals) in &**self.collections.load() {
            for (plural, collection) in plurals {
                let resource = (group.clone(), plural.clone());
                let entries = found.remove(&resource).unwrap_or_default();
                let unreadable = lost.remove(&resource).unwrap_or_default();
                collection.lock().reload(entries, page.revision, unreadable);
            }
        }
        quotas.load(self);
        drop(quotas);
        self.late.clear();
        if !unreadable.is_empty() {
            self.late.notify();
        }
        // Guards come after the objects: a request that knows a guard must find all objects up to the guard's revision.
        self.forget_guards(&lost_guards);
        guards.iter().for_each(|guard| self.note_guard(&guard.key, guard.modified));
        self.revision.advance(page.revision);
    }

    /// Sets the revision of each guard to 0, except of unreadable guards. A store that was restored from a backup may
    /// have no guards.
    fn forget_guards(&self, unreadable: &[UnreadableEntry]) {
        let quotas = (0..QUOTA_GUARDS).map(|number| format!("{QUOTA_GUARD}{number}"));
        for key in quotas.chain([ALLOCATIONS.to_owned()]) {
            if !unreadable.iter().any(|one| *one.key == *key) {
                self.note_guard(&key, 0);
            }
        }
    }

    fn note_guard(&self, key: &str, revision: u64) {
        let number = key.strip_prefix(QUOTA_GUARD).and_then(|number| number.parse::<usize>().ok());
        if key == ALLOCATIONS {
            self.allocations.store(revision, Ordering::Release);
        } else if let Some(guard) = number.and_then(|number| self.quota_guards.get(number)) {
            guard.store(revision, Ordering::Release);
        }
    }

    /// The guard of quotas with this number, below [`QUOTA_GUARDS`], at its known revision.
    pub(crate) fn quota_guard(&self, number: usize) -> Guard {
        let known = self.quota_guards.get(number).map_or(0, |guard| guard.load(Ordering::Acquire));
        let expect = if known == 0 { Expect::Absent } else { Expect::Revision(known) };
        Guard { key: format!("{QUOTA_GUARD}{number}").into(), expect }
    }

    /// Revision of [`ALLOCATIONS`]; 0 if it does not exist.
    pub(crate) fn allocations(&self) -> u64 {
        self.allocations.load(Ordering::Acquire)
    }

    /// The collections of all resources.
    pub(crate) fn all(&self) -> Vec<Arc<Shared>> {
        self.collections.load().values().flat_map(|group| group.values().cloned()).collect()
    }

    fn by_key(&self, key: &str) -> Option<Arc<Shared>> {
        let (group, plural) = split(key)?;
        self.collections.load().get(group)?.get(plural).cloned()
    }

    /// The newest applied revision.
    pub(crate) fn revision(&self) -> u64 {
        self.revision.revision()
    }

    /// Receives each applied revision.
    pub(crate) fn revisions(&self) -> tokio::sync::watch::Receiver<u64> {
        self.revision.subscribe()
    }

    /// Waits until the commit of a revision is applied.
    ///
    /// # Errors
    /// `ServiceUnavailable` if the watch of the store has ended.
    pub(crate) async fn reach(&self, revision: u64) -> Result<()> {
        match self.revision.reach(revision).await {
            true => Ok(()),
            false => Err(ApiError::unavailable("the store is closed")),
        }
    }

    /// Waits until a condition holds. The condition is evaluated after each applied revision.
    pub(crate) async fn until(&self, holds: impl Fn() -> bool) {
        let mut revisions = self.revision.subscribe();
        // An error means that the cache was dropped.
        let _ = revisions.wait_for(|_| holds()).await;
    }

    /// The collection of a resource. All versions of the resource share one collection.
    ///
    /// # Errors
    /// `NotFound` if the resource is not served, `InternalError` if its stored objects cannot be decrypted.
    pub(crate) fn of(&self, kind: &Resource) -> Result<Arc<Shared>> {
        let found = self.collection(kind)?;
        found.check_readable()?;
        Ok(found)
    }

    /// Does the same as [`Cache::of`], but also returns a collection whose objects are not loaded.
    pub(crate) fn collection(&self, kind: &Resource) -> Result<Arc<Shared>> {
        let stored = kind.stored_as();
        let collections = self.collections.load();
        let found = collections.get(&*stored.group).and_then(|group| group.get(&*stored.plural));
        found.cloned().ok_or_else(ApiError::no_resource)
    }

    /// Number of objects of a resource; 0 if the resource is not served.
    pub(crate) fn count(&self, group: &str, plural: &str) -> u64 {
        let collections = self.collections.load();
        let found = collections.get(group).and_then(|group| group.get(plural));
        found.map_or(0, |objects| u64::try_from(objects.lock().len()).unwrap_or(u64::MAX))
    }

    /// The objects of a namespace in their stored versions. An empty namespace selects the objects of all namespaces.
    /// The result is empty if [`Cache::check_readable`] fails.
    pub(crate) fn list(&self, kind: &Resource, namespace: &str) -> Vec<Arc<Object>> {
        let prefix = prefix_of(kind, namespace);
        self.of(kind).map(|all| all.lock().under(&prefix).cloned().collect()).unwrap_or_default()
    }

    /// An object in its stored version. `None` if it does not exist, or if [`Cache::check_readable`] fails.
    pub(crate) fn get(&self, kind: &Resource, namespace: &str, name: &str) -> Option<Arc<Object>> {
        self.of(kind).ok()?.lock().get(&key_of(kind, namespace, name))
    }
}

/// Groups items by the resource in their keys. The second result has the items without a resource, such as guards.
fn by_resource<T>(items: impl IntoIterator<Item = T>, key: impl Fn(&T) -> &str) -> (ByResource<T>, Vec<T>) {
    let (mut of_resources, mut others) = (ByResource::<T>::new(), Vec::new());
    for item in items {
        let resource = split(key(&item)).map(|(group, plural)| (group.into(), plural.into()));
        match resource {
            Some(resource) => of_resources.entry(resource).or_default().push(item),
            None => others.push(item),
        }
    }
    (of_resources, others)
}

/// Group and resource of a key. `None` for the key of a guard.
fn split(key: &str) -> Option<(&str, &str)> {
    let mut parts = key.split('/');
    Some((parts.next()?, parts.next()?))
}

fn insert(collections: &mut Collections, mut collection: Collection, counts: Counts) -> Arc<Shared> {
    collection.superseded = counts.superseded;
    collection.namespace_bytes = counts.namespace_bytes;
    collection.snapshots = Snapshots::new(counts.snapshot_bytes);
    let (group, plural) = (collection.kind().group.as_ref().into(), collection.kind().plural.as_ref().into());
    let shared = Arc::new_cyclic(|itself| {
        collection.share_as(itself.clone());
        Shared { collection: Mutex::new(collection), unreadable: ArcSwapOption::empty() }
    });
    collections.entry(group).or_default().insert(plural, shared.clone());
    shared
}

#[cfg(test)]
mod tests {
    use coracle_kinds::kind::by_kind;
    use coracle_store::Entry;
    use serde_json::json;

    use super::*;

    fn value(name: &str) -> bytes::Bytes {
        encode(by_kind("v1", "ConfigMap").unwrap(), &json!({"metadata": {"name": name, "namespace": "ns"}}))
    }

    fn unreadable(key: impl Into<Arc<str>>) -> UnreadableEntry {
        UnreadableEntry { key: key.into(), modified: 4, service: None }
    }

    /// Commits a ConfigMap with a megabyte of data.
    pub(super) fn commit_large(cache: &Cache, name: &str, revision: u64, created: u64) {
        let kind = by_kind("v1", "ConfigMap").unwrap();
        let object =
            json!({"metadata": {"name": name, "namespace": "ns"}, "data": {"k": "x".repeat(1 << 20)}});
        let (key, value) = (key_of(kind, "ns", name).into(), Some(encode(kind, &object)));
        cache.apply(&Commit { key, revision, value, created, guard_follows: false });
    }

    #[test]
    fn a_superseded_object_counts_while_only_a_response_refers_to_it() {
        let (cache, kind) = (Cache::new(1), by_kind("v1", "ConfigMap").unwrap());
        let update = |revision: u64| commit_large(&cache, "a", revision, 2);
        let is_one = || (1 << 20..2 << 20).contains(&cache.superseded.bytes());
        update(2);
        let listed = cache.list(kind, "ns");
        assert_eq!(cache.superseded.bytes(), 0, "a current object");
        (3..20).for_each(update);
        assert!(is_one(), "{}", cache.superseded.bytes());
        drop(listed);
        assert_eq!(cache.superseded.bytes(), 0, "the history does not count");
        let listed = cache.list(kind, "ns");
        cache.resync(Page { entries: Vec::new(), revision: 30, more: false }, &[]);
        assert!(is_one(), "{}", cache.superseded.bytes());
        drop(listed);
        assert_eq!(cache.superseded.bytes(), 0);
    }

    #[test]
    fn fields_of_an_object_are_read_without_the_others() {
        let kind = by_kind("v1", "ConfigMap").unwrap();
        let map = json!({"metadata": {"name": "a", "uid": "u"}, "data": {"k": "v"}, "immutable": true});
        let object = Object::of(kind, "/configmaps/ns/a".into(), 1, &map);
        let before = parses::so_far();
        let part = object.part(&[&["metadata", "uid"], &["immutable"], &["absent"]]);
        assert_eq!(part, json!({"metadata": {"uid": "u"}, "immutable": true}));
        assert_eq!(parses::so_far(), before, "the tree of the object is not made");
    }

    #[tokio::test]
    async fn a_revision_is_reached_with_its_guard() {
        let (cache, kind) = (Cache::new(1), by_kind("v1", "ConfigMap").unwrap());
        let commit = |key: &str, guard_follows| Commit {
            key: key.into(),
            revision: 2,
            value: Some(value("a")),
            created: 2,
            guard_follows,
        };
        cache.apply(&commit(&key_of(kind, "ns", "a"), true));
        assert_eq!((cache.revision(), cache.allocations()), (1, 0));
        cache.apply(&commit(ALLOCATIONS, false));
        assert_eq!((cache.revision(), cache.allocations()), (2, 2));
        assert_eq!(cache.quota_guard(5).expect, Expect::Absent);
        cache.apply(&commit("quotas-5", false));
        cache.apply(&commit("quotas-64", false));
        let guard = cache.quota_guard(5);
        assert_eq!((&*guard.key, guard.expect), ("quotas-5", Expect::Revision(2)));
    }

    #[test]
    fn a_guard_that_a_restored_store_lacks_is_forgotten() {
        let cache = Cache::new(1);
        for key in [ALLOCATIONS, "quotas-5", "quotas-6"] {
            let value = Some(bytes::Bytes::new());
            cache.apply(&Commit { key: key.into(), revision: 5, value, created: 5, guard_follows: false });
        }
        let entry = Entry { key: "quotas-6".into(), value: bytes::Bytes::new(), created: 2, modified: 3 };
        let page = Page { entries: vec![entry], revision: 4, more: false };
        cache.resync(page, &[unreadable(ALLOCATIONS)]);
        assert_eq!(cache.allocations(), 5, "an unreadable guard still exists");
        let expect = |number: usize| cache.quota_guard(number).expect;
        assert_eq!((expect(5), expect(6)), (Expect::Absent, Expect::Revision(3)));
    }

    #[tokio::test]
    async fn after_missed_commits_objects_are_replaced_and_watches_end() {
        let (cache, kind) = (Cache::new(1), by_kind("v1", "ConfigMap").unwrap());
        let key = |name| Arc::<str>::from(key_of(kind, "ns", name));
        let commit = |name, revision| Commit {
            key: key(name),
            revision,
            value: Some(value(name)),
            created: 0,
            guard_follows: false,
        };
        cache.apply(&commit("gone", 2));
        cache.apply(&commit("kept", 3));
        cache.apply(&commit("unreadable", 4));
        let (watcher, mut events) = Watcher::new(Scope::default(), false);
        cache.of(kind).unwrap().lock().watch_from_now(watcher, 4);
        let entry = |key, value, modified| Entry { key, value, created: 0, modified };
        let entries = vec![
            entry(key("kept"), value("kept"), 3),
            entry(key("new"), value("new"), 8),
            entry(ALLOCATIONS.into(), bytes::Bytes::new(), 9),
        ];
        let lost = ["unreadable", "unknown"].map(|name| unreadable(key(name)));
        cache.resync(Page { entries, revision: 10, more: false }, &lost);
        let former = cache.get(kind, "ns", "unreadable").map(|object| object.revision);
        assert_eq!(former, Some(4), "it is not deleted");
        assert!(cache.find(kind, "ns", "unknown").is_err() && cache.check_complete(kind, "ns").is_err());
        assert!(cache.find(kind, "ns", "gone").unwrap().is_none());
        assert!(cache.check_complete(kind, "other").is_ok());
        cache.apply(&Commit { value: None, ..commit("unreadable", 11) });
        let names: Vec<_> = cache.list(kind, "ns").iter().map(|object| object.name().to_owned()).collect();
        assert_eq!(names, ["kept", "new"]);
        assert_eq!((cache.revision(), cache.allocations()), (11, 9));
        assert!(events.recv().await.is_none());
        let (watcher, _events) = Watcher::new(Scope::default(), false);
        let late = cache.of(kind).unwrap().lock().watch_after(watcher, 3);
        assert!(late.is_err_and(|error| error.is_expired()));
        // A commit that the list already contains is not applied again.
        cache.apply(&commit("gone", 4));
        assert!(cache.get(kind, "ns", "gone").is_none());
    }
}

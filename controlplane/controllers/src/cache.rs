//! The cache of one kind: updated by one watch and by the controllers' own writes.
//!
//! The response of a write goes into the cache at once ([`Cache::written`], [`Cache::removed`]). So no plan uses a
//! state older than the controller's last write; upstream needs "expectations" for this. The resource versions in the
//! watch of one kind increase. So the two sources are merged by version: the higher version wins, and a response older
//! than the watch is ignored.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use coracle_watch::Event;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use tokio::sync::watch;

use crate::object::{Key, Object, controller_of};

/// Handler of changes. The cache calls it for every change, with its lock held.
///
/// A handler may queue keys and read other caches: a handler of pods reads replica sets, services and deployments. It
/// must not read the cache that calls it. If a handler of one kind reads the cache of a second kind, no handler of the
/// second kind reads the cache of the first. Otherwise two threads could wait for each other's lock.
type Handler<K> = Box<dyn Fn(&Change<'_, K>) + Send + Sync>;

/// An object before and after a change; at least one of the two is present.
pub(crate) struct Change<'a, K> {
    pub(crate) old: Option<&'a Arc<K>>,
    pub(crate) new: Option<&'a Arc<K>>,
}

impl<'a, K> Change<'a, K> {
    /// The object after the change, or before it if it was removed.
    pub(crate) fn latest(&self) -> Option<&'a Arc<K>> {
        self.new.or(self.old)
    }
}

/// The objects of one kind.
pub(crate) struct Cache<K> {
    state: Mutex<State<K>>,
    synced: watch::Sender<bool>,
    is_unserved: AtomicBool,
}

struct State<K> {
    objects: BTreeMap<Key, Arc<K>>,
    /// Objects by namespace and controller's uid (empty for orphans), and by name below that.
    owned: HashMap<(String, String), BTreeMap<String, Arc<K>>>,
    /// The highest resource version that the watch has delivered.
    progress: u64,
    /// Objects that this process deleted, until the watch reports their deletion.
    tombstones: HashSet<String>,
    relist: Option<Relist<K>>,
    handlers: Vec<Handler<K>>,
}

/// A running list request.
struct Relist<K> {
    found: BTreeMap<Key, K>,
    /// Objects written since the list began: the list may be older or newer than the write.
    written: BTreeSet<Key>,
}

/// An object that may not exist any more. The caller must read it from the API server (see [`Cache::apply`]).
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Unverified {
    pub(crate) key: Key,
    pub(crate) uid: String,
}

fn version(meta: &ObjectMeta) -> u64 {
    meta.resource_version.as_deref().and_then(|version| version.parse().ok()).unwrap_or_default()
}

impl<K: Object> Cache<K> {
    /// An empty cache.
    pub(crate) fn new() -> Self {
        let state = State {
            objects: BTreeMap::new(),
            owned: HashMap::new(),
            progress: 0,
            tombstones: HashSet::new(),
            relist: None,
            handlers: Vec::new(),
        };
        Self {
            state: Mutex::new(state),
            synced: watch::Sender::new(false),
            is_unserved: AtomicBool::new(false),
        }
    }

    /// Registers a handler like [`Cache::on_change`], and calls it for each object that is in the cache now.
    pub(crate) fn on_change_and_now(&self, handler: impl Fn(&Change<'_, K>) + Send + Sync + 'static) {
        let mut state = self.lock();
        state.objects.values().for_each(|object| handler(&Change { old: None, new: Some(object) }));
        state.handlers.push(Box::new(handler));
    }

    fn lock(&self) -> MutexGuard<'_, State<K>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers a handler for all later changes.
    pub(crate) fn on_change(&self, handler: impl Fn(&Change<'_, K>) + Send + Sync + 'static) {
        self.lock().handlers.push(Box::new(handler));
    }

    /// Records that the API server does not serve the kind. [`Cache::synced`] then returns without a list.
    pub(crate) fn set_unserved(&self) {
        self.is_unserved.store(true, Ordering::Release);
        self.synced.send_replace(true);
    }

    /// Whether the API server serves the kind. If it does not, the store may have objects that the cache lacks.
    pub(crate) fn is_served(&self) -> bool {
        !self.is_unserved.load(Ordering::Acquire)
    }

    /// Returns once the first list is complete, or the API server does not serve the kind.
    pub(crate) async fn synced(&self) {
        // `self` owns the sender, so this cannot fail.
        drop(self.synced.subscribe().wait_for(|synced| *synced).await);
    }

    /// Whether the first list is complete, or the API server does not serve the kind.
    pub(crate) fn is_synced(&self) -> bool {
        *self.synced.borrow()
    }

    /// The object with this key.
    pub(crate) fn get(&self, key: &Key) -> Option<Arc<K>> {
        self.lock().objects.get(key).cloned()
    }

    /// All objects.
    pub(crate) fn all(&self) -> Vec<Arc<K>> {
        self.lock().objects.values().cloned().collect()
    }

    /// Calls `read` with all objects, with the lock held. The rules are the same as for a [`Handler`].
    pub(crate) fn read<R>(&self, read: impl FnOnce(&BTreeMap<Key, Arc<K>>) -> R) -> R {
        read(&self.lock().objects)
    }

    /// The objects of one namespace.
    pub(crate) fn in_namespace(&self, namespace: &str) -> Vec<Arc<K>> {
        let state = self.lock();
        let range = state.objects.range(Key::new(namespace, "")..);
        range.take_while(|(key, _)| key.namespace == namespace).map(|(_, object)| object.clone()).collect()
    }

    /// The objects of one namespace with this controller; an empty uid selects objects without a controller.
    pub(crate) fn owned_by(&self, namespace: &str, uid: &str) -> Vec<Arc<K>> {
        let state = self.lock();
        let owned = state.owned.get(&(namespace.to_owned(), uid.to_owned()));
        owned.into_iter().flat_map(BTreeMap::values).cloned().collect()
    }

    /// Adds the response of a write.
    pub(crate) fn written(&self, mut object: K) -> Arc<K> {
        object.slim();
        let object = Arc::new(object);
        let mut state = self.lock();
        let (key, version) = (object.key(), version(object.meta()));
        let passed = state.relist.is_none() && state.progress >= version;
        if version != 0
            && !passed
            && state.insert(object.clone())
            && let Some(relist) = &mut state.relist
        {
            relist.written.insert(key);
        }
        object
    }

    /// Removes an object that the API server deleted at once on our request.
    pub(crate) fn removed(&self, key: &Key, uid: &str) {
        let mut state = self.lock();
        if state.objects.get(key).is_some_and(|known| known.uid() == uid) {
            state.tombstones.insert(uid.to_owned());
            state.remove(key);
        }
    }

    /// Removes an object that does not exist any more, without waiting for the watch.
    pub(crate) fn remove_missing(&self, unverified: &Unverified) {
        let mut state = self.lock();
        if state.objects.get(&unverified.key).is_some_and(|known| known.uid() == unverified.uid) {
            state.remove(&unverified.key);
        }
    }

    /// Applies an event of the watch. Returns the objects that were written while a list ran and that the list does not
    /// have. Either the list is older than the write, or the object was deleted again. For each of them the caller
    /// reads the object from the API server and calls `remove_missing` if it does not exist.
    pub(crate) fn apply(&self, event: Event<K>) -> Vec<Unverified> {
        let mut state = self.lock();
        match event {
            Event::Apply(object) => state.apply_modified(object),
            Event::Delete(object) => state.apply_deleted(&object),
            Event::Init => state.relist = Some(Relist { found: BTreeMap::new(), written: BTreeSet::new() }),
            Event::InitApply(mut object) => {
                object.slim();
                if let Some(relist) = &mut state.relist {
                    relist.found.insert(object.key(), object);
                }
            }
            Event::InitDone => {
                let unverified = state.finish_list();
                drop(state);
                self.is_unserved.store(false, Ordering::Release);
                self.synced.send_replace(true);
                return unverified;
            }
        }
        Vec::new()
    }
}

// === impl State ===

impl<K: Object> State<K> {
    /// Stores an object that the watch or a list delivers, unless this process has deleted it.
    fn apply_modified(&mut self, mut object: K) {
        self.progress = self.progress.max(version(object.meta()));
        if !self.tombstones.contains(object.uid()) {
            object.slim();
            self.insert(Arc::new(object));
        }
    }

    /// Removes an object whose deletion the watch delivers.
    fn apply_deleted(&mut self, object: &K) {
        self.progress = self.progress.max(version(object.meta()));
        self.tombstones.remove(object.uid());
        let key = object.key();
        if self.objects.get(&key).is_some_and(|known| known.uid() == object.uid()) {
            self.remove(&key);
        }
    }

    /// Applies a complete list. Returns the objects to verify (see [`Cache::apply`]).
    fn finish_list(&mut self) -> Vec<Unverified> {
        let Some(relist) = self.relist.take() else { return Vec::new() };
        let uids: HashSet<String> = relist.found.values().map(|object| object.uid().to_owned()).collect();
        self.tombstones.retain(|uid| uids.contains(uid));
        let missing: Vec<Key> =
            self.objects.keys().filter(|key| !relist.found.contains_key(*key)).cloned().collect();
        let mut unverified = Vec::new();
        for key in missing {
            if let (true, Some(object)) = (relist.written.contains(&key), self.objects.get(&key)) {
                unverified.push(Unverified { uid: object.uid().to_owned(), key });
            } else {
                self.remove(&key);
            }
        }
        for object in relist.found.into_values() {
            self.apply_modified(object);
        }
        unverified
    }

    /// Stores the object unless the cache has the same or a newer version. Returns whether it stored it.
    fn insert(&mut self, object: Arc<K>) -> bool {
        let key = object.key();
        let newer = version(object.meta());
        if newer != 0 && self.objects.get(&key).is_some_and(|known| version(known.meta()) >= newer) {
            return false;
        }
        let old = self.objects.insert(key, object.clone());
        if let Some(old) = &old {
            self.unindex(old);
        }
        self.owned.entry(index(&*object)).or_default().insert(object.name().to_owned(), object.clone());
        self.notify(&Change { old: old.as_ref(), new: Some(&object) });
        true
    }

    fn remove(&mut self, key: &Key) {
        if let Some(old) = self.objects.remove(key) {
            self.unindex(&old);
            self.notify(&Change { old: Some(&old), new: None });
        }
    }

    fn unindex(&mut self, object: &Arc<K>) {
        let place = index(&**object);
        if let Some(owned) = self.owned.get_mut(&place) {
            owned.remove(object.name());
            if owned.is_empty() {
                self.owned.remove(&place);
            }
        }
    }

    fn notify(&self, change: &Change<'_, K>) {
        self.handlers.iter().for_each(|handler| handler(change));
    }
}

fn index<K: Object>(object: &K) -> (String, String) {
    let owner = controller_of(object.meta()).map(|owner| owner.uid.clone()).unwrap_or_default();
    (object.namespace().to_owned(), owner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kube::Resource;

    use crate::object::{ObjectExt, Pod};

    fn pod(name: &str, uid: &str, version: u64) -> Pod {
        let metadata = ObjectMeta {
            name: Some(name.into()),
            namespace: Some("n".into()),
            uid: Some(uid.into()),
            resource_version: Some(version.to_string()),
            ..ObjectMeta::default()
        };
        Pod { metadata, ..Pod::default() }
    }

    fn names(cache: &Cache<Pod>) -> Vec<String> {
        cache.all().iter().map(|pod| format!("{}@{}", pod.uid(), version(pod.meta()))).collect()
    }

    #[tokio::test]
    async fn a_kind_that_is_not_served_counts_as_synced() {
        let cache = Cache::<Pod>::new();
        assert!(cache.is_served());
        cache.apply(Event::Init);
        cache.set_unserved();
        cache.synced().await;
        assert!(!cache.is_served() && names(&cache).is_empty());
        cache.apply(Event::Init);
        cache.apply(Event::InitDone);
        assert!(cache.is_served());
    }

    #[test]
    fn a_write_is_reported_once_and_before_the_watch_event() {
        let cache = Cache::new();
        let calls = Arc::new(Mutex::new(0));
        let count = calls.clone();
        cache.on_change(move |_| *count.lock().unwrap() += 1);
        cache.written(pod("a", "1", 5));
        assert_eq!(names(&cache), ["1@5"]);
        cache.apply(Event::Apply(pod("a", "1", 5)));
        assert_eq!(*calls.lock().unwrap(), 1);
    }

    #[test]
    fn a_late_response_does_not_restore_an_object_that_the_watch_reported_as_deleted() {
        let cache = Cache::new();
        cache.apply(Event::Apply(pod("a", "1", 5)));
        cache.apply(Event::Delete(pod("a", "1", 6)));
        cache.written(pod("a", "1", 5));
        assert!(names(&cache).is_empty());
    }

    #[test]
    fn an_older_event_does_not_undo_a_write_or_a_removal() {
        let cache = Cache::new();
        cache.apply(Event::Apply(pod("a", "1", 3)));
        cache.written(pod("a", "1", 7));
        cache.apply(Event::Apply(pod("a", "1", 6)));
        assert_eq!(names(&cache), ["1@7"]);
        cache.removed(&Key::new("n", "a"), "1");
        cache.apply(Event::Apply(pod("a", "1", 7)));
        assert!(names(&cache).is_empty());
        cache.apply(Event::Delete(pod("a", "1", 8)));
        cache.apply(Event::Apply(pod("a", "2", 9)));
        assert_eq!(names(&cache), ["2@9"]);
    }

    #[test]
    fn a_new_list_removes_missing_objects_and_returns_those_written_meanwhile() {
        let cache = Cache::new();
        cache.apply(Event::Apply(pod("a", "1", 3)));
        cache.apply(Event::Init);
        cache.written(pod("b", "2", 9));
        cache.apply(Event::InitApply(pod("c", "3", 4)));
        let unverified = cache.apply(Event::InitDone);
        assert_eq!(names(&cache), ["2@9", "3@4"]);
        assert_eq!(unverified, [Unverified { key: Key::new("n", "b"), uid: "2".into() }]);
        cache.remove_missing(&unverified[0]);
        assert_eq!(names(&cache), ["3@4"]);
    }

    #[test]
    fn objects_are_found_by_their_controller() {
        let cache = Cache::new();
        let mut owned = pod("a", "1", 1);
        owned.metadata.owner_references = Some(vec![
            crate::object::ReplicaSet { metadata: pod("rs", "9", 1).metadata, ..Default::default() }
                .controller_reference(),
        ]);
        cache.apply(Event::Apply(owned.clone()));
        cache.apply(Event::Apply(pod("b", "2", 2)));
        assert_eq!(cache.owned_by("n", "9").len(), 1);
        assert_eq!(cache.owned_by("n", "").len(), 1);
        owned.metadata.owner_references = None;
        owned.metadata.resource_version = Some("4".into());
        cache.apply(Event::Apply(owned));
        assert_eq!(cache.owned_by("n", "9").len(), 0);
        assert_eq!(cache.owned_by("n", "").len(), 2);
    }
}

//! The cache of one kind: updated by one watch and by the controllers' own writes.
//!
//! The response of a write goes into the cache at once ([`Cache::written`], [`Cache::removed`]). So no plan uses a
//! state older than the controller's last write; upstream needs "expectations" for this. The resource versions in the
//! watch of one kind increase. So the two sources are merged by version: the higher version wins, and a response older
//! than the watch is ignored.

mod index;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use coracle_watch::Event;
use tokio::sync::watch;

use crate::object::{Key, Object};
use index::{Index, Slot};

/// Handler of changes. The cache calls it for every change, with its lock held.
///
/// A handler may queue keys and read other caches: a handler of pods reads replica sets, services and deployments. A
/// handler must not read the cache that calls it. Handlers of two kinds must not read the caches of each other.
/// Otherwise two threads could wait for each other's lock.
type Handler<K> = Box<dyn Fn(&Change<'_, K>) + Send + Sync>;

/// An object before and after a change; at least one of the two is present.
pub(crate) struct Change<'a, K> {
    pub(crate) old: Option<&'a Arc<K>>,
    pub(crate) new: Option<&'a Arc<K>>,
}

impl<'a, K> Change<'a, K> {
    /// The object after the change. If the object was removed, its last state.
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
    index: Index,
    /// The objects, at the slots of the index.
    objects: Vec<Option<Arc<K>>>,
    /// The objects of a running list request.
    found: Vec<K>,
    handlers: Vec<Handler<K>>,
}

/// The objects of a locked cache.
pub(crate) struct Objects<'a, K>(&'a State<K>);

/// An object that may not exist any more. The caller must read it from the API server (see [`Cache::apply`]).
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Unverified {
    pub(crate) key: Key,
    pub(crate) uid: String,
}

impl<K: Object> Cache<K> {
    /// An empty cache.
    pub(crate) fn new() -> Self {
        let state =
            State { index: Index::default(), objects: Vec::new(), found: Vec::new(), handlers: Vec::new() };
        Self {
            state: Mutex::new(state),
            synced: watch::Sender::new(false),
            is_unserved: AtomicBool::new(false),
        }
    }

    /// Registers a handler like [`Cache::on_change`], and calls it for each object that is in the cache now.
    pub(crate) fn on_change_and_now(&self, handler: impl Fn(&Change<'_, K>) + Send + Sync + 'static) {
        let mut state = self.lock();
        for object in state.at(state.index.all()) {
            handler(&Change { old: None, new: Some(&object) });
        }
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

    /// Whether the API server serves the kind. Otherwise the store may have objects that the cache lacks.
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
        self.lock().get(key).cloned()
    }

    /// All objects.
    pub(crate) fn all(&self) -> Vec<Arc<K>> {
        let state = self.lock();
        state.at(state.index.all())
    }

    /// Calls `read` with all objects, with the lock held. The rules are the same as for a [`Handler`].
    pub(crate) fn read<R>(&self, read: impl FnOnce(&Objects<'_, K>) -> R) -> R {
        read(&Objects(&self.lock()))
    }

    /// The objects of one namespace.
    pub(crate) fn in_namespace(&self, namespace: &str) -> Vec<Arc<K>> {
        let state = self.lock();
        state.at(state.index.in_namespace(namespace))
    }

    /// At most `limit` objects of one namespace, in the order of the names.
    pub(crate) fn first_in_namespace(&self, namespace: &str, limit: usize) -> Vec<Arc<K>> {
        let state = self.lock();
        state.at(state.index.first_in_namespace(namespace, limit))
    }

    /// The objects of one namespace with this controller; an empty uid selects objects without a controller.
    pub(crate) fn owned_by(&self, namespace: &str, uid: &str) -> Vec<Arc<K>> {
        let state = self.lock();
        state.at(state.index.owned_by(namespace, uid))
    }

    /// Adds the response of a write.
    pub(crate) fn written(&self, mut object: K) -> Arc<K> {
        object.slim();
        let object = Arc::new(object);
        let mut state = self.lock();
        if state.index.accepts_write(object.meta()) && state.insert(object.clone()) {
            state.index.record_write(object.meta());
        }
        object
    }

    /// Removes an object that the API server deleted at once on the request of this process.
    pub(crate) fn removed(&self, key: &Key, uid: &str) {
        let mut state = self.lock();
        if state.has(key, uid) {
            state.index.record_deletion(uid);
            state.remove(key);
        }
    }

    /// Removes an object that does not exist any more, without waiting for the watch.
    pub(crate) fn remove_missing(&self, unverified: &Unverified) {
        let mut state = self.lock();
        if state.has(&unverified.key, &unverified.uid) {
            state.remove(&unverified.key);
        }
    }

    /// Applies an event of the watch. Returns the objects that were written while a list ran and that the list does not
    /// have. Either the list is older than the write, or the object was deleted again. For each of these objects the
    /// caller reads the object from the API server and calls `remove_missing` if it does not exist.
    pub(crate) fn apply(&self, event: Event<K>) -> Vec<Unverified> {
        let mut state = self.lock();
        match event {
            Event::Apply(object) => state.apply_modified(object),
            Event::Delete(object) => state.apply_deleted(&object),
            Event::Init => {
                state.index.begin_list();
                state.found.clear();
            }
            Event::InitApply(mut object) => {
                object.slim();
                state.found.push(object);
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

// === impl Objects ===

impl<'a, K: Object> Objects<'a, K> {
    /// The object with this key.
    pub(crate) fn get(&self, key: &Key) -> Option<&'a Arc<K>> {
        self.0.get(key)
    }

    /// The objects of one namespace, in the order of their names.
    pub(crate) fn in_namespace(&self, namespace: &str) -> Vec<Arc<K>> {
        self.0.at(self.0.index.in_namespace(namespace))
    }
}

// === impl State ===

impl<K: Object> State<K> {
    fn get(&self, key: &Key) -> Option<&Arc<K>> {
        self.objects.get(self.index.slot(key)?)?.as_ref()
    }

    /// Whether the object with this key has this uid.
    fn has(&self, key: &Key, uid: &str) -> bool {
        self.get(key).is_some_and(|known| known.uid() == uid)
    }

    /// The objects at these slots.
    fn at(&self, slots: Vec<Slot>) -> Vec<Arc<K>> {
        slots.into_iter().filter_map(|slot| self.objects.get(slot)?.clone()).collect()
    }

    /// Stores an object that the watch or a list delivers, unless this process has deleted it.
    fn apply_modified(&mut self, mut object: K) {
        if self.index.accepts_event(object.meta()) {
            object.slim();
            self.insert(Arc::new(object));
        }
    }

    /// Removes an object whose deletion the watch delivers.
    fn apply_deleted(&mut self, object: &K) {
        self.index.record_deletion_event(object.meta());
        let key = object.key();
        if self.has(&key, object.uid()) {
            self.remove(&key);
        }
    }

    /// Applies a complete list. Returns the objects to verify (see [`Cache::apply`]).
    fn finish_list(&mut self) -> Vec<Unverified> {
        let found = std::mem::take(&mut self.found);
        let metadata = found.iter().map(|object| object.meta()).collect();
        let Some(missing) = self.index.finish_list(metadata) else { return Vec::new() };
        missing.deleted.iter().for_each(|key| self.remove(key));
        let verify = |key: Key| Some(Unverified { uid: self.get(&key)?.uid().to_owned(), key });
        let unverified = missing.written.into_iter().filter_map(verify).collect();
        for object in found {
            self.apply_modified(object);
        }
        unverified
    }

    /// Stores the object unless the cache has the same or a newer version. Returns whether the object was stored.
    fn insert(&mut self, object: Arc<K>) -> bool {
        let key = object.key();
        let old = self.get(&key).cloned();
        let Some(slot) = self.index.insert(key, old.as_ref().map(|old| old.meta()), object.meta()) else {
            return false;
        };
        match self.objects.get_mut(slot) {
            Some(place) => *place = Some(object.clone()),
            None => self.objects.push(Some(object.clone())),
        }
        self.notify(&Change { old: old.as_ref(), new: Some(&object) });
        true
    }

    fn remove(&mut self, key: &Key) {
        let slot = self.index.slot(key).and_then(|slot| self.objects.get_mut(slot));
        if let Some(old) = slot.and_then(Option::take) {
            self.index.remove(key, old.meta());
            self.notify(&Change { old: Some(&old), new: None });
        }
    }

    fn notify(&self, change: &Change<'_, K>) {
        self.handlers.iter().for_each(|handler| handler(change));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
    use kube::Resource;

    use super::index::version;
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
    fn objects_have_the_order_of_their_keys_and_a_removal_leaves_no_gap() {
        let cache = Cache::new();
        for (name, version) in [("d", 1), ("b", 2), ("c", 3)] {
            cache.apply(Event::Apply(pod(name, name, version)));
        }
        cache.apply(Event::Delete(pod("b", "b", 4)));
        for (name, version) in [("e", 5), ("a", 6)] {
            cache.apply(Event::Apply(pod(name, name, version)));
        }
        assert_eq!(names(&cache), ["a@6", "c@3", "d@1", "e@5"]);
        let uids = |pods: Vec<Arc<Pod>>| pods.iter().map(|pod| pod.uid().to_owned()).collect::<Vec<_>>();
        assert_eq!(uids(cache.in_namespace("n")), ["a", "c", "d", "e"]);
        assert_eq!(uids(cache.owned_by("n", "")), ["a", "c", "d", "e"]);
        assert_eq!(cache.lock().objects.len(), 4);
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

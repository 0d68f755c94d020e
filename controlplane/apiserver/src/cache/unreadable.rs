//! Stored objects that cannot be decrypted.
//!
//! An object that is missing in the cache counts as deleted, and a new object could take its name. So the server must
//! know which objects it cannot decrypt. If an object cannot be decrypted at the start, the behaviour depends on its
//! resource:
//!
//! | resource | behaviour |
//! |---|---|
//! | custom resources | requests that need the object fail, the others succeed |
//! | [`OPTIONAL`], if a key management service fails | all requests fail until all objects are loaded |
//! | others | the server does not start |
//!
//! Each resource of [`OPTIONAL`] is in one of these states:
//!
//! ```text
//! Cache::load -> loaded
//!            \-> unreadable -> Cache::load_unreadable -> loaded
//!                    ^--------- the service fails ----/
//! ```
//!
//! While the server runs, another server may write an object that this server cannot decrypt. The former state of the
//! object stays visible. Without a former state, requests of clients that read this object fail. This applies to all
//! resources.
//!
//! [`Cache::read_again`] reads such single objects again. Their revisions are lower than the revision of the cache. A
//! watch that resumes later would miss an event at such a revision. So the objects wait in [`LateObjects`] for the next
//! commit of [`LATE`], and are published at its revision. No commit of an object has this revision.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use bytes::Bytes;
use coracle_kinds::{Resource, initializers};
use coracle_store::{
    Entry, Error as StoreError, Expect, Range, ReadablePage, Store, Tier, Unreadable, UnreadableEntry, Write,
};
use tokio::sync::watch;

use super::{Cache, Object, Shared, key_of, prefix_of, split};
use crate::error::{ApiError, Result};

/// Group and name of the resources that the server does not need for its own decisions. If objects of another built-in
/// resource are unreadable, the server does not start. Otherwise the server would decide about requests without the
/// roles, quotas, policies or allocated addresses.
const OPTIONAL: [(&str, &str); 2] = [("", "configmaps"), ("", "secrets")];
/// Store key of an entry whose commits only provide revisions for late objects. The key has no `/`, so no object has
/// it.
pub(super) const LATE: &str = "late-objects";
/// Maximum failed reads in one pass, for each [`Cause`]. The next pass continues after the last failed read.
const MAX_FAILURES: usize = 1000;
/// Maximum objects for each commit of [`LATE`]. A watch ends if its queue is full, so this is much less than the size
/// of the queue.
const LATE_OBJECTS: usize = 256;

/// The cause of unreadable objects: the name of a failed key management service, or `None` for another cause.
type Cause = Option<Box<str>>;

/// An object that cannot be decrypted.
pub(super) struct UnreadableObject {
    key: Arc<str>,
    resource: Box<str>,
}

/// State of the repeated reads of single objects that cannot be decrypted.
pub(super) struct LateObjects {
    state: Mutex<LateState>,
    /// Notified when an object cannot be decrypted.
    found: watch::Sender<()>,
}

#[derive(Default)]
struct LateState {
    /// Objects that are decrypted and wait for the next commit of [`LATE`].
    decrypted: BTreeMap<Arc<str>, Entry>,
    /// The last key of an incomplete pass, for each cause. The next pass begins after it. Otherwise objects that never
    /// become readable would prevent reads of all objects after them.
    last: HashMap<Cause, Arc<str>>,
}

// === impl LateObjects ===

impl Default for LateObjects {
    fn default() -> Self {
        Self { state: Mutex::default(), found: watch::Sender::new(()) }
    }
}

impl LateObjects {
    fn lock(&self) -> MutexGuard<'_, LateState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes the task that reads unreadable objects again.
    pub(super) fn notify(&self) {
        self.found.send_replace(());
    }

    /// Drops the objects that wait for a commit: all objects are listed again.
    pub(super) fn clear(&self) {
        self.lock().decrypted.clear();
    }
}

// === impl Shared ===

impl Shared {
    /// Checks that the objects are loaded.
    ///
    /// # Errors
    /// `InternalError`, as upstream, if stored objects cannot be decrypted.
    pub(crate) fn check_readable(&self) -> Result<()> {
        let unreadable = self.unreadable.load();
        let Some(object) = &*unreadable else { return Ok(()) };
        Err(ApiError::undecryptable(&object.resource, "the key management service failed"))
    }

    pub(crate) fn is_readable(&self) -> bool {
        self.unreadable.load().is_none()
    }
}

// === impl Cache ===

impl Cache {
    /// Checks that the objects of a resource are loaded. A caller for which an absent object has a meaning calls this
    /// before [`Cache::get`] and [`Cache::list`].
    ///
    /// # Errors
    /// `InternalError` if stored objects cannot be decrypted.
    pub(crate) fn check_readable(&self, kind: &Resource) -> Result<()> {
        self.collection(kind).map_or(Ok(()), |collection| collection.check_readable())
    }

    /// Checks that a list of the objects of a namespace is complete. An empty namespace selects all namespaces.
    ///
    /// # Errors
    /// `InternalError` if a stored object cannot be decrypted and no former state of it is known.
    pub(crate) fn check_complete(&self, kind: &Resource, namespace: &str) -> Result<()> {
        let Ok(collection) = self.collection(kind) else { return Ok(()) };
        collection.check_readable()?;
        collection.lock().check_complete(&prefix_of(kind, namespace))
    }

    /// An object in its stored version. `None` if it does not exist. If the newest state cannot be decrypted, the
    /// former state is returned.
    ///
    /// # Errors
    /// `InternalError` if the object cannot be decrypted and no former state is known, or if [`Cache::check_readable`]
    /// fails.
    pub(crate) fn find(&self, kind: &Resource, namespace: &str, name: &str) -> Result<Option<Arc<Object>>> {
        let Ok(collection) = self.collection(kind) else { return Ok(None) };
        collection.check_readable()?;
        collection.lock().find(&key_of(kind, namespace, name))
    }

    /// Checks that the newest state of an object can be decrypted, if the object exists. If it cannot, each change of
    /// the former state is a conflict, and a retry cannot succeed.
    ///
    /// # Errors
    /// `InternalError` if the newest state cannot be decrypted.
    pub(crate) fn check_newest(&self, kind: &Resource, key: &str) -> Result<()> {
        self.collection(kind)?.lock().check_newest(key)
    }

    /// The error of an ordinary deletion of an object whose newest state cannot be decrypted. An unsafe deletion can
    /// remove such an object. `None` for another object.
    pub(crate) fn corrupt_object(&self, kind: &Resource, namespace: &str, name: &str) -> Option<ApiError> {
        let key = key_of(kind, namespace, name);
        let why = self.collection(kind).ok()?.lock().cause(&key)?;
        Some(ApiError::corrupt_object(&key, why))
    }

    /// The resources with objects that cannot be decrypted and have no known former state.
    pub(crate) fn incomplete(&self) -> Vec<Arc<Shared>> {
        let mut all = self.all();
        all.retain(|collection| !collection.is_readable() || collection.lock().check_complete("").is_err());
        all
    }

    /// The resources whose objects are not loaded.
    pub(crate) fn unreadable(&self) -> Vec<Arc<Shared>> {
        let mut all = self.all();
        all.retain(|collection| !collection.is_readable());
        all
    }

    /// Marks the resources of unreadable objects. Ignores objects of custom resources, which [`Cache::add`] loads
    /// later.
    ///
    /// # Errors
    /// The error of an object without which the server must not start. Nothing is marked.
    pub(super) fn mark_unreadable(
        &self,
        mut unreadable: Vec<Unreadable>,
    ) -> std::result::Result<(), StoreError> {
        let is_needed = |one: &Unreadable| match split(&one.key) {
            Some(name) if OPTIONAL.contains(&name) => !one.error.is_of_service(),
            Some((group, plural)) => self.by_key(&one.key).is_some() || is_of_admission(group, plural),
            None => true,
        };
        if let Some(needed) = unreadable.iter().position(is_needed) {
            return Err(unreadable.swap_remove(needed).error);
        }
        for Unreadable { key, error, .. } in unreadable {
            let Some(collection) = self.by_key(&key).filter(|found| found.is_readable()) else { continue };
            let resource = collection.lock().kind().qualified_resource();
            let cause = std::error::Error::source(&error).map(ToString::to_string);
            tracing::error!(
                resource,
                %error,
                cause,
                "cannot decrypt the objects of a resource, starting without them"
            );
            collection.lock().unload();
            let object = UnreadableObject { key, resource: resource.into() };
            collection.unreadable.store(Some(Arc::new(object)));
        }
        Ok(())
    }

    /// Loads the objects of an unreadable resource. Its watches end, so that their owners list the objects.
    ///
    /// # Errors
    /// The error of the store. The resource stays unreadable.
    pub(crate) async fn load_unreadable(
        &self,
        store: &dyn Store,
        collection: &Shared,
    ) -> std::result::Result<(), StoreError> {
        let unreadable = collection.unreadable.load_full();
        let Some(object) = unreadable else { return Ok(()) };
        // One object shows whether the service responds, without a list of all objects.
        store.get(&object.key).await?;
        let kind = collection.lock().begin_load();
        let loaded = self.list_into(store, collection, &kind).await;
        // The watches end only after the resource is readable again: a watcher that then lists the objects must not get
        // an error.
        let mut objects = collection.lock();
        match &loaded {
            Ok(()) => objects.end_watches(),
            Err(error) => {
                objects.unload();
                // The former object was deleted or encrypted again. The next attempt reads the object that this error
                // names.
                if let StoreError::Sealed { key, .. } = error {
                    tracing::warn!(%error, "another object of the resource cannot be decrypted");
                    let (key, resource) = (key.as_str().into(), object.resource.clone());
                    collection.unreadable.store(Some(Arc::new(UnreadableObject { key, resource })));
                }
            }
        }
        loaded
    }

    /// The stored objects of a resource, and separately those that cannot be decrypted.
    ///
    /// # Errors
    /// The error of the store. For a resource that the server needs, the error of the first unreadable object.
    pub(super) async fn listed(
        store: &dyn Store,
        kind: &Resource,
    ) -> std::result::Result<ReadablePage, StoreError> {
        let range = Range { prefix: prefix_of(kind, ""), ..Range::default() };
        if kind.is_built_in() || is_of_admission(&kind.group, &kind.plural) {
            return Ok(ReadablePage { page: store.list(range).await?, unreadable: Vec::new() });
        }
        let found = store.list_readable(range).await?;
        if let Some(first) = found.unreadable.first() {
            tracing::error!(
                resource = kind.qualified_resource(),
                objects = found.unreadable.len(),
                error = &first.error as &dyn std::error::Error,
                "cannot decrypt objects of a custom resource, serving the others"
            );
        }
        Ok(found)
    }

    /// Records that the newest state of an object cannot be decrypted.
    pub(crate) fn note_unreadable(&self, entry: UnreadableEntry) {
        if let Some(collection) = self.by_key(&entry.key) {
            collection.lock().mark_unreadable(entry);
            self.late.notify();
        }
    }

    /// A receiver that is notified when an object cannot be decrypted.
    pub(crate) fn unreadable_found(&self) -> watch::Receiver<()> {
        self.late.found.subscribe()
    }

    /// Whether there are objects for [`Cache::read_again`].
    pub(crate) fn has_unreadable_objects(&self) -> bool {
        self.all().iter().any(|collection| collection.lock().unreadable_len() > 0)
    }

    /// The number of objects for [`Cache::read_again`], and the first of their keys.
    pub(crate) fn unreadable_objects(&self) -> (usize, Option<Arc<str>>) {
        let (mut number, mut first) = (0, None::<Arc<str>>);
        for collection in self.all() {
            let objects = collection.lock();
            number += objects.unreadable_len();
            let key = objects.unreadable().next().map(|entry| entry.key.clone());
            first = first.into_iter().chain(key).min();
        }
        (number, first)
    }

    /// Reads the single objects that could not be decrypted. For each service, it stops at the first failure of the
    /// service. For other causes, it stops at [`MAX_FAILURES`]. It commits [`LATE`] so that the decrypted objects are
    /// published. Returns whether an object was decrypted.
    ///
    /// # Errors
    /// An error of the store other than a failed decryption.
    pub(crate) async fn read_again(&self, store: &dyn Store) -> std::result::Result<bool, StoreError> {
        let mut failures = HashMap::<Cause, usize>::new();
        let (mut waiting, mut is_decrypted) = (0, false);
        for entry in self.to_read_again() {
            if failures.get(&entry.service).is_some_and(|number| *number >= MAX_FAILURES) {
                continue;
            }
            let found = store.get(&entry.key).await;
            match found {
                Ok(Some(found)) if found.modified == entry.modified => {
                    self.late.lock().decrypted.insert(entry.key, found);
                    (waiting, is_decrypted) = (waiting + 1, true);
                    if waiting == LATE_OBJECTS {
                        commit_late(store).await?;
                        waiting = 0;
                    }
                }
                // The watch brings the newer state.
                Ok(Some(_)) => {}
                // The watch brings the deletion, or has brought it.
                Ok(None) => self.forget_unreadable(&entry),
                Err(error @ StoreError::Sealed { .. }) => {
                    let number = failures.entry(entry.service.clone()).or_default();
                    // Each call of a service that does not respond takes up to the timeout of the service.
                    *number = if error.is_of_service() { MAX_FAILURES } else { *number + 1 };
                    if *number == MAX_FAILURES {
                        self.late.lock().last.insert(entry.service, entry.key);
                    }
                }
                Err(error) => return Err(error),
            }
        }
        if waiting > 0 {
            commit_late(store).await?;
        }
        Ok(is_decrypted)
    }

    /// The unreadable objects in the order of cause and key. After an incomplete pass, the objects of a cause begin
    /// after the last key of that pass.
    fn to_read_again(&self) -> Vec<UnreadableEntry> {
        let mut by_cause = BTreeMap::<Cause, Vec<UnreadableEntry>>::new();
        for collection in self.all() {
            for entry in collection.lock().unreadable() {
                by_cause.entry(entry.service.clone()).or_default().push(entry.clone());
            }
        }
        let last = std::mem::take(&mut self.late.lock().last);
        let mut all = Vec::new();
        for (cause, mut entries) in by_cause {
            entries.sort_unstable_by(|one, other| one.key.cmp(&other.key));
            if let Some(last) = last.get(&cause) {
                let first = entries.partition_point(|entry| entry.key <= *last);
                entries.rotate_left(first);
            }
            all.extend(entries);
        }
        all
    }

    fn forget_unreadable(&self, entry: &UnreadableEntry) {
        if let Some(collection) = self.by_key(&entry.key) {
            collection.lock().forget_unreadable(&entry.key, entry.modified);
        }
    }

    /// Applies the decrypted objects that wait for a commit of [`LATE`], at the revision of this commit.
    pub(super) fn apply_late(&self, revision: u64) {
        let decrypted = std::mem::take(&mut self.late.lock().decrypted);
        // The map is sorted by key, so the objects of a resource are adjacent.
        let entries: Vec<Entry> = decrypted.into_values().collect();
        for entries in entries.chunk_by(|one, other| split(&one.key) == split(&other.key)) {
            let collection = entries.first().and_then(|first| self.by_key(&first.key));
            if let Some(collection) = collection {
                self.change(&collection, |objects| objects.apply_late(entries, revision));
            }
        }
    }
}

/// Whether the resource is InitializerConfigurations. The server needs it for admission, although it is not built-in.
fn is_of_admission(group: &str, plural: &str) -> bool {
    (group, plural) == (initializers::GROUP, initializers::PLURAL)
}

/// Makes a commit of [`LATE`]. The objects that wait in [`LateObjects`] get its revision.
async fn commit_late(store: &dyn Store) -> std::result::Result<(), StoreError> {
    let found = store.get(LATE).await?;
    let expect = found.map_or(Expect::Absent, |found| Expect::Revision(found.modified));
    let (value, tier) = (Some(Bytes::from_static(b"{}")), Tier::Volatile { ttl: None });
    match store.write(Write { key: LATE.into(), expect, value, tier, guard: None }).await {
        // A conflict means that another server has made such a commit. That commit serves the same purpose.
        Ok(_) | Err(StoreError::Conflict { .. }) => Ok(()),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use coracle_kinds::kind::by_kind;
    use coracle_store::{Commit, Embedded, EmbeddedOptions, Entry, Expect, Page, Tier, Write};
    use serde_json::json;

    use super::*;
    use crate::cache::{Event, Scope, Watcher, encode, key_of, tests::commit_large};

    fn of_service(key: &str) -> Unreadable {
        let source = coracle_sealing::Error::Kms { name: "vault".to_owned(), reason: "a test".to_owned() };
        Unreadable { key: key.into(), modified: 1, error: StoreError::Sealed { key: key.to_owned(), source } }
    }

    fn with_unknown_key(key: &str) -> Unreadable {
        let source = coracle_sealing::Error::UnknownProvider;
        Unreadable { key: key.into(), modified: 1, error: StoreError::Sealed { key: key.to_owned(), source } }
    }

    fn secret(name: &str) -> (Arc<str>, Bytes) {
        let kind = by_kind("v1", "Secret").unwrap();
        let object = json!({"metadata": {"name": name, "namespace": "ns"}});
        (key_of(kind, "ns", name).into(), encode(kind, &object))
    }

    #[test]
    fn the_server_does_not_start_without_objects_that_it_needs() {
        let cache = Cache::new(1);
        for key in [
            "rbac.authorization.k8s.io/roles/ns/a",
            "/services/ns/a",
            "admissionregistration.k8s.io/initializerconfigurations/a",
            "quotas-5",
        ] {
            assert!(cache.mark_unreadable(vec![of_service(key)]).is_err(), "{key}");
        }
        assert!(cache.mark_unreadable(vec![with_unknown_key("/secrets/ns/a")]).is_err());
        let of_client = [of_service("example.com/foos/ns/a"), with_unknown_key("example.com/foos/ns/b")];
        cache.mark_unreadable(of_client.into()).unwrap();
        assert!(cache.unreadable().is_empty());
        cache.mark_unreadable(vec![of_service("/secrets/ns/a"), of_service("/secrets/ns/b")]).unwrap();
        assert_eq!(cache.unreadable().len(), 1);
    }

    #[tokio::test]
    async fn an_unreadable_resource_is_loaded_later() {
        let directory = tempfile::tempdir().unwrap();
        let options = EmbeddedOptions::default();
        let store = Embedded::open(&directory.path().join("store"), options).unwrap();
        let ((key, value), kind) = (secret("a"), by_kind("v1", "Secret").unwrap());
        let write = |name: &str| {
            let (key, value) = secret(name);
            let value = Some(value);
            store.write(Write { key, expect: Expect::Absent, value, tier: Tier::Durable, guard: None })
        };
        write("a").await.unwrap();
        let cache = Cache::new(1);
        cache.mark_unreadable(vec![of_service(&key)]).unwrap();
        let error = cache.of(kind).err().unwrap();
        assert_eq!((error.code, error.reason), (500, "InternalError"));
        assert!(error.message.contains("unable to transform secrets from storage"), "{error}");
        assert!(cache.check_readable(kind).is_err());
        let configmaps = by_kind("v1", "ConfigMap").unwrap();
        assert!(cache.check_readable(configmaps).is_ok() && cache.of(configmaps).is_ok());
        // Commits before the list are not kept: the list contains their effects.
        let commit = |revision| Commit {
            key: key.clone(),
            revision,
            value: Some(value.clone()),
            created: 2,
            guard_follows: false,
        };
        cache.apply(&commit(2));
        let shared = cache.collection(kind).unwrap();
        assert_eq!((cache.revision(), shared.lock().len()), (2, 0));
        let (watcher, mut events) = Watcher::new(Scope::default(), false);
        let initial = shared.lock().watch_from_now(watcher, 2);
        assert!(initial.is_empty());
        cache.load_unreadable(&store, &shared).await.unwrap();
        assert!(events.recv().await.is_none(), "the watch ends");
        assert!(cache.get(kind, "ns", "a").is_some() && cache.unreadable().is_empty());
        let later = store.revision().await.unwrap() + 1;
        cache.apply(&Commit { value: None, ..commit(later) });
        assert!(cache.get(kind, "ns", "a").is_none());
    }

    #[test]
    fn commits_during_a_list_are_applied_after_it_and_those_of_a_failed_attempt_are_not_kept() {
        let cache = Cache::new(1);
        let kind = by_kind("v1", "Secret").unwrap();
        let commit = |name: &str, revision: u64| {
            let (key, value) = secret(name);
            cache.apply(&Commit {
                key,
                revision,
                value: Some(value),
                created: revision,
                guard_follows: false,
            });
        };
        let listed = |name: &str, revision: u64| {
            let (key, value) = secret(name);
            Entry { key, value, created: revision, modified: revision }
        };
        cache.mark_unreadable(vec![of_service("/secrets/ns/a")]).unwrap();
        let shared = cache.collection(kind).unwrap();
        shared.lock().begin_load();
        commit("lost", 2);
        shared.lock().unload();
        shared.lock().begin_load();
        commit("a", 3);
        commit("b", 5);
        let page = Page { entries: vec![listed("a", 3), listed("c", 4)], revision: 4, more: false };
        shared.lock().loaded(page, Vec::new());
        let objects = shared.lock();
        let found = objects.under("").map(|object| (object.name().to_owned(), object.revision));
        let expect = [("a", 3), ("b", 5), ("c", 4)].map(|(name, revision)| (name.to_owned(), revision));
        assert_eq!(found.collect::<Vec<_>>(), expect);
    }

    /// Another server writes an object with a key that this server does not know yet.
    #[tokio::test]
    async fn a_late_object_is_read_again_and_comes_as_an_event_that_no_watch_misses() {
        let directory = tempfile::tempdir().unwrap();
        let store = Embedded::open(&directory.path().join("store"), EmbeddedOptions::default()).unwrap();
        let ((key, value), kind) = (secret("a"), by_kind("v1", "Secret").unwrap());
        let cache = Cache::new(store.revision().await.unwrap());
        let value = Some(value);
        let write =
            Write { key: key.clone(), expect: Expect::Absent, value, tier: Tier::Durable, guard: None };
        let modified = store.write(write).await.unwrap();
        let mut commits = store.watch("", modified).await.unwrap();
        cache.note_unreadable(UnreadableEntry { key: key.clone(), modified, service: None });
        cache.revision.advance(modified);
        let shared = cache.of(kind).unwrap();
        let watch = |revision: u64| {
            let (watcher, events) = Watcher::new(Scope::default(), false);
            shared.lock().watch_after(watcher, revision).unwrap();
            events
        };
        let mut events = watch(modified);
        let error = cache.find(kind, "ns", "a").err().unwrap();
        assert_eq!((error.code, error.reason), (500, "InternalError"));
        assert!(cache.check_complete(kind, "ns").is_err());
        assert_eq!(cache.unreadable_objects(), (1, Some(key.clone())));
        assert!(
            cache.check_complete(kind, "other").is_ok() && cache.find(kind, "ns", "b").unwrap().is_none()
        );
        assert!(cache.read_again(&store).await.unwrap());
        let Some(coracle_store::Event::Commit(commit)) = commits.next().await else { panic!("no commit") };
        assert!(&*commit.key == LATE && commit.revision > modified);
        cache.apply(&commit);
        let found = cache.find(kind, "ns", "a").unwrap().unwrap();
        assert_eq!(found.revision, modified, "an update with this revision has no conflict");
        let is_added = |event| matches!(event, Event::Added(object) if object.revision == modified);
        assert!(events.try_recv().is_ok_and(is_added));
        // A client resumes its watch, which ended before the object was decrypted.
        assert!(watch(modified).try_recv().is_ok_and(is_added));
        assert!(watch(commit.revision).try_recv().is_err());
        assert!(!cache.has_unreadable_objects());
        assert_eq!(cache.unreadable_objects(), (0, None));
        assert!(!cache.read_again(&store).await.unwrap(), "no further commit");
    }

    #[test]
    fn a_newer_commit_replaces_an_unreadable_state_and_a_late_object() {
        let cache = Cache::new(1);
        let ((key, value), kind) = (secret("a"), by_kind("v1", "Secret").unwrap());
        let commit = |revision: u64, value: Option<Bytes>| {
            let key = key.clone();
            cache.apply(&Commit { key, revision, value, created: 2, guard_follows: false });
        };
        let unreadable =
            |modified| cache.note_unreadable(UnreadableEntry { key: key.clone(), modified, service: None });
        commit(2, Some(value.clone()));
        unreadable(3);
        let revision = || cache.find(kind, "ns", "a").unwrap().map(|object| object.revision);
        assert_eq!(revision(), Some(2), "the former state is visible");
        assert!(cache.has_unreadable_objects() && cache.check_complete(kind, "ns").is_ok());
        assert!(cache.check_newest(kind, &key).is_err(), "but it cannot be changed");
        let late = Entry { key: key.clone(), value: value.clone(), created: 2, modified: 3 };
        cache.late.lock().decrypted.insert(key.clone(), late.clone());
        commit(4, Some(value.clone()));
        assert_eq!(revision(), Some(4));
        assert!(cache.check_newest(kind, &key).is_ok());
        assert!(!cache.has_unreadable_objects());
        cache.late.lock().decrypted.insert(key.clone(), late);
        commit(5, None);
        cache.apply(&late_commit(6));
        assert_eq!(revision(), None);
        unreadable(7);
        commit(8, None);
        assert!(!cache.has_unreadable_objects());
    }

    fn late_commit(revision: u64) -> Commit {
        let value = Some(Bytes::from_static(b"{}"));
        Commit { key: LATE.into(), revision, value, created: revision, guard_follows: false }
    }

    /// Makes a ConfigMap unreadable at a revision, and decrypts it.
    fn decrypt_late(cache: &Cache, name: &str, modified: u64) {
        let kind = by_kind("v1", "ConfigMap").unwrap();
        let key = Arc::<str>::from(key_of(kind, "ns", name));
        cache.note_unreadable(UnreadableEntry { key: key.clone(), modified, service: None });
        let value = encode(kind, &json!({"metadata": {"name": name, "namespace": "ns"}}));
        let entry = Entry { key: key.clone(), value, created: 2, modified };
        cache.late.lock().decrypted.insert(key, entry);
    }

    /// The history removes changes above its limits. It must not do so between two changes of one revision.
    #[test]
    fn late_objects_come_together_even_if_they_exceed_the_history() {
        let (cache, kind) = (Cache::new(1), by_kind("v1", "ConfigMap").unwrap());
        let names: Vec<String> = (0..8).map(|number| format!("m{number}")).collect();
        for (name, revision) in names.iter().zip(2..) {
            commit_large(&cache, name, revision, revision);
        }
        for (name, revision) in names.iter().zip(20..) {
            decrypt_late(&cache, name, revision);
        }
        cache.apply(&late_commit(40));
        assert!(!cache.has_unreadable_objects());
        let revisions = names.iter().map(|name| cache.get(kind, "ns", name).map(|object| object.revision));
        assert!(revisions.eq((20..28).map(Some)));
    }

    /// A client may receive only the first late object. Its watch then resumes at a lower revision.
    #[test]
    fn late_objects_wait_for_a_revision_without_other_commits_and_end_with_a_bookmark() {
        let (cache, kind) = (Cache::new(1), by_kind("v1", "ConfigMap").unwrap());
        let (watcher, mut events) = Watcher::new(Scope::default(), true);
        cache.of(kind).unwrap().lock().watch_after(watcher, 1).unwrap();
        ["a", "b"].into_iter().zip(2..).for_each(|(name, revision)| decrypt_late(&cache, name, revision));
        let (key, value) = secret("s");
        cache.apply(&Commit { key, revision: 5, value: Some(value), created: 5, guard_follows: false });
        assert!(events.try_recv().is_err(), "a list at this revision could lack the other objects");
        cache.apply(&late_commit(6));
        for revision in [2, 3] {
            let is_added = |event| matches!(event, Event::Added(object) if object.revision == revision);
            assert!(events.try_recv().is_ok_and(is_added));
        }
        assert!(events.try_recv().is_ok_and(|event| matches!(event, Event::Bookmark(6))));
    }
}

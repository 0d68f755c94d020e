//! Resources whose stored objects cannot be decrypted, because a key management service fails.
//!
//! The server starts without the objects of such a resource. All requests for this resource fail until all its objects
//! are loaded. Otherwise an unreadable object would count as deleted, and a new object could take its name. Each
//! resource is in one of these states:
//!
//! ```text
//! Cache::load -> loaded
//!            \-> unreadable -> Cache::load_unreadable -> loaded
//!                    ^--------- the service fails ----/
//! ```

use std::sync::Arc;

use coracle_kinds::Resource;
use coracle_store::{Error as StoreError, Store, Unreadable};

use super::{Cache, Shared, split};
use crate::error::{ApiError, Result};

/// Group and name of the resources that the server does not need for its own decisions. If objects of another resource
/// are unreadable, the server does not start. Otherwise the server would decide about requests without the roles,
/// quotas, policies or allocated addresses.
const OPTIONAL: [(&str, &str); 2] = [("", "configmaps"), ("", "secrets")];

/// An object that cannot be decrypted.
pub(super) struct UnreadableObject {
    key: Arc<str>,
    resource: Box<str>,
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
        // The response has neither the key nor the cause, because the object may be in another namespace. Source:
        // `storage/etcd3/store.go`, whose text names the key.
        let resource = &object.resource;
        Err(ApiError::internal(format!(
            "unable to transform {resource} from storage: failed to decrypt: the key management service failed"
        )))
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

    /// The resources whose objects are not loaded.
    pub(crate) fn unreadable(&self) -> Vec<Arc<Shared>> {
        let mut all = self.all();
        all.retain(|collection| !collection.is_readable());
        all
    }

    /// Marks the resources of unreadable objects.
    ///
    /// # Errors
    /// The error of an object without which the server must not start. Nothing is marked.
    pub(super) fn mark_unreadable(
        &self,
        mut unreadable: Vec<Unreadable>,
    ) -> std::result::Result<(), StoreError> {
        let is_needed = |one: &Unreadable| !split(&one.key).is_some_and(|name| OPTIONAL.contains(&name));
        if let Some(needed) = unreadable.iter().position(is_needed) {
            return Err(unreadable.swap_remove(needed).error);
        }
        for Unreadable { key, error } in unreadable {
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
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use coracle_kinds::kind::by_kind;
    use coracle_store::{Commit, Embedded, EmbeddedOptions, Entry, Expect, Page, Tier, Write};
    use serde_json::json;

    use super::*;
    use crate::cache::{Scope, Watcher, encode, key_of};

    fn of_service(key: &str) -> Unreadable {
        let source = coracle_sealing::Error::Kms { name: "vault".to_owned(), reason: "a test".to_owned() };
        Unreadable { key: key.into(), error: StoreError::Sealed { key: key.to_owned(), source } }
    }

    fn secret(name: &str) -> (Arc<str>, Bytes) {
        let kind = by_kind("v1", "Secret").unwrap();
        let object = json!({"metadata": {"name": name, "namespace": "ns"}});
        (key_of(kind, "ns", name).into(), encode(kind, &object))
    }

    #[test]
    fn the_server_does_not_start_without_objects_that_it_needs() {
        let cache = Cache::new(1);
        for key in
            ["rbac.authorization.k8s.io/roles/ns/a", "/services/ns/a", "example.com/foos/ns/a", "quotas-5"]
        {
            assert!(cache.mark_unreadable(vec![of_service(key)]).is_err(), "{key}");
        }
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
        shared.lock().loaded(page);
        let objects = shared.lock();
        let found = objects.under("").map(|object| (object.name().to_owned(), object.revision));
        let expect = [("a", 3), ("b", 5), ("c", 4)].map(|(name, revision)| (name.to_owned(), revision));
        assert_eq!(found.collect::<Vec<_>>(), expect);
    }
}

//! The watch cache: every object's encoded bytes once, shared by gets, lists and watches.
//!
//! One task watches the store and applies each commit in order. The cache keeps the recent changes of each kind, too.
//! So a watch can start a little in the past, and a paged list can continue at the revision of its first page.

mod collection;
mod object;
mod references;

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use coracle_kinds::{KINDS, Kind};
use coracle_store::{Commit, Range, Store, Watch};
use tokio::sync::watch;

use crate::authz::rbac::Policies;
use crate::error::{ApiError, Result};
pub(crate) use collection::{Collection, Event, Events, Scope, Watcher};
#[cfg(test)]
pub(crate) use object::parses;
pub(crate) use object::{Object, encode, key_of, prefix_of};
pub(crate) use references::{References, Referred};

pub(crate) struct Cache {
    collections: HashMap<(&'static str, &'static str), Mutex<Collection>>,
    revision: watch::Sender<u64>,
    /// The RBAC index, built from this cache.
    pub(crate) policies: Policies,
}

impl Cache {
    /// Loads all objects. Returns the cache and the watch for [`Cache::follow`].
    pub(crate) async fn load(store: &dyn Store) -> std::result::Result<(Self, Watch), coracle_store::Error> {
        let page = store.list(Range::default()).await?;
        let watch = store.watch("", page.revision).await?;
        let cache = Self::new(page.revision);
        for entry in page.entries {
            if let Some(collection) = cache.by_key(&entry.key) {
                lock(collection).load(entry);
            }
        }
        Ok((cache, watch))
    }

    /// An empty cache at a revision.
    pub(crate) fn new(revision: u64) -> Self {
        let kinds = KINDS.iter().filter(|kind| kind.stored());
        let collections = kinds
            .map(|kind| ((kind.group, kind.plural), Mutex::new(Collection::new(kind, revision))))
            .collect();
        Self { collections, revision: watch::Sender::new(revision), policies: Policies::default() }
    }

    /// Applies commits until the store is closed.
    pub(crate) async fn follow(self: Arc<Self>, mut watch: Watch) {
        while let Some(commit) = watch.next().await {
            self.apply(&commit);
        }
    }

    pub(crate) fn apply(&self, commit: &Commit) {
        if let Some(collection) = self.by_key(&commit.key) {
            lock(collection).apply(commit);
        }
        self.revision.send_replace(commit.revision);
    }

    fn by_key(&self, key: &str) -> Option<&Mutex<Collection>> {
        let mut parts = key.split('/');
        let (group, plural) = (parts.next()?, parts.next()?);
        let kind = KINDS.iter().find(|kind| kind.plural == plural && kind.group == group)?;
        self.collections.get(&(kind.group, kind.plural))
    }

    /// The newest applied revision.
    pub(crate) fn revision(&self) -> u64 {
        *self.revision.borrow()
    }

    /// Waits until a commit is applied.
    pub(crate) async fn reach(&self, revision: u64) -> Result<()> {
        let mut seen = self.revision.subscribe();
        let reached = seen.wait_for(|newest| *newest >= revision).await;
        reached.map(|_| ()).map_err(|_closed| ApiError::unavailable("the store is closed"))
    }

    /// Waits until a condition holds. It is checked at each commit.
    pub(crate) async fn until(&self, holds: impl Fn() -> bool) {
        let mut seen = self.revision.subscribe();
        // An error means that the cache itself has ended.
        let _ = seen.wait_for(|_| holds()).await;
    }

    /// The collection of a kind, locked; never held over an await.
    pub(crate) fn of(&self, kind: &Kind) -> Result<MutexGuard<'_, Collection>> {
        self.collections.get(&(kind.group, kind.plural)).map(lock).ok_or_else(ApiError::no_resource)
    }

    pub(crate) fn get(&self, kind: &Kind, namespace: &str, name: &str) -> Option<Arc<Object>> {
        self.of(kind).ok()?.get(&key_of(kind, namespace, name))
    }
}

fn lock(collection: &Mutex<Collection>) -> MutexGuard<'_, Collection> {
    collection.lock().unwrap_or_else(PoisonError::into_inner)
}

//! The set of served resources, built-in and custom. A change replaces the whole set.
//!
//! A reader loads the current set without a lock. A change first prepares the watch cache and then publishes the set,
//! so every resource in the set can be served.

use std::sync::Arc;

use arc_swap::{ArcSwap, Guard};
use coracle_kinds::kind::RuntimeConfig;
use coracle_kinds::{Resource, Resources, resource};
use coracle_store::Store;
use tokio::sync::{Mutex, watch};

use crate::cache::Cache;

/// The served resources.
pub(crate) struct Registry {
    /// The built-in resources of the set.
    built_in: Arc<Resources>,
    current: ArcSwap<Resources>,
    changes: watch::Sender<Arc<Resources>>,
    /// Lock that serializes changes.
    changing: Mutex<()>,
}

/// A resource could not be added or removed.
#[derive(Debug, thiserror::Error)]
pub enum RegistryError {
    /// A built-in resource has the name.
    #[error(transparent)]
    Taken(#[from] resource::Taken),
    /// The versions belong to different resources, or have different stored versions.
    #[error("cannot serve the resource {0}: its versions need one group, one name and one stored version")]
    Versions(String),
    /// The stored objects could not be read.
    #[error("cannot load the objects of {resource}")]
    Load {
        /// The resource.
        resource: String,
        /// The cause.
        #[source]
        source: coracle_store::Error,
    },
}

// === impl Registry ===

impl Registry {
    /// The built-in resources that the configuration serves.
    pub(crate) fn new(config: &RuntimeConfig) -> Self {
        let set = Arc::new(Resources::served(config));
        Self {
            built_in: set.clone(),
            current: ArcSwap::new(set.clone()),
            changes: watch::Sender::new(set),
            changing: Mutex::default(),
        }
    }

    /// The current set. Does not block.
    pub(crate) fn load(&self) -> Guard<Arc<Resources>> {
        self.current.load()
    }

    /// Returns a receiver of each new set. A slow receiver skips to the newest set.
    pub(crate) fn subscribe(&self) -> watch::Receiver<Arc<Resources>> {
        self.changes.subscribe()
    }

    /// Adds all versions of one resource, or replaces its former versions. The stored version need not be served.
    pub(crate) async fn add(
        &self,
        cache: &Cache,
        store: &dyn Store,
        versions: &[Arc<Resource>],
    ) -> Result<(), RegistryError> {
        let Some(stored) = stored_version(versions) else {
            let name = versions.first().map(|first| first.qualified_resource()).unwrap_or_default();
            return Err(RegistryError::Versions(name));
        };
        let _changing = self.changing.lock().await;
        let set = self.load().with(versions)?;
        let failed = |source| RegistryError::Load { resource: stored.qualified_resource(), source };
        cache.add(store, &stored).await.map_err(failed)?;
        self.publish(set);
        Ok(())
    }

    /// Removes all versions of a custom resource. Its watches end; stored objects stay in the store.
    pub(crate) async fn remove(&self, cache: &Cache, group: &str, plural: &str) {
        let _changing = self.changing.lock().await;
        let is_built_in = self.load().find_stored(group, plural).is_some_and(|known| known.is_built_in());
        if is_built_in || self.built_in.find_stored(group, plural).is_some() {
            return;
        }
        self.publish(self.load().without(group, plural));
        cache.remove(group, plural);
    }

    fn publish(&self, set: Resources) {
        let set = Arc::new(set);
        self.current.store(set.clone());
        self.changes.send_replace(set);
    }
}

/// The stored version of one resource's versions. `None` if they belong to different resources, or have different
/// stored versions.
fn stored_version(versions: &[Arc<Resource>]) -> Option<Arc<Resource>> {
    let first = versions.first()?;
    let stored = |resource: &Arc<Resource>| resource.storage.clone().unwrap_or_else(|| resource.clone());
    let storage = stored(first);
    let is_one = versions.iter().all(|version| {
        version.group == storage.group
            && version.plural == storage.plural
            && stored(version).version == storage.version
    });
    is_one.then_some(storage)
}

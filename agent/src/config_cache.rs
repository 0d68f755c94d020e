//! Config maps and secrets for pods: from the API server, or, while it does not answer, from the checkpoint.

use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use kube::{Api, Client, Resource, ResourceExt};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::api_health::ApiHealth;
use crate::checkpoint::{Checkpoint, Key};

/// Looks config maps and secrets up; cheap to clone.
#[derive(Clone)]
pub(crate) struct ConfigCache {
    client: Client,
    checkpoint: Checkpoint,
    health: ApiHealth,
}

/// Why an object cannot be had now; trying again later may help.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The API server refused or could not be reached, and there is no stored copy.
    #[error("cannot get {kind} {namespace}/{name}")]
    Get {
        /// `ConfigMap` or `Secret`.
        kind: String,
        /// Its namespace.
        namespace: String,
        /// Its name.
        name: String,
        /// The API client's error.
        #[source]
        source: Box<kube::Error>,
    },
}

/// A kind of object that pods take their configuration from.
pub(crate) trait Config:
    Resource<Scope = NamespaceResourceScope, DynamicType = ()>
    + Clone
    + Serialize
    + DeserializeOwned
    + std::fmt::Debug
{
    /// The record of an object.
    fn key(namespace: &str, name: &str) -> Key;
}

impl Config for ConfigMap {
    fn key(namespace: &str, name: &str) -> Key {
        Key::config_map(namespace, name)
    }
}

impl Config for Secret {
    fn key(namespace: &str, name: &str) -> Key {
        Key::secret(namespace, name)
    }
}

impl ConfigCache {
    pub(crate) fn new(client: Client, checkpoint: Checkpoint, health: ApiHealth) -> Self {
        Self { client, checkpoint, health }
    }

    pub(crate) fn client(&self) -> &Client {
        &self.client
    }

    pub(crate) fn checkpoint(&self) -> &Checkpoint {
        &self.checkpoint
    }

    pub(crate) fn health(&self) -> &ApiHealth {
        &self.health
    }

    /// The object, or `None` when the API server says that there is none.
    ///
    /// # Errors
    /// When the API server gives no answer and there is no copy.
    pub(crate) async fn get<K: Config>(&self, namespace: &str, name: &str) -> Result<Option<K>, Error> {
        let key = K::key(namespace, name);
        let stored = self.checkpoint.get::<K>(&key);
        if stored.is_some() && self.health.is_away() {
            return Ok(stored);
        }
        let api: Api<K> = Api::namespaced(self.client.clone(), namespace);
        match self.health.ask(stored.is_some(), api.get_opt(name)).await {
            Ok(found) => {
                self.learn(namespace, name, found.as_ref());
                Ok(found)
            }
            // Refusals too: a node whose certificate has expired starts its pods all the same.
            Err(error) => stored.map(Some).ok_or_else(|| Error::Get {
                kind: K::kind(&()).into_owned(),
                namespace: namespace.to_owned(),
                name: name.to_owned(),
                source: Box::new(error),
            }),
        }
    }

    /// Stores what the API server says of an object.
    pub(crate) fn learn<K: Config>(&self, namespace: &str, name: &str, found: Option<&K>) {
        let key = K::key(namespace, name);
        match found {
            Some(found) => self.checkpoint.put(key, &essence(found)),
            None => self.checkpoint.remove(&key),
        }
    }
}

/// An object without metadata that changes though its content does not.
fn essence<K: Config>(object: &K) -> K {
    let mut object = object.clone();
    let meta = object.meta_mut();
    meta.managed_fields = None;
    meta.resource_version = None;
    meta.annotations = None;
    meta.labels = None;
    debug_assert!(!object.name_any().is_empty());
    object
}

//! Config maps and secrets of pods: from the API server, or from the checkpoint while it does not answer.

use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use kube::{Api, Client, Resource, ResourceExt};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::api_health::ApiHealth;
use crate::checkpoint::{Checkpoint, Key};

/// Reads config maps and secrets; cheap to clone.
#[derive(Clone)]
pub(crate) struct ConfigCache {
    client: Client,
    checkpoint: Checkpoint,
    health: ApiHealth,
}

/// Why an object is not available now. A retry may succeed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The API server refused or did not answer, and there is no stored copy.
    #[error("cannot get {kind} {namespace}/{name}")]
    Get {
        /// `ConfigMap` or `Secret`.
        kind: String,
        /// Its namespace.
        namespace: String,
        /// Its name.
        name: String,
        /// Cause.
        #[source]
        source: Box<kube::Error>,
    },
}

/// Kinds of objects that pods are configured by.
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

    /// The object; None if the API server reports that it does not exist.
    ///
    /// # Errors
    /// When the API server does not answer and there is no stored copy.
    pub(crate) async fn get<K: Config>(&self, namespace: &str, name: &str) -> Result<Option<K>, Error> {
        let key = K::key(namespace, name);
        let stored = self.checkpoint.get::<K>(&key);
        if stored.is_some() && self.health.is_unavailable() {
            return Ok(stored);
        }
        let api: Api<K> = Api::namespaced(self.client.clone(), namespace);
        match self.health.request(stored.is_some(), api.get_opt(name)).await {
            Ok(found) => {
                self.store(namespace, name, found.as_ref());
                Ok(found)
            }
            // Also after a refusal: a node with an expired certificate still starts its pods.
            Err(error) => stored.map(Some).ok_or_else(|| Error::Get {
                kind: K::kind(&()).into_owned(),
                namespace: namespace.to_owned(),
                name: name.to_owned(),
                source: Box::new(error),
            }),
        }
    }

    /// Stores an object, or its absence, as the API server reported it.
    pub(crate) fn store<K: Config>(&self, namespace: &str, name: &str, found: Option<&K>) {
        let key = K::key(namespace, name);
        match found {
            Some(found) => self.checkpoint.put(key, &stored_fields(found)),
            None => self.checkpoint.remove(&key),
        }
    }
}

/// An object without metadata that changes independently of the content.
fn stored_fields<K: Config>(object: &K) -> K {
    let mut object = object.clone();
    let meta = object.meta_mut();
    meta.managed_fields = None;
    meta.resource_version = None;
    meta.annotations = None;
    meta.labels = None;
    debug_assert!(!object.name_any().is_empty());
    object
}

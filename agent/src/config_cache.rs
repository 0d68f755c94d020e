//! Config maps, secrets and RuntimeClasses of pods: from the API server, or from the checkpoint while the API server
//! does not answer.

use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use k8s_openapi::api::node::v1::RuntimeClass;
use kube::{Api, Client, Resource, ResourceExt};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::api_health::ApiHealth;
use crate::checkpoint::{Checkpoint, Key};

/// Reads config maps, secrets and RuntimeClasses; cheap to clone.
#[derive(Clone)]
pub(crate) struct ConfigCache {
    client: Client,
    checkpoint: Checkpoint,
    health: ApiHealth,
}

/// The reason why an object is not available now. A retry can succeed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The API server refused or did not answer, and there is no stored copy.
    #[error("cannot get {kind} {namespace}/{name}")]
    Get {
        /// `ConfigMap` or `Secret`.
        kind: String,
        /// Namespace of the object.
        namespace: String,
        /// Name of the object.
        name: String,
        /// Cause.
        #[source]
        source: Box<kube::Error>,
    },
    /// The API server did not return a RuntimeClass, and there is no stored copy.
    #[error("cannot get RuntimeClass {name}")]
    RuntimeClass {
        /// Name of the class.
        name: String,
        /// Cause.
        #[source]
        source: Box<kube::Error>,
    },
}

/// Namespaced kinds of objects that configure pods.
pub(crate) trait Config:
    Resource<Scope = NamespaceResourceScope, DynamicType = ()>
    + Clone
    + Serialize
    + DeserializeOwned
    + std::fmt::Debug
{
    /// The key of an object's record in the checkpoint.
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
    /// When the API server refuses or does not answer, and there is no stored copy.
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
            // The cached objects are used after a refusal, too: a node with an expired certificate still starts its
            // pods.
            Err(error) => stored.map(Some).ok_or_else(|| Error::Get {
                kind: K::kind(&()).into_owned(),
                namespace: namespace.to_owned(),
                name: name.to_owned(),
                source: Box::new(error),
            }),
        }
    }

    /// The handler of a RuntimeClass; None if the API server reports that the class does not exist.
    ///
    /// # Errors
    /// When the API server refuses or does not answer, and there is no stored copy.
    pub(crate) async fn runtime_handler(&self, class: &str) -> Result<Option<String>, Error> {
        let key = Key::runtime_class(class);
        let stored = self.checkpoint.get::<String>(&key);
        if stored.is_some() && self.health.is_unavailable() {
            return Ok(stored);
        }
        let api: Api<RuntimeClass> = Api::all(self.client.clone());
        match self.health.request(stored.is_some(), api.get_opt(class)).await {
            Ok(found) => {
                let handler = found.map(|class| class.handler);
                match &handler {
                    Some(handler) => self.checkpoint.put(key, handler),
                    None if stored.is_some() => self.checkpoint.remove(&key),
                    None => {}
                }
                Ok(handler)
            }
            Err(error) => stored
                .map(Some)
                .ok_or_else(|| Error::RuntimeClass { name: class.to_owned(), source: Box::new(error) }),
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU16, Ordering};

    use serde_json::json;

    use super::*;

    /// A cache of an API server that has the class `known`, or responds with an error status.
    fn cache(dir: &std::path::Path, failure: &Arc<AtomicU16>) -> ConfigCache {
        let failure = Arc::clone(failure);
        let service = tower::service_fn(move |request: http::Request<kube::client::Body>| {
            let failure = failure.load(Ordering::Relaxed);
            async move {
                let found = request.uri().path() == "/apis/node.k8s.io/v1/runtimeclasses/known";
                let (code, body) = match (failure, found) {
                    (0, true) => (200, json!({"metadata": {"name": "known"}, "handler": "runsc"})),
                    (0, false) => (
                        404,
                        json!({"kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404}),
                    ),
                    (code, _) => (code, json!({"kind": "Status", "status": "Failure", "code": code})),
                };
                let body = kube::client::Body::from(body.to_string().into_bytes());
                http::Response::builder().status(code).body(body)
            }
        });
        let checkpoint = Checkpoint::open(&dir.join("agent"), &dir.join("sealing.key")).unwrap();
        checkpoint.own("u", vec![Key::runtime_class("known"), Key::runtime_class("missing")]);
        ConfigCache::new(Client::new(service, "default"), checkpoint, ApiHealth::default())
    }

    #[tokio::test]
    async fn the_handler_of_a_class_is_known_while_the_api_server_fails() {
        let dir = tempfile::tempdir().unwrap();
        let failure = Arc::new(AtomicU16::new(0));
        let cache = cache(dir.path(), &failure);
        assert_eq!(cache.runtime_handler("known").await.unwrap().as_deref(), Some("runsc"));
        assert_eq!(cache.runtime_handler("missing").await.unwrap(), None);
        failure.store(500, Ordering::Relaxed);
        assert_eq!(cache.runtime_handler("known").await.unwrap().as_deref(), Some("runsc"));
        let error = cache.runtime_handler("missing").await.unwrap_err();
        assert_eq!(error.to_string(), "cannot get RuntimeClass missing");
    }
}

//! What every controller works with.

use std::sync::Arc;

use kube::Client;
use serde_json::Value;

use crate::caches::Caches;
use crate::config::ControllersConfig;
use crate::events::{Kind, Note, Recorder};
use crate::object::{Deployment, Object, Pod, ReplicaSet};
use crate::write::Writer;

/// The client, the caches, the recorder and the settings.
pub(crate) struct Context {
    pub(crate) client: Client,
    pub(crate) caches: Caches,
    pub(crate) recorder: Recorder,
    pub(crate) config: ControllersConfig,
}

impl Context {
    /// Writes pods.
    pub(crate) fn pods(&self) -> Writer<'_, Pod> {
        Writer { client: &self.client, cache: &self.caches.pods }
    }

    /// Writes replica sets.
    pub(crate) fn replica_sets(&self) -> Writer<'_, ReplicaSet> {
        Writer { client: &self.client, cache: &self.caches.replica_sets }
    }

    /// Writes deployments.
    pub(crate) fn deployments(&self) -> Writer<'_, Deployment> {
        Writer { client: &self.client, cache: &self.caches.deployments }
    }

    /// Records an event about an object.
    pub(crate) fn record<K: Object>(
        &self,
        about: &K,
        component: &'static str,
        (kind, reason): (Kind, &'static str),
        message: String,
    ) {
        self.recorder.record(Note { about: about.reference(), component, kind, reason, message });
    }
}

impl<K: Object> Writer<'_, K> {
    /// Creates an object from shared JSON.
    pub(crate) async fn create_in(self, namespace: &str, object: &Value) -> Result<Arc<K>, kube::Error> {
        self.create(namespace, object.clone()).await
    }
}

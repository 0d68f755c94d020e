//! The replica set controller: creates and deletes pods until each replica set has its desired number. The replication
//! controller shares this code.

pub(crate) mod plan;
mod rank;
pub(crate) mod run;

use std::sync::Arc;

use k8s_openapi::api::apps::v1::ReplicaSetStatus;
use kube::Resource;
use kube::core::NamespaceResourceScope;

use crate::cache::Cache;
use crate::caches::Caches;
use crate::object::{Object, ReplicaSet, ReplicaSetSpec, ReplicationController};

pub(crate) use rank::sort_for_deletion;

/// A kind that maintains a number of identical pods.
pub(crate) trait Replicas: Object + Resource<Scope = NamespaceResourceScope> {
    /// The component in events.
    const COMPONENT: &'static str;

    /// Whether the status contains the number of terminating pods.
    const HAS_TERMINATING: bool;

    /// The spec.
    fn spec(&self) -> &ReplicaSetSpec;

    /// The status.
    fn status(&self) -> &ReplicaSetStatus;

    /// The cache of the kind.
    fn cache(caches: &Caches) -> &Arc<Cache<Self>>;
}

impl Replicas for ReplicaSet {
    const COMPONENT: &'static str = "replicaset-controller";
    const HAS_TERMINATING: bool = true;

    fn spec(&self) -> &ReplicaSetSpec {
        &self.spec
    }

    fn status(&self) -> &ReplicaSetStatus {
        &self.status
    }

    fn cache(caches: &Caches) -> &Arc<Cache<Self>> {
        &caches.replica_sets
    }
}

impl Replicas for ReplicationController {
    const COMPONENT: &'static str = "replication-controller";
    const HAS_TERMINATING: bool = false;

    fn spec(&self) -> &ReplicaSetSpec {
        &self.spec
    }

    fn status(&self) -> &ReplicaSetStatus {
        &self.status
    }

    fn cache(caches: &Caches) -> &Arc<Cache<Self>> {
        &caches.replication_controllers
    }
}

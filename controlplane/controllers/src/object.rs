//! The kinds as the controllers see them: only the fields that a controller reads, so that a cached object is
//! small. Nothing here is ever written back whole.

use std::borrow::Cow;
use std::fmt::Debug;
use std::sync::Arc;

use k8s_openapi::api::apps::v1::{DeploymentStatus, DeploymentStrategy, ReplicaSetStatus};
use k8s_openapi::api::core::v1::{
    ContainerStatus, NodeAddress, NodeCondition, ObjectReference, PodCondition, ServicePort, Taint,
    Toleration,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta, OwnerReference, Time};
use kube::Resource;
use kube::core::{ClusterResourceScope, NamespaceResourceScope};
use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::template::Template;

/// A kind that can be cached.
pub(crate) trait Object:
    Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + Sync + 'static
{
    /// Drops what no controller reads.
    fn slim(&mut self) {
        self.meta_mut().managed_fields = None;
    }

    /// The object's place in a cache.
    fn key(&self) -> Key {
        Key::of(self.meta())
    }

    /// The object's uid; empty only for an object that no server has seen.
    fn uid(&self) -> &str {
        self.meta().uid.as_deref().unwrap_or_default()
    }

    /// The object's name.
    fn name(&self) -> &str {
        self.meta().name.as_deref().unwrap_or_default()
    }

    /// The object's namespace; empty for cluster-scoped kinds.
    fn namespace(&self) -> &str {
        self.meta().namespace.as_deref().unwrap_or_default()
    }

    /// Whether deletion was asked for.
    fn deleting(&self) -> bool {
        self.meta().deletion_timestamp.is_some()
    }

    /// A reference to this object for an event.
    fn reference(&self) -> ObjectReference {
        ObjectReference {
            api_version: Some(Self::api_version(&()).into_owned()),
            kind: Some(Self::kind(&()).into_owned()),
            name: self.meta().name.clone(),
            namespace: self.meta().namespace.clone(),
            uid: self.meta().uid.clone(),
            resource_version: self.meta().resource_version.clone(),
            field_path: None,
        }
    }

    /// The owner reference of an object that this one controls.
    fn controller_reference(&self) -> OwnerReference {
        OwnerReference {
            api_version: Self::api_version(&()).into_owned(),
            kind: Self::kind(&()).into_owned(),
            name: self.name().to_owned(),
            uid: self.uid().to_owned(),
            controller: Some(true),
            block_owner_deletion: Some(true),
        }
    }
}

/// Namespace (empty for cluster-scoped kinds) and name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Key {
    pub(crate) namespace: String,
    pub(crate) name: String,
}

impl Key {
    /// A key from its two parts.
    pub(crate) fn new(namespace: &str, name: &str) -> Self {
        Self { namespace: namespace.to_owned(), name: name.to_owned() }
    }

    /// The key of an object with this metadata.
    pub(crate) fn of(meta: &ObjectMeta) -> Self {
        Self {
            namespace: meta.namespace.clone().unwrap_or_default(),
            name: meta.name.clone().unwrap_or_default(),
        }
    }
}

impl std::fmt::Display for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.namespace.is_empty() {
            f.write_str(&self.name)
        } else {
            write!(f, "{}/{}", self.namespace, self.name)
        }
    }
}

/// The owner reference that is marked as the controller.
pub(crate) fn controller_of(meta: &ObjectMeta) -> Option<&OwnerReference> {
    meta.owner_references.iter().flatten().find(|owner| owner.controller == Some(true))
}

macro_rules! resource {
    ($type:ident, $group:literal, $plural:literal, $scope:ty) => {
        impl Resource for $type {
            type DynamicType = ();
            type Scope = $scope;

            fn kind((): &()) -> Cow<'_, str> {
                stringify!($type).into()
            }
            fn group((): &()) -> Cow<'_, str> {
                $group.into()
            }
            fn version((): &()) -> Cow<'_, str> {
                "v1".into()
            }
            fn plural((): &()) -> Cow<'_, str> {
                $plural.into()
            }
            fn meta(&self) -> &ObjectMeta {
                &self.metadata
            }
            fn meta_mut(&mut self) -> &mut ObjectMeta {
                &mut self.metadata
            }
        }
    };
}

mod disruption;
mod joining;
mod rbac;
mod tolerations;

pub(crate) use disruption::PodDisruptionBudget;
pub(crate) use joining::{CertificateSigningRequest, Lease, Secret};
pub(crate) use rbac::ClusterRole;
use tolerations::tolerations;

/// A pod: where it is and how it fares.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Pod {
    pub(crate) metadata: ObjectMeta,
    pub(crate) spec: PodSpec,
    pub(crate) status: PodStatus,
}

/// What of a pod's spec the controllers read.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct PodSpec {
    pub(crate) node_name: Option<String>,
    pub(crate) hostname: Option<String>,
    pub(crate) subdomain: Option<String>,
    /// Only those that can matter once the pod runs.
    #[serde(deserialize_with = "tolerations")]
    pub(crate) tolerations: Arc<[Toleration]>,
    /// For named target ports of services.
    pub(crate) containers: Vec<PodContainer>,
}

/// A container's ports.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct PodContainer {
    pub(crate) ports: Option<Vec<PodPort>>,
}

/// A container port that has a name.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct PodPort {
    pub(crate) name: Option<String>,
    pub(crate) container_port: i32,
    pub(crate) protocol: Option<String>,
}

/// What of a pod's status the controllers read.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct PodStatus {
    pub(crate) phase: Option<String>,
    pub(crate) conditions: Option<Vec<PodCondition>>,
    #[serde(rename = "podIP")]
    pub(crate) pod_ip: Option<String>,
    #[serde(deserialize_with = "restarts")]
    pub(crate) container_statuses: Restarts,
}

/// The highest restart count among a pod's containers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Restarts(pub(crate) i32);

fn restarts<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Restarts, D::Error> {
    let statuses = Option::<Vec<ContainerStatus>>::deserialize(deserializer)?;
    Ok(Restarts(statuses.iter().flatten().map(|status| status.restart_count).max().unwrap_or_default()))
}

impl Pod {
    /// The condition of this type.
    pub(crate) fn condition(&self, type_: &str) -> Option<&PodCondition> {
        self.status.conditions.iter().flatten().find(|condition| condition.type_ == type_)
    }

    /// The time since which the pod is ready, if it is.
    pub(crate) fn ready_since(&self) -> Option<Option<Time>> {
        self.condition("Ready")
            .filter(|ready| ready.status == "True")
            .map(|ready| ready.last_transition_time.clone())
    }

    /// Since when it is on its node: bound there, or made for it.
    pub(crate) fn bound_since(&self) -> Option<jiff::Timestamp> {
        let bound = self.condition("PodScheduled").filter(|bound| bound.status == "True");
        let bound = bound.and_then(|bound| bound.last_transition_time.as_ref());
        bound.or(self.metadata.creation_timestamp.as_ref()).map(|time| time.0)
    }

    /// Whether the pod has run to its end.
    pub(crate) fn finished(&self) -> bool {
        matches!(self.status.phase.as_deref(), Some("Succeeded" | "Failed"))
    }
}

/// A replica set.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct ReplicaSet {
    pub(crate) metadata: ObjectMeta,
    pub(crate) spec: ReplicaSetSpec,
    pub(crate) status: ReplicaSetStatus,
}

/// What a replica set wants.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct ReplicaSetSpec {
    pub(crate) replicas: Option<i32>,
    pub(crate) min_ready_seconds: Option<i32>,
    pub(crate) selector: LabelSelector,
    pub(crate) template: Template,
}

/// A deployment.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Deployment {
    pub(crate) metadata: ObjectMeta,
    pub(crate) spec: DeploymentSpec,
    pub(crate) status: DeploymentStatus,
}

/// What a deployment wants.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct DeploymentSpec {
    pub(crate) replicas: Option<i32>,
    pub(crate) paused: Option<bool>,
    pub(crate) min_ready_seconds: Option<i32>,
    pub(crate) progress_deadline_seconds: Option<i32>,
    pub(crate) revision_history_limit: Option<i32>,
    pub(crate) selector: LabelSelector,
    pub(crate) strategy: Option<DeploymentStrategy>,
    pub(crate) template: Template,
}

/// A node: its addresses for pods.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Node {
    pub(crate) metadata: ObjectMeta,
    pub(crate) spec: NodeSpec,
    pub(crate) status: NodeStatus,
}

/// What of a node's spec the controllers read.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct NodeSpec {
    #[serde(rename = "podCIDR")]
    pub(crate) pod_cidr: Option<String>,
    #[serde(rename = "podCIDRs")]
    pub(crate) pod_cidrs: Option<Vec<String>>,
    pub(crate) taints: Option<Vec<Taint>>,
    pub(crate) unschedulable: Option<bool>,
}

/// What of a node's status the controllers read.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct NodeStatus {
    pub(crate) addresses: Option<Vec<NodeAddress>>,
    pub(crate) conditions: Option<Vec<NodeCondition>>,
}

impl Node {
    /// The condition of this type.
    pub(crate) fn condition(&self, type_: &str) -> Option<&NodeCondition> {
        self.status.conditions.iter().flatten().find(|condition| condition.type_ == type_)
    }

    /// Its taints.
    pub(crate) fn taints(&self) -> &[Taint] {
        self.spec.taints.as_deref().unwrap_or_default()
    }

    /// Whether it is said not to be heard of any more.
    pub(crate) fn is_lost(&self) -> bool {
        self.condition("Ready").is_none_or(|ready| ready.status == "Unknown")
    }
}

/// A namespace.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Namespace {
    pub(crate) metadata: ObjectMeta,
    pub(crate) spec: NamespaceSpec,
    pub(crate) status: NamespaceStatus,
}

/// The finalizers of a namespace.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct NamespaceSpec {
    pub(crate) finalizers: Option<Vec<String>>,
}

/// A namespace's state.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct NamespaceStatus {
    pub(crate) conditions: Option<Vec<k8s_openapi::api::core::v1::NamespaceCondition>>,
}

/// A service account; only that it is there matters.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct ServiceAccount {
    pub(crate) metadata: ObjectMeta,
}

/// A config map with its data.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct ConfigMap {
    pub(crate) metadata: ObjectMeta,
    pub(crate) data: Option<std::collections::BTreeMap<String, String>>,
}

/// A service: whom it selects and on which ports.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Service {
    pub(crate) metadata: ObjectMeta,
    pub(crate) spec: ServiceSpec,
}

/// What of a service's spec the controllers read.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct ServiceSpec {
    #[serde(rename = "type")]
    pub(crate) type_: Option<String>,
    #[serde(rename = "clusterIP")]
    pub(crate) cluster_ip: Option<String>,
    pub(crate) selector: Option<std::collections::BTreeMap<String, String>>,
    pub(crate) ports: Option<Vec<ServicePort>>,
    pub(crate) publish_not_ready_addresses: Option<bool>,
}

/// The endpoints of a service.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Endpoints {
    pub(crate) metadata: ObjectMeta,
    pub(crate) subsets: Option<Vec<k8s_openapi::api::core::v1::EndpointSubset>>,
}

resource!(Pod, "", "pods", NamespaceResourceScope);
resource!(ReplicaSet, "apps", "replicasets", NamespaceResourceScope);
resource!(Deployment, "apps", "deployments", NamespaceResourceScope);
resource!(Node, "", "nodes", ClusterResourceScope);
resource!(Namespace, "", "namespaces", ClusterResourceScope);
resource!(ServiceAccount, "", "serviceaccounts", NamespaceResourceScope);
resource!(ConfigMap, "", "configmaps", NamespaceResourceScope);
resource!(Service, "", "services", NamespaceResourceScope);
resource!(Endpoints, "", "endpoints", NamespaceResourceScope);

impl Object for Pod {
    fn slim(&mut self) {
        let meta = self.meta_mut();
        meta.managed_fields = None;
        // Of a pod's annotations only the deletion cost is read.
        if let Some(annotations) = &mut meta.annotations {
            annotations.retain(|name, _| name == crate::replica_set::DELETION_COST);
        }
        for container in &mut self.spec.containers {
            if let Some(ports) = &mut container.ports {
                ports.retain(|port| port.name.is_some());
            }
        }
        self.spec
            .containers
            .retain(|container| container.ports.as_ref().is_some_and(|ports| !ports.is_empty()));
        self.spec.containers.shrink_to_fit();
    }
}
impl Object for ReplicaSet {}
impl Object for Deployment {}
impl Object for Node {}
impl Object for Namespace {}
impl Object for ServiceAccount {}
impl Object for ConfigMap {}
impl Object for Service {}
impl Object for Endpoints {}

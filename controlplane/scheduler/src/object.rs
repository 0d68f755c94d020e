//! Pods and nodes as the scheduler sees them: only the fields that it reads.

use std::borrow::Cow;
use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{
    Affinity, ObjectReference, PodCondition, PodSchedulingGate, ResourceRequirements, Taint, Toleration,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Resource;
use kube::core::{ClusterResourceScope, NamespaceResourceScope};
use serde::Deserialize;

/// A pod.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Pod {
    pub(crate) metadata: ObjectMeta,
    pub(crate) spec: PodSpec,
    pub(crate) status: PodStatus,
}

/// What of a pod's spec decides its place.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct PodSpec {
    pub(crate) node_name: Option<String>,
    pub(crate) scheduler_name: Option<String>,
    pub(crate) priority: Option<i32>,
    pub(crate) scheduling_gates: Option<Vec<PodSchedulingGate>>,
    pub(crate) node_selector: Option<BTreeMap<String, String>>,
    pub(crate) affinity: Option<Affinity>,
    pub(crate) tolerations: Option<Vec<Toleration>>,
    pub(crate) containers: Vec<Container>,
    pub(crate) init_containers: Option<Vec<Container>>,
    pub(crate) overhead: Option<BTreeMap<String, Quantity>>,
    pub(crate) resources: Option<ResourceRequirements>,
    pub(crate) host_network: Option<bool>,
}

/// What of a container decides its pod's place.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct Container {
    pub(crate) resources: Option<ResourceRequirements>,
    pub(crate) ports: Option<Vec<k8s_openapi::api::core::v1::ContainerPort>>,
    pub(crate) restart_policy: Option<String>,
}

/// What of a pod's status the scheduler reads.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct PodStatus {
    pub(crate) phase: Option<String>,
    pub(crate) conditions: Option<Vec<PodCondition>>,
}

/// A node.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Node {
    pub(crate) metadata: ObjectMeta,
    pub(crate) spec: NodeSpec,
    pub(crate) status: NodeStatus,
}

/// What of a node's spec the scheduler reads.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct NodeSpec {
    pub(crate) unschedulable: Option<bool>,
    pub(crate) taints: Option<Vec<Taint>>,
}

/// What a node has to give.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct NodeStatus {
    pub(crate) allocatable: Option<BTreeMap<String, Quantity>>,
    pub(crate) capacity: Option<BTreeMap<String, Quantity>>,
}

macro_rules! resource {
    ($type:ident, $plural:literal, $scope:ty) => {
        impl Resource for $type {
            type DynamicType = ();
            type Scope = $scope;

            fn kind((): &()) -> Cow<'_, str> {
                stringify!($type).into()
            }
            fn group((): &()) -> Cow<'_, str> {
                "".into()
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
resource!(Pod, "pods", NamespaceResourceScope);
resource!(Node, "nodes", ClusterResourceScope);

impl Pod {
    /// The pod's uid.
    pub(crate) fn uid(&self) -> &str {
        self.metadata.uid.as_deref().unwrap_or_default()
    }

    /// The pod's name.
    pub(crate) fn name(&self) -> &str {
        self.metadata.name.as_deref().unwrap_or_default()
    }

    /// The pod's namespace.
    pub(crate) fn namespace(&self) -> &str {
        self.metadata.namespace.as_deref().unwrap_or_default()
    }

    /// The node that the pod is bound to.
    pub(crate) fn node(&self) -> Option<&str> {
        self.spec.node_name.as_deref().filter(|name| !name.is_empty())
    }

    /// Whether the pod has run to its end and asks for nothing any more.
    pub(crate) fn finished(&self) -> bool {
        matches!(self.status.phase.as_deref(), Some("Succeeded" | "Failed"))
    }

    /// Whether it is for this scheduler to find a place for the pod, now.
    pub(crate) fn waits_for(&self, scheduler: &str) -> bool {
        self.node().is_none()
            && !self.finished()
            && self.metadata.deletion_timestamp.is_none()
            && self.spec.scheduler_name.as_deref().unwrap_or("default-scheduler") == scheduler
            && self.spec.scheduling_gates.as_ref().is_none_or(Vec::is_empty)
    }

    /// Whether a change is one that may decide the pod's place.
    pub(crate) fn asks_the_same(&self, other: &Self) -> bool {
        self.spec == other.spec && self.metadata.labels == other.metadata.labels
    }

    /// A reference to this pod for an event.
    pub(crate) fn reference(&self) -> ObjectReference {
        ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Pod".to_owned()),
            name: self.metadata.name.clone(),
            namespace: self.metadata.namespace.clone(),
            uid: self.metadata.uid.clone(),
            resource_version: self.metadata.resource_version.clone(),
            field_path: None,
        }
    }
}

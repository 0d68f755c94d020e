//! Reduced types of the API kinds. They contain only the fields that controllers read, so that cached objects are
//! small. Controllers write patches, never whole objects of these types.

use std::fmt::Debug;
use std::sync::Arc;

use coracle_values::object::without_managed_fields;
use coracle_values::resource;
use k8s_openapi::api::apps::v1::{DeploymentStatus, DeploymentStrategy, ReplicaSetStatus};
use k8s_openapi::api::core::v1::{
    LoadBalancerStatus, NodeAddress, NodeCondition, PodCondition, ServicePort, Taint, Toleration,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta, Time};
use kube::Resource;
use kube::core::DynamicObject;
use kube::core::metadata::PartialObjectMeta;
use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::template::Template;

/// The metadata of an object of any kind.
pub(crate) type Meta = PartialObjectMeta<DynamicObject>;

/// A kind that can be cached.
pub(crate) trait Object:
    Resource<DynamicType = ()> + ObjectExt + Clone + Debug + DeserializeOwned + Send + Sync + 'static
{
    /// Removes fields that no controller reads.
    fn slim(&mut self) {
        self.meta_mut().managed_fields = None;
    }
}

mod autoscaling;
mod batch;
mod containers;
mod devices;
mod disruption;
mod endpoints;
mod joining;
mod migration;
mod networking;
mod processors;
mod quota;
mod rbac;
mod requests;
mod scheduling;
mod shared;
mod storage;
mod tolerations;
mod workload;

pub(crate) use autoscaling::HorizontalPodAutoscaler;
pub(crate) use batch::{CronJob, Job};
use containers::{Containers, containers, sidecars};
pub(crate) use coracle_values::object::{Key, ObjectExt, controller_of};
pub(crate) use devices::{
    ExtendedClaimStatus, PodClaimStatus, PodResourceClaim, ResourceClaim, ResourceSlice,
};
pub(crate) use disruption::PodDisruptionBudget;
pub(crate) use endpoints::{EndpointSlice, Endpoints, Subset};
pub(crate) use joining::{CertificateSigningRequest, Lease, Secret};
pub(crate) use migration::{GroupResource, StorageVersionMigration};
pub(crate) use networking::{IPAddress, ServiceCIDR};
use processors::processors;
pub(crate) use quota::ResourceQuota;
pub(crate) use rbac::ClusterRole;
use requests::{PodRequests, Resources, is_present};
pub(crate) use scheduling::{PodGroup, PodSchedulingGroup};
use storage::claim_volumes;
pub(crate) use storage::{
    Claim, ClaimSource, PersistentVolume, PodVolume, StorageClass, VolumeAttributesClass,
};
use tolerations::tolerations;
pub(crate) use workload::{ControllerRevision, DaemonSet, ReplicationController, StatefulSet, pinned_node};

/// A pod.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Pod {
    #[serde(deserialize_with = "without_managed_fields")]
    pub(crate) metadata: ObjectMeta,
    pub(crate) spec: PodSpec,
    pub(crate) status: PodStatus,
}

/// The fields of a pod's spec that controllers read.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct PodSpec {
    pub(crate) node_name: Option<String>,
    pub(crate) hostname: Option<String>,
    pub(crate) subdomain: Option<String>,
    /// The tolerations of NoExecute taints. Other tolerations have no effect after the pod is bound.
    #[serde(deserialize_with = "tolerations")]
    pub(crate) tolerations: Arc<[Toleration]>,
    /// The node that the pod's node affinity selects. Daemon pods have this field before they are bound.
    #[serde(rename = "affinity", deserialize_with = "pinned_node")]
    pub(crate) pinned_node: Option<String>,
    /// The containers. After [`Object::slim`], only the containers with named ports remain, because services refer to
    /// named ports.
    pub(crate) containers: Vec<PodContainer>,
    /// Sidecars: restartable init containers, which run beside the containers. After [`Object::slim`], only sidecars
    /// with named ports.
    #[serde(rename = "initContainers", deserialize_with = "sidecars")]
    pub(crate) sidecars: Vec<PodContainer>,
    /// The requests of the pod as a whole. `None` after [`Object::slim`].
    resources: Option<Resources>,
    /// Whether the pod has `activeDeadlineSeconds`.
    #[serde(rename = "activeDeadlineSeconds", deserialize_with = "is_present")]
    pub(crate) has_deadline: bool,
    /// The requests of the pod and its containers. `None` before [`Object::slim`].
    #[serde(skip)]
    pub(crate) requests: Option<Arc<PodRequests>>,
    /// The volumes that use claims.
    #[serde(deserialize_with = "claim_volumes")]
    pub(crate) volumes: Arc<[PodVolume]>,
    /// The pod's claims of devices.
    pub(crate) resource_claims: Box<[PodResourceClaim]>,
    /// The group that the pod belongs to.
    pub(crate) scheduling_group: Option<Box<PodSchedulingGroup>>,
}

/// A container: its ports, and its requests until [`Object::slim`].
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct PodContainer {
    pub(crate) ports: Option<Vec<PodPort>>,
    /// Name of the container. `None` after [`Object::slim`].
    name: Option<String>,
    resources: Option<Resources>,
}

/// A container port that has a name.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct PodPort {
    pub(crate) name: Option<String>,
    pub(crate) container_port: i32,
    pub(crate) protocol: Option<String>,
}

/// The fields of a pod's status that controllers read.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct PodStatus {
    pub(crate) phase: Option<String>,
    pub(crate) start_time: Option<Time>,
    pub(crate) conditions: Option<Vec<PodCondition>>,
    #[serde(rename = "podIP")]
    pub(crate) pod_ip: Option<String>,
    #[serde(deserialize_with = "containers")]
    pub(crate) container_statuses: Containers,
    #[serde(deserialize_with = "containers")]
    pub(crate) init_container_statuses: Containers,
    #[serde(rename = "podIPs")]
    pub(crate) pod_ips: Option<Vec<k8s_openapi::api::core::v1::PodIP>>,
    /// The generated claims.
    pub(crate) resource_claim_statuses: Box<[PodClaimStatus]>,
    /// The claim for extended resources.
    pub(crate) extended_resource_claim_status: Option<Box<ExtendedClaimStatus>>,
}

impl Pod {
    /// The condition of this type.
    pub(crate) fn condition(&self, type_: &str) -> Option<&PodCondition> {
        self.status.conditions.iter().flatten().find(|condition| condition.type_ == type_)
    }

    /// Time at which the pod became ready. `None` if the pod is not ready. The inner value is `None` if the time is
    /// unknown.
    pub(crate) fn ready_since(&self) -> Option<Option<Time>> {
        self.condition("Ready")
            .filter(|ready| ready.status == "True")
            .map(|ready| ready.last_transition_time.clone())
    }

    /// Time at which the pod became ready, or not ready.
    pub(crate) fn readiness_changed_at(&self) -> Option<jiff::Timestamp> {
        self.condition("Ready")?.last_transition_time.as_ref().map(|time| time.0)
    }

    /// Time at which the pod got its node: its binding, or its creation if it was created with a node.
    pub(crate) fn bound_since(&self) -> Option<jiff::Timestamp> {
        let bound = self.condition("PodScheduled").filter(|bound| bound.status == "True");
        let bound = bound.and_then(|bound| bound.last_transition_time.as_ref());
        bound.or(self.metadata.creation_timestamp.as_ref()).map(|time| time.0)
    }

    /// The fields that affect endpoints and can change while the pod exists.
    pub(crate) fn endpoint_facts(&self) -> impl PartialEq + '_ {
        let (meta, status) = (&self.metadata, &self.status);
        let state = (self.is_being_deleted(), self.finished(), self.ready_since().is_some());
        (&meta.uid, &meta.labels, &self.spec.node_name, &status.pod_ip, &status.pod_ips, state)
    }

    /// Whether the pod has succeeded or failed.
    pub(crate) fn finished(&self) -> bool {
        matches!(self.status.phase.as_deref(), Some("Succeeded" | "Failed"))
    }

    /// Whether the pod is neither finished nor being deleted.
    pub(crate) fn is_active(&self) -> bool {
        !self.finished() && !self.is_being_deleted()
    }
}

/// A replica set.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct ReplicaSet {
    #[serde(deserialize_with = "without_managed_fields")]
    pub(crate) metadata: ObjectMeta,
    pub(crate) spec: ReplicaSetSpec,
    pub(crate) status: ReplicaSetStatus,
}

/// The fields of a replica set's spec that controllers read.
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
    #[serde(deserialize_with = "without_managed_fields")]
    pub(crate) metadata: ObjectMeta,
    pub(crate) spec: DeploymentSpec,
    pub(crate) status: DeploymentStatus,
}

/// The fields of a deployment's spec that controllers read.
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

/// A node.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Node {
    pub(crate) metadata: ObjectMeta,
    pub(crate) spec: NodeSpec,
    pub(crate) status: NodeStatus,
}

/// The fields of a node's spec that controllers read.
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

/// The fields of a node's status that controllers read.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct NodeStatus {
    pub(crate) addresses: Option<Vec<NodeAddress>>,
    pub(crate) conditions: Option<Vec<NodeCondition>>,
    /// Allocatable processors in thousandths.
    #[serde(rename = "allocatable", deserialize_with = "processors")]
    pub(crate) processors: i64,
}

impl Node {
    /// The condition of this type.
    pub(crate) fn condition(&self, type_: &str) -> Option<&NodeCondition> {
        self.status.conditions.iter().flatten().find(|condition| condition.type_ == type_)
    }

    /// The node's taints.
    pub(crate) fn taints(&self) -> &[Taint] {
        self.spec.taints.as_deref().unwrap_or_default()
    }

    /// Whether the node's condition Ready is absent or Unknown.
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

/// A service account.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct ServiceAccount {
    pub(crate) metadata: ObjectMeta,
    pub(crate) secrets: Option<Box<[AccountSecret]>>,
}

/// A Secret that a service account names.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(default)]
pub(crate) struct AccountSecret {
    pub(crate) name: Option<String>,
}

/// A config map with its data.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct ConfigMap {
    pub(crate) metadata: ObjectMeta,
    pub(crate) data: Option<std::collections::BTreeMap<String, String>>,
}

/// A service.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Service {
    pub(crate) metadata: ObjectMeta,
    pub(crate) spec: ServiceSpec,
    pub(crate) status: ServiceStatus,
}

/// The fields of a service's spec that controllers read.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct ServiceSpec {
    #[serde(rename = "type")]
    pub(crate) type_: Option<String>,
    #[serde(rename = "clusterIP")]
    pub(crate) cluster_ip: Option<String>,
    #[serde(rename = "clusterIPs")]
    pub(crate) cluster_ips: Option<Vec<String>>,
    pub(crate) selector: Option<std::collections::BTreeMap<String, String>>,
    pub(crate) ports: Option<Vec<ServicePort>>,
    pub(crate) publish_not_ready_addresses: Option<bool>,
    pub(crate) ip_families: Option<Vec<String>>,
    pub(crate) traffic_distribution: Option<String>,
    pub(crate) external_traffic_policy: Option<String>,
    pub(crate) health_check_node_port: Option<i32>,
    pub(crate) load_balancer_class: Option<String>,
    #[serde(rename = "loadBalancerIP")]
    pub(crate) load_balancer_ip: Option<String>,
}

/// The addresses of a service's load balancer.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct ServiceStatus {
    pub(crate) load_balancer: Option<LoadBalancerStatus>,
    pub(crate) conditions: Option<Vec<k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition>>,
}

resource!(Pod, "", "pods", NamespaceResourceScope);
resource!(ReplicaSet, "apps", "replicasets", NamespaceResourceScope);
resource!(Deployment, "apps", "deployments", NamespaceResourceScope);
resource!(Node, "", "nodes", ClusterResourceScope);
resource!(Namespace, "", "namespaces", ClusterResourceScope);
resource!(ServiceAccount, "", "serviceaccounts", NamespaceResourceScope);
resource!(ConfigMap, "", "configmaps", NamespaceResourceScope);
resource!(Service, "", "services", NamespaceResourceScope);

/// The annotations of pods that controllers read.
const ANNOTATIONS: [&str; 4] = [
    crate::annotation::DELETION_COST,
    crate::annotation::JOB_INDEX,
    crate::annotation::JOB_INDEX_FAILURES,
    crate::annotation::JOB_INDEX_IGNORED_FAILURES,
];

impl Object for Pod {
    fn slim(&mut self) {
        let meta = self.meta_mut();
        meta.managed_fields = None;
        if let Some(annotations) = &mut meta.annotations {
            annotations.retain(|name, _| ANNOTATIONS.contains(&name.as_str()));
        }
        if self.spec.requests.is_none() {
            self.spec.requests = Some(requests::take(&mut self.spec));
        }
        keep_named_ports(&mut self.spec.containers);
        keep_named_ports(&mut self.spec.sidecars);
        // A decoded list has the capacity for at least four items, even if it has fewer.
        if let Some(owners) = &mut self.metadata.owner_references {
            owners.shrink_to_fit();
        }
        if let Some(conditions) = &mut self.status.conditions {
            conditions.shrink_to_fit();
        }
        if let Some(ips) = &mut self.status.pod_ips {
            ips.shrink_to_fit();
        }
    }
}

/// Removes ports without a name, and containers without named ports.
fn keep_named_ports(containers: &mut Vec<PodContainer>) {
    for ports in containers.iter_mut().filter_map(|container| container.ports.as_mut()) {
        ports.retain(|port| port.name.is_some());
    }
    containers.retain(|container| container.ports.as_ref().is_some_and(|ports| !ports.is_empty()));
    containers.shrink_to_fit();
}

impl Object for ReplicaSet {}
impl Object for Deployment {}
impl Object for Node {}
impl Object for Namespace {}
impl Object for ServiceAccount {}
impl Object for ConfigMap {}
impl Object for Service {}

//! Reduced types of pods, nodes, namespaces and disruption budgets. They contain only the fields that the scheduler
//! reads.

mod disks;

use std::collections::BTreeMap;

use coracle_values::object::{Key, ObjectExt, without_managed_fields};
use coracle_values::resource;
use k8s_openapi::api::core::v1::{
    Affinity, ContainerImage, ImageVolumeSource, PersistentVolumeClaimVolumeSource, PodCondition,
    PodSchedulingGate, ResourceRequirements, Taint, Toleration, TopologySpreadConstraint,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta, OwnerReference, Time};
use serde::de::{DeserializeOwned, IgnoredAny};
use serde::{Deserialize, Deserializer};
use serde_json::Value;

pub(crate) use disks::{AwsDisk, GceDisk, IscsiDisk, RbdImage};

/// Decodes an object of a simulated cluster. The object is converted to text first, so that the decoder of the watches
/// can read it.
pub(crate) fn decode<T: DeserializeOwned>(object: &Value) -> Result<T, serde_json::Error> {
    serde_json::from_str(&object.to_string())
}

/// A pod.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Pod {
    #[serde(deserialize_with = "scheduling_metadata")]
    pub(crate) metadata: ObjectMeta,
    pub(crate) spec: PodSpec,
    pub(crate) status: PodStatus,
}

/// The fields of a pod's spec that the scheduler reads.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct PodSpec {
    pub(crate) node_name: Option<String>,
    pub(crate) scheduler_name: Option<String>,
    pub(crate) priority: Option<i32>,
    pub(crate) preemption_policy: Option<String>,
    pub(crate) scheduling_gates: Option<Vec<PodSchedulingGate>>,
    pub(crate) node_selector: Option<BTreeMap<String, String>>,
    pub(crate) affinity: Option<Affinity>,
    pub(crate) tolerations: Option<Vec<Toleration>>,
    pub(crate) containers: Vec<Container>,
    pub(crate) init_containers: Option<Vec<Container>>,
    pub(crate) overhead: Option<BTreeMap<String, Quantity>>,
    pub(crate) resources: Option<ResourceRequirements>,
    pub(crate) host_network: Option<bool>,
    pub(crate) topology_spread_constraints: Option<Vec<TopologySpreadConstraint>>,
    pub(crate) volumes: Vec<PodVolume>,
    pub(crate) resource_claims: Vec<PodResourceClaim>,
    pub(crate) scheduling_group: Option<SchedulingGroup>,
}

/// The reference of a pod to its group.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct SchedulingGroup {
    pub(crate) pod_group_name: Option<String>,
}

/// Whether `state` is older than `other`, another state of the same object. The resource versions of the API server
/// increase.
pub(crate) fn is_older<K: ObjectExt>(state: &K, other: &K) -> bool {
    let version =
        |object: &K| object.meta().resource_version.as_deref().and_then(|text| text.parse::<u64>().ok());
    version(state) < version(other)
}

/// The fields of metadata that the scheduler and its watches read. A decoder skips fields that a type does not have.
#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct SchedulingMetadata {
    name: Option<String>,
    namespace: Option<String>,
    uid: Option<String>,
    resource_version: Option<String>,
    generation: Option<i64>,
    labels: Option<BTreeMap<String, String>>,
    owner_references: Option<Vec<OwnerReference>>,
    deletion_timestamp: Option<Time>,
}

/// Decodes metadata, and skips the fields that the scheduler does not read: annotations can be the largest part of a
/// pod.
pub(crate) fn scheduling_metadata<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<ObjectMeta, D::Error> {
    let read = SchedulingMetadata::deserialize(deserializer)?;
    Ok(ObjectMeta {
        name: read.name,
        namespace: read.namespace,
        uid: read.uid,
        resource_version: read.resource_version,
        generation: read.generation,
        labels: read.labels,
        owner_references: read.owner_references,
        deletion_timestamp: read.deletion_timestamp,
        ..ObjectMeta::default()
    })
}

/// A device claim of a pod: an existing claim, or a claim that a controller creates from a template.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct PodResourceClaim {
    pub(crate) name: String,
    pub(crate) resource_claim_name: Option<String>,
    pub(crate) resource_claim_template_name: Option<String>,
}

/// The name of a claim that a controller created.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct PodClaimStatus {
    pub(crate) name: String,
    pub(crate) resource_claim_name: Option<String>,
}

/// The fields of a pod's volume that the scheduler reads.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct PodVolume {
    pub(crate) name: String,
    pub(crate) persistent_volume_claim: Option<PersistentVolumeClaimVolumeSource>,
    pub(crate) ephemeral: Option<EphemeralVolume>,
    pub(crate) image: Option<ImageVolumeSource>,
    pub(crate) gce_persistent_disk: Option<Box<GceDisk>>,
    pub(crate) aws_elastic_block_store: Option<Box<AwsDisk>>,
    pub(crate) iscsi: Option<Box<IscsiDisk>>,
    pub(crate) rbd: Option<Box<RbdImage>>,
}

/// A volume with a generated claim.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
pub(crate) struct EphemeralVolume {}

/// The fields of a container that the scheduler reads.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct Container {
    pub(crate) name: String,
    pub(crate) image: Option<String>,
    pub(crate) resources: Option<ResourceRequirements>,
    pub(crate) ports: Option<Vec<k8s_openapi::api::core::v1::ContainerPort>>,
    pub(crate) restart_policy: Option<String>,
    pub(crate) restart_policy_rules: Option<Vec<RestartRule>>,
}

/// A rule for the restart of a container after it ends.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default)]
pub(crate) struct RestartRule {
    pub(crate) action: String,
}

/// The fields of a pod's status that the scheduler reads.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct PodStatus {
    pub(crate) phase: Option<String>,
    pub(crate) nominated_node_name: Option<String>,
    pub(crate) start_time: Option<Time>,
    pub(crate) conditions: Option<Vec<PodCondition>>,
    pub(crate) container_statuses: Vec<ContainerStatus>,
    pub(crate) init_container_statuses: Vec<ContainerStatus>,
    pub(crate) resource_claim_statuses: Vec<PodClaimStatus>,
    /// The pod-level resources on the node.
    pub(crate) resources: Option<ResourceRequirements>,
    pub(crate) allocated_resources: Option<BTreeMap<String, Quantity>>,
}

/// The resources that a container has on its node.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct ContainerStatus {
    pub(crate) name: String,
    pub(crate) resources: Option<ResourceRequirements>,
    pub(crate) allocated_resources: Option<BTreeMap<String, Quantity>>,
}

/// A node.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Node {
    /// Metadata with the annotations, because the snapshot reads one of them. The snapshot does not keep the node
    /// object.
    #[serde(deserialize_with = "without_managed_fields")]
    pub(crate) metadata: ObjectMeta,
    pub(crate) spec: NodeSpec,
    pub(crate) status: NodeStatus,
}

/// The fields of a node's spec that the scheduler reads.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct NodeSpec {
    pub(crate) unschedulable: Option<bool>,
    pub(crate) taints: Option<Vec<Taint>>,
}

/// The fields of a node's status that the scheduler reads.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct NodeStatus {
    pub(crate) allocatable: Option<BTreeMap<String, Quantity>>,
    pub(crate) capacity: Option<BTreeMap<String, Quantity>>,
    pub(crate) images: Option<Vec<ContainerImage>>,
    #[serde(rename = "declaredFeatures")]
    pub(crate) declared_features: Option<Vec<String>>,
}

/// A namespace. Affinity terms select namespaces by label.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Namespace {
    pub(crate) metadata: ObjectMeta,
}

/// A disruption budget. Victims of a preemption should not violate it.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct PodDisruptionBudget {
    pub(crate) metadata: ObjectMeta,
    pub(crate) spec: BudgetSpec,
    pub(crate) status: BudgetStatus,
}

/// The selector of a budget's pods.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct BudgetSpec {
    pub(crate) selector: Option<LabelSelector>,
}

/// The fields of a budget's status that the scheduler reads.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct BudgetStatus {
    /// The number of pods that may be removed.
    pub(crate) disruptions_allowed: i32,
    /// Disrupted pods by name. The values are times, which can be null, and are not read.
    pub(crate) disrupted_pods: Option<BTreeMap<String, IgnoredAny>>,
}

resource!(PodDisruptionBudget, "policy", "poddisruptionbudgets", NamespaceResourceScope);
resource!(Namespace, "", "namespaces", ClusterResourceScope);
resource!(Pod, "", "pods", NamespaceResourceScope);
resource!(Node, "", "nodes", ClusterResourceScope);

impl Pod {
    /// The node that the pod is bound to.
    pub(crate) fn node(&self) -> Option<&str> {
        self.spec.node_name.as_deref().filter(|name| !name.is_empty())
    }

    /// The pod's tolerations.
    pub(crate) fn tolerations(&self) -> &[Toleration] {
        self.spec.tolerations.as_deref().unwrap_or_default()
    }

    /// Whether the pod has succeeded or failed, and therefore uses no resources.
    pub(crate) fn finished(&self) -> bool {
        matches!(self.status.phase.as_deref(), Some("Succeeded" | "Failed"))
    }

    /// The name of the scheduler that handles the pod.
    pub(crate) fn scheduler(&self) -> &str {
        self.spec.scheduler_name.as_deref().unwrap_or("default-scheduler")
    }

    /// The PodGroup that the pod is a member of.
    pub(crate) fn group(&self) -> Option<Key> {
        let name = self.spec.scheduling_group.as_ref()?.pod_group_name.as_deref()?;
        Some(Key::new(self.namespace(), name))
    }

    /// Whether the pod is to be scheduled: it has no node and no scheduling gates, and is neither finished nor being
    /// deleted.
    pub(crate) fn needs_node(&self) -> bool {
        self.node().is_none()
            && !self.finished()
            && self.metadata.deletion_timestamp.is_none()
            && self.spec.scheduling_gates.as_ref().is_none_or(Vec::is_empty)
    }

    /// Whether two pods, or two versions of a pod, are equal for filters, scores and preemption: spec, labels and
    /// generated claims.
    pub(crate) fn has_same_requirements(&self, other: &Self) -> bool {
        self.spec == other.spec
            && self.metadata.labels == other.metadata.labels
            && self.status.resource_claim_statuses == other.status.resource_claim_statuses
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_time_of_a_disrupted_pod_can_be_null() {
        let status =
            json!({"disruptionsAllowed": 1, "disruptedPods": {"p": null, "q": "2026-01-01T00:00:00Z"}});
        let budget: PodDisruptionBudget = serde_json::from_value(json!({"status": status})).unwrap();
        let names: Vec<String> = budget.status.disrupted_pods.unwrap().into_keys().collect();
        assert_eq!(names, ["p", "q"]);
    }

    #[test]
    fn metadata_is_kept_without_unused_fields() {
        let read = json!({"name": "p", "namespace": "d", "uid": "u", "resourceVersion": "7", "generation": 2,
            "labels": {"a": "b"}, "deletionTimestamp": "2026-01-01T00:00:00Z",
            "ownerReferences": [{"apiVersion": "v1", "kind": "X", "name": "o", "uid": "1"}]});
        let mut whole = read.clone();
        whole["managedFields"] = json!([{"manager": "m", "fieldsV1": {"f:spec": {}}}]);
        // Decoding would fail, so success shows that the decoder skips the fields.
        whole["annotations"] = json!(["wrong"]);
        whole["creationTimestamp"] = json!("wrong");
        whole["finalizers"] = json!(["f"]);
        let pod: Pod = serde_json::from_value(json!({"metadata": whole})).unwrap();
        assert_eq!(serde_json::to_value(&pod.metadata).unwrap(), read);
    }
}

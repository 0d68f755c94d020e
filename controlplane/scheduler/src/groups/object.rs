//! Reduced type of PodGroup: the fields that scheduling reads.

use coracle_values::resource;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, ObjectMeta};
use serde::Deserialize;
use serde_json::Value;

use crate::object::scheduling_metadata;

/// A group of pods that are scheduled by one policy.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct PodGroup {
    #[serde(deserialize_with = "scheduling_metadata")]
    pub(crate) metadata: ObjectMeta,
    pub(crate) spec: PodGroupSpec,
    pub(crate) status: PodGroupStatus,
}

/// The fields of a group's spec that the scheduler reads.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct PodGroupSpec {
    pub(crate) scheduling_policy: SchedulingPolicy,
    /// Constraints of the feature TopologyAwareWorkloadScheduling, which this scheduler does not have.
    pub(crate) scheduling_constraints: Option<Value>,
}

/// The policy: `gang` or `basic`.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default)]
pub(crate) struct SchedulingPolicy {
    pub(crate) gang: Option<GangPolicy>,
}

/// All-or-nothing scheduling.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct GangPolicy {
    /// Minimum number of pods that must be placed together.
    pub(crate) min_count: i32,
}

/// The status of a group.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct PodGroupStatus {
    pub(crate) conditions: Vec<Condition>,
}

resource!(PodGroup, "PodGroup", ("scheduling.k8s.io", "v1alpha2", "podgroups"), NamespaceResourceScope);

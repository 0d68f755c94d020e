//! Stateful sets, daemon sets, replication controllers, controller revisions.

use coracle_values::resource;
use k8s_openapi::api::apps::v1::{
    DaemonSetStatus, DaemonSetUpdateStrategy, ReplicaSetStatus, StatefulSetOrdinals,
    StatefulSetPersistentVolumeClaimRetentionPolicy, StatefulSetStatus, StatefulSetUpdateStrategy,
};
use k8s_openapi::api::core::v1::{Affinity, NodeSelectorTerm};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta};
use serde::{Deserialize, Deserializer};
use serde_json::Value;

use super::{Object, ReplicaSetSpec};
use crate::template::Template;

/// A stateful set.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct StatefulSet {
    pub(crate) metadata: ObjectMeta,
    pub(crate) spec: StatefulSetSpec,
    pub(crate) status: StatefulSetStatus,
}

/// The fields of a stateful set's spec that controllers read.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct StatefulSetSpec {
    pub(crate) replicas: Option<i32>,
    pub(crate) min_ready_seconds: Option<i32>,
    pub(crate) ordinals: Option<StatefulSetOrdinals>,
    pub(crate) pod_management_policy: Option<String>,
    pub(crate) persistent_volume_claim_retention_policy:
        Option<StatefulSetPersistentVolumeClaimRetentionPolicy>,
    pub(crate) revision_history_limit: Option<i32>,
    pub(crate) selector: LabelSelector,
    pub(crate) service_name: Option<String>,
    pub(crate) template: Template,
    pub(crate) update_strategy: Option<StatefulSetUpdateStrategy>,
    /// Claims as the API server sent them.
    pub(crate) volume_claim_templates: Vec<Value>,
}

/// A daemon set.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct DaemonSet {
    pub(crate) metadata: ObjectMeta,
    pub(crate) spec: DaemonSetSpec,
    pub(crate) status: DaemonSetStatus,
}

/// The fields of a daemon set's spec that controllers read.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct DaemonSetSpec {
    pub(crate) min_ready_seconds: Option<i32>,
    pub(crate) revision_history_limit: Option<i32>,
    pub(crate) selector: LabelSelector,
    pub(crate) template: Template,
    pub(crate) update_strategy: Option<DaemonSetUpdateStrategy>,
}

/// A replication controller in the form of a replica set.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct ReplicationController {
    pub(crate) metadata: ObjectMeta,
    #[serde(deserialize_with = "replication_spec")]
    pub(crate) spec: ReplicaSetSpec,
    pub(crate) status: ReplicaSetStatus,
}

/// Decodes the spec of a replication controller, whose selector is a map of labels.
fn replication_spec<'de, D: Deserializer<'de>>(deserializer: D) -> Result<ReplicaSetSpec, D::Error> {
    let mut spec = serde_json::Map::deserialize(deserializer)?;
    let labels = spec.remove("selector");
    spec.insert("selector".to_owned(), serde_json::json!({"matchLabels": labels}));
    serde_json::from_value(spec.into()).map_err(serde::de::Error::custom)
}

/// A revision of a stateful set or a daemon set.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct ControllerRevision {
    pub(crate) metadata: ObjectMeta,
    /// The patch that sets this revision's pod template.
    pub(crate) data: Template,
    pub(crate) revision: i64,
}

/// The node that a required node affinity selects by `metadata.name`.
pub(crate) fn pinned_node<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<String>, D::Error> {
    let affinity = Option::<Affinity>::deserialize(deserializer)?;
    let required = affinity
        .and_then(|affinity| affinity.node_affinity)
        .and_then(|node| node.required_during_scheduling_ignored_during_execution);
    Ok(required.and_then(|required| required.node_selector_terms.iter().find_map(named)))
}

fn named(term: &NodeSelectorTerm) -> Option<String> {
    let mut fields = term.match_fields.iter().flatten();
    let field = fields.find(|field| field.key == "metadata.name" && field.operator == "In")?;
    match field.values.as_deref()? {
        [name] => Some(name.clone()),
        _ => None,
    }
}

resource!(StatefulSet, "apps", "statefulsets", NamespaceResourceScope);
resource!(DaemonSet, "apps", "daemonsets", NamespaceResourceScope);
resource!(ReplicationController, "", "replicationcontrollers", NamespaceResourceScope);
resource!(ControllerRevision, "apps", "controllerrevisions", NamespaceResourceScope);

impl Object for StatefulSet {}
impl Object for DaemonSet {}
impl Object for ReplicationController {}
impl Object for ControllerRevision {}

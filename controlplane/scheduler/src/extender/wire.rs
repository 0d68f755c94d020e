//! The messages between scheduler and extender (`extender/v1`). Upstream writes the names of the Go fields and reads names
//! without regard to case.

use std::collections::{BTreeMap, HashMap};

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The pod with its candidate nodes: the objects, or their names.
#[derive(Serialize)]
#[serde(rename_all = "PascalCase")]
pub(super) struct Args<'a> {
    pub(super) pod: &'a Value,
    pub(super) nodes: Option<NodeList<'a>>,
    pub(super) node_names: Option<&'a [String]>,
}

#[derive(Serialize)]
pub(super) struct NodeList<'a> {
    pub(super) metadata: BTreeMap<(), ()>,
    pub(super) items: Vec<&'a Value>,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "PascalCase")]
pub(super) struct FilterResult {
    #[serde(alias = "nodes")]
    pub(super) nodes: Option<FilteredNodes>,
    #[serde(alias = "nodeNames", alias = "nodenames")]
    pub(super) node_names: Option<Vec<String>>,
    #[serde(alias = "failedNodes", alias = "failednodes")]
    pub(super) failed_nodes: Option<HashMap<String, String>>,
    #[serde(alias = "failedAndUnresolvableNodes", alias = "failedandunresolvablenodes")]
    pub(super) failed_and_unresolvable_nodes: Option<HashMap<String, String>>,
    #[serde(alias = "error")]
    pub(super) error: Option<String>,
}

#[derive(Deserialize)]
pub(super) struct FilteredNodes {
    #[serde(default)]
    pub(super) items: Option<Vec<Named>>,
}

#[derive(Deserialize)]
pub(super) struct Named {
    pub(super) metadata: Name,
}

#[derive(Deserialize)]
pub(super) struct Name {
    pub(super) name: String,
}

/// The score of a node, from 0 to 10.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(super) struct HostPriority {
    #[serde(alias = "host")]
    pub(super) host: String,
    #[serde(alias = "score")]
    pub(super) score: i64,
}

/// The victims of a preemption by node: the pods, or their uids.
#[derive(Serialize)]
#[serde(rename_all = "PascalCase")]
pub(super) struct PreemptionArgs<'a> {
    pub(super) pod: &'a Value,
    pub(super) node_name_to_victims: Option<BTreeMap<&'a str, Victims<'a>>>,
    pub(super) node_name_to_meta_victims: Option<BTreeMap<&'a str, MetaVictims>>,
}

#[derive(Serialize)]
pub(super) struct Victims<'a> {
    #[serde(rename = "Pods")]
    pub(super) pods: Vec<&'a Value>,
    #[serde(rename = "NumPDBViolations")]
    pub(super) violations: usize,
}

#[derive(Default, Deserialize, Serialize)]
#[serde(default)]
pub(super) struct MetaVictims {
    #[serde(rename = "Pods", alias = "pods")]
    pub(super) pods: Option<Vec<MetaPod>>,
    #[serde(rename = "NumPDBViolations", alias = "numPDBViolations")]
    pub(super) violations: i64,
}

#[derive(Deserialize, Serialize)]
pub(super) struct MetaPod {
    #[serde(rename = "UID", alias = "uid")]
    pub(super) uid: String,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "PascalCase")]
pub(super) struct PreemptionResult {
    #[serde(alias = "nodeNameToMetaVictims")]
    pub(super) node_name_to_meta_victims: Option<HashMap<String, Option<MetaVictims>>>,
}

#[derive(Serialize)]
#[serde(rename_all = "PascalCase")]
pub(super) struct BindingArgs<'a> {
    pub(super) pod_name: &'a str,
    pub(super) pod_namespace: &'a str,
    #[serde(rename = "PodUID")]
    pub(super) pod_uid: &'a str,
    pub(super) node: &'a str,
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct BindingResult {
    #[serde(rename = "Error", alias = "error")]
    pub(super) error: Option<String>,
}

//! The messages between scheduler and extender (`extender/v1`). Upstream uses the names of the Go fields in messages,
//! and ignores case when it reads a message.

use std::collections::{BTreeMap, HashMap};

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The pod with its candidate nodes, as objects or as names.
#[derive(Serialize)]
#[serde(rename_all = "PascalCase")]
pub(crate) struct Args<'a> {
    pub(crate) pod: &'a Value,
    pub(crate) nodes: Option<NodeList<'a>>,
    pub(crate) node_names: Option<&'a [String]>,
}

#[derive(Serialize)]
pub(crate) struct NodeList<'a> {
    pub(crate) metadata: BTreeMap<(), ()>,
    pub(crate) items: Vec<&'a Value>,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "PascalCase")]
pub(crate) struct FilterResult {
    #[serde(alias = "nodes")]
    pub(crate) nodes: Option<FilteredNodes>,
    #[serde(alias = "nodeNames", alias = "nodenames")]
    pub(crate) node_names: Option<Vec<String>>,
    #[serde(alias = "failedNodes", alias = "failednodes")]
    pub(crate) failed_nodes: Option<HashMap<String, String>>,
    #[serde(alias = "failedAndUnresolvableNodes", alias = "failedandunresolvablenodes")]
    pub(crate) failed_and_unresolvable_nodes: Option<HashMap<String, String>>,
    #[serde(alias = "error")]
    pub(crate) error: Option<String>,
}

#[derive(Deserialize)]
pub(crate) struct FilteredNodes {
    #[serde(default)]
    pub(crate) items: Option<Vec<Named>>,
}

#[derive(Deserialize)]
pub(crate) struct Named {
    pub(crate) metadata: Name,
}

#[derive(Deserialize)]
pub(crate) struct Name {
    pub(crate) name: String,
}

/// The score of a node, from 0 to 10.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(crate) struct HostPriority {
    #[serde(alias = "host")]
    pub(crate) host: String,
    #[serde(alias = "score")]
    pub(crate) score: i64,
}

/// The victims of a preemption by node, as pods or as uids.
#[derive(Serialize)]
#[serde(rename_all = "PascalCase")]
pub(crate) struct PreemptionArgs<'a> {
    pub(crate) pod: &'a Value,
    pub(crate) node_name_to_victims: Option<BTreeMap<&'a str, Victims<'a>>>,
    pub(crate) node_name_to_meta_victims: Option<BTreeMap<&'a str, MetaVictims>>,
}

#[derive(Serialize)]
pub(crate) struct Victims<'a> {
    #[serde(rename = "Pods")]
    pub(crate) pods: Vec<&'a Value>,
    #[serde(rename = "NumPDBViolations")]
    pub(crate) violations: usize,
}

#[derive(Default, Deserialize, Serialize)]
#[serde(default)]
pub(crate) struct MetaVictims {
    #[serde(rename = "Pods", alias = "pods")]
    pub(crate) pods: Option<Vec<MetaPod>>,
    #[serde(rename = "NumPDBViolations", alias = "numPDBViolations")]
    pub(crate) violations: i64,
}

#[derive(Deserialize, Serialize)]
pub(crate) struct MetaPod {
    #[serde(rename = "UID", alias = "uid")]
    pub(crate) uid: String,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "PascalCase")]
pub(crate) struct PreemptionResult {
    #[serde(alias = "nodeNameToMetaVictims")]
    pub(crate) node_name_to_meta_victims: Option<HashMap<String, Option<MetaVictims>>>,
}

#[derive(Serialize)]
#[serde(rename_all = "PascalCase")]
pub(crate) struct BindingArgs<'a> {
    pub(crate) pod_name: &'a str,
    pub(crate) pod_namespace: &'a str,
    #[serde(rename = "PodUID")]
    pub(crate) pod_uid: &'a str,
    pub(crate) node: &'a str,
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(crate) struct BindingResult {
    #[serde(rename = "Error", alias = "error")]
    pub(crate) error: Option<String>,
}

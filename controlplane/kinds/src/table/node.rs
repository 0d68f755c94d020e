//! Nodes.

use jiff::Timestamp;
use serde_json::Value;

use super::{AGE, Column, NAME, age_cell, integer, items, length, name, string, wide};

const ROLE_PREFIX: &str = "node-role.kubernetes.io/";

pub(crate) const COLUMNS: &[Column] = &[
    NAME,
    string("Status", "Whether the node is ready, and whether pods may be scheduled to it."),
    string("Roles", "Roles, from the node's labels."),
    AGE,
    string("Version", "Version that the node's agent reports."),
    wide(string("Internal-IP", "Address inside the cluster's network.")),
    wide(string("External-IP", "Address outside the cluster's network.")),
    wide(string("OS-Image", "Operating system.")),
    wide(string("Kernel-Version", "Version of the kernel, and the architecture.")),
    wide(string("Container-Runtime", "Runtime and its version.")),
];

pub(crate) fn cells(node: &Value, now: Timestamp) -> Vec<Value> {
    let (status, info) = (&node["status"], &node["status"]["nodeInfo"]);
    let or_unknown = |value: &Value| match value.as_str() {
        None | Some("") => Value::from("<unknown>"),
        Some(text) => text.into(),
    };
    let address = |kind: &str| {
        let found = items(&status["addresses"]).find(|address| address["type"] == kind);
        found.map_or_else(|| "<none>".into(), |address| address["address"].clone())
    };
    vec![
        name(node),
        readiness(node).into(),
        roles(node).into(),
        age_cell(node, now),
        info["kubeletVersion"].clone(),
        address("InternalIP"),
        address("ExternalIP"),
        or_unknown(&info["osImage"]),
        kernel(or_unknown(&info["kernelVersion"]), &info["architecture"]),
        or_unknown(&info["containerRuntimeVersion"]),
    ]
}

/// The kernel's version and the architecture of the node, if it is known: `6.1.0 (arm64)`.
fn kernel(version: Value, architecture: &Value) -> Value {
    match (version.as_str(), architecture.as_str()) {
        (Some(version), Some(architecture)) if !architecture.is_empty() => {
            format!("{version} ({architecture})").into()
        }
        _ => version,
    }
}

pub(crate) const CSI_NODE: &[Column] =
    &[NAME, integer("Drivers", "Number of storage drivers on the node."), AGE];

pub(crate) fn csi_node(object: &Value, now: Timestamp) -> Vec<Value> {
    vec![name(object), length(&object["spec"]["drivers"]), age_cell(object, now)]
}

fn readiness(node: &Value) -> String {
    let ready = items(&node["status"]["conditions"]).find(|condition| condition["type"] == "Ready");
    let word = match ready {
        None => "Unknown",
        Some(condition) if condition["status"] == "True" => "Ready",
        Some(_) => "NotReady",
    };
    let cordoned = node["spec"]["unschedulable"] == true;
    format!("{word}{}", if cordoned { ",SchedulingDisabled" } else { "" })
}

fn roles(node: &Value) -> String {
    let mut roles: Vec<&str> = Vec::new();
    for (label, value) in node["metadata"]["labels"].as_object().into_iter().flatten() {
        let role = match label.strip_prefix(ROLE_PREFIX) {
            Some(role) => Some(role),
            None if label == "kubernetes.io/role" => value.as_str(),
            None => None,
        };
        roles.extend(role.filter(|role| !role.is_empty()));
    }
    roles.sort_unstable();
    roles.dedup();
    if roles.is_empty() { "<none>".to_owned() } else { roles.join(",") }
}

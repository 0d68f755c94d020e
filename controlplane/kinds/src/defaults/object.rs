//! Namespaces, nodes, secrets.

use base64::Engine;
use serde_json::{Map, Value, json};

use super::{child, child_of, fill};

/// Sets the defaults of a namespace. Every namespace has its name as a label, so that selectors can match it.
pub(crate) fn namespace(object: &mut Value) {
    let name = object["metadata"]["name"].clone();
    let named = name.as_str().is_some_and(|text| !text.is_empty());
    let labels =
        child(object, "metadata").filter(|_| named).and_then(|metadata| child_of(metadata, "labels"));
    if let Some(labels) = labels {
        labels.insert("kubernetes.io/metadata.name".to_owned(), name);
    }
    child(object, "spec");
    if let Some(status) = child(object, "status") {
        fill(status, "phase", "Active");
    }
}

/// Sets the defaults of a node: `allocatable` is equal to `capacity` until the agent writes it.
pub(crate) fn node(object: &mut Value) {
    if let Some(spec) = child(object, "spec") {
        pod_ranges(spec);
    }
    let Some(status) = child(object, "status") else { return };
    if let (None, Some(capacity)) = (status.get("allocatable"), status.get("capacity").cloned()) {
        status.insert("allocatable".to_owned(), capacity);
    }
}

/// Makes `podCIDR` equal to the first of `podCIDRs`, as upstream's conversion. If they differ, `podCIDR` is used.
fn pod_ranges(spec: &mut Map<String, Value>) {
    let one =
        spec.get("podCIDR").filter(|range| range.as_str().is_some_and(|range| !range.is_empty())).cloned();
    let first = spec.get("podCIDRs").and_then(|list| list.get(0)).cloned();
    match (one, first) {
        (Some(one), first) if first.as_ref() != Some(&one) => {
            spec.insert("podCIDRs".to_owned(), json!([one]));
        }
        (None, Some(first)) => {
            spec.insert("podCIDR".to_owned(), first);
        }
        _ => {}
    }
}

/// Moves the write-only `stringData` into `data`.
pub(crate) fn secret(object: &mut Value) {
    let Some(map) = object.as_object_mut() else { return };
    fill(map, "type", "Opaque");
    let Some(Value::Object(texts)) = map.remove("stringData") else { return };
    if let Some(data) = child_of(map, "data") {
        for (name, text) in texts {
            let text = text.as_str().unwrap_or_default();
            data.insert(name, base64::engine::general_purpose::STANDARD.encode(text).into());
        }
    }
}

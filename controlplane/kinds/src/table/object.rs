//! Namespaces, config maps, secrets, service accounts, leases.

use jiff::Timestamp;
use serde_json::Value;

use super::{AGE, Column, NAME, age_cell, items, length, name, string};

pub(crate) const NAMESPACE: &[Column] = &[NAME, string("Status", "Whether the namespace is in use."), AGE];

pub(crate) fn namespace(object: &Value, now: Timestamp) -> Vec<Value> {
    vec![name(object), object["status"]["phase"].clone(), age_cell(object, now)]
}

pub(crate) const COMPONENT_STATUS: &[Column] = &[
    NAME,
    string("Status", "Whether the component works."),
    string("Message", "Response of the component."),
    string("Error", "Error of the request to the component."),
];

pub(crate) fn component_status(object: &Value) -> Vec<Value> {
    let healthy = items(&object["conditions"]).find(|condition| condition["type"] == "Healthy");
    let text = |field: &str| Value::from(healthy.map_or("", |one| one[field].as_str().unwrap_or_default()));
    let status = match healthy.and_then(|one| one["status"].as_str()) {
        Some("True") => "Healthy",
        Some("False") => "Unhealthy",
        _ => "Unknown",
    };
    vec![name(object), status.into(), text("message"), text("error")]
}

pub(crate) const CONFIG_MAP: &[Column] = &[NAME, string("Data", "Number of entries."), AGE];

pub(crate) fn config_map(object: &Value, now: Timestamp) -> Vec<Value> {
    let count =
        length(&object["data"]).as_u64().unwrap_or(0) + length(&object["binaryData"]).as_u64().unwrap_or(0);
    vec![name(object), count.into(), age_cell(object, now)]
}

pub(crate) const SECRET: &[Column] =
    &[NAME, string("Type", "Type of the secret."), string("Data", "Number of entries."), AGE];

pub(crate) fn secret(object: &Value, now: Timestamp) -> Vec<Value> {
    vec![name(object), object["type"].clone(), length(&object["data"]), age_cell(object, now)]
}

pub(crate) const SERVICE_ACCOUNT: &[Column] = &[NAME, AGE];

pub(crate) fn service_account(object: &Value, now: Timestamp) -> Vec<Value> {
    vec![name(object), age_cell(object, now)]
}

pub(crate) const LEASE: &[Column] = &[NAME, string("Holder", "Holder of the lease."), AGE];

pub(crate) fn lease(object: &Value, now: Timestamp) -> Vec<Value> {
    let holder = object["spec"]["holderIdentity"].as_str().unwrap_or_default();
    vec![name(object), holder.into(), age_cell(object, now)]
}

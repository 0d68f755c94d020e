//! Quotas, priority classes, runtime classes.

use jiff::Timestamp;
use serde_json::Value;

use super::{AGE, Column, NAME, age_cell, integer, name, string};

pub(crate) const PRIORITY_CLASS: &[Column] = &[
    NAME,
    integer("Value", "Priority of pods of this class."),
    Column { r#type: "boolean", ..string("Global-Default", "Whether pods without a class have this one.") },
    AGE,
    string("PreemptionPolicy", "Whether pods of this class preempt others."),
];

pub(crate) fn priority_class(object: &Value, now: Timestamp) -> Vec<Value> {
    vec![
        name(object),
        object["value"].as_i64().unwrap_or(0).into(),
        object["globalDefault"].as_bool().unwrap_or(false).into(),
        age_cell(object, now),
        object["preemptionPolicy"].as_str().unwrap_or_default().into(),
    ]
}

pub(crate) const RUNTIME_CLASS: &[Column] =
    &[NAME, string("Handler", "Configuration of the runtime that runs the pods."), AGE];

pub(crate) fn runtime_class(object: &Value, now: Timestamp) -> Vec<Value> {
    vec![name(object), object["handler"].as_str().unwrap_or_default().into(), age_cell(object, now)]
}

pub(crate) const RESOURCE_QUOTA: &[Column] = &[
    NAME,
    string("Request", "Used and maximum amounts of all resources except limits."),
    string("Limit", "Used and maximum amounts of limits."),
    AGE,
];

pub(crate) fn resource_quota(object: &Value, now: Timestamp) -> Vec<Value> {
    let (mut requests, mut limits) = (Vec::new(), Vec::new());
    for (resource, hard) in object["status"]["hard"].as_object().into_iter().flatten() {
        let used = object["status"]["used"][resource].as_str().unwrap_or("0");
        let entry = format!("{resource}: {used}/{}", hard.as_str().unwrap_or("0"));
        if resource.starts_with("limits.") { limits.push(entry) } else { requests.push(entry) }
    }
    requests.sort_unstable();
    limits.sort_unstable();
    vec![name(object), requests.join(", ").into(), limits.join(", ").into(), age_cell(object, now)]
}

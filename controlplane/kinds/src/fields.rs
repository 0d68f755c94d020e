//! The fields by which lists and watches of each built-in kind can select objects.

use serde_json::Value;

/// A field by which lists and watches can select objects.
#[derive(Clone, Copy)]
pub struct Field {
    /// The path of the field as clients write it: `spec.nodeName`.
    pub name: &'static str,
    /// Reads the value of the field from an object, as text.
    pub value: fn(&Value) -> String,
}

/// The text at a path. Empty if absent.
fn text(object: &Value, path: &[&str]) -> String {
    let value = path.iter().fold(object, |value, name| &value[*name]);
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// The boolean at a path. False if absent.
fn flag(object: &Value, path: &[&str]) -> String {
    path.iter().fold(object, |value, name| &value[*name]).as_bool().unwrap_or(false).to_string()
}

/// The number at a path. 0 if absent.
fn count(object: &Value, path: &[&str]) -> String {
    path.iter().fold(object, |value, name| &value[*name]).as_i64().unwrap_or(0).to_string()
}

macro_rules! field {
    ($read:ident: $first:ident $(. $rest:ident)*) => {
        Field {
            name: concat!(stringify!($first) $(, ".", stringify!($rest))*),
            value: |object| $read(object, &[stringify!($first) $(, stringify!($rest))*]),
        }
    };
}

/// The fields of every kind.
pub(crate) const COMMON: &[Field] = &[field!(text: metadata.name), field!(text: metadata.namespace)];

pub(crate) const POD: &[Field] = &[
    field!(text: spec.nodeName),
    field!(text: spec.restartPolicy),
    field!(text: spec.schedulerName),
    field!(text: spec.serviceAccountName),
    field!(flag: spec.hostNetwork),
    field!(text: status.phase),
    field!(text: status.podIP),
    field!(text: status.nominatedNodeName),
];

pub(crate) const EVENT: &[Field] = &[
    field!(text: involvedObject.kind),
    field!(text: involvedObject.namespace),
    field!(text: involvedObject.name),
    field!(text: involvedObject.uid),
    field!(text: involvedObject.apiVersion),
    field!(text: involvedObject.resourceVersion),
    field!(text: involvedObject.fieldPath),
    field!(text: reason),
    field!(text: reportingComponent),
    Field {
        name: "source",
        value: |event| {
            let source = text(event, &["source", "component"]);
            if source.is_empty() { text(event, &["reportingComponent"]) } else { source }
        },
    },
    field!(text: type),
];

pub(crate) const NODE: &[Field] = &[field!(flag: spec.unschedulable)];
pub(crate) const SIGNING_REQUEST: &[Field] = &[field!(text: spec.signerName)];
pub(crate) const NAMESPACE: &[Field] = &[field!(text: status.phase)];
pub(crate) const RESOURCE_SLICE: &[Field] = &[field!(text: spec.driver), field!(text: spec.nodeName)];
pub(crate) const SECRET: &[Field] = &[field!(text: type)];
pub(crate) const SERVICE: &[Field] = &[field!(text: spec.type), field!(text: spec.clusterIP)];
pub(crate) const REPLICA_SET: &[Field] = &[field!(count: status.replicas)];
pub(crate) const JOB: &[Field] =
    &[Field { name: "status.successful", value: |job| count(job, &["status", "succeeded"]) }];

//! Defaulting: sets absent fields to their documented defaults. Each function is idempotent.

pub(crate) mod admission;
pub(crate) mod aggregation;
pub(crate) mod autoscaling;
pub(crate) mod batch;
pub(crate) mod devices;
pub(crate) mod flow_control;
pub(crate) mod networking;
pub(crate) mod object;
pub(crate) mod policy;
pub(crate) mod rbac;
pub(crate) mod service;
pub(crate) mod storage;
pub(crate) mod workload;

pub(crate) use coracle_pod_rules::defaults::pod;
use coracle_pod_rules::defaults::{child, child_of, each, fill, fill_absent, present, volume};
use serde_json::Value;

use crate::Resource;

/// Sets the defaults of an object. Idempotent.
pub fn apply(kind: &Resource, object: &mut Value) {
    kind.strategy().default(object);
}

/// Sets the defaults of a TokenRequest.
pub fn token_request(request: &mut Value) {
    if let Some(spec) = child(request, "spec") {
        fill(spec, "expirationSeconds", 3600);
    }
}

#[cfg(test)]
mod tests;

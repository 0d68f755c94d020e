//! Deployments and replica sets.

use serde_json::{Map, Value};

use super::{child, child_of, fill, pod};

/// Sets the defaults of a Deployment.
pub(crate) fn deployment(object: &mut Value) {
    let Some(spec) = child(object, "spec") else { return };
    fill(spec, "replicas", 1);
    fill(spec, "revisionHistoryLimit", 10);
    fill(spec, "progressDeadlineSeconds", 600);
    if let Some(strategy) = child_of(spec, "strategy") {
        fill(strategy, "type", "RollingUpdate");
        let rolls = strategy.get("type").is_some_and(|kind| kind == "RollingUpdate");
        if let Some(rolling) = rolls.then(|| child_of(strategy, "rollingUpdate")).flatten() {
            fill(rolling, "maxUnavailable", "25%");
            fill(rolling, "maxSurge", "25%");
        }
    }
    template(spec);
    child(object, "status");
}

/// Sets the defaults of a ReplicaSet.
pub(crate) fn replica_set(object: &mut Value) {
    let Some(spec) = child(object, "spec") else { return };
    fill(spec, "replicas", 1);
    template(spec);
    if let Some(status) = child(object, "status") {
        fill(status, "replicas", 0);
    }
}

fn template(spec: &mut Map<String, Value>) {
    if let Some(template) = child_of(spec, "template") {
        pod::template(template);
    }
}

//! Deployments, replica sets, stateful sets, daemon sets, replication controllers, pod templates.

use serde_json::{Map, Value};

use super::{child, child_of, each, fill, fill_absent, pod, present, storage};

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
            fill_absent(rolling, "maxUnavailable", "25%");
            fill_absent(rolling, "maxSurge", "25%");
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

/// Sets the defaults of a StatefulSet.
pub(crate) fn stateful_set(object: &mut Value) {
    let Some(spec) = child(object, "spec") else { return };
    fill(spec, "podManagementPolicy", "OrderedReady");
    if let Some(strategy) = child_of(spec, "updateStrategy") {
        if strategy.get("type").and_then(Value::as_str).unwrap_or_default().is_empty() {
            fill(strategy, "type", "RollingUpdate");
            child_of(strategy, "rollingUpdate");
        }
        if let Some(rolling) = present(strategy, "rollingUpdate") {
            fill(rolling, "partition", 0);
            fill_absent(rolling, "maxUnavailable", 1);
        }
    }
    if let Some(policy) = child_of(spec, "persistentVolumeClaimRetentionPolicy") {
        fill(policy, "whenDeleted", "Retain");
        fill(policy, "whenScaled", "Retain");
    }
    fill(spec, "replicas", 1);
    fill(spec, "revisionHistoryLimit", 10);
    for claim in each(spec, "volumeClaimTemplates") {
        fill(claim, "apiVersion", "v1");
        fill(claim, "kind", "PersistentVolumeClaim");
        storage::claim_of(claim);
    }
    template(spec);
    if let Some(status) = child(object, "status") {
        fill(status, "replicas", 0);
        fill(status, "availableReplicas", 0);
    }
}

/// Sets the defaults of a DaemonSet.
pub(crate) fn daemon_set(object: &mut Value) {
    let Some(spec) = child(object, "spec") else { return };
    if let Some(strategy) = child_of(spec, "updateStrategy") {
        fill(strategy, "type", "RollingUpdate");
        let rolls = strategy.get("type").is_some_and(|kind| kind == "RollingUpdate");
        if let Some(rolling) = rolls.then(|| child_of(strategy, "rollingUpdate")).flatten() {
            fill_absent(rolling, "maxUnavailable", 1);
            fill_absent(rolling, "maxSurge", 0);
        }
    }
    fill(spec, "revisionHistoryLimit", 10);
    template(spec);
    if let Some(status) = child(object, "status") {
        for name in ["currentNumberScheduled", "numberMisscheduled", "desiredNumberScheduled", "numberReady"]
        {
            fill(status, name, 0);
        }
    }
}

/// Sets the defaults of a ReplicationController: selector and labels come from the template's labels.
pub(crate) fn replication_controller(object: &mut Value) {
    let Some(spec) = child(object, "spec") else { return };
    fill(spec, "replicas", 1);
    if spec.get("template").is_some_and(Value::is_object) {
        template(spec);
    }
    let labels = spec.get("template").map(|template| template["metadata"]["labels"].clone());
    let empty = |value: Option<&Value>| value.and_then(Value::as_object).is_none_or(Map::is_empty);
    if let Some(labels @ Value::Object(_)) = labels {
        if empty(spec.get("selector")) {
            spec.insert("selector".to_owned(), labels.clone());
        }
        if let Some(metadata) = child(object, "metadata")
            && empty(metadata.get("labels"))
        {
            metadata.insert("labels".to_owned(), labels);
        }
    }
    if let Some(status) = child(object, "status") {
        fill(status, "replicas", 0);
    }
}

/// Sets the defaults of a PodTemplate.
pub(crate) fn pod_template(object: &mut Value) {
    if let Some(template) = child(object, "template") {
        pod::template(template);
    }
}

fn template(spec: &mut Map<String, Value>) {
    if let Some(template) = child_of(spec, "template") {
        pod::template(template);
    }
}

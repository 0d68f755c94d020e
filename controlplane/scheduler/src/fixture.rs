//! Pods and nodes for tests.

use serde_json::{Value, json};

use crate::object::{Node, Pod};
use crate::snapshot::Snapshot;

/// An unbound pod with this spec.
pub(crate) fn pod(name: &str, spec: Value) -> Pod {
    serde_json::from_value(json!({"metadata": {"name": name, "namespace": "d", "uid": name}, "spec": spec}))
        .unwrap()
}

/// A pod with an owner.
pub(crate) fn owned(name: &str, owner: &str) -> Pod {
    let owners = json!([{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": owner, "uid": owner, "controller": true}]);
    serde_json::from_value(json!({"metadata": {"name": name, "uid": name, "ownerReferences": owners}}))
        .unwrap()
}

/// A node of 4 CPUs, 8 GiB and 10 pods, with these fields set by JSON pointer.
pub(crate) fn node(name: &str, fields: Value) -> Node {
    let mut value = json!({
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}},
        "spec": {"taints": [], "unschedulable": false},
        "status": {"images": [], "allocatable": {"cpu": "4", "memory": "8Gi", "pods": "10"}},
    });
    for (pointer, field) in fields.as_object().unwrap() {
        *value.pointer_mut(pointer).unwrap() = field.clone();
    }
    serde_json::from_value(value).unwrap()
}

/// A snapshot of these nodes.
pub(crate) fn snapshot(nodes: &[Node]) -> Snapshot {
    let mut snapshot = Snapshot::default();
    for node in nodes {
        snapshot.set_node(node);
    }
    snapshot
}

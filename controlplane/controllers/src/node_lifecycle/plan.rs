//! The desired conditions and taints of a node. No I/O.

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{NodeCondition, Taint};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use crate::object::Node;

pub(crate) const NOT_READY: &str = "node.kubernetes.io/not-ready";
pub(crate) const UNREACHABLE: &str = "node.kubernetes.io/unreachable";
const UNSCHEDULABLE: &str = "node.kubernetes.io/unschedulable";
const NO_SCHEDULE: &str = "NoSchedule";
pub(crate) const NO_EXECUTE: &str = "NoExecute";

/// The conditions that the node writes itself. They become Unknown without heartbeats.
const OWN: [&str; 4] = ["Ready", "MemoryPressure", "DiskPressure", "PIDPressure"];

/// NoSchedule taints by condition: condition, status, taint.
const BY_CONDITION: [(&str, &str, &str); 6] = [
    ("Ready", "False", NOT_READY),
    ("Ready", "Unknown", UNREACHABLE),
    ("MemoryPressure", "True", "node.kubernetes.io/memory-pressure"),
    ("DiskPressure", "True", "node.kubernetes.io/disk-pressure"),
    ("PIDPressure", "True", "node.kubernetes.io/pid-pressure"),
    ("NetworkUnavailable", "True", "node.kubernetes.io/network-unavailable"),
];

/// The conditions of a lost node. `None` if the node already has these conditions.
pub(crate) fn lost_conditions(node: &Node, now: Timestamp) -> Option<Vec<NodeCondition>> {
    let mut conditions: Vec<NodeCondition> = node.status.conditions.clone().unwrap_or_default();
    let mut changed = false;
    for type_ in OWN {
        let unknown = |reason: &str, message: &str, heartbeat: Time| NodeCondition {
            type_: type_.to_owned(),
            status: "Unknown".to_owned(),
            reason: Some(reason.to_owned()),
            message: Some(message.to_owned()),
            last_heartbeat_time: Some(heartbeat),
            last_transition_time: Some(Time(now)),
        };
        let created = node.metadata.creation_timestamp.clone().unwrap_or(Time(now));
        match conditions.iter_mut().find(|found| found.type_ == type_) {
            None => {
                let (reason, message) = ("NodeStatusNeverUpdated", "Kubelet never posted node status.");
                conditions.push(unknown(reason, message, created));
                changed = true;
            }
            Some(found) if found.status != "Unknown" => {
                let heartbeat = found.last_heartbeat_time.clone().unwrap_or(created);
                let (reason, message) = ("NodeStatusUnknown", "Kubelet stopped posting node status.");
                *found = unknown(reason, message, heartbeat);
                changed = true;
            }
            Some(_) => {}
        }
    }
    changed.then_some(conditions)
}

/// The NoExecute taint that a node should have, by its readiness.
pub(crate) fn evicting(node: &Node) -> Option<&'static str> {
    match node.condition("Ready").map(|ready| ready.status.as_str()) {
        Some("False") => Some(NOT_READY),
        Some("Unknown") => Some(UNREACHABLE),
        _ => None,
    }
}

/// Whether the node has one of this controller's NoExecute taints.
pub(crate) fn is_evicting(node: &Node) -> bool {
    node.taints().iter().any(is_evicting_taint)
}

fn is_evicting_taint(taint: &Taint) -> bool {
    taint.effect == NO_EXECUTE && [NOT_READY, UNREACHABLE].contains(&taint.key.as_str())
}

/// The desired taints: the taints of the node's conditions, the NoExecute taint if `evict`, and all foreign taints.
/// `None` if the node already has them.
pub(crate) fn taints(node: &Node, evict: bool, now: Timestamp) -> Option<Vec<Taint>> {
    let mut desired: Vec<(&str, &str)> = BY_CONDITION
        .iter()
        .filter(|(type_, status, _)| node.condition(type_).is_some_and(|found| found.status == *status))
        .map(|(.., key)| (*key, NO_SCHEDULE))
        .collect();
    if node.condition("Ready").is_none() {
        // A node that has not written its status keeps the taint of its registration.
        desired.push((NOT_READY, NO_SCHEDULE));
    }
    if node.spec.unschedulable == Some(true) {
        desired.push((UNSCHEDULABLE, NO_SCHEDULE));
    }
    desired.extend(evicting(node).filter(|_| evict).map(|key| (key, NO_EXECUTE)));
    let has = |taint: &Taint| desired.contains(&(taint.key.as_str(), taint.effect.as_str()));
    let old = node.taints();
    let mut new: Vec<Taint> = old.iter().filter(|taint| has(taint) || !is_ours(taint)).cloned().collect();
    for (key, effect) in &desired {
        if !new.iter().any(|taint| taint.key == *key && taint.effect == *effect) {
            new.push(Taint {
                key: (*key).to_owned(),
                effect: (*effect).to_owned(),
                value: None,
                time_added: Some(Time(now)),
            });
        }
    }
    (new != old).then_some(new)
}

fn is_ours(taint: &Taint) -> bool {
    let by_condition = BY_CONDITION.iter().any(|(.., key)| taint.key == *key) || taint.key == UNSCHEDULABLE;
    (taint.effect == NO_SCHEDULE && by_condition) || is_evicting_taint(taint)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn node(conditions: Value, spec: Value) -> Node {
        serde_json::from_value(
            json!({"metadata": {"name": "n"}, "spec": spec, "status": {"conditions": conditions}}),
        )
        .unwrap()
    }

    fn now() -> Timestamp {
        "2026-01-01T00:00:00Z".parse().unwrap()
    }

    fn keys(taints: Option<Vec<Taint>>) -> Vec<String> {
        taints
            .unwrap()
            .iter()
            .map(|taint| format!("{}:{}", taint.key.rsplit('/').next().unwrap(), taint.effect))
            .collect()
    }

    #[test]
    fn the_conditions_of_a_lost_node_become_unknown_once() {
        let ready = json!([{"type": "Ready", "status": "True", "lastHeartbeatTime": "2025-01-01T00:00:00Z"},
            {"type": "NetworkUnavailable", "status": "False"}]);
        let conditions = lost_conditions(&node(ready, json!({})), now()).unwrap();
        let ready = &conditions[0];
        assert_eq!((ready.status.as_str(), ready.reason.as_deref()), ("Unknown", Some("NodeStatusUnknown")));
        assert_eq!(ready.last_heartbeat_time.as_ref().unwrap().0.to_string(), "2025-01-01T00:00:00Z");
        assert_eq!(conditions[1].status, "False", "not the node's own");
        assert_eq!(conditions[2].reason.as_deref(), Some("NodeStatusNeverUpdated"));
        assert_eq!(lost_conditions(&node(json!(conditions), json!({})), now()), None);
    }

    #[test]
    fn conditions_become_taints_and_other_taints_stay() {
        let foreign = json!({"key": "mine", "effect": "NoSchedule"});
        let of = |conditions, spec, evict| taints(&node(conditions, spec), evict, now());
        let ready = json!([{"type": "Ready", "status": "True"}]);
        assert_eq!(of(ready.clone(), json!({"taints": [foreign]}), true), None);
        let unknown = json!([{"type": "Ready", "status": "Unknown"}]);
        let both = ["mine:NoSchedule", "unreachable:NoSchedule", "unreachable:NoExecute"];
        assert_eq!(keys(of(unknown.clone(), json!({"taints": [foreign]}), true)), both);
        assert_eq!(keys(of(unknown, json!({}), false)), ["unreachable:NoSchedule"]);
        let pressed =
            json!([{"type": "Ready", "status": "True"}, {"type": "DiskPressure", "status": "True"}]);
        let two = ["disk-pressure:NoSchedule", "unschedulable:NoSchedule"];
        assert_eq!(keys(of(pressed, json!({"unschedulable": true}), true)), two);
        let tainted = json!({"taints": [{"key": UNREACHABLE, "effect": "NoExecute"}, foreign]});
        assert_eq!(keys(of(ready, tainted, true)), ["mine:NoSchedule"]);
    }

    #[test]
    fn a_node_that_changes_from_lost_to_not_ready_changes_its_taint() {
        let spec = json!({"taints": [{"key": UNREACHABLE, "effect": "NoExecute"}]});
        let node = node(json!([{"type": "Ready", "status": "False"}]), spec);
        assert!(is_evicting(&node));
        assert_eq!(keys(taints(&node, true, now())), ["not-ready:NoSchedule", "not-ready:NoExecute"]);
    }
}

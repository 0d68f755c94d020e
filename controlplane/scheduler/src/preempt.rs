//! Preemption: which pods of lower priority make room for a pod. Source: upstream's plugin DefaultPreemption.
//!
//! Disruption budgets are not considered: a victim may violate one.

use std::cmp::Reverse;

use crate::filter::{refusals, resolvable_refusals};
use crate::object::Pod;
use crate::snapshot::{Placed, Snapshot};
use crate::topology::Topology;

/// A pod that is removed for a pod of higher priority.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Victim {
    pub(crate) uid: String,
    pub(crate) namespace: String,
    pub(crate) name: String,
    pub(crate) priority: i32,
}

/// The node of a preemption and its victims.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Preemption {
    pub(crate) node: String,
    pub(crate) victims: Vec<Victim>,
}

/// Chooses the node on which the least important pods make room. Otherwise upstream's message.
pub(crate) fn preempt(pod: &Pod, snapshot: &mut Snapshot) -> Result<Preemption, String> {
    if pod.spec.preemption_policy.as_deref() == Some("Never") {
        return Err("preemption: not eligible due to preemptionPolicy=Never.".to_owned());
    }
    if waits_for_victims(pod, snapshot) {
        let message = "preemption: not eligible due to a terminating pod on the nominated node.";
        return Err(message.to_owned());
    }
    let nodes = snapshot.node_names();
    let helpful: Vec<&String> = nodes.iter().filter(|node| can_help(pod, snapshot, node)).collect();
    let (total, useless) = (nodes.len(), nodes.len() - helpful.len());
    let mut found: Vec<Preemption> = Vec::new();
    let mut hopeless = 0;
    for node in helpful {
        match victims(pod, snapshot, node) {
            Some(victims) => found.push(Preemption { node: node.clone(), victims }),
            None => hopeless += 1,
        }
    }
    let best = found.into_iter().min_by_key(|preemption| {
        let priorities = preemption.victims.iter().map(|victim| i64::from(victim.priority));
        let highest = priorities.clone().max().unwrap_or(i64::MIN);
        (highest, priorities.sum::<i64>(), preemption.victims.len())
    });
    best.ok_or_else(|| {
        let mut reasons = Vec::new();
        if hopeless > 0 {
            reasons.push(format!("{hopeless} No preemption victims found for incoming pod"));
        }
        if useless > 0 {
            reasons.push(format!("{useless} Preemption is not helpful for scheduling"));
        }
        format!("preemption: 0/{total} nodes are available: {}.", reasons.join(", "))
    })
}

/// Whether victims of an earlier preemption are still terminating on the pod's nominated node.
fn waits_for_victims(pod: &Pod, snapshot: &Snapshot) -> bool {
    let Some(nominated) = pod.status.nominated_node_name.as_deref() else { return false };
    let priority = pod.spec.priority.unwrap_or_default();
    let node = snapshot.candidates().find(|node| node.facts.name == nominated);
    node.is_some_and(|node| {
        node.info.neighbours().any(|other| other.terminating && other.priority < priority)
    })
}

/// Whether the node refuses the pod only for reasons that the removal of pods can change.
fn can_help(pod: &Pod, snapshot: &Snapshot, node: &str) -> bool {
    let node = snapshot.candidates().find(|candidate| candidate.facts.name == node);
    node.is_some_and(|node| resolvable_refusals(pod, node))
}

/// The pods to remove from a node. None if the pod would not fit even without all pods of lower priority.
fn victims(pod: &Pod, snapshot: &mut Snapshot, node: &str) -> Option<Vec<Victim>> {
    let mut lower = snapshot.lower_on(node, pod.spec.priority.unwrap_or_default());
    if lower.is_empty() {
        return None;
    }
    // The most important pods are tried first to stay.
    lower.sort_by_key(|(uid, placed)| (Reverse(placed.priority), placed.name.clone(), uid.clone()));
    for (uid, _) in &lower {
        snapshot.remove(uid);
    }
    let fits = fits(pod, snapshot, node);
    let mut victims: Vec<Victim> = Vec::new();
    let mut removed: Vec<(String, Placed)> = Vec::new();
    for (uid, placed) in lower {
        snapshot.restore(&uid, node, placed.clone());
        if fits && !self::fits(pod, snapshot, node) {
            snapshot.remove(&uid);
            victims.push(Victim {
                uid: uid.clone(),
                namespace: placed.namespace.clone(),
                name: placed.name.clone(),
                priority: placed.priority,
            });
            removed.push((uid, placed));
        }
    }
    for (uid, placed) in removed {
        snapshot.restore(&uid, node, placed);
    }
    (fits && !victims.is_empty()).then_some(victims)
}

fn fits(pod: &Pod, snapshot: &Snapshot, node: &str) -> bool {
    let topology = Topology::of(pod, snapshot);
    let found = snapshot.candidates().find(|candidate| candidate.facts.name == node);
    found.is_some_and(|found| refusals(pod, found).is_empty() && topology.refusals(found).is_empty())
        && !snapshot.is_promised(pod, node)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::fixture;

    fn pod(name: &str, priority: i32, cpu: &str, more: Value) -> Pod {
        let mut spec =
            json!({"priority": priority, "containers": [{"resources": {"requests": {"cpu": cpu}}}]});
        spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        fixture::pod(name, spec)
    }

    /// Two nodes of four CPUs.
    fn snapshot(pods: &[(&str, i32, &str, &str)]) -> Snapshot {
        let mut snapshot = fixture::snapshot(&[fixture::node("a", json!({})), fixture::node("b", json!({}))]);
        for (name, priority, cpu, node) in pods {
            snapshot.place(&pod(name, *priority, cpu, json!({})), node);
        }
        snapshot
    }

    fn decide(pod: &Pod, snapshot: &mut Snapshot) -> String {
        match preempt(pod, snapshot) {
            Ok(found) => {
                let names: Vec<&str> = found.victims.iter().map(|victim| victim.name.as_str()).collect();
                format!("{}: {}", found.node, names.join(" "))
            }
            Err(message) => message,
        }
    }

    #[test]
    fn the_fewest_and_least_important_pods_make_room() {
        let mut snapshot = snapshot(&[("low", 1, "2", "a"), ("mid", 5, "2", "a"), ("other", 5, "4", "b")]);
        assert_eq!(decide(&pod("p", 10, "2", json!({})), &mut snapshot), "a: low");
        assert_eq!(decide(&pod("p", 10, "4", json!({})), &mut snapshot), "b: other");
        assert_eq!(decide(&pod("p", 3, "2", json!({})), &mut snapshot), "a: low");
        let none = "preemption: 0/2 nodes are available: 2 No preemption victims found for incoming pod.";
        assert_eq!(decide(&pod("p", 1, "2", json!({})), &mut snapshot), none);
        assert_eq!(decide(&pod("p", 10, "9", json!({})), &mut snapshot), none);
        // A try changes nothing.
        let used: Vec<i128> = snapshot.candidates().map(|node| node.info.requested.cpu_millis).collect();
        assert_eq!(used, [4000, 4000]);
    }

    #[test]
    fn preemption_does_not_help_against_selectors_and_is_never_repeated() {
        let mut snapshot = snapshot(&[("low", 1, "4", "a"), ("high", 1, "4", "b")]);
        let elsewhere = pod("p", 10, "1", json!({"nodeSelector": {"x": "y"}}));
        let useless = "preemption: 0/2 nodes are available: 2 Preemption is not helpful for scheduling.";
        assert_eq!(decide(&elsewhere, &mut snapshot), useless);
        let polite = pod("p", 10, "1", json!({"preemptionPolicy": "Never"}));
        assert_eq!(decide(&polite, &mut snapshot), "preemption: not eligible due to preemptionPolicy=Never.");
        let mut nominated = pod("p", 10, "4", json!({}));
        assert_eq!(decide(&nominated, &mut snapshot), "a: low");
        nominated.status.nominated_node_name = Some("a".to_owned());
        let mut going = pod("low", 1, "4", json!({}));
        going.metadata.deletion_timestamp = serde_json::from_value(json!("2026-01-01T00:00:00Z")).unwrap();
        snapshot.place(&going, "a");
        let waits = "preemption: not eligible due to a terminating pod on the nominated node.";
        assert_eq!(decide(&nominated, &mut snapshot), waits);
    }

    #[test]
    fn room_of_a_nominated_pod_is_promised_to_it() {
        let mut snapshot = snapshot(&[]);
        let nominated = pod("p", 10, "3", json!({}));
        snapshot.nominate(&nominated, "a");
        let low = pod("low", 1, "2", json!({}));
        assert!(snapshot.is_promised(&low, "a"));
        assert!(!snapshot.is_promised(&low, "b"));
        assert!(!snapshot.is_promised(&pod("high", 20, "2", json!({})), "a"));
        assert!(!snapshot.is_promised(&nominated, "a"));
        snapshot.denominate("p");
        assert!(!snapshot.is_promised(&low, "a"));
    }
}

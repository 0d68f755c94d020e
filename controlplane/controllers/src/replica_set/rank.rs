//! The order in which pods of a replica set are deleted.

use std::cmp::Ordering;
use std::collections::HashMap;
use std::sync::Arc;

use jiff::Timestamp;

use crate::annotation::DELETION_COST;
use crate::object::{ObjectExt, Pod};

/// Sorts `pods` by deletion order. `neighbours` is the number of pods of the same owner by node.
pub(crate) fn sort_for_deletion(pods: &mut [Arc<Pod>], neighbours: &HashMap<String, usize>, now: Timestamp) {
    pods.sort_by(|one, other| compare(one, other, neighbours, now));
}

fn compare(one: &Pod, other: &Pod, neighbours: &HashMap<String, usize>, now: Timestamp) -> Ordering {
    let by = |key: &dyn Fn(&Pod) -> i64| key(one).cmp(&key(other));
    by(&|pod| i64::from(assigned(pod)))
        .then_with(|| by(&phase))
        .then_with(|| by(&|pod| i64::from(pod.ready_since().is_some())))
        .then_with(|| by(&cost))
        // Pods on nodes with many pods of the same owner are deleted first.
        .then_with(|| by(&|pod| -neighbour_count(pod, neighbours)))
        // Pods that became ready recently are deleted first. Ages are compared on a logarithmic scale, so two old pods
        // are equal.
        .then_with(|| by(&|pod| age_rank(pod.ready_since().flatten().map(|time| time.0), now)))
        .then_with(|| by(&|pod| -i64::from(pod.status.container_statuses.restarts)))
        .then_with(|| by(&|pod| age_rank(pod.metadata.creation_timestamp.as_ref().map(|time| time.0), now)))
        .then_with(|| one.uid().cmp(other.uid()))
}

fn assigned(pod: &Pod) -> bool {
    pod.spec.node_name.as_deref().is_some_and(|node| !node.is_empty())
}

fn phase(pod: &Pod) -> i64 {
    match pod.status.phase.as_deref() {
        Some("Unknown") => 1,
        Some("Running") => 2,
        Some(_) | None => 0,
    }
}

fn cost(pod: &Pod) -> i64 {
    let text = pod.metadata.annotations.iter().flatten().find(|(name, _)| *name == DELETION_COST);
    text.and_then(|(_, cost)| cost.parse::<i32>().ok()).unwrap_or_default().into()
}

/// Number of active pods of the same owner on the pod's node.
fn neighbour_count(pod: &Pod, neighbours: &HashMap<String, usize>) -> i64 {
    let node = pod.spec.node_name.as_deref().unwrap_or_default();
    neighbours.get(node).copied().unwrap_or_default().try_into().unwrap_or(i64::MAX)
}

/// Binary logarithm of the age in nanoseconds; -1 without an age.
fn age_rank(since: Option<Timestamp>, now: Timestamp) -> i64 {
    let age = since.map_or(0, |since| now.as_nanosecond() - since.as_nanosecond());
    if age > 0 { age.ilog2().into() } else { -1 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn now() -> Timestamp {
        "2026-01-01T12:00:00Z".parse().unwrap()
    }

    fn pod(uid: &str, rest: serde_json::Value) -> Arc<Pod> {
        let mut value = json!({
            "metadata": {"uid": uid, "name": uid, "creationTimestamp": "2026-01-01T10:00:00Z"},
            "spec": {"nodeName": "n", "containers": []},
            "status": {"phase": "Running", "conditions": [
                {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T11:00:00Z"}]},
        });
        for (pointer, new) in rest.as_object().unwrap() {
            *value.pointer_mut(pointer).unwrap() = new.clone();
        }
        Arc::new(serde_json::from_value(value).unwrap())
    }

    fn order(mut pods: Vec<Arc<Pod>>, neighbours: &[(&str, usize)]) -> Vec<String> {
        let neighbours = neighbours.iter().map(|(node, count)| ((*node).to_owned(), *count)).collect();
        sort_for_deletion(&mut pods, &neighbours, now());
        pods.iter().map(|pod| pod.uid().to_owned()).collect()
    }

    #[test]
    fn unassigned_then_pending_then_unready_pods_come_first() {
        let pods = vec![
            pod("ready", json!({})),
            pod("unready", json!({"/status/conditions/0/status": "False"})),
            pod("pending", json!({"/status/phase": "Pending"})),
            pod("unassigned", json!({"/spec/nodeName": ""})),
        ];
        assert_eq!(order(pods, &[]), ["unassigned", "pending", "unready", "ready"]);
    }

    #[test]
    fn deletion_cost_counts_before_neighbours_and_neighbours_before_age() {
        let meta = |cost: &str| json!({"/metadata": {"uid": "cheap", "annotations": {DELETION_COST: cost}}});
        let pods = vec![
            pod("plain", json!({})),
            pod("young", json!({"/status/conditions/0/lastTransitionTime": "2026-01-01T11:59:50Z"})),
            pod("crowded", json!({"/spec/nodeName": "full"})),
            pod("cheap", meta("-5")),
        ];
        assert_eq!(order(pods, &[("full", 3), ("n", 1)]), ["cheap", "crowded", "young", "plain"]);
    }

    #[test]
    fn restarts_count_before_age_and_similar_ages_are_equal() {
        let statuses = json!([{"name": "c", "image": "", "imageID": "", "ready": true, "restartCount": 4}]);
        let crashing: Arc<Pod> = {
            let mut pod = (*pod("crashing", json!({}))).clone();
            pod.status.container_statuses =
                serde_json::from_value::<crate::object::PodStatus>(json!({"containerStatuses": statuses}))
                    .unwrap()
                    .container_statuses;
            Arc::new(pod)
        };
        let young = pod("b", json!({"/metadata/creationTimestamp": "2026-01-01T10:20:00Z"}));
        let old = pod("a", json!({}));
        assert_eq!(order(vec![old, young, crashing], &[]), ["crashing", "a", "b"]);
    }
}

use jiff::Timestamp;
use serde_json::{Value, json};

use super::*;
use crate::object::{DaemonSet, Node};

fn now() -> Timestamp {
    "2026-01-01T12:00:00Z".parse().unwrap()
}

fn set(strategy: Value) -> DaemonSet {
    serde_json::from_value(
        json!({"metadata": {"name": "d", "generation": 3}, "spec": {"updateStrategy": strategy}}),
    )
    .unwrap()
}

fn rolling(values: Value) -> DaemonSet {
    set(json!({"type": "RollingUpdate", "rollingUpdate": values}))
}

fn nodes(names: &str) -> Vec<Arc<Node>> {
    let node = |name: &str| {
        let taints =
            if name.ends_with('x') { json!([{"key": "k", "effect": "NoSchedule"}]) } else { json!([]) };
        let name = name.trim_end_matches('x');
        Arc::new(
            serde_json::from_value(json!({"metadata": {"name": name}, "spec": {"taints": taints}})).unwrap(),
        )
    };
    names.split_whitespace().map(node).collect()
}

/// A pod on the node of its first letter: `a` is ready, `a-` is not, `a!` has failed, `a~` is old, `ax` is deleted.
fn pod(text: &str) -> Arc<Pod> {
    let has = |mark: char| text.contains(mark);
    let revision = if has('~') { "old" } else { "new" };
    let ready = if has('-') { "False" } else { "True" };
    let deleted = has('x').then_some("2026-01-01T11:00:00Z");
    Arc::new(
        serde_json::from_value(json!({
            "metadata": {"name": text, "uid": text, "labels": {"controller-revision-hash": revision},
                "deletionTimestamp": deleted},
            "spec": {"nodeName": &text[..1]},
            "status": {"phase": if has('!') { "Failed" } else { "Running" },
                "conditions": [{"type": "Ready", "status": ready}]},
        }))
        .unwrap(),
    )
}

fn with<T>(set: &DaemonSet, nodes: &str, pods: &str, use_it: impl Fn(&Snapshot<'_>) -> T) -> T {
    let (nodes, pods) = (self::nodes(nodes), pods.split_whitespace().map(pod).collect::<Vec<_>>());
    use_it(&Snapshot { set, hash: "new", nodes: &nodes, pods: &pods, backoff: &|_| None, now: now() })
}

fn decide(set: &DaemonSet, nodes: &str, pods: &str) -> String {
    with(set, nodes, pods, |snapshot| {
        let plan = plan(snapshot);
        let create = plan.create.iter().map(|node| format!("+{node}"));
        let delete = plan.delete.iter().map(|pod| format!("-{}", pod.name()));
        create.chain(delete).collect::<Vec<_>>().join(" ")
    })
}

#[test]
fn each_fitting_node_has_one_pod() {
    let set = rolling(json!({}));
    for (nodes, pods, expect) in [
        ("a b", "", "+a +b"),
        ("a b", "a", "+b"),
        ("a bx", "a", ""),
        ("a bx", "a b", ""),
        ("a", "a a2", "-a2"),
        ("a", "a!", "-a!"),
        ("a", "ax", ""),
    ] {
        assert_eq!(decide(&set, nodes, pods), expect, "for {nodes}: {pods}");
    }
}

#[test]
fn an_update_keeps_as_many_pods_available_as_it_must() {
    let set = rolling(json!({"maxUnavailable": 1, "maxSurge": 0}));
    for (pods, expect) in
        [("a~ b~ c~", "-a~"), ("a- b~ c~", ""), ("a b~ c~", "-b~"), ("a b~- c~", "-b~-"), ("a b c", "")]
    {
        assert_eq!(decide(&set, "a b c", pods), expect, "for {pods}");
    }
    let half = rolling(json!({"maxUnavailable": "50%", "maxSurge": 0}));
    assert_eq!(decide(&half, "a b c", "a~ b~ c~"), "-a~ -b~");
    assert_eq!(decide(&set_on_delete(), "a b c", "a~ b~ c~"), "");
}

fn set_on_delete() -> DaemonSet {
    set(json!({"type": "OnDelete"}))
}

#[test]
fn a_surge_adds_the_new_pod_before_the_old_one_is_deleted() {
    let set = rolling(json!({"maxUnavailable": 0, "maxSurge": 1}));
    for (pods, expect) in [("a~ b~", "+a"), ("a~ a- b~", ""), ("a~ a b~", "-a~"), ("a b~", "+b"), ("a b", "")]
    {
        assert_eq!(decide(&set, "a b", pods), expect, "for {pods}");
    }
}

#[test]
fn the_status_counts_nodes() {
    let status = with(&rolling(json!({})), "a b c dx", "a b~- d", |snapshot| status(snapshot, 0).0);
    assert_eq!((status.desired_number_scheduled, status.current_number_scheduled), (3, 2));
    assert_eq!((status.number_ready, status.number_misscheduled), (1, 1));
    assert_eq!((status.updated_number_scheduled, status.number_available), (Some(1), Some(1)));
    assert_eq!((status.number_unavailable, status.observed_generation), (Some(2), Some(3)));
}

//! PodDisruptionBudgets and `kubectl drain`, and the taint out-of-service.

use std::fs;
use std::path::Path;

use coracle_integration::{Nodes, eventually, has_condition, on_a_machine, stderr};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

const CIDRS: &str = "10.42.0.0/16";

fn deployment(replicas: usize) -> String {
    json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "d"}, "spec": {
        "replicas": replicas, "selector": {"matchLabels": {"app": "d"}},
        "template": {"metadata": {"labels": {"app": "d"}}, "spec": {
            "terminationGracePeriodSeconds": 1,
            "containers": [{"name": "c", "image": "busybox", "command": ["sleep", "100000"]}]}},
    }})
    .to_string()
}

/// Node and name of each pod without deletionTimestamp. The node is empty before scheduling. With `ready`, only Ready
/// pods.
fn pods(nodes: &Nodes, ready: bool) -> Vec<(String, String)> {
    let list = nodes.get(&["pods"]);
    let is_ready = |pod: &Value| has_condition(pod, "Ready", "True");
    let live = list["items"].as_array().unwrap().iter();
    let live = live.filter(|pod| pod["metadata"]["deletionTimestamp"].is_null() && (!ready || is_ready(pod)));
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let mut found: Vec<_> =
        live.map(|pod| (text(&pod["spec"]["nodeName"]), text(&pod["metadata"]["name"]))).collect();
    found.sort();
    found
}

/// Nodes of the Ready pods.
fn nodes_of_ready_pods(nodes: &Nodes) -> Vec<String> {
    pods(nodes, true).into_iter().map(|(node, _)| node).collect()
}

/// Waits until the budget's status has these numbers: currentHealthy, desiredHealthy, expectedPods, disruptionsAllowed.
fn wait_for_budget_status(nodes: &Nodes, numbers: [i64; 4]) {
    let fields = ["currentHealthy", "desiredHealthy", "expectedPods", "disruptionsAllowed"];
    eventually(&format!("the status of the budget to be {numbers:?}"), 30, || {
        let status = nodes.get(&["pdb", "b"])["status"].clone();
        fields.map(|field| status[field].as_i64().unwrap()) == numbers
    });
}

#[test]
fn drain_respects_disruption_budgets() {
    on_a_machine(|machine| {
        let nodes = Nodes::up(machine, CIDRS, 2);
        nodes.apply(&deployment(2));
        eventually("a pod on each node", 60, || nodes_of_ready_pods(&nodes) == ["node-1", "node-2"]);
        nodes.kubectl(&["create", "pdb", "b", "--selector=app=d", "--min-available=2"]);
        wait_for_budget_status(&nodes, [2, 2, 2, 0]);
        let table = nodes.kubectl(&["get", "pdb"]);
        let words: Vec<&str> = table.split_whitespace().collect();
        assert_eq!(
            words[..8],
            ["NAME", "MIN", "AVAILABLE", "MAX", "UNAVAILABLE", "ALLOWED", "DISRUPTIONS", "AGE"]
        );
        assert_eq!(words[8..12], ["b", "2", "N/A", "0"]);
        let before = pods(&nodes, false);
        let refused = nodes.try_kubectl(&["drain", "node-2", "--timeout=10s"]);
        assert!(!refused.status.success());
        let expected = "Cannot evict pod as it would violate the pod's disruption budget";
        assert!(stderr(&refused).contains(expected), "{}", stderr(&refused));
        assert_eq!(pods(&nodes, false), before);
        // Percentages, and an eviction right after a change of the budget.
        let share = json!({"spec": {"minAvailable": null, "maxUnavailable": "50%"}}).to_string();
        nodes.kubectl(&["patch", "pdb", "b", "--type=merge", "-p", &share]);
        nodes.kubectl(&["drain", "node-2", "--timeout=300s"]);
        eventually("both pods on node-1", 60, || nodes_of_ready_pods(&nodes) == ["node-1", "node-1"]);
        wait_for_budget_status(&nodes, [2, 1, 2, 1]);
        drain_waits(&nodes, &machine.path("drain.log"));
    });
}

/// Drain evicts one of two pods. No node accepts its replacement, so drain waits until a node is available.
fn drain_waits(nodes: &Nodes, log: &Path) {
    let mut drain = nodes.start_with_log(&["drain", "node-1", "--timeout=600s"], log);
    eventually("one pod to be evicted", 30, || {
        let found: Vec<String> = pods(nodes, false).into_iter().map(|(node, _)| node).collect();
        found == ["", "node-1"]
    });
    wait_for_budget_status(nodes, [1, 1, 2, 0]);
    eventually("drain to retry", 30, || {
        fs::read_to_string(log).unwrap().matches("(will retry after 5s)").count() > 1
    });
    assert!(drain.try_wait().unwrap().is_none());
    assert_eq!(nodes_of_ready_pods(nodes), ["node-1"]);
    nodes.kubectl(&["uncordon", "node-2"]);
    let status = drain.wait().unwrap();
    assert!(status.success(), "{}", fs::read_to_string(log).unwrap());
    eventually("both pods on node-2", 60, || nodes_of_ready_pods(nodes) == ["node-2", "node-2"]);
    // The controller has observed the evictions.
    eventually("disruptedPods to be empty", 10, || {
        nodes.get(&["pdb", "b"])["status"]["disruptedPods"].is_null()
    });
    nodes.kubectl(&["delete", "pdb", "b"]);
}

#[test]
fn pods_of_a_node_with_the_out_of_service_taint_are_deleted() {
    on_a_machine(|machine| {
        let mut nodes = Nodes::control_plane_only(machine, CIDRS, &["--node-monitor-grace-seconds", "10"]);
        nodes.join_all(2, &["--node-lease-seconds", "4"]);
        nodes.apply(&deployment(2));
        eventually("a pod on each node", 60, || nodes_of_ready_pods(&nodes) == ["node-1", "node-2"]);
        let lost = pods(&nodes, true)[1].1.clone();
        let uid = nodes.get(&["pod", &lost])["metadata"]["uid"].as_str().unwrap().to_owned();
        nodes.agent("node-2").end(Signal::SIGKILL);
        nodes.kubectl(&["delete", "pod", &lost, "--wait=false"]);
        let taint = "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute";
        nodes.kubectl(&["taint", "node", "node-2", taint]);
        let ready = |nodes: &Nodes| has_condition(&nodes.get(&["node", "node-2"]), "Ready", "True");
        // The node must not be Ready: a Ready node ends its pods itself.
        let there = nodes.try_kubectl(&["get", "pod", &lost]).status.success();
        assert!(there || !ready(&nodes));
        eventually("the pod of the lost node to be deleted", 20, || {
            !nodes.try_kubectl(&["get", "pod", &lost]).status.success()
        });
        assert!(!ready(&nodes));
        eventually("a replacement", 60, || nodes_of_ready_pods(&nodes) == ["node-1", "node-1"]);
        nodes.agent("node-2").start();
        eventually("the node to end the deleted pod", 30, || {
            nodes.agent("node-2").process_of(&uid).is_none()
        });
    });
}

#[test]
fn a_stale_disruption_target_condition_is_reset() {
    on_a_machine(|machine| {
        let nodes = Nodes::control_plane_only(machine, CIDRS, &[]);
        eventually("the default service account", 10, || {
            nodes.try_kubectl(&["get", "serviceaccount", "default"]).status.success()
        });
        for name in ["recent", "stale"] {
            let spec = json!({"containers": [{"name": "c", "image": "busybox"}]});
            let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec});
            nodes.apply(&pod.to_string());
        }
        let set_condition = |pod: &str, since: &str| {
            let condition = json!({"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI",
                "lastTransitionTime": since});
            let patch = json!({"status": {"conditions": [condition]}}).to_string();
            nodes.kubectl(&["patch", "pod", pod, "--subresource=status", "-p", &patch]);
        };
        let status = |pod: &str| {
            let conditions = nodes.get(&["pod", pod])["status"]["conditions"].clone();
            let found = conditions.as_array().unwrap().iter().find(|one| one["type"] == "DisruptionTarget");
            found.map(|condition| condition["status"].as_str().unwrap().to_owned())
        };
        // The controller reconciles `recent` first. It keeps the condition of `recent`, because this pod may still be deleted.
        set_condition("recent", "2100-01-01T00:00:00Z");
        set_condition("stale", "2026-01-01T00:00:00Z");
        let is = |pod: &str, expected: &str| status(pod).as_deref() == Some(expected);
        eventually("the stale condition to be reset", 10, || is("stale", "False"));
        assert!(is("recent", "True"));
    });
}

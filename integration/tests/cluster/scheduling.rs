//! The scheduler: preemption by priority, and pod anti-affinity.

use coracle_integration::{Cluster, eventually, on_a_machine};
use serde_json::{Value, json};

fn pod(name: &str, spec: &Value) -> String {
    let mut whole = json!({"terminationGracePeriodSeconds": 1,
        "containers": [{"name": "c", "image": "busybox", "command": ["sleep", "100000"]}]});
    whole.as_object_mut().unwrap().extend(spec.as_object().unwrap().clone());
    let metadata = json!({"name": name, "labels": {"app": "a"}});
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": whole}).to_string()
}

/// A pod that requests the extended resource of the node.
fn requesting(name: &str, class: &str) -> String {
    let resources = json!({"requests": {"example.com/room": "1"}, "limits": {"example.com/room": "1"}});
    let container =
        json!({"name": "c", "image": "busybox", "command": ["sleep", "100000"], "resources": resources});
    let mut spec = json!({"containers": [container]});
    if !class.is_empty() {
        spec["priorityClassName"] = class.into();
    }
    pod(name, &spec)
}

fn is_running(cluster: &Cluster, name: &str) -> bool {
    cluster.get(&["pod", name])["status"]["phase"] == "Running"
}

/// The message of the condition PodScheduled.
fn refusal(cluster: &Cluster, name: &str) -> String {
    let pod = cluster.get(&["pod", name]);
    let conditions = pod["status"]["conditions"].as_array().cloned().unwrap_or_default();
    let found = conditions.iter().find(|one| one["type"] == "PodScheduled" && one["status"] == "False");
    found.and_then(|one| one["message"].as_str()).unwrap_or_default().to_owned()
}

#[test]
fn a_pod_of_higher_priority_preempts_another_one() {
    on_a_machine(|machine| {
        let mirrors = machine.start_registry();
        let cluster = Cluster::up(machine, &mirrors);
        let room =
            r#"{"status":{"capacity":{"example.com/room":"1"},"allocatable":{"example.com/room":"1"}}}"#;
        cluster.kubectl(&["patch", "node", "node-1", "--subresource=status", "--type=merge", "-p", room]);
        cluster.kubectl(&["create", "priorityclass", "high", "--value=1000"]);
        cluster.apply(&requesting("low", ""));
        eventually("the first pod to run", 60, || is_running(&cluster, "low"));
        cluster.apply(&requesting("waits", ""));
        let sentence = "0/1 nodes are available: 1 Insufficient example.com/room. no new claims to deallocate, \
                        preemption: 0/1 nodes are available: 1 No preemption victims found for incoming pod.";
        eventually("a refusal", 30, || refusal(&cluster, "waits") == sentence);
        cluster.apply(&requesting("high", "high"));
        eventually("the pod of higher priority to run", 60, || is_running(&cluster, "high"));
        eventually("the other pod to be removed", 60, || {
            !cluster.try_kubectl(&["get", "pod", "low"]).status.success()
        });
        assert_eq!(cluster.get(&["pod", "waits"])["status"]["phase"], "Pending");

        let term =
            json!({"labelSelector": {"matchLabels": {"app": "a"}}, "topologyKey": "kubernetes.io/hostname"});
        let apart = json!({"affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}});
        cluster.apply(&pod("apart", &apart));
        eventually("a refusal by anti-affinity", 30, || {
            refusal(&cluster, "apart").contains("1 node(s) didn't match pod anti-affinity rules")
        });
        cluster.kubectl(&["delete", "pod", "high", "waits"]);
        eventually("the pod to run alone", 60, || is_running(&cluster, "apart"));
    });
}

//! Eviction for a lack of memory, on a node whose threshold is nearly the whole memory of the machine.

use coracle_integration::{Cluster, eventually, has_condition, on_a_machine};
use serde_json::{Value, json};

/// Creates a pod on the node. The scheduler would not bind it to a node under pressure.
fn create(cluster: &Cluster, name: &str, fields: &Value, container: &Value) {
    let mut first = json!({"name": "c", "image": "busybox", "command": ["sleep", "1000"]});
    first.as_object_mut().unwrap().extend(container.as_object().unwrap().clone());
    let mut spec = json!({"nodeName": "node-1", "containers": [first]});
    spec.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec});
    cluster.apply(&pod.to_string());
}

/// Waits until the pod is evicted. Returns the pod and the message in its status.
fn evicted(cluster: &Cluster, name: &str) -> (Value, String) {
    let pod = eventually(&format!("{name} to be evicted"), 90, || {
        let pod = cluster.get(&["pod", name]);
        (pod["status"]["phase"] == "Failed" && pod["status"]["reason"] == "Evicted").then_some(pod)
    });
    let message = pod["status"]["message"].as_str().unwrap_or_default().to_owned();
    (pod, message)
}

#[test]
fn a_node_without_free_memory_evicts_pods_and_rejects_new_ones_but_keeps_critical_pods() {
    on_a_machine(|machine| {
        let mirrors = machine.start_registry();
        let flags = ["--image-gc-high-threshold", "100", "--eviction-hard", "memory.available<99%"];
        let cluster = Cluster::up_with(machine, &mirrors, &flags);
        eventually("the condition of the node", 30, || {
            has_condition(&cluster.get(&["node", "node-1"]), "MemoryPressure", "True").then_some(())
        });
        let none = json!({});
        create(&cluster, "critical", &json!({"priorityClassName": "system-node-critical"}), &none);
        eventually("the critical pod to run", 90, || {
            (cluster.get(&["pod", "critical"])["status"]["phase"] == "Running").then_some(())
        });
        create(&cluster, "best-effort", &none, &none);
        let (pod, message) = evicted(&cluster, "best-effort");
        assert_eq!(message, "Pod was rejected: The node had condition: [MemoryPressure]. ");
        assert!(!has_condition(&pod, "DisruptionTarget", "True"), "{pod}");
        create(&cluster, "burstable", &none, &json!({"resources": {"requests": {"cpu": "10m"}}}));
        let (pod, message) = evicted(&cluster, "burstable");
        let begin = "The node was low on resource: memory. Threshold quantity: ";
        assert!(message.starts_with(begin), "{message}");
        assert!(has_condition(&pod, "DisruptionTarget", "True"), "{pod}");
        let events = ["events", "--field-selector", "involvedObject.name=burstable,reason=Evicted"];
        let events = eventually("the event", 30, || {
            let events = cluster.get(&events)["items"].clone();
            (!events.as_array().unwrap().is_empty()).then_some(events)
        });
        assert_eq!(events[0]["message"], json!(message));
        assert_eq!(cluster.get(&["pod", "critical"])["status"]["phase"], "Running");
    });
}

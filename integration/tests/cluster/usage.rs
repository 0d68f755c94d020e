//! Usage of nodes and pods: `kubectl top` without metrics-server.

use coracle_integration::{Cluster, eventually, on_a_machine};
use serde_json::json;

#[test]
fn kubectl_top_shows_nodes_and_pods() {
    on_a_machine(|machine| {
        let mirrors = machine.start_registry();
        let cluster = Cluster::up(machine, &mirrors);
        let busy = json!({"name": "busy", "image": "busybox", "command": ["sh", "-c", "while :; do :; done"],
            "resources": {"limits": {"cpu": "200m"}}});
        let metadata = json!({"name": "p", "labels": {"app": "p"}});
        let spec = json!({"terminationGracePeriodSeconds": 1, "containers": [busy]});
        let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec});
        cluster.apply(&pod.to_string());
        eventually("the pod to run", 60, || cluster.get(&["pod", "p"])["status"]["phase"] == "Running");
        let millis = |text: &str| -> u64 { text.trim_end_matches('m').parse().unwrap_or_default() };
        eventually("usage of the pod", 30, || {
            let top = cluster.try_kubectl(&["top", "pod", "-l", "app=p", "--no-headers"]);
            let text = String::from_utf8_lossy(&top.stdout).into_owned();
            let fields: Vec<&str> = text.split_whitespace().collect();
            fields.len() == 3 && fields[0] == "p" && millis(fields[1]) > 50 && fields[2].ends_with("Mi")
        });
        let node = cluster.try_kubectl(&["top", "node", "--no-headers"]);
        let text = String::from_utf8_lossy(&node.stdout).into_owned();
        assert!(text.starts_with("node-1 ") && text.contains('%'), "{text}");
        let raw =
            cluster.try_kubectl(&["get", "--raw", "/apis/metrics.k8s.io/v1beta1/namespaces/default/pods/p"]);
        let raw: serde_json::Value = serde_json::from_slice(&raw.stdout).unwrap();
        assert_eq!((&raw["kind"], &raw["containers"][0]["name"]), (&json!("PodMetrics"), &json!("busy")));
        let absent = cluster.try_kubectl(&["get", "--raw", "/apis/metrics.k8s.io/v1beta1/nodes/none"]);
        assert!(!absent.status.success());
    });
}

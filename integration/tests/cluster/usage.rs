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

#[test]
fn an_autoscaler_adds_pods_to_a_deployment_above_its_target() {
    on_a_machine(|machine| {
        let mirrors = machine.start_registry();
        let cluster = Cluster::up(machine, &mirrors);
        let container = json!({"name": "c", "image": "busybox", "command": ["sleep", "100000"]});
        let spec = json!({"terminationGracePeriodSeconds": 1, "containers": [container]});
        let template = json!({"metadata": {"labels": {"app": "d"}}, "spec": spec});
        let spec = json!({"replicas": 1, "selector": {"matchLabels": {"app": "d"}}, "template": template});
        let deployment =
            json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "d"}, "spec": spec});
        cluster.apply(&deployment.to_string());
        let replicas = || cluster.get(&["deployment", "d"])["status"]["readyReplicas"].clone();
        eventually("the pod to be ready", 60, || replicas() == 1);
        // Memory, because the CPU usage of a pod that has just become ready counts only in the next round.
        let memory = json!({"name": "memory", "target": {"type": "AverageValue", "averageValue": "1Ki"}});
        let target = json!({"apiVersion": "apps/v1", "kind": "Deployment", "name": "d"});
        let spec = json!({"scaleTargetRef": target, "minReplicas": 1, "maxReplicas": 2,
            "metrics": [{"type": "Resource", "resource": memory}]});
        let autoscaler = json!({"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler",
            "metadata": {"name": "d"}, "spec": spec});
        cluster.apply(&autoscaler.to_string());
        eventually("a second pod", 60, || replicas() == 2);
        let status = cluster.get(&["hpa", "d"])["status"].clone();
        let limited =
            status["conditions"].as_array().unwrap().iter().find(|one| one["type"] == "ScalingLimited");
        assert_eq!(limited.unwrap()["reason"], "TooManyReplicas", "{status}");
    });
}

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
        the_kubelet_has_its_own_metrics(&cluster);
    });
}

/// The metrics that dashboards and alerts of kubernetes-mixin use, on a node with a pod that runs.
fn the_kubelet_has_its_own_metrics(cluster: &Cluster) {
    let read = |path: &str| cluster.kubectl(&["get", "--raw", &format!("/api/v1/nodes/node-1/proxy/{path}")]);
    let text = read("metrics");
    let value = |text: &str, sample: &str| -> f64 {
        let line = text.lines().find_map(|line| line.strip_prefix(sample)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("no {sample} in\n{text}")).parse().unwrap()
    };
    assert!(value(&text, "kubelet_node_name{node=\"node-1\"}") > 0.0);
    for sample in [
        "kubelet_running_pods",
        "kubelet_running_containers{container_state=\"running\"}",
        "kubelet_desired_pods{static=\"\"}",
        "kubelet_active_pods{static=\"\"}",
        "kubelet_started_pods_total",
        "kubelet_started_containers_total{container_type=\"container\"}",
        "kubelet_runtime_operations_total{operation_type=\"run_podsandbox\"}",
        "kubelet_runtime_operations_duration_seconds_count{operation_type=\"start_container\"}",
        "kubelet_pod_start_duration_seconds_count",
        "kubelet_pod_worker_start_duration_seconds_count",
        "kubelet_pod_worker_duration_seconds_count{operation_type=\"create\"}",
        "process_resident_memory_bytes",
    ] {
        assert!(value(&text, sample) >= 1.0, "{sample} in\n{text}");
    }
    let scrapes = "kubelet_http_requests_total{long_running=\"false\",method=\"GET\",path=\"metrics\",server_type=\"readwrite\"}";
    assert!(value(&read("metrics"), scrapes) >= 1.0);
    let machine = read("metrics/cadvisor");
    assert!(machine.lines().any(|line| line.starts_with("machine_memory_bytes{")), "{machine}");
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
        // The target is memory, because the CPU usage of a pod that has just become ready counts only in the next
        // round.
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

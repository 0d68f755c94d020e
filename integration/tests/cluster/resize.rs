//! In-place resize of pods: limits in the kernel, status, conditions, restarts, waiting for room, restart of the node.

use coracle_integration::{Cluster, eventually, on_a_cluster};
use serde_json::{Value, json};

fn run(cluster: &Cluster, name: &str, resources: &Value, policies: &Value) {
    let container = json!({"name": "c", "image": "busybox", "command": ["sleep", "100000"], "resources": resources,
        "resizePolicy": policies});
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
        "spec": {"terminationGracePeriodSeconds": 0, "restartPolicy": "OnFailure", "containers": [container]}});
    cluster.apply(&pod.to_string());
    cluster.kubectl(&["wait", &format!("pod/{name}"), "--for=condition=Ready", "--timeout=300s"]);
}

/// Resources of a Guaranteed pod: requests are the limits.
pub(crate) fn guaranteed(cpu: &str, memory: &str) -> Value {
    let list = json!({"cpu": cpu, "memory": memory});
    json!({"requests": list, "limits": list})
}

fn resize(cluster: &Cluster, name: &str, resources: &Value) {
    let patch = json!({"spec": {"containers": [{"name": "c", "resources": resources}]}}).to_string();
    cluster.kubectl(&["patch", "pod", name, "--subresource", "resize", "--patch", &patch]);
}

fn pod(cluster: &Cluster, name: &str) -> Value {
    cluster.get(&["pod", name])
}

fn condition(pod: &Value, kind: &str) -> Value {
    let conditions = pod["status"]["conditions"].as_array().cloned().unwrap_or_default();
    conditions.into_iter().find(|condition| condition["type"] == kind).unwrap_or_default()
}

/// Waits until the pod has these resources and reports no resize any more. Returns the pod.
fn resized(cluster: &Cluster, name: &str, resources: &Value) -> Value {
    let mut last = Value::Null;
    eventually(&format!("{name} to be resized"), 60, || {
        last = pod(cluster, name);
        let (spec, status) = (&last["spec"]["containers"][0], &last["status"]["containerStatuses"][0]);
        last["status"]["observedGeneration"] == last["metadata"]["generation"]
            && ["PodResizePending", "PodResizeInProgress"].iter().all(|kind| condition(&last, kind).is_null())
            && spec["resources"] == *resources
            && status["resources"] == *resources
            && status["allocatedResources"] == resources["requests"]
            && status["ready"] == true
    });
    last
}

/// The first line of a cgroup file of the container, by its names in v2 and in v1.
fn limit(cluster: &Cluster, name: &str, files: [&str; 2]) -> String {
    let [v2, v1] = files.map(|file| format!("/sys/fs/cgroup/{file}"));
    let command = format!("if [ -e {v2} ]; then cat {v2}; else cat {v1}; fi");
    let text = cluster.kubectl(&["exec", name, "--", "sh", "-c", &command]);
    text.split_whitespace().next().unwrap_or_default().to_owned()
}

const QUOTA: [&str; 2] = ["cpu.max", "cpu/cpu.cfs_quota_us"];
const MEMORY: [&str; 2] = ["memory.max", "memory/memory.limit_in_bytes"];

#[test]
fn limits_of_a_running_container_change_with_a_restart_only_if_its_policy_says_so() {
    on_a_cluster(|_, cluster| {
        run(cluster, "p", &guaranteed("20m", "35Mi"), &json!([]));
        for (cpu, memory, quota, bytes) in [
            ("25m", "40Mi", "2500", 40 << 20),
            ("15m", "45Mi", "1500", 45 << 20),
            ("20m", "35Mi", "2000", 35 << 20),
        ] {
            resize(cluster, "p", &guaranteed(cpu, memory));
            let found = resized(cluster, "p", &guaranteed(cpu, memory));
            assert_eq!(found["status"]["containerStatuses"][0]["restartCount"], 0);
            assert_eq!(limit(cluster, "p", QUOTA), quota);
            assert_eq!(limit(cluster, "p", MEMORY), bytes.to_string());
        }
        assert_eq!(pod(cluster, "p")["metadata"]["generation"], 4);
        let events = cluster.kubectl(&["get", "events", "-o", "jsonpath={.items[*].reason}"]);
        assert!(events.contains("ResizeStarted") && events.contains("ResizeCompleted"), "{events}");
        let policy = json!([{"resourceName": "memory", "restartPolicy": "RestartContainer"},
            {"resourceName": "cpu", "restartPolicy": "NotRequired"}]);
        run(cluster, "q", &guaranteed("20m", "35Mi"), &policy);
        for (cpu, memory, restarts) in [("25m", "35Mi", 0), ("25m", "40Mi", 1), ("20m", "35Mi", 2)] {
            resize(cluster, "q", &guaranteed(cpu, memory));
            let found = resized(cluster, "q", &guaranteed(cpu, memory));
            assert_eq!(found["status"]["containerStatuses"][0]["restartCount"], restarts);
        }
        assert_eq!(limit(cluster, "q", MEMORY), (35 << 20).to_string());
    });
}

#[test]
fn a_container_without_limits_has_the_limits_of_its_pod() {
    on_a_cluster(|_, cluster| {
        let container = json!({"name": "c", "image": "busybox", "command": ["sleep", "100000"]});
        let manifest = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "whole"},
            "spec": {"terminationGracePeriodSeconds": 0, "resources": guaranteed("20m", "35Mi"),
                "containers": [container]}});
        cluster.apply(&manifest.to_string());
        cluster.kubectl(&["wait", "pod/whole", "--for=condition=Ready", "--timeout=300s"]);
        for (cpu, memory, quota, bytes) in [
            ("20m", "35Mi", "2000", 35 << 20),
            ("25m", "30Mi", "2500", 30 << 20),
            ("15m", "40Mi", "1500", 40 << 20),
        ] {
            let wanted = guaranteed(cpu, memory);
            let patch = json!({"spec": {"resources": wanted}}).to_string();
            cluster.kubectl(&["patch", "pod", "whole", "--subresource", "resize", "--patch", &patch]);
            eventually("the pod to be resized", 60, || {
                let found = pod(cluster, "whole");
                let status = &found["status"];
                status["observedGeneration"] == found["metadata"]["generation"]
                    && condition(&found, "PodResizeInProgress").is_null()
                    && status["resources"] == wanted
                    && status["allocatedResources"] == wanted["requests"]
            });
            assert_eq!(limit(cluster, "whole", QUOTA), quota);
            assert_eq!(limit(cluster, "whole", MEMORY), bytes.to_string());
        }
        cluster.kill();
        cluster.start();
        cluster.kubectl(&["wait", "pod/whole", "--for=condition=Ready", "--timeout=60s"]);
        let found = pod(cluster, "whole");
        assert_eq!(found["status"]["containerStatuses"][0]["restartCount"], 0);
        assert_eq!(found["status"]["resources"], guaranteed("15m", "40Mi"));
        assert_eq!(limit(cluster, "whole", QUOTA), "1500");
    });
}

#[test]
fn a_memory_limit_below_the_usage_is_an_error_until_it_is_withdrawn() {
    on_a_cluster(|_, cluster| {
        run(cluster, "p", &guaranteed("20m", "35Mi"), &json!([]));
        resize(cluster, "p", &guaranteed("20m", "10Ki"));
        let mut found = Value::Null;
        eventually("the resize to fail", 30, || {
            found = condition(&pod(cluster, "p"), "PodResizeInProgress");
            found["reason"] == "Error"
        });
        let message = found["message"].as_str().unwrap();
        assert!(message.contains("memory limit (10240) below current usage"), "{message}");
        let status = &pod(cluster, "p")["status"]["containerStatuses"][0];
        assert_eq!(status["resources"], guaranteed("20m", "35Mi"));
        assert_eq!(limit(cluster, "p", MEMORY), (35 << 20).to_string());
        resize(cluster, "p", &guaranteed("20m", "36Mi"));
        let found = resized(cluster, "p", &guaranteed("20m", "36Mi"));
        assert_eq!(found["status"]["containerStatuses"][0]["restartCount"], 0);
    });
}

#[test]
fn a_resize_waits_for_free_resources_and_survives_a_restart_of_the_node() {
    on_a_cluster(|_, cluster| {
        let node = &cluster.get(&["nodes"])["items"][0];
        let text = node["status"]["allocatable"]["cpu"].as_str().unwrap();
        let millis: u64 = match text.strip_suffix('m') {
            Some(millis) => millis.parse().unwrap(),
            None => text.parse::<u64>().unwrap() * 1000,
        };
        let cpu = |share: u64| json!({"requests": {"cpu": format!("{}m", millis * share / 100)}});
        run(cluster, "large", &cpu(60), &json!([]));
        run(cluster, "small", &cpu(10), &json!([]));
        resize(cluster, "small", &cpu(60));
        let deferred = |cluster: &Cluster| condition(&pod(cluster, "small"), "PodResizePending");
        eventually("the resize to be deferred", 30, || deferred(cluster)["reason"] == "Deferred");
        let status = &pod(cluster, "small")["status"]["containerStatuses"][0];
        assert_eq!(status["allocatedResources"], cpu(10)["requests"]);
        cluster.kill();
        cluster.start();
        eventually("the node to report the pod again", 60, || {
            let found = pod(cluster, "small");
            found["status"]["containerStatuses"][0]["allocatedResources"] == cpu(10)["requests"]
                && condition(&found, "PodResizePending")["reason"] == "Deferred"
        });
        let over = json!({"spec": {"containers": [{"name": "c", "resources": cpu(200)}]}}).to_string();
        let refused =
            cluster.try_kubectl(&["patch", "pod", "small", "--subresource", "resize", "--patch", &over]);
        let message = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(message.contains("node didn't have enough allocatable resources"), "{message}");
        // The smaller requests of another pod make room, as its deletion would.
        resize(cluster, "large", &cpu(30));
        resized(cluster, "large", &cpu(30));
        let found = resized(cluster, "small", &cpu(60));
        assert_eq!(found["status"]["containerStatuses"][0]["restartCount"], 0);
    });
}

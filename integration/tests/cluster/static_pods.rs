//! Static pods: manifests on the node, and their mirror pods in the API. Preemption by critical pods.

use std::fs;

use coracle_integration::{Cluster, eventually, has_condition, on_a_machine};
use serde_json::{Value, json};

const NAME: &str = "web-node-1";

fn manifest(command: &str) -> String {
    let container = json!({"name": "c", "image": "busybox", "command": ["sh", "-c", command]});
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "web"},
        "spec": {"terminationGracePeriodSeconds": 0, "containers": [container]}});
    pod.to_string()
}

/// The pod with this name, or null.
fn find(cluster: &Cluster, name: &str) -> Value {
    let output = cluster.try_kubectl(&["get", "pod", name, "-o", "json"]);
    serde_json::from_slice(&output.stdout).unwrap_or_default()
}

/// Waits until the mirror pod is Ready and has another uid than `former`.
fn ready(cluster: &Cluster, former: &Value) -> Value {
    let mut found = Value::Null;
    eventually("the mirror pod to be Ready", 120, || {
        found = find(cluster, NAME);
        found["metadata"]["uid"] != *former
            && found["metadata"]["deletionTimestamp"].is_null()
            && has_condition(&found, "Ready", "True")
    });
    found
}

#[test]
fn a_static_pod_has_a_mirror_pod_until_its_manifest_is_removed() {
    on_a_machine(|machine| {
        let mirrors = machine.start_registry();
        let dir = machine.path("manifests");
        let path = dir.to_str().unwrap().to_owned();
        let flags = ["--image-gc-high-threshold", "100", "--pod-manifest-path", path.as_str()];
        let mut cluster = Cluster::up_with(machine, &mirrors, &flags);
        fs::create_dir(&dir).unwrap();
        let write = |text: String| {
            fs::write(machine.path("next"), text).unwrap();
            fs::rename(machine.path("next"), dir.join("web.json")).unwrap();
        };
        write(manifest("echo first; exec sleep 100000"));

        let mirror = ready(&cluster, &Value::Null);
        let annotations = &mirror["metadata"]["annotations"];
        let hash = annotations["kubernetes.io/config.hash"].as_str().unwrap();
        assert_eq!(annotations["kubernetes.io/config.mirror"], hash);
        assert_eq!(annotations["kubernetes.io/config.source"], "file");
        assert_eq!(mirror["metadata"]["ownerReferences"][0]["kind"], "Node");
        assert_eq!(cluster.kubectl(&["logs", NAME]).trim(), "first");
        assert_eq!(cluster.kubectl(&["exec", NAME, "--", "echo", "hello"]).trim(), "hello");

        // The node creates a deleted mirror pod again, and keeps the container.
        cluster.kubectl(&["delete", "pod", NAME, "--wait=false"]);
        let second = ready(&cluster, &mirror["metadata"]["uid"]);
        let container = |pod: &Value| pod["status"]["containerStatuses"][0]["containerID"].clone();
        assert_eq!(container(&second), container(&mirror));

        // A user's copy of the mirror pod is not run.
        let copy = json!({"apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": "copy", "annotations": {"kubernetes.io/config.mirror": hash}},
            "spec": {"nodeName": "node-1", "containers": [{"name": "c", "image": "busybox"}]}});
        cluster.apply(&copy.to_string());
        eventually("the copy to be deleted", 30, || find(&cluster, "copy").is_null());

        // The pod and its mirror pod survive a restart of the node.
        cluster.stop();
        cluster.start();
        let third = ready(&cluster, &Value::Null);
        assert_eq!(third["metadata"]["uid"], second["metadata"]["uid"]);
        assert_eq!(container(&third), container(&mirror));

        // A changed manifest is another pod.
        write(manifest("echo second; exec sleep 100000"));
        let changed = ready(&cluster, &third["metadata"]["uid"]);
        let changed_hash = changed["metadata"]["annotations"]["kubernetes.io/config.hash"].as_str().unwrap();
        assert_ne!(changed_hash, hash);
        assert_eq!(cluster.kubectl(&["logs", NAME]).trim(), "second");

        fs::remove_file(dir.join("web.json")).unwrap();
        eventually("the mirror pod to be deleted", 60, || find(&cluster, NAME).is_null());
        for hash in [hash, changed_hash] {
            let pod_dir = machine.path("state/pods").join(hash);
            eventually("the pod to be removed from the node", 60, || !pod_dir.exists());
        }
    });
}

/// Creates a pod on the node without the scheduler, and waits until it runs.
fn run(cluster: &Cluster, name: &str, priority_class: Option<&str>) {
    let container = json!({"name": "c", "image": "busybox", "command": ["sleep", "100000"]});
    let mut spec =
        json!({"nodeName": "node-1", "terminationGracePeriodSeconds": 1, "containers": [container]});
    if let Some(class) = priority_class {
        spec["priorityClassName"] = class.into();
    }
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec});
    cluster.apply(&pod.to_string());
    eventually(&format!("{name} to run"), 120, || find(cluster, name)["status"]["phase"] == "Running");
}

/// Waits until a critical pod has preempted the pod.
fn preempted(cluster: &Cluster, name: &str) {
    let mut pod = Value::Null;
    eventually(&format!("{name} to be preempted"), 60, || {
        pod = find(cluster, name);
        pod["status"]["phase"] == "Failed"
    });
    assert_eq!(pod["status"]["reason"], "Preempting", "{pod}");
    assert_eq!(pod["status"]["message"], "Preempted in order to admit critical pod");
    assert!(has_condition(&pod, "DisruptionTarget", "True"), "{pod}");
}

#[test]
fn critical_pods_preempt_other_pods_of_a_full_node() {
    on_a_machine(|machine| {
        let mirrors = machine.start_registry();
        let dir = machine.path("manifests");
        let path = dir.to_str().unwrap().to_owned();
        let flags =
            ["--image-gc-high-threshold", "100", "--max-pods", "1", "--pod-manifest-path", path.as_str()];
        let cluster = Cluster::up_with(machine, &mirrors, &flags);
        fs::create_dir(&dir).unwrap();
        let write = |text: String| {
            fs::write(machine.path("next"), text).unwrap();
            fs::rename(machine.path("next"), dir.join("web.json")).unwrap();
        };

        run(&cluster, "first", None);
        run(&cluster, "critical", Some("system-node-critical"));
        preempted(&cluster, "first");
        let metrics = cluster.kubectl(&["get", "--raw", "/api/v1/nodes/node-1/proxy/metrics"]);
        let line = "kubelet_preemptions{preemption_signal=\"pods\"} 1";
        assert!(metrics.lines().any(|other| other == line), "{metrics}");

        // A static pod without a priority does not preempt a critical pod. It is rejected, and has no mirror pod.
        write(manifest("exec sleep 100000"));
        let selector = format!("involvedObject.name={NAME},reason=UnexpectedAdmissionError");
        let mut events = Value::Null;
        eventually("the event of the rejection", 60, || {
            events = cluster.get(&["events", "--field-selector", &selector])["items"].clone();
            events.as_array().is_some_and(|events| !events.is_empty())
        });
        let message = events[0]["message"].as_str().unwrap_or_default();
        assert!(message.contains("no set of running pods found to reclaim resources"), "{message}");
        assert_eq!(find(&cluster, NAME), Value::Null);
        assert_eq!(find(&cluster, "critical")["status"]["phase"], "Running");

        // The static pod preempts a pod that is not critical.
        cluster.kubectl(&["delete", "pod", "critical"]);
        run(&cluster, "second", None);
        write(manifest("echo again; exec sleep 100000"));
        preempted(&cluster, "second");
        ready(&cluster, &Value::Null);
        assert_eq!(cluster.kubectl(&["logs", NAME]).trim(), "again");
    });
}

//! Published vulnerabilities of runc, containerd, CRI-O, the kubelet and kube-apiserver, tested on this node.
//!
//! `docs/security.md` lists these vulnerabilities with verdicts and tests. Tests of the project's own findings are in the
//! other modules.

#[path = "cve/api.rs"]
mod api;
#[path = "cve/images.rs"]
mod images;
#[path = "cve/network.rs"]
mod network;
#[path = "cve/runtime.rs"]
mod runtime;

use coracle_integration::{Cluster, eventually};
use serde_json::{Value, json};

/// A pod with one container that runs `sleep` in the image `busybox`. `pod` and `container` are additional fields.
fn sleeper(name: &str, pod: &Value, container: &Value) -> String {
    let mut first = json!({"name": "c", "image": "busybox", "command": ["sleep", "1000"]});
    first.as_object_mut().unwrap().extend(container.as_object().cloned().unwrap_or_default());
    let mut spec = json!({"terminationGracePeriodSeconds": 0, "containers": [first]});
    spec.as_object_mut().unwrap().extend(pod.as_object().cloned().unwrap_or_default());
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}).to_string()
}

/// Creates the pod and waits until it runs.
fn run_pod(cluster: &Cluster, name: &str, manifest: &str) {
    cluster.apply(manifest);
    let running = "--for=jsonpath={.status.phase}=Running";
    cluster.kubectl(&["wait", &format!("pod/{name}"), running, "--timeout=360s"]);
}

/// Runs a shell command in the pod. The command may fail. Returns standard output and standard error.
fn sh(cluster: &Cluster, pod: &str, script: &str) -> String {
    let output = cluster.try_kubectl(&["exec", pod, "--", "sh", "-c", script]);
    String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned()
}

/// Creates the pod and waits until the node rejects the pod or its container. Returns reason and message.
fn refused(cluster: &Cluster, name: &str, manifest: &str) -> String {
    cluster.apply(manifest);
    eventually(&format!("{name} to be refused"), 60, || {
        let pod = cluster.get(&["pod", name]);
        let state = &pod["status"]["containerStatuses"][0]["state"];
        assert!(state["running"].is_null(), "{name} runs: {state}");
        if pod["status"]["phase"] == "Failed" {
            return Some(format!("{} {}", pod["status"]["reason"], pod["status"]["message"]));
        }
        let waiting = &state["waiting"];
        let terminated = &pod["status"]["containerStatuses"][0]["lastState"]["terminated"];
        let reason = waiting["reason"].as_str().unwrap_or_default();
        let failed = reason.contains("Error") || reason == "CrashLoopBackOff";
        failed.then(|| format!("{waiting} {terminated}"))
    })
}

/// Tries to create the object. Returns kubectl's error.
fn denied(cluster: &Cluster, flags: &[&str], manifest: &str) -> String {
    let output = cluster.kubectl_of("1.37", &[&["create", "-f", "-"], flags].concat(), manifest);
    assert!(!output.status.success(), "accepted: {manifest}");
    String::from_utf8(output.stderr).unwrap()
}

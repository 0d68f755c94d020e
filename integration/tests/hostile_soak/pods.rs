//! Ordinary pods with probes, and hostile pods.

use std::process::Output;

use coracle_integration::{Cluster, eventually};
use serde_json::{Value, json};

/// Namespaces of the ordinary pods and of the attacking tenant.
pub(crate) const ORDINARY: &str = "ordinary";
pub(crate) const HOSTILE: &str = "hostile";

const PODS: usize = 50;

/// Hostile pods: name, an endless shell script, and whether an exec probe enters the container.
const ATTACKS: [(&str, &str, bool); 12] = [
    ("fork-bomb", "while :; do sh -c 'b() { b | b & }; b' 2>/dev/null; sleep 1; done", false),
    // Replaces /dev/null by links and by a FIFO. An exec must not use them for its streams or its report.
    (
        "exec-report",
        "while :; do for to in /proc/1/root/etc/shadow /proc/self/fd/3 /proc/kmsg /etc/passwd; do \
         rm -f /dev/null; ln -s $to /dev/null; sleep 0.2; done; rm -f /dev/null; mkfifo /dev/null; sleep 0.2; done",
        true,
    ),
    // The agent reads these files when the container restarts.
    ("hosts-file", "truncate -s 2G /etc/hosts; truncate -s 2G /dev/termination-log; sleep 5; exit 1", false),
    ("passwd-fifo", "rm -f /etc/passwd /etc/group; mkfifo /etc/passwd /etc/group; sleep 100000", true),
    ("log-lines", "yes $(seq 100)", false),
    ("log-without-lines", "cat /dev/zero >&2", false),
    (
        "open-files",
        "mkdir /f; for i in $(seq 2000); do : >/f/$i; done; for p in $(seq 10); do tail -f /f/* >/dev/null & done; wait",
        false,
    ),
    (
        "volume-in-memory",
        "while :; do cat /dev/zero >/memory/fill; rm /memory/fill; sleep 0.2; done 2>/dev/null",
        false,
    ),
    (
        "volume-on-disk",
        "while :; do dd if=/dev/zero of=/disk/fill bs=1M count=100; rm /disk/fill; sleep 1; done",
        false,
    ),
    (
        "deep-tree",
        "cd /disk; i=0; while [ $i -lt 3000 ]; do mkdir d && cd d; i=$((i + 1)); done; sleep 10; exit 1",
        false,
    ),
    ("out-of-memory", "tail /dev/zero", false),
    // Attacks from the pod network, without credentials.
    (
        "idle-connections",
        "while :; do for i in $(seq 20); do sleep 30 | nc $NODE 6443 & sleep 30 | nc $NODE 10250 & done 2>/dev/null; \
         sleep 31; done",
        false,
    ),
];

/// Creates 50 pods with readiness and liveness probes (exec, HTTP, TCP), and waits until they are Ready.
pub(crate) fn start_ordinary(cluster: &Cluster) {
    let namespace = |name: &str| json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}});
    for name in [ORDINARY, HOSTILE] {
        cluster.apply(&namespace(name).to_string());
        eventually("the namespace's service account", 10, || {
            let found = cluster.try_kubectl(&["get", "serviceaccount", "default", "-n", name]);
            found.status.success().then_some(())
        });
    }
    let list: Vec<Value> = (0..PODS).map(ordinary).collect();
    let list: Vec<String> = list.iter().map(Value::to_string).collect();
    cluster.apply(&list.join("\n"));
    eventually("the ordinary pods to be ready", 60, || (condition(cluster).0 == PODS).then_some(()));
}

/// The authorization header of a service account that may read and write the objects of the ordinary pods' namespace.
pub(crate) fn account(cluster: &Cluster) -> String {
    let subject = format!("--serviceaccount={ORDINARY}:default");
    cluster.kubectl(&["create", "rolebinding", "account", "-n", ORDINARY, "--clusterrole=edit", &subject]);
    let token = cluster.kubectl(&["create", "token", "default", "-n", ORDINARY, "--duration=24h"]);
    format!("authorization: Bearer {}", token.trim())
}

fn ordinary(number: usize) -> Value {
    let handler = match number % 3 {
        0 => json!({"exec": {"command": ["true"]}}),
        1 => json!({"httpGet": {"path": "/", "port": 8080}}),
        _ => json!({"tcpSocket": {"port": 8080}}),
    };
    let probe = |period: u8, failures: u8| {
        let mut probe = handler.clone();
        probe["periodSeconds"] = period.into();
        probe["failureThreshold"] = failures.into();
        probe
    };
    json!({"apiVersion": "v1", "kind": "Pod",
    "metadata": {"name": format!("ordinary-{number}"), "namespace": ORDINARY},
    "spec": {"terminationGracePeriodSeconds": 0, "containers": [{
        "name": "c", "image": "busybox", "command": ["sh", "-c", "echo ok >/tmp/index.html; exec httpd -f -p 8080 -h /tmp"],
        "resources": {"requests": {"cpu": "10m", "memory": "8Mi"}},
        "startupProbe": probe(1, 30), "readinessProbe": probe(5, 1), "livenessProbe": probe(10, 3),
    }]}})
}

/// Creates the hostile pods, each with at most 64 processes. `SOAK_HOSTILE_CPU` limits the processor time of each
/// pod, so that the test can run on a machine with other load.
pub(crate) fn start_hostile(cluster: &Cluster) {
    let list: Vec<Value> =
        ATTACKS.iter().map(|(name, script, probed)| hostile(name, script, *probed)).collect();
    let list: Vec<String> = list.iter().map(Value::to_string).collect();
    cluster.apply(&list.join("\n"));
}

fn hostile(name: &str, script: &str, probed: bool) -> Value {
    let mut container = json!({
        "name": "c", "image": "busybox", "command": ["sh", "-c", script], "resources": {"limits": {"memory": "64Mi"}},
        "env": [{"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "status.hostIP"}}}],
        "volumeMounts": [{"name": "memory", "mountPath": "/memory"}, {"name": "disk", "mountPath": "/disk"}],
    });
    if let Ok(cpu) = std::env::var("SOAK_HOSTILE_CPU") {
        container["resources"]["limits"]["cpu"] = cpu.into();
    }
    if probed {
        container["livenessProbe"] =
            json!({"exec": {"command": ["true"]}, "periodSeconds": 1, "failureThreshold": 1_000_000});
    }
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": HOSTILE},
        "spec": {"terminationGracePeriodSeconds": 0, "containers": [container], "volumes": [
            {"name": "memory", "emptyDir": {"medium": "Memory", "sizeLimit": "32Mi"}},
            {"name": "disk", "emptyDir": {"sizeLimit": "128Mi"}}]}})
}

/// A pod that ignores SIGTERM, for repeated creation and removal.
pub(crate) fn short_lived(name: &str) -> String {
    let mut pod = hostile(name, "trap '' TERM; while :; do sleep 0.1; done", false);
    pod["spec"]["terminationGracePeriodSeconds"] = 1.into();
    pod.to_string()
}

/// Removes the tenant with all its objects, and waits until it is gone.
pub(crate) fn remove_hostile(cluster: &Cluster) {
    cluster.kubectl(&["delete", "namespace", HOSTILE, "--wait=false"]);
    eventually("the hostile namespace to be gone", 120, || {
        let found: Output = cluster.try_kubectl(&["get", "namespace", HOSTILE, "-o", "name"]);
        (!found.status.success()).then_some(())
    });
}

/// The number of Ready ordinary pods, and of restarts of their containers.
pub(crate) fn condition(cluster: &Cluster) -> Condition {
    let pods = cluster.get(&["pods", "-n", ORDINARY]);
    let statuses = pods["items"].as_array().unwrap().iter().map(|pod| &pod["status"]["containerStatuses"][0]);
    let ready = statuses.clone().filter(|status| status["ready"] == true).count();
    let restarts = statuses.map(|status| status["restartCount"].as_u64().unwrap_or_default()).sum();
    Condition(ready, restarts)
}

/// Ready pods and restarts.
pub(crate) struct Condition(pub(crate) usize, u64);

impl std::fmt::Display for Condition {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} ready, {} restarts", self.0, self.1)
    }
}

/// Panics unless every ordinary pod is Ready and has never restarted.
pub(crate) fn assert_undisturbed(cluster: &Cluster) {
    let Condition(ready, restarts) = condition(cluster);
    assert_eq!((ready, restarts), (PODS, 0), "Ready ordinary pods and their restarts");
}

/// Events of failed probes, with counts and messages.
pub(crate) fn failed_probes(cluster: &Cluster) -> Vec<String> {
    let events = cluster.get(&["events", "-n", ORDINARY]);
    let failed = events["items"].as_array().unwrap().iter().filter(|event| {
        matches!(event["reason"].as_str(), Some("Unhealthy" | "ProbeWarning" | "ProbeError" | "Killing"))
    });
    let mut failed: Vec<String> = failed
        .map(|event| format!("{} {} {}", event["involvedObject"]["name"], event["count"], event["message"]))
        .collect();
    failed.sort();
    failed
}

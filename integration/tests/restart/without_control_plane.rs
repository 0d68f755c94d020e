//! A node that boots without its control plane starts its pods from the checkpoint.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use coracle_integration::{Cluster, Kubectl, Machine, Nodes, eventually, has_condition, on_a_machine};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::power_cut;

const CIDRS: &str = "10.42.0.0/16";

/// Objects that the pods below need.
fn objects() -> Vec<Value> {
    vec![
        json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "settings"}, "data": {"color": "blue"}}),
        json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "password"}, "stringData": {"word": "hunter2"}}),
        json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "web"},
            "spec": {"selector": {"app": "web"}, "ports": [{"port": 80}]}}),
    ]
}

fn pod(name: &str, spec: Value) -> Value {
    let mut all = json!({"terminationGracePeriodSeconds": 1, "nodeName": "node-1"});
    spec.as_object().unwrap().iter().for_each(|(key, value)| all[key] = value.clone());
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": {"app": name}}, "spec": all})
}

/// A container that keeps running if `check` succeeds, and is ready while `ready` succeeds.
fn container(name: &str, policy: &str, check: &str, ready: &str) -> Value {
    json!({"name": name, "image": "busybox", "imagePullPolicy": policy,
        "command": ["sh", "-c", format!("{check} && exec sleep 100000")],
        "readinessProbe": {"exec": {"command": ["sh", "-c", ready]}, "periodSeconds": 1}})
}

/// Pods that need every kind of object that the checkpoint contains.
fn pods() -> Vec<Value> {
    let mounted = |mut container: Value, mounts: Value| {
        container["volumeMounts"] = mounts;
        container
    };
    let files = mounted(
        container("c", "IfNotPresent", "grep blue /map/color", "grep hunter2 /secret/word"),
        json!([{"name": "map", "mountPath": "/map"}, {"name": "secret", "mountPath": "/secret"}]),
    );
    let mut environment = container(
        "c",
        "IfNotPresent",
        "[ $COLOR = blue ] && [ $word = hunter2 ] && [ -n \"$KUBERNETES_SERVICE_HOST\" ] && [ -n \"$WEB_SERVICE_HOST\" ]",
        "test -s /var/run/secrets/kubernetes.io/serviceaccount/token",
    );
    environment["env"] =
        json!([{"name": "COLOR", "valueFrom": {"configMapKeyRef": {"name": "settings", "key": "color"}}}]);
    environment["envFrom"] = json!([{"secretRef": {"name": "password"}}]);
    let host = mounted(
        container(
            "c",
            "IfNotPresent",
            "test -d /proc-of-host/1",
            "grep app /self/labels && touch /data/part",
        ),
        json!([{"name": "host", "mountPath": "/proc-of-host"}, {"name": "self", "mountPath": "/self"},
            {"name": "data", "mountPath": "/data", "subPath": "sub"}]),
    );
    let web = json!({"name": "c", "image": "nginx", "imagePullPolicy": "IfNotPresent",
        "readinessProbe": {"httpGet": {"port": 80}, "periodSeconds": 1}});
    let init = mounted(
        json!({"name": "i", "image": "busybox", "imagePullPolicy": "IfNotPresent",
            "command": ["sh", "-c", "cp /all/color /data/copy"]}),
        json!([{"name": "all", "mountPath": "/all"}, {"name": "data", "mountPath": "/data"}]),
    );
    let after_init = mounted(
        container("c", "IfNotPresent", "grep blue /data/copy", "true"),
        json!([{"name": "data", "mountPath": "/data"}]),
    );
    vec![
        pod(
            "files",
            json!({"containers": [files], "volumes": [{"name": "map", "configMap": {"name": "settings"}},
            {"name": "secret", "secret": {"secretName": "password"}}]}),
        ),
        pod("environment", json!({"containers": [environment]})),
        pod(
            "host",
            json!({"containers": [host], "volumes": [{"name": "host", "hostPath": {"path": "/proc"}},
            {"name": "self", "downwardAPI": {"items": [{"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}}]}},
            {"name": "data", "emptyDir": {}}]}),
        ),
        pod("web", json!({"containers": [web]})),
        pod(
            "init",
            json!({"initContainers": [init], "containers": [after_init], "volumes": [
            {"name": "all", "projected": {"sources": [{"configMap": {"name": "settings"}}, {"secret": {"name": "password"}}]}},
            {"name": "data", "emptyDir": {}}]}),
        ),
    ]
}

const FIVE: [&str; 5] = ["environment", "files", "host", "init", "web"];

fn create(cluster: &Kubectl) {
    eventually("the service account", 10, || {
        cluster.try_kubectl(&["get", "serviceaccount", "default"]).status.success()
    });
    let all = objects().into_iter().chain(pods());
    cluster.apply(&all.map(|object| object.to_string()).collect::<Vec<_>>().join("\n---\n"));
    let names: Vec<String> = FIVE.iter().map(|name| format!("pod/{name}")).collect();
    let mut wait = vec!["wait", "--for=condition=Ready", "--timeout=120s"];
    wait.extend(names.iter().map(String::as_str));
    cluster.kubectl(&wait);
}

fn is_ready(pod: &Value) -> bool {
    pod["status"]["phase"] == "Running" && has_condition(pod, "Ready", "True")
}

/// Name and container id of the Ready pods in a list.
fn ready(list: &Value) -> Vec<(String, String)> {
    let pods = list["items"].as_array().cloned().unwrap_or_default();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let of = |pod: &Value| {
        (text(&pod["metadata"]["name"]), text(&pod["status"]["containerStatuses"][0]["containerID"]))
    };
    let mut found: Vec<_> = pods.iter().filter(|pod| is_ready(pod)).map(of).collect();
    found.sort();
    found
}

fn names(pods: &[(String, String)]) -> Vec<&str> {
    pods.iter().map(|(name, _)| name.as_str()).collect()
}

/// A client of the kubelet API with the administrator's certificate.
struct KubeletClient {
    certificate: PathBuf,
    key: PathBuf,
}

impl KubeletClient {
    fn new(machine: &Machine, cluster: &Kubectl) -> Self {
        let file = |field: &str| {
            let path = machine.path(field);
            let query = format!("jsonpath={{.users[0].user.{field}-data}}");
            let data = cluster.kubectl(&["config", "view", "--raw", "-o", &query]);
            fs::write(path.with_extension("b64"), data).unwrap();
            let decoded = Command::new("base64").arg("-d").arg(path.with_extension("b64")).output().unwrap();
            fs::write(&path, decoded.stdout).unwrap();
            path
        };
        Self { certificate: file("client-certificate"), key: file("client-key") }
    }

    fn pods(&self, mut curl: Command) -> Value {
        curl.args(["-sk", "--max-time", "2", "--cert"]).arg(&self.certificate).arg("--key").arg(&self.key);
        let output = curl.arg("https://127.0.0.1:10250/pods").output().unwrap();
        serde_json::from_slice(&output.stdout).unwrap_or_default()
    }
}

/// Calls a function with each file and directory below a directory.
fn for_each_below(dir: &Path, check: &mut impl FnMut(&Path)) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        check(&entry.path());
        if entry.file_type().unwrap().is_dir() {
            for_each_below(&entry.path(), check);
        }
    }
}

/// Asserts that files below the agent's directory contain no secret in plain text, and are accessible to root only.
fn assert_sealed(state: &Path) {
    let mut count = 0;
    for_each_below(&state.join("agent/checkpoint"), &mut |path| {
        let metadata = fs::metadata(path).unwrap();
        let mode = if metadata.is_dir() { 0o700 } else { 0o600 };
        assert_eq!(metadata.permissions().mode() & 0o777, mode, "{}", path.display());
        if metadata.is_file() {
            count += 1;
            let content = fs::read(path).unwrap();
            // hunter2, plain and in base64.
            for secret in ["hunter2", "aHVudGVyMg"] {
                assert!(!String::from_utf8_lossy(&content).contains(secret), "{}", path.display());
            }
        }
    });
    assert!(count >= 8, "{count} records");
}

#[test]
fn pods_are_ready_after_a_boot_without_control_plane() {
    on_a_machine(|machine| {
        let mut nodes = Nodes::control_plane_only(machine, CIDRS, &[]);
        nodes.join_all(1, &[]);
        let kubelet = KubeletClient::new(machine, &nodes);
        create(&nodes);
        let always = pod("always", json!({"containers": [container("c", "Always", "true", "true")]}));
        let doomed = pod("doomed", json!({"containers": [container("c", "IfNotPresent", "true", "true")]}));
        nodes.apply(&always.to_string());
        nodes.apply(&doomed.to_string());
        nodes.kubectl(&["wait", "--for=condition=Ready", "--timeout=120s", "pod/always", "pod/doomed"]);

        power_cut::of_agent(machine, nodes.agent("node-1"), 1);
        // While the node is off, a pod is deleted and a secret changes.
        nodes.kubectl(&["delete", "pod", "doomed", "--wait=false", "--grace-period=1"]);
        nodes.kubectl(&["patch", "secret", "password", "-p", r#"{"stringData":{"word":"hunter2-rotated"}}"#]);
        nodes.stop_plane();
        machine.stop_registry();
        let began = Instant::now();
        nodes.agent("node-1").start();
        let mut local = || ready(&kubelet.pods(nodes.agent("node-1").host().command("curl")));
        let wanted = ["doomed", "environment", "files", "host", "init", "web"];
        let alone =
            eventually("the pods to be Ready", 5, || Some(local()).filter(|pods| names(pods) == wanted));
        eprintln!("from the start of the agent to all Ready, without a control plane: {:?}", began.elapsed());

        nodes.start_plane();
        let synced = eventually("the statuses in the API", 30, || {
            let pods = ready(&nodes.get(&["pods"]));
            Some(pods).filter(|pods| names(pods) == FIVE)
        });
        let kept: Vec<_> = alone.into_iter().filter(|(name, _)| name != "doomed").collect();
        assert_eq!(synced, kept, "a container was created again");
        assert_sealed(&nodes.agent("node-1").path("state"));
        eventually("the deleted pod to be removed", 30, || {
            !nodes.try_kubectl(&["get", "pod", "doomed"]).status.success()
        });
        // imagePullPolicy: Always needs the registry, which is not running.
        eventually("the failed pull of the image", 30, || {
            let always = nodes.get(&["pod", "always"]);
            let reason = &always["status"]["containerStatuses"][0]["state"]["waiting"]["reason"];
            reason == "ErrImagePull" || reason == "ImagePullBackOff"
        });
        eventually("the secret's new value", 60, || {
            let read = nodes.try_kubectl(&["exec", "files", "--", "cat", "/secret/word"]);
            read.stdout == b"hunter2-rotated"
        });
        // After the boot no container restarts: when a later pod is Ready, the other pods have the same containers.
        let later = pod("later", json!({"containers": [container("c", "IfNotPresent", "true", "true")]}));
        nodes.apply(&later.to_string());
        let after = eventually("a later pod", 60, || {
            Some(ready(&nodes.get(&["pods"]))).filter(|pods| names(pods).contains(&"later"))
        });
        let after: Vec<_> = after.into_iter().filter(|(name, _)| name != "later").collect();
        assert_eq!(after, kept, "a container changed after the synchronization");
    });
}

#[test]
fn checkpoint_records_are_removed_with_their_last_pod() {
    on_a_machine(|machine| {
        let mirrors = machine.start_registry();
        let cluster = Cluster::up(machine, &mirrors);
        create(&cluster);
        let dir = machine.path("state/agent/checkpoint");
        // The names of services belong to no pod.
        let names = dir.join("servicenames");
        let count = || {
            let mut count = 0;
            for_each_below(&dir, &mut |path| {
                count += usize::from(path.is_file() && !path.starts_with(&names))
            });
            count
        };
        eventually("the records", 10, || count() >= 10);
        assert_sealed(&machine.path("state"));
        cluster.kubectl(&["delete", "pods", "--all"]);
        eventually("no record", 10, || count() == 0);
    });
}

#[test]
fn pods_are_ready_after_a_boot_of_a_single_process_cluster() {
    on_a_machine(|machine| {
        let mirrors = machine.start_registry();
        let mut cluster = Cluster::up(machine, &mirrors);
        let kubelet = KubeletClient::new(machine, &cluster);
        create(&cluster);
        let before = ready(&cluster.get(&["pods"]));
        power_cut::of_cluster(machine, &mut cluster);
        machine.stop_registry();
        let began = Instant::now();
        cluster.start();
        let local = || ready(&kubelet.pods(Command::new("curl")));
        let after =
            eventually("the pods to be Ready", 5, || Some(local()).filter(|pods| names(pods) == FIVE));
        eprintln!("from the start of the process to all Ready: {:?}", began.elapsed());
        assert!(
            after.iter().zip(&before).all(|(after, before)| after.1 != before.1),
            "these are new containers"
        );
        eventually("the statuses in the API", 30, || ready(&cluster.get(&["pods"])) == after);
    });
}

#[test]
fn a_node_killed_while_it_writes_boots_without_control_plane() {
    on_a_machine(|machine| {
        let mut nodes = Nodes::control_plane_only(machine, CIDRS, &[]);
        nodes.join_all(1, &[]);
        let kubelet = KubeletClient::new(machine, &nodes);
        create(&nodes);
        for round in 0..6 {
            for number in 0..4 {
                let data =
                    json!({"data": {"more": "x".repeat(100_000), "round": format!("{round}.{number}")}});
                nodes.kubectl(&["patch", "configmap", "settings", "-p", &data.to_string()]);
            }
            std::thread::sleep(Duration::from_millis(round * 3));
            nodes.agent("node-1").end(Signal::SIGKILL);
            nodes.agent("node-1").start();
        }
        power_cut::of_agent(machine, nodes.agent("node-1"), 1);
        // A power cut may leave a partly written file and a damaged record of an object that the API server still has.
        let dir = nodes.agent("node-1").path("state/agent/checkpoint");
        fs::write(dir.join("secrets/0123.tmp"), "half").unwrap();
        fs::write(dir.join("pods/0123.sealed"), "torn").unwrap();
        // Packets are dropped without a reply, so that each request waits for its timeout.
        nodes.agent("node-1").host().disconnect();
        machine.stop_registry();
        let began = Instant::now();
        nodes.agent("node-1").start();
        let mut local = || ready(&kubelet.pods(nodes.agent("node-1").host().command("curl")));
        eventually("the pods to be Ready", 5, || Some(local()).filter(|pods| names(pods) == FIVE));
        eprintln!("from the start of the agent to all Ready, with packets lost: {:?}", began.elapsed());
        assert!(!dir.join("secrets/0123.tmp").exists() && dir.join("pods/0123.bad").exists());
        let log = nodes.agent("node-1").log();
        assert_eq!(
            log.matches("renaming an unreadable checkpoint record").count(),
            1,
            "only the incomplete record"
        );
    });
}

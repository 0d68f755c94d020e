//! Joining: bootstrap tokens, certificates and their renewal, permissions of nodes, and nodes that stop renewing their
//! lease and recover.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::disallowed_methods,
    clippy::print_stderr,
    reason = "a test panics, waits and prints measurements"
)]

use std::fs;
use std::time::Instant;

use coracle_integration::{Nodes, eventually, has_condition, on_a_machine, stderr};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

const CIDRS: &str = "10.42.0.0/16";

fn words(line: &str) -> Vec<String> {
    line.split_whitespace().map(str::to_owned).collect()
}

/// The status of a condition of a node.
fn condition(nodes: &Nodes, node: &str, type_: &str) -> String {
    let node = nodes.get(&["node", node]);
    let conditions = node["status"]["conditions"].as_array().cloned().unwrap_or_default();
    let found = conditions.iter().find(|condition| condition["type"] == type_);
    found.map_or_else(String::new, |found| found["status"].as_str().unwrap().to_owned())
}

/// Taints of a node as `key:effect`, without the domain.
fn taints(nodes: &Nodes, node: &str) -> Vec<String> {
    let node = nodes.get(&["node", node]);
    let list = node["spec"]["taints"].as_array().cloned().unwrap_or_default();
    let mut found: Vec<String> = list
        .iter()
        .map(|taint| {
            let key = taint["key"].as_str().unwrap().rsplit('/').next().unwrap();
            format!("{key}:{}", taint["effect"].as_str().unwrap())
        })
        .collect();
    found.sort();
    found
}

/// Name and node of each Ready pod without deletionTimestamp.
fn ready_pods(nodes: &Nodes) -> Vec<(String, String)> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let pods = nodes.ready_pods(&[]);
    pods.iter().map(|pod| (text(&pod["metadata"]["name"]), text(&pod["spec"]["nodeName"]))).collect()
}

/// Waits until a joined node has both certificates. A node may be Ready before it requests its serving certificate.
fn has_joined(nodes: &mut Nodes, node: &str) {
    let serving = nodes.agent(node).path("state/join/serving.pem");
    eventually("the serving certificate", 20, || serving.exists());
}

/// Toleration of NoExecute taints with the key. It has no end if `seconds` is null.
fn toleration(key: &str, seconds: impl Into<Value>) -> Value {
    let seconds: Value = seconds.into();
    json!({"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": seconds})
}

/// A deployment whose pods tolerate a lost node for ten seconds, and the taint `marker` without end.
fn deployment(replicas: usize) -> String {
    let tolerations = [
        toleration("node.kubernetes.io/not-ready", 10),
        toleration("node.kubernetes.io/unreachable", 10),
        toleration("marker", Value::Null),
    ];
    json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "d"}, "spec": {
        "replicas": replicas, "selector": {"matchLabels": {"app": "d"}},
        "template": {"metadata": {"labels": {"app": "d"}}, "spec": {
            "terminationGracePeriodSeconds": 1, "tolerations": tolerations,
            "containers": [{"name": "c", "image": "busybox", "command": ["sh", "-c", "echo hello; sleep 100000"]}]}},
    }})
    .to_string()
}

/// A pod on node-1 that tolerates the taint `marker` longer than the deployment's pods tolerate a lost node.
fn marker() -> String {
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "marker"}, "spec": {
        "nodeName": "node-1", "terminationGracePeriodSeconds": 1, "tolerations": [toleration("marker", 12)],
        "containers": [{"name": "c", "image": "busybox", "command": ["sh", "-c", "sleep 100000"]}]}})
    .to_string()
}

/// Creates the deployment and waits until a pod is Ready on each of two nodes.
fn a_pod_on_each(nodes: &Nodes) -> Vec<(String, String)> {
    nodes.apply(&deployment(2));
    eventually("pods on both nodes", 60, || {
        let pods = ready_pods(nodes);
        (pods.len() == 2 && pods[0].1 != pods[1].1).then_some(pods)
    })
}

#[test]
fn a_machine_joins_with_one_command_and_restarts_without_it() {
    on_a_machine(|machine| {
        let mut nodes = Nodes::control_plane_only(machine, CIDRS, &[]);
        let command = nodes.token(&["create", "--ttl", "1h", "--reusable"]);
        assert!(command.starts_with("coracle agent --join https://192.0.2.2:6443 --token "), "{command}");
        let id = command.split_whitespace().nth(5).unwrap().split('.').next().unwrap().to_owned();
        let list = nodes.token(&["list"]);
        assert!(list.contains(&id) && list.contains("59m") && !list.contains(&command), "{list}");
        let began = Instant::now();
        nodes.join(1, &command, &[]);
        nodes.wait_ready();
        eprintln!("from the command to Ready: {:?}", began.elapsed());
        let requests = nodes.get(&["csr"]);
        let signers: Vec<&str> = requests["items"]
            .as_array()
            .unwrap()
            .iter()
            .map(|r| r["spec"]["signerName"].as_str().unwrap())
            .collect();
        assert!(signers.contains(&"kubernetes.io/kube-apiserver-client-kubelet"), "{signers:?}");
        // A reusable token is valid for any number of machines until it expires.
        nodes.join(2, &command, &[]);
        nodes.wait_ready();
        let pods = a_pod_on_each(&nodes);
        for (name, node) in &pods {
            // The API server connects to the kubelet API, whose certificate the cluster issued.
            eventually(&format!("the log of {name} on {node}"), 20, || {
                let output = nodes.try_kubectl(&["logs", name]);
                output.stdout == b"hello\n"
            });
        }
        nodes.token(&["delete", &id]);
        assert!(!nodes.token(&["list"]).contains(&id));
        nodes.agent("node-1").end(Signal::SIGKILL);
        nodes.agent("node-1").start();
        nodes.kubectl(&["scale", "deployment", "d", "--replicas=4"]);
        eventually("pods on the node that came back", 60, || {
            let on = ready_pods(&nodes).iter().filter(|(_, node)| node == "node-1").count();
            on == 2
        });
        let names: Vec<String> = ready_pods(&nodes).into_iter().map(|(name, _)| name).collect();
        assert!(pods.iter().all(|(name, _)| names.contains(name)), "the first pods ran on: {names:?}");
    });
}

#[test]
fn a_refused_join_reports_the_cause_and_leaves_nothing() {
    on_a_machine(|machine| {
        let mut nodes = Nodes::control_plane_only(machine, CIDRS, &[]);
        let good = nodes.join_all(1, &[]);
        has_joined(&mut nodes, "node-1");
        let good = words(&good)[2..].join(" ");
        let (token, hash) = (words(&good)[3].clone(), words(&good)[5].clone());
        let short = words(&nodes.token(&["create", "--ttl", "1s"]))[5].clone();
        eventually("the token to expire", 10, || {
            let list = nodes.token(&["list"]);
            !list.contains(&short[..6])
        });
        let deleted = words(&nodes.token(&["create"]))[5].clone();
        nodes.token(&["delete", &deleted]);
        let before = nodes.get(&["csr"])["items"].as_array().unwrap().len();
        let other_secret = format!("{}.{}", &token[..6], "0123456789abcdef");
        let other_hash = format!("sha256:{}", "00".repeat(32));
        for (arguments, expected) in [
            (good.replace(&token, &other_secret), "is wrong"),
            (good.replace(&token, "aaaaaa.0123456789abcdef"), "does not know the token aaaaaa"),
            (good.replace(&token, &short), "does not know the token"),
            (good.replace(&token, &deleted), "does not know the token"),
            (good.replace(&token, "nonsense"), "not of the form id.secret"),
            (good.replace(&hash, &other_hash), "is another cluster"),
            (good.replace(&hash, "sha256:12"), "not of the form sha256:"),
            (good.replace("https://", "http://"), "not of the form https://HOST:PORT"),
            (good.replace(":6443", ":6444"), "cannot reach the control plane"),
            (format!("{good} --node-name node-1"), "node-1 exists already and is Ready"),
            (String::new(), "has not joined a cluster"),
        ] {
            let (output, left) = nodes.try_agent(9, &words(&arguments));
            let errors = stderr(&output);
            assert!(!output.status.success() && errors.contains(expected), "{arguments}: {errors}");
            assert_eq!(output.status.code() == Some(78), arguments.is_empty(), "{:?}", output.status);
            assert_eq!(left, Vec::<String>::new(), "{arguments}");
        }
        assert_eq!(
            nodes.get(&["csr"])["items"].as_array().unwrap().len(),
            before,
            "the number of CertificateSigningRequests changed"
        );
        assert_eq!(nodes.get(&["nodes"])["items"].as_array().unwrap().len(), 1);
    });
}

#[test]
fn a_single_use_token_lets_the_same_machine_join_again() {
    on_a_machine(|machine| {
        let mut nodes = Nodes::control_plane_only(machine, CIDRS, &["--node-monitor-grace-seconds", "10"]);
        let command = nodes.token(&["create"]);
        let id = words(&command)[5][..6].to_owned();
        let machines = |nodes: &Nodes| {
            let list = nodes.token(&["list"]);
            list.lines().find(|line| line.starts_with(&id)).unwrap().trim_end().to_owned()
        };
        assert!(machines(&nodes).ends_with(" one"), "{}", machines(&nodes));
        nodes.join(1, &command, &["--node-lease-seconds", "4"]);
        nodes.wait_ready();
        has_joined(&mut nodes, "node-1");
        assert!(machines(&nodes).ends_with(" used by node-1"), "{}", machines(&nodes));
        let requests = |nodes: &Nodes| nodes.get(&["csr"])["items"].as_array().unwrap().len();
        let before = requests(&nodes);
        let (output, left) = nodes.try_agent(2, &words(&command)[2..]);
        let expected = format!(
            "token {id} is for one machine only, and node node-1 has used it; create another with `coracle token create`"
        );
        assert!(!output.status.success() && stderr(&output).contains(&expected), "{}", stderr(&output));
        assert_eq!(left, Vec::<String>::new());
        assert_eq!((requests(&nodes), nodes.get(&["nodes"])["items"].as_array().unwrap().len()), (before, 1));
        // The same machine loses its state directory and joins again.
        nodes.agent("node-1").end(Signal::SIGKILL);
        fs::remove_dir_all(nodes.agent("node-1").path("state")).unwrap();
        eventually("the node to be Unknown", 15, || condition(&nodes, "node-1", "Ready") == "Unknown");
        nodes.agent("node-1").join(&command);
        nodes.wait_ready();
    });
}

#[test]
fn one_of_two_machines_with_a_single_use_token_joins() {
    on_a_machine(|machine| {
        let mut nodes = Nodes::control_plane_only(machine, CIDRS, &[]);
        let command = nodes.token(&["create"]);
        for number in [1, 2] {
            nodes.join(number, &command, &[]);
        }
        let (first, late) = eventually("the second machine to be refused", 20, || {
            let is_refused = |agent: &str, of: &str| {
                let expected = format!("is for one machine only, and node {of} has used it");
                let all = nodes.agents().iter();
                all.filter(|known| known.name() == agent).any(|known| known.log().contains(&expected))
            };
            [("node-1", "node-2"), ("node-2", "node-1")]
                .into_iter()
                .find(|(first, late)| is_refused(late, first))
        });
        assert!(!nodes.agent(late).path("state/join").exists());
        nodes.remove(late);
        nodes.wait_ready();
        let all = nodes.get(&["nodes"]);
        assert_eq!(all["items"].as_array().map(Vec::len), Some(1), "{first} alone: {all}");
    });
}

/// kubectl arguments of requests that the API server refuses for node-1, each with its error. POD is replaced by a pod of
/// node-2.
const FORBIDDEN: &[(&str, &str)] = &[
    ("get secret foreign", "cannot get resource \"secrets\""),
    ("get secrets -A", "cannot list resource \"secrets\""),
    ("get pod POD", "cannot get resource \"pods\""),
    ("patch pod POD --subresource=status --type=merge -p {\"status\":{\"phase\":\"Failed\"}}", "forbidden"),
    ("delete pod POD", "can only delete pods with spec.nodeName set to itself"),
    ("label node node-2 a=b", "is not allowed to modify node \"node-2\""),
    (
        "patch node node-2 --subresource=status -p {\"status\":{\"phase\":\"x\"}}",
        "is not allowed to modify node \"node-2\"",
    ),
    ("label node node-1 node-role.kubernetes.io/x=", "is not allowed to modify labels"),
    ("taint node node-1 a=b:NoSchedule", "is not allowed to modify taints"),
    ("delete node node-1", "cannot delete resource \"nodes\""),
    ("create -f -", "can only create a node CSR with CN=system:node:node-1"),
    ("create token default", "node requested token not bound to a pod"),
];

#[test]
fn a_joined_node_keeps_its_identity_and_its_permissions() {
    on_a_machine(|machine| {
        let mut nodes = Nodes::control_plane_only(machine, CIDRS, &[]);
        let command = nodes.join_all(2, &[]);
        nodes.kubectl(&["create", "secret", "generic", "foreign", "--from-literal=a=b"]);
        let pods = a_pod_on_each(&nodes);
        let of = |node: &str| pods.iter().find(|(_, on)| on == node).unwrap().0.clone();
        let (own, foreign) = (of("node-1"), of("node-2"));
        let kubeconfig = nodes.agent("node-1").path("state/join/kubeconfig");
        let kubeconfig = kubeconfig.to_str().unwrap().to_owned();
        let as_node = |line: &str, input: &str| {
            let all: Vec<&str> = ["--kubeconfig", &kubeconfig].into_iter().chain(line.split(' ')).collect();
            nodes.kubectl_of("1.37", &all, input)
        };
        for line in ["get node node-1", "get node node-2", &format!("get pod {own}")] {
            assert!(as_node(line, "").status.success(), "{line}");
        }
        let request = signing_request("system:node:node-2");
        for (line, expected) in FORBIDDEN {
            let output = as_node(&line.replace("POD", &foreign), &request);
            let refused = !output.status.success() && stderr(&output).contains(expected);
            assert!(refused, "{line}: {}", stderr(&output));
        }
        assert_eq!(nodes.get(&["pod", &foreign])["status"]["phase"], "Running");
        assert!(!nodes.get(&["csr"]).to_string().contains("foreign-request"));
        refuses_another_identity(&mut nodes, &command);
    });
}

/// A joined machine refuses another node name and another cluster.
fn refuses_another_identity(nodes: &mut Nodes, command: &str) {
    nodes.agent("node-1").end(Signal::SIGTERM);
    let output = nodes.agent("node-1").run_once(&["--node-name", "other"]);
    assert!(
        stderr(&output).contains("has already joined as node node-1, not as other"),
        "{}",
        stderr(&output)
    );
    let other = command.replace(command.trim().rsplit(':').next().unwrap(), &"00".repeat(32));
    let arguments = words(&other)[2..].to_vec();
    let output = nodes.agent("node-1").run_once(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
    assert!(stderr(&output).contains("has already joined the cluster with sha256:"), "{}", stderr(&output));
}

#[test]
fn a_killed_join_is_resumed_by_the_same_command() {
    on_a_machine(|machine| {
        let mut nodes = Nodes::control_plane_only(machine, CIDRS, &["--tls-san", "cluster.example"]);
        let named = |name: &str| {
            nodes.try_kubectl(&["--tls-server-name", name, "get", "--raw", "/readyz"]).status.success()
        };
        assert!(named("cluster.example") && !named("other.example"));
        // The token is in a file. Later starts do not need the file.
        let command = nodes.token(&["create", "--reusable"]);
        let (file, token) = (machine.path("token"), words(&command)[5].clone());
        fs::write(&file, format!("{token}\n")).unwrap();
        let command =
            command.replace(&format!("--token {token}"), &format!("--token-file {}", file.display()));
        for (number, delay) in [(1, 60), (2, 120), (3, 180), (4, 240), (5, 300), (6, 400)] {
            let node = format!("node-{number}");
            nodes.join(number, &command, &[]);
            std::thread::sleep(std::time::Duration::from_millis(delay));
            nodes.agent(&node).end(Signal::SIGKILL);
            nodes.agent(&node).join(&command);
            nodes.wait_ready();
            nodes.remove(&node);
        }
        fs::remove_file(&file).unwrap();
        let output = nodes.try_agent(7, &words(&command)[2..]).0;
        assert!(stderr(&output).contains("cannot read the token from"), "{}", stderr(&output));
    });
}

fn signing_request(user: &str) -> String {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let subject = format!("/O=system:nodes/CN={user}");
    let created = std::process::Command::new("openssl")
        .args([
            "req",
            "-new",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:P-256",
            "-nodes",
            "-subj",
            &subject,
        ])
        .args(["-keyout", &path("key"), "-out", &path("csr")])
        .output()
        .unwrap();
    assert!(created.status.success());
    let output = std::process::Command::new("base64").arg("-w0").arg(path("csr")).output().unwrap();
    json!({"apiVersion": "certificates.k8s.io/v1", "kind": "CertificateSigningRequest",
        "metadata": {"name": "foreign-request"}, "spec": {
            "request": String::from_utf8(output.stdout).unwrap(),
            "signerName": "kubernetes.io/kube-apiserver-client-kubelet",
            "usages": ["digital signature", "client auth"]}})
    .to_string()
}

#[test]
fn certificates_are_renewed_while_the_node_runs() {
    on_a_machine(|machine| {
        let flags = ["--cluster-signing-seconds", "40", "--node-monitor-grace-seconds", "10"];
        let mut nodes = Nodes::control_plane_only(machine, CIDRS, &flags);
        let command = nodes.join_all(1, &["--node-lease-seconds", "4"]);
        has_joined(&mut nodes, "node-1");
        let files = ["client.pem", "serving.pem"]
            .map(|name| nodes.agent("node-1").path(&format!("state/join/{name}")));
        let first: Vec<String> = files.iter().map(|path| fs::read_to_string(path).unwrap()).collect();
        let renewed = |old: &[String]| {
            let now: Vec<String> = files.iter().map(|path| fs::read_to_string(path).unwrap()).collect();
            now.iter().zip(old).all(|(now, old)| now != old).then_some(now)
        };
        let second = eventually("both certificates to be renewed", 60, || renewed(&first));
        eventually("both certificates to be renewed again", 60, || renewed(&second));
        // The first certificates have expired by now: only the new ones can work.
        nodes.apply(&deployment(1));
        let pod = eventually("the pod", 60, || ready_pods(&nodes).pop()).0;
        eventually("its log", 20, || nodes.try_kubectl(&["logs", &pod]).stdout == b"hello\n");
        assert_eq!(condition(&nodes, "node-1", "Ready"), "True");
        // An expired certificate cannot be renewed.
        nodes.agent("node-1").end(Signal::SIGTERM);
        // The certificate is still valid during the second in which it ends.
        let has_expired = "end=$(openssl x509 -noout -enddate -in \"$0\") &&
            [ \"$(date +%s)\" -gt \"$(date -d \"${end#*=}\" +%s)\" ]";
        eventually("the certificate to expire", 60, || {
            std::process::Command::new("sh")
                .args(["-c", has_expired])
                .arg(&files[0])
                .status()
                .unwrap()
                .success()
        });
        let output = nodes.agent("node-1").run_once(&[]);
        assert!(
            stderr(&output).contains("the certificate of node node-1 has expired"),
            "{}",
            stderr(&output)
        );
        // The node can join again with its token, after the cluster has noticed that it is not Ready.
        eventually("the node not to be Ready", 90, || condition(&nodes, "node-1", "Ready") != "True");
        nodes.agent("node-1").join(&command);
        nodes.wait_ready();
    });
}

#[test]
fn certificates_due_during_an_outage_are_renewed_after_it() {
    on_a_machine(|machine| {
        let mut nodes = Nodes::control_plane_only(machine, CIDRS, &["--cluster-signing-seconds", "120"]);
        nodes.join_all(1, &["--node-lease-seconds", "4"]);
        has_joined(&mut nodes, "node-1");
        nodes.apply(&deployment(1));
        let pod = eventually("the pod", 60, || ready_pods(&nodes).pop()).0;
        let pid = nodes.agent("node-1").pid();
        let files = ["client.pem", "serving.pem"]
            .map(|name| nodes.agent("node-1").path(&format!("state/join/{name}")));
        let first = files.clone().map(|path| fs::read_to_string(path).unwrap());
        nodes.stop_plane();
        // Renewal starts after 70 to 90 % of the lifetime; it fails now.
        eventually("both certificates to be due", 150, || {
            let log = nodes.agent("node-1").log();
            let has_requested = |signer| {
                log.lines().any(|line| line.contains("cannot obtain a certificate") && line.contains(signer))
            };
            has_requested("kube-apiserver-client-kubelet") && has_requested("kubelet-serving")
        });
        assert!(!nodes.agent("node-1").log().contains("has expired"));
        nodes.start_plane();
        for (path, old) in files.iter().zip(&first) {
            eventually("another certificate", 60, || fs::read_to_string(path).unwrap() != *old);
        }
        // Everything works after the old certificates have expired.
        for old in &first {
            fs::write(machine.path("old.pem"), old).unwrap();
            let file = machine.path("old.pem").to_str().unwrap().to_owned();
            eventually("the old certificate to expire", 120, || {
                let valid = ["x509", "-noout", "-checkend", "0", "-in", &file];
                let output = std::process::Command::new("openssl").args(valid).output().unwrap();
                output.status.code() == Some(1)
            });
        }
        nodes.kubectl(&["scale", "deployment", "d", "--replicas=2"]);
        eventually("a second pod", 60, || ready_pods(&nodes).len() == 2);
        eventually("the log", 20, || nodes.try_kubectl(&["logs", &pod]).stdout == b"hello\n");
        assert_eq!(condition(&nodes, "node-1", "Ready"), "True");
        assert_eq!(nodes.agent("node-1").pid(), pid);
        let log = nodes.agent("node-1").log();
        assert!(!log.contains("has expired"), "{log}");
    });
}

#[test]
fn a_node_whose_certificate_expires_during_an_outage_reports_what_to_do() {
    on_a_machine(|machine| {
        let flags = ["--cluster-signing-seconds", "40", "--node-monitor-grace-seconds", "10"];
        let mut nodes = Nodes::control_plane_only(machine, CIDRS, &flags);
        let command = nodes.join_all(1, &["--node-lease-seconds", "4"]);
        nodes.stop_plane();
        let message = "the certificate of node node-1 has expired";
        eventually("the certificate to expire", 60, || nodes.agent("node-1").log().contains(message));
        let log = nodes.agent("node-1").log();
        assert!(log.contains("`coracle token create`"), "{log}");
        nodes.start_plane();
        eventually("the node not to be Ready", 90, || condition(&nodes, "node-1", "Ready") != "True");
        nodes.agent("node-1").end(Signal::SIGTERM);
        nodes.agent("node-1").join(&command);
        nodes.wait_ready();
    });
}

#[test]
fn a_node_without_lease_renewals_becomes_unreachable_and_recovers() {
    on_a_machine(|machine| {
        let mut nodes = Nodes::control_plane_only(machine, CIDRS, &["--node-monitor-grace-seconds", "10"]);
        nodes.join_all(2, &["--node-lease-seconds", "4"]);
        for node in ["node-1", "node-2"] {
            eventually("no taint", 10, || taints(&nodes, node).is_empty());
        }
        let pods = a_pod_on_each(&nodes);
        let lost = pods.iter().find(|(_, node)| node == "node-2").unwrap().0.clone();
        nodes.agent("node-2").end(Signal::SIGKILL);
        eventually("the node to be Unknown", 15, || condition(&nodes, "node-2", "Ready") == "Unknown");
        eventually("its taints", 10, || {
            taints(&nodes, "node-2") == ["unreachable:NoExecute", "unreachable:NoSchedule"]
        });
        eventually("a replacement on the other node", 30, || {
            let pods = ready_pods(&nodes);
            pods.len() == 2 && pods.iter().all(|(_, node)| node == "node-1")
        });
        let pod = nodes.get(&["pod", &lost]);
        assert!(pod["metadata"]["deletionTimestamp"].is_string(), "{pod}");
        let conditions = pod["status"]["conditions"].as_array().unwrap();
        assert!(conditions.iter().any(|c| c["reason"] == "DeletionByTaintManager"), "{pod}");
        eventually("its pod not to be Ready", 10, || {
            has_condition(&nodes.get(&["pod", &lost]), "Ready", "False")
        });
        nodes.agent("node-2").start();
        eventually("the node to be Ready", 20, || condition(&nodes, "node-2", "Ready") == "True");
        eventually("no taint", 10, || taints(&nodes, "node-2").is_empty());
        eventually("the evicted pod to be deleted", 20, || {
            !nodes.try_kubectl(&["get", "pod", &lost]).status.success()
        });
        no_eviction_if_all_nodes_are_lost(&mut nodes);
    });
}

/// If all nodes stop renewing their leases, the control plane may be the cause: it evicts no pod of lost nodes.
fn no_eviction_if_all_nodes_are_lost(nodes: &mut Nodes) {
    let before = ready_pods(nodes);
    nodes.apply(&marker());
    eventually("the marker to be Ready", 60, || ready_pods(nodes).iter().any(|(name, _)| name == "marker"));
    for node in ["node-1", "node-2"] {
        nodes.agent(node).pause();
    }
    for node in ["node-1", "node-2"] {
        eventually("the node to be Unknown", 15, || condition(nodes, node, "Ready") == "Unknown");
    }
    // Other pods would be evicted before the marker. So after the eviction of the marker, the list of evicted pods is
    // complete.
    nodes.kubectl(&["taint", "node", "node-1", "marker=1:NoExecute"]);
    let deleted = eventually("the eviction of the marker", 30, || {
        let pods = nodes.get(&["pods"]);
        let pods = pods["items"].as_array().unwrap().iter();
        let deleted = pods.filter(|pod| pod["metadata"]["deletionTimestamp"].is_string());
        let names: Vec<Value> = deleted.map(|pod| pod["metadata"]["name"].clone()).collect();
        names.contains(&"marker".into()).then_some(names)
    });
    assert_eq!(deleted, ["marker"]);
    nodes.kubectl(&["taint", "node", "node-1", "marker-"]);
    for node in ["node-1", "node-2"] {
        nodes.agent(node).resume();
    }
    eventually("both nodes as they were", 30, || {
        let ready = ["node-1", "node-2"].iter().all(|node| taints(nodes, node).is_empty());
        ready && ready_pods(nodes) == before
    });
}

#[test]
fn kubectl_cordons_drains_taints_and_deletes_nodes() {
    on_a_machine(|machine| {
        let mut nodes = Nodes::control_plane_only(machine, CIDRS, &[]);
        nodes.join_all(2, &[]);
        nodes.apply(&deployment(2));
        let all_on = |node: &str| {
            eventually(&format!("all pods on {node}"), 60, || {
                let pods = ready_pods(&nodes);
                pods.len() == 2 && pods.iter().all(|(_, on)| on == node)
            });
        };
        eventually("the pods", 60, || ready_pods(&nodes).len() == 2);
        nodes.kubectl(&["drain", "node-2", "--timeout=300s"]);
        all_on("node-1");
        eventually("only one taint", 10, || taints(&nodes, "node-2") == ["unschedulable:NoSchedule"]);
        nodes.kubectl(&["uncordon", "node-2"]);
        eventually("no taint", 10, || taints(&nodes, "node-2").is_empty());
        nodes.kubectl(&["taint", "node", "node-1", "gone=1:NoExecute"]);
        all_on("node-2");
        nodes.kubectl(&["taint", "node", "node-1", "gone-"]);
        let uid = |nodes: &Nodes| nodes.get(&["node", "node-1"])["metadata"]["uid"].clone();
        let first = uid(&nodes);
        nodes.agent("node-1").end(Signal::SIGTERM);
        nodes.kubectl(&["delete", "node", "node-1"]);
        assert!(!nodes.try_kubectl(&["get", "node", "node-1"]).status.success());
        // Its certificate is still valid: the node registers again.
        nodes.agent("node-1").start();
        nodes.wait_ready();
        assert_ne!(uid(&nodes), first);
    });
}

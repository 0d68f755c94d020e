//! Pods that attack the node's ports, sockets and probes, and servers whose responses the node must not report.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::process::Command;

use coracle_integration::{Cluster, eventually, on_a_cluster, on_a_machine};
use serde_json::{Value, json};

fn create(cluster: &Cluster, name: &str, spec: Value) {
    let mut spec = spec;
    spec["terminationGracePeriodSeconds"] = 0.into();
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec});
    cluster.apply(&pod.to_string());
}

/// Polls the pod's status until `look` returns a value.
fn until<T>(cluster: &Cluster, name: &str, what: &str, look: impl Fn(&Value) -> Option<T>) -> T {
    eventually(&format!("{name}: {what}"), 60, || look(&cluster.get(&["pod", name])["status"]))
}

fn ready(status: &Value) -> Option<()> {
    let conditions = status["conditions"].as_array()?;
    conditions.iter().any(|c| c["type"] == "Ready" && c["status"] == "True").then_some(())
}

fn shell(script: &str) -> Value {
    json!({"name": "c", "image": "busybox", "command": ["sh", "-c", script]})
}

/// In an earlier version, the label gave the sandbox of the second pod to the first pod.
#[test]
fn a_label_with_the_uid_of_another_pod_does_not_take_its_sandbox() {
    on_a_cluster(|_, cluster| {
        create(cluster, "victim", json!({"containers": [shell("sleep 100000")]}));
        let address =
            until(cluster, "victim", "ready", |status| ready(status).map(|()| status["podIP"].clone()));
        let uid = cluster.get(&["pod", "victim"])["metadata"]["uid"].clone();
        let pod = json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "thief", "labels": {"io.kubernetes.pod.uid": uid}},
            "spec": {"terminationGracePeriodSeconds": 0, "containers": [shell("sleep 100000")]},
        });
        cluster.apply(&pod.to_string());
        until(cluster, "thief", "ready", ready);
        let status = cluster.get(&["pod", "victim"])["status"].clone();
        assert_eq!(status["podIP"], address);
        assert_eq!(status["containerStatuses"][0]["restartCount"], 0);
    });
}

#[test]
fn a_host_port_does_not_take_a_port_that_the_node_uses() {
    on_a_cluster(|_, cluster| {
        let sshd = TcpListener::bind("0.0.0.0:2222").unwrap();
        let local = UdpSocket::bind("127.0.0.1:5353").unwrap();
        let with_port = |port: Value| {
            let mut container = shell("sleep 1000");
            container["ports"] = json!([port]);
            json!({"containers": [container]})
        };
        let port = |number: u16| with_port(json!({"containerPort": 80, "hostPort": number}));
        for (name, spec, message) in [
            ("sshd", port(2222), format!("(process {})", std::process::id())),
            (
                "dns",
                with_port(json!({"containerPort": 53, "hostPort": 5353, "protocol": "UDP"})),
                format!("(process {})", std::process::id()),
            ),
            (
                "kubelet",
                port(10250),
                "hostPort 10250/TCP is in use on this node by the kubelet API".to_owned(),
            ),
            // The port of the API server is the last one: without the check, the test loses its API server here.
            ("api", port(6443), "hostPort 6443/TCP is in use on this node by the API server".to_owned()),
        ] {
            create(cluster, name, spec);
            until(cluster, name, "refused", |s| (s["phase"] == "Failed").then_some(()));
            let status = cluster.get(&["pod", name])["status"].clone();
            assert_eq!(status["reason"], "NodePorts", "{status}");
            assert!(status["message"].as_str().unwrap().contains(&message), "{message:?} is not in {status}");
        }
        // The port is free for another protocol or another address.
        let udp = with_port(json!({"containerPort": 80, "hostPort": 2222, "protocol": "UDP"}));
        let other = with_port(
            json!({"containerPort": 53, "hostPort": 5353, "protocol": "UDP", "hostIP": "198.51.100.10"}),
        );
        for (name, spec) in [("udp", udp), ("other", other)] {
            create(cluster, name, spec);
            until(cluster, name, "ready", ready);
        }
        let mut client = TcpStream::connect("198.51.100.10:2222").unwrap();
        client.write_all(b"hello").unwrap();
        let mut text = [0; 5];
        sshd.set_nonblocking(true).unwrap();
        let (mut server, _) = eventually("the connection to the node's process", 10, || sshd.accept());
        server.read_exact(&mut text).unwrap();
        assert_eq!(&text, b"hello");
        drop(local);
    });
}

/// Sets the soft limit of open files of a process.
fn limit_files(pid: u32, soft: &str) {
    let limit = format!("--nofile={soft}:");
    assert!(Command::new("prlimit").args(["--pid", &pid.to_string(), &limit]).status().unwrap().success());
}

/// Number of successful probes of the pod `probed`.
fn successes(cluster: &Cluster, kind: &str) -> Option<u64> {
    let output = cluster.try_kubectl(&["get", "--raw", "/api/v1/nodes/node-1/proxy/metrics/probes"]);
    let text = String::from_utf8_lossy(&output.stdout);
    let parts = ["prober_probe_total{", "pod=\"probed\"", &format!("=\"{kind}\""), "result=\"successful\""];
    let line = text.lines().find(|line| parts.iter().all(|part| line.contains(part)))?;
    line.rsplit(' ').next()?.parse().ok()
}

#[test]
fn a_probe_that_the_node_cannot_execute_does_not_restart_the_pod() {
    on_a_cluster(|machine, cluster| {
        let mut container = shell("exec httpd -f -p 80 -h /etc");
        // A liveness probe before the server listens counts as a failure of the container.
        container["startupProbe"] =
            json!({"tcpSocket": {"port": 80}, "periodSeconds": 1, "failureThreshold": 60});
        container["livenessProbe"] =
            json!({"tcpSocket": {"port": 80}, "periodSeconds": 1, "failureThreshold": 1});
        container["readinessProbe"] =
            json!({"httpGet": {"port": 80, "path": "/passwd"}, "periodSeconds": 1, "failureThreshold": 1});
        create(cluster, "probed", json!({"containers": [container]}));
        until(cluster, "probed", "ready", ready);
        let limits = std::fs::read_to_string(format!("/proc/{}/limits", cluster.pid())).unwrap();
        let line = limits.lines().find(|line| line.starts_with("Max open files")).unwrap();
        let soft = line.split_whitespace().nth(3).unwrap().to_owned();
        // This client connects before the limit of open files is lowered.
        let log = machine.path("events");
        let mut events = cluster.start_with_log(&["get", "events", "--watch"], &log);
        let reported = |text: &str| std::fs::read_to_string(&log).unwrap().contains(text);
        eventually("the events so far", 20, || reported("Started"));
        limit_files(cluster.pid(), "16");
        for kind in ["Liveness", "Readiness"] {
            let text = format!("{kind} probe errored and resulted in unknown state");
            eventually("a probe without a result", 20, || reported(&text));
        }
        limit_files(cluster.pid(), &soft);
        // If the missing results restarted the container, the restart would precede the next results.
        for kind in ["Liveness", "Readiness"] {
            let before = eventually("the metrics of probes", 20, || successes(cluster, kind));
            eventually("later results", 20, || successes(cluster, kind) >= Some(before + 3));
        }
        events.kill().unwrap();
        events.wait().unwrap();
        let status = cluster.get(&["pod", "probed"])["status"].clone();
        assert_eq!(status["containerStatuses"][0]["restartCount"], 0, "{status}");
        assert_eq!(ready(&status), Some(()), "{status}");
    });
}

/// Starts an HTTP server with one response on loopback. Returns its address.
fn serve(answer: impl Fn() -> String + Send + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    std::thread::spawn(move || {
        while let Ok((mut stream, _)) = listener.accept() {
            let mut head = [0; 4096];
            let _ = stream.read(&mut head);
            let _ = stream.write_all(answer().as_bytes());
        }
    });
    address
}

#[test]
fn texts_of_a_token_service_reach_no_event_and_no_status() {
    on_a_cluster(|_, cluster| {
        let body = "AKIA-SECRET\x1b[2J";
        let service = serve(move || {
            format!(
                "HTTP/1.1 403 Forbidden\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
                body.len()
            )
        });
        let realm = format!("http://{service}/latest/meta-data/iam?key=QUERY-SECRET");
        let registry = serve(move || {
            format!(
                "HTTP/1.1 401 Unauthorized\r\nWWW-Authenticate: Bearer realm=\"{realm}\"\r\nContent-Length: 0\r\n\
                 Connection: close\r\n\r\n"
            )
        });
        let container = json!({"name": "c", "image": format!("{registry}/app:1")});
        create(cluster, "p", json!({"containers": [container]}));
        let waits = |s: &Value| {
            let waiting = &s["containerStatuses"][0]["state"]["waiting"];
            waiting["message"].as_str().filter(|m| m.contains("403")).map(str::to_owned)
        };
        let message = until(cluster, "p", "cannot be pulled", waits);
        assert!(!message.contains("SECRET"), "{message}");
        let events = cluster.kubectl(&["get", "events", "-o", "json"]);
        assert!(events.contains("403 Forbidden") && !events.contains("SECRET"), "{events}");
        assert!(!cluster.log().contains("SECRET"));
    });
}

#[test]
fn pods_behave_as_with_the_kubelet() {
    on_a_cluster(|_, cluster| {
        let mut end = shell("printf DONE; exit 1");
        end["terminationMessagePolicy"] = "FallbackToLogsOnError".into();
        create(cluster, "end", json!({"restartPolicy": "Never", "containers": [end]}));
        create(
            cluster,
            "os",
            json!({"os": {"name": "windows"}, "nodeName": "node-1", "containers": [shell("true")]}),
        );
        let mut part = shell("echo mine > /data/file && sleep 1000");
        part["volumeMounts"] = json!([{"name": "v", "mountPath": "/data", "subPath": "a/b"}]);
        part["securityContext"] = json!({"runAsUser": 1000});
        create(cluster, "part", json!({"containers": [part], "volumes": [{"name": "v", "emptyDir": {}}]}));
        let mut hook = shell("sleep 1000");
        hook["lifecycle"] =
            json!({"postStart": {"exec": {"command": ["sh", "-c", "echo HOOK-SECRET; exit 3"]}}});
        create(cluster, "hook", json!({"containers": [hook]}));
        let message = |s: &Value| {
            s["containerStatuses"][0]["state"]["terminated"]["message"].as_str().map(str::to_owned)
        };
        assert_eq!(until(cluster, "end", "ended", message), "DONE", "the message has no line end");
        until(cluster, "os", "refused", |s| (s["reason"] == "PodOSNotSupported").then_some(()));
        until(cluster, "part", "written to its part", ready);
        eventually("the hook's failure", 30, || {
            cluster.kubectl(&["get", "events"]).contains("PostStartHook failed")
        });
        let all = cluster.kubectl(&["get", "events,pods", "-o", "json"]);
        let total = all.matches("HOOK-SECRET").count();
        // The pod's specification occurs in the object and in kubectl's annotation.
        let own = cluster.kubectl(&["get", "pod", "hook", "-o", "jsonpath={.spec}{.metadata}"]);
        assert_eq!(total, own.matches("HOOK-SECRET").count(), "{all}");
    });
}

#[test]
fn a_server_that_listens_early_is_ready_early() {
    on_a_cluster(|_, cluster| {
        let container = |first: &str| {
            let mut container = shell(&format!("{first}; exec httpd -f -p 80 -h /etc"));
            container["readinessProbe"] = json!({"httpGet": {"port": 80, "path": "/passwd"}, "periodSeconds": 3600, "failureThreshold": 1});
            json!({"containers": [container]})
        };
        create(cluster, "warm", container("true"));
        until(cluster, "warm", "ready", ready);
        // The first attempt fails. Without early retries, the next one would be an hour later.
        create(cluster, "slow", container("sleep 1"));
        until(cluster, "slow", "ready", ready);
        let events =
            cluster.get(&["events", "--field-selector", "involvedObject.name=slow,reason=Unhealthy"]);
        let count: i64 = events["items"].as_array().unwrap().iter().filter_map(|e| e["count"].as_i64()).sum();
        assert!(count <= 1, "extra attempts cause no events: {events}");
    });
}

/// Without a limit a fork bomb would use all process ids of the node.
#[test]
fn a_fork_bomb_is_limited_to_the_processes_of_its_pod() {
    on_a_machine(|machine| {
        let mirrors = machine.start_registry();
        let flags = ["--image-gc-high-threshold", "100", "--pod-max-pids", "40"];
        let mut cluster = Cluster::up_with(machine, &mirrors, &flags);
        // A shell that cannot fork exits, so the bomb has its own shell. Its processes stay.
        let bomb = shell(
            "sh -c 'for i in $(seq 200); do sleep 1000 & done' 2>/dev/null; echo done; exec sleep 1000",
        );
        create(&cluster, "bomb", json!({"containers": [bomb], "restartPolicy": "Never"}));
        eventually("the bomb to end", 60, || {
            String::from_utf8_lossy(&cluster.try_kubectl(&["logs", "bomb"]).stdout).contains("done")
        });
        let count = || {
            let of_pod = |path: &std::path::Path| {
                let group = std::fs::read_to_string(path.join("cgroup")).unwrap_or_default();
                group.contains(machine.name()) && group.contains("kubepods")
            };
            std::fs::read_dir("/proc").unwrap().flatten().filter(|process| of_pod(&process.path())).count()
        };
        let count = count();
        assert!((20..=40).contains(&count), "{count} processes");
        cluster.down();
    });
}

/// The other nodes copied each invalid annotation into their own status. After many changes of the annotation, their
/// Node objects were too large for the API server.
#[test]
fn a_huge_overlay_annotation_of_a_stolen_node_leaves_other_nodes_small() {
    const ANNOTATION: usize = 200_000;
    const MAX_NODE: usize = 64 << 10;
    const THIEF: [&str; 3] =
        ["--as=system:node:node-2", "--as-group=system:nodes", "--as-group=system:authenticated"];
    on_a_cluster(|machine, cluster| {
        create(cluster, "before", json!({"containers": [shell("sleep 1000")]}));
        until(cluster, "before", "ready", ready);
        let by_thief = |arguments: &[&str], input: &str| {
            let output = cluster.kubectl_of("1.37", &[arguments, &THIEF].concat(), input);
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        };
        let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "node-2"}});
        by_thief(&["create", "-f", "-"], &node.to_string());
        // A node without a range is not a peer.
        eventually("the pod range of the stolen node", 30, || {
            cluster.get(&["node", "node-2"])["spec"]["podCIDR"].is_string()
        });
        let (file, kind) = (machine.path("patch.json"), "flannel.alpha.coreos.com/backend-type");
        let patch_file = format!("--patch-file={}", file.display());
        for round in 0..3 {
            let text = format!("{round}{}", "x".repeat(ANNOTATION));
            let patch = json!({"metadata": {"annotations": {(kind): text}}});
            std::fs::write(&file, patch.to_string()).unwrap();
            by_thief(&["patch", "node", "node-2", "--type=merge", &patch_file], "");
        }
        let size = || cluster.kubectl(&["get", "--raw", "/api/v1/nodes/node-1"]).len();
        eventually("the fault in the status of the other node", 60, || {
            assert!(size() < MAX_NODE, "{} bytes", size());
            let node = cluster.get(&["node", "node-1"]);
            let conditions = node["status"]["conditions"].as_array()?;
            let impaired = conditions.iter().find(|condition| condition["type"] == "PodNetworkImpaired")?;
            impaired["message"].as_str()?.contains("node-2: its backend").then_some(())
        });
        assert!(size() < MAX_NODE, "{} bytes", size());
        create(cluster, "after", json!({"containers": [shell("sleep 1000")]}));
        until(cluster, "after", "ready", ready);
        let status = cluster.get(&["pod", "before"])["status"].clone();
        assert_eq!(status["containerStatuses"][0]["restartCount"], 0, "{status}");
        assert_eq!(ready(&status), Some(()), "{status}");
    });
}

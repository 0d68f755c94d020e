//! Services and DNS of a node while the control plane or another resolver does not answer.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::process::Command;
use std::time::{Duration, Instant};

use coracle_integration::{Nodes, eventually, has_condition, inside, on_a_machine};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

use crate::power_cut;

const CIDRS: &str = "10.42.0.0/16";
/// The address of cluster DNS.
const DNS: &str = "10.43.0.10";
/// The address of the test on the bridge of all hosts.
const OUTSIDE: &str = "192.0.2.1";

fn pod(name: &str, container: &Value) -> Value {
    let mut container = container.clone();
    (container["name"], container["image"]) = (json!("c"), json!("busybox"));
    container["imagePullPolicy"] = json!("IfNotPresent");
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": {"app": name}},
        "spec": {"terminationGracePeriodSeconds": 0, "containers": [container]}})
}

/// A pod that answers HTTP on port 8080 with its name, and is ready while `/w/ready` exists.
fn server(name: &str) -> Value {
    let script =
        format!("mkdir /w; echo {name} > /w/index.html; touch /w/ready; exec httpd -f -p 8080 -h /w");
    let probe =
        json!({"httpGet": {"path": "/ready", "port": 8080}, "periodSeconds": 1, "failureThreshold": 1});
    let mut pod = pod(name, &json!({"command": ["sh", "-c", script], "readinessProbe": probe}));
    pod["metadata"]["labels"]["app"] = json!("web");
    pod
}

fn service(name: &str, cluster_ip: Option<&str>) -> Value {
    json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": {"selector": {"app": "web"},
        "clusterIP": cluster_ip, "ports": [{"port": 80, "targetPort": 8080}]}})
}

fn client() -> Value {
    pod("client", &json!({"command": ["sleep", "100000"]}))
}

/// Creates the objects and waits until all pods are ready.
fn create(nodes: &Nodes, objects: &[Value]) {
    eventually("the service account", 10, || {
        nodes.try_kubectl(&["get", "serviceaccount", "default"]).status.success()
    });
    nodes.apply(&objects.iter().map(Value::to_string).collect::<Vec<_>>().join("\n---\n"));
    nodes.kubectl(&["wait", "pod", "--all", "--for=condition=Ready", "--timeout=120s"]);
}

/// The pid of a process of the pod.
fn process(nodes: &Nodes, name: &str) -> u32 {
    let uid = nodes.get(&["pod", name])["metadata"]["uid"].as_str().unwrap().to_owned();
    nodes.agents()[0].process_of(&uid).unwrap()
}

/// Runs a script with the network and the files of a process. An exec by the kubelet API would need the control plane.
fn run_in_pod(process: u32, script: &str) -> String {
    let of = |option: &str, kind: &str| format!("--{option}=/proc/{process}/ns/{kind}");
    let mut command = Command::new("nsenter");
    command.args([of("net", "net"), of("mount", "mnt")]).args(["--", "/bin/sh", "-c", script]);
    String::from_utf8(command.output().unwrap().stdout).unwrap()
}

/// The distinct answers to 20 requests, sorted.
fn answers(client: u32, address: &str) -> Vec<String> {
    let request = format!("printf 'GET / HTTP/1.0\\r\\n\\r\\n' | nc -w 5 {address} 80 | tail -1");
    let output = run_in_pod(client, &format!("for i in $(seq 20); do {request}; done"));
    let mut all: Vec<String> = output.lines().map(str::to_owned).collect();
    all.sort();
    all.dedup();
    all
}

/// Number of addresses of a name.
fn addresses(client: u32, name: &str) -> usize {
    let output = run_in_pod(client, &format!("nslookup -type=a {name} 2>&1"));
    output.lines().filter(|line| line.starts_with("Address") && line.contains("10.42.")).count()
}

/// Time without the control plane. `CORACLE_AWAY_SECONDS` sets it, for example to an hour.
fn time_away() -> Duration {
    let seconds = std::env::var("CORACLE_AWAY_SECONDS").ok().and_then(|text| text.parse().ok());
    Duration::from_secs(seconds.unwrap_or(0))
}

#[test]
fn endpoints_that_fail_without_the_control_plane_take_no_traffic() {
    on_a_machine(|machine| {
        let mut nodes = Nodes::up(machine, CIDRS, 1);
        let services = [service("web", None), service("headless", Some("None"))];
        create(&nodes, &[&[server("one"), server("two"), client()][..], &services].concat());
        let web = nodes.get(&["service", "web"])["spec"]["clusterIP"].as_str().unwrap().to_owned();
        let (one, client) = (process(&nodes, "one"), process(&nodes, "client"));
        let ready = format!("/proc/{one}/root/w/ready");
        let name = "headless.default.svc.cluster.local";
        let have = |what: &str, wanted: &[&str]| {
            eventually(what, 60, || {
                answers(client, &web) == wanted && addresses(client, name) == wanted.len()
            });
        };
        have("both endpoints", &["one", "two"]);
        nodes.stop_plane();
        let begun = Instant::now();
        loop {
            fs::remove_file(&ready).unwrap();
            have("the other endpoint alone", &["two"]);
            fs::write(&ready, "").unwrap();
            have("both endpoints again", &["one", "two"]);
            if begun.elapsed() >= time_away() {
                break;
            }
            std::thread::sleep(Duration::from_secs(20));
        }
        // The node uses its own result of the probe before it can report the failure to the API server.
        fs::remove_file(&ready).unwrap();
        have("the other endpoint alone, again", &["two"]);
        nodes.start_plane();
        eventually("the status in the API", 60, || {
            has_condition(&nodes.get(&["pod", "one"]), "Ready", "False")
        });
        have("the other endpoint alone, with the control plane", &["two"]);
        fs::write(&ready, "").unwrap();
        have("both endpoints, with the control plane", &["one", "two"]);
    });
}

/// Upstream's kube-proxy and CoreDNS use such a pod until the endpoint slice controller removes it.
#[test]
fn a_pod_that_is_killed_without_the_control_plane_takes_no_traffic() {
    on_a_machine(|machine| {
        let mut nodes = Nodes::up(machine, CIDRS, 1);
        let mut one = server("one");
        one["spec"]["restartPolicy"] = json!("Never");
        create(
            &nodes,
            &[one, server("two"), client(), service("web", None), service("headless", Some("None"))],
        );
        let web = nodes.get(&["service", "web"])["spec"]["clusterIP"].as_str().unwrap().to_owned();
        let uid = nodes.get(&["pod", "one"])["metadata"]["uid"].as_str().unwrap().to_owned();
        let client = process(&nodes, "client");
        let have = |what: &str, wanted: &[&str]| {
            eventually(what, 60, || {
                let name = "headless.default.svc.cluster.local";
                answers(client, &web) == wanted && addresses(client, name) == wanted.len()
            });
        };
        have("both endpoints", &["one", "two"]);
        nodes.stop_plane();
        eventually("the end of all processes of the pod", 30, || {
            let process = nodes.agents()[0].process_of(&uid);
            if let Some(process) = process {
                kill(Pid::from_raw(i32::try_from(process).unwrap()), Signal::SIGKILL).ok();
            }
            process.is_none()
        });
        have("the other endpoint alone", &["two"]);
        nodes.start_plane();
        eventually("the phase in the API", 60, || nodes.get(&["pod", "one"])["status"]["phase"] == "Failed");
        have("the other endpoint alone, with the control plane", &["two"]);
    });
}

#[test]
fn services_are_reachable_after_a_boot_without_control_plane() {
    on_a_machine(|machine| {
        let mut nodes = Nodes::control_plane_only(machine, CIDRS, &[]);
        nodes.add(1, &["--network-policy=true"]);
        nodes.wait_ready();
        let from = json!([{"podSelector": {"matchLabels": {"app": "client"}}}]);
        let spec = json!({"podSelector": {"matchLabels": {"app": "web"}}, "policyTypes": ["Ingress"],
            "ingress": [{"from": from, "ports": [{"port": 8080}]}]});
        let policy = json!({"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
            "metadata": {"name": "for-clients"}, "spec": spec});
        let others = [policy, service("web", None), service("headless", Some("None"))];
        create(&nodes, &[&[server("one"), server("two"), client()][..], &others].concat());
        let web = nodes.get(&["service", "web"])["spec"]["clusterIP"].as_str().unwrap().to_owned();
        let uid = nodes.get(&["pod", "client"])["metadata"]["uid"].as_str().unwrap().to_owned();
        let reached = |nodes: &Nodes, what: &str| {
            eventually(what, 60, || {
                let Some(client) = nodes.agents()[0].process_of(&uid) else { return false };
                let name = "headless.default.svc.cluster.local";
                answers(client, &web) == ["one", "two"] && addresses(client, name) == 2
            });
        };
        reached(&nodes, "both endpoints");
        let record = nodes.agents()[0].path("state/network-policies-of-pods.json");
        eventually("the record of the policies", 30, || {
            fs::read_to_string(&record).is_ok_and(|text| text.contains("for-clients"))
        });
        // When the agent ends, it writes the endpoints that are not stored yet. The boot then removes the pods and the
        // kernel's tables.
        nodes.agent("node-1").end(Signal::SIGTERM);
        power_cut::of_agent(machine, nodes.agent("node-1"), 1);
        let flushed = nodes.agents()[0].host().command("nft").args(["flush", "ruleset"]).status().unwrap();
        assert!(flushed.success());
        nodes.stop_plane();
        nodes.agent("node-1").start();
        reached(&nodes, "both endpoints after the boot");
        nodes.start_plane();
        nodes.wait_ready();
        reached(&nodes, "both endpoints with the control plane");
    });
}

/// A query for the addresses of a name (RFC 1035, section 4).
fn query(id: u16, name: &str) -> Vec<u8> {
    let mut query = [&id.to_be_bytes()[..], &[1, 0, 0, 1, 0, 0, 0, 0, 0, 0]].concat();
    for label in name.split('.') {
        query.push(u8::try_from(label.len()).unwrap());
        query.extend(label.as_bytes());
    }
    query.extend([0, 0, 1, 0, 1]);
    query
}

/// Whether the name gets an answer with records. Other answers to the socket are ignored.
fn is_resolved(socket: &UdpSocket, id: u16, name: &str) -> bool {
    socket.send(&query(id, name)).unwrap();
    let mut answer = [0; 512];
    while socket.recv(&mut answer).is_ok() {
        if answer[..2] == id.to_be_bytes() {
            return answer[3] & 15 == 0 && answer[6..8] != [0, 0];
        }
    }
    false
}

#[test]
fn names_of_the_cluster_are_resolved_while_another_resolver_hangs() {
    on_a_machine(|machine| {
        let mut nodes = Nodes::control_plane_only(machine, CIDRS, &[]);
        let hanging = UdpSocket::bind((OUTSIDE, 53)).unwrap();
        hanging.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        let resolv_conf = machine.path("hanging.conf");
        fs::write(&resolv_conf, format!("nameserver {OUTSIDE}\n")).unwrap();
        nodes.add(1, &["--resolv-conf", resolv_conf.to_str().unwrap()]);
        nodes.wait_ready();
        create(&nodes, &[client(), service("web", None)]);
        inside(process(&nodes, "client"), || {
            let socket = UdpSocket::bind(("0.0.0.0", 0)).unwrap();
            socket.connect((DNS, 53)).unwrap();
            socket.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
            // Queries more names than one client may have pending.
            for number in 0..300 {
                socket.send(&query(number, &format!("n{number}.example.com"))).unwrap();
            }
            eventually("a name of the cluster", 20, || {
                is_resolved(&socket, 1000, "web.default.svc.cluster.local")
            });
        });
        hanging.recv(&mut [0; 512]).expect("a query to the resolver");
    });
}

/// Whether cluster DNS replies to a query by UDP and by TCP. `None` if the TCP connection fails: this client has no route
/// yet. With a route the connection succeeds, also for clients that get no reply.
fn replies() -> Option<[bool; 2]> {
    let question = query(1, "web.default.svc.cluster.local");
    let socket = UdpSocket::bind(("0.0.0.0", 0)).unwrap();
    socket.connect((DNS, 53)).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
    socket.send(&question).unwrap();
    let by_udp = socket.recv(&mut [0; 512]).is_ok();
    let address: SocketAddr = format!("{DNS}:53").parse().unwrap();
    let mut stream = TcpStream::connect_timeout(&address, Duration::from_secs(5)).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    let length = u16::try_from(question.len()).unwrap().to_be_bytes();
    stream.write_all(&[&length[..], &question].concat()).ok();
    Some([by_udp, stream.read(&mut [0; 512]).is_ok_and(|count| count > 0)])
}

#[test]
fn cluster_dns_replies_to_pods_and_the_node_only() {
    on_a_machine(|machine| {
        let nodes = Nodes::up(machine, CIDRS, 1);
        create(&nodes, &[client(), service("web", None)]);
        let node = &nodes.agents()[0];
        inside(process(&nodes, "client"), || {
            eventually("the replies to a pod", 20, || replies() == Some([true, true]));
        });
        inside(node.pid(), || {
            eventually("the replies to a process of the node", 20, || replies() == Some([true, true]));
        });
        // Replies to other machines would allow amplification: a client with a forged address directs them at a victim.
        let route = ["route", "add", &format!("{DNS}/32"), "via", &node.host().address()].map(str::to_owned);
        assert!(Command::new("ip").args(route).status().unwrap().success());
        assert_eq!(replies(), Some([false, false]), "another machine");
    });
}

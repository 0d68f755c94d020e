//! Pods, and packets between them. The test itself sends and receives the packets, in the pods' network namespaces.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::process::Command;
use std::time::Duration;

use coracle_integration::{Nodes, eventually, inside, within};
use serde_json::Value;

/// A Ready pod.
#[derive(Clone, Debug)]
pub(crate) struct Pod {
    pub(crate) node: String,
    pub(crate) ips: Vec<String>,
    /// A process in the pod's network namespace.
    pub(crate) process: u32,
}

impl Pod {
    /// MTU of the pod's interface.
    pub(crate) fn mtu(&self) -> usize {
        let netns = format!("--net=/proc/{}/ns/net", self.process);
        let output =
            Command::new("nsenter").args([&netns, "ip", "-j", "link", "show", "eth0"]).output().unwrap();
        let links: Value = serde_json::from_slice(&output.stdout).unwrap();
        usize::try_from(links[0]["mtu"].as_u64().unwrap()).unwrap()
    }
}

fn ready_pods(nodes: &Nodes) -> Vec<Pod> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let pod = |pod: &Value| Pod {
        node: text(&pod["spec"]["nodeName"]),
        ips: pod["status"]["podIPs"].as_array().unwrap().iter().map(|ip| text(&ip["ip"])).collect(),
        process: process(nodes, &text(&pod["metadata"]["uid"])),
    };
    nodes.ready_pods(&[]).iter().map(pod).collect()
}

/// Creates an nginx deployment with `count` pods, which must be spread over all nodes.
pub(crate) fn with_nginx(nodes: &Nodes, count: usize) -> Vec<Pod> {
    nodes.kubectl(&["create", "deployment", "nginx", "--image=nginx", &format!("--replicas={count}")]);
    let pods = eventually("the pods", 60, || {
        let pods = ready_pods(nodes);
        (pods.len() == count).then_some(pods)
    });
    let on: BTreeSet<&str> = pods.iter().map(|pod| pod.node.as_str()).collect();
    assert_eq!(on.len(), count.min(nodes.agents().len()), "the pods are spread over the nodes: {on:?}");
    let cidrs = nodes.get(&["nodes"])["items"][0]["spec"]["podCIDRs"].as_array().unwrap().len();
    assert!(pods.iter().all(|pod| pod.ips.len() == cidrs), "an address of each family: {pods:?}");
    pods
}

/// A process in the pod's network namespace.
fn process(nodes: &Nodes, uid: &str) -> u32 {
    let found = nodes.agents().iter().find_map(|agent| agent.process_of(uid));
    found.unwrap_or_else(|| panic!("no process of the pod {uid}"))
}

/// A socket of the pod on which a thread answers every datagram.
fn answer(pod: &Pod, ip: &str) -> UdpSocket {
    inside(pod.process, || UdpSocket::bind((ip, 7)).unwrap())
}

/// Whether a datagram of `bytes` bytes with headers returns from the pod at address `to`. `from` is a process in the
/// sender's network namespace.
fn echoes(from: u32, to: &str, bytes: usize) -> bool {
    let to: IpAddr = to.parse().unwrap();
    let (any, headers) = if to.is_ipv4() { ("0.0.0.0", 28) } else { ("::", 48) };
    inside(from, || {
        let socket = UdpSocket::bind((any, 0)).unwrap();
        socket.connect(SocketAddr::new(to, 7)).unwrap();
        socket.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
        let (packet, mut answer) = (vec![7; bytes - headers], vec![0; 65536]);
        socket.send(&packet).is_ok() && socket.recv(&mut answer).is_ok_and(|length| length == packet.len())
    })
}

/// Time limit for slow machines: neighbour solicitations are repeated after a second, and a node probes its peers again
/// after a change of its uplink.
const LONG: Duration = Duration::from_secs(60);

/// Whether a pod reaches the pod at address `to`.
pub(crate) fn reaches(nodes: &Nodes, from: &Pod, to: &str, bytes: usize) -> bool {
    reaches_within(10, nodes, from, to, bytes)
}

/// Like [`reaches`], with the seconds of [`within`].
pub(crate) fn reaches_within(seconds: u64, nodes: &Nodes, from: &Pod, to: &str, bytes: usize) -> bool {
    let pods = ready_pods(nodes);
    let there = pods.iter().find(|pod| pod.ips.iter().any(|ip| ip == to)).unwrap();
    let _answering = EchoThreads::start(std::slice::from_ref(there));
    within(seconds, || echoes(from.process, to, bytes)).is_some()
}

/// Threads that echo UDP and TCP data in all pods until this value is dropped.
struct EchoThreads {
    stop: std::sync::Arc<std::sync::atomic::AtomicBool>,
    threads: Vec<std::thread::JoinHandle<()>>,
}

impl EchoThreads {
    fn start(pods: &[Pod]) -> Self {
        let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
        let mut threads = Vec::new();
        for pod in pods {
            for ip in &pod.ips {
                let socket = answer(pod, ip);
                socket.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
                let stopped = stop.clone();
                threads.push(std::thread::spawn(move || {
                    let mut buffer = vec![0; 65536];
                    while !stopped.load(std::sync::atomic::Ordering::Relaxed) {
                        if let Ok((length, from)) = socket.recv_from(&mut buffer) {
                            socket.send_to(&buffer[..length], from).ok();
                        }
                    }
                }));
            }
        }
        Self { stop, threads }
    }
}

impl Drop for EchoThreads {
    fn drop(&mut self) {
        self.stop.store(true, std::sync::atomic::Ordering::Relaxed);
        self.threads.drain(..).for_each(|thread| drop(thread.join()));
    }
}

/// Asserts that every pod and every node reaches every pod: with small packets, with packets of `mtu` bytes and with a
/// TCP stream.
pub(crate) fn all_reach_all(nodes: &Nodes, pods: &[Pod], mtu: usize) {
    let hosts: Vec<_> =
        nodes.agents().iter().map(|agent| (agent.name().to_owned(), agent.host().pid())).collect();
    hosts_and_pods_reach_pods(&hosts, pods, mtu);
}

/// Like [`all_reach_all`], for any hosts. Each host is a name and a process in the host's network namespace.
pub(crate) fn hosts_and_pods_reach_pods(hosts: &[(String, u32)], pods: &[Pod], mtu: usize) {
    let answering = EchoThreads::start(pods);
    let from_pods = pods.iter().map(|pod| (format!("the pod of {}", pod.node), pod.process));
    for (name, from) in from_pods.chain(hosts.iter().cloned()) {
        for (to, ip) in pods.iter().flat_map(|pod| pod.ips.iter().map(move |ip| (pod, ip))) {
            for bytes in [64, mtu] {
                let what = format!("{name} to reach {ip} on {} with {bytes} bytes", to.node);
                eventually(&what, 10, || echoes(from, ip, bytes));
            }
        }
    }
    drop(answering);
    for (from, to) in pods.iter().zip(pods.iter().cycle().skip(1)) {
        for ip in &to.ips {
            stream(from, to, ip);
        }
    }
}

/// Sends a megabyte from one pod to another and checks its length.
pub(crate) fn stream(from: &Pod, to: &Pod, ip: &str) {
    const LENGTH: usize = 1 << 20;
    let listener = inside(to.process, || TcpListener::bind((ip, 8)).unwrap());
    let sent = std::thread::spawn({
        let (from, ip) = (from.process, ip.to_owned());
        move || {
            let mut stream = inside(from, || {
                let to = SocketAddr::new(ip.parse().unwrap(), 8);
                TcpStream::connect_timeout(&to, LONG).unwrap()
            });
            stream.set_write_timeout(Some(LONG)).unwrap();
            stream.write_all(&vec![7; LENGTH]).unwrap();
        }
    });
    listener.set_nonblocking(true).unwrap();
    let (mut stream, _) = eventually("the connection", 10, || listener.accept());
    stream.set_read_timeout(Some(LONG)).unwrap();
    let mut got = Vec::new();
    stream.read_to_end(&mut got).unwrap_or_else(|e| panic!("{ip}: {e} after {} bytes", got.len()));
    assert_eq!(got.len(), LENGTH, "{} to {ip}", from.node);
    sent.join().unwrap();
}

/// Accepts connections of both families on port 8088 of the pod. The server of the image accepts IPv4 only.
pub(crate) fn accept_on_port_8088(pod: &Pod) {
    let listener = inside(pod.process, || TcpListener::bind("[::]:8088").unwrap());
    std::thread::spawn(move || listener.incoming().for_each(drop));
}

/// The source address that `to` sees when `from` sends a datagram to `ip`. Repeats, because datagrams may be lost.
pub(crate) fn source_address(from: &Pod, to: &Pod, ip: &str) -> String {
    let socket = inside(to.process, || UdpSocket::bind((ip, 9)).unwrap());
    socket.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
    let any = if ip.contains(':') { "::" } else { "0.0.0.0" };
    let calling = inside(from.process, || UdpSocket::bind((any, 0)).unwrap());
    let mut buffer = [0; 16];
    eventually(&format!("a datagram to reach {ip}"), 10, || {
        let sent = calling.send_to(b"who", (ip, 9));
        let received = socket.recv_from(&mut buffer);
        received.map(|(_, source)| source.ip().to_string()).map_err(|error| format!("{sent:?}, {error}"))
    })
}

//! Throughput and latency between pods on one node and on two nodes. Three configurations alternate: interfaces that
//! agents created, the same interfaces created with `ip`, and the latter with masquerading. With masquerading the
//! kernel tracks every connection. `scripts/bench-net` runs it.
#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    clippy::print_stdout,
    reason = "a bench panics, waits and prints"
)]

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::time::{Duration, Instant};

use coracle_integration::{Host, Nodes, eventually, inside, on_a_machine};

const ROUNDS: usize = 12;
const STREAM: Duration = Duration::from_millis(700);
const REQUESTS: u32 = 4000;

/// Two processes in network namespaces, and the address of the second.
struct Pair {
    from: u32,
    to: u32,
    ip: IpAddr,
}

/// Throughput of one TCP stream in bytes per second.
fn throughput(pair: &Pair) -> f64 {
    let listener = inside(pair.to, || TcpListener::bind((pair.ip, 0)).unwrap());
    let to = SocketAddr::new(pair.ip, listener.local_addr().unwrap().port());
    let mut sender = inside(pair.from, || TcpStream::connect(to).unwrap());
    let (mut receiver, _) = listener.accept().unwrap();
    let sending = std::thread::spawn(move || {
        let (buffer, end) = (vec![0; 1 << 17], Instant::now() + STREAM);
        while Instant::now() < end {
            sender.write_all(&buffer).unwrap();
        }
    });
    let (mut buffer, mut bytes, start) = (vec![0; 1 << 17], 0, Instant::now());
    while let Ok(length @ 1..) = receiver.read(&mut buffer) {
        bytes += length;
    }
    sending.join().unwrap();
    #[expect(clippy::cast_precision_loss, reason = "a rate")]
    let bytes = bytes as f64;
    bytes / start.elapsed().as_secs_f64()
}

/// Round-trip time of a small datagram in seconds.
fn latency(pair: &Pair) -> f64 {
    let answering = inside(pair.to, || UdpSocket::bind((pair.ip, 0)).unwrap());
    let to = SocketAddr::new(pair.ip, answering.local_addr().unwrap().port());
    let asking =
        inside(pair.from, || UdpSocket::bind((if to.is_ipv4() { "0.0.0.0" } else { "::" }, 0)).unwrap());
    let thread = std::thread::spawn(move || {
        let mut buffer = [0; 64];
        while let Ok((length @ 1.., from)) = answering.recv_from(&mut buffer) {
            answering.send_to(&buffer[..length], from).unwrap();
        }
    });
    let (mut buffer, start) = ([0; 64], Instant::now());
    for _ in 0..REQUESTS {
        asking.send_to(b"how far is it?", to).unwrap();
        asking.recv(&mut buffer).unwrap();
    }
    let time = start.elapsed().as_secs_f64() / f64::from(REQUESTS);
    asking.send_to(b"", to).unwrap();
    thread.join().unwrap();
    time
}

/// Pairs of pods: on the same node, and on two nodes.
struct PodPairs {
    near: Pair,
    far: Pair,
}

/// The configuration that agents create, made with `ip`: bridge, veth pairs and addresses of two pods, and VXLAN.
struct ManualSetup {
    hosts: [Host; 2],
    pods: [[std::process::Child; 2]; 2],
}

fn ip(host: &Host, line: &str) {
    host.run("ip", &line.split(' ').collect::<Vec<_>>());
}

impl ManualSetup {
    /// Creates hosts with these numbers.
    fn new(numbers: [u8; 2]) -> Self {
        let hosts = numbers.map(Host::new);
        let pods = [0, 1].map(|n: usize| {
            let (host, own, other) = (&hosts[n], n + 1, 2 - n);
            host.run("sysctl", &["-qw", "net.ipv4.ip_forward=1"]);
            let vxlan = "link add vx0 type vxlan id 9 dstport 8479 nolearning";
            ip(host, &format!("{vxlan} local 192.0.2.{} dev eth0", numbers[n]));
            ip(host, &format!("link set vx0 mtu 1430 up address 02:00:00:00:09:0{own}"));
            ip(host, &format!("addr add 10.9.{own}.0/32 dev vx0"));
            ip(host, "link add br0 type bridge");
            ip(host, &format!("addr add 10.9.{own}.1/24 dev br0"));
            ip(host, "link set br0 mtu 1430 up");
            let remote = format!("02:00:00:00:09:0{other}");
            let to = format!("192.0.2.{}", numbers[1 - n]);
            host.run("bridge", &["fdb", "add", &remote, "dev", "vx0", "dst", &to, "self", "permanent"]);
            ip(host, &format!("neigh add 10.9.{other}.0 lladdr {remote} dev vx0 nud permanent"));
            ip(host, &format!("route add 10.9.{other}.0/24 via 10.9.{other}.0 dev vx0 onlink"));
            [2, 3].map(|last| Self::pod(host, own, last))
        });
        Self { hosts, pods }
    }

    /// Creates a pod; `last` is the last byte of its address.
    fn pod(host: &Host, own: usize, last: u8) -> std::process::Child {
        let mut pod = host.command("unshare");
        let pod = pod.args(["--net", "cat"]).stdin(std::process::Stdio::piped()).spawn().unwrap();
        let of_host = std::fs::read_link(format!("/proc/{}/ns/net", host.pid())).unwrap();
        eventually("the pod's network namespace", 5, || {
            let of_pod = std::fs::read_link(format!("/proc/{}/ns/net", pod.id())).ok()?;
            let is_cat = std::fs::read_to_string(format!("/proc/{}/comm", pod.id())).ok()?.trim() == "cat";
            (is_cat && of_pod != of_host).then_some(())
        });
        let pair =
            format!("link add pod{last} mtu 1430 type veth peer name eth0 mtu 1430 netns {}", pod.id());
        ip(host, &pair);
        ip(host, &format!("link set pod{last} master br0 up"));
        let inner = |line: &str| {
            let net = format!("--net=/proc/{}/ns/net", pod.id());
            let words: Vec<&str> = [net.as_str(), "ip"].into_iter().chain(line.split(' ')).collect();
            host.run("nsenter", &words);
        };
        inner(&format!("addr add 10.9.{own}.{last}/24 dev eth0"));
        inner("link set eth0 up");
        inner("link set lo up");
        inner(&format!("route add default via 10.9.{own}.1"));
        pod
    }

    /// Adds masquerading of packets from pods to other networks.
    fn masquerade(self) -> Self {
        for (host, own) in self.hosts.iter().zip(1..) {
            let chain = "chain out { type nat hook postrouting priority srcnat; ";
            let rule = format!("ip saddr 10.9.{own}.0/24 ip daddr != 10.9.0.0/16 masquerade; }};");
            host.run("nft", &[&format!("table ip byhand {{ {chain}{rule} }}")]);
        }
        self
    }

    fn pairs(&self) -> PodPairs {
        assert_ne!(self.hosts[0].pid(), self.hosts[1].pid());
        let [[from, near], [far, _]] = &self.pods;
        let pair = |to: &std::process::Child, ip: &str| Pair {
            from: from.id(),
            to: to.id(),
            ip: ip.parse().unwrap(),
        };
        PodPairs { near: pair(near, "10.9.1.3"), far: pair(far, "10.9.2.2") }
    }
}

impl Drop for ManualSetup {
    fn drop(&mut self) {
        for pod in self.pods.iter_mut().flatten() {
            pod.kill().ok();
            pod.wait().ok();
        }
    }
}

fn pods(nodes: &Nodes) -> PodPairs {
    nodes.kubectl(&["create", "deployment", "nginx", "--image=nginx", "--replicas=4"]);
    nodes.kubectl(&["rollout", "status", "deployment/nginx", "--timeout=60s"]);
    let list = nodes.get(&["pods"]);
    let mut ends: Vec<(String, u32, IpAddr)> = list["items"]
        .as_array()
        .unwrap()
        .iter()
        .map(|pod| {
            let uid = pod["metadata"]["uid"].as_str().unwrap();
            let process = nodes.agents().iter().find_map(|agent| agent.process_of(uid)).unwrap();
            let node = pod["spec"]["nodeName"].as_str().unwrap();
            (node.to_owned(), process, pod["status"]["podIP"].as_str().unwrap().parse().unwrap())
        })
        .collect();
    ends.sort();
    let [from, near, far, _] = ends.as_slice() else { panic!("four pods: {ends:?}") };
    assert!(from.0 == near.0 && from.0 != far.0, "two on each node: {ends:?}");
    let pair = |to: &(String, u32, IpAddr)| Pair { from: from.1, to: to.1, ip: to.2 };
    PodPairs { near: pair(near), far: pair(far) }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// A table row with the median of each configuration, multiplied by `scale`, and its ratio to the first.
fn row(what: &str, scale: f64, unit: &str, measured: [Vec<f64>; 3], more_is_better: bool) {
    let [ours, plain, masked] = measured.map(median);
    let ratio = |theirs: f64| if more_is_better { ours / theirs } else { theirs / ours };
    let cells = [ours, plain, masked].map(|value| format!("{:.2} {unit}", value * scale)).join(" | ");
    println!("| {what} | {cells} | {:.3} | {:.3} |", ratio(plain), ratio(masked));
}

fn compare(what: &str, pairs: [&Pair; 3]) {
    let (mut streams, mut asks) = ([const { Vec::new() }; 3], [const { Vec::new() }; 3]);
    for round in 0..ROUNDS {
        // The configurations alternate, and each is first equally often.
        for which in (0..3).map(|step| (round + step) % 3) {
            streams[which].push(throughput(pairs[which]));
            asks[which].push(latency(pairs[which]));
        }
    }
    println!("| {what}, p50 of {ROUNDS} | coracle | by hand | … masquerading | ratio | ratio |");
    println!("|---|---|---|---|---|---|");
    row("one TCP stream", 8e-9, "Gbit/s", streams, true);
    row("small datagram and answer", 1e6, "µs", asks, false);
}

fn main() {
    on_a_machine(|machine| {
        let nodes = Nodes::up(machine, "10.42.0.0/16,fd42::/48", 2);
        let (ours, plain) = (pods(&nodes), ManualSetup::new([31, 32]));
        let masked = ManualSetup::new([33, 34]).masquerade();
        let all = [ours, plain.pairs(), masked.pairs()];
        compare("pod to pod on one node", all.each_ref().map(|pairs| &pairs.near));
        compare("pod to pod across VXLAN", all.each_ref().map(|pairs| &pairs.far));
    });
}

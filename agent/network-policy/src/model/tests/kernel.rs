//! After random changes and foreign flushes, the kernel's table equals a table that is written anew. Random packets
//! between namespaces on one bridge have the verdict of the policies.

use std::net::{SocketAddr, UdpSocket};

use coracle_testing::{NamespaceThread, bind_udp, in_new_namespace, ip, run};
use nix::sched::{CloneFlags, unshare};
use proptest::strategy::ValueTree as _;
use proptest::test_runner::TestRunner;

use super::*;
use crate::enforcer::Enforcer;

const TABLE: &str = "test-policies";
/// Number of the pods of random changes. Each has a namespace.
const PODS: u8 = 6;
const PORTS: [u16; 3] = [80, 81, 8080];
/// Maximum number of times that a packet is sent until it arrives, if its arrival is expected. The first packets are
/// lost while a new link is not up.
const TRIES: usize = 20;
/// Maximum wait after each of these times, and the time between two looks, in milliseconds.
const ARRIVAL: u16 = 500;
const LOOK: u16 = 5;
/// Wait for packets that must not arrive, in milliseconds. Usually they have arrived when the call that sends them
/// returns. A packet that arrives later is missed: a slow machine can hide a fault, but cannot fail the test.
const QUIET: u16 = 20;

/// The namespaces of the pods, and a socket for each address and port of a pod.
struct Hosts {
    threads: Vec<NamespaceThread>,
    receivers: Vec<(SocketAddr, UdpSocket)>,
}

/// A packet with its ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Sent {
    from: SocketAddr,
    to: SocketAddr,
}

/// A packet between two pods.
#[derive(Clone, Copy, Debug)]
struct Datagram {
    from: u8,
    to: u8,
    is_ipv4: bool,
    port: u16,
}

/// The address of the pod with this number. The function `pod` gives the pod the same addresses.
fn address(number: u8, is_ipv4: bool) -> IpAddr {
    if is_ipv4 { [10, 42, 0, number].into() } else { format!("fd42::{number:x}").parse().unwrap() }
}

/// Runs in a new network namespace with a bridge.
fn on_a_bridge(test: impl FnOnce() + Send + 'static) {
    in_new_namespace(move || {
        ip("link set lo up");
        ip("link add bridge0 type bridge nf_call_iptables 1 nf_call_ip6tables 1");
        ip("link set bridge0 up");
        test();
    });
}

/// Makes the namespace of a pod, with a port of the bridge.
fn host(number: u8) -> NamespaceThread {
    let thread = NamespaceThread::start();
    ip(&format!("link add pod{number} type veth peer name eth0 netns {}", thread.netns().display()));
    ip(&format!("link set pod{number} master bridge0 up"));
    thread.within(move || {
        ip("link set lo up");
        ip("link set eth0 up");
        ip(&format!("addr add {}/24 dev eth0", address(number, true)));
        ip(&format!("addr add {}/64 dev eth0 nodad", address(number, false)));
    });
    thread
}

/// The sockets of a pod, in its namespace.
fn receivers(number: u8) -> Vec<(SocketAddr, UdpSocket)> {
    let ends = [true, false].into_iter().flat_map(|is_ipv4| PORTS.map(|port| (is_ipv4, port)));
    let bind = |(is_ipv4, port)| {
        let to = SocketAddr::new(address(number, is_ipv4), port);
        let socket = bind_udp(to);
        socket.set_nonblocking(true).unwrap();
        (to, socket)
    };
    ends.map(bind).collect()
}

fn wait(milliseconds: u16) {
    // The call has no descriptor.
    nix::poll::poll(&mut [], milliseconds).unwrap();
}

// === impl Hosts ===

impl Hosts {
    fn on_the_bridge() -> Self {
        let threads: Vec<NamespaceThread> = (1..=PODS).map(host).collect();
        let bound = (1..=PODS).zip(&threads).flat_map(|(pod, thread)| thread.within(move || receivers(pod)));
        let receivers = bound.collect();
        Self { threads, receivers }
    }

    fn send(&self, packet: Sent) {
        let Sent { from, to } = packet;
        let of_sender = (1..).zip(&self.threads).find(|(pod, _)| address(*pod, from.is_ipv4()) == from.ip());
        let (_, thread) = of_sender.unwrap();
        thread.within(move || drop(bind_udp(from).send_to(b"packet", to)));
    }

    /// Adds the packets that have arrived.
    fn receive(&self, arrived: &mut BTreeSet<Sent>) {
        for (to, socket) in &self.receivers {
            while let Ok((_, from)) = socket.recv_from(&mut [0; 8]) {
                arrived.insert(Sent { from, to: *to });
            }
        }
    }

    /// Sends packets together, and returns those that arrive. `expected` are those that should arrive.
    fn arrivals(&self, packets: &BTreeSet<Sent>, expected: &BTreeSet<Sent>) -> BTreeSet<Sent> {
        let mut arrived = BTreeSet::new();
        packets.iter().for_each(|packet| self.send(*packet));
        for _ in 0..TRIES {
            for _ in 0..ARRIVAL / LOOK {
                self.receive(&mut arrived);
                if expected.is_subset(&arrived) {
                    break;
                }
                wait(LOOK);
            }
            if expected.is_subset(&arrived) {
                break;
            }
            expected.difference(&arrived).for_each(|packet| self.send(*packet));
        }
        wait(QUIET);
        self.receive(&mut arrived);
        arrived
    }
}

fn any_datagram() -> impl Strategy<Value = Datagram> {
    let ends = (1..=PODS, 1..PODS);
    (ends, any::<bool>(), prop::sample::select(PORTS.to_vec())).prop_map(
        |((from, distance), is_ipv4, port)| {
            let to = (from - 1 + distance) % PODS + 1;
            Datagram { from, to, is_ipv4, port }
        },
    )
}

/// Number of changes. `CORACLE_PROPERTY_CHANGES` sets the number.
fn changes() -> usize {
    std::env::var("CORACLE_PROPERTY_CHANGES").ok().and_then(|text| text.parse().ok()).unwrap_or(200)
}

/// The text with the elements of each set in order: their order has no meaning.
fn with_sorted_sets(text: &str) -> String {
    let mut parts = text.split('{');
    let mut sorted = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let (elements, rest) = part.split_once('}').unwrap_or((part, ""));
        let mut elements: Vec<&str> = elements.split(',').map(str::trim).collect();
        elements.sort_unstable();
        sorted.push('{');
        sorted.push_str(&elements.join(","));
        sorted.push_str(rest);
    }
    sorted
}

/// The chains and sets of the table: their order has no meaning.
fn table() -> Vec<String> {
    let text = run("nft", &["--stateless", "list", "table", "inet", TABLE]);
    let block = |block: &str| with_sorted_sets(&block.split_whitespace().collect::<Vec<_>>().join(" "));
    // The first block begins with the name of the table.
    let text = text.split_once('{').unwrap().1;
    let mut blocks: Vec<String> = text.split("\n\t}").map(block).collect();
    blocks.sort_unstable();
    blocks
}

/// A table that is written anew from the whole model.
fn written_anew(model: &mut Model) -> Vec<String> {
    let write = || {
        unshare(CloneFlags::CLONE_NEWNET).unwrap();
        Enforcer::open(TABLE).unwrap().replace(model).unwrap();
        table()
    };
    std::thread::scope(|scope| scope.spawn(write).join().unwrap())
}

#[test]
fn the_kernel_gives_every_packet_the_verdict_of_the_policies() {
    const CHECK_EVERY: usize = 50;
    const FLUSH_EVERY: usize = 40;
    const PACKETS: usize = 24;
    on_a_bridge(|| {
        let hosts = Hosts::on_the_bridge();
        let mut random = TestRunner::deterministic();
        let (any_change, any_datagram) = (any_change(), any_datagram());
        let (mut model, mut cluster) = (Model::default(), Cluster::default());
        let mut enforcer = Enforcer::open(TABLE).unwrap();
        enforcer.replace(&mut model).unwrap();
        // Each packet has another source port, so that it belongs to no earlier connection.
        let mut from_ports = (20_000..60_000).cycle();
        for step in 1..=changes() {
            let change = any_change.new_tree(&mut random).unwrap().current();
            apply(&mut model, &mut cluster, change);
            let is_flushed = step % FLUSH_EVERY == 0;
            if is_flushed {
                run("nft", &["flush", "ruleset"]);
                assert!(!enforcer.is_intact().unwrap(), "the flush is noticed");
            }
            match is_flushed || enforcer.must_replace(&model) {
                true => enforcer.replace(&mut model).unwrap(),
                false => drop(enforcer.change(&mut model).unwrap()),
            }
            if step % CHECK_EVERY != 0 {
                continue;
            }
            assert!(enforcer.is_intact().unwrap());
            assert_eq!(table(), written_anew(&mut model), "after {step} changes");
            let (mut packets, mut expected) = (BTreeSet::new(), BTreeSet::new());
            for from_port in from_ports.by_ref().take(PACKETS) {
                let Datagram { from, to, is_ipv4, port } =
                    any_datagram.new_tree(&mut random).unwrap().current();
                let (from, to) = (address(from, is_ipv4), address(to, is_ipv4));
                let sent = Sent { from: SocketAddr::new(from, from_port), to: SocketAddr::new(to, port) };
                packets.insert(sent);
                if cluster.allows(Packet { from, to, protocol: UDP, port }) {
                    expected.insert(sent);
                }
            }
            assert_eq!(hosts.arrivals(&packets, &expected), expected, "after {step} changes");
        }
        enforcer.remove().unwrap();
    });
}

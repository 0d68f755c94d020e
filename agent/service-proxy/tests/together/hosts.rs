//! Network namespaces with the addresses of pods and of a host outside of the cluster. They send the packets of the
//! test.

use std::collections::HashMap;
use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

use coracle_testing::{NamespaceThread, bind_udp, ip};
use nix::poll::poll;

use crate::conntrack::{Connection, tracked};
use crate::world::{Delivery, LOCAL_PODS, NODE, NODE_OUTSIDE, OUTSIDE, Packet, Source, pod_address};

/// Milliseconds between two checks of the deliveries of packets.
const INTERVAL: u16 = 5;
/// Maximum number of checks for a packet that must be delivered.
const LOOKS: usize = 2_000;
/// Number of checks for a packet that may be dropped. A later delivery is missed. So a slow machine can hide a fault,
/// but cannot fail the test.
const LOOKS_IF_DROPPED: usize = 4;

/// A packet, and the port from which it is sent. Each packet of the test has another port.
pub(crate) struct Sending {
    pub(crate) packet: Packet,
    pub(crate) from_port: u16,
    pub(crate) may_be_dropped: bool,
}

/// A packet that was sent.
struct Observed {
    socket: UdpSocket,
    connection: Connection,
    is_refused: bool,
    may_be_dropped: bool,
    /// `None` while it is not known.
    delivery: Option<Delivery>,
}

/// The hosts of the network. The thread that makes the network is in the namespace of the node.
pub(crate) struct Network {
    pods: Vec<NamespaceThread>,
    outside: NamespaceThread,
}

/// A host that is connected to the node, with one address of each family. The node is its gateway.
fn host(name: &str, own: [IpAddr; 2], gateway: [IpAddr; 2]) -> NamespaceThread {
    let thread = NamespaceThread::start();
    ip(&format!("link add {name} type veth peer name eth0 netns {}", thread.netns().display()));
    ip(&format!("link set {name} up"));
    for (own, gateway) in own.into_iter().zip(gateway) {
        let (bits, nodad) = if own.is_ipv4() { (32, "") } else { (128, "nodad") };
        ip(&format!("addr add {gateway}/{bits} dev {name} {nodad}"));
        ip(&format!("route add {own}/{bits} dev {name}"));
    }
    thread.within(move || {
        ip("link set lo up");
        ip("link set eth0 up");
        for (own, gateway) in own.into_iter().zip(gateway) {
            let (bits, nodad, family) = if own.is_ipv4() { (32, "", "-4") } else { (128, "nodad", "-6") };
            ip(&format!("addr add {own}/{bits} dev eth0 {nodad}"));
            ip(&format!("route add {gateway}/{bits} dev eth0"));
            ip(&format!("{family} route add default via {gateway}"));
        }
    });
    thread
}

// === impl Network ===

impl Network {
    /// Makes the hosts. The packets of the node to other nodes leave to the host outside.
    pub(crate) fn start() -> Self {
        ip("link set lo up");
        for (setting, value) in [
            ("ipv4/ip_forward", "1"),
            ("ipv6/conf/all/forwarding", "1"),
            // Packets from outside to pods of other nodes leave by the link on which they came.
            ("ipv4/conf/all/send_redirects", "0"),
            ("ipv4/conf/default/send_redirects", "0"),
            // By default, the kernel sends at most 6 rejections at once to each host. The packets of the node itself
            // have no limit.
            ("ipv4/icmp_ratelimit", "0"),
            ("ipv6/icmp/ratelimit", "0"),
        ] {
            std::fs::write(format!("/proc/sys/net/{setting}"), value).unwrap();
        }
        let parsed = |addresses: [&str; 2]| addresses.map(|address| address.parse::<IpAddr>().unwrap());
        let of_pod = |pod: u8| {
            host(&format!("pod{pod}"), [pod_address(pod, true), pod_address(pod, false)], parsed(NODE))
        };
        let pods = (1..=LOCAL_PODS).map(of_pod).collect();
        let outside = host("outside", parsed(OUTSIDE), parsed(NODE_OUTSIDE));
        for (family, gateway) in ["-4", "-6"].into_iter().zip(OUTSIDE) {
            ip(&format!("{family} route add default via {gateway}"));
        }
        Self { pods, outside }
    }

    /// Sends packets, and returns their deliveries in the same order. The packets are observed together: each look at
    /// the kernel's connections takes milliseconds.
    pub(crate) fn send(&self, packets: &[Sending]) -> Vec<Delivery> {
        let mut observed: Vec<Observed> = packets.iter().map(|sending| self.begin(sending)).collect();
        for look in 1..=LOOKS {
            // Waits, because the call has no descriptor.
            poll(&mut [], INTERVAL).unwrap();
            observed.iter_mut().for_each(Observed::read_error);
            let open = observed.iter().filter(|packet| packet.delivery.is_none());
            let open: Vec<Connection> = open.map(|packet| packet.connection).collect();
            if open.is_empty() {
                break;
            }
            let entries = tracked(&open);
            observed.iter_mut().for_each(|packet| packet.look(&entries, look));
        }
        observed.into_iter().map(|packet| packet.delivery.unwrap_or(Delivery::Dropped)).collect()
    }

    fn begin(&self, sending: &Sending) -> Observed {
        let (to, from_port) = (sending.packet.address(), sending.from_port);
        let begin = move || begin(to, from_port);
        let (socket, is_refused) = match sending.packet.from {
            Source::Node => begin(),
            Source::Pod(pod) => self.pods[usize::from(pod) - 1].within(begin),
            Source::Outside => self.outside.within(begin),
        };
        let connection = Connection { from: from_port, to };
        Observed { socket, connection, is_refused, may_be_dropped: sending.may_be_dropped, delivery: None }
    }
}

// === impl Observed ===

impl Observed {
    fn read_error(&mut self) {
        let error = self.socket.take_error().unwrap();
        self.is_refused |= error.is_some_and(|error| error.kind() == ErrorKind::ConnectionRefused);
    }

    /// Decides on the delivery, if it is known. The entries are newer than the errors of the sockets: an endpoint
    /// without a listener refuses the packet, too, but it has an entry.
    fn look(&mut self, entries: &HashMap<Connection, SocketAddr>, look: usize) {
        let is_lost = self.may_be_dropped && look >= LOOKS_IF_DROPPED;
        self.delivery = self.delivery.or(match entries.get(&self.connection) {
            Some(target) => Some(Delivery::Sent(*target)),
            None if self.is_refused => Some(Delivery::Rejected),
            None => is_lost.then_some(Delivery::Dropped),
        });
    }
}

/// Sends a datagram. Returns its socket, and whether the kernel has already refused the datagram.
fn begin(to: SocketAddr, from_port: u16) -> (UdpSocket, bool) {
    let any: IpAddr = if to.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = bind_udp(SocketAddr::new(any, from_port));
    socket.connect(to).unwrap();
    let sent = socket.send(b"x");
    let is_refused = sent.is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused);
    (socket, is_refused)
}

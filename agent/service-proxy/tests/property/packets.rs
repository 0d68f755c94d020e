//! Random packets of the node, and a model that predicts their delivery. The kernel's answer is its conntrack entry, or
//! the error of the socket.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd as _, AsRawFd, OwnedFd};

use coracle_service_proxy::State;
use coracle_services::{AddressType, Conditions, EndpointSlice, ServiceState};
use k8s_openapi::api::core::v1::Service;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, poll};
use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockType, SockaddrStorage, bind, connect, getsockname, getsockopt,
    send, socket, sockopt,
};
use rand::RngExt as _;
use rand::rngs::SmallRng;

use crate::conntrack::{Connection, tracked};

/// Milliseconds for an expected rejection to reach its socket.
const REJECTION: u16 = 2_000;
/// The node's own addresses.
const OWN: [&str; 2] = ["10.42.0.1", "fd42::1"];

/// The outcome of a packet.
#[derive(Debug, PartialEq, Eq)]
enum Delivery {
    /// The packet went to this address.
    Sent(SocketAddr),
    Rejected,
    Dropped,
    /// Rejected or dropped. The test does not distinguish these outcomes for TCP: a TCP socket gets a rejection only
    /// after a second.
    Refused,
}

#[derive(Debug)]
struct Packet {
    to: SocketAddr,
    is_udp: bool,
}

/// Adds the node's addresses and default routes to the namespace.
pub(super) fn add_links() {
    for line in [
        "link set lo up",
        "link add name uplink0 type veth peer name uplink1",
        "link set uplink1 up",
        "link set uplink0 up",
        "addr add 10.42.0.1/24 dev uplink0",
        "addr add fd42::1/64 dev uplink0 nodad",
        "route add default dev uplink0",
        "-6 route add default dev uplink0",
    ] {
        coracle_testing::ip(line);
    }
}

/// Sends random packets, and compares the delivery of each with the model.
pub(super) fn check(random: &mut SmallRng, states: &[State], count: usize) {
    for _ in 0..count {
        let packet = packet(random, states);
        let expected = model(&packet, states);
        let delivery = packet.send(expected.contains(&Delivery::Rejected));
        assert!(expected.contains(&delivery), "{packet:?}: {delivery:?} instead of {expected:?}");
    }
}

/// A packet to a node port, an external IP, or a cluster IP with or without a service.
fn packet(random: &mut SmallRng, states: &[State]) -> Packet {
    let number = random.random_range(1..20u8);
    let is_ipv4 = random.random_bool(0.6);
    let cluster_ip = if is_ipv4 { format!("10.43.0.{number}") } else { format!("fd43::{number:x}") };
    let to: IpAddr = cluster_ip.parse().unwrap();
    let port = if random.random_ratio(1, 8) { 81 } else { 80 };
    let is_udp = random.random_bool(0.5);
    let state = states.iter().find(|(key, _)| key.name == format!("s{number}"));
    let service = state.and_then(|(_, state)| state.as_ref()).map(|state| &*state.service);
    // The kernel may have no SCTP sockets. So SCTP services get packets of other protocols at their cluster IPs.
    let service = service.filter(|service| protocol(service) != "SCTP");
    let external = service.filter(|service| is_ipv4 && has_external_ip(service));
    if let Some(service) = external.filter(|_| random.random_bool(0.3)) {
        let to = SocketAddr::new(IpAddr::from([198, 51, 100, number]), 80);
        return Packet { to, is_udp: protocol(service) == "UDP" };
    }
    let node_port = service.filter(|service| has_node_port(service, to));
    match node_port {
        Some(service) if random.random_bool(0.5) => Packet {
            to: SocketAddr::new(OWN[usize::from(!is_ipv4)].parse().unwrap(), 30_000 + u16::from(number)),
            is_udp: protocol(service) == "UDP",
        },
        _ => Packet { to: SocketAddr::new(to, port), is_udp },
    }
}

fn protocol(service: &Service) -> &str {
    let ports = service.spec.as_ref().and_then(|spec| spec.ports.as_ref()).unwrap();
    ports[0].protocol.as_deref().unwrap()
}

fn external_ips(service: &Service) -> &[String] {
    service.spec.as_ref().and_then(|spec| spec.external_ips.as_deref()).unwrap_or_default()
}

fn has_external_ip(service: &Service) -> bool {
    !external_ips(service).is_empty()
}

fn has_address(service: &Service, address: IpAddr) -> bool {
    let listed = service.spec.as_ref().and_then(|spec| spec.cluster_ips.as_ref()).unwrap();
    listed.iter().chain(external_ips(service)).any(|listed| listed.parse() == Ok(address))
}

fn has_node_port(service: &Service, address: IpAddr) -> bool {
    let kind = service.spec.as_ref().and_then(|spec| spec.type_.as_deref());
    kind == Some("NodePort") && has_address(service, address)
}

/// The endpoints of a family that take traffic, on all nodes or on one. These are the ready endpoints. If no endpoint
/// is ready, these are the terminating endpoints that still serve.
fn usable(slices: &[std::sync::Arc<EndpointSlice>], is_ipv4: bool, node: Option<&str>) -> Vec<SocketAddr> {
    let family = if is_ipv4 { AddressType::IPv4 } else { AddressType::IPv6 };
    let those = |takes: fn(Conditions) -> bool| -> Vec<SocketAddr> {
        let slices = slices.iter().filter(|slice| slice.address_type == family);
        let all = slices.flat_map(|slice| &slice.endpoints);
        let all = all.filter(|endpoint| node.is_none() || endpoint.node_name.as_deref() == node);
        let all = all.filter(|endpoint| takes(endpoint.conditions));
        all.filter_map(|endpoint| Some(SocketAddr::new(endpoint.address?, 8080))).collect()
    };
    let ready = those(Conditions::is_ready);
    if ready.is_empty() { those(|of| of.is_serving() && of.is_terminating()) } else { ready }
}

/// All permitted deliveries of a packet.
fn model(packet: &Packet, states: &[State]) -> Vec<Delivery> {
    let Packet { to, is_udp } = packet;
    let refused = |delivery: Delivery| vec![if *is_udp { delivery } else { Delivery::Refused }];
    let mut all = states.iter().filter_map(|(_, state)| state.as_ref());
    let is_node_port = to.port() >= 30_000;
    let is_of = |service: &Service| {
        let ports = service.spec.as_ref().and_then(|spec| spec.ports.as_ref()).unwrap();
        let has_port = ports[0].node_port == Some(i32::from(to.port()));
        if is_node_port { has_port } else { has_address(service, to.ip()) }
    };
    let Some(ServiceState { service, slices }) = all.find(|state| is_of(&state.service)) else {
        return refused(Delivery::Dropped);
    };
    let sent = if *is_udp { "UDP" } else { "TCP" };
    let is_served = protocol(service) == sent && (is_node_port || to.port() == 80);
    if !is_served {
        return refused(Delivery::Rejected);
    }
    let policy = service.spec.as_ref().and_then(|spec| spec.internal_traffic_policy.as_deref());
    let is_external = is_node_port || external_ips(service).iter().any(|ip| ip.parse() == Ok(to.ip()));
    // A process of the node sends the packets. Even with the external traffic policy `Local`, such packets reach all
    // endpoints.
    let is_local = policy == Some("Local") && !is_external;
    let everywhere = usable(slices, to.is_ipv4(), None);
    let targets = if is_local { usable(slices, to.is_ipv4(), Some("here")) } else { everywhere.clone() };
    match (targets.is_empty(), everywhere.is_empty()) {
        (false, _) => targets.into_iter().map(Delivery::Sent).collect(),
        (true, true) => refused(Delivery::Rejected),
        // Endpoints exist, but only on other nodes.
        (true, false) => refused(Delivery::Dropped),
    }
}

// === impl Packet ===

impl Packet {
    /// Sends the packet. With `expects_rejection` it waits for the rejection, which may take a moment to arrive.
    fn send(&self, expects_rejection: bool) -> Delivery {
        loop {
            let (socket, port) = self.socket();
            // A port whose earlier connection still has a conntrack entry is not used.
            if tracked(&[Connection { from: port, to: self.to }]).is_empty() {
                return self.send_from(&socket, port, expects_rejection);
            }
        }
    }

    /// A bound socket, and its local port.
    fn socket(&self) -> (OwnedFd, u16) {
        let family = if self.to.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
        let kind = if self.is_udp { SockType::Datagram } else { SockType::Stream };
        let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
        let socket = socket(family, kind, flags, None).unwrap();
        let any =
            if self.to.is_ipv4() { IpAddr::V4(Ipv4Addr::UNSPECIFIED) } else { Ipv6Addr::UNSPECIFIED.into() };
        bind(socket.as_raw_fd(), &SockaddrStorage::from(SocketAddr::new(any, 0))).unwrap();
        let own: SockaddrStorage = getsockname(socket.as_raw_fd()).unwrap();
        let v4 = own.as_sockaddr_in().map(|own| own.port());
        let port = v4.or_else(|| Some(own.as_sockaddr_in6()?.port())).unwrap();
        (socket, port)
    }

    fn send_from(&self, socket: &OwnedFd, port: u16, expects_rejection: bool) -> Delivery {
        let connected = connect(socket.as_raw_fd(), &SockaddrStorage::from(self.to));
        assert!(matches!(connected, Ok(()) | Err(Errno::EINPROGRESS | Errno::ECONNREFUSED)), "{connected:?}");
        if self.is_udp {
            let sent = send(socket.as_raw_fd(), b"x", MsgFlags::empty());
            // This call may return the error of the socket and clear it.
            if sent == Err(Errno::ECONNREFUSED) {
                return Delivery::Rejected;
            }
        }
        let entry = tracked(&[Connection { from: port, to: self.to }]).into_values().next();
        if let Some(target) = entry {
            return Delivery::Sent(target);
        }
        if !self.is_udp {
            return Delivery::Refused;
        }
        if expects_rejection {
            // poll(2) also reports errors that are not requested.
            let mut waiting = [PollFd::new(socket.as_fd(), PollFlags::empty())];
            poll(&mut waiting, REJECTION).unwrap();
        }
        let error = getsockopt(socket, sockopt::SocketError).unwrap();
        if error == Errno::ECONNREFUSED as i32 { Delivery::Rejected } else { Delivery::Dropped }
    }
}

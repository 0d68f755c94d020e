//! A cluster of services, endpoints and policies as plain data, and the model: the permitted deliveries of a packet.
//! The model has its own types and rules, and no code of the crates under test.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

use ipnetwork::IpNetwork;
use rand::RngExt as _;
use rand::rngs::SmallRng;

/// Number of pods. The first [`LOCAL_PODS`] run on this node.
pub(crate) const PODS: u8 = 6;
pub(crate) const LOCAL_PODS: u8 = 4;
/// Pod N and policy N are in the namespace N modulo 2.
pub(crate) const NAMESPACES: [&str; 2] = ["a", "b"];
const APPS: [&str; 2] = ["web", "db"];
const SERVICES: u8 = 8;
const POLICIES: u8 = 8;
/// The ports of each service, and the ports of its endpoints.
pub(crate) const PORTS: [(u16, u16); 2] = [(80, 8080), (443, 8443)];
/// A port that no service has.
const UNUSED_PORT: u16 = 81;
/// Addresses of the node for its pods, and for the host outside of the cluster.
pub(crate) const NODE: [&str; 2] = ["10.42.0.1", "fd42::1"];
pub(crate) const NODE_OUTSIDE: [&str; 2] = ["192.0.2.1", "fd92::1"];
pub(crate) const OUTSIDE: [&str; 2] = ["192.0.2.2", "fd92::2"];
/// Blocks of policies, each with an excepted block.
const BLOCKS: [(&str, Option<&str>); 7] = [
    ("0.0.0.0/0", None),
    ("10.42.0.0/16", Some("10.42.0.12/31")),
    ("10.43.0.0/16", None),
    ("192.0.2.0/24", None),
    ("::/0", Some("fd42::/120")),
    ("fd43::/112", None),
    ("fd92::/64", None),
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Readiness {
    Ready,
    NotReady,
    /// Terminating, and still serving.
    Terminating,
}

#[expect(clippy::struct_excessive_bools, reason = "independent settings of a Service, each drawn at random")]
#[derive(Clone, Debug)]
pub(crate) struct ServiceSpec {
    pub(crate) is_udp: bool,
    pub(crate) is_dual_stack: bool,
    pub(crate) has_node_ports: bool,
    pub(crate) has_external_ip: bool,
    pub(crate) is_internal_local: bool,
    pub(crate) is_external_local: bool,
    /// The pods behind the service.
    pub(crate) endpoints: Vec<(u8, Readiness)>,
}

#[derive(Clone, Debug)]
pub(crate) enum Peer {
    Everyone,
    /// Pods with a label. `None` as the namespace means the policy's namespace.
    Pods {
        namespace: Option<usize>,
        app: Option<&'static str>,
    },
    Block {
        range: IpNetwork,
        except: Option<IpNetwork>,
    },
}

/// A rule of a policy. Without a port, the rule allows all ports and protocols.
#[derive(Clone, Debug)]
pub(crate) struct Allowed {
    pub(crate) peer: Peer,
    pub(crate) port: Option<(&'static str, u16)>,
}

#[derive(Clone, Debug)]
pub(crate) struct Policy {
    pub(crate) namespace: usize,
    /// The label of the selected pods. `None` selects all pods of the namespace.
    pub(crate) app: Option<&'static str>,
    pub(crate) is_egress: bool,
    pub(crate) allowed: Vec<Allowed>,
}

/// The services and policies by number, and the labels of the pods.
#[derive(Debug)]
pub(crate) struct World {
    pub(crate) services: BTreeMap<u8, ServiceSpec>,
    pub(crate) policies: BTreeMap<u8, Policy>,
    apps: BTreeMap<u8, &'static str>,
}

/// The changed object, by its number.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Changed {
    Service(u8),
    Policy(u8),
    Pod(u8),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    Node,
    Pod(u8),
    Outside,
}

#[derive(Clone, Copy, Debug)]
enum Destination {
    ClusterIp(u8, u16),
    ExternalIp(u8, usize),
    NodePort(u8, usize),
    Pod(u8, u16),
}

/// A UDP packet.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Packet {
    pub(crate) from: Source,
    to: Destination,
    is_ipv4: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Delivery {
    /// The packet went to this address.
    Sent(SocketAddr),
    Rejected,
    Dropped,
}

/// The destination of a packet after the translation of services.
enum Translated {
    /// One of these pods, at this port.
    To(Vec<u8>, u16),
    /// No service accepts the packet. If the packet is forwarded, policies can drop it before it is rejected.
    Refused(Delivery),
}

fn parse(address: &str) -> IpAddr {
    address.parse().unwrap()
}

fn of_family(addresses: [&str; 2], is_ipv4: bool) -> IpAddr {
    parse(addresses[usize::from(!is_ipv4)])
}

pub(crate) fn is_local(pod: u8) -> bool {
    pod <= LOCAL_PODS
}

pub(crate) fn pod_address(pod: u8, is_ipv4: bool) -> IpAddr {
    let (network, number) = (u8::from(!is_local(pod)), 10 + pod);
    if is_ipv4 { [10, 42, network, number].into() } else { parse(&format!("fd42:0:0:{network}::{number:x}")) }
}

pub(crate) fn cluster_ip(service: u8, is_ipv4: bool) -> IpAddr {
    if is_ipv4 { [10, 43, 0, service].into() } else { parse(&format!("fd43::{service:x}")) }
}

pub(crate) fn external_ip(service: u8) -> IpAddr {
    [198, 51, 100, service].into()
}

pub(crate) fn node_port(service: u8, index: usize) -> u16 {
    30_000 + 10 * u16::from(service) + u16::try_from(index).unwrap()
}

fn one_of<T: Copy>(random: &mut SmallRng, all: &[T]) -> T {
    all[random.random_range(0..all.len())]
}

fn sometimes<T: Copy>(random: &mut SmallRng, all: &[T]) -> Option<T> {
    random.random_bool(0.6).then(|| one_of(random, all))
}

// === impl ServiceSpec ===

impl ServiceSpec {
    fn random(random: &mut SmallRng) -> Self {
        Self {
            is_udp: random.random_bool(0.8),
            is_dual_stack: random.random_bool(0.6),
            has_node_ports: random.random_bool(0.5),
            has_external_ip: random.random_bool(0.3),
            is_internal_local: random.random_bool(0.3),
            is_external_local: random.random_bool(0.4),
            endpoints: random_endpoints(random),
        }
    }

    fn has_family(&self, is_ipv4: bool) -> bool {
        is_ipv4 || self.is_dual_stack
    }

    /// The pods that take traffic, of all nodes or of this node. Terminating pods take traffic only if no pod is ready.
    fn usable(&self, is_only_local: bool) -> Vec<u8> {
        let those = |wanted: Readiness| -> Vec<u8> {
            let all = self.endpoints.iter().filter(|(pod, _)| !is_only_local || is_local(*pod));
            all.filter(|(_, readiness)| *readiness == wanted).map(|(pod, _)| *pod).collect()
        };
        let ready = those(Readiness::Ready);
        if ready.is_empty() { those(Readiness::Terminating) } else { ready }
    }

    /// The destination of a packet to a port of the endpoints, according to the traffic policy.
    fn translate(&self, is_only_local: bool, port: u16) -> Translated {
        let pods = self.usable(is_only_local);
        match (pods.is_empty(), self.usable(false).is_empty()) {
            (false, _) => Translated::To(pods, port),
            (true, true) => Translated::Refused(Delivery::Rejected),
            // Only other nodes have endpoints.
            (true, false) => Translated::Refused(Delivery::Dropped),
        }
    }
}

fn random_endpoints(random: &mut SmallRng) -> Vec<(u8, Readiness)> {
    const READINESS: [Readiness; 4] =
        [Readiness::Ready, Readiness::Ready, Readiness::NotReady, Readiness::Terminating];
    let mut endpoints = Vec::new();
    for pod in 1..=PODS {
        if random.random_bool(0.35) {
            endpoints.push((pod, one_of(random, &READINESS)));
        }
    }
    endpoints
}

// === impl Policy ===

impl Policy {
    fn random(random: &mut SmallRng, number: u8) -> Self {
        let count = random.random_range(0..3u8);
        Self {
            namespace: usize::from(number) % NAMESPACES.len(),
            app: sometimes(random, &APPS),
            is_egress: random.random_bool(0.5),
            allowed: (0..count).map(|_| Allowed::random(random)).collect(),
        }
    }
}

impl Allowed {
    fn random(random: &mut SmallRng) -> Self {
        let peer = match random.random_range(0..8u8) {
            0 => Peer::Everyone,
            1..=4 => Peer::Pods { namespace: sometimes(random, &[0, 1]), app: sometimes(random, &APPS) },
            _ => {
                let (range, except) = one_of(random, &BLOCKS);
                let except = except.map(|except| except.parse().unwrap());
                Peer::Block { range: range.parse().unwrap(), except }
            }
        };
        let ports = [("UDP", 8080), ("UDP", 8443), ("UDP", 80), ("TCP", 8080)];
        Self { peer, port: sometimes(random, &ports) }
    }
}

// === impl World ===

impl World {
    pub(crate) fn new() -> Self {
        let apps = (1..=PODS).map(|pod| (pod, APPS[usize::from(pod / 2) % APPS.len()])).collect();
        Self { services: BTreeMap::new(), policies: BTreeMap::new(), apps }
    }

    pub(crate) fn app(&self, pod: u8) -> &'static str {
        self.apps[&pod]
    }

    /// Makes a random change.
    pub(crate) fn change(&mut self, random: &mut SmallRng) -> Changed {
        let service = random.random_range(1..=SERVICES);
        match random.random_range(0..20u8) {
            0..=1 => {
                self.services.remove(&service);
                Changed::Service(service)
            }
            2..=6 => {
                self.services.insert(service, ServiceSpec::random(random));
                Changed::Service(service)
            }
            7..=12 => {
                if let Some(spec) = self.services.get_mut(&service) {
                    spec.endpoints = random_endpoints(random);
                }
                Changed::Service(service)
            }
            13..=17 => {
                let policy = random.random_range(1..=POLICIES);
                self.policies.remove(&policy);
                if random.random_bool(0.5) {
                    self.policies.insert(policy, Policy::random(random, policy));
                }
                Changed::Policy(policy)
            }
            _ => {
                let pod = random.random_range(1..=PODS);
                self.apps.insert(pod, one_of(random, &APPS));
                Changed::Pod(pod)
            }
        }
    }

    /// A random packet. Its destination is never a node port or an external IP without a service. Such a packet would
    /// be for the node itself, or for a host outside of the cluster.
    pub(crate) fn packet(&self, random: &mut SmallRng) -> Packet {
        let from = match random.random_range(0..8u8) {
            0 => Source::Node,
            1..=2 => Source::Outside,
            _ => Source::Pod(random.random_range(1..=LOCAL_PODS)),
        };
        let is_ipv4 = random.random_bool(0.6);
        let service = random.random_range(1..=SERVICES);
        let index = random.random_range(0..PORTS.len());
        let spec = self.services.get(&service).filter(|spec| spec.is_udp && spec.has_family(is_ipv4));
        let to = match random.random_range(0..8u8) {
            0..=1 if spec.is_some_and(|spec| spec.has_node_ports) => Destination::NodePort(service, index),
            2 if is_ipv4 && spec.is_some_and(|spec| spec.has_external_ip) => {
                Destination::ExternalIp(service, index)
            }
            3 => {
                let pods: Vec<u8> = (1..=PODS).filter(|pod| from != Source::Pod(*pod)).collect();
                Destination::Pod(one_of(random, &pods), PORTS[index].1)
            }
            4 => Destination::ClusterIp(service, one_of(random, &[UNUSED_PORT, PORTS[0].0])),
            _ => Destination::ClusterIp(service, PORTS[index].0),
        };
        Packet { from, to, is_ipv4 }
    }

    fn translate(&self, packet: &Packet) -> Translated {
        let external = |service: &ServiceSpec, index: usize| {
            // Pods and processes of this node reach all endpoints, as if they used the cluster IP.
            let is_only_local = service.is_external_local && packet.from == Source::Outside;
            service.translate(is_only_local, PORTS[index].1)
        };
        match packet.to {
            Destination::Pod(pod, port) => Translated::To(vec![pod], port),
            Destination::NodePort(service, index) | Destination::ExternalIp(service, index) => {
                external(&self.services[&service], index)
            }
            Destination::ClusterIp(service, port) => {
                let spec = self.services.get(&service).filter(|spec| spec.has_family(packet.is_ipv4));
                let Some(spec) = spec else { return Translated::Refused(Delivery::Dropped) };
                let target = PORTS.iter().find(|(of_service, _)| *of_service == port && spec.is_udp);
                match target {
                    Some((_, target)) => spec.translate(spec.is_internal_local, *target),
                    None => Translated::Refused(Delivery::Rejected),
                }
            }
        }
    }

    /// All permitted deliveries of a packet.
    pub(crate) fn permitted(&self, packet: &Packet) -> Vec<Delivery> {
        match self.translate(packet) {
            Translated::To(pods, port) => {
                let of =
                    |pod: u8| match self.allows(packet, Some(pod), pod_address(pod, packet.is_ipv4), port) {
                        true => Delivery::Sent(SocketAddr::new(pod_address(pod, packet.is_ipv4), port)),
                        false => Delivery::Dropped,
                    };
                pods.into_iter().map(of).collect()
            }
            Translated::Refused(refused) => {
                let to = packet.address();
                // Packets to an address of the node are not forwarded, so no policy applies.
                let is_forwarded = !matches!(packet.to, Destination::NodePort(..));
                let is_allowed = !is_forwarded || self.allows(packet, None, to.ip(), to.port());
                vec![if is_allowed { refused } else { Delivery::Dropped }]
            }
        }
    }

    /// Whether the policies allow a packet to this address. The address belongs to a pod or to a service.
    fn allows(&self, packet: &Packet, target: Option<u8>, to: IpAddr, port: u16) -> bool {
        let (source, from) = match packet.from {
            // Policies do not restrict packets of the node.
            Source::Node => return true,
            Source::Pod(pod) if Some(pod) == target => return true,
            Source::Pod(pod) => (Some(pod), pod_address(pod, packet.is_ipv4)),
            Source::Outside => (None, of_family(OUTSIDE, packet.is_ipv4)),
        };
        let may_leave = source.is_none_or(|pod| self.permits(pod, true, (target, to), port));
        let is_enforced_here = |pod: &u8| is_local(*pod);
        let may_enter =
            target.filter(is_enforced_here).is_none_or(|pod| self.permits(pod, false, (source, from), port));
        may_leave && may_enter
    }

    /// Whether the policies of a pod permit traffic in one direction with a peer. The peer is a pod or another address.
    fn permits(&self, pod: u8, is_egress: bool, peer: (Option<u8>, IpAddr), port: u16) -> bool {
        let is_selecting = |policy: &&Policy| {
            let has_label = policy.app.is_none_or(|app| app == self.app(pod));
            policy.is_egress == is_egress && policy.namespace == namespace_of(pod) && has_label
        };
        let mut selecting = self.policies.values().filter(is_selecting).peekable();
        if selecting.peek().is_none() {
            return true;
        }
        selecting.any(|policy| {
            let mut of_port =
                policy.allowed.iter().filter(|allowed| allowed.port.is_none_or(|of| of == ("UDP", port)));
            of_port.any(|allowed| self.has_peer(policy, &allowed.peer, peer))
        })
    }

    fn has_peer(&self, policy: &Policy, peer: &Peer, (pod, address): (Option<u8>, IpAddr)) -> bool {
        match peer {
            Peer::Everyone => true,
            Peer::Pods { namespace, app } => pod.is_some_and(|pod| {
                let has_label = app.is_none_or(|app| app == self.app(pod));
                namespace_of(pod) == namespace.unwrap_or(policy.namespace) && has_label
            }),
            Peer::Block { range, except } => {
                range.contains(address) && !except.is_some_and(|except| except.contains(address))
            }
        }
    }
}

pub(crate) fn namespace_of(pod: u8) -> usize {
    usize::from(pod) % NAMESPACES.len()
}

// === impl Packet ===

impl Packet {
    /// The address to which the packet is sent.
    pub(crate) fn address(&self) -> SocketAddr {
        match self.to {
            Destination::ClusterIp(service, port) => SocketAddr::new(cluster_ip(service, self.is_ipv4), port),
            Destination::ExternalIp(service, index) => SocketAddr::new(external_ip(service), PORTS[index].0),
            Destination::NodePort(service, index) => {
                let node = if self.from == Source::Outside { NODE_OUTSIDE } else { NODE };
                SocketAddr::new(of_family(node, self.is_ipv4), node_port(service, index))
            }
            Destination::Pod(pod, port) => SocketAddr::new(pod_address(pod, self.is_ipv4), port),
        }
    }
}

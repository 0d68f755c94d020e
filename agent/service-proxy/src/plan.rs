//! The program of one service. Pure.

mod chains;

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use coracle_nft::{Key, Verdict};
use coracle_services::{EndpointSlice, cluster_ips};
use ipnetwork::IpNetwork;
use k8s_openapi::api::core::v1::{LoadBalancerIngress, Service, ServicePort, ServiceSpec};

use crate::choice::{Choice, SHARED_MAX};
use crate::endpoints::{PortId, TrafficEndpoints, choose};
use crate::layout::{DROP, REJECT};
use crate::node_view::NodeView;
use crate::program::{ConnectionlessPort, Entry, Map, Program};
use chains::Chains;

/// Default timeout of session affinity: three hours, the API's default for `sessionAffinityConfig`.
const AFFINITY: Duration = Duration::from_secs(10_800);
/// Maximum timeout of session affinity: one day, the maximum that the API permits.
const MAX_AFFINITY: Duration = Duration::from_secs(86_400);

/// One port of a service in one family.
struct Port<'a> {
    spec: &'a ServiceSpec,
    is_ipv4: bool,
    protocol: u8,
    number: u16,
    node_port: Option<u16>,
    choice: TrafficEndpoints,
}

/// Destination of a packet to a port: a chain, or a verdict.
enum Destination {
    Entry(Entry),
    /// The action for packets while there are no endpoints: `reject`, or `drop` if another node has endpoints.
    Nowhere(&'static str),
}

/// The program of a service.
pub(crate) fn plan(service: &Service, slices: &[Arc<EndpointSlice>], node: &NodeView) -> Program {
    let mut program = Program::default();
    let Some(spec) = service.spec.as_ref() else { return program };
    if spec.type_.as_deref() == Some("ExternalName") {
        return program;
    }
    for is_ipv4 in [true, false] {
        let addresses: Vec<IpAddr> = cluster_ips(service)
            .filter(|ip| ip.is_ipv4() == is_ipv4 && !node.served_here.contains(ip))
            .collect();
        if addresses.is_empty() {
            continue;
        }
        for address in &addresses {
            program.element(Map::ClusterIps, is_ipv4, Key::default().address(*address), Entry::Member);
        }
        let external = External::of(service, spec, is_ipv4, node);
        for port in spec.ports.iter().flatten() {
            let Some(planned) = Port::of(spec, port, is_ipv4, slices, node) else { continue };
            let chains = Chains::new(service, &planned);
            planned.add_internal(&mut program, &chains, &addresses, node);
            planned.add_external(&mut program, &chains, &external, node);
        }
    }
    program
}

/// External addresses of a service.
struct External<'a> {
    /// `externalIPs` in the permitted ranges.
    ips: Vec<IpAddr>,
    /// Addresses of the load balancer.
    balancer: Vec<IpAddr>,
    /// This node's addresses.
    node: Vec<IpAddr>,
    /// Ports at which this node is the load balancer: protocol and number.
    node_ports: BTreeSet<(&'a str, i32)>,
    /// `loadBalancerSourceRanges` of the family. `None` permits all sources. An empty list permits none: the service
    /// has ranges, but no valid range of this family.
    sources: Option<Vec<IpNetwork>>,
}

impl<'a> External<'a> {
    fn of(service: &'a Service, spec: &ServiceSpec, is_ipv4: bool, node: &NodeView) -> Self {
        let usable =
            |ip: &IpAddr| ip.is_ipv4() == is_ipv4 && !node.served_here.contains(ip) && !ip.is_loopback();
        let permitted = |ip: &IpAddr| node.external_ips.iter().any(|range| range.contains(*ip));
        let listed = spec.external_ips.iter().flatten().filter_map(|ip| ip.parse().ok());
        let balancer = service.status.as_ref().and_then(|status| status.load_balancer.as_ref());
        let balancer = balancer.and_then(|balancer| balancer.ingress.as_ref());
        let is_balancer = spec.type_.as_deref() == Some("LoadBalancer");
        // With ipMode Proxy, an entry is the address of another machine or of this node. Packets to another machine
        // must not be redirected here. An entry of this node names the ports that the node serves.
        let is_virtual = |entry: &&&LoadBalancerIngress| entry.ip_mode.as_deref().unwrap_or("VIP") == "VIP";
        // The permission to write the status is a privilege. The ranges protect a cluster in which not only the
        // controllers of load balancers have this permission (CVE-2020-8554).
        let ranges = &node.load_balancer_ips;
        let may_take = |ip: &IpAddr| ranges.is_empty() || ranges.iter().any(|range| range.contains(*ip));
        let address =
            |entry: &LoadBalancerIngress| entry.ip.as_deref()?.parse::<IpAddr>().ok().filter(may_take);
        let entries: Vec<_> = balancer.into_iter().flatten().filter(|_| is_balancer).collect();
        let here = entries.iter().filter(|entry| {
            !is_virtual(entry) && address(entry).is_some_and(|ip| node.addresses.contains(&ip))
        });
        let node_ports = here.flat_map(|entry| entry.ports.iter().flatten());
        let node_ports = node_ports.map(|port| (port.protocol.as_str(), port.port)).collect();
        let ranges = spec.load_balancer_source_ranges.iter().flatten().filter(|_| is_balancer);
        let ranges: Vec<&String> = ranges.collect();
        Self {
            ips: listed.filter(usable).filter(permitted).collect(),
            balancer: entries
                .iter()
                .filter(is_virtual)
                .filter_map(|entry| address(entry))
                .filter(usable)
                .collect(),
            node: node.addresses.iter().copied().filter(usable).collect(),
            node_ports,
            sources: sources(&ranges, is_ipv4),
        }
    }

    /// The sources that may reach the load balancer at these addresses. `None` permits all. If an address of this node
    /// is permitted, the load balancer's addresses are permitted as sources too. Processes of a node that has such an
    /// address use it as their source.
    fn guard(&self, balancer: &[IpAddr]) -> Option<Vec<IpNetwork>> {
        let mut sources = self.sources.clone()?;
        if self.node.iter().any(|ip| sources.iter().any(|range| range.contains(*ip))) {
            sources.extend(balancer.iter().copied().map(IpNetwork::from));
        }
        Some(sources)
    }

    /// The addresses at which this node serves a port as a load balancer.
    fn balancer(&self, port: &Port<'_>) -> Vec<IpAddr> {
        let is_here = self.node_ports.contains(&(port.protocol_name(), i32::from(port.number)));
        let mut all = self.balancer.clone();
        all.extend(self.node.iter().filter(|ip| is_here && !self.balancer.contains(ip)));
        all
    }
}

/// The ranges of sources in a family. `None` permits all: there is no range, or one range has all addresses. If the
/// family has no range, the ranges of the other family decide.
fn sources(ranges: &[&String], is_ipv4: bool) -> Option<Vec<IpNetwork>> {
    let all: Vec<IpNetwork> = ranges.iter().filter_map(|range| range.trim().parse().ok()).collect();
    let own: Vec<IpNetwork> = all.iter().filter(|range| range.is_ipv4() == is_ipv4).copied().collect();
    let deciding = if own.is_empty() { &all } else { &own };
    let permits_all = ranges.is_empty() || deciding.iter().any(|range| range.prefix() == 0);
    (!permits_all).then_some(own)
}

// === impl Port ===

impl<'a> Port<'a> {
    fn of(
        spec: &'a ServiceSpec,
        port: &ServicePort,
        is_ipv4: bool,
        slices: &[Arc<EndpointSlice>],
        node: &NodeView,
    ) -> Option<Self> {
        let name = port.name.as_deref().unwrap_or_default();
        let protocol = port.protocol.as_deref().unwrap_or("TCP");
        let has_node_ports = matches!(spec.type_.as_deref(), Some("NodePort" | "LoadBalancer"));
        let node_port = port.node_port.filter(|_| has_node_ports).and_then(|port| u16::try_from(port).ok());
        Some(Self {
            spec,
            is_ipv4,
            protocol: match protocol {
                "TCP" => 6,
                "UDP" => 17,
                "SCTP" => 132,
                _ => return None,
            },
            number: u16::try_from(port.port).ok().filter(|port| *port != 0)?,
            node_port: node_port.filter(|port| *port != 0),
            choice: choose(slices, PortId { name, protocol, is_ipv4 }, node),
        })
    }

    fn protocol_name(&self) -> &'static str {
        match self.protocol {
            6 => "TCP",
            17 => "UDP",
            _ => "SCTP",
        }
    }

    fn affinity(&self) -> Option<Duration> {
        if self.spec.session_affinity.as_deref() != Some("ClientIP") {
            return None;
        }
        let config = self.spec.session_affinity_config.as_ref().and_then(|config| config.client_ip.as_ref());
        let seconds = config.and_then(|config| config.timeout_seconds);
        let timeout = seconds.and_then(|seconds| u64::try_from(seconds).ok()).map(Duration::from_secs);
        Some(timeout.filter(|timeout| !timeout.is_zero()).unwrap_or(AFFINITY).min(MAX_AFFINITY))
    }

    /// Adds the elements of the cluster IPs.
    fn add_internal(&self, program: &mut Program, chains: &Chains, addresses: &[IpAddr], node: &NodeView) {
        let destination = self.destination(program, chains, node);
        for address in addresses {
            self.add_address(program, Map::Services, *address, &destination);
        }
        for address in &self.choice.on_this_node {
            let key = Key::default().address(*address).address(*address);
            program.element(Map::Hairpin, self.is_ipv4, key, Entry::Member);
        }
    }

    /// Adds the elements of external addresses and of the node port.
    fn add_external(&self, program: &mut Program, chains: &Chains, external: &External<'_>, node: &NodeView) {
        let balancer = external.balancer(self);
        if external.ips.is_empty() && balancer.is_empty() && self.node_port.is_none() {
            return;
        }
        let is_local = self.spec.external_traffic_policy.as_deref() == Some("Local");
        let destination = if self.choice.cluster.is_empty() && self.choice.local.is_empty() {
            Destination::Nowhere(REJECT)
        } else {
            chains.make_external(program, &self.choice, self.affinity(), is_local.then_some(node));
            Destination::Entry(goto(&chains.external()))
        };
        for address in external.ips.iter().chain(&balancer) {
            self.add_address(program, Map::External, *address, &destination);
        }
        if let Some(sources) = external.guard(&balancer) {
            chains.make_guard(program, &sources);
            for address in &balancer {
                let key = self.key(Some(*address), self.number);
                program.element(Map::Guarded, self.is_ipv4, key, goto(&chains.guard()));
            }
        }
        let Some(node_port) = self.node_port else { return };
        let (map, entry) = match destination {
            Destination::Entry(entry) => (Map::NodePorts, entry),
            Destination::Nowhere(chain) => (Map::RejectedPorts, goto(chain)),
        };
        program.element(map, self.is_ipv4, self.key(None, node_port), entry);
        self.record_connectionless(program, None, node_port);
    }

    /// The destination of packets to the cluster IPs.
    fn destination(&self, program: &mut Program, chains: &Chains, node: &NodeView) -> Destination {
        let is_local = self.spec.internal_traffic_policy.as_deref() == Some("Local");
        let targets = if is_local { &self.choice.local } else { &self.choice.cluster };
        if targets.is_empty() {
            let elsewhere = is_local && !self.choice.cluster.is_empty();
            return Destination::Nowhere(if elsewhere { DROP } else { REJECT });
        }
        let affinity = self.affinity();
        if affinity.is_none() && targets.len() <= SHARED_MAX {
            return Destination::Entry(Entry::OneOf(Choice::of(targets)));
        }
        let balancing = chains.make_balancing(program, targets, affinity, is_local);
        Destination::Entry(goto(&chains.make_internal(program, &balancing, node)))
    }

    /// Adds the element of an address and the port.
    fn add_address(&self, program: &mut Program, map: Map, address: IpAddr, destination: &Destination) {
        let (map, entry) = match destination {
            Destination::Entry(entry) => (map, entry.clone()),
            Destination::Nowhere(chain) => (Map::Rejected, goto(chain)),
        };
        program.element(map, self.is_ipv4, self.key(Some(address), self.number), entry);
        self.record_connectionless(program, Some(address), self.number);
    }

    fn key(&self, address: Option<IpAddr>, port: u16) -> Key {
        let key = address.map_or_else(Key::default, |address| Key::default().address(address));
        key.protocol(self.protocol).port(port)
    }

    /// Records the targets to which open flows of datagrams may lead: all endpoints that serve, as in upstream's
    /// `CleanStaleEntries`. SCTP is not included: its connections end like TCP connections.
    fn record_connectionless(&self, program: &mut Program, address: Option<IpAddr>, port: u16) {
        const UDP: u8 = 17;
        if self.protocol != UDP {
            return;
        }
        let port = ConnectionlessPort { protocol: self.protocol, is_ipv4: self.is_ipv4, address, port };
        let all = self.choice.serving.iter();
        let targets = all.map(|target| SocketAddr::new(target.address, target.port)).collect();
        program.connectionless.insert(port, targets);
    }
}

fn goto(chain: &str) -> Entry {
    Entry::Verdict(Verdict::Goto(chain.to_owned()))
}

#[cfg(test)]
mod tests;

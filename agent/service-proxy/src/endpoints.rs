//! Choice among a service port's endpoints: by readiness, topology and traffic policy.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use coracle_services::{AddressType, Conditions, EndpointSlice, Hints};

use crate::node_view::NodeView;

/// An endpoint of one service port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Target {
    pub(crate) address: IpAddr,
    pub(crate) port: u16,
}

/// The endpoints that take traffic, sorted.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct TrafficEndpoints {
    /// With traffic policy `Cluster`.
    pub(crate) cluster: Vec<Target>,
    /// With traffic policy `Local`.
    pub(crate) local: Vec<Target>,
    /// All endpoints that serve, even if they get no new traffic. Open UDP flows to them are kept.
    pub(crate) serving: Vec<Target>,
    /// All endpoints on this node, in any state: each may connect to its own service.
    pub(crate) on_this_node: Vec<IpAddr>,
}

/// Properties of an endpoint that decide whether it takes traffic.
#[derive(Clone, Copy)]
struct Candidate<'a> {
    conditions: Conditions,
    is_local: bool,
    hints: Option<&'a Hints>,
}

/// Identifies a port of a service among the ports of its slices.
#[derive(Clone, Copy)]
pub(crate) struct PortId<'a> {
    pub(crate) name: &'a str,
    pub(crate) protocol: &'a str,
    pub(crate) is_ipv4: bool,
}

/// The endpoints of a service port. Topology hints apply to traffic with the policy `Cluster`. Internal and external
/// traffic can have different policies.
pub(crate) fn choose(slices: &[Arc<EndpointSlice>], port: PortId<'_>, node: &NodeView) -> TrafficEndpoints {
    let all = candidates(slices, port, node);
    let mut usable = available(&all, |_| true);
    if let Some(preferred) = preferred_by_hints(&all, &usable, node) {
        usable = preferred;
    }
    let serving = all.iter().filter(|(_, of)| of.conditions.is_serving()).map(|(target, _)| *target);
    let mut on_this_node: Vec<IpAddr> =
        all.iter().filter(|(_, of)| of.is_local).map(|(target, _)| target.address).collect();
    on_this_node.dedup();
    TrafficEndpoints {
        cluster: usable,
        local: available(&all, |of| of.is_local),
        serving: serving.collect(),
        on_this_node,
    }
}

fn candidates<'a>(
    slices: &'a [Arc<EndpointSlice>],
    id: PortId<'_>,
    node: &NodeView,
) -> BTreeMap<Target, Candidate<'a>> {
    let family = if id.is_ipv4 { AddressType::IPv4 } else { AddressType::IPv6 };
    let mut all = BTreeMap::new();
    for slice in slices.iter().filter(|slice| slice.address_type == family) {
        let ports =
            slice.ports.iter().filter(|port| port.name() == id.name && port.protocol() == id.protocol);
        for port in ports.filter_map(|port| port.port) {
            for endpoint in &slice.endpoints {
                let Some(address) = endpoint.address.filter(|address| address.is_ipv4() == id.is_ipv4) else {
                    continue;
                };
                let candidate = Candidate {
                    conditions: endpoint.conditions,
                    is_local: endpoint.node_name.as_deref() == Some(node.name.as_str()),
                    hints: endpoint.hints.as_deref(),
                };
                // An endpoint may be in two slices while it moves between them. A new pod may also have the address of
                // a terminating pod.
                let known = all.entry(Target { address, port }).or_insert(candidate);
                let rank = |of: Conditions| (!of.is_terminating(), of.is_ready());
                if rank(candidate.conditions) > rank(known.conditions) {
                    *known = candidate;
                }
            }
        }
    }
    all
}

/// The ready endpoints among the selected endpoints. If no endpoint is ready, the terminating endpoints that still
/// serve.
fn available(
    all: &BTreeMap<Target, Candidate<'_>>,
    is_selected: impl Fn(&Candidate<'_>) -> bool,
) -> Vec<Target> {
    let those = |takes: fn(Conditions) -> bool| {
        let fitting =
            all.iter().filter(|(_, candidate)| is_selected(candidate) && takes(candidate.conditions));
        fitting.map(|(target, _)| *target).collect::<Vec<_>>()
    };
    let ready = those(Conditions::is_ready);
    if ready.is_empty() { those(|of| of.is_serving() && of.is_terminating()) } else { ready }
}

/// The endpoints whose hints name this node or its zone. `None` if a usable endpoint has no hints or is not ready, or
/// if no endpoint has a hint for this node or zone.
fn preferred_by_hints(
    all: &BTreeMap<Target, Candidate<'_>>,
    usable: &[Target],
    node: &NodeView,
) -> Option<Vec<Target>> {
    let hinted = |names: &dyn Fn(&Hints) -> Option<bool>| {
        let mut hinted = Vec::new();
        for target in usable {
            let candidate = all.get(target).filter(|of| of.conditions.is_ready())?;
            if names(candidate.hints?)? {
                hinted.push(*target);
            }
        }
        Some(hinted).filter(|hinted| !hinted.is_empty())
    };
    let listed = |list: &Option<Vec<_>>, name: &str| {
        let list: &Vec<coracle_services::Named> = list.as_ref()?;
        Some(list.iter().any(|of| &*of.name == name)).filter(|_| !list.is_empty())
    };
    let same_node = hinted(&|hints| listed(&hints.for_nodes, &node.name));
    same_node.or_else(|| {
        let zone = node.zone.as_deref()?;
        hinted(&|hints| listed(&hints.for_zones, zone))
    })
}

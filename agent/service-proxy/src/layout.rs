//! The fixed part of the table.
//!
//! ```text
//! prerouting, output (nat) ─► services ─ cluster IP  ─► balance N ─► DNAT to one of up to N targets
//!                                      ─ … with affinity or many endpoints ─► chains of the service ─► DNAT
//!                                      ─ external IP ─► external chain of the service
//!                                      ─ node port   ─► external chain of the service
//! postrouting (nat)        ─ marked, or from an endpoint to itself ─► masquerade
//! guard, guard-output      ─ load balancer address ─► sources that may reach it
//! (before nat)
//! input, forward           ─ UDP of a pod to the overlay's port ─► drop
//! input, forward, output   ─ new, not translated, to a service without endpoints or an unused port of a cluster IP
//!                            ─► reject or drop
//! forward, output            ─ new, not translated, to an address in the ranges of services ─► drop
//! ```
//!
//! The packets of established connections leave each filter at the first or second rule. The first packet of a
//! connection to a cluster IP costs a look-up of its chain, and on average one or two of its target: if no target has
//! the random number, another number follows (see [`choice`](crate::choice)).

use std::net::Ipv6Addr;

use coracle_nft::{
    BaseChain, DataType, Header, Hook, INET_PROTO, INET_SERVICE, MARK, Meta, R0, Rule, SetSpec, Transaction,
};
use ipnetwork::{IpNetwork, Ipv4Network};

use crate::choice::{limits, sizes};
use crate::node_view::NodeView;
use crate::program::{Map, balancing};

/// Bit of the packet mark that requests masquerading, the same as kube-proxy's.
pub(crate) const MASQUERADE: u32 = 0x4000;
/// The first and the last link-local address, fe80::/10.
const LINK_LOCAL: (Ipv6Addr, Ipv6Addr) = (
    Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 0),
    Ipv6Addr::new(0xfebf, 0xffff, 0xffff, 0xffff, 0xffff, 0xffff, 0xffff, 0xffff),
);
pub(crate) const REJECT: &str = "reject";
pub(crate) const DROP: &str = "drop";
pub(crate) const POSTROUTING: &str = "postrouting";
/// Name of the chain for UDP packets to the overlay's port.
const OVERLAY_PORT: &str = "overlay-port";

pub(crate) const MAPS: [Map; 9] = [
    Map::Services,
    Map::Targets,
    Map::External,
    Map::NodePorts,
    Map::Rejected,
    Map::RejectedPorts,
    Map::Guarded,
    Map::ClusterIps,
    Map::Hairpin,
];

/// Makes the maps, the base chains and their rules.
pub(crate) fn make(transaction: &mut Transaction<'_>, node: &NodeView) {
    for is_ipv4 in [true, false] {
        for map in MAPS {
            make_map(transaction, map, is_ipv4);
        }
    }
    for chain in [REJECT, DROP, "services", "check", "check-ports"] {
        transaction.make_chain(chain);
    }
    transaction.rule(REJECT, &Rule::default().reject());
    transaction.rule(DROP, &Rule::default().drop());
    sizes().for_each(|slots| balance(transaction, slots, node));
    services(transaction, node);
    checks(transaction, node);
    overlay_port(transaction, node);
    nat(transaction, node);
    filters(transaction, node);
}

/// Name of a map.
pub(crate) fn name(map: Map, is_ipv4: bool) -> &'static str {
    match (map, is_ipv4) {
        (Map::Services, true) => "services4",
        (Map::Services, false) => "services6",
        (Map::Targets, true) => "targets4",
        (Map::Targets, false) => "targets6",
        (Map::External, true) => "external4",
        (Map::External, false) => "external6",
        (Map::NodePorts, true) => "node_ports4",
        (Map::NodePorts, false) => "node_ports6",
        (Map::Rejected, true) => "rejected4",
        (Map::Rejected, false) => "rejected6",
        (Map::RejectedPorts, true) => "rejected_ports4",
        (Map::RejectedPorts, false) => "rejected_ports6",
        (Map::Guarded, true) => "guarded4",
        (Map::Guarded, false) => "guarded6",
        (Map::ClusterIps, true) => "cluster_ips4",
        (Map::ClusterIps, false) => "cluster_ips6",
        (Map::Hairpin, true) => "hairpin4",
        (Map::Hairpin, false) => "hairpin6",
    }
}

/// Type of a target: an address and a port.
pub(crate) fn target_type(is_ipv4: bool) -> DataType {
    let address = DataType::address(is_ipv4);
    DataType::concatenated(&[address.kind, INET_SERVICE], address.length + 4)
}

fn make_map(transaction: &mut Transaction<'_>, map: Map, is_ipv4: bool) {
    let DataType { kind, length: address_length } = DataType::address(is_ipv4);
    let (types, length): (&[u32], u32) = match map {
        Map::Services | Map::External | Map::Rejected | Map::Guarded => {
            (&[kind, INET_PROTO, INET_SERVICE], address_length + 8)
        }
        Map::Targets => (&[kind, INET_PROTO, INET_SERVICE, MARK], address_length + 12),
        Map::NodePorts | Map::RejectedPorts => (&[INET_PROTO, INET_SERVICE], 8),
        Map::ClusterIps => (&[kind], address_length),
        Map::Hairpin => (&[kind, kind], 2 * address_length),
    };
    transaction.make_set(&SetSpec {
        name: name(map, is_ipv4),
        key: DataType::concatenated(types, length),
        value: matches!(map, Map::Targets).then(|| target_type(is_ipv4)),
        verdicts: !matches!(map, Map::ClusterIps | Map::Hairpin | Map::Targets),
        ..SetSpec::default()
    });
}

fn registers(is_ipv4: bool) -> u32 {
    DataType::address(is_ipv4).length / 4
}

/// Loads destination, protocol and port, the key of most maps.
fn destination(is_ipv4: bool) -> Rule {
    Rule::of_family(is_ipv4).destination(is_ipv4, R0).protocol_and_port(R0 + registers(is_ipv4))
}

/// The rule that marks packets of clients outside the pod network for masquerading: the replies must come back through
/// this node. `None` without a pod network.
pub(crate) fn masquerade_outside(is_ipv4: bool, node: &NodeView) -> Option<Rule> {
    let pods: Vec<_> = node.pod_networks.iter().filter(|net| net.is_ipv4() == is_ipv4).collect();
    let outside = pods.iter().fold(Rule::of_family(is_ipv4), |rule, net| rule.from(**net, true));
    (!pods.is_empty()).then(|| outside.set_mark(MASQUERADE))
}

/// Makes the chains that choose one of the targets in `slots` at random, one for each family.
fn balance(transaction: &mut Transaction<'_>, slots: usize, node: &NodeView) {
    for is_ipv4 in [true, false] {
        let (chain, registers) = (balancing(slots, is_ipv4), registers(is_ipv4));
        transaction.make_chain(&chain);
        masquerade_outside(is_ipv4, node).iter().for_each(|rule| transaction.rule(&chain, rule));
        for limit in limits(slots) {
            let modulus = u32::try_from(limit).unwrap_or(u32::MAX);
            // The random number follows the address, the protocol and the port in the key. If no target has the number,
            // the rule does not match.
            let rule = destination(is_ipv4).random(modulus, R0 + registers + 2);
            let rule = rule.lookup(name(Map::Targets, is_ipv4));
            transaction.rule(&chain, &rule.destination_nat(if is_ipv4 { 2 } else { 10 }, registers));
        }
    }
}

fn services(transaction: &mut Transaction<'_>, node: &NodeView) {
    for is_ipv4 in [true, false] {
        for map in [Map::Services, Map::External] {
            transaction.rule("services", &destination(is_ipv4).lookup_verdict(name(map, is_ipv4)));
        }
        for port in local_ports(is_ipv4, node) {
            transaction.rule("services", &port.lookup_verdict(name(Map::NodePorts, is_ipv4)));
        }
    }
}

/// Rules that load protocol and port of packets to addresses of this machine that have node ports. There is one rule
/// for each range, or one rule for all addresses if the family has no range.
fn local_ports(is_ipv4: bool, node: &NodeView) -> Vec<Rule> {
    let ranges = node.node_port_addresses.iter().filter(|range| range.is_ipv4() == is_ipv4);
    let of_range = |range: &IpNetwork| local_port(is_ipv4, node).to(*range, false).protocol_and_port(R0);
    let rules: Vec<Rule> = ranges.map(of_range).collect();
    if rules.is_empty() { vec![local_port(is_ipv4, node).protocol_and_port(R0)] } else { rules }
}

/// Matches packets to this machine. Loopback addresses have no node ports: their answers could not leave the machine.
/// Addresses that the node serves itself have no node ports either: otherwise a node port 53 would take over cluster
/// DNS.
fn local_port(is_ipv4: bool, node: &NodeView) -> Rule {
    let rule = Rule::of_family(is_ipv4).destination_is_local();
    let rule = match Ipv4Network::new_checked([127, 0, 0, 0].into(), 8) {
        Some(loopback) if is_ipv4 => rule.to(IpNetwork::V4(loopback), true),
        _ => rule.to(IpNetwork::from(std::net::IpAddr::V6(std::net::Ipv6Addr::LOCALHOST)), true),
    };
    let served = node.served_here.iter().filter(|address| address.is_ipv4() == is_ipv4);
    served.fold(rule, |rule, address| rule.to(IpNetwork::from(*address), true))
}

/// Rejects packets to services without endpoints, and to unused ports of cluster IPs.
fn checks(transaction: &mut Transaction<'_>, node: &NodeView) {
    for is_ipv4 in [true, false] {
        for port in local_ports(is_ipv4, node) {
            let verdict = port.lookup_verdict(name(Map::RejectedPorts, is_ipv4));
            transaction.rule("check-ports", &verdict);
        }
        let addresses = destination(is_ipv4).lookup_verdict(name(Map::Rejected, is_ipv4));
        transaction.rule("check", &addresses);
        let unused = Rule::of_family(is_ipv4).destination(is_ipv4, R0).in_set(name(Map::ClusterIps, is_ipv4));
        transaction.rule("check", &unused.reject());
    }
}

/// Host ports of pods (priority -100) take precedence. A load balancer may get a port while the pod with that host
/// port does not run. The pod gets its port again when it starts.
const AFTER_HOST_PORTS: i32 = -99;

fn nat(transaction: &mut Transaction<'_>, node: &NodeView) {
    for (name, hook) in [("prerouting", Hook::Prerouting), ("output", Hook::Output)] {
        transaction.make_base_chain(BaseChain { name, hook, priority: AFTER_HOST_PORTS, kind: "nat" });
        transaction.rule(name, &Rule::default().jump("services"));
    }
    transaction.make_base_chain(BaseChain {
        name: POSTROUTING,
        hook: Hook::Postrouting,
        priority: 100,
        kind: "nat",
    });
    let marked = Rule::default().marked(MASQUERADE).clear_mark(MASQUERADE);
    transaction.rule(POSTROUTING, &marked.masquerade_randomly());
    for is_ipv4 in [true, false] {
        let ends = Rule::of_family(is_ipv4).translated().source(is_ipv4, R0);
        let ends = ends.destination(is_ipv4, R0 + registers(is_ipv4));
        transaction.rule(POSTROUTING, &ends.in_set(name(Map::Hairpin, is_ipv4)).masquerade_randomly());
    }
    // Without masquerading, a reply between pods of one bridge would take the direct path and bypass conntrack.
    for network in node.pod_networks.iter().filter(|_| node.bridge_bypasses_filters) {
        let among = Rule::of_family(network.is_ipv4()).translated().from(*network, false).to(*network, false);
        transaction.rule(POSTROUTING, &among.masquerade_randomly());
    }
}

/// The rule that sends UDP packets to the overlay's port, at any address, to the chain `overlay-port`. `None` without
/// an overlay port or without pod networks.
///
/// In filters, this rule precedes the rule for established connections. Otherwise a pod could reach the overlay of
/// another node. First, a pod of the other node sends a datagram from the overlay's port. The other node masquerades
/// the datagram and preserves the port. If its conntrack entry expires before the reply arrives, it takes the reply for
/// a packet of the overlay.
fn to_overlay_port(node: &NodeView) -> Option<Rule> {
    const UDP: u8 = 17;
    let port = node.overlay_port.filter(|_| !node.pod_networks.is_empty())?;
    let udp = Rule::default().meta(Meta::Transport, R0).equal(R0, &[UDP]);
    Some(udp.payload(Header::Transport, 2, 2, R0).equal(R0, &port.to_be_bytes()).jump(OVERLAY_PORT))
}

/// Rules of the chain `overlay-port`: they drop the packets of pods.
fn drop_of_pods(node: &NodeView) -> Vec<Rule> {
    let of_pods = node.pod_networks.iter().map(|pods| Rule::of_family(pods.is_ipv4()).from(*pods, false));
    // A pod with an IPv6 address can also send from its link-local address. Nodes never use link-local addresses for
    // the overlay.
    let has_local = node.pod_networks.iter().any(IpNetwork::is_ipv6);
    let local = Rule::of_family(false).source(false, R0);
    let local = local.between(R0, &LINK_LOCAL.0.octets(), &LINK_LOCAL.1.octets());
    of_pods.chain(has_local.then_some(local)).map(Rule::drop).collect()
}

fn overlay_port(transaction: &mut Transaction<'_>, node: &NodeView) {
    transaction.make_chain(OVERLAY_PORT);
    drop_of_pods(node).iter().for_each(|rule| transaction.rule(OVERLAY_PORT, rule));
}

/// Makes a table that only drops packets of pods to the overlay's port. Does nothing without an overlay port or without
/// pod networks.
pub(crate) fn make_overlay_guard(transaction: &mut Transaction<'_>, node: &NodeView) {
    let Some(rule) = to_overlay_port(node) else { return };
    transaction.make_table();
    overlay_port(transaction, node);
    for (name, hook) in [("filter-input", Hook::Input), ("filter-forward", Hook::Forward)] {
        transaction.make_base_chain(BaseChain { name, hook, priority: -50, kind: "filter" });
        transaction.rule(name, &rule);
    }
}

/// Rules that drop packets to unallocated addresses in the ranges of services. Otherwise these packets would follow the
/// default route out of the cluster. Packets to addresses that the node serves itself are accepted. Source:
/// kube-proxy's chain `cluster-ips-check`.
fn drop_unallocated(node: &NodeView) -> Vec<Rule> {
    let ranges = node.service_ranges.iter().filter(|range| !has_own_addresses(range, node));
    let rule = |range: &IpNetwork| {
        let served = node.served_here.iter().filter(|address| range.contains(**address));
        let all = Rule::of_family(range.is_ipv4()).to(*range, false);
        served.fold(all, |rule, address| rule.to(IpNetwork::from(*address), true)).drop()
    };
    ranges.map(rule).collect()
}

/// Whether a range has addresses of this node or of its pods. The node ignores such a range, so that a wrong
/// ServiceCIDR does not cut off the node.
fn has_own_addresses(range: &IpNetwork, node: &NodeView) -> bool {
    let overlaps = |pods: &IpNetwork| range.contains(pods.network()) || pods.contains(range.network());
    node.addresses.iter().any(|address| range.contains(*address)) || node.pod_networks.iter().any(overlaps)
}

/// Chains that check the sources of packets before the translation: one for received packets, one for packets of the
/// node itself.
const GUARDS: [(&str, Hook); 2] = [("guard", Hook::Prerouting), ("guard-output", Hook::Output)];

fn filters(transaction: &mut Transaction<'_>, node: &NodeView) {
    for (chain, hook) in GUARDS {
        transaction.make_base_chain(BaseChain { name: chain, hook, priority: -110, kind: "filter" });
        transaction.rule(chain, &Rule::default().established_or_related().accept());
        for is_ipv4 in [true, false] {
            let guarded = destination(is_ipv4).lookup_verdict(name(Map::Guarded, is_ipv4));
            transaction.rule(chain, &guarded);
        }
    }
    for (name, hook) in
        [("filter-input", Hook::Input), ("filter-forward", Hook::Forward), ("filter-output", Hook::Output)]
    {
        transaction.make_base_chain(BaseChain { name, hook, priority: -50, kind: "filter" });
        filter_rules(hook, node).iter().for_each(|rule| transaction.rule(name, rule));
    }
}

/// The rules of the filter at a hook. Cheap rules come first where the order is free.
fn filter_rules(hook: Hook, node: &NodeView) -> Vec<Rule> {
    let is_received = matches!(hook, Hook::Input | Hook::Forward);
    let mut rules: Vec<Rule> = to_overlay_port(node).filter(|_| is_received).into_iter().collect();
    rules.push(Rule::default().established_or_related().accept());
    // A translated destination is an endpoint. So the service has endpoints, and needs no check.
    rules.push(Rule::default().translated().accept());
    if matches!(hook, Hook::Input | Hook::Output) {
        rules.push(Rule::default().jump("check-ports"));
    }
    rules.push(Rule::default().jump("check"));
    if matches!(hook, Hook::Forward | Hook::Output) {
        rules.extend(drop_unallocated(node));
    }
    rules
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_of_pods_to_the_overlay_port_are_dropped() {
        let mut node = NodeView {
            pod_networks: vec!["10.42.0.0/24".parse().unwrap(), "fd42::/64".parse().unwrap()],
            overlay_port: Some(8472),
            ..NodeView::default()
        };
        let rules = drop_of_pods(&node);
        let of_ipv4 = Rule::default().family(2).from(node.pod_networks[0], false).drop();
        assert_eq!((rules.len(), &rules[0]), (3, &of_ipv4));
        let link_local = Rule::of_family(false).source(false, R0);
        let link_local = link_local.between(R0, &LINK_LOCAL.0.octets(), &LINK_LOCAL.1.octets());
        assert_eq!(rules[2], link_local.drop());
        let port = Rule::default().meta(Meta::Transport, R0).equal(R0, &[17]);
        let port = port.payload(Header::Transport, 2, 2, R0).equal(R0, &[0x21, 0x18]);
        assert_eq!(to_overlay_port(&node), Some(port.jump(OVERLAY_PORT)));
        let table = |node: &NodeView| {
            let mut transaction = Transaction::new("t");
            filters(&mut transaction, node);
            transaction.finish().as_bytes().to_vec()
        };
        let with = table(&node);
        node.overlay_port = None;
        assert_eq!(to_overlay_port(&node), None);
        assert_ne!(with, table(&node), "the rules are in the table");
    }

    #[test]
    fn only_first_packets_that_are_not_translated_are_looked_up() {
        let pod_networks = vec!["10.42.0.0/24".parse().unwrap()];
        let node = NodeView { pod_networks, overlay_port: Some(8472), ..NodeView::default() };
        let (established, translated) =
            (Rule::default().established_or_related(), Rule::default().translated());
        let [check_ports, check] = ["check-ports", "check"].map(|chain| Rule::default().jump(chain));
        let overlay = to_overlay_port(&node).unwrap();
        let (first, then) = (established.accept(), translated.accept());
        let forward = [overlay, first.clone(), then.clone(), check.clone()];
        assert_eq!(filter_rules(Hook::Forward, &node), forward);
        assert_eq!(filter_rules(Hook::Output, &node), [first, then, check_ports, check]);
    }

    #[test]
    fn packets_to_addresses_without_a_service_are_dropped() {
        let mut node = NodeView {
            pod_networks: vec!["10.42.0.0/24".parse().unwrap()],
            service_ranges: vec!["10.43.0.0/16".parse().unwrap(), "fd43::/112".parse().unwrap()],
            served_here: vec!["10.43.0.10".parse().unwrap()],
            ..NodeView::default()
        };
        let v4 = Rule::default().family(2).to(node.service_ranges[0], false);
        let v4 = v4.to("10.43.0.10/32".parse().unwrap(), true).drop();
        let v6 = Rule::default().family(10).to(node.service_ranges[1], false).drop();
        let rules = drop_unallocated(&node);
        assert_eq!(rules, [v4, v6]);
        for hook in [Hook::Forward, Hook::Output] {
            assert!(filter_rules(hook, &node).ends_with(&rules), "after the checks of known services");
        }
        assert!(!filter_rules(Hook::Input, &node).contains(&rules[0]));
        node.addresses = vec!["fd43::1".parse().unwrap()];
        node.service_ranges[0] = "10.40.0.0/14".parse().unwrap();
        assert_eq!(drop_unallocated(&node), [], "the ranges have the node's own addresses");
    }

    #[test]
    fn clients_outside_the_pod_network_are_masqueraded() {
        let node = NodeView { pod_networks: vec!["10.42.0.0/24".parse().unwrap()], ..NodeView::default() };
        let marked = Rule::default().family(2).from(node.pod_networks[0], true).set_mark(MASQUERADE);
        assert_eq!(masquerade_outside(true, &node), Some(marked));
        assert_eq!(masquerade_outside(false, &node), None, "there are no pods of the family");
    }

    #[test]
    fn node_ports_may_be_limited_to_addresses() {
        let node_port_addresses = vec!["192.0.2.0/24".parse().unwrap(), "198.51.100.1/32".parse().unwrap()];
        let node = NodeView { node_port_addresses, ..NodeView::default() };
        let first = local_port(true, &node).to(node.node_port_addresses[0], false).protocol_and_port(R0);
        let rules = local_ports(true, &node);
        assert_eq!((rules.len(), &rules[0]), (2, &first));
        let all = local_port(false, &node).protocol_and_port(R0);
        assert_eq!(local_ports(false, &node), [all], "a family without ranges");
    }

    #[test]
    fn addresses_served_by_the_node_have_no_node_ports() {
        let node = |served: &[&str]| NodeView {
            served_here: served.iter().map(|address| address.parse().unwrap()).collect(),
            ..NodeView::default()
        };
        let none = local_port(true, &node(&[]));
        assert_ne!(local_port(true, &node(&["10.43.0.10"])), none);
        assert_eq!(local_port(true, &node(&["fd43::10"])), none, "another family");
        assert_ne!(local_port(false, &node(&["fd43::10"])), local_port(false, &node(&[])));
    }
}

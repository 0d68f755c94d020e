//! The nftables table: masquerading, host ports, and isolated bridges.
//!
//! Each change is one transaction: a packet passes either the old table or the new table. Ports, pods' addresses and
//! ranges are elements of maps and sets, so a change of a pod changes only its own elements. A port with conditions has
//! a chain. Networks and bridges have rules: if one of them changes, all rules of its chain are written again.
//! Connections keep their translation, because conntrack stores it, not the rules.
//!
//! ```text
//! prerouting, output ─ to an address of this machine ─► hostports ─ map ─► DNAT to a pod
//!   (only while there are host ports)                             ─► map ─► conditional-N ─► DNAT to a pod
//! postrouting ─ from a network, not to it or its exceptions ─► masquerade
//!             ─ from a pod to its network by a host port ─► masquerade (else the reply bypasses the translation)
//!             ─ from 127.0.0.0/8 by a host port          ─► masquerade
//! forward     ─ from one isolated bridge to another      ─► drop
//! input       ─ to 127.0.0.0/8 by an opened bridge, not a reply ─► drop
//! ```

mod conditional;
mod element;
mod family;
mod host_port_jumps;
mod packet_match;
mod socket;

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr};

use coracle_nft::{
    BaseChain, Batch, DataType, Element, Hook, INET_PROTO, INET_SERVICE, Key, Meta, R0, Rule, SetSpec,
    Transaction, Verb, intervals,
};
use ipnetwork::{IpNetwork, Ipv4Network};

use crate::port_condition::Condition;
use crate::ports::Protocol;
use family::{Family, V4, V6, family};
pub(crate) use host_port_jumps::HostPortJumps;
use packet_match::{MULTICAST_V4, MULTICAST_V6, from, interface, of_family};
pub(crate) use socket::{commit, exists, forward_drops, has_rules, open_once};

/// Content of the table.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Plan {
    pub(crate) mappings: BTreeSet<Mapping>,
    /// Host ports with conditions. A packet must meet all conditions of its port.
    pub(crate) conditional: BTreeSet<(Mapping, Vec<Condition>)>,
    /// Networks whose outgoing packets are masqueraded, with excepted destinations.
    pub(crate) masquerade: BTreeMap<IpNetwork, Vec<IpNetwork>>,
    /// Networks whose pods may reach each other through host ports.
    pub(crate) hairpin: BTreeSet<IpNetwork>,
    /// Whether 127.0.0.1 may use host ports.
    pub(crate) loopback: bool,
    /// Destinations to which packets through host ports keep their source address. Takes precedence over `hairpin`,
    /// `masquerade_all` and `loopback`.
    pub(crate) untouched: BTreeSet<IpAddr>,
    /// Addresses to which all packets through host ports are masqueraded.
    pub(crate) masquerade_all: BTreeSet<IpAddr>,
    /// Bridges between which no packets are forwarded.
    pub(crate) isolated: BTreeSet<String>,
    /// Interfaces with the sysctl `route_localnet`, so that 127.0.0.1 may use host ports. Packets that arrive at these
    /// interfaces for 127.0.0.0/8 are dropped, except replies.
    pub(crate) opened: BTreeSet<String>,
}

/// A host port with one target.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Mapping {
    pub(crate) host_ip: Option<IpAddr>,
    pub(crate) host_port: u16,
    pub(crate) protocol: Protocol,
    pub(crate) to: IpAddr,
    pub(crate) to_port: u16,
}

/// The loopback range of each family.
const LOOPBACK: Ipv4Network = match Ipv4Network::new_checked(Ipv4Addr::new(127, 0, 0, 0), 8) {
    Some(network) => network,
    None => unreachable!(),
};

/// The transaction that replaces the table. Host ports do not apply to the addresses in `served`.
pub(crate) fn replace(table: &str, plan: &Plan, served: &[IpAddr]) -> Batch {
    let mut table = Table(Transaction::new(table));
    table.0.delete_table();
    table.0.make_table();
    table.chains();
    for family in [V4, V6] {
        table.maps(&family);
        table.host_port_rules(&family);
    }
    table.conditional_map();
    table.rule("hostports", &Rule::default().protocol_and_port(R0).lookup_verdict(conditional::PORTS));
    table.write_host_port_jumps(&HostPortJumps { ports: [false, plan.has_ports()], served });
    if !plan.has_masquerading_rules() {
        // If the plan has masquerading rules, `update` writes all rules of the chain.
        table.postrouting_rules(plan);
    }
    table.update(&Plan::default(), plan);
    table.0.finish()
}

/// The transaction that changes the table from `present` to `wanted`. Both plans may omit unchanged elements. They may
/// omit all rules if no rule changes.
pub(crate) fn change(table: &str, present: &Plan, wanted: &Plan, jumps: &HostPortJumps<'_>) -> Batch {
    let mut table = Table(Transaction::new(table));
    table.update(present, wanted);
    table.write_host_port_jumps(jumps);
    table.0.finish()
}

/// The transaction that removes the table.
pub(crate) fn remove(table: &str) -> Batch {
    let mut table = Transaction::new(table);
    table.delete_table();
    table.finish()
}

// === impl Plan ===

impl Plan {
    /// Host ports of connectionless protocols. A sender of datagrams does not notice that the target has changed.
    pub(crate) fn connectionless(&self) -> BTreeSet<Mapping> {
        let all = self.mappings.iter().chain(self.conditional.iter().map(|(mapping, _)| mapping));
        all.filter(|mapping| mapping.protocol != Protocol::Tcp).cloned().collect()
    }

    /// Whether there are host ports.
    pub(crate) fn has_ports(&self) -> bool {
        !self.mappings.is_empty() || !self.conditional.is_empty()
    }

    fn has_masquerading_rules(&self) -> bool {
        !self.masquerade.is_empty() || !self.hairpin.is_empty() || self.loopback
    }

    /// Whether the other plan has the same rules in the chain `postrouting`, independent of the elements of sets.
    fn masquerades_as(&self, other: &Self) -> bool {
        let rules = |plan: &Self| -> Vec<(IpNetwork, bool)> {
            // A network without exceptions has no set.
            plan.masquerade.iter().map(|(network, except)| (*network, except.is_empty())).collect()
        };
        rules(self) == rules(other) && self.hairpin == other.hairpin && self.loopback == other.loopback
    }
}

/// A transaction under construction.
struct Table<'a>(Transaction<'a>);

// === impl Table ===

impl Table<'_> {
    /// Adds missing elements and rules, and removes elements that are not wanted.
    fn update(&mut self, present: &Plan, wanted: &Plan) {
        for family in [V4, V6] {
            self.mappings(&family, &present.mappings, &wanted.mappings);
            self.addresses(&family, family.untouched, &present.untouched, &wanted.untouched);
            self.addresses(&family, family.masquerade_all, &present.masquerade_all, &wanted.masquerade_all);
        }
        self.conditional_ports(&present.conditional, &wanted.conditional);
        self.masquerade(present, wanted);
        self.loopback_rules(&present.opened, &wanted.opened);
        self.isolation_rules(&present.isolated, &wanted.isolated);
    }

    fn chains(&mut self) {
        self.0.make_chain("hostports");
        for (name, hook, priority) in [
            ("prerouting", Hook::Prerouting, -100),
            ("output", Hook::Output, -100),
            ("postrouting", Hook::Postrouting, 100),
        ] {
            self.0.make_base_chain(BaseChain { name, hook, priority, kind: "nat" });
        }
    }

    fn maps(&mut self, family: &Family) {
        let port = [INET_PROTO, INET_SERVICE];
        let DataType { kind, length } = family.address;
        let value = Some(DataType::concatenated(&[kind, INET_SERVICE], length + 4));
        let any = DataType::concatenated(&port, 8);
        let one = DataType::concatenated(&[kind, port[0], port[1]], length + 8);
        for (name, key) in [(family.any, any), (family.one, one)] {
            self.0.make_set(&SetSpec { name, key, value, ..SetSpec::default() });
        }
        for name in [family.untouched, family.masquerade_all] {
            self.0.make_set(&SetSpec { name, key: family.address, ..SetSpec::default() });
        }
    }

    /// Changes the elements of a set of addresses.
    fn addresses(
        &mut self,
        family: &Family,
        set: &str,
        present: &BTreeSet<IpAddr>,
        wanted: &BTreeSet<IpAddr>,
    ) {
        let of_family = |address: &&IpAddr| address.is_ipv4() == (family.address.length == 4);
        let element = |address: &IpAddr| Element::member(Key::default().address(*address));
        let gone: Vec<_> = present.difference(wanted).filter(of_family).map(element).collect();
        self.0.remove(set, &gone);
        let new: Vec<_> = wanted.difference(present).filter(of_family).map(element).collect();
        self.0.add(set, &new);
    }

    /// Changes the elements of the maps. Removals come first, because new elements may have the same keys.
    fn mappings(&mut self, family: &Family, present: &BTreeSet<Mapping>, wanted: &BTreeSet<Mapping>) {
        for (name, by_address) in [(family.any, false), (family.one, true)] {
            let of_map = |mapping: &&Mapping| {
                mapping.to.is_ipv4() == (family.address.length == 4)
                    && mapping.host_ip.is_some() == by_address
            };
            let gone: Vec<_> =
                present.difference(wanted).filter(of_map).map(|mapping| mapping.element(false)).collect();
            self.0.remove(name, &gone);
            let new: Vec<_> =
                wanted.difference(present).filter(of_map).map(|mapping| mapping.element(true)).collect();
            self.0.add(name, &new);
        }
    }

    fn host_port_rules(&mut self, family: &Family) {
        let registers = family.address.length / 4;
        let start = || Rule::default().family(family.number);
        let one = start().destination(family.address.length == 4, R0).protocol_and_port(R0 + registers);
        self.rule("hostports", &one.lookup(family.one).destination_nat(family.number, registers));
        let any = start().protocol_and_port(R0).lookup(family.any);
        self.rule("hostports", &any.destination_nat(family.number, registers));
    }

    /// Changes the rules of the chain `postrouting` and the sets of exceptions. A set is created before the rule that
    /// uses it, and removed after that rule.
    fn masquerade(&mut self, present: &Plan, wanted: &Plan) {
        let exceptions = |plan: &Plan, network: &IpNetwork| -> Vec<IpNetwork> {
            plan.masquerade.get(network).cloned().unwrap_or_default()
        };
        for (network, except) in wanted.masquerade.iter().filter(|(_, except)| !except.is_empty()) {
            let before = exceptions(present, network);
            if before.is_empty() {
                let family = family(*network);
                let (set, key) = (exceptions_of(*network), family.address);
                self.0.make_set(&SetSpec { name: &set, key, intervals: true, ..SetSpec::default() });
            }
            self.exceptions(*network, &before, except);
        }
        if !present.masquerades_as(wanted) {
            self.0.flush_chain("postrouting");
            self.postrouting_rules(wanted);
        }
        for (network, _) in present.masquerade.iter().filter(|(_, except)| !except.is_empty()) {
            if exceptions(wanted, network).is_empty() {
                self.0.delete_set(&exceptions_of(*network));
            }
        }
    }

    fn postrouting_rules(&mut self, wanted: &Plan) {
        let translated_to = |family: &Family, set: &str| {
            let rule = Rule::default().family(family.number).translated();
            rule.destination(family.address.length == 4, R0).in_set(set)
        };
        for (network, except) in &wanted.masquerade {
            self.masquerade_rule(*network, !except.is_empty());
        }
        for family in [V4, V6] {
            self.rule("postrouting", &translated_to(&family, family.untouched).accept());
        }
        for network in &wanted.hairpin {
            self.rule("postrouting", &from(*network).to(*network, false).translated().masquerade());
        }
        for family in [V4, V6] {
            self.rule("postrouting", &translated_to(&family, family.masquerade_all).masquerade());
        }
        if wanted.loopback {
            self.rule("postrouting", &from(IpNetwork::V4(LOOPBACK)).translated().masquerade());
        }
    }

    fn masquerade_rule(&mut self, network: IpNetwork, has_exceptions: bool) {
        let is_ipv4 = network.is_ipv4();
        let (net, mask) = if is_ipv4 { MULTICAST_V4() } else { MULTICAST_V6() };
        let rule = from(network).to(network, true).destination(is_ipv4, R0);
        let mut rule = rule.mask(R0, &mask).unequal(R0, &net);
        if has_exceptions {
            rule = rule.destination(is_ipv4, R0).not_in_set(&exceptions_of(network));
        }
        self.rule("postrouting", &rule.masquerade());
    }

    fn exceptions(&mut self, network: IpNetwork, present: &[IpNetwork], wanted: &[IpNetwork]) {
        if present == wanted {
            return;
        }
        let (present, wanted, set) = (intervals(present), intervals(wanted), exceptions_of(network));
        let gone = present.difference(&wanted).map(|range| range.elements());
        self.0.elements(Verb::DeleteElements, &set, gone);
        let new = wanted.difference(&present).map(|range| range.elements());
        self.0.elements(Verb::NewElements, &set, new);
    }

    fn isolation_rules(&mut self, present: &BTreeSet<String>, wanted: &BTreeSet<String>) {
        if !self.rewrite(filter("forward", Hook::Forward), present, wanted) {
            return;
        }
        for inward in wanted {
            for outward in wanted.iter().filter(|other| *other != inward) {
                let rule = Rule::default().meta(Meta::InInterface, R0).equal(R0, &interface(inward));
                let rule = rule.meta(Meta::OutInterface, R0).equal(R0, &interface(outward));
                self.rule("forward", &rule.drop());
            }
        }
    }

    /// Protects an interface with `route_localnet`. The kernel accepts packets to 127.0.0.0/8 at this interface, so
    /// without these rules any neighbour could reach services on 127.0.0.1. The rules accept only replies, and packets
    /// whose original destination is another address.
    fn loopback_rules(&mut self, present: &BTreeSet<String>, wanted: &BTreeSet<String>) {
        if !self.rewrite(filter("input", Hook::Input), present, wanted) {
            return;
        }
        for name in wanted {
            let loopback = IpNetwork::V4(LOOPBACK);
            let by = || of_family(loopback).meta(Meta::InInterface, R0).equal(R0, &interface(name));
            // There are two rules, because packets unknown to conntrack have no status to compare.
            self.rule("input", &by().to(loopback, false).translated().accept());
            self.rule("input", &by().to(loopback, false).new_connections().drop());
        }
    }

    /// Prepares a chain for rules of these interfaces: creates, flushes or deletes the chain. Returns whether the rules
    /// have to be written.
    fn rewrite(
        &mut self,
        chain: BaseChain<'_>,
        present: &BTreeSet<String>,
        wanted: &BTreeSet<String>,
    ) -> bool {
        if present == wanted {
            return false;
        }
        match present.is_empty() {
            true => self.0.make_base_chain(chain),
            false => self.0.flush_chain(chain.name),
        }
        if wanted.is_empty() {
            self.0.delete_chain(chain.name);
        }
        true
    }

    fn rule(&mut self, chain: &str, rule: &Rule) {
        self.0.rule(chain, rule);
    }
}

fn filter(name: &str, hook: Hook) -> BaseChain<'_> {
    BaseChain { name, hook, priority: 0, kind: "filter" }
}

/// Name of the set of a network's excepted destinations. Derived from the network, without characters that have a
/// meaning in nft.
fn exceptions_of(network: IpNetwork) -> String {
    format!("not_beyond_{}", network.to_string().replace([':', '/'], "_"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(ports: &[u16]) -> Plan {
        let mapping = |port: &u16| Mapping {
            host_ip: None,
            host_port: *port,
            protocol: Protocol::Tcp,
            to: [10, 0, 0, 2].into(),
            to_port: 80,
        };
        let isolated = ["br0".to_owned()].into();
        Plan { mappings: ports.iter().map(mapping).collect(), isolated, ..Plan::default() }
    }

    #[test]
    fn a_change_has_messages_only_for_what_differs() {
        let length = |present: &Plan, wanted: &Plan| {
            let jumps = HostPortJumps { ports: [present, wanted].map(Plan::has_ports), served: &[] };
            let batch = change("t", present, wanted, &jumps);
            (coracle_nft::messages(batch.as_bytes()).count(), batch.as_bytes().len())
        };
        let all: Vec<u16> = (1..=1000).collect();
        assert_eq!(length(&plan(&all), &plan(&all)).0, 1, "only the message that begins the batch");
        assert_eq!(
            length(&plan(&all), &plan(&all[1..])),
            length(&plan(&[1, 2]), &plan(&[2])),
            "a removed port"
        );
        assert_eq!(
            length(&plan(&all[1..]), &plan(&all)),
            length(&plan(&[2]), &plan(&[1, 2])),
            "an added port"
        );
        assert_eq!(length(&plan(&[1]), &plan(&[2])).0, 3);
        // The first port adds its element and two rules to each of two emptied chains.
        assert_eq!((length(&plan(&[]), &plan(&[1])).0, length(&plan(&[1]), &plan(&[])).0), (8, 4));
        let pods = |count: u8| Plan {
            untouched: (0..count).map(|number| [10, 0, 0, number].into()).collect(),
            masquerade_all: (0..count).map(|number| [10, 0, 1, number].into()).collect(),
            ..plan(&all)
        };
        assert_eq!(length(&pods(200), &pods(199)).0, 3);
        let net = |text: &str| text.parse::<IpNetwork>().unwrap();
        let except = |except: &[&str]| Plan {
            masquerade: [(net("10.0.0.0/24"), except.iter().map(|text| net(text)).collect())].into(),
            ..plan(&all)
        };
        let (none, one, other) = (except(&[]), except(&["10.1.0.0/24"]), except(&["10.2.0.0/24"]));
        assert_eq!(length(&one, &other).0, 3);
        // The first number counts the chain's rules, the chain's removal, and the set with its element. The second
        // number counts the rules and both removals.
        assert_eq!((length(&none, &one).0, length(&one, &none).0), (9, 8));
    }

    #[test]
    fn a_large_plan_takes_several_messages_below_64_kib() {
        let ports: Vec<u16> = (1..=u16::MAX).collect();
        let batch = replace("t", &plan(&ports), &[]);
        let lengths = coracle_nft::messages(batch.as_bytes()).map(<[u8]>::len);
        let (long, most) =
            lengths.fold((0, 0), |(long, most), len| (long + usize::from(len > 16384), most.max(len)));
        assert!(long > 60 && most < 65536, "{long} {most}");
    }
}

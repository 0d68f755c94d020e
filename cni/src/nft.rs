//! The nftables table: masquerading, host ports, and isolated bridges.
//!
//! Each change is one transaction: a packet sees the old table or the new one. Ports and ranges are elements of maps
//! and sets, rules are added; to remove a rule, the whole table is replaced. Connections keep their translation: it is
//! stored in conntrack, not in the rules.
//!
//! ```text
//! prerouting, output ─ to an address of this machine ─► hostports ─ map ─► DNAT to a pod
//! postrouting ─ from a network to beyond it and its set ─► masquerade
//!             ─ from a pod to its network by a host port ─► masquerade (else the answer takes a short cut)
//!             ─ from 127.0.0.0/8 by a host port          ─► masquerade
//! forward     ─ from one isolated bridge to another      ─► drop
//! input       ─ to 127.0.0.0/8 by an opened bridge, unasked ─► drop
//! ```

mod element;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::{IpAddr, Ipv4Addr};

use coracle_nft::{
    Attributes, BaseChain, Batch, Channel, Header, Hook, INET, INET_PROTO, INET_SERVICE, Meta, R0, Rule,
    SetSpec, Transaction, Verb, concatenated, intervals, number_of,
};
use ipnetwork::{IpNetwork, Ipv4Network};

use crate::portmap::condition::Condition;
use crate::ports::Protocol;
use element::octets;

/// Content of the table.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Plan {
    pub(crate) mappings: BTreeSet<Mapping>,
    /// Host ports with conditions, all of which a packet must fulfil.
    pub(crate) conditional: BTreeSet<(Mapping, Vec<Condition>)>,
    /// Networks whose outgoing packets are masqueraded, with excepted destinations.
    pub(crate) masquerade: BTreeMap<IpNetwork, Vec<IpNetwork>>,
    /// Networks whose members may reach each other through host ports.
    pub(crate) hairpin: BTreeSet<IpNetwork>,
    /// Whether 127.0.0.1 may use host ports.
    pub(crate) loopback: bool,
    /// Addresses to which packets through host ports keep their source, whatever the rules of their network are.
    pub(crate) untouched: BTreeSet<IpAddr>,
    /// Addresses to which all packets through host ports are masqueraded.
    pub(crate) masquerade_all: BTreeSet<IpAddr>,
    /// Bridges between which nothing is forwarded.
    pub(crate) isolated: BTreeSet<String>,
    /// Interfaces that are open for packets of 127.0.0.0/8, so that 127.0.0.1 may use host ports. Packets from them to
    /// 127.0.0.0/8 of the machine are dropped.
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

/// Differences between IPv4 and IPv6.
struct Family {
    number: u8,
    length: u32,
    /// `TYPE_IPADDR` or `TYPE_IP6ADDR` of the nft tool, so that it prints our maps readably.
    kind: u32,
    any: &'static str,
    one: &'static str,
}

const V4: Family = Family { number: 2, length: 4, kind: 7, any: "hostports4", one: "hostports4_by_address" };
const V6: Family =
    Family { number: 10, length: 16, kind: 8, any: "hostports6", one: "hostports6_by_address" };
/// The loopback range of each family.
const LOOPBACK: Ipv4Network = match Ipv4Network::new_checked(Ipv4Addr::new(127, 0, 0, 0), 8) {
    Some(network) => network,
    None => unreachable!(),
};

/// The transaction that replaces the table.
///
/// Host ports do not take the addresses `served`: a host port 53 would take over cluster DNS.
pub(crate) fn replace(table: &str, plan: &Plan, served: &[IpAddr]) -> Batch {
    let mut table = Table(Transaction::new(table));
    table.0.delete_table();
    table.0.make_table();
    table.chains();
    for family in [V4, V6] {
        table.maps(&family);
        table.host_port_rules(&family);
    }
    for chain in ["prerouting", "output"] {
        for family in [V4, V6] {
            let local = Rule::default().family(family.number).destination_is_local();
            let served = served.iter().filter(|address| address.is_ipv4() == (family.length == 4));
            let local = served.fold(local, |rule, address| rule.to(IpNetwork::from(*address), true));
            table.0.rule(chain, &local.jump("hostports"));
        }
    }
    table.turn(&Plan::default(), plan);
    table.0.finish()
}

/// The transaction that changes the table from `present` to `wanted`. `None` if a rule has to be removed, or if one of
/// the two is empty.
pub(crate) fn change(table: &str, present: &Plan, wanted: &Plan) -> Option<Batch> {
    if [present, wanted].contains(&&Plan::default()) || !present.has_rules_within(wanted) {
        return None;
    }
    let mut table = Table(Transaction::new(table));
    table.turn(present, wanted);
    Some(table.0.finish())
}

/// The transaction that removes the table.
pub(crate) fn remove(table: &str) -> Batch {
    let mut table = Transaction::new(table);
    table.delete_table();
    table.finish()
}

/// Whether the kernel has a table with this name.
pub(crate) fn exists(channel: &mut Channel, table: &str) -> io::Result<bool> {
    channel.has(Verb::GetTable, INET, &Attributes::default().text(1, table))
}

/// Whether the table has the first rule of all our tables: a flushed table has no rules.
pub(crate) fn has_rules(channel: &mut Channel, table: &str) -> io::Result<bool> {
    let rules = Attributes::default().text(1, table).text(2, "prerouting");
    channel.lists(Verb::GetRule, INET, &rules)
}

/// Whether the chain `FORWARD` of iptables' filter table, of either family, drops by default.
pub(crate) fn forward_drops(channel: &mut Channel) -> io::Result<bool> {
    const POLICY: u16 = 5;
    const DROP: u32 = 0;
    for family in [V4.number, V6.number] {
        let named = Attributes::default().text(1, "filter").text(3, "FORWARD");
        match channel.get(Verb::GetChain, family, &named) {
            Ok(answer) if number_of(&answer, POLICY) == Some(DROP) => return Ok(true),
            Err(error) if error.raw_os_error() != Some(libc::ENOENT) => return Err(error),
            _ => {}
        }
    }
    Ok(false)
}

// === impl Plan ===

impl Plan {
    /// Host ports without connections: a sender of datagrams does not notice who answers.
    pub(crate) fn connectionless(&self) -> BTreeSet<Mapping> {
        let all = self.mappings.iter().chain(self.conditional.iter().map(|(mapping, _)| mapping));
        all.filter(|mapping| mapping.protocol != Protocol::Tcp).cloned().collect()
    }

    /// Whether `other` has all rules of this plan, and possibly more, independent of the elements of maps and sets.
    /// The order does not matter, except for untouched addresses.
    fn has_rules_within(&self, other: &Self) -> bool {
        let masquerades = |(network, except): (&IpNetwork, &Vec<_>)| {
            // Without exceptions there is no set.
            other.masquerade.get(network).is_some_and(|other| other.is_empty() == except.is_empty())
        };
        self.conditional.is_subset(&other.conditional)
            && self.masquerade.iter().all(masquerades)
            && self.hairpin.is_subset(&other.hairpin)
            && self.loopback <= other.loopback
            && self.masquerade_all.is_subset(&other.masquerade_all)
            && self.isolated.is_subset(&other.isolated)
            && self.opened.is_subset(&other.opened)
            && self.untouched.is_empty()
            && other.untouched.is_empty()
    }
}

/// A transaction under construction.
struct Table<'a>(Transaction<'a>);

// === impl Table ===

impl Table<'_> {
    /// Adds missing elements and rules, and removes elements that are not wanted.
    fn turn(&mut self, present: &Plan, wanted: &Plan) {
        for family in [V4, V6] {
            self.mappings(&family, &present.mappings, &wanted.mappings);
        }
        self.conditional_rules(present, wanted);
        self.masquerade_rules(present, wanted);
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
        let target = concatenated(&[family.kind, INET_SERVICE]);
        let one = concatenated(&[family.kind, port[0], port[1]]);
        for (name, key) in [(family.any, (concatenated(&port), 8)), (family.one, (one, family.length + 8))] {
            self.0.make_set(&SetSpec {
                name,
                key,
                value: Some((target, family.length + 4)),
                ..SetSpec::default()
            });
        }
    }

    /// Changes the elements of the maps. Removals come first, because new elements may have the same keys.
    fn mappings(&mut self, family: &Family, present: &BTreeSet<Mapping>, wanted: &BTreeSet<Mapping>) {
        for (name, by_address) in [(family.any, false), (family.one, true)] {
            let of_map = |mapping: &&Mapping| {
                mapping.to.is_ipv4() == (family.length == 4) && mapping.host_ip.is_some() == by_address
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
        let registers = family.length / 4;
        let start = || Rule::default().family(family.number);
        let one = start().destination(family.length == 4, R0).protocol_and_port(R0 + registers);
        self.rule("hostports", &one.lookup(family.one).destination_nat(family.number, registers));
        let any = start().protocol_and_port(R0).lookup(family.any);
        self.rule("hostports", &any.destination_nat(family.number, registers));
    }

    /// Adds a rule for each port with conditions: elements of maps cannot have conditions.
    fn conditional_rules(&mut self, present: &Plan, wanted: &Plan) {
        for (mapping, conditions) in wanted.conditional.difference(&present.conditional) {
            let network = IpNetwork::from(mapping.to);
            let family = family(network);
            let mut rule = of_family(network);
            for condition in conditions {
                rule = condition.compared(rule);
            }
            if let Some(ip) = mapping.host_ip {
                rule = rule.to(ip.into(), false);
            }
            let registers = family.length / 4;
            let rule = rule.meta(Meta::Transport, R0).equal(R0, &[mapping.protocol.number()]);
            let rule = rule.payload(Header::Transport, 2, 2, R0);
            let rule = rule.equal(R0, &mapping.host_port.to_be_bytes());
            let rule = rule.immediate(R0, &octets(mapping.to));
            let rule = rule.immediate(R0 + registers, &mapping.to_port.to_be_bytes());
            self.rule("hostports", &rule.destination_nat(family.number, registers));
        }
    }

    fn masquerade_rules(&mut self, present: &Plan, wanted: &Plan) {
        for (network, except) in &wanted.masquerade {
            let before = present.masquerade.get(network);
            if before.is_none() {
                self.masquerade_rule(*network, !except.is_empty());
            }
            self.exceptions(*network, before.map_or(&[], Vec::as_slice), except);
        }
        for address in &wanted.untouched {
            let network = IpNetwork::from(*address);
            self.rule("postrouting", &of_family(network).to(network, false).translated().accept());
        }
        for network in wanted.hairpin.difference(&present.hairpin) {
            self.rule("postrouting", &from(*network).to(*network, false).translated().masquerade());
        }
        for address in wanted.masquerade_all.difference(&present.masquerade_all) {
            let network = IpNetwork::from(*address);
            self.rule("postrouting", &of_family(network).to(network, false).translated().masquerade());
        }
        if wanted.loopback && !present.loopback {
            self.rule("postrouting", &from(IpNetwork::V4(LOOPBACK)).translated().masquerade());
        }
    }

    /// The set must exist before the rule that uses it.
    fn masquerade_rule(&mut self, network: IpNetwork, has_exceptions: bool) {
        let family = family(network);
        let is_ipv4 = network.is_ipv4();
        let (net, mask) = if is_ipv4 { MULTICAST_V4() } else { MULTICAST_V6() };
        let rule = from(network).to(network, true).destination(is_ipv4, R0);
        let mut rule = rule.mask(R0, &mask).unequal(R0, &net);
        if has_exceptions {
            let set = exceptions_of(network);
            let key = (family.kind, family.length);
            self.0.make_set(&SetSpec { name: &set, key, intervals: true, ..SetSpec::default() });
            rule = rule.destination(is_ipv4, R0).outside(&set);
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
        if present.is_empty() && !wanted.is_empty() {
            self.0.make_base_chain(filter("forward", Hook::Forward));
        }
        let is_new = |pair: [&String; 2]| !pair.into_iter().all(|bridge| present.contains(bridge));
        for inward in wanted {
            for outward in wanted.iter().filter(|other| *other != inward && is_new([inward, other])) {
                let rule = Rule::default().meta(Meta::InInterface, R0).equal(R0, &interface(inward));
                let rule = rule.meta(Meta::OutInterface, R0).equal(R0, &interface(outward));
                self.rule("forward", &rule.drop());
            }
        }
    }

    /// Protects an open interface: the kernel delivers its packets to 127.0.0.0/8 locally, so any neighbour could
    /// reach services on 127.0.0.1. Only replies, and packets that were sent to another address, pass.
    fn loopback_rules(&mut self, present: &BTreeSet<String>, wanted: &BTreeSet<String>) {
        if present.is_empty() && !wanted.is_empty() {
            self.0.make_base_chain(filter("input", Hook::Input));
        }
        for name in wanted.difference(present) {
            let loopback = IpNetwork::V4(LOOPBACK);
            let by = || of_family(loopback).meta(Meta::InInterface, R0).equal(R0, &interface(name));
            // Two rules, because packets unknown to conntrack have no status to compare.
            self.rule("input", &by().to(loopback, false).translated().accept());
            self.rule("input", &by().to(loopback, false).unasked().drop());
        }
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

const MULTICAST_V4: fn() -> (Vec<u8>, Vec<u8>) = || (vec![224, 0, 0, 0], vec![240, 0, 0, 0]);
const MULTICAST_V6: fn() -> (Vec<u8>, Vec<u8>) = || {
    let first = |byte| [vec![byte], vec![0; 15]].concat();
    (first(0xff), first(0xff))
};

fn family(network: IpNetwork) -> Family {
    if network.is_ipv4() { V4 } else { V6 }
}

fn of_family(network: IpNetwork) -> Rule {
    Rule::default().family(family(network).number)
}

/// Matches packets from the network.
fn from(network: IpNetwork) -> Rule {
    of_family(network).from(network, false)
}

fn compared(rule: Rule, value: &[u8], elsewhere: bool) -> Rule {
    if elsewhere { rule.unequal(R0, value) } else { rule.equal(R0, value) }
}

/// An interface name in the kernel's form for comparison.
fn interface(name: &str) -> [u8; 16] {
    let mut padded = [0u8; 16];
    for (to, from) in padded.iter_mut().zip(name.bytes().take(15)) {
        *to = from;
    }
    padded
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
    fn only_a_rule_that_goes_replaces_the_table() {
        assert!(change("t", &plan(&[1]), &plan(&[1, 2])).is_some());
        assert!(change("t", &plan(&[1, 2]), &plan(&[1])).is_some(), "a port goes");
        assert!(change("t", &plan(&[1]), &plan(&[2])).is_some(), "a port is another");
        assert!(change("t", &Plan::default(), &plan(&[1])).is_none(), "there is no table");
        assert!(change("t", &plan(&[1]), &Plan::default()).is_none(), "there should be none");
        let net = |text: &str| text.parse::<IpNetwork>().unwrap();
        let more = Plan { hairpin: [net("10.0.0.0/8")].into(), ..plan(&[1]) };
        assert!(change("t", &plan(&[1]), &more).is_some() && change("t", &more, &plan(&[1])).is_none());
        let except = |except: &[&str]| Plan {
            masquerade: [(net("10.0.0.0/24"), except.iter().map(|text| net(text)).collect())].into(),
            ..Plan::default()
        };
        let (none, one, other) = (except(&[]), except(&["10.1.0.0/24"]), except(&["10.2.0.0/24"]));
        assert!(change("t", &one, &other).is_some());
        assert!(change("t", &none, &one).is_none() && change("t", &one, &none).is_none(), "another rule");
    }

    #[test]
    fn as_many_messages_as_it_takes() {
        let ports: Vec<u16> = (1..=u16::MAX).collect();
        let batch = replace("t", &plan(&ports), &[]);
        let lengths = coracle_nft::messages(batch.as_bytes()).map(<[u8]>::len);
        let (long, most) =
            lengths.fold((0, 0), |(long, most), len| (long + usize::from(len > 16384), most.max(len)));
        assert!(long > 60 && most < 65536, "{long} {most}");
    }
}

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
pub(crate) mod event;
mod expression;
pub(crate) mod message;
mod ranges;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::{IpAddr, Ipv4Addr};

use ipnetwork::{IpNetwork, Ipv4Network};

use crate::portmap::condition::Condition;
use crate::ports::Protocol;
use element::octets;
use expression::{Header, Meta, R0, Rule};
use message::{Attributes, Verb};
pub(crate) use message::{Batch, Channel};
use ranges::{exceptions_of, ranges};

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
    source: u32,
    destination: u32,
    length: u32,
    /// `TYPE_IPADDR` or `TYPE_IP6ADDR` of the nft tool, so that it prints our maps readably.
    kind: u32,
    any: &'static str,
    one: &'static str,
}

const V4: Family = Family {
    number: 2,
    source: 12,
    destination: 16,
    length: 4,
    kind: 7,
    any: "hostports4",
    one: "hostports4_by_address",
};
const V6: Family = Family {
    number: 10,
    source: 8,
    destination: 24,
    length: 16,
    kind: 8,
    any: "hostports6",
    one: "hostports6_by_address",
};
/// The loopback range of each family.
const LOOPBACK: Ipv4Network = match Ipv4Network::new_checked(Ipv4Addr::new(127, 0, 0, 0), 8) {
    Some(network) => network,
    None => unreachable!(),
};
const INET_PROTO: u32 = 12;
const INET_SERVICE: u32 = 13;
/// Size at which a list of elements is sent as one message: with one more element it is still far below the maximum
/// size of an attribute.
const LONG_LIST: usize = 32 << 10;

/// The transaction that replaces the table.
pub(crate) fn replace(table: &str, plan: &Plan) -> Batch {
    let mut table = Table::new(table);
    table.delete();
    let named = table.named();
    table.batch.push(Verb::NewTable, &named);
    table.chains();
    for family in [V4, V6] {
        table.maps(&family);
        table.host_port_rules(&family);
    }
    for chain in ["prerouting", "output"] {
        table.rule(chain, Rule::default().destination_is_local().jump("hostports"));
    }
    table.turn(&Plan::default(), plan);
    table.batch
}

/// The transaction that changes the table from `present` to `wanted`. `None` if a rule has to be removed, or if one of
/// the two is empty.
pub(crate) fn change(table: &str, present: &Plan, wanted: &Plan) -> Option<Batch> {
    if [present, wanted].contains(&&Plan::default()) || !present.has_rules_within(wanted) {
        return None;
    }
    let mut table = Table::new(table);
    table.turn(present, wanted);
    Some(table.batch)
}

/// The transaction that removes the table.
pub(crate) fn remove(table: &str) -> Batch {
    let mut table = Table::new(table);
    table.delete();
    table.batch
}

/// Whether the kernel has a table with this name.
pub(crate) fn exists(channel: &mut Channel, table: &str) -> io::Result<bool> {
    channel.has(Verb::GetTable, message::INET, &Attributes::default().text(1, table))
}

/// Whether the table has the first rule of all our tables: a flushed table has no rules.
pub(crate) fn has_rules(channel: &mut Channel, table: &str) -> io::Result<bool> {
    let rules = Attributes::default().text(1, table).text(2, "prerouting");
    channel.lists(Verb::GetRule, message::INET, &rules)
}

/// Whether the chain `FORWARD` of iptables' filter table, of either family, drops by default.
pub(crate) fn forward_drops(channel: &mut Channel) -> io::Result<bool> {
    const POLICY: u16 = 5;
    const DROP: u32 = 0;
    for family in [V4.number, V6.number] {
        let named = Attributes::default().text(1, "filter").text(3, "FORWARD");
        match channel.get(Verb::GetChain, family, &named) {
            Ok(answer) if message::number_of(&answer, POLICY) == Some(DROP) => return Ok(true),
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
struct Table<'a> {
    name: &'a str,
    batch: Batch,
    /// Number of maps and sets that it makes. The number identifies each of them within the transaction.
    sets: u32,
}

// === impl Table ===

impl<'a> Table<'a> {
    fn new(name: &'a str) -> Self {
        Self { name, batch: Batch::new(), sets: 0 }
    }

    /// Deletes the table if it exists. The deletion of an absent table is an error, so the table is made first, which
    /// is no error for an existing one.
    fn delete(&mut self) {
        let named = self.named();
        self.batch.push(Verb::NewTable, &named);
        self.batch.push(Verb::DeleteTable, &named);
    }

    fn named(&self) -> Attributes {
        Attributes::default().text(1, self.name)
    }

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
        let hostports = self.named().text(3, "hostports");
        self.batch.push(Verb::NewChain, &hostports);
        for (name, hook, priority, kind) in
            [("prerouting", 0, -100i32, "nat"), ("output", 3, -100, "nat"), ("postrouting", 4, 100, "nat")]
        {
            self.chain(name, hook, priority, kind);
        }
    }

    fn chain(&mut self, name: &str, hook: u32, priority: i32, kind: &str) {
        let hook = Attributes::default().number(1, hook).bytes(2, &priority.to_be_bytes());
        let chain = self.named().text(3, name).nest(4, hook).text(7, kind);
        self.batch.push(Verb::NewChain, &chain);
    }

    fn maps(&mut self, family: &Family) {
        const MAP: u32 = 0x8;
        let port = (INET_PROTO << 6) | INET_SERVICE;
        let target = (family.kind << 6) | INET_SERVICE;
        let keys = [(family.any, port, 8), (family.one, (family.kind << 12) | port, family.length + 8)];
        for (name, key, length) in keys {
            let set = self.named().text(2, name).number(3, MAP).number(4, key).number(5, length);
            self.set(set.number(6, target).number(7, family.length + 4));
        }
    }

    fn set(&mut self, set: Attributes) {
        self.sets += 1;
        self.batch.push(Verb::NewSet, &set.number(10, self.sets));
    }

    /// Changes the elements of the maps. Removals come first, because new elements may have the same keys.
    fn mappings(&mut self, family: &Family, present: &BTreeSet<Mapping>, wanted: &BTreeSet<Mapping>) {
        for (name, by_address) in [(family.any, false), (family.one, true)] {
            let of_map = |mapping: &&Mapping| {
                mapping.to.is_ipv4() == (family.length == 4) && mapping.host_ip.is_some() == by_address
            };
            let gone = present.difference(wanted).filter(of_map);
            let list = |element| Attributes::default().nest(1, element);
            self.elements(Verb::DeleteElements, name, gone.map(|mapping| list(mapping.key())));
            let new = wanted.difference(present).filter(of_map);
            self.elements(Verb::NewElements, name, new.map(|mapping| list(mapping.element())));
        }
    }

    /// Adds or deletes these elements, in as many messages as necessary.
    fn elements(&mut self, verb: Verb, set: &str, elements: impl Iterator<Item = Attributes>) {
        let mut list = Attributes::default();
        let mut elements = elements.peekable();
        while let Some(element) = elements.next() {
            list = list.and(&element);
            if list.len() >= LONG_LIST || elements.peek().is_none() {
                let message = self.named().text(2, set).nest(3, std::mem::take(&mut list));
                self.batch.push(verb, &message);
            }
        }
    }

    fn host_port_rules(&mut self, family: &Family) {
        let registers = family.length / 4;
        let start = || Rule::default().meta(Meta::Family, R0).equal(R0, &[family.number]);
        let key =
            |rule: Rule, at: u32| rule.meta(Meta::Transport, at).payload(Header::Transport, 2, 2, at + 1);
        let one = start().payload(Header::Network, family.destination, family.length, R0);
        let one = key(one, R0 + registers).lookup(family.one).destination_nat(family.number, registers);
        self.rule("hostports", one);
        let any = key(start(), R0).lookup(family.any).destination_nat(family.number, registers);
        self.rule("hostports", any);
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
                rule = destined(rule, ip.into(), false);
            }
            let registers = family.length / 4;
            let rule = rule.meta(Meta::Transport, R0).equal(R0, &[mapping.protocol.number()]);
            let rule = rule.payload(Header::Transport, 2, 2, R0).equal(R0, &mapping.host_port.to_be_bytes());
            let rule = rule.immediate(R0, &octets(mapping.to));
            let rule = rule.immediate(R0 + registers, &mapping.to_port.to_be_bytes());
            self.rule("hostports", rule.destination_nat(family.number, registers));
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
            self.rule("postrouting", to(of_family(network), network).translated().accept());
        }
        for network in wanted.hairpin.difference(&present.hairpin) {
            self.rule("postrouting", to(from(*network), *network).translated().masquerade());
        }
        for address in wanted.masquerade_all.difference(&present.masquerade_all) {
            let network = IpNetwork::from(*address);
            self.rule("postrouting", to(of_family(network), network).translated().masquerade());
        }
        if wanted.loopback && !present.loopback {
            self.rule("postrouting", from(IpNetwork::V4(LOOPBACK)).translated().masquerade());
        }
    }

    /// The set must exist before the rule that uses it.
    fn masquerade_rule(&mut self, network: IpNetwork, has_exceptions: bool) {
        const INTERVAL: u32 = 0x4;
        let family = family(network);
        let (net, mask) = if network.is_ipv4() { MULTICAST_V4() } else { MULTICAST_V6() };
        let rule = destined(from(network), network, true);
        let rule = rule.payload(Header::Network, family.destination, family.length, R0);
        let mut rule = rule.mask(R0, &mask).unequal(R0, &net);
        if has_exceptions {
            let set = exceptions_of(network);
            let named = self.named().text(2, &set).number(3, INTERVAL);
            self.set(named.number(4, family.kind).number(5, family.length));
            rule = rule.payload(Header::Network, family.destination, family.length, R0).outside(&set);
        }
        self.rule("postrouting", rule.masquerade());
    }

    fn exceptions(&mut self, network: IpNetwork, present: &[IpNetwork], wanted: &[IpNetwork]) {
        if present == wanted {
            return;
        }
        let (present, wanted, set) = (ranges(present), ranges(wanted), exceptions_of(network));
        self.elements(Verb::DeleteElements, &set, present.difference(&wanted).map(|range| range.elements()));
        self.elements(Verb::NewElements, &set, wanted.difference(&present).map(|range| range.elements()));
    }

    fn isolation_rules(&mut self, present: &BTreeSet<String>, wanted: &BTreeSet<String>) {
        if present.is_empty() && !wanted.is_empty() {
            self.chain("forward", 2, 0, "filter");
        }
        let is_new = |pair: [&String; 2]| !pair.into_iter().all(|bridge| present.contains(bridge));
        for inward in wanted {
            for outward in wanted.iter().filter(|other| *other != inward && is_new([inward, other])) {
                let rule = Rule::default().meta(Meta::InInterface, R0).equal(R0, &interface(inward));
                let rule = rule.meta(Meta::OutInterface, R0).equal(R0, &interface(outward));
                self.rule("forward", rule.drop());
            }
        }
    }

    /// Protects an open interface: the kernel delivers its packets to 127.0.0.0/8 locally, so any neighbour could
    /// reach services on 127.0.0.1. Only replies, and packets that were sent to another address, pass.
    fn loopback_rules(&mut self, present: &BTreeSet<String>, wanted: &BTreeSet<String>) {
        if present.is_empty() && !wanted.is_empty() {
            self.chain("input", 1, 0, "filter");
        }
        for name in wanted.difference(present) {
            let loopback = IpNetwork::V4(LOOPBACK);
            let by = || of_family(loopback).meta(Meta::InInterface, R0).equal(R0, &interface(name));
            // Two rules, because packets unknown to conntrack have no status to compare.
            self.rule("input", to(by(), loopback).translated().accept());
            self.rule("input", to(by(), loopback).unasked().drop());
        }
    }

    fn rule(&mut self, chain: &str, rule: Rule) {
        let rule = self.named().text(2, chain).nest(4, rule.finish());
        self.batch.push(Verb::NewRule, &rule);
    }
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
    Rule::default().meta(Meta::Family, R0).equal(R0, &[family(network).number])
}

/// Matches packets from the network.
fn from(network: IpNetwork) -> Rule {
    sent(of_family(network), network, false)
}

/// Matches packets to the network.
fn to(rule: Rule, network: IpNetwork) -> Rule {
    destined(rule, network, false)
}

/// Matches packets from the network, or from elsewhere.
fn sent(rule: Rule, network: IpNetwork, elsewhere: bool) -> Rule {
    let family = family(network);
    masked(rule.payload(Header::Network, family.source, family.length, R0), network, elsewhere)
}

/// Matches packets to the network, or to elsewhere.
fn destined(rule: Rule, network: IpNetwork, elsewhere: bool) -> Rule {
    let family = family(network);
    masked(rule.payload(Header::Network, family.destination, family.length, R0), network, elsewhere)
}

fn masked(rule: Rule, network: IpNetwork, elsewhere: bool) -> Rule {
    let rule = rule.mask(R0, &octets(network.mask()));
    compared(rule, &octets(network.network()), elsewhere)
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
        let batch = replace("t", &plan(&ports));
        let lengths = message::messages(batch.bytes()).map(<[u8]>::len);
        let (long, most) =
            lengths.fold((0, 0), |(long, most), len| (long + usize::from(len > 16384), most.max(len)));
        assert!(long > 60 && most < 65536, "{long} {most}");
    }
}

//! The nftables table: masquerading of what leaves the node, host ports, and bridges kept apart.
//!
//! Every change is one transaction, so that a packet sees the old table or the new one: what only adds is added, all
//! else replaces the whole table. Connections keep their translation: it lives in conntrack, not in the rules.
//!
//! ```text
//! prerouting, output ─ to an address of this machine ─► hostports ─ map ─► DNAT to a pod
//! postrouting ─ from a network to beyond it             ─► masquerade
//!             ─ from a pod to its network by a host port ─► masquerade (else the answer takes a short cut)
//!             ─ from 127.0.0.0/8 by a host port          ─► masquerade
//! forward     ─ from one isolated bridge to another      ─► drop
//! ```

pub(crate) mod event;
mod expression;
mod message;

use std::collections::BTreeSet;
use std::io;
use std::net::IpAddr;

use ipnetwork::IpNetwork;

use crate::portmap::condition::{Condition, Subject};
use crate::ports::Protocol;
use expression::{Header, Meta, R0, Rule, value};
use message::{Attributes, Verb};
pub(crate) use message::{Batch, Channel};

/// What the table is to say.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Plan {
    pub(crate) mappings: BTreeSet<Mapping>,
    /// Ways in that are open only to packets of which all of this holds.
    pub(crate) conditional: BTreeSet<(Mapping, Vec<Condition>)>,
    /// Networks whose packets to beyond take the node's address, with the networks that do not count as beyond.
    pub(crate) masquerade: BTreeSet<(IpNetwork, Vec<IpNetwork>)>,
    /// Networks whose members may reach each other by host ports.
    pub(crate) hairpin: BTreeSet<IpNetwork>,
    /// Whether 127.0.0.1 may use host ports.
    pub(crate) loopback: bool,
    /// Addresses to which packets by a host port come as from who sent them, whatever holds for their network.
    pub(crate) untouched: BTreeSet<IpAddr>,
    /// Addresses to which every packet by a host port takes the node's address.
    pub(crate) masquerade_all: BTreeSet<IpAddr>,
    /// Bridges between which nothing is forwarded.
    pub(crate) isolated: BTreeSet<String>,
}

/// One way in: a port of the node that leads to an address and port of a pod.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Mapping {
    pub(crate) host_ip: Option<IpAddr>,
    pub(crate) host_port: u16,
    pub(crate) protocol: Protocol,
    pub(crate) to: IpAddr,
    pub(crate) to_port: u16,
}

/// What differs between the two families of addresses.
struct Family {
    number: u8,
    source: u32,
    destination: u32,
    length: u32,
    /// `TYPE_IPADDR` or `TYPE_IP6ADDR` of the nft tool, so that it lists our maps readably.
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
const INET_PROTO: u32 = 12;
const INET_SERVICE: u32 = 13;

/// The transaction that makes the table exactly this.
pub(crate) fn replace(table: &str, plan: &Plan) -> Batch {
    let mut table = Table { name: table, batch: Batch::new() };
    table.delete();
    let named = table.named();
    table.batch.push(Verb::NewTable, &named);
    table.chains();
    for (index, family) in [V4, V6].iter().enumerate() {
        table.maps(family, u32::try_from(index).unwrap_or_default());
        table.host_port_rules(family);
    }
    for chain in ["prerouting", "output"] {
        table.rule(chain, Rule::default().destination_is_local().jump("hostports"));
    }
    table.grow(&Plan::default(), plan);
    table.batch
}

/// The transaction that adds what is wanted to a table that says `present`; none when something has to go, or when
/// there is no table.
pub(crate) fn add(table: &str, present: &Plan, wanted: &Plan) -> Option<Batch> {
    if *present == Plan::default() || !present.is_within(wanted) {
        return None;
    }
    let mut table = Table { name: table, batch: Batch::new() };
    table.grow(present, wanted);
    Some(table.batch)
}

/// The transaction that removes the table.
pub(crate) fn remove(table: &str) -> Batch {
    let mut table = Table { name: table, batch: Batch::new() };
    table.delete();
    table.batch
}

/// Whether the kernel has a table of this name.
pub(crate) fn exists(channel: &mut Channel, table: &str) -> io::Result<bool> {
    channel.has(Verb::GetTable, message::INET, &Attributes::default().text(1, table))
}

/// Whether the chain `FORWARD` of iptables' filter table, of either family, drops what no rule accepts.
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
    /// Whether the other one says all of this, and maybe more. In which order it is said makes no difference, but
    /// where addresses are untouched.
    fn is_within(&self, other: &Self) -> bool {
        self.mappings.is_subset(&other.mappings)
            && self.conditional.is_subset(&other.conditional)
            && self.masquerade.is_subset(&other.masquerade)
            && self.hairpin.is_subset(&other.hairpin)
            && self.loopback <= other.loopback
            && self.masquerade_all.is_subset(&other.masquerade_all)
            && self.isolated.is_subset(&other.isolated)
            && self.untouched.is_empty()
            && other.untouched.is_empty()
    }
}

/// The table's transaction under construction.
struct Table<'a> {
    name: &'a str,
    batch: Batch,
}

// === impl Table ===

impl Table<'_> {
    /// Deletes the table whether or not it is there: making one that exists is no error, deleting an
    /// absent one is.
    fn delete(&mut self) {
        let named = self.named();
        self.batch.push(Verb::NewTable, &named);
        self.batch.push(Verb::DeleteTable, &named);
    }

    fn named(&self) -> Attributes {
        Attributes::default().text(1, self.name)
    }

    /// Adds elements and rules that say what is wanted and was not said.
    fn grow(&mut self, present: &Plan, wanted: &Plan) {
        for family in [V4, V6] {
            self.elements(&family, wanted.mappings.difference(&present.mappings));
        }
        self.conditional_rules(present, wanted);
        self.masquerade_rules(present, wanted);
        self.isolation_rules(&present.isolated, &wanted.isolated);
    }

    fn chains(&mut self) {
        let hostports = self.named().text(3, "hostports");
        self.batch.push(Verb::NewChain, &hostports);
        for (name, hook, priority, kind) in
            [("prerouting", 0, -100i32, "nat"), ("output", 3, -100, "nat"), ("postrouting", 4, 100, "nat")]
        {
            self.chain(name, (hook, priority), kind);
        }
    }

    fn chain(&mut self, name: &str, (hook, priority): (u32, i32), kind: &str) {
        let hook = Attributes::default().number(1, hook).bytes(2, &priority.to_be_bytes());
        let chain = self.named().text(3, name).nest(4, hook).text(7, kind);
        self.batch.push(Verb::NewChain, &chain);
    }

    fn maps(&mut self, family: &Family, index: u32) {
        const MAP: u32 = 0x8;
        let port = (INET_PROTO << 6) | INET_SERVICE;
        let target = (family.kind << 6) | INET_SERVICE;
        let keys = [(family.any, port, 8), (family.one, (family.kind << 12) | port, family.length + 8)];
        for (number, (name, key, length)) in (0u32..).zip(keys) {
            let set = self.named().text(2, name).number(3, MAP).number(4, key).number(5, length);
            let set = set.number(6, target).number(7, family.length + 4).number(10, index * 2 + number + 1);
            self.batch.push(Verb::NewSet, &set);
        }
    }

    fn elements<'m>(&mut self, family: &Family, mappings: impl Iterator<Item = &'m Mapping> + Clone) {
        for (name, by_address) in [(family.any, false), (family.one, true)] {
            let mut list = Attributes::default();
            let mut any = false;
            for mapping in mappings.clone().filter(|m| m.to.is_ipv4() == (family.length == 4)) {
                if mapping.host_ip.is_some() == by_address {
                    list = list.nest(1, mapping.element());
                    any = true;
                }
            }
            if any {
                let elements = self.named().text(2, name).nest(3, list);
                self.batch.push(Verb::NewElements, &elements);
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

    /// Ports with conditions have rules of their own: a map knows no conditions.
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
        for (network, except) in wanted.masquerade.difference(&present.masquerade) {
            let mut rule = from(*network);
            let multicast = if network.is_ipv4() { MULTICAST_V4 } else { MULTICAST_V6 };
            let nowhere = except.iter().chain([network]).filter(|n| n.is_ipv4() == network.is_ipv4());
            for (net, mask) in nowhere.map(|n| (octets(n.network()), octets(n.mask()))).chain([multicast()]) {
                let family = family(*network);
                rule = rule.payload(Header::Network, family.destination, family.length, R0);
                rule = rule.mask(R0, &mask).unequal(R0, &net);
            }
            self.rule("postrouting", rule.masquerade());
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
            let loopback = Rule::default()
                .meta(Meta::Family, R0)
                .equal(R0, &[V4.number])
                .payload(Header::Network, V4.source, 4, R0)
                .mask(R0, &[255, 0, 0, 0])
                .equal(R0, &[127, 0, 0, 0]);
            self.rule("postrouting", loopback.translated().masquerade());
        }
    }

    fn isolation_rules(&mut self, present: &BTreeSet<String>, wanted: &BTreeSet<String>) {
        if present.is_empty() && !wanted.is_empty() {
            self.chain("forward", (2, 0), "filter");
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

/// Packets from the network.
fn from(network: IpNetwork) -> Rule {
    sent(of_family(network), network, false)
}

/// Of these packets those to the network.
fn to(rule: Rule, network: IpNetwork) -> Rule {
    destined(rule, network, false)
}

/// Of these packets those from the network, or those from elsewhere.
fn sent(rule: Rule, network: IpNetwork, elsewhere: bool) -> Rule {
    let family = family(network);
    masked(rule.payload(Header::Network, family.source, family.length, R0), network, elsewhere)
}

/// Of these packets those to the network, or those to elsewhere.
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

/// An interface's name as the kernel compares it.
fn interface(name: &str) -> [u8; 16] {
    let mut padded = [0u8; 16];
    for (to, from) in padded.iter_mut().zip(name.bytes().take(15)) {
        *to = from;
    }
    padded
}

// === impl Condition ===

impl Condition {
    /// Of these packets those of which it holds.
    fn compared(&self, rule: Rule) -> Rule {
        let by = |rule: Rule, name: &[u8]| compared(rule.meta(Meta::InInterface, R0), name, self.negated);
        match &self.subject {
            Subject::From(network) => sent(rule, *network, self.negated),
            Subject::To(network) => destined(rule, *network, self.negated),
            Subject::By(name) => by(rule, &interface(name)),
            Subject::ByAny(head) => by(rule, head.as_bytes()),
        }
    }
}

// === impl Mapping ===

impl Mapping {
    fn element(&self) -> Attributes {
        let mut key = self.host_ip.map(octets).unwrap_or_default();
        key.extend_from_slice(&[self.protocol.number(), 0, 0, 0]);
        key.extend_from_slice(&padded(self.host_port));
        let mut target = octets(self.to);
        target.extend_from_slice(&padded(self.to_port));
        Attributes::default().nest(1, value(&key)).nest(2, value(&target))
    }
}

impl Protocol {
    fn number(self) -> u8 {
        match self {
            Self::Tcp => 6,
            Self::Udp => 17,
            Self::Sctp => 132,
        }
    }
}

fn padded(port: u16) -> [u8; 4] {
    let [high, low] = port.to_be_bytes();
    [high, low, 0, 0]
}

fn octets(ip: IpAddr) -> Vec<u8> {
    match ip {
        IpAddr::V4(ip) => ip.octets().to_vec(),
        IpAddr::V6(ip) => ip.octets().to_vec(),
    }
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
    fn what_only_adds_is_added_and_all_else_replaces() {
        assert!(add("t", &plan(&[1]), &plan(&[1, 2])).is_some());
        assert!(add("t", &plan(&[1, 2]), &plan(&[1])).is_none(), "a port goes");
        assert!(add("t", &plan(&[1]), &plan(&[2])).is_none(), "a port is another");
        assert!(add("t", &Plan::default(), &plan(&[1])).is_none(), "there is no table");
        let more = Plan { hairpin: ["10.0.0.0/8".parse().unwrap()].into(), ..plan(&[1]) };
        assert!(add("t", &plan(&[1]), &more).is_some() && add("t", &more, &plan(&[1])).is_none());
    }
}

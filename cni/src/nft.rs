//! The firewall: masquerading of what leaves the node, and host ports, in one nftables table of ours.
//!
//! Every change replaces the whole table in one transaction, so that a packet sees the old table or the
//! new one, and a foreign flush is repaired by the next change. Connections keep their translation: it
//! lives in conntrack, not in the rules.
//!
//! ```text
//! prerouting, output ─ to an address of this machine ─► hostports ─ map ─► DNAT to a pod
//! postrouting ─ from a pod to beyond the pods           ─► masquerade
//!             ─ from a pod to a pod by a host port      ─► masquerade (else the answer takes a short cut)
//!             ─ from 127.0.0.0/8 to a pod by a host port ─► masquerade
//! ```

mod expression;
mod message;

use std::net::IpAddr;

use ipnetwork::IpNetwork;

use crate::error::Error;
use crate::network::{PortMapping, Protocol};
use crate::record::Record;
use expression::{Header, Meta, R0, Rule, value};
use message::{Attributes, Batch, Verb};

/// The table, by name, for these pod ranges behind this bridge.
pub(crate) struct Firewall<'a> {
    pub(crate) table: &'a str,
    pub(crate) bridge: &'a str,
    pub(crate) cidrs: &'a [IpNetwork],
}

/// One way in: a port of the node that leads to an address and port of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Mapping {
    host_ip: Option<IpAddr>,
    host_port: u16,
    protocol: Protocol,
    to: IpAddr,
    to_port: u16,
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

/// The ways in to all these sandboxes.
pub(crate) fn mappings(records: &[Record]) -> Vec<Mapping> {
    let mut mappings = Vec::new();
    for record in records {
        for port in &record.ports {
            let host_ip = port.host_ip.filter(|ip| !ip.is_unspecified());
            for to in record.addresses.iter().map(IpNetwork::ip) {
                if host_ip.is_none_or(|host| host.is_ipv4() == to.is_ipv4()) {
                    let (host_port, protocol, to_port) = (port.host_port, port.protocol, port.container_port);
                    mappings.push(Mapping { host_ip, host_port, protocol, to, to_port });
                }
            }
        }
    }
    mappings
}

/// Refuses a host port that another sandbox holds on an overlapping address.
pub(crate) fn check_ports(wanted: &[PortMapping], records: &[Record]) -> Result<(), Error> {
    let wild = |ip: Option<IpAddr>| ip.is_none_or(|ip| ip.is_unspecified());
    for port in wanted {
        for record in records {
            let clash = record.ports.iter().any(|held| {
                held.host_port == port.host_port
                    && held.protocol == port.protocol
                    && (wild(held.host_ip) || wild(port.host_ip) || held.host_ip == port.host_ip)
            });
            if clash {
                let (port, protocol, owner) = (port.host_port, port.protocol.name(), record.id.clone());
                return Err(Error::HostPortTaken { port, protocol, owner });
            }
        }
    }
    Ok(())
}

// === impl Firewall ===

impl Firewall<'_> {
    /// Makes the table exactly this.
    pub(crate) fn replace(&self, mappings: &[Mapping]) -> Result<(), Error> {
        let mut batch = Batch::new();
        self.delete(&mut batch);
        batch.push(Verb::NewTable, &self.named());
        self.chains(&mut batch);
        for (index, family) in [V4, V6].iter().enumerate() {
            self.maps(&mut batch, family, u32::try_from(index).unwrap_or_default());
            self.elements(&mut batch, family, mappings);
            self.host_port_rules(&mut batch, family);
        }
        for chain in ["prerouting", "output"] {
            self.rule(&mut batch, chain, Rule::default().destination_is_local().jump("hostports"));
        }
        self.masquerade_rules(&mut batch);
        self.commit(batch, "change")
    }

    /// Removes the table.
    pub(crate) fn remove(&self) -> Result<(), Error> {
        let mut batch = Batch::new();
        self.delete(&mut batch);
        self.commit(batch, "remove")
    }

    fn commit(&self, batch: Batch, action: &'static str) -> Result<(), Error> {
        batch.commit().map_err(|source| Error::Firewall { action, table: self.table.to_owned(), source })
    }

    /// Deletes the table whether or not it is there: making one that exists is no error, deleting an
    /// absent one is.
    fn delete(&self, batch: &mut Batch) {
        batch.push(Verb::NewTable, &self.named());
        batch.push(Verb::DeleteTable, &self.named());
    }

    fn named(&self) -> Attributes {
        Attributes::default().text(1, self.table)
    }

    fn chains(&self, batch: &mut Batch) {
        batch.push(Verb::NewChain, &self.named().text(3, "hostports"));
        for (name, hook, priority) in
            [("prerouting", 0, -100i32), ("output", 3, -100), ("postrouting", 4, 100)]
        {
            let hook = Attributes::default().number(1, hook).bytes(2, &priority.to_be_bytes());
            batch.push(Verb::NewChain, &self.named().text(3, name).nest(4, hook).text(7, "nat"));
        }
    }

    fn maps(&self, batch: &mut Batch, family: &Family, index: u32) {
        const MAP: u32 = 0x8;
        let port = (INET_PROTO << 6) | INET_SERVICE;
        let target = (family.kind << 6) | INET_SERVICE;
        let keys = [(family.any, port, 8), (family.one, (family.kind << 12) | port, family.length + 8)];
        for (number, (name, key, length)) in (0u32..).zip(keys) {
            let set = self.named().text(2, name).number(3, MAP).number(4, key).number(5, length);
            let set = set.number(6, target).number(7, family.length + 4).number(10, index * 2 + number + 1);
            batch.push(Verb::NewSet, &set);
        }
    }

    fn elements(&self, batch: &mut Batch, family: &Family, mappings: &[Mapping]) {
        for (name, by_address) in [(family.any, false), (family.one, true)] {
            let mut list = Attributes::default();
            let mut any = false;
            for mapping in mappings.iter().filter(|m| m.to.is_ipv4() == (family.length == 4)) {
                if mapping.host_ip.is_some() == by_address {
                    list = list.nest(1, mapping.element());
                    any = true;
                }
            }
            if any {
                batch.push(Verb::NewElements, &self.named().text(2, name).nest(3, list));
            }
        }
    }

    fn host_port_rules(&self, batch: &mut Batch, family: &Family) {
        let registers = family.length / 4;
        let start = || Rule::default().meta(Meta::Family, R0).equal(R0, &[family.number]);
        let key =
            |rule: Rule, at: u32| rule.meta(Meta::Transport, at).payload(Header::Transport, 2, 2, at + 1);
        let one = start().payload(Header::Network, family.destination, family.length, R0);
        let one = key(one, R0 + registers).lookup(family.one).destination_nat(family.number, registers);
        self.rule(batch, "hostports", one);
        let any = key(start(), R0).lookup(family.any).destination_nat(family.number, registers);
        self.rule(batch, "hostports", any);
    }

    fn masquerade_rules(&self, batch: &mut Batch) {
        for cidr in self.cidrs {
            let family = if cidr.is_ipv4() { V4 } else { V6 };
            let (net, mask) = (octets(cidr.network()), octets(cidr.mask()));
            let from_pod = Rule::default()
                .meta(Meta::Family, R0)
                .equal(R0, &[family.number])
                .payload(Header::Network, family.source, family.length, R0)
                .mask(R0, &mask)
                .equal(R0, &net);
            let beyond = from_pod.clone().payload(Header::Network, family.destination, family.length, R0);
            self.rule(batch, "postrouting", beyond.mask(R0, &mask).unequal(R0, &net).masquerade());
            self.rule(batch, "postrouting", self.to_bridge(from_pod.translated()).masquerade());
        }
        let loopback = Rule::default()
            .meta(Meta::Family, R0)
            .equal(R0, &[V4.number])
            .payload(Header::Network, V4.source, 4, R0)
            .mask(R0, &[255, 0, 0, 0])
            .equal(R0, &[127, 0, 0, 0]);
        self.rule(batch, "postrouting", self.to_bridge(loopback).masquerade());
    }

    fn to_bridge(&self, rule: Rule) -> Rule {
        let mut name = [0u8; 16];
        for (to, from) in name.iter_mut().zip(self.bridge.bytes().take(15)) {
            *to = from;
        }
        rule.meta(Meta::OutInterface, R0).equal(R0, &name)
    }

    fn rule(&self, batch: &mut Batch, chain: &str, rule: Rule) {
        batch.push(Verb::NewRule, &self.named().text(2, chain).nest(4, rule.finish()));
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

//! Ports of the default network's bridge send only from their pod's own addresses: hardware, IPv4, IPv6, ARP and
//! neighbour discovery.
//!
//! One table of the family `bridge`, because the frames must be filtered at the port, before the bridge forwards them.
//! A frame costs two look-ups in hash sets, and one more for ARP. The content is derived from the attachments.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Mutex, PoisonError};

use coracle_nft::{
    BRIDGE, BaseChain, Channel, Element, Header, Hook, IPV4_ADDR, IPV6_ADDR, Key, Meta, R0, Rule, SetSpec,
    Transaction, concatenated,
};

use crate::error::Error;
use crate::nft;

const CHAIN: &str = "ports";
const GUARDED: &str = "guarded";
const HARDWARE: &str = "hardware";
const V4: &str = "addresses4";
const V6: &str = "addresses6";
/// Types of the nft tool: interface name and Ethernet address.
const IFNAME: u32 = 41;
const ETHER_ADDR: u32 = 9;
/// Before `br_netfilter` and all filters of other programs.
const PRIORITY: i32 = -310;
/// Registers of an interface name.
const NAME: u32 = 4;

/// Addresses from which a port may send.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Source {
    pub(crate) mac: [u8; 6],
    pub(crate) addresses: Vec<IpAddr>,
}

/// The table of permitted sources.
pub(crate) struct SourceGuard {
    table: String,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    ports: BTreeMap<String, Source>,
    channel: Option<Channel>,
    /// Whether the table in the kernel matches the ports.
    is_made: bool,
    /// Whether the kernel has no tables of the family `bridge`.
    is_unsupported: bool,
}

// === impl Source ===

impl Source {
    /// The elements of the sets, by the set's name.
    fn elements(&self, port: &str) -> Vec<(&'static str, Element)> {
        let named = || Key::default().interface(port);
        let mut all = vec![
            (GUARDED, Element::member(named())),
            (HARDWARE, Element::member(named().ethernet(self.mac))),
        ];
        // Duplicate address detection and multicast reports have no source address yet.
        let derived = [IpAddr::V6(link_local(self.mac)), IpAddr::V6(Ipv6Addr::UNSPECIFIED)];
        let mut addresses: Vec<IpAddr> = self.addresses.iter().copied().chain(derived).collect();
        addresses.sort_unstable();
        addresses.dedup();
        let set = |ip: &IpAddr| if ip.is_ipv4() { V4 } else { V6 };
        all.extend(addresses.iter().map(|ip| (set(ip), Element::member(named().address(*ip)))));
        all
    }
}

/// The link-local address that the kernel derives from a hardware address (RFC 4291, appendix A).
fn link_local(mac: [u8; 6]) -> Ipv6Addr {
    let [a, b, c, d, e, f] = mac.map(u16::from);
    Ipv6Addr::new(0xfe80, 0, 0, 0, (a ^ 2) << 8 | b, c << 8 | 0xff, 0xfe00 | d, e << 8 | f)
}

// === impl SourceGuard ===

impl SourceGuard {
    pub(crate) fn new(table: &str) -> Self {
        Self { table: table.to_owned(), state: Mutex::default() }
    }

    /// Permits the source for a port, and nothing else.
    pub(crate) fn put(&self, port: &str, source: Source) -> Result<(), Error> {
        self.change(|state, transaction| {
            if let Some(old) = state.ports.get(port) {
                remove(transaction, port, old);
            }
            add(transaction, port, &source);
            state.ports.insert(port.to_owned(), source);
        })
    }

    /// Removes the rules of a port that no longer exists.
    pub(crate) fn remove(&self, port: &str) -> Result<(), Error> {
        self.change(|state, transaction| {
            if let Some(old) = state.ports.remove(port) {
                remove(transaction, port, &old);
            }
        })
    }

    /// Replaces the table by one with these ports.
    pub(crate) fn replace(&self, ports: BTreeMap<String, Source>) -> Result<(), Error> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.ports = ports;
        self.make(&mut state)
    }

    /// Replaces the table after a change by another process.
    pub(crate) fn repair(&self) -> Result<(), Error> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.is_made { self.make(&mut state) } else { Ok(()) }
    }

    /// Removes the table.
    pub(crate) fn clear(&self) -> Result<(), Error> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.ports.clear();
        self.make(&mut state)
    }

    /// The netlink port that identifies the guard's own changes in notifications. `None` before the first change.
    pub(crate) fn author(&self) -> Option<u32> {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.channel.as_ref().map(Channel::port)
    }

    fn change(&self, change: impl FnOnce(&mut State, &mut Transaction<'_>)) -> Result<(), Error> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let mut transaction = Transaction::of_family(BRIDGE, &self.table);
        change(&mut state, &mut transaction);
        if state.is_unsupported {
            return Ok(());
        }
        if !state.is_made || state.ports.is_empty() {
            return self.make(&mut state);
        }
        let changed = self.commit(&mut state, transaction, "change");
        // After a refused change the content in the kernel is unknown, so the table is replaced.
        if changed.is_err() { self.make(&mut state) } else { Ok(()) }
    }

    /// Replaces the table. Without ports there is none.
    fn make(&self, state: &mut State) -> Result<(), Error> {
        state.is_made = false;
        let mut transaction = Transaction::of_family(BRIDGE, &self.table);
        transaction.delete_table();
        if state.ports.is_empty() {
            let removed = self.commit(state, transaction, "remove");
            return if state.is_unsupported { Ok(()) } else { removed };
        }
        transaction.make_table();
        layout(&mut transaction);
        state.ports.iter().for_each(|(port, source)| add(&mut transaction, port, source));
        match self.commit(state, transaction, "replace") {
            Ok(()) => state.is_made = true,
            Err(error) if state.is_unsupported => tracing::warn!(
                error = error.chain(),
                "the kernel filters no frames of bridges, so pods may send from any address"
            ),
            Err(error) => return Err(error),
        }
        Ok(())
    }

    fn commit(
        &self,
        state: &mut State,
        transaction: Transaction<'_>,
        action: &'static str,
    ) -> Result<(), Error> {
        let channel = nft::open_once(&mut state.channel)?;
        channel.commit(transaction.finish()).map_err(|source| {
            state.is_unsupported = is_unsupported(&source);
            Error::Firewall { action, table: self.table.clone(), source }
        })
    }
}

fn is_unsupported(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EAFNOSUPPORT | libc::EPROTONOSUPPORT))
}

fn add(transaction: &mut Transaction<'_>, port: &str, source: &Source) {
    source.elements(port).into_iter().for_each(|(set, element)| transaction.add(set, [&element]));
}

fn remove(transaction: &mut Transaction<'_>, port: &str, source: &Source) {
    source.elements(port).into_iter().for_each(|(set, element)| transaction.remove(set, [&element]));
}

/// The sets and the chain. The policy of the chain accepts frames of other ports.
fn layout(transaction: &mut Transaction<'_>) {
    let sets: [(&str, &[u32], u32); 4] = [
        (GUARDED, &[IFNAME], 16),
        (HARDWARE, &[IFNAME, ETHER_ADDR], 24),
        (V4, &[IFNAME, IPV4_ADDR], 20),
        (V6, &[IFNAME, IPV6_ADDR], 32),
    ];
    for (name, types, length) in sets {
        transaction.make_set(&SetSpec { name, key: (concatenated(types), length), ..SetSpec::default() });
    }
    let hook = Hook::Prerouting;
    transaction.make_base_chain(BaseChain { name: CHAIN, hook, priority: PRIORITY, kind: "filter" });
    rules().iter().for_each(|rule| transaction.rule(CHAIN, rule));
}

fn rules() -> [Rule; 10] {
    const SOURCE: (u32, u32) = (6, 6);
    const IPV4: [u8; 2] = [0x08, 0x00];
    const ARP: [u8; 2] = [0x08, 0x06];
    const IPV6: [u8; 2] = [0x86, 0xdd];
    // Sender's addresses in an ARP packet for Ethernet and IPv4.
    const SENDER_HARDWARE: (u32, u32) = (8, 6);
    const SENDER: (u32, u32) = (14, 4);
    const ICMPV6: u8 = 58;
    // Types, and the target of an advertisement.
    const ROUTER_SOLICITATION: u8 = 133;
    const ROUTER_ADVERTISEMENT: u8 = 134;
    const NEIGHBOUR_ADVERTISEMENT: u8 = 136;
    const REDIRECT: u8 = 137;
    const TARGET: (u32, u32) = (8, 16);
    let name = |rule: Rule| rule.meta(Meta::InInterface, R0);
    let of = |kind: [u8; 2]| Rule::default().payload(Header::Link, 12, 2, R0).equal(R0, &kind);
    let icmp = |kind: u8| {
        let rule = of(IPV6).meta(Meta::Transport, R0).equal(R0, &[ICMPV6]);
        rule.payload(Header::Transport, 0, 1, R0).equal(R0, &[kind])
    };
    let with = |rule: Rule, header, (offset, length)| name(rule).payload(header, offset, length, R0 + NAME);
    [
        name(Rule::default()).not_in_set(GUARDED).accept(),
        with(Rule::default(), Header::Link, SOURCE).not_in_set(HARDWARE).drop(),
        with(of(IPV4), Header::Network, (12, 4)).in_set(V4).accept(),
        with(with(of(ARP), Header::Network, SENDER_HARDWARE).in_set(HARDWARE), Header::Network, SENDER)
            .in_set(V4)
            .accept(),
        // No router answers on this bridge, and the bridge would copy each solicitation to all ports.
        icmp(ROUTER_SOLICITATION).drop(),
        icmp(ROUTER_ADVERTISEMENT).drop(),
        icmp(REDIRECT).drop(),
        with(icmp(NEIGHBOUR_ADVERTISEMENT), Header::Transport, TARGET).not_in_set(V6).drop(),
        with(of(IPV6), Header::Network, (8, 16)).in_set(V6).accept(),
        Rule::default().drop(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_has_its_own_addresses_and_those_derived_from_its_hardware() {
        let mac = [0x0a, 0x58, 10, 42, 0, 7];
        assert_eq!(link_local(mac), "fe80::858:aff:fe2a:7".parse::<Ipv6Addr>().unwrap());
        let source = Source { mac, addresses: vec!["10.42.0.7".parse().unwrap()] };
        let sets: Vec<_> = source.elements("veth0").into_iter().map(|(set, _)| set).collect();
        assert_eq!(sets, [GUARDED, HARDWARE, V4, V6, V6]);
    }
}

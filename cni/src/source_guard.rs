//! The source filter: a port of the default network's bridge sends only from the addresses of its pod. The filter
//! checks the source addresses of Ethernet, IPv4, IPv6, ARP and neighbour discovery. It also limits the rate of
//! broadcast and multicast frames, because the bridge copies them to all ports. Such frames are requests of ARP and
//! neighbour discovery, reports of multicast listeners (MLD, IGMP), and multicast of applications.
//!
//! The rules are in a table of the family `bridge`, because frames must be filtered at the port, before the bridge
//! forwards them. A frame of IPv4 costs one look-up in a hash set, other frames two, and broadcast and multicast frames
//! one more. The content is derived from the attachments.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use coracle_nft::{
    BRIDGE, BaseChain, Channel, DataType, Element, Header, Hook, IPV4_ADDR, IPV6_ADDR, Key, Meta, R0, Rule,
    SetSpec, Transaction, Verdict,
};

use crate::error::Error;
use crate::nft;

const CHAIN: &str = "ports";
/// Chain of IPv6 packets without a source address.
const NO_ADDRESS: &str = "no-address";
/// Chains of errors of ICMP and ICMPv6.
const ERRORS_V4: &str = "errors4";
const ERRORS_V6: &str = "errors6";
const GUARDED: &str = "guarded";
const V4: &str = "addresses4";
const V6: &str = "addresses6";
const TO_GROUPS: &str = "to_groups";
/// Maximum rate of broadcast and multicast frames of a port per second, and the burst.
const GROUP_RATE: u64 = 500;
const GROUP_BURST: u32 = 2000;
/// Maximum number of ports whose rate is measured at a time. Further ports have no limit.
const MEASURED_MAX: u32 = 4096;
/// Time without a broadcast or multicast frame after which a port's measurement is dropped. It is longer than the time
/// in which a spent burst is restored (4 s).
const MEASURED: Duration = Duration::from_secs(60);
/// Types of the nft tool: interface name and Ethernet address.
const IFNAME: u32 = 41;
const ETHER_ADDR: u32 = 9;
/// Priority of the chain: before `br_netfilter` and all filters of other programs.
const PRIORITY: i32 = -310;
/// Number of registers of an interface name, and of a hardware address.
const NAME_REGISTERS: u32 = 4;
const HARDWARE_REGISTERS: u32 = 2;

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
    is_current: bool,
    /// Whether the kernel has no tables of the family `bridge`.
    is_unsupported: bool,
    /// Whether the kernel cannot measure rates (`CONFIG_NFT_LIMIT`).
    is_unlimited: bool,
}

// === impl Source ===

impl Source {
    /// The elements of the sets, by the set's name.
    fn elements(&self, port: &str) -> Vec<(&'static str, Element)> {
        let named = || Key::default().interface(port);
        let mut all = vec![(GUARDED, Element::member(named()))];
        // Packets of duplicate address detection and multicast reports have no source address yet. A pod without an
        // IPv6 address may not send IPv6 packets.
        let derived = [IpAddr::V6(link_local(self.mac)), IpAddr::V6(Ipv6Addr::UNSPECIFIED)];
        let derived = derived.into_iter().filter(|_| self.addresses.iter().any(IpAddr::is_ipv6));
        let mut addresses: Vec<IpAddr> = self.addresses.iter().copied().chain(derived).collect();
        addresses.sort_unstable();
        addresses.dedup();
        let set = |ip: &IpAddr| if ip.is_ipv4() { V4 } else { V6 };
        let own = |ip: &IpAddr| Element::member(named().ethernet(self.mac).address(*ip));
        all.extend(addresses.iter().map(|ip| (set(ip), own(ip))));
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

    /// Permits only this source for the port.
    pub(crate) fn put(&self, port: &str, source: Source) -> Result<(), Error> {
        self.change(|state, transaction| {
            if let Some(old) = state.ports.get(port) {
                remove(transaction, port, old);
            }
            add(transaction, port, &source);
            state.ports.insert(port.to_owned(), source);
        })
    }

    /// Removes the permitted addresses of a port that no longer exists.
    pub(crate) fn remove(&self, port: &str) -> Result<(), Error> {
        self.change(|state, transaction| {
            if let Some(old) = state.ports.remove(port) {
                remove(transaction, port, &old);
            }
        })
    }

    /// Replaces the table by a table with these ports.
    pub(crate) fn replace(&self, ports: BTreeMap<String, Source>) -> Result<(), Error> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.ports = ports;
        self.make(&mut state)
    }

    /// Replaces the table after a change by another process.
    pub(crate) fn repair(&self) -> Result<(), Error> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.is_current { self.make(&mut state) } else { Ok(()) }
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
        if !state.is_current || state.ports.is_empty() {
            return self.make(&mut state);
        }
        let changed = self.commit(&mut state, transaction, "change");
        // After a refused change the content in the kernel is unknown, so the table is replaced.
        if changed.is_err() { self.make(&mut state) } else { Ok(()) }
    }

    /// Replaces the table. Removes it if there are no ports.
    fn make(&self, state: &mut State) -> Result<(), Error> {
        state.is_current = false;
        let mut transaction = Transaction::of_family(BRIDGE, &self.table);
        transaction.delete_table();
        if state.ports.is_empty() {
            let removed = self.commit(state, transaction, "remove");
            return if state.is_unsupported { Ok(()) } else { removed };
        }
        transaction.make_table();
        layout(&mut transaction, !state.is_unlimited);
        state.ports.iter().for_each(|(port, source)| add(&mut transaction, port, source));
        match self.commit(state, transaction, "replace") {
            Ok(()) => state.is_current = true,
            Err(error) if state.is_unsupported => tracing::warn!(
                error = error.chain(),
                "the kernel filters no frames of bridges, so pods may send from any address"
            ),
            Err(error) if state.is_unlimited => return Err(error),
            Err(error) => return self.make_without_limit(state, &error),
        }
        Ok(())
    }

    /// Makes the table without the rate limit, which some kernels do not support. Sources are still checked.
    fn make_without_limit(&self, state: &mut State, cause: &Error) -> Result<(), Error> {
        state.is_unlimited = true;
        let made = self.make(state);
        // If this attempt fails, too, the rate limit is not the cause of the error.
        state.is_unlimited = made.is_ok();
        if made.is_ok() {
            tracing::warn!(
                error = cause.chain(),
                "the kernel cannot limit broadcast and multicast frames, so a pod may flood the bridge"
            );
        }
        made
    }

    fn commit(
        &self,
        state: &mut State,
        transaction: Transaction<'_>,
        action: &'static str,
    ) -> Result<(), Error> {
        let committed = nft::commit(&mut state.channel, &self.table, transaction, action);
        if let Err(Error::Firewall { source, .. }) = &committed {
            state.is_unsupported = is_unsupported(source);
        }
        committed
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
fn layout(transaction: &mut Transaction<'_>, is_limited: bool) {
    // The keys: a port alone, or a port, its hardware address and its IP address.
    let sets: [(&str, &[u32], u32); 3] = [
        (GUARDED, &[IFNAME], 16),
        (V4, &[IFNAME, ETHER_ADDR, IPV4_ADDR], 28),
        (V6, &[IFNAME, ETHER_ADDR, IPV6_ADDR], 40),
    ];
    for (name, types, length) in sets {
        transaction.make_set(&SetSpec {
            name,
            key: DataType::concatenated(types, length),
            ..SetSpec::default()
        });
    }
    let hook = Hook::Prerouting;
    transaction.make_base_chain(BaseChain { name: CHAIN, hook, priority: PRIORITY, kind: "filter" });
    if is_limited {
        let key = DataType { kind: IFNAME, length: 16 };
        let dynamic = Some((MEASURED, MEASURED_MAX));
        transaction.make_set(&SetSpec { name: TO_GROUPS, key, dynamic, ..SetSpec::default() });
        transaction.rule(CHAIN, &too_many_to_groups());
    }
    let chains = [
        (NO_ADDRESS, rules_without_address().to_vec()),
        (ERRORS_V4, rules_of_errors(V4, ABOUT_V4).to_vec()),
        (ERRORS_V6, rules_of_errors(V6, ABOUT_V6).to_vec()),
    ];
    for (chain, rules) in chains {
        transaction.make_chain(chain);
        rules.iter().for_each(|rule| transaction.rule(chain, rule));
    }
    rules().iter().for_each(|rule| transaction.rule(CHAIN, rule));
}

/// Drops broadcast and multicast frames above the rate of a port. The first byte of their destination is odd.
fn too_many_to_groups() -> Rule {
    const GROUP: [u8; 1] = [1];
    let rule = Rule::default().payload(Header::Link, 0, 1, R0).mask(R0, &GROUP).equal(R0, &GROUP);
    let rule = rule.meta(Meta::InInterface, R0).in_set(GUARDED);
    rule.more_packets_than(TO_GROUPS, GROUP_RATE, GROUP_BURST).drop()
}

/// A part of a packet.
#[derive(Clone, Copy)]
struct Field {
    header: Header,
    /// Offset in the header, in bytes.
    offset: u32,
    /// Length in bytes.
    length: u32,
}

// === impl Field ===

impl Field {
    /// Loads the part into the registers that begin with `register`.
    fn load(self, rule: Rule, register: u32) -> Rule {
        rule.payload(self.header, self.offset, self.length, register)
    }
}

const IPV4: [u8; 2] = [0x08, 0x00];
const ARP: [u8; 2] = [0x08, 0x06];
const IPV6: [u8; 2] = [0x86, 0xdd];
// Hardware addresses: the source of a frame, and the sender of an ARP packet for Ethernet and IPv4.
const SOURCE: Field = Field { header: Header::Link, offset: 6, length: 6 };
const SENDER: Field = Field { header: Header::Network, offset: 8, length: 6 };
// Addresses: the source of a packet, the sender of an ARP packet, and the target of an advertisement.
const SOURCE_V4: Field = Field { header: Header::Network, offset: 12, length: 4 };
const SOURCE_V6: Field = Field { header: Header::Network, offset: 8, length: 16 };
const SENDER_V4: Field = Field { header: Header::Network, offset: 14, length: 4 };
const TARGET_V6: Field = Field { header: Header::Transport, offset: 8, length: 16 };
// The destination of the packet that an ICMP error reports. The header of that packet follows eight bytes.
const ABOUT_V4: Field = Field { header: Header::Transport, offset: 8 + 16, length: 4 };
const ABOUT_V6: Field = Field { header: Header::Transport, offset: 8 + 24, length: 16 };
// Protocols.
const ICMP: u8 = 1;
const ICMPV6: u8 = 58;
// First and last types of errors: unreachable, source quench, redirect; time exceeded, parameter problem. All types of
// ICMPv6 below 128 are errors (RFC 4443, section 2.1). The kernel looks up the connection also for unknown types.
const UNREACHABLE_TO_REDIRECT: [u8; 2] = [3, 5];
const EXCEEDED_TO_PROBLEM: [u8; 2] = [11, 12];
const ERRORS_OF_ICMPV6: [u8; 2] = [0, 127];
// Types of ICMPv6.
const LISTENER_REPORT: u8 = 131;
const LISTENER_DONE: u8 = 132;
const ROUTER_SOLICITATION: u8 = 133;
const ROUTER_ADVERTISEMENT: u8 = 134;
const NEIGHBOUR_SOLICITATION: u8 = 135;
const NEIGHBOUR_ADVERTISEMENT: u8 = 136;
const REDIRECT: u8 = 137;
const LISTENER_REPORT_2: u8 = 143;

/// Matches frames of an Ethernet type.
fn of(kind: [u8; 2]) -> Rule {
    Rule::default().payload(Header::Link, 12, 2, R0).equal(R0, &kind)
}

/// Loads the type of messages of ICMP or ICMPv6.
fn message(family: [u8; 2], protocol: u8) -> Rule {
    let rule = of(family).meta(Meta::Transport, R0).equal(R0, &[protocol]);
    rule.payload(Header::Transport, 0, 1, R0)
}

/// Matches messages of a type of ICMPv6.
fn icmp(kind: u8) -> Rule {
    message(IPV6, ICMPV6).equal(R0, &[kind])
}

/// Loads the name of the port.
fn name(rule: Rule) -> Rule {
    rule.meta(Meta::InInterface, R0)
}

/// Loads the key of the sets of addresses: the port, its hardware address and its IP address.
fn key(rule: Rule, hardware: Field, address: Field) -> Rule {
    let rule = hardware.load(name(rule), R0 + NAME_REGISTERS);
    address.load(rule, R0 + NAME_REGISTERS + HARDWARE_REGISTERS)
}

fn rules() -> [Rule; 14] {
    let errors_v4 =
        |[first, last]: [u8; 2]| message(IPV4, ICMP).between(R0, &[first], &[last]).jump(ERRORS_V4);
    let [first, last] = ERRORS_OF_ICMPV6;
    [
        // This rule accepts most frames.
        key(of(IPV4).meta(Meta::Transport, R0).unequal(R0, &[ICMP]), SOURCE, SOURCE_V4).in_set(V4).accept(),
        name(Rule::default()).not_in_set(GUARDED).accept(),
        errors_v4(UNREACHABLE_TO_REDIRECT),
        errors_v4(EXCEEDED_TO_PROBLEM),
        key(of(IPV4), SOURCE, SOURCE_V4).in_set(V4).accept(),
        key(key(of(ARP), SOURCE, SENDER_V4).in_set(V4), SENDER, SENDER_V4).in_set(V4).accept(),
        // No router answers on this bridge, and the bridge would copy each solicitation to all ports.
        icmp(ROUTER_SOLICITATION).drop(),
        icmp(ROUTER_ADVERTISEMENT).drop(),
        icmp(REDIRECT).drop(),
        key(icmp(NEIGHBOUR_ADVERTISEMENT), SOURCE, TARGET_V6).not_in_set(V6).drop(),
        message(IPV6, ICMPV6).between(R0, &[first], &[last]).jump(ERRORS_V6),
        of(IPV6).source(false, R0).equal(R0, &Ipv6Addr::UNSPECIFIED.octets()).jump(NO_ADDRESS),
        key(of(IPV6), SOURCE, SOURCE_V6).in_set(V6).accept(),
        Rule::default().drop(),
    ]
}

/// Rules for errors of ICMP: a pod may report only packets that were sent to it. The kernel looks up the connection by
/// the reported packet alone. Without these rules, a pod could end or slow down connections of other pods and of the
/// node, for example queries of the node's DNS server. A fragment that is too short for the header of the reported
/// packet is dropped.
fn rules_of_errors(addresses: &str, about: Field) -> [Rule; 2] {
    let own = key(Rule::default(), SOURCE, about).in_set(addresses);
    [own.verdict(&Verdict::Return), Rule::default().drop()]
}

/// Rules for IPv6 packets without a source address. Only duplicate address detection and reports of multicast listeners
/// need such packets. All other such packets are dropped, because rules for the addresses of pods, such as a network
/// policy, do not match them. A probe for an address prevents other interfaces from using this address, so a pod may
/// probe only its own addresses.
fn rules_without_address() -> [Rule; 5] {
    let own = |kind: u8| key(icmp(kind), SOURCE, SOURCE_V6).in_set(V6).accept();
    [
        key(icmp(NEIGHBOUR_SOLICITATION), SOURCE, TARGET_V6).in_set(V6).accept(),
        own(LISTENER_REPORT_2),
        own(LISTENER_REPORT),
        own(LISTENER_DONE),
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
        let sets = |addresses: &[&str]| {
            let addresses = addresses.iter().map(|address| address.parse().unwrap()).collect();
            let elements = Source { mac, addresses }.elements("veth0");
            elements.into_iter().map(|(set, _)| set).collect::<Vec<_>>()
        };
        assert_eq!(sets(&["10.42.0.7"]), [GUARDED, V4]);
        assert_eq!(sets(&["fd42::7"]), [GUARDED, V6, V6, V6]);
        assert_eq!(sets(&["10.42.0.7", "fd42::7"]), [GUARDED, V4, V6, V6, V6]);
    }
}

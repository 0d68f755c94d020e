//! A limit on the connections of each pod of the default network. Without the limit, one pod can fill the node's
//! connection tracking table. Then no other pod can open a connection.
//!
//! The limit is a table of the family `inet`. For each address behind the bridge, the kernel counts the tracked
//! connections that the address began (`ct count`). It drops the first packet of a connection above the limit. Packets
//! of existing connections cost two comparisons. When the table is made again, counting begins again. `nft list table`
//! shows the numbers of dropped packets.
//!
//! Closed TCP connections are not counted, but they stay in the connection tracking table for [`EXPIRY`]. So a limit
//! that the user sets also limits the rate of new connections. The maximum rate is the rate at which `max` closed
//! connections expire. The default limit does not limit this rate, because busy clients without keep-alive exceed it.
//!
//! In each clock tick the kernel visits all connections of a counter once. Linux before 6.19 then removes at most 8
//! ended connections. In a measurement, an address with 8,000 connections began 1,800 new connections a second with one
//! counter, and 13,600 without the limit (Linux 6.18, two cores). So each address has several counters, selected by a
//! hash of destination and ports; docs/measurements.md has the numbers.
//!
//! A rule cannot read the registers of the previous rule. So a new connection costs two hashes and two look-ups, or
//! three hashes and three look-ups if its counter is full. A rate limit costs one more look-up.
//!
//! A packet whose transport header has less than four bytes is not counted, because it has no ports. The kernel
//! replaces the connections of such packets when the table is full.

use std::net::Ipv6Addr;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use coracle_nft::{
    BaseChain, Channel, DataType, Header, Hook, Key, MARK, Meta, R0, Rule, SetSpec, Transaction,
};
use ipnetwork::IpNetwork;
use tracing::warn;

use crate::error::Error;
use crate::nft;

/// Priority of the chain: after connection tracking, before the destination is translated.
const PRIORITY: i32 = -150;
const CHAIN: &str = "begin";
/// Maximum connections of a counter if an address has several counters. Each counter gets about the same number of
/// connections. No counter is full while the address has at most three quarters of its limit.
const PART: u32 = 256;
/// Maximum counters of an address.
const PARTS_MAX: u32 = 256;
/// Maximum addresses of each family whose counters fit into the set of counters. Counters beyond the set have no limit.
/// A node may have 250 pods. The kernel allocates 16 bytes for each counter in advance.
const ADDRESSES_MAX: u32 = 256;
/// Minimum size of the sets of counters and rates, for nodes with more pods.
const SET_MIN: u32 = 4096;
/// Maximum connections of a link-local address. Each pod with IPv6 has a link-local address besides its pod address.
const LINK_LOCAL_MAX: u32 = 256;
/// Link-local addresses: `fe80::/10`.
const LINK_LOCAL: (Ipv6Addr, u8) = (Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 0), 10);
/// Seconds after which the kernel removes a closed TCP connection, or a datagram with its reply, from the connection
/// tracking table. The node sets `nf_conntrack_tcp_timeout_time_wait` to this value.
const EXPIRY: u32 = 30;
/// Time after which the kernel removes the rate of an idle address. It is longer than the time in which a spent burst
/// is restored.
const RATED: Duration = Duration::from_secs(60);
/// Maximum counters that refuse all connections for [`REFUSAL`].
const REFUSING_MAX: u32 = 8192;
/// Time in which a full counter accepts no connection. The kernel counts a packet before it compares the count with the
/// limit. Without this time, each further packet would take kernel memory.
const REFUSAL: Duration = Duration::from_secs(1);
/// Maximum connections that the kernel tracks.
const TRACKED: &str = "/proc/sys/net/netfilter/nf_conntrack_max";

/// The nftables table that limits the connections.
pub(crate) struct ConnectionLimit {
    table: String,
    state: Mutex<State>,
}

/// Maximum connections of an address.
#[derive(Clone, Copy, Default)]
enum Max {
    #[default]
    Unlimited,
    /// A quarter of the connections that the kernel tracks.
    Quarter,
    Number(u32),
}

#[derive(Default)]
struct State {
    max: Max,
    /// The bridge and the number of address families of its network, if the table was made.
    network: Option<(String, u32)>,
    channel: Option<Channel>,
}

/// The limits of the addresses behind a bridge.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Limits {
    bridge: String,
    /// Maximum connections of an address.
    max: u32,
    /// Number of counters of an address.
    parts: u32,
    /// Whether the rate of new connections is limited.
    is_rated: bool,
}

/// The parameters of one set of counters. Each address has several numbered counters.
struct Counted<'a> {
    /// Suffix of the names of the sets and the chain.
    suffix: &'a str,
    /// Matches the first packet of a connection, and loads the key of its counter.
    counter: Rule,
    key: DataType,
    /// Maximum connections of a counter.
    max: u32,
    /// Maximum counters.
    size: u32,
}

// === impl State ===

impl State {
    /// The limits. `None` means no table. The families share the maximum, because a pod has an address of each family.
    fn limits(&self) -> Option<Limits> {
        let (bridge, families) = self.network.clone()?;
        let max = (self.max.number()? / families.max(1)).max(1);
        Some(Limits { bridge, max, parts: parts(max), is_rated: matches!(self.max, Max::Number(_)) })
    }
}

// === impl Max ===

impl Max {
    /// The maximum as a number. `None` means no limit.
    fn number(self) -> Option<u32> {
        match self {
            Self::Unlimited => None,
            Self::Quarter => quarter(&std::fs::read_to_string(TRACKED).unwrap_or_default()),
            Self::Number(max) => Some(max),
        }
    }
}

/// A quarter of a number as text. `None` if the number is absent or 0. For the kernel, 0 means no limit.
fn quarter(text: &str) -> Option<u32> {
    let tracked: u32 = text.trim().parse().ok()?;
    (tracked > 0).then(|| (tracked / 4).max(1))
}

// === impl ConnectionLimit ===

impl ConnectionLimit {
    /// The limit, in a table that is named after the firewall table.
    pub(crate) fn beside(table: &str) -> Self {
        Self { table: format!("{table}-connections"), state: Mutex::default() }
    }

    /// The table's name.
    pub(crate) fn table(&self) -> &str {
        &self.table
    }

    /// Sets the maximum for tables that are made from now on. 0 means no limit. `None` means a quarter of the maximum
    /// connections that the kernel tracks.
    pub(crate) fn set(&self, max: Option<u32>) {
        let max = match max {
            Some(0) => Max::Unlimited,
            Some(max) => Max::Number(max),
            None => Max::Quarter,
        };
        self.state.lock().unwrap_or_else(PoisonError::into_inner).max = max;
    }

    /// Limits the connections from a bridge with these ranges, unless the table limits them already. A failure is
    /// logged: pods run without the limit.
    pub(crate) fn make(&self, bridge: &str, cidrs: &[IpNetwork]) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let network = Some((bridge.to_owned(), families(cidrs)));
        if state.network != network {
            state.network = network;
            self.replace(&mut state);
        }
    }

    /// Replaces the table after a change by another process.
    pub(crate) fn repair(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.network.is_some() {
            self.replace(&mut state);
        }
    }

    /// Removes the table.
    pub(crate) fn clear(&self) -> Result<(), Error> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.network = None;
        let mut transaction = Transaction::new(&self.table);
        transaction.delete_table();
        nft::commit(&mut state.channel, &self.table, transaction, "remove")
    }

    /// The number of packets that the table has dropped since it was made. `None` without a limit.
    pub(crate) fn dropped(&self) -> Option<u64> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.limits()?;
        let channel = nft::open_once(&mut state.channel).ok()?;
        coracle_nft::counted_packets(channel, &self.table).ok().flatten()
    }

    /// The netlink port that identifies the limit's own changes in notifications. `None` before the first change.
    pub(crate) fn author(&self) -> Option<u32> {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.channel.as_ref().map(Channel::port)
    }

    fn replace(&self, state: &mut State) {
        let limits = state.limits();
        let Err(error) = self.write(state, limits.as_ref()) else { return };
        // The kernel may have no hashes of packets (`CONFIG_NFT_HASH`) or no rates (`CONFIG_NFT_LIMIT`). One counter
        // for many connections is slow, so it is used only if the user requests a limit.
        let is_requested = matches!(state.max, Max::Number(_));
        let simple = limits.filter(|_| is_requested);
        let simple = simple.map(|limits| Limits { parts: 1, is_rated: false, ..limits });
        if simple.is_some_and(|simple| self.write(state, Some(&simple)).is_ok()) {
            warn!(
                error = error.chain(),
                "the kernel cannot limit the rate of the connections of pods or count them in parts, so only open ones \
                 are limited"
            );
        } else {
            warn!(error = error.chain(), "cannot limit the connections of pods");
        }
    }

    /// Replaces the table by a table with these limits, or removes it.
    fn write(&self, state: &mut State, limits: Option<&Limits>) -> Result<(), Error> {
        let mut transaction = Transaction::new(&self.table);
        transaction.delete_table();
        if let Some(limits) = limits {
            transaction.make_table();
            layout(&mut transaction, limits);
        }
        nft::commit(&mut state.channel, &self.table, transaction, "replace")
    }
}

/// Number of counters of an address.
fn parts(max: u32) -> u32 {
    (max / PART).clamp(1, PARTS_MAX)
}

/// Number of address families of the ranges.
fn families(cidrs: &[IpNetwork]) -> u32 {
    u32::from(cidrs.iter().any(IpNetwork::is_ipv4)) + u32::from(cidrs.iter().any(IpNetwork::is_ipv6))
}

fn layout(transaction: &mut Transaction<'_>, limits: &Limits) {
    const IPV4: u8 = 2;
    const IPV6: u8 = 10;
    let hook = Hook::Prerouting;
    transaction.make_base_chain(BaseChain { name: CHAIN, hook, priority: PRIORITY, kind: "filter" });
    let name = Key::default().interface(&limits.bridge);
    let from_other_interface = Rule::default().meta(Meta::InInterface, R0).unequal(R0, name.as_bytes());
    transaction.rule(CHAIN, &from_other_interface.accept());
    transaction.rule(CHAIN, &Rule::default().established_or_related().accept());
    for (number, address) in [(IPV4, DataType::address(true)), (IPV6, DataType::address(false))] {
        let DataType { kind, length } = address;
        let begins = Rule::default().family(number).begins_connection();
        if limits.is_rated {
            limit_rate(transaction, begins.clone(), address, limits.max);
        }
        let key = DataType::concatenated(&[kind, MARK], length + 4);
        if number == IPV6
            && let Ok(range) = IpNetwork::new(LINK_LOCAL.0.into(), LINK_LOCAL.1)
        {
            let counter = counter(begins.clone().from(range, false), length, 1);
            let max = limits.max.min(LINK_LOCAL_MAX);
            count(transaction, Counted { suffix: "_local", counter, key, max, size: SET_MIN });
        }
        let counter = counter(begins, length, limits.parts);
        let (suffix, max) = (length.to_string(), limits.max.div_ceil(limits.parts));
        let size = (limits.parts * ADDRESSES_MAX).max(SET_MIN);
        count(transaction, Counted { suffix: &suffix, counter, key, max, size });
    }
}

/// Drops new connections of an address above the rate at which `max` closed connections expire.
fn limit_rate(transaction: &mut Transaction<'_>, begins: Rule, address: DataType, max: u32) {
    let name = format!("rated{}", address.length);
    let dynamic = Some((RATED, SET_MIN));
    transaction.make_set(&SetSpec { name: &name, key: address, dynamic, ..SetSpec::default() });
    let rate = u64::from((max / EXPIRY).max(1));
    let above = begins.source(address.length == 4, R0).more_packets_than(&name, rate, max);
    transaction.rule(CHAIN, &above.count_packets().drop());
}

/// Drops the first packet of a connection above the maximum of its counter.
fn count(transaction: &mut Transaction<'_>, counted: Counted<'_>) {
    let Counted { suffix, counter, key, max, size } = counted;
    let [refusing, counted, over] = ["paused", "counted", "over"].map(|what| format!("{what}{suffix}"));
    let set = |name| SetSpec { name, key, ..SetSpec::default() };
    transaction.make_set(&SetSpec { dynamic: Some((REFUSAL, REFUSING_MAX)), ..set(&refusing) });
    transaction.make_set(&SetSpec { counted: Some(size), ..set(&counted) });
    transaction.make_chain(&over);
    transaction.rule(CHAIN, &counter.clone().in_set(&refusing).count_packets().drop());
    transaction.rule(CHAIN, &counter.clone().more_connections_than(&counted, max).goto(&over));
    // A rule that adds to a full set does not match, so a separate rule drops the packet.
    transaction.rule(&over, &counter.update(&refusing));
    transaction.rule(&over, &Rule::default().count_packets().drop());
}

/// Loads the key of a packet's counter into registers: the source address, and one of `count` numbers. `length` is the
/// length of an address in bytes.
fn counter(rule: Rule, length: u32, count: u32) -> Rule {
    let (is_ipv4, to) = (length == 4, R0 + length / 4);
    let rule = rule.source(is_ipv4, R0);
    if count == 1 {
        return rule.immediate(to, &0u32.to_ne_bytes());
    }
    let rule = rule.destination(is_ipv4, to).payload(Header::Transport, 0, 4, to + length / 4);
    rule.hash(to, length + 4, count, to)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::net::{IpAddr, SocketAddr, SocketAddrV6, TcpListener, TcpStream, UdpSocket};
    use std::os::fd::AsRawFd as _;
    use std::process::Command;

    use nix::sched::{CloneFlags, setns, unshare};
    use nix::sys::socket::{Shutdown, shutdown};

    use super::*;

    /// Two network namespaces with a veth pair. The thread is in the namespace of `v0`, and `peer` is the namespace of
    /// `v1`.
    struct Pair {
        peer: File,
    }

    impl Pair {
        fn new() -> Self {
            unshare(CloneFlags::CLONE_NEWNET).expect("this test needs root");
            let peer = File::open("/proc/thread-self/ns/net").unwrap();
            unshare(CloneFlags::CLONE_NEWNET).unwrap();
            let path = format!("/proc/{}/fd/{}", std::process::id(), peer.as_raw_fd());
            let inside = format!("--net={path}");
            run(&["ip", "link", "add", "v0", "type", "veth", "peer", "name", "v1"]);
            run(&["ip", "link", "set", "v1", "netns", &path]);
            run(&["ip", "address", "add", "10.9.0.1/24", "dev", "v0"]);
            run(&["ip", "address", "add", "fd09::1/64", "dev", "v0", "nodad"]);
            run(&["ip", "link", "set", "v0", "up"]);
            for address in ["10.9.0.2/24", "10.9.0.3/24", "fd09::2/64", "fe80::9/64"] {
                let nodad: &[&str] = if address.contains(':') { &["nodad"] } else { &[] };
                let add = ["nsenter", &inside, "ip", "address", "add", address, "dev", "v1"];
                run(&[&add, nodad].concat());
            }
            run(&["nsenter", &inside, "ip", "link", "set", "v1", "up"]);
            let pair = Self { peer };
            // The kernel drops packets until it has noticed that the link is up.
            for address in ["10.9.0.2", "fd09::2"] {
                assert!((0..20).any(|_| pair.arrived(address) > 0), "{address}");
            }
            pair
        }

        /// Sends one datagram from an address of the peer to each of ten sockets. Returns the number that arrive.
        fn arrived(&self, from: &str) -> usize {
            let from: IpAddr = from.parse().unwrap();
            let to = if from.is_ipv4() { "10.9.0.1" } else { "fd09::1" };
            let bind = |_| UdpSocket::bind((to.parse::<IpAddr>().unwrap(), 0)).unwrap();
            let receivers: Vec<_> = (0..10).map(bind).collect();
            let addresses: Vec<_> = receivers.iter().map(|one| one.local_addr().unwrap()).collect();
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    setns(&self.peer, CloneFlags::CLONE_NEWNET).unwrap();
                    let sender = UdpSocket::bind((from, 0)).unwrap();
                    addresses.iter().for_each(|to| assert_eq!(sender.send_to(b"x", to).unwrap(), 1));
                });
            });
            // Long enough for the resolution of addresses on a slow machine; datagrams that are dropped never arrive.
            let wait = Some(Duration::from_millis(300));
            receivers.iter().for_each(|one| one.set_read_timeout(wait).unwrap());
            receivers.iter().filter(|one| one.recv(&mut [0; 1]).is_ok()).count()
        }
    }

    impl Pair {
        /// Sends one datagram from each of these ports of the peer's address to one socket. Returns the number that
        /// arrive.
        fn arrived_from_ports(&self, from: &str, ports: std::ops::Range<u16>) -> usize {
            let from: IpAddr = from.parse().unwrap();
            let to = if from.is_ipv4() { "10.9.0.1" } else { "fd09::1" };
            let receiver = UdpSocket::bind((to.parse::<IpAddr>().unwrap(), 0)).unwrap();
            let to = receiver.local_addr().unwrap();
            let receives = |wait| {
                receiver.set_read_timeout(Some(Duration::from_millis(wait))).unwrap();
                receiver.recv(&mut [0; 1]).is_ok()
            };
            let (next, todo) = std::sync::mpsc::channel::<u16>();
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    setns(&self.peer, CloneFlags::CLONE_NEWNET).unwrap();
                    for port in todo {
                        let sender = UdpSocket::bind(of_peer(from, port)).unwrap();
                        assert_eq!(sender.send_to(b"x", to).unwrap(), 1);
                    }
                });
                // The datagrams are sent one by one, because the socket's buffer is small. Late datagrams are counted
                // at the end.
                let mut count = 0;
                for port in ports {
                    next.send(port).unwrap();
                    count += usize::from(receives(5));
                }
                drop(next);
                while receives(300) {
                    count += 1;
                }
                count
            })
        }
    }

    /// The socket address of the peer for a thread in the peer's namespace. A link-local address needs the interface.
    fn of_peer(address: IpAddr, port: u16) -> SocketAddr {
        match address {
            IpAddr::V6(v6) if v6.is_unicast_link_local() => {
                let interface = nix::net::if_::if_nametoindex("v1").unwrap();
                SocketAddrV6::new(v6, port, 0, interface).into()
            }
            address => SocketAddr::new(address, port),
        }
    }

    fn run(command: &[&str]) {
        let status = Command::new(command[0]).args(&command[1..]).status();
        assert!(status.unwrap().success(), "{command:?}");
    }

    /// Number of packets that the rules of a table have dropped.
    fn dropped(limit: &ConnectionLimit) -> u64 {
        let shown = Command::new("nft").args(["list", "table", "inet", limit.table()]).output().unwrap();
        let shown = String::from_utf8(shown.stdout).unwrap();
        let counters = shown.split("counter packets ").skip(1);
        counters.map(|counter| counter.split(' ').next().unwrap().parse::<u64>().unwrap()).sum()
    }

    fn ranges(texts: &[&str]) -> Vec<IpNetwork> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    #[test]
    fn an_address_begins_a_limited_number_of_connections() {
        let tested = std::thread::spawn(|| {
            let pair = Pair::new();
            let limit = ConnectionLimit::beside("test");
            limit.set(Some(5));
            limit.make("other", &ranges(&["10.9.0.0/24"]));
            assert_eq!(pair.arrived("10.9.0.2"), 10);
            limit.make("v0", &ranges(&["10.9.0.0/24"]));
            for address in ["10.9.0.2", "10.9.0.3", "fd09::2"] {
                assert_eq!(pair.arrived(address), 5, "{address}");
            }
            assert!(dropped(&limit) >= 15, "{}", dropped(&limit));
            let (before, read, after) = (dropped(&limit), limit.dropped(), dropped(&limit));
            assert!(read.is_some_and(|read| before <= read && read <= after), "{before} {read:?} {after}");
            limit.clear().unwrap();
            assert_eq!(limit.dropped(), None);
            assert_eq!(pair.arrived("10.9.0.2"), 10);
        });
        tested.join().unwrap();
    }
    #[test]
    fn many_connections_of_an_address_are_counted_in_parts() {
        assert_eq!([5, 512, 32768, 65536, 1 << 20].map(parts), [1, 2, 128, 256, 256]);
        let tested = std::thread::spawn(|| {
            let pair = Pair::new();
            let limit = ConnectionLimit::beside("test");
            limit.set(Some(512));
            limit.make("v0", &ranges(&["10.9.0.0/24"]));
            // The counters are not full at the same time. The rate limit drops connections that a counter still
            // accepts.
            let arrived = pair.arrived_from_ports("10.9.0.2", 20_000..20_700);
            assert!((400..=512).contains(&arrived), "{arrived}");
            assert_eq!(pair.arrived_from_ports("10.9.0.3", 20_000..20_100), 100, "another address");
        });
        tested.join().unwrap();
    }

    #[test]
    fn a_link_local_address_begins_few_connections() {
        let tested = std::thread::spawn(|| {
            let pair = Pair::new();
            let limit = ConnectionLimit::beside("test");
            limit.set(Some(4000));
            limit.make("v0", &ranges(&["10.9.0.0/24", "fd09::/64"]));
            let most = usize::try_from(LINK_LOCAL_MAX).unwrap();
            assert_eq!(pair.arrived_from_ports("fe80::9", 20_000..20_300), most);
            assert_eq!(pair.arrived_from_ports("fd09::2", 20_000..20_300), 300);
        });
        tested.join().unwrap();
    }

    #[test]
    fn closed_connections_are_limited_by_their_rate() {
        const MAX: u32 = 60;
        let tested = std::thread::spawn(|| {
            let pair = Pair::new();
            let limit = ConnectionLimit::beside("test");
            limit.set(Some(MAX));
            limit.make("v0", &ranges(&["10.9.0.0/24"]));
            let listener = TcpListener::bind("10.9.0.1:0").unwrap();
            let to = listener.local_addr().unwrap();
            let begun = std::time::Instant::now();
            let connected = std::thread::scope(|scope| {
                let connecting = scope.spawn(|| {
                    setns(&pair.peer, CloneFlags::CLONE_NEWNET).unwrap();
                    let connect =
                        |_: &u32| TcpStream::connect_timeout(&to, Duration::from_millis(50)).is_ok();
                    (0..2 * MAX).filter(connect).count()
                });
                // Both ends of each connection are closed at once. The shutdown ends the loop.
                scope.spawn(|| while listener.accept().is_ok() {});
                let connected = connecting.join();
                shutdown(listener.as_raw_fd(), Shutdown::Both).unwrap();
                connected.unwrap()
            });
            let renewed = begun.elapsed().as_secs() + 1;
            let most = u64::from(MAX) + u64::from(MAX / EXPIRY) * renewed;
            let connected = u64::try_from(connected).unwrap();
            assert!((1..=most).contains(&connected), "{connected} of {}", 2 * MAX);
        });
        tested.join().unwrap();
    }

    #[test]
    fn the_families_of_a_network_share_the_maximum() {
        let limits = |max, cidrs: &[&str]| {
            let network = Some(("b".to_owned(), families(&ranges(cidrs))));
            State { max: Max::Number(max), network, channel: None }.limits().map(|limits| limits.max)
        };
        let (v4, v6) = ("10.9.0.0/24", "fd09::/64");
        assert_eq!((limits(1000, &[v4]), limits(1000, &[v6])), (Some(1000), Some(1000)));
        assert_eq!((limits(1000, &[v4, v6]), limits(1, &[v4, v6])), (Some(500), Some(1)));
    }

    #[test]
    fn the_default_is_a_quarter_of_the_connections_that_the_kernel_tracks() {
        assert_eq!(["262144\n", "3", "0", ""].map(quarter), [Some(65536), Some(1), None, None]);
    }
}

//! A limit on the connections of each pod of the default network: one pod cannot fill the node's connection tracking
//! table, which stops new connections of all others.
//!
//! One table of the family `inet`. The kernel counts the tracked connections that each address behind the bridge began
//! (`ct count`), and drops the first packet of one more. TCP connections that are closed do not count. Packets of
//! existing connections cost two comparisons. When the table is made again, counting begins again.
//!
//! The kernel looks at all connections of a counter once in each tick of its clock, and Linux before 6.19 removes only
//! 8 ended ones then. So the connections of an address have many counters: a hash of the destination and the ports
//! chooses one of them. A new connection costs a hash and two look-ups, and a look at one counter. With one counter for
//! an address, one with 8,000 connections began 1,800 a second, and 13,600 without the limit (Linux 6.18, two cores);
//! with parts it is not measured yet.
//!
//! Packets without ports, whose protocol has no header of four bytes, are not counted. The kernel replaces their
//! connections when the table is full.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use coracle_nft::{
    BaseChain, Channel, Header, Hook, IPV4_ADDR, IPV6_ADDR, Key, MARK, Meta, R0, Rule, SetSpec, Transaction,
    concatenated,
};
use tracing::warn;

use crate::error::Error;
use crate::nft;

/// After connection tracking, before the destination is translated.
const PRIORITY: i32 = -150;
const CHAIN: &str = "begin";
/// Maximum connections of one of several counters of an address. Each gets about the same number of connections: up to
/// three quarters of the limit of the address, none of them is full.
const PART: u32 = 256;
/// Maximum counters of an address.
const PARTS_MAX: u32 = 256;
/// Maximum counters of all addresses. Further ones have no limit. The kernel allocates 16 bytes for each of them in
/// advance.
const COUNTERS_MAX: u32 = 32768;
/// Maximum counters that are paused.
const PAUSED_MAX: u32 = 8192;
/// Time in which a full counter takes no connection. Without it each further packet would take memory of the kernel,
/// which counts the packet before it compares the count.
const PAUSE: Duration = Duration::from_secs(1);
/// Maximum connections that the kernel tracks.
const TRACKED: &str = "/proc/sys/net/netfilter/nf_conntrack_max";

/// The table.
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
    /// The bridge, if the table was made.
    bridge: Option<String>,
    channel: Option<Channel>,
}

// === impl Max ===

impl Max {
    /// The number. `None`: no limit.
    fn number(self) -> Option<u32> {
        match self {
            Self::Unlimited => None,
            Self::Quarter => quarter(&std::fs::read_to_string(TRACKED).unwrap_or_default()),
            Self::Number(max) => Some(max),
        }
    }
}

/// A quarter of a number as text. `None` if the number is 0, which is no limit for the kernel, or absent.
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

    /// Sets the maximum for tables that are made from now on. 0: no limit. `None`: a quarter of the connections that
    /// the kernel tracks.
    pub(crate) fn set(&self, max: Option<u32>) {
        let max = match max {
            Some(0) => Max::Unlimited,
            Some(max) => Max::Number(max),
            None => Max::Quarter,
        };
        self.state.lock().unwrap_or_else(PoisonError::into_inner).max = max;
    }

    /// Limits the connections from a bridge, unless the table limits them already. A failure is logged: pods run
    /// without the limit.
    pub(crate) fn make(&self, bridge: &str) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.bridge.as_deref() != Some(bridge) {
            state.bridge = Some(bridge.to_owned());
            self.replace(&mut state);
        }
    }

    /// Replaces the table after a change by another process.
    pub(crate) fn repair(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.bridge.is_some() {
            self.replace(&mut state);
        }
    }

    /// Removes the table.
    pub(crate) fn clear(&self) -> Result<(), Error> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.bridge = None;
        let mut transaction = Transaction::new(&self.table);
        transaction.delete_table();
        self.commit(&mut state, transaction, "remove")
    }

    /// The netlink port that identifies the limit's own changes in notifications. `None` before the first change.
    pub(crate) fn author(&self) -> Option<u32> {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.channel.as_ref().map(Channel::port)
    }

    fn replace(&self, state: &mut State) {
        let mut transaction = Transaction::new(&self.table);
        transaction.delete_table();
        if let (Some(max), Some(bridge)) = (state.max.number(), &state.bridge) {
            transaction.make_table();
            layout(&mut transaction, bridge, max);
        }
        if let Err(error) = self.commit(state, transaction, "replace") {
            warn!(error = error.chain(), "cannot limit the connections of pods");
        }
    }

    fn commit(
        &self,
        state: &mut State,
        transaction: Transaction<'_>,
        action: &'static str,
    ) -> Result<(), Error> {
        let channel = nft::open_once(&mut state.channel)?;
        let refused = |source| Error::Firewall { action, table: self.table.clone(), source };
        channel.commit(transaction.finish()).map_err(refused)
    }
}

/// Number of counters of an address, and the maximum connections of each.
fn parts(max: u32) -> (u32, u32) {
    let count = (max / PART).clamp(1, PARTS_MAX);
    (count, max.div_ceil(count))
}

fn layout(transaction: &mut Transaction<'_>, bridge: &str, max: u32) {
    const IPV4: u8 = 2;
    const IPV6: u8 = 10;
    let hook = Hook::Prerouting;
    transaction.make_base_chain(BaseChain { name: CHAIN, hook, priority: PRIORITY, kind: "filter" });
    let name = Key::default().interface(bridge);
    let elsewhere = Rule::default().meta(Meta::InInterface, R0).unequal(R0, name.as_bytes());
    transaction.rule(CHAIN, &elsewhere.accept());
    transaction.rule(CHAIN, &Rule::default().established_or_related().accept());
    let (count, max) = parts(max);
    for (number, kind, length) in [(IPV4, IPV4_ADDR, 4), (IPV6, IPV6_ADDR, 16)] {
        let [paused, counted, over] = ["paused", "counted", "over"].map(|what| format!("{what}{length}"));
        let key = (concatenated(&[kind, MARK]), length + 4);
        let set = |name| SetSpec { name, key, ..SetSpec::default() };
        transaction.make_set(&SetSpec { dynamic: Some((PAUSE, PAUSED_MAX)), ..set(&paused) });
        transaction.make_set(&SetSpec { counted: Some(COUNTERS_MAX), ..set(&counted) });
        transaction.make_chain(&over);
        let counter = counter(Rule::default().family(number).begins_connection(), length, count);
        transaction.rule(CHAIN, &counter.clone().in_set(&paused).drop());
        transaction.rule(CHAIN, &counter.clone().more_connections_than(&counted, max).goto(&over));
        // A rule that adds to a full set does not match, so the packet is dropped by a rule of its own.
        transaction.rule(&over, &counter.update(&paused));
        transaction.rule(&over, &Rule::default().drop());
    }
}

/// Loads the counter of a packet, of `count` for each address: source and number. `length`: bytes of an address.
fn counter(rule: Rule, length: u32, count: u32) -> Rule {
    let (is_ipv4, to) = (length == 4, R0 + length / 4);
    let rule = rule.source(is_ipv4, R0);
    if count == 1 {
        return rule.immediate(to, &0u32.to_ne_bytes());
    }
    let rule = rule.destination(is_ipv4, to).payload(Header::Transport, 0, 4, to + length / 4);
    rule.hash((to, length + 4), count, to)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::net::{IpAddr, UdpSocket};
    use std::os::fd::AsRawFd as _;
    use std::process::Command;

    use nix::sched::{CloneFlags, setns, unshare};

    use super::*;

    /// Two network namespaces with a veth pair: the thread is in that of `v0`, and `peer` is that of `v1`.
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
            for address in ["10.9.0.2/24", "10.9.0.3/24", "fd09::2/64"] {
                let nodad: &[&str] = if address.contains(':') { &["nodad"] } else { &[] };
                let add = ["nsenter", &inside, "ip", "address", "add", address, "dev", "v1"];
                run(&[&add, nodad].concat());
            }
            run(&["nsenter", &inside, "ip", "link", "set", "v1", "up"]);
            Self { peer }
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
        /// Sends datagrams from as many ports of an address of the peer to one socket. Returns the number that arrive.
        fn arrived_from_ports(&self, from: &str, ports: std::ops::Range<u16>) -> usize {
            let from: IpAddr = from.parse().unwrap();
            let receiver = UdpSocket::bind(("10.9.0.1", 0)).unwrap();
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
                        let sender = UdpSocket::bind((from, port)).unwrap();
                        assert_eq!(sender.send_to(b"x", to).unwrap(), 1);
                    }
                });
                // One after another, so that the socket's buffer suffices. A late datagram counts later.
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

    fn run(command: &[&str]) {
        let status = Command::new(command[0]).args(&command[1..]).status();
        assert!(status.unwrap().success(), "{command:?}");
    }

    #[test]
    fn an_address_begins_only_so_many_connections() {
        let tested = std::thread::spawn(|| {
            let pair = Pair::new();
            let limit = ConnectionLimit::beside("test");
            limit.set(Some(5));
            limit.make("other");
            assert_eq!(pair.arrived("10.9.0.2"), 10);
            limit.make("v0");
            for address in ["10.9.0.2", "10.9.0.3", "fd09::2"] {
                assert_eq!(pair.arrived(address), 5, "{address}");
            }
            limit.clear().unwrap();
            assert_eq!(pair.arrived("10.9.0.2"), 10);
        });
        tested.join().unwrap();
    }
    #[test]
    fn many_connections_of_an_address_are_counted_in_parts() {
        assert_eq!((parts(5), parts(512), parts(65536)), ((1, 5), (2, 256), (256, 256)));
        let tested = std::thread::spawn(|| {
            let pair = Pair::new();
            let limit = ConnectionLimit::beside("test");
            limit.set(Some(512));
            limit.make("v0");
            assert_eq!(pair.arrived_from_ports("10.9.0.2", 20_000..20_700), 512);
            assert_eq!(pair.arrived_from_ports("10.9.0.3", 20_000..20_100), 100, "another address");
        });
        tested.join().unwrap();
    }

    #[test]
    fn the_default_is_a_quarter_of_the_connections_that_the_kernel_tracks() {
        assert_eq!(["262144\n", "3", "0", ""].map(quarter), [Some(65536), Some(1), None, None]);
    }
}

//! A limit on the connections of each pod of the default network: one pod cannot fill the node's connection tracking
//! table, which stops new connections of all others.
//!
//! One table of the family `inet`. The kernel counts the tracked connections that each address behind the bridge began
//! (`ct count`), and drops the first packet of one more. TCP connections that are closed do not count. Packets of
//! existing connections cost a comparison. When the table is made again, counting begins again.
//!
//! Off by default: the kernel looks at all counted connections of the address once in each tick of its clock. With 8,000
//! connections an address began 1,800 a second, and 13,600 without the limit (Linux 6.18, two cores). Linux before 6.19 also
//! removes only 8 ended connections of an address from its count in each tick. An address that begins more than 800 to 8,000
//! short connections a second, depending on the kernel's HZ, has a higher count than it has connections.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use coracle_nft::{
    BaseChain, Channel, Hook, IPV4_ADDR, IPV6_ADDR, Key, Meta, R0, Rule, SetSpec, Transaction,
};
use tracing::warn;

use crate::error::Error;
use crate::nft;

/// After connection tracking, before the destination is translated.
const PRIORITY: i32 = -150;
const CHAIN: &str = "begin";
/// Maximum addresses that are counted. The connections of others are not limited.
const ADDRESSES: u32 = 65535;
/// Time in which an address above the limit begins no connection. Without it each further packet would take memory of the
/// kernel, which counts the packet before it compares the count.
const PAUSE: Duration = Duration::from_secs(1);

/// The table.
pub(crate) struct ConnectionLimit {
    table: String,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// `None`: no limit.
    max: Option<u32>,
    /// The bridge, if the table was made.
    bridge: Option<String>,
    channel: Option<Channel>,
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

    /// Sets the maximum for tables that are made from now on.
    pub(crate) fn set(&self, max: u32) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).max = Some(max).filter(|max| *max > 0);
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
        if let (Some(max), Some(bridge)) = (state.max, &state.bridge) {
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

fn layout(transaction: &mut Transaction<'_>, bridge: &str, max: u32) {
    const IPV4: u8 = 2;
    const IPV6: u8 = 10;
    let hook = Hook::Prerouting;
    transaction.make_base_chain(BaseChain { name: CHAIN, hook, priority: PRIORITY, kind: "filter" });
    for (number, kind, length) in [(IPV4, IPV4_ADDR, 4), (IPV6, IPV6_ADDR, 16)] {
        let [paused, counted] = ["paused", "counted"].map(|what| format!("{what}{length}"));
        let set = |name| SetSpec { name, key: (kind, length), ..SetSpec::default() };
        transaction.make_set(&SetSpec { dynamic: Some((PAUSE, ADDRESSES)), ..set(&paused) });
        transaction.make_set(&SetSpec { counted: Some(ADDRESSES), ..set(&counted) });
        let name = Key::default().interface(bridge);
        let rule = Rule::default().meta(Meta::InInterface, R0).equal(R0, name.as_bytes());
        let rule = rule.family(number).begins_connection().source(number == IPV4, R0);
        transaction.rule(CHAIN, &rule.clone().in_set(&paused).drop());
        transaction.rule(CHAIN, &rule.more_connections_than(&counted, max).update(&paused).drop());
    }
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

    fn run(command: &[&str]) {
        let status = Command::new(command[0]).args(&command[1..]).status();
        assert!(status.unwrap().success(), "{command:?}");
    }

    #[test]
    fn an_address_begins_only_so_many_connections() {
        let tested = std::thread::spawn(|| {
            let pair = Pair::new();
            let limit = ConnectionLimit::beside("test");
            limit.set(5);
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
}

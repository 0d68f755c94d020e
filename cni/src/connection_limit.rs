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
//! short connections a second, by the kernel's HZ, seems to have more than it has.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use coracle_nft::{
    BaseChain, Channel, Hook, IPV4_ADDR, IPV6_ADDR, Key, Meta, R0, Rule, SetSpec, Transaction,
};
use tracing::warn;

use crate::error::Error;

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
    /// The limit beside the firewall table of this name.
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

    /// Limits the connections from a bridge, unless it did so already. A failure is logged: pods run without the limit.
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

    /// The netlink port that identifies own changes in notifications. `None` before the first change.
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
        let channel = match &mut state.channel {
            Some(channel) => channel,
            none => {
                let wrong = |source| Error::Socket { action: "open an nftables socket", source };
                none.insert(Channel::open().map_err(wrong)?)
            }
        };
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
    use std::net::{IpAddr, UdpSocket};
    use std::process::Command;

    use super::*;

    /// Sends one datagram to each of ten sockets. Returns the number that arrive; those that are not dropped have arrived
    /// when the call to send returns, because the loopback interface delivers them in the same call.
    fn arrived(address: IpAddr) -> usize {
        let receivers: Vec<_> = (0..10).map(|_| UdpSocket::bind((address, 0)).unwrap()).collect();
        let sender = UdpSocket::bind((address, 0)).unwrap();
        for receiver in &receivers {
            sender.send_to(b"x", receiver.local_addr().unwrap()).unwrap();
            receiver.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
        }
        receivers.iter().filter(|receiver| receiver.recv(&mut [0; 1]).is_ok()).count()
    }

    #[test]
    fn an_address_begins_only_so_many_connections() {
        let tested = std::thread::spawn(|| {
            nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).expect("this test needs root");
            assert!(Command::new("ip").args(["link", "set", "lo", "up"]).status().unwrap().success());
            let limit = ConnectionLimit::beside("test");
            limit.set(5);
            limit.make("other");
            assert_eq!(arrived("127.0.0.1".parse().unwrap()), 10);
            limit.make("lo");
            for address in ["127.0.0.1", "127.0.0.2", "::1"] {
                assert_eq!(arrived(address.parse().unwrap()), 5, "{address}");
            }
            assert_eq!(arrived("127.0.0.1".parse().unwrap()), 0);
            limit.clear().unwrap();
            assert_eq!(arrived("127.0.0.1".parse().unwrap()), 10);
        });
        tested.join().unwrap();
    }
}

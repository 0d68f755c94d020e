//! The rules that jump from the base chains to the chain of the host ports.

use std::net::IpAddr;

use coracle_nft::Rule;
use ipnetwork::IpNetwork;

use super::Table;
use super::family::{V4, V6};

/// Base chains that contain these rules.
const CHAINS: [&str; 2] = ["prerouting", "output"];

/// Rules that jump to the chain `hostports`. The rules exist only while there are host ports, because they look up a
/// route for the first packet of each connection.
pub(crate) struct HostPortJumps<'a> {
    /// Whether host ports existed before this transaction, and whether some exist after it.
    pub(crate) ports: [bool; 2],
    /// Addresses to which host ports do not apply. Otherwise a host port 53 would receive the queries to cluster DNS.
    pub(crate) served: &'a [IpAddr],
}

// === impl Table ===

impl Table<'_> {
    /// Writes the rules when the first host port is added. Removes the rules when the last host port is removed.
    pub(super) fn write_host_port_jumps(&mut self, jumps: &HostPortJumps<'_>) {
        let [before, now] = jumps.ports;
        if before == now {
            return;
        }
        for chain in CHAINS {
            self.0.flush_chain(chain);
            for family in [V4, V6].iter().filter(|_| now) {
                let of_family = |address: &&IpAddr| address.is_ipv4() == (family.address.length == 4);
                let served = jumps.served.iter().filter(of_family);
                let local = Rule::default().family(family.number).destination_is_local();
                let local = served.fold(local, |rule, address| rule.to(IpNetwork::from(*address), true));
                self.0.rule(chain, &local.jump("hostports"));
            }
        }
    }
}

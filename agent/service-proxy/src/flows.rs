//! Removal of conntrack entries that lead to former endpoints of ports without connections.

use std::cell::OnceCell;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::io;
use std::net::{IpAddr, SocketAddr};

use coracle_nft::{Channel, Flow, delete_flows};

use crate::program::ConnectionlessPort;

/// Ports whose targets changed, with their targets now.
pub(crate) type Changed = BTreeMap<ConnectionlessPort, BTreeSet<SocketAddr>>;

/// Adds the ports whose targets differ. A port that only gains targets while it had some keeps its entries.
pub(crate) fn compare(changed: &mut Changed, before: &Changed, now: &Changed) {
    for (port, targets) in before {
        let new = now.get(port);
        if new.is_none_or(|new| !targets.is_subset(new) || targets.is_empty() && !new.is_empty()) {
            changed.insert(*port, new.cloned().unwrap_or_default());
        }
    }
    let added = now.iter().filter(|(port, _)| !before.contains_key(port));
    changed.extend(added.map(|(port, targets)| (*port, targets.clone())));
}

/// Removes entries of changed ports whose target is no longer a target of the port.
pub(crate) fn delete_stale(channel: &mut Channel, changed: &Changed) -> io::Result<()> {
    let mut groups: BTreeMap<(bool, u8), Vec<&ConnectionlessPort>> = BTreeMap::new();
    for port in changed.keys() {
        groups.entry((port.is_ipv4, port.protocol)).or_default().push(port);
    }
    let mut first = Ok(());
    for ((is_ipv4, protocol), ports) in groups {
        let numbers = ports.iter().map(|port| port.port).collect();
        let here = OnceCell::new();
        let stale = |flow: &Flow| {
            let by = |address| ConnectionlessPort { protocol, is_ipv4, address, port: flow.port };
            let by_address = changed.get(&by(Some(flow.to)));
            let targets = by_address.or_else(|| {
                let by_node_port = changed.get(&by(None))?;
                here.get_or_init(own_addresses).contains(&flow.to).then_some(by_node_port)
            });
            let answering = SocketAddr::new(flow.answered_by, flow.answering_port);
            targets.is_some_and(|targets| !targets.contains(&answering))
        };
        first = first.and(delete_flows(channel, is_ipv4, protocol, &numbers, stale).map(drop));
    }
    first
}

/// The addresses of this machine's interfaces. A successful bind would not prove that an address is one of them,
/// because of `ip_nonlocal_bind`.
fn own_addresses() -> HashSet<IpAddr> {
    let interfaces = nix::ifaddrs::getifaddrs().into_iter().flatten();
    let addresses = interfaces.filter_map(|interface| interface.address);
    let v4 = |address: &nix::sys::socket::SockaddrStorage| address.as_sockaddr_in().map(|v4| v4.ip().into());
    addresses
        .filter_map(|address| v4(&address).or_else(|| Some(address.as_sockaddr_in6()?.ip().into())))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_addresses_are_those_of_interfaces() {
        let own = own_addresses();
        assert!(own.contains(&"127.0.0.1".parse().unwrap()));
        assert!(!own.contains(&"192.0.2.1".parse().unwrap()));
    }
}

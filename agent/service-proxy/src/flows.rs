//! Removal of conntrack entries that lead to former endpoints, for ports of connectionless protocols (UDP).

use std::cell::OnceCell;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::io;
use std::net::{IpAddr, SocketAddr};

use coracle_nft::{Channel, Flow, delete_flows};

use crate::program::ConnectionlessPort;

/// Ports with flows that may be stale, with the current targets of each port.
pub(crate) type Changed = BTreeMap<ConnectionlessPort, BTreeSet<SocketAddr>>;

/// Adds the ports whose flows may be stale. A port that had targets and only gains more targets keeps its flows. As in
/// kube-proxy, a port that has lost all targets also keeps its flows. These flows are compared with the next targets of
/// the port.
pub(crate) fn compare(changed: &mut Changed, before: &Changed, now: &Changed) {
    let removed = before.keys().filter(|port| !now.contains_key(port));
    changed.extend(removed.map(|port| (*port, BTreeSet::new())));
    for (port, targets) in now.iter().filter(|(_, targets)| !targets.is_empty()) {
        let is_kept = |old: &BTreeSet<SocketAddr>| !old.is_empty() && old.is_subset(targets);
        if !before.get(port).is_some_and(is_kept) {
            changed.insert(*port, targets.clone());
        }
    }
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
        coracle_fault::point("services.flows-deleted");
    }
    first
}

/// The addresses of this machine's interfaces. A successful bind would not prove that the node has an address, because
/// of `ip_nonlocal_bind`.
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
    fn flows_are_compared_when_their_target_may_have_ended() {
        let port = ConnectionlessPort { protocol: 17, is_ipv4: true, address: None, port: 53 };
        let with = |targets: &[&str]| -> Changed {
            [(port, targets.iter().map(|target| target.parse().unwrap()).collect())].into()
        };
        let (one, two) = ("10.0.0.1:53", "10.0.0.2:53");
        let of = |before: &Changed, now: &Changed| {
            let mut changed = Changed::new();
            compare(&mut changed, before, now);
            changed
        };
        let (none, absent) = (with(&[]), Changed::new());
        assert_eq!(of(&with(&[one]), &with(&[two])), with(&[two]));
        assert_eq!(of(&with(&[one, two]), &with(&[two])), with(&[two]));
        assert_eq!(of(&with(&[one]), &with(&[one, two])), absent);
        assert_eq!(of(&with(&[one]), &none), absent, "a service without endpoints keeps its flows");
        assert_eq!(of(&none, &with(&[one])), with(&[one]));
        assert_eq!(of(&absent, &with(&[one])), with(&[one]), "a restart");
        assert_eq!(of(&absent, &none), absent);
        assert_eq!(of(&with(&[one]), &absent), none, "the service is removed");
    }

    #[test]
    fn the_own_addresses_are_the_addresses_of_the_interfaces() {
        let own = own_addresses();
        assert!(own.contains(&"127.0.0.1".parse().unwrap()));
        assert!(!own.contains(&"192.0.2.1".parse().unwrap()));
    }
}

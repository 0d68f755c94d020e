//! Removal of conntrack entries that lead to former endpoints of ports without connections.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::net::{IpAddr, UdpSocket};

use coracle_nft::{Channel, Flow, delete_flows};

use crate::program::Connectionless;

/// Ports whose targets changed, with their targets now.
pub(crate) type Changed = BTreeMap<Connectionless, BTreeSet<IpAddr>>;

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

/// Removes entries to changed ports whose target is none of the targets now.
pub(crate) fn forget(channel: &mut Channel, changed: &Changed) -> io::Result<()> {
    let mut groups: BTreeMap<(bool, u8), Vec<&Connectionless>> = BTreeMap::new();
    for port in changed.keys() {
        groups.entry((port.is_ipv4, port.protocol)).or_default().push(port);
    }
    let mut first = Ok(());
    for ((is_ipv4, protocol), ports) in groups {
        let only = if let [one] = ports[..] { Some(one.port) } else { None };
        let mut here = HashMap::new();
        let stale = |flow: &Flow| {
            let by = |address| Connectionless { protocol, is_ipv4, address, port: flow.port };
            let by_address = changed.get(&by(Some(flow.to)));
            let targets = by_address.or_else(|| {
                let by_node_port = changed.get(&by(None))?;
                let is_here = *here.entry(flow.to).or_insert_with(|| is_here(flow.to));
                is_here.then_some(by_node_port)
            });
            targets.is_some_and(|targets| !targets.contains(&flow.answered_by))
        };
        first = first.and(delete_flows(channel, is_ipv4, protocol, only, stale).map(drop));
    }
    first
}

/// Whether the address belongs to this machine: binding to another fails.
fn is_here(address: IpAddr) -> bool {
    UdpSocket::bind((address, 0)).err().is_none_or(|error| error.kind() != io::ErrorKind::AddrNotAvailable)
}

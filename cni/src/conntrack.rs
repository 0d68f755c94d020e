//! Removal of conntrack entries of datagrams to host ports.
//!
//! A client that keeps sending by UDP would reach a removed pod, or the next pod with its address. A client that sent
//! before the port existed would never reach the pod.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::net::{IpAddr, UdpSocket};

use coracle_nft::{Channel, Flow, delete_flows};

use crate::nft::Mapping;

/// Removes the conntrack entries of packets to these ports of this machine, with any target.
pub(crate) fn delete_entries(channel: &mut Channel, ports: &[Mapping]) -> io::Result<()> {
    let mut groups: BTreeMap<(bool, u8), Vec<&Mapping>> = BTreeMap::new();
    for port in ports {
        groups.entry((port.to.is_ipv4(), port.protocol.number())).or_default().push(port);
    }
    let mut first = Ok(());
    for ((is_ipv4, protocol), ports) in groups {
        let numbers = ports.iter().map(|port| port.host_port).collect();
        let mut here = HashMap::new();
        let stale = |flow: &Flow| ports.iter().any(|port| is_mapped_by(flow, port, &mut here));
        first = first.and(delete_flows(channel, is_ipv4, protocol, &numbers, stale).map(drop));
    }
    first
}

/// Whether the port's rules apply to the entry. They do not apply to packets that are forwarded to the same port of
/// another machine.
fn is_mapped_by(flow: &Flow, port: &Mapping, here: &mut HashMap<IpAddr, bool>) -> bool {
    flow.port == port.host_port
        && match port.host_ip {
            Some(ip) => ip == flow.to,
            None => *here.entry(flow.to).or_insert_with(|| is_local_address(flow.to)),
        }
}

/// Whether the address belongs to this machine: binding to another fails.
fn is_local_address(address: IpAddr) -> bool {
    UdpSocket::bind((address, 0)).err().is_none_or(|error| error.kind() != io::ErrorKind::AddrNotAvailable)
}

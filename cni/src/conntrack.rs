//! Removal of conntrack entries of datagrams to host ports.
//!
//! Without the removal, a client that keeps sending UDP packets would reach a removed pod, or the next pod with its
//! address. A client that sent packets before the port existed would never reach the pod.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::net::IpAddr;

use coracle_nft::{Channel, Flow, delete_flows};
use netlink_packet_route::route::{RouteAttribute, RouteMessage, RouteType};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};

use crate::nft::Mapping;
use crate::route_socket::RouteSocket;

/// The kernel's errors for an address without a route, or with a route of the types unreachable, prohibit or blackhole.
const NO_ROUTE: [i32; 5] =
    [libc::ENETUNREACH, libc::EHOSTUNREACH, libc::EACCES, libc::EINVAL, libc::EADDRNOTAVAIL];

/// The addresses of this machine, by the kernel's routes.
#[derive(Default)]
struct LocalAddresses {
    /// The socket is opened for the first address.
    socket: Option<RouteSocket>,
    known: HashMap<IpAddr, bool>,
}

/// Removes the conntrack entries of packets to these ports of this machine, with any target.
pub(crate) fn delete_entries(channel: &mut Channel, ports: &[Mapping]) -> io::Result<()> {
    let mut groups: BTreeMap<(bool, u8), Vec<&Mapping>> = BTreeMap::new();
    for port in ports {
        groups.entry((port.to.is_ipv4(), port.protocol.number())).or_default().push(port);
    }
    let mut first = Ok(());
    for ((is_ipv4, protocol), ports) in groups {
        let numbers = ports.iter().map(|port| port.host_port).collect();
        let mut local = LocalAddresses::default();
        let stale = |flow: &Flow| ports.iter().any(|port| is_mapped_by(flow, port, &mut local));
        first = first.and(delete_flows(channel, is_ipv4, protocol, &numbers, stale).map(drop));
    }
    first
}

/// Whether the port's rules apply to the entry. They do not apply to packets that are forwarded to the same port of
/// another machine.
fn is_mapped_by(flow: &Flow, port: &Mapping, local: &mut LocalAddresses) -> bool {
    flow.port == port.host_port
        && match port.host_ip {
            Some(ip) => ip == flow.to,
            None => local.has(flow.to),
        }
}

// === impl LocalAddresses ===

impl LocalAddresses {
    /// Whether the address is local, so that the kernel delivers packets to this machine. The rules of host ports use
    /// the same check (`fib daddr type local`). A bind to the address would be no check: with the sysctl
    /// `ip_nonlocal_bind`, a bind to any address succeeds.
    fn has(&mut self, address: IpAddr) -> bool {
        if let Some(known) = self.known.get(&address) {
            return *known;
        }
        // Without an answer, the address counts as local: a pod must not get datagrams to a former target of the port.
        let is_local = self.query_route(address).unwrap_or_else(|_failed| {
            // A late answer on this socket could be taken for the answer to the next request.
            self.socket = None;
            true
        });
        self.known.insert(address, is_local);
        is_local
    }

    /// Reads the type of the route to the address.
    ///
    /// # Errors
    /// When no socket can be opened or used.
    fn query_route(&mut self, address: IpAddr) -> io::Result<bool> {
        let socket = match &mut self.socket {
            Some(socket) => socket,
            none => none.insert(RouteSocket::open()?),
        };
        let mut route = RouteMessage::default();
        let (family, prefix) = match address {
            IpAddr::V4(_) => (AddressFamily::Inet, 32),
            IpAddr::V6(_) => (AddressFamily::Inet6, 128),
        };
        route.header.address_family = family;
        route.header.destination_prefix_length = prefix;
        route.attributes.push(RouteAttribute::Destination(address.into()));
        match socket.get(RouteNetlinkMessage::GetRoute(route)) {
            Ok(RouteNetlinkMessage::NewRoute(route)) => Ok(route.header.kind == RouteType::Local),
            Err(error) if !error.raw_os_error().is_some_and(|code| NO_ROUTE.contains(&code)) => Err(error),
            _ => Ok(false),
        }
    }
}

#[cfg(test)]
mod tests {
    use coracle_testing::{in_new_namespace, ip};

    use super::*;

    #[test]
    fn only_addresses_of_this_machine_are_local_also_with_nonlocal_binds() {
        in_new_namespace(|| {
            for family in ["ipv4", "ipv6"] {
                // This sysctl belongs to the network namespace of the thread.
                std::fs::write(format!("/proc/sys/net/{family}/ip_nonlocal_bind"), "1").unwrap();
            }
            ip("link set lo up");
            ip("link add one0 type veth peer name one1");
            ip("link set one0 up");
            ip("link set one1 up");
            ip("address add 192.0.2.1/24 dev one0");
            ip("address add 2001:db8::1/64 dev one0 nodad");
            ip("route add prohibit 203.0.113.1");
            ip("route add blackhole 203.0.113.2");
            ip("route add unreachable 203.0.113.3");
            let mut local = LocalAddresses::default();
            let own = ["127.0.0.1", "192.0.2.1", "2001:db8::1"];
            let others = ["192.0.2.2", "2001:db8::2", "198.51.100.1", "2001:db9::1"];
            let without_route = ["203.0.113.1", "203.0.113.2", "203.0.113.3"];
            for _repeated in 0..2 {
                assert_eq!(own.map(|address| local.has(address.parse().unwrap())), [true; 3]);
                assert_eq!(others.map(|address| local.has(address.parse().unwrap())), [false; 4]);
                assert_eq!(without_route.map(|address| local.has(address.parse().unwrap())), [false; 3]);
            }
        });
    }
}

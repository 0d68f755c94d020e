//! Addresses, entries and routes as netlink messages.

use std::net::IpAddr;

use ipnetwork::IpNetwork;
use netlink_packet_route::address::{AddressAttribute, AddressHeaderFlags, AddressMessage};
use netlink_packet_route::neighbour::{
    NeighbourAddress, NeighbourAttribute, NeighbourFlags, NeighbourMessage, NeighbourState,
};
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteFlags, RouteHeader, RouteMessage, RouteMetric, RouteProtocol,
    RouteScope, RouteType,
};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};

use super::plan::{Forward, Neighbour, OutInterface, Port, Route, Tables};

/// An address of an interface.
pub(crate) struct InterfaceAddress {
    pub(crate) ip: IpAddr,
    /// Length of the prefix in bits.
    pub(crate) prefix_length: u8,
    /// Index of the interface.
    pub(crate) index: u32,
}

/// Whether the route has our number (`rtm_protocol`).
pub(crate) fn is_ours(message: &RouteMessage, protocol: RouteProtocol) -> bool {
    message.header.protocol == protocol && message.header.table == RouteHeader::RT_TABLE_MAIN
}

pub(crate) fn is_link_local(ip: IpAddr) -> bool {
    matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local())
}

pub(crate) fn family(ip: IpAddr) -> AddressFamily {
    if ip.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 }
}

pub(crate) fn ip(address: &RouteAddress) -> Option<IpAddr> {
    match address {
        RouteAddress::Inet(ip) => Some((*ip).into()),
        RouteAddress::Inet6(ip) => Some((*ip).into()),
        _ => None,
    }
}

pub(crate) fn route_address(ip: IpAddr) -> RouteAddress {
    match ip {
        IpAddr::V4(ip) => RouteAddress::Inet(ip),
        IpAddr::V6(ip) => RouteAddress::Inet6(ip),
    }
}

/// Whether a default route was added or removed.
pub(crate) fn is_default_route(message: &RouteNetlinkMessage) -> bool {
    let (RouteNetlinkMessage::NewRoute(message) | RouteNetlinkMessage::DelRoute(message)) = message else {
        return false;
    };
    message.header.destination_prefix_length == 0 && message.header.table == RouteHeader::RT_TABLE_MAIN
}

pub(crate) fn read_address(message: &RouteNetlinkMessage) -> Option<InterfaceAddress> {
    let (RouteNetlinkMessage::NewAddress(message) | RouteNetlinkMessage::DelAddress(message)) = message
    else {
        return None;
    };
    // On a point-to-point link, the address attribute is the peer's, and the local attribute ours.
    let local = message.attributes.iter().find_map(|a| match a {
        AddressAttribute::Local(ip) => Some(*ip),
        _ => None,
    });
    let any = || {
        message.attributes.iter().find_map(|a| match a {
            AddressAttribute::Address(ip) => Some(*ip),
            _ => None,
        })
    };
    let ip = local.or_else(any)?;
    Some(InterfaceAddress { ip, prefix_length: message.header.prefix_len, index: message.header.index })
}

pub(crate) fn address(index: u32, ip: IpAddr) -> AddressMessage {
    let mut message = AddressMessage::default();
    message.header.family = family(ip);
    message.header.index = index;
    message.header.prefix_len = if ip.is_ipv4() { 32 } else { 128 };
    if ip.is_ipv6() {
        // The address is unique, so duplicate address detection would only delay its use.
        message.header.flags = AddressHeaderFlags::Nodad;
    }
    message.attributes = vec![AddressAttribute::Local(ip), AddressAttribute::Address(ip)];
    message
}

pub(crate) fn forward(index: u32, forward: &Forward) -> NeighbourMessage {
    let mut message = NeighbourMessage::default();
    message.header.family = AddressFamily::Bridge;
    message.header.ifindex = index;
    message.header.state = NeighbourState::Permanent;
    message.header.flags = NeighbourFlags::Own;
    message.attributes = vec![
        NeighbourAttribute::LinkLayerAddress(forward.mac.to_vec()),
        NeighbourAttribute::Destination(forward.to.into()),
    ];
    message
}

pub(crate) fn neighbour(index: u32, neighbour: &Neighbour) -> NeighbourMessage {
    let mut message = NeighbourMessage::default();
    message.header.family = family(neighbour.ip);
    message.header.ifindex = index;
    message.header.state = NeighbourState::Permanent;
    message.header.kind = RouteType::Unicast;
    message.attributes = vec![
        NeighbourAttribute::Destination(neighbour.ip.into()),
        NeighbourAttribute::LinkLayerAddress(neighbour.mac.to_vec()),
    ];
    message
}

pub(crate) fn attributes(message: &NeighbourMessage) -> (Option<IpAddr>, Option<[u8; 6]>) {
    let (mut to, mut mac) = (None, None);
    for attribute in &message.attributes {
        match attribute {
            NeighbourAttribute::LinkLayerAddress(bytes) => mac = bytes.as_slice().try_into().ok(),
            NeighbourAttribute::Destination(NeighbourAddress::Inet(ip)) => to = Some(IpAddr::from(*ip)),
            NeighbourAttribute::Destination(NeighbourAddress::Inet6(ip)) => to = Some(IpAddr::from(*ip)),
            NeighbourAttribute::Destination(NeighbourAddress::Other(bytes)) => {
                let v4 = <[u8; 4]>::try_from(bytes.as_slice()).map(IpAddr::from).ok();
                to = v4.or_else(|| <[u8; 16]>::try_from(bytes.as_slice()).map(IpAddr::from).ok());
            }
            _ => {}
        }
    }
    (to, mac)
}

/// Whether the entry has another UDP port or VNI than the device: the kernel reports these attributes only then.
fn has_other_port_or_vni(message: &NeighbourMessage) -> bool {
    message.attributes.iter().any(|a| matches!(a, NeighbourAttribute::Port(_) | NeighbourAttribute::Vni(_)))
}

/// Whether the entry redirects packets for a peer to another node.
pub(crate) fn is_diverted(message: &NeighbourMessage, port: Port, wanted: &Tables) -> bool {
    let (_, mac) = attributes(message);
    message.header.family == AddressFamily::Bridge
        && has_other_port_or_vni(message)
        && wanted.forwards.iter().any(|forward| forward.port == port && Some(forward.mac) == mac)
}

pub(crate) fn read_forward(message: &NeighbourMessage, port: Port) -> Option<Forward> {
    let (to, mac) = attributes(message);
    let is_forward = message.header.family == AddressFamily::Bridge && !has_other_port_or_vni(message);
    Some(Forward { port, mac: mac.filter(|_| is_forward)?, to: to? })
}

/// A permanent entry. Other entries are learned by the kernel.
pub(crate) fn read_neighbour(message: &NeighbourMessage, port: Port) -> Option<Neighbour> {
    let is_neighbour = message.header.family != AddressFamily::Bridge;
    let lasts = message.header.state == NeighbourState::Permanent;
    let (to, mac) = attributes(message);
    Some(Neighbour { port, ip: to.filter(|_| is_neighbour && lasts)?, mac: mac? })
}

/// Whether the entry concerns an address of a peer. The notification of a removed entry has no hardware address.
pub(crate) fn is_wanted_neighbour(message: &NeighbourMessage, port: Port, wanted: &Tables) -> bool {
    let (to, _) = attributes(message);
    message.header.family != AddressFamily::Bridge
        && to.is_some_and(|ip| wanted.neighbours.contains_key(&(port, ip)))
}

pub(crate) fn old_route(to: IpNetwork, protocol: RouteProtocol) -> RouteMessage {
    let mut message = RouteMessage::default();
    message.header.address_family = family(to.ip());
    message.header.destination_prefix_length = to.prefix();
    message.header.table = RouteHeader::RT_TABLE_MAIN;
    message.header.protocol = protocol;
    // Any scope.
    message.header.scope = RouteScope::NoWhere;
    message.attributes = vec![RouteAttribute::Destination(route_address(to.network()))];
    message
}

pub(crate) fn new_route(to: IpNetwork, route: &Route, out: u32, protocol: RouteProtocol) -> RouteMessage {
    let mut message = old_route(to, protocol);
    message.header.kind = RouteType::Unicast;
    message.header.scope = match route.via {
        None if to.is_ipv4() => RouteScope::Link,
        _ => RouteScope::Universe,
    };
    if matches!((route.out, route.via), (OutInterface::Device(_), Some(_))) {
        message.header.flags = RouteFlags::Onlink;
    }
    message.attributes.push(RouteAttribute::Oif(out));
    message.attributes.extend(route.via.map(|via| RouteAttribute::Gateway(route_address(via))));
    message.attributes.extend(route.source.map(|ip| RouteAttribute::PrefSource(route_address(ip))));
    message.attributes.extend(route.mtu.map(|mtu| RouteAttribute::Metrics(vec![RouteMetric::Mtu(mtu)])));
    message
}

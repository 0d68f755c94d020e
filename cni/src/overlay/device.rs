//! The overlay's devices as netlink link messages.

use std::collections::BTreeSet;
use std::net::IpAddr;

use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{
    AfSpecInet6, AfSpecUnspec, In6AddrGenMode, InfoData, InfoKind, InfoVxlan, LinkAttribute, LinkFlags,
    LinkInfo, LinkMessage,
};

use super::plan::{Device, Kind, Port};

/// The message that makes a device. `None` for a device that is not made by netlink.
pub(crate) fn make(name: &str, device: &Device) -> Option<RouteNetlinkMessage> {
    let Kind::Vxlan { vni, port, mac, learning, .. } = &device.kind else { return None };
    let mut data = placed(&device.kind);
    data.extend([InfoVxlan::Id(*vni), InfoVxlan::Port(*port), InfoVxlan::Learning(*learning)]);
    let mut message = LinkMessage::default();
    message.attributes = vec![
        LinkAttribute::IfName(name.to_owned()),
        LinkAttribute::Mtu(device.mtu),
        LinkAttribute::Address(mac.to_vec()),
        LinkAttribute::LinkInfo(vec![LinkInfo::Kind(InfoKind::Vxlan), LinkInfo::Data(InfoData::Vxlan(data))]),
    ];
    Some(RouteNetlinkMessage::NewLink(message))
}

/// The message that prevents an automatic IPv6 address of the device, which no peer could use.
pub(crate) fn without_own_address(index: u32) -> RouteNetlinkMessage {
    let mut message = LinkMessage::default();
    message.header.index = index;
    let none = vec![AfSpecInet6::AddrGenMode(In6AddrGenMode::None)];
    message.attributes.push(LinkAttribute::AfSpecUnspec(vec![AfSpecUnspec::Inet6(none)]));
    RouteNetlinkMessage::SetLink(message)
}

/// The message that changes local address and uplink of a VXLAN device. `None` for other devices.
pub(crate) fn move_message(index: u32, device: &Device) -> Option<RouteNetlinkMessage> {
    let Kind::Vxlan { vni, .. } = device.kind else { return None };
    let mut data = placed(&device.kind);
    data.push(InfoVxlan::Id(vni));
    let info = vec![LinkInfo::Kind(InfoKind::Vxlan), LinkInfo::Data(InfoData::Vxlan(data))];
    let mut message = LinkMessage::default();
    message.header.index = index;
    message.attributes.push(LinkAttribute::LinkInfo(info));
    Some(RouteNetlinkMessage::NewLink(message))
}

/// The message that sets a device's MTU and sets it up. The kernel does not accept these changes and a new uplink in
/// one message.
pub(crate) fn set(index: u32, device: &Device) -> RouteNetlinkMessage {
    let mut message = LinkMessage::default();
    message.header.index = index;
    message.header.flags = if device.up { LinkFlags::Up } else { LinkFlags::empty() };
    message.header.change_mask = LinkFlags::Up;
    message.attributes.push(LinkAttribute::Mtu(device.mtu));
    RouteNetlinkMessage::NewLink(message)
}

/// A request for a VXLAN device without a VNI. The kernel always refuses it. The error shows whether the kernel
/// supports the device type.
pub(crate) fn vxlan_probe() -> RouteNetlinkMessage {
    let mut message = LinkMessage::default();
    message.attributes.push(LinkAttribute::LinkInfo(vec![LinkInfo::Kind(InfoKind::Vxlan)]));
    RouteNetlinkMessage::NewLink(message)
}

pub(crate) fn remove(index: u32) -> RouteNetlinkMessage {
    let mut message = LinkMessage::default();
    message.header.index = index;
    RouteNetlinkMessage::DelLink(message)
}

/// Uplink and local address of a VXLAN device.
fn placed(kind: &Kind) -> Vec<InfoVxlan> {
    let Kind::Vxlan { local, link, .. } = kind else { return Vec::new() };
    let local = match local {
        IpAddr::V4(ip) => InfoVxlan::Local(*ip),
        IpAddr::V6(ip) => InfoVxlan::Local6(*ip),
    };
    vec![InfoVxlan::Link(*link), local]
}

/// Whether the kernel accepts only one of two VXLAN devices, because both would receive the same packets.
pub(crate) fn conflict(one: &Kind, other: &Kind) -> bool {
    let received = |kind: &Kind| match kind {
        Kind::Vxlan { vni, port, local, .. } => Some((*vni, *port, local.is_ipv6())),
        Kind::Tun => None,
    };
    received(one).is_some_and(|packets| received(other) == Some(packets))
}

/// Name in a link message.
pub(crate) fn name(link: &LinkMessage) -> Option<String> {
    link.attributes.iter().find_map(|a| match a {
        LinkAttribute::IfName(name) => Some(name.clone()),
        _ => None,
    })
}

/// MTU in a link message.
pub(crate) fn mtu(link: &LinkMessage) -> Option<u32> {
    link.attributes.iter().find_map(|a| match a {
        LinkAttribute::Mtu(mtu) => Some(*mtu),
        _ => None,
    })
}

/// The device in a link message, without addresses. `None` for another kind of link.
pub(crate) fn read(link: &LinkMessage, slot: Port) -> Option<Device> {
    let info = link.attributes.iter().find_map(|a| match a {
        LinkAttribute::LinkInfo(info) => Some(info),
        _ => None,
    })?;
    let kind = info.iter().find_map(|i| match i {
        LinkInfo::Kind(kind) => Some(kind),
        _ => None,
    })?;
    let kind = match (slot, kind) {
        (Port::Vxlan4 | Port::Vxlan6, InfoKind::Vxlan) => vxlan(link, info)?,
        (Port::Tun, InfoKind::Tun) => Kind::Tun,
        _ => return None,
    };
    let up = link.header.flags.contains(LinkFlags::Up);
    Some(Device { kind, mtu: mtu(link)?, up, addresses: BTreeSet::new() })
}

fn vxlan(link: &LinkMessage, info: &[LinkInfo]) -> Option<Kind> {
    let data = info.iter().find_map(|i| match i {
        LinkInfo::Data(InfoData::Vxlan(data)) => Some(data),
        _ => None,
    })?;
    let mac = link.attributes.iter().find_map(|a| match a {
        LinkAttribute::Address(bytes) => bytes.as_slice().try_into().ok(),
        _ => None,
    })?;
    // The kernel omits attributes that are not set.
    let unset = IpAddr::V4(std::net::Ipv4Addr::UNSPECIFIED);
    let (mut vni, mut port, mut local, mut at, mut learning) = (0, 0, unset, 0, true);
    for attribute in data {
        match attribute {
            InfoVxlan::Id(value) => vni = *value,
            InfoVxlan::Port(value) => port = *value,
            InfoVxlan::Local(ip) => local = IpAddr::V4(*ip),
            InfoVxlan::Local6(ip) => local = IpAddr::V6(*ip),
            InfoVxlan::Link(value) => at = *value,
            InfoVxlan::Learning(value) => learning = *value,
            _ => {}
        }
    }
    Some(Kind::Vxlan { vni, port, local, link: at, mac, learning })
}

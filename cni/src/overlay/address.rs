//! The addresses of this network namespace: from which a node finds its own.

use std::collections::HashMap;
use std::net::IpAddr;

use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::address::{AddressHeaderFlags, AddressMessage};
use netlink_packet_route::link::{InfoKind, LinkAttribute, LinkExtentMask, LinkInfo, LinkMessage};

use super::device;
use super::error::OverlayError;
use super::message::{is_default_route, is_link_local, read_address};
use super::monitor::{Monitor, SHOWER};
use crate::route_socket::RouteSocket;

/// An address that others can use for now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LocalAddress {
    /// The interface that has it.
    pub interface: String,
    /// The address.
    pub ip: IpAddr,
    /// Whether the interface is a bridge or a tunnel, which more often leads to pods than to the machine.
    pub is_virtual: bool,
}

/// Tells when an address or a default route of this network namespace came or went: a node's own addresses follow from
/// them.
pub struct AddressNews {
    monitor: Monitor,
}

// === impl AddressNews ===

impl AddressNews {
    /// Listens from now on. To be called within a tokio runtime.
    ///
    /// # Errors
    /// When netlink cannot be used.
    pub fn open() -> Result<Self, OverlayError> {
        let mut monitor = Monitor::open()?;
        // Of no interface in particular: pods' come and go all the time.
        monitor.listen_to(Vec::new())?;
        Ok(Self { monitor })
    }

    /// Waits for news. Not cancel safe: they may be lost.
    pub async fn next(&mut self) {
        self.monitor.news(moves_a_node).await;
        // What changes comes in showers: one look for all of it.
        tokio::time::sleep(SHOWER).await;
        self.monitor.drain(|_| false);
    }
}

/// Whether a message may tell of another address of the node.
fn moves_a_node(message: &RouteNetlinkMessage) -> bool {
    let address = read_address(message).filter(|(ip, ..)| !is_link_local(*ip));
    address.is_some() || is_default_route(message)
}

/// All addresses of interfaces here, but those that are temporary, deprecated or not proven yet.
///
/// # Errors
/// When netlink cannot be used.
pub fn local_addresses() -> Result<Vec<LocalAddress>, OverlayError> {
    let found = || {
        let mut socket = RouteSocket::open()?;
        let mut links = HashMap::new();
        let mut ask = LinkMessage::default();
        ask.attributes.push(LinkAttribute::ExtMask(vec![LinkExtentMask::SkipStats]));
        socket.dump(RouteNetlinkMessage::GetLink(ask), |message| {
            if let RouteNetlinkMessage::NewLink(link) = message {
                links.insert(link.header.index, (device::name(&link).unwrap_or_default(), is_virtual(&link)));
            }
        })?;
        let mut found = Vec::new();
        socket.dump(RouteNetlinkMessage::GetAddress(AddressMessage::default()), |message| {
            let Some((ip, _, index)) = read_address(&message).filter(|_| lasts(&message)) else { return };
            if let Some((interface, is_virtual)) = links.get(&index).cloned() {
                found.push(LocalAddress { interface, ip, is_virtual });
            }
        })?;
        Ok(found)
    };
    found().map_err(|source| OverlayError::Socket { action: "list addresses", source })
}

fn is_virtual(link: &LinkMessage) -> bool {
    let virtual_kind = |info: &LinkInfo| {
        matches!(
            info,
            LinkInfo::Kind(InfoKind::Bridge | InfoKind::Vxlan | InfoKind::Tun | InfoKind::Wireguard)
        )
    };
    link.attributes
        .iter()
        .any(|a| matches!(a, LinkAttribute::LinkInfo(info) if info.iter().any(virtual_kind)))
}

fn lasts(message: &RouteNetlinkMessage) -> bool {
    let RouteNetlinkMessage::NewAddress(message) = message else { return false };
    // One bit says "second of its subnet" of IPv4 addresses and "temporary" of IPv6 ones.
    let passing = AddressHeaderFlags::Secondary
        | AddressHeaderFlags::Deprecated
        | AddressHeaderFlags::Tentative
        | AddressHeaderFlags::Dadfailed;
    !message.header.flags.intersects(passing)
}

//! Addresses of this network namespace, from which a node selects its own addresses.

use std::collections::HashMap;
use std::net::IpAddr;

use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::address::{AddressHeaderFlags, AddressMessage, AddressScope};
use netlink_packet_route::link::{InfoKind, LinkAttribute, LinkExtentMask, LinkInfo, LinkMessage};

use super::device;
use super::error::OverlayError;
use super::message::{InterfaceAddress, is_default_route, is_link_local, read_address};
use super::monitor::{BURST, Monitor};
use crate::route_socket::RouteSocket;

/// An address that other machines can use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LocalAddress {
    /// The interface that has the address.
    pub interface: String,
    /// The address.
    pub ip: IpAddr,
    /// Whether the interface is a bridge or a tunnel: such addresses usually belong to pods, not to the machine.
    pub is_virtual: bool,
}

/// Notifications of changed addresses and default routes in this network namespace. A node's own addresses depend on
/// both.
pub struct AddressMonitor {
    monitor: Monitor,
}

// === impl AddressMonitor ===

impl AddressMonitor {
    /// Starts to receive notifications. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// When a netlink socket cannot be opened or used.
    pub fn open() -> Result<Self, OverlayError> {
        let mut monitor = Monitor::open()?;
        // Changes of interfaces are not received, because interfaces of pods change all the time.
        monitor.listen_to(Vec::new())?;
        Ok(Self { monitor })
    }

    /// Waits for a change. Not cancel safe: changes may be lost.
    pub async fn next(&mut self) {
        self.monitor.wait_for(may_change_addresses).await;
        // Related changes arrive together: wait for all of them.
        tokio::time::sleep(BURST).await;
        self.monitor.drain(|_| false);
    }
}

/// Whether a message may change the node's addresses.
fn may_change_addresses(message: &RouteNetlinkMessage) -> bool {
    let address = read_address(message).filter(|address| !is_link_local(address.ip));
    address.is_some() || is_default_route(message)
}

/// All addresses of this network namespace, except temporary, deprecated and tentative addresses.
///
/// # Errors
/// When a netlink socket cannot be opened or used.
pub fn local_addresses() -> Result<Vec<LocalAddress>, OverlayError> {
    let found = || {
        let mut socket = RouteSocket::open()?;
        let mut links = HashMap::new();
        let mut query = LinkMessage::default();
        query.attributes.push(LinkAttribute::ExtMask(vec![LinkExtentMask::SkipStats]));
        socket.dump(RouteNetlinkMessage::GetLink(query), |message| {
            if let RouteNetlinkMessage::NewLink(link) = message {
                links.insert(link.header.index, (device::name(&link).unwrap_or_default(), is_virtual(&link)));
            }
        })?;
        let mut found = Vec::new();
        socket.dump(RouteNetlinkMessage::GetAddress(AddressMessage::default()), |message| {
            let address = read_address(&message).filter(|_| is_permanent(&message));
            let Some(InterfaceAddress { ip, index, .. }) = address else { return };
            if is_for_local_pods(ip, &message) {
                return;
            }
            if let Some((interface, is_virtual)) = links.get(&index).cloned() {
                found.push(LocalAddress { interface, ip, is_virtual });
            }
        })?;
        Ok(found)
    };
    found().map_err(|source| OverlayError::Socket { action: "list addresses", source })
}

/// Whether the address serves only this machine's pods: its scope is `host`. It is not an address of the node.
fn is_for_local_pods(ip: IpAddr, message: &RouteNetlinkMessage) -> bool {
    let RouteNetlinkMessage::NewAddress(address) = message else { return false };
    address.header.scope == AddressScope::Host && !ip.is_loopback()
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

fn is_permanent(message: &RouteNetlinkMessage) -> bool {
    let RouteNetlinkMessage::NewAddress(message) = message else { return false };
    // One bit means "secondary" for IPv4 addresses and "temporary" for IPv6 addresses.
    let excluded = AddressHeaderFlags::Secondary
        | AddressHeaderFlags::Deprecated
        | AddressHeaderFlags::Tentative
        | AddressHeaderFlags::Dadfailed;
    !message.header.flags.intersects(excluded)
}

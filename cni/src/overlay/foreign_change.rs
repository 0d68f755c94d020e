//! Detects changes in the kernel that the overlay did not make and must react to.

use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::LinkMessage;
use netlink_packet_route::neighbour::NeighbourMessage;
use netlink_packet_route::route::{RouteHeader, RouteMessage};

use super::device;
use super::kernel::Kernel;
use super::message::{
    InterfaceAddress, is_default_route, is_diverted, is_link_local, is_ours, is_wanted_neighbour,
    read_address, read_forward, read_neighbour,
};
use super::plan::Tables;

impl Kernel {
    /// Whether the notified state differs from the desired tables, so that another process made the change.
    pub(crate) fn is_foreign_change(&self, message: &RouteNetlinkMessage, desired: &Tables) -> bool {
        match message {
            RouteNetlinkMessage::NewNeighbour(m) => self.is_foreign_neighbour(m, desired),
            RouteNetlinkMessage::DelNeighbour(m) => self.is_removed_neighbour(m, desired),
            // The node's own addresses depend on the default routes.
            message if is_default_route(message) => true,
            RouteNetlinkMessage::NewRoute(m) => self.is_foreign_route(m, desired),
            RouteNetlinkMessage::DelRoute(m) => self.is_removed_route(m, desired),
            RouteNetlinkMessage::NewLink(link) => self.is_foreign_link_change(link, desired),
            RouteNetlinkMessage::DelLink(link) => self.watched().contains(&link.header.index),
            RouteNetlinkMessage::NewAddress(_) => self.is_foreign_address(message, desired, Presence::Added),
            RouteNetlinkMessage::DelAddress(_) => {
                self.is_foreign_address(message, desired, Presence::Removed)
            }
            _ => false,
        }
    }

    /// Whether a forwarding or neighbour entry of our device is not desired.
    fn is_foreign_neighbour(&self, message: &NeighbourMessage, desired: &Tables) -> bool {
        let Some(port) = self.port_of(message.header.ifindex) else { return false };
        let is_foreign_forward =
            read_forward(message, port).is_some_and(|forward| !desired.forwards.contains(&forward));
        let is_foreign_neighbour = match read_neighbour(message, port) {
            Some(entry) => desired.neighbours.get(&(entry.port, entry.ip)) != Some(&entry.mac),
            // A desired entry that is no longer permanent.
            None => is_wanted_neighbour(message, port, desired),
        };
        is_foreign_forward || is_foreign_neighbour || is_diverted(message, port, desired)
    }

    /// Whether a desired forwarding or neighbour entry was removed.
    fn is_removed_neighbour(&self, message: &NeighbourMessage, desired: &Tables) -> bool {
        let Some(port) = self.port_of(message.header.ifindex) else { return false };
        let forward = read_forward(message, port);
        forward.is_some_and(|forward| desired.forwards.contains(&forward))
            || is_wanted_neighbour(message, port, desired)
    }

    /// Whether a route has our protocol number and is not desired, or differs from the desired route to its
    /// destination.
    fn is_foreign_route(&self, message: &RouteMessage, desired: &Tables) -> bool {
        if message.header.table != RouteHeader::RT_TABLE_MAIN {
            return false;
        }
        let has_our_number = is_ours(message, self.protocol());
        let Some((to, route)) = self.read_route(message) else { return false };
        match desired.routes.get(&to) {
            Some(desired) => !has_our_number || *desired != route,
            None => has_our_number,
        }
    }

    /// Whether a desired route was removed.
    fn is_removed_route(&self, message: &RouteMessage, desired: &Tables) -> bool {
        let removed = self.read_route(message).filter(|_| is_ours(message, self.protocol()));
        removed.is_some_and(|(to, route)| desired.routes.get(&to) == Some(&route))
    }

    /// Whether the changed link is an uplink, or a device of the overlay that differs from the plan.
    fn is_foreign_link_change(&self, link: &LinkMessage, desired: &Tables) -> bool {
        let Some(port) = self.port_of(link.header.index) else { return self.is_uplink(link.header.index) };
        let (observed, desired) = (device::read(link, port), desired.devices.get(&port));
        match (observed, desired) {
            (Some(observed), Some(desired)) => {
                (&observed.kind, observed.mtu, observed.up) != (&desired.kind, desired.mtu, desired.up)
            }
            _ => true,
        }
    }

    /// Whether an undesired address was added to our device, a desired address was removed from our device, or any
    /// address of another interface has changed. Link-local addresses do not count, because each interface of a pod has
    /// one.
    fn is_foreign_address(
        &self,
        message: &RouteNetlinkMessage,
        desired: &Tables,
        presence: Presence,
    ) -> bool {
        let Some(InterfaceAddress { ip, index, .. }) = read_address(message) else { return false };
        if is_link_local(ip) {
            return false;
        }
        let Some(port) = self.port_of(index) else { return true };
        desired.devices.get(&port).is_some_and(|device| {
            let is_desired = device.addresses.contains(&ip);
            is_desired != (presence == Presence::Added)
        })
    }
}

/// Whether the notification reports an added or a removed object.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Presence {
    Added,
    Removed,
}

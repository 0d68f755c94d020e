//! Addresses and routes of links.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use futures::{StreamExt, TryStreamExt};
use ipnetwork::IpNetwork;
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::address::{
    AddressAttribute, AddressFlags, AddressHeaderFlags, AddressMessage, AddressScope, CacheInfo,
};
use netlink_packet_route::route::{RouteAttribute, RouteMessage, RouteMetric, RouteScope};
use rtnetlink::{AddressMessageBuilder, RouteMessageBuilder};

use super::{Link, Links, failed, format_mac, is_errno};
use crate::error::Error;
use crate::netns::Netns;
use crate::route_socket::RouteSocket;
use crate::spec::result::{Answer, Route};

/// An address that a link has.
#[derive(Debug)]
pub(crate) struct AssignedAddress {
    pub(crate) network: IpNetwork,
    pub(crate) flags: AddressFlags,
    message: AddressMessage,
}

impl Links {
    /// The link's addresses, except link-local addresses (fe80::/10).
    pub(crate) async fn addresses(&self, link: &Link) -> Result<Vec<AssignedAddress>, Error> {
        let all: Vec<_> = if self.is_here {
            // The kernel must filter the list, because each pod has an address on the host's side. The crate rtnetlink
            // would read all addresses and filter them afterwards.
            of_link(link.index).map_err(failed("list addresses of", &link.name))?
        } else {
            let request = self.handle.address().get().set_link_index_filter(link.index);
            let _guard = self.dump_lock.lock().await;
            request.execute().try_collect().await.map_err(failed("list addresses of", &link.name))?
        };
        let present = all.into_iter().filter_map(AssignedAddress::of);
        let is_link_local = |ip| matches!(ip, IpAddr::V6(v6) if v6.is_unicast_link_local());
        Ok(present.filter(|present| !is_link_local(present.network.ip())).collect())
    }

    /// Adds an address. Without `detect`, the kernel uses the address at once, without duplicate address detection.
    pub(crate) async fn add_address(
        &self,
        link: &Link,
        address: IpNetwork,
        detect: bool,
    ) -> Result<(), Error> {
        let mut add = self.handle.address().add(link.index, address.ip(), address.prefix()).replace();
        *add.message_mut() = address_message(link, address, detect);
        add.execute().await.map_err(failed("add address", &address.to_string()))
    }

    /// Adds an address with a scope.
    pub(crate) async fn add_scoped_address(
        &self,
        link: &Link,
        address: IpNetwork,
        scope: AddressScope,
    ) -> Result<(), Error> {
        let mut add = self.handle.address().add(link.index, address.ip(), address.prefix()).replace();
        let mut message = address_message(link, address, false);
        message.header.scope = scope;
        *add.message_mut() = message;
        add.execute().await.map_err(failed("add address", &address.to_string()))
    }

    /// Adds an address with a lifetime in seconds, after which the kernel removes it. Extends the lifetime of an
    /// existing address. The kernel does not choose this address as the source of packets.
    pub(crate) async fn add_expiring(&self, link: &Link, address: IpAddr, seconds: u32) -> Result<(), Error> {
        let network = IpNetwork::from(address);
        let mut add = self.handle.address().add(link.index, network.ip(), network.prefix()).replace();
        let mut message = address_message(link, network, false);
        if address.is_ipv4() {
            message.header.scope = AddressScope::Host;
        }
        let mut lifetime = CacheInfo::default();
        // IPv6 does not choose a deprecated address as source. IPv4 has no such flag, so its scope prevents the choice.
        lifetime.ifa_preferred = if address.is_ipv4() { seconds } else { 0 };
        lifetime.ifa_valid = seconds;
        message.attributes.push(AddressAttribute::CacheInfo(lifetime));
        *add.message_mut() = message;
        add.execute().await.map_err(failed("add address", &network.to_string()))
    }

    pub(crate) async fn remove_address(&self, present: AssignedAddress) -> Result<(), Error> {
        let what = present.network.to_string();
        match self.handle.address().del(present.message).execute().await {
            Err(error) if !is_errno(&error, libc::EADDRNOTAVAIL) => {
                Err(failed("remove address", &what)(error))
            }
            _ => Ok(()),
        }
    }

    /// Sets the link's addresses, and removes all other addresses, such as the gateway of an earlier range.
    pub(crate) async fn ensure_addresses(&self, link: &Link, wanted: &[IpNetwork]) -> Result<(), Error> {
        let present = self.addresses(link).await?;
        for address in wanted.iter().filter(|w| present.iter().all(|p| p.network != **w)) {
            self.add_address(link, *address, false).await?;
        }
        for unwanted in present.into_iter().filter(|p| !wanted.contains(&p.network)) {
            self.remove_address(unwanted).await?;
        }
        Ok(())
    }

    /// Whether a route to this destination exists. If `route` has a next hop, the existing route must have the same
    /// next hop.
    async fn has_route(&self, route: &Route) -> Result<bool, Error> {
        let filter = if route.dst.is_ipv4() {
            RouteMessageBuilder::<Ipv4Addr>::new().build()
        } else {
            RouteMessageBuilder::<Ipv6Addr>::new().build()
        };
        let _guard = self.dump_lock.lock().await;
        let found: Vec<RouteMessage> = self
            .handle
            .route()
            .get(filter)
            .execute()
            .try_collect()
            .await
            .map_err(failed("list", "routes"))?;
        let wanted = (route.dst.network(), route.dst.prefix());
        let goes_through = |message| route.gw.is_none_or(|gw| next_hop(message) == Some(gw));
        Ok(found.iter().any(|message| destination(message) == Some(wanted) && goes_through(message)))
    }

    /// Checks that the sandbox's interface has the addresses of the result, and that its routes exist. Without `up`,
    /// the interface may also be down.
    pub(crate) async fn check(&self, ifname: &str, result: &Answer, up: bool) -> Result<(), Error> {
        let changed =
            |what: &str, reason: &str| Error::Changed { what: what.to_owned(), reason: reason.to_owned() };
        let link = self.find(ifname).await?.ok_or_else(|| changed(ifname, "it is gone"))?;
        if up && !link.up {
            return Err(changed(ifname, "it is down"));
        }
        if let Some(made) = result.inside(ifname) {
            let mac = format_mac(&link.mac);
            if !made.mac.is_empty() && !made.mac.eq_ignore_ascii_case(&mac) {
                return Err(changed(ifname, &format!("its hardware address is {mac}, not {}", made.mac)));
            }
            if let Some(mtu) = made.mtu.filter(|mtu| *mtu != link.mtu) {
                return Err(changed(ifname, &format!("its MTU is {}, not {mtu}", link.mtu)));
            }
        }
        let present = self.addresses(&link).await?;
        for ip in result.addresses_of(ifname) {
            if present.iter().all(|p| p.network != ip.address) {
                return Err(changed(&format!("the address {}", ip.address), "it is gone"));
            }
        }
        for route in &result.routes {
            if !self.has_route(route).await? {
                return Err(changed(
                    &format!("the route to {}", route.dst),
                    "it is gone, or has another next hop",
                ));
            }
        }
        Ok(())
    }

    /// Waits for the end of duplicate address detection (RFC 4862 §5.4). A duplicate is an error.
    pub(crate) async fn wait_for_duplicate_detection(
        &self,
        netns: &Netns,
        link: &Link,
        addresses: &[IpNetwork],
    ) -> Result<(), Error> {
        let runtime = tokio::runtime::Handle::current();
        let connected = netns.run(|| {
            let _entered = runtime.enter();
            rtnetlink::new_multicast_connection(&[rtnetlink::MulticastGroup::Ipv6Ifaddr])
        })?;
        let socket_failed = |source| Error::Socket { action: "listen to addresses", source };
        let (connection, _handle, mut changes) = connected.map_err(socket_failed)?;
        let listening = tokio::spawn(connection);
        let settled = async {
            loop {
                let present = self.addresses(link).await?;
                let of_ours = |assigned: &&AssignedAddress| addresses.contains(&assigned.network);
                let failed = |assigned: &&AssignedAddress| assigned.flags.contains(AddressFlags::Dadfailed);
                if let Some(taken) = present.iter().filter(of_ours).find(failed) {
                    return Err(Error::DuplicateAddress { address: taken.network.ip() });
                }
                if !present.iter().filter(of_ours).any(|p| p.flags.contains(AddressFlags::Tentative)) {
                    return Ok(());
                }
                changes.next().await;
            }
        };
        let settled = tokio::time::timeout(DETECTION_TIMEOUT, settled).await;
        listening.abort();
        let late = || {
            let source = std::io::Error::from(std::io::ErrorKind::TimedOut);
            Error::Socket { action: "wait for the addresses to settle", source }
        };
        settled.map_err(|_not| late())?
    }
}

/// Timeout of duplicate address detection.
const DETECTION_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(10);

/// The addresses of one link of the caller's namespace, filtered by the kernel.
fn of_link(index: u32) -> io::Result<Vec<AddressMessage>> {
    const TRIES: usize = 3;
    let mut socket = RouteSocket::open()?;
    let mut listed = Ok(Vec::new());
    for _ in 0..TRIES {
        let mut request = AddressMessage::default();
        request.header.index = index;
        let mut found = Vec::new();
        let ended = socket.dump(RouteNetlinkMessage::GetAddress(request), |message| {
            if let RouteNetlinkMessage::NewAddress(address) = message {
                found.push(address);
            }
        });
        listed = ended.map(|()| found);
        if !listed.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::Interrupted) {
            break;
        }
    }
    listed
}

impl AssignedAddress {
    fn of(message: AddressMessage) -> Option<Self> {
        let ip = message.attributes.iter().find_map(|a| match a {
            AddressAttribute::Address(ip) => Some(*ip),
            _ => None,
        })?;
        let flags = message.attributes.iter().find_map(|a| match a {
            AddressAttribute::Flags(flags) => Some(*flags),
            _ => None,
        });
        let network = IpNetwork::new(ip, message.header.prefix_len).ok()?;
        Some(Self { network, flags: flags.unwrap_or(AddressFlags::empty()), message })
    }
}

fn next_hop(message: &RouteMessage) -> Option<IpAddr> {
    use netlink_packet_route::route::RouteAddress;
    message.attributes.iter().find_map(|a| match a {
        RouteAttribute::Gateway(RouteAddress::Inet(v4)) => Some(IpAddr::from(*v4)),
        RouteAttribute::Gateway(RouteAddress::Inet6(v6)) => Some(IpAddr::from(*v6)),
        _ => None,
    })
}

fn destination(message: &RouteMessage) -> Option<(IpAddr, u8)> {
    use netlink_packet_route::route::RouteAddress;
    let prefix = message.header.destination_prefix_length;
    let ip = message.attributes.iter().find_map(|a| match a {
        RouteAttribute::Destination(RouteAddress::Inet(v4)) => Some(IpAddr::from(*v4)),
        RouteAttribute::Destination(RouteAddress::Inet6(v6)) => Some(IpAddr::from(*v6)),
        _ => None,
    });
    let any = match message.header.address_family {
        netlink_packet_route::AddressFamily::Inet => IpAddr::from([0u8; 4]),
        _ => IpAddr::from([0u8; 16]),
    };
    Some((ip.or((prefix == 0).then_some(any))?, prefix))
}

/// The message for a link's address. Without `detect`, the kernel uses the address at once, without duplicate address
/// detection.
pub(super) fn address_message(link: &Link, address: IpNetwork, detect: bool) -> AddressMessage {
    let mut message = match address {
        IpNetwork::V4(v4) => {
            AddressMessageBuilder::<Ipv4Addr>::new().index(link.index).address(v4.ip(), v4.prefix()).build()
        }
        IpNetwork::V6(v6) => {
            AddressMessageBuilder::<Ipv6Addr>::new().index(link.index).address(v6.ip(), v6.prefix()).build()
        }
    };
    if address.is_ipv6() && !detect {
        message.header.flags |= AddressHeaderFlags::Nodad;
        message.attributes.push(AddressAttribute::Flags(AddressFlags::Nodad));
    }
    message
}

/// The message for a route through a link.
pub(super) fn route_message(link: &Link, route: &Route) -> RouteMessage {
    let prefix = route.dst.prefix();
    let mut message = match (route.dst.network(), route.gw) {
        (IpAddr::V4(dst), gw) => {
            let builder = RouteMessageBuilder::<Ipv4Addr>::new().destination_prefix(dst, prefix);
            match gw {
                Some(IpAddr::V4(gateway)) => builder.gateway(gateway).build(),
                _ => builder.scope(RouteScope::Link).build(),
            }
        }
        (IpAddr::V6(dst), gw) => {
            let builder = RouteMessageBuilder::<Ipv6Addr>::new().destination_prefix(dst, prefix);
            match gw {
                Some(IpAddr::V6(gateway)) => builder.gateway(gateway).build(),
                _ => builder.build(),
            }
        }
    };
    if let Some(scope) = route.scope {
        message.header.scope = RouteScope::from(scope);
    }
    let mut metrics = Vec::new();
    metrics.extend(route.mtu.map(RouteMetric::Mtu));
    metrics.extend(route.advmss.map(RouteMetric::Advmss));
    message.attributes.push(RouteAttribute::Oif(link.index));
    message.attributes.extend(route.priority.map(RouteAttribute::Priority));
    message.attributes.extend(route.table.map(RouteAttribute::Table));
    if !metrics.is_empty() {
        message.attributes.push(RouteAttribute::Metrics(metrics));
    }
    message
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_filters_addresses_by_link() {
        const LOOPBACK: u32 = 1;
        let listed = of_link(LOOPBACK).unwrap();
        assert!(!listed.is_empty() && listed.iter().all(|address| address.header.index == LOOPBACK));
        let absent = of_link(i32::MAX as u32);
        assert!(absent.is_err() || absent.is_ok_and(|none| none.is_empty()));
    }
}

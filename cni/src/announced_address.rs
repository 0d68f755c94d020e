//! Announced addresses of load balancers. The address is added to an interface of the node, so that the kernel answers
//! its ARP requests and neighbour solicitations.
//!
//! The kernel removes such an address after its lifetime, unless the caller renews it. So a node without a running
//! agent loses the address.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::path::Path;
use std::time::Duration;

use ipnetwork::IpNetwork;
use netlink_packet_route::address::AddressFlags;
use nix::ifaddrs::getifaddrs;
use nix::net::if_::InterfaceFlags;

use crate::announce::announce;
use crate::error::Error;
use crate::link::Links;
use crate::link::address::AssignedAddress;
use crate::netns::Netns;

/// Adds the address to the interface whose network contains it, and announces it to neighbours. Extends the lifetime of
/// an existing address. `node` is an address of the node. Its interface also gets addresses that are in no network of
/// the machine.
///
/// # Errors
/// When no interface fits, or netlink fails.
pub async fn announce_address(
    address: IpAddr,
    node: Option<IpAddr>,
    lifetime: Duration,
) -> Result<(), Error> {
    let refused = |reason| Error::NotAnnounced { address, reason };
    let none = || refused("no interface of this node is in its network");
    let name = interface_of(address).or_else(|| interface_with(node?)).ok_or_else(none)?;
    let links = Links::in_own_namespace()?;
    let link = links.get(&name).await?;
    let present = links.addresses(&link).await?;
    let same = |present: &&AssignedAddress| present.network.ip() == address;
    let is_new = !present.iter().any(|present| same(&present));
    // If the node's own address got a lifetime, the kernel would remove it.
    if present.iter().filter(same).any(is_node_address) {
        return Err(refused("it belongs to this node"));
    }
    let seconds = u32::try_from(lifetime.as_secs()).unwrap_or(u32::MAX);
    links.add_expiring(&link, address, seconds).await?;
    if is_new {
        // The thread ends by itself after some milliseconds.
        let _announcing = announce(Netns::open(Path::new("/proc/thread-self/ns/net"))?, &link, &[address]);
    }
    Ok(())
}

/// Announces an address of this node to neighbours again, after another machine has announced it. An absent address is
/// not an error.
///
/// # Errors
/// When netlink fails.
pub async fn repeat_announcement(address: IpAddr) -> Result<(), Error> {
    let Some(name) = interface_with(address) else { return Ok(()) };
    let link = Links::in_own_namespace()?.get(&name).await?;
    // The thread ends by itself after some milliseconds.
    let _announcing = announce(Netns::open(Path::new("/proc/thread-self/ns/net"))?, &link, &[address]);
    Ok(())
}

/// Removes the address from all interfaces. An absent address is not an error. The node's own addresses are kept.
///
/// # Errors
/// When netlink fails.
pub async fn withdraw_address(address: IpAddr) -> Result<(), Error> {
    let links = Links::in_own_namespace()?;
    while let Some(name) = interface_with(address) {
        let link = links.get(&name).await?;
        let present = links.addresses(&link).await?;
        match present.into_iter().find(|present| present.network.ip() == address && !is_node_address(present))
        {
            Some(present) => links.remove_address(present).await?,
            None => break,
        }
    }
    Ok(())
}

/// Whether an address is the node's own. Announced addresses have a lifetime and no network.
fn is_node_address(present: &AssignedAddress) -> bool {
    let host_prefix = IpNetwork::from(present.network.ip()).prefix();
    present.flags.contains(AddressFlags::Permanent) || present.network.prefix() != host_prefix
}

/// The interface whose network contains the address.
fn interface_of(address: IpAddr) -> Option<String> {
    interfaces(|own, mask| is_within(address, own, mask))
}

/// The interface that has the address.
fn interface_with(address: IpAddr) -> Option<String> {
    interfaces(|own, _| own == address)
}

fn interfaces(fits: impl Fn(IpAddr, IpAddr) -> bool) -> Option<String> {
    let found = own_addresses().find(|own| fits(own.address, own.mask));
    found.map(|own| own.interface)
}

/// The addresses among these that an interface of this machine has, by the name of the interface.
pub(crate) fn by_interface(addresses: &BTreeSet<IpAddr>) -> BTreeMap<String, BTreeSet<IpAddr>> {
    let mut found: BTreeMap<String, BTreeSet<IpAddr>> = BTreeMap::new();
    for own in own_addresses().filter(|own| addresses.contains(&own.address)) {
        found.entry(own.interface).or_default().insert(own.address);
    }
    found
}

/// An address of an interface of this machine.
struct OwnAddress {
    interface: String,
    address: IpAddr,
    mask: IpAddr,
}

/// The addresses of all usable interfaces.
fn own_addresses() -> impl Iterator<Item = OwnAddress> {
    let all = getifaddrs().into_iter().flatten();
    let usable = all.filter(|one| {
        one.flags.contains(InterfaceFlags::IFF_UP) && !one.flags.contains(InterfaceFlags::IFF_LOOPBACK)
    });
    let ip = |address: Option<nix::sys::socket::SockaddrStorage>| -> Option<IpAddr> {
        let address = address?;
        let v4 = address.as_sockaddr_in().map(|v4| IpAddr::V4(v4.ip()));
        v4.or_else(|| Some(IpAddr::V6(address.as_sockaddr_in6()?.ip())))
    };
    usable.filter_map(move |one| {
        let (address, mask) = ip(one.address).zip(ip(one.netmask))?;
        Some(OwnAddress { interface: one.interface_name, address, mask })
    })
}

/// Whether both addresses are in the network with the mask. False for a network of one address.
fn is_within(address: IpAddr, own: IpAddr, mask: IpAddr) -> bool {
    match (address, own, mask) {
        (IpAddr::V4(one), IpAddr::V4(own), IpAddr::V4(mask)) => {
            mask.to_bits() != u32::MAX && (one.to_bits() ^ own.to_bits()) & mask.to_bits() == 0
        }
        (IpAddr::V6(one), IpAddr::V6(own), IpAddr::V6(mask)) => {
            mask.to_bits() != u128::MAX && (one.to_bits() ^ own.to_bits()) & mask.to_bits() == 0
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use coracle_testing::{in_new_namespace, ip};

    use super::*;

    #[test]
    fn networks_contain_their_addresses() {
        let within = |address: &str, own: &str, mask: &str| {
            is_within(address.parse().unwrap(), own.parse().unwrap(), mask.parse().unwrap())
        };
        assert!(within("192.0.2.9", "192.0.2.1", "255.255.255.0"));
        assert!(!within("192.0.3.9", "192.0.2.1", "255.255.255.0"));
        assert!(
            !within("192.0.2.1", "192.0.2.1", "255.255.255.255"),
            "an announced address is not a network"
        );
        assert!(within("fd99::9", "fd99::1", "ffff:ffff:ffff:ffff::"));
    }

    #[test]
    fn an_announced_address_is_reachable_and_expires() {
        in_new_namespace(|| {
            ip("link add name uplink0 type veth peer name uplink1");
            ip("link set uplink1 up");
            ip("link set uplink0 up");
            ip("addr add 192.0.2.1/24 dev uplink0");
            ip("addr add fd99::1/64 dev uplink0 nodad");
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            let announced = |address: &str| {
                let address = address.parse().unwrap();
                runtime.block_on(announce_address(address, None, Duration::from_secs(60)))
            };
            assert_eq!(
                announced("203.0.113.7").unwrap_err().to_string(),
                "cannot announce the address 203.0.113.7: no interface of this node is in its network"
            );
            for address in ["192.0.2.77", "fd99::77"] {
                announced(address).unwrap();
                announced(address).unwrap();
                let shown = ip("addr show dev uplink0");
                let line =
                    shown.lines().skip_while(|line| !line.contains(&format!("{address}/"))).nth(1).unwrap();
                let left = line.split_once("valid_lft ").and_then(|(_, rest)| rest.split_once("sec"));
                let left: u32 = left.and_then(|(seconds, _)| seconds.parse().ok()).unwrap_or_default();
                assert!((1..=60).contains(&left), "{line}");
            }
            for own in ["192.0.2.1", "fd99::1"] {
                assert_eq!(
                    announced(own).unwrap_err().to_string(),
                    format!("cannot announce the address {own}: it belongs to this node")
                );
                runtime.block_on(withdraw_address(own.parse().unwrap())).unwrap();
                assert!(
                    ip("addr show dev uplink0").contains(&format!("{own}/")),
                    "the node's own address stays"
                );
            }
            assert!(
                ip("route get 192.0.2.50").contains("src 192.0.2.1"),
                "the announced address is not the source of packets"
            );
            for address in ["192.0.2.77", "fd99::77"] {
                runtime.block_on(withdraw_address(address.parse().unwrap())).unwrap();
                assert!(!ip("addr show dev uplink0").contains(address));
            }
        });
    }
}

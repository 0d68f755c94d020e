//! Addresses of the loopback interface at which the node serves its pods, such as the cluster's DNS address.

use std::net::IpAddr;

use ipnetwork::IpNetwork;
use netlink_packet_route::address::AddressScope;

use crate::error::Error;
use crate::link::Links;

/// Adds the address to the loopback interface. An existing address is not an error. The scope of the address is the
/// host, so that the address is not taken for an address of the node.
///
/// # Errors
/// When netlink fails.
pub async fn add_host_address(address: IpAddr) -> Result<(), Error> {
    let links = Links::in_own_namespace()?;
    let lo = links.get("lo").await?;
    links.add_scoped_address(&lo, IpNetwork::from(address), AddressScope::Host).await
}

/// Removes the address from the loopback interface. An absent address is not an error.
///
/// # Errors
/// When netlink fails.
pub async fn remove_host_address(address: IpAddr) -> Result<(), Error> {
    let links = Links::in_own_namespace()?;
    let lo = links.get("lo").await?;
    let present = links.addresses(&lo).await?;
    match present.into_iter().find(|present| present.network == IpNetwork::from(address)) {
        Some(present) => links.remove_address(present).await,
        None => Ok(()),
    }
}

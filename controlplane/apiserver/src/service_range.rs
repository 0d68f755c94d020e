//! Address ranges of services.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnetwork::IpNetwork;

/// A range of service addresses of one address family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServiceRange(IpNetwork);

/// The configured ranges of services: a range of the default family, and optionally a range of the other family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServiceRanges {
    primary: ServiceRange,
    secondary: Option<ServiceRange>,
}

// === impl ServiceRanges ===

impl ServiceRanges {
    /// The ranges of these networks. A second network of the same family is ignored.
    #[must_use]
    pub fn new(primary: IpNetwork, secondary: Option<IpNetwork>) -> Self {
        let secondary = secondary.filter(|other| other.is_ipv4() != primary.is_ipv4());
        Self { primary: ServiceRange::new(primary), secondary: secondary.map(ServiceRange::new) }
    }

    /// The ranges, the default family first.
    pub fn iter(&self) -> impl Iterator<Item = ServiceRange> + use<> {
        std::iter::once(self.primary).chain(self.secondary)
    }

    /// The range of the default family.
    pub(crate) fn primary(&self) -> ServiceRange {
        self.primary
    }

    /// The address families, the default family first.
    pub(crate) fn families(&self) -> Vec<&'static str> {
        self.iter().map(ServiceRange::family).collect()
    }
}

// === impl ServiceRange ===

impl ServiceRange {
    /// The range of a network. Bits of the address after the prefix are ignored.
    #[must_use]
    pub fn new(network: IpNetwork) -> Self {
        Self(IpNetwork::new(network.network(), network.prefix()).unwrap_or(network))
    }

    /// The API server's own service address: the first address after the network address.
    #[must_use]
    pub fn own(self) -> Option<IpAddr> {
        self.nth(1)
    }

    /// The number of addresses. Only the first 2^64 addresses of a large IPv6 range are used.
    pub(crate) fn size(self) -> u128 {
        let bits = if self.0.is_ipv4() { 32 } else { 128 };
        1 << (bits - u32::from(self.0.prefix())).min(64)
    }

    /// The address at this distance from the network address. `None` outside of the range.
    pub(crate) fn nth(self, place: u128) -> Option<IpAddr> {
        let place = Some(place).filter(|place| *place < self.size())?;
        Some(match self.0.network() {
            IpAddr::V4(first) => Ipv4Addr::from_bits(first.to_bits() | u32::try_from(place).ok()?).into(),
            IpAddr::V6(first) => Ipv6Addr::from_bits(first.to_bits() | place).into(),
        })
    }

    pub(crate) fn contains(self, address: IpAddr) -> bool {
        self.0.contains(address)
    }

    pub(crate) fn is_ipv4(self) -> bool {
        self.0.is_ipv4()
    }

    /// The address family, as in the API.
    pub(crate) fn family(self) -> &'static str {
        if self.0.is_ipv4() { "IPv4" } else { "IPv6" }
    }
}

impl std::fmt::Display for ServiceRange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_counted_from_the_network_address() {
        let nth = |range: &str, place: u128| {
            let address = ServiceRange::new(range.parse().unwrap()).nth(place);
            address.map(|address| address.to_string())
        };
        assert_eq!(nth("10.43.0.0/16", 1).as_deref(), Some("10.43.0.1"));
        assert_eq!(ServiceRange::new("10.43.7.7/16".parse().unwrap()).to_string(), "10.43.0.0/16");
        assert_eq!(nth("10.43.7.7/16", 65535).as_deref(), Some("10.43.255.255"));
        assert_eq!(nth("10.43.0.0/16", 65536), None);
        assert_eq!(nth("fd43::/112", 258).as_deref(), Some("fd43::102"));
        assert_eq!(nth("fd43::/112", 65536), None);
        assert_eq!(nth("::/0", 1 << 63).as_deref(), Some("::8000:0:0:0"));
        assert_eq!(nth("::/0", 1 << 64), None);
    }
}

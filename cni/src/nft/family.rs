//! Names and types of the table that differ between IPv4 and IPv6.

use coracle_nft::DataType;
use ipnetwork::IpNetwork;

/// Names and types of one address family.
pub(super) struct Family {
    pub(super) number: u8,
    pub(super) address: DataType,
    /// Name of the map of host ports of all addresses.
    pub(super) any: &'static str,
    /// Name of the map of host ports of one address.
    pub(super) one: &'static str,
    pub(super) untouched: &'static str,
    pub(super) masquerade_all: &'static str,
}

pub(super) const V4: Family = Family {
    number: 2,
    address: DataType::address(true),
    any: "hostports4",
    one: "hostports4_by_address",
    untouched: "untouched4",
    masquerade_all: "masqueraded4",
};

pub(super) const V6: Family = Family {
    number: 10,
    address: DataType::address(false),
    any: "hostports6",
    one: "hostports6_by_address",
    untouched: "untouched6",
    masquerade_all: "masqueraded6",
};

pub(super) fn family(network: IpNetwork) -> Family {
    if network.is_ipv4() { V4 } else { V6 }
}

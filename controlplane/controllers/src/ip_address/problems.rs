//! Events about services whose addresses or node ports are outside of their ranges, or belong to several services. No
//! I/O.
//!
//! The API server refuses such services. They can exist after a change of the ranges, or if another program has changed
//! the stored objects. Source: `pkg/registry/core/service`, `ipallocator/controller` and `portallocator/controller`.

use std::net::IpAddr;
use std::ops::RangeInclusive;

use coracle_events::Event;
use ipnetwork::IpNetwork;

/// The event about a service with this address. `ranges` are the ranges of all ServiceCIDRs. If they are empty, the
/// ranges are unknown, and the address is not checked. `is_first` is true for the service that keeps the address.
pub(super) fn of_address(address: IpAddr, ranges: &[IpNetwork], is_first: bool) -> Option<Event> {
    let family = if address.is_ipv4() { "IPv4" } else { "IPv6" };
    if !ranges.is_empty() && !ranges.iter().any(|range| has(*range, address)) {
        let message = format!(
            "Cluster IP [{family}]: {address} is not within any configured Service CIDR; please recreate service"
        );
        return Some(Event::warning("ClusterIPOutOfRange", message));
    }
    let message = || {
        format!("Cluster IP [{family}]:{address} was assigned to multiple services; please recreate service")
    };
    (!is_first).then(|| Event::warning("ClusterIPAlreadyAllocated", message()))
}

/// The event about a service with this node port. `is_first` is true for the service that keeps the port.
pub(super) fn of_port(port: u16, range: &RangeInclusive<u16>, is_first: bool) -> Option<Event> {
    if !range.contains(&port) {
        let (first, last) = (range.start(), range.end());
        let message =
            format!("Port {port} is not within the port range {first}-{last}; please recreate service");
        return Some(Event::warning("PortOutOfRange", message));
    }
    let message = || format!("Port {port} was assigned to multiple services; please recreate service");
    (!is_first).then(|| Event::warning("PortAlreadyAllocated", message()))
}

/// Whether a service can have this address of a range. The first address is reserved, and in IPv4 also the last
/// address.
fn has(range: IpNetwork, address: IpAddr) -> bool {
    let is_last = address.is_ipv4() && address == range.broadcast();
    range.contains(address) && address != range.network() && !is_last
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(event: Option<Event>) -> Option<(&'static str, String)> {
        event.map(|event| (event.reason, event.message))
    }

    #[test]
    fn an_address_is_in_a_range_and_has_one_service() {
        let ranges: Vec<IpNetwork> =
            ["10.0.0.0/24", "fd00::/112"].iter().map(|range| range.parse().unwrap()).collect();
        let of = |address: &str, ranges: &[IpNetwork], is_first| {
            shown(of_address(address.parse().unwrap(), ranges, is_first))
        };
        for inside in ["10.0.0.1", "fd00::1", "fd00::ffff"] {
            assert_eq!(of(inside, &ranges, true), None, "{inside}");
        }
        for outside in ["10.0.0.0", "10.0.0.255", "10.0.1.1", "fd00::", "fd01::1"] {
            let (reason, message) = of(outside, &ranges, true).unwrap();
            assert_eq!(reason, "ClusterIPOutOfRange");
            assert!(message.contains(outside), "{message}");
            assert_eq!(of(outside, &ranges, false).unwrap().0, "ClusterIPOutOfRange");
            assert_eq!(of(outside, &[], true), None, "the ranges are not known");
        }
        let text = "Cluster IP [IPv4]:10.0.0.1 was assigned to multiple services; please recreate service";
        assert_eq!(of("10.0.0.1", &ranges, false), Some(("ClusterIPAlreadyAllocated", text.to_owned())));
    }

    #[test]
    fn a_node_port_is_in_the_range_and_has_one_service() {
        let of = |port, is_first| shown(of_port(port, &(30000..=32767), is_first));
        assert_eq!((of(30000, true), of(32767, true)), (None, None));
        let text = "Port 29999 is not within the port range 30000-32767; please recreate service";
        assert_eq!(of(29999, true), Some(("PortOutOfRange", text.to_owned())));
        let text = "Port 30080 was assigned to multiple services; please recreate service";
        assert_eq!(of(30080, false), Some(("PortAlreadyAllocated", text.to_owned())));
    }
}

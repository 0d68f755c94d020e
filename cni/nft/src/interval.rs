//! Address ranges as elements of a kernel set: the first address, and the first address after the range.

use std::collections::BTreeSet;
use std::net::IpAddr;

use ipnetwork::IpNetwork;

use crate::data::{octets, value};
use crate::message::Attributes;

/// Adjacent addresses of one family: first and last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Interval {
    first: u128,
    last: u128,
    is_ipv4: bool,
}

/// Converts networks of one family to ranges. The ranges neither overlap nor touch, as the kernel requires.
#[must_use]
pub fn intervals(networks: &[IpNetwork]) -> BTreeSet<Interval> {
    let mut all: Vec<Interval> = networks.iter().map(Interval::of).collect();
    all.sort_unstable();
    let mut ranges: Vec<Interval> = Vec::with_capacity(all.len());
    for range in all {
        match ranges.last_mut() {
            Some(before) if range.first <= before.last.saturating_add(1) => {
                before.last = before.last.max(range.last);
            }
            _ => ranges.push(range),
        }
    }
    ranges.into_iter().collect()
}

// === impl Interval ===

impl Interval {
    /// The addresses from `first` to `last`, as numbers of the family.
    #[must_use]
    pub fn new(first: u128, last: u128, is_ipv4: bool) -> Self {
        Self { first, last, is_ipv4 }
    }

    fn of(network: &IpNetwork) -> Self {
        let (first, last) = match network {
            IpNetwork::V4(network) => {
                (network.network().to_bits().into(), network.broadcast().to_bits().into())
            }
            IpNetwork::V6(network) => (network.network().to_bits(), network.broadcast().to_bits()),
        };
        Self { first, last, is_ipv4: network.is_ipv4() }
    }

    /// The elements of a range: two, or one if the range ends at the highest address.
    #[must_use]
    pub fn elements(self) -> Attributes {
        const INTERVAL_END: u32 = 1;
        let key = |bits| Attributes::default().nest(1, value(&self.octets(bits)));
        let start = Attributes::default().nest(1, key(self.first));
        let highest = if self.is_ipv4 { u32::MAX.into() } else { u128::MAX };
        match self.last.checked_add(1) {
            Some(end) if self.last < highest => start.nest(1, key(end).number(3, INTERVAL_END)),
            _ => start,
        }
    }

    fn octets(self, bits: u128) -> Vec<u8> {
        octets(match u32::try_from(bits) {
            Ok(bits) if self.is_ipv4 => IpAddr::V4(bits.into()),
            _ => IpAddr::V6(bits.into()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(texts: &[&str]) -> BTreeSet<Interval> {
        intervals(&texts.iter().map(|text| text.parse().unwrap()).collect::<Vec<_>>())
    }

    #[test]
    fn overlapping_and_adjacent_networks_are_one_range() {
        assert_eq!(of(&["10.0.1.0/24", "10.0.0.0/24", "10.0.0.7/32"]), of(&["10.0.0.0/23"]));
        assert_eq!(of(&["10.0.0.0/24", "10.0.2.0/24"]).len(), 2);
        assert_eq!(of(&["fd00::/65", "fd00:0:0:0:8000::/65"]), of(&["fd00::9/64"]));
        assert_eq!(of(&[]), BTreeSet::new());
    }

    #[test]
    fn a_range_that_ends_at_the_highest_address_has_no_end_element() {
        let length = |text| of(&[text]).first().unwrap().elements().len();
        assert_eq!((length("255.255.255.0/24"), length("255.255.254.0/24")), (16, 40));
        assert_eq!((length("ffff::/16"), length("fffe::/16")), (28, 64));
    }
}

//! Ranges and sets of ranges: the usable addresses, and the order of their allocation.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ops::RangeInclusive;

use ipnetwork::IpNetwork;
use serde::Deserialize;

use crate::error::Error;
use crate::spec::result::Ip;

/// Maximum number of addresses that a search tries: no node has 2^20 pods.
const WALK_LIMIT: u128 = 1 << 20;

/// A range as in the configuration.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub(crate) struct RangeConf {
    pub(crate) subnet: IpNetwork,
    pub(crate) range_start: Option<IpAddr>,
    pub(crate) range_end: Option<IpAddr>,
    pub(crate) gateway: Option<IpAddr>,
}

/// Ranges of one family. An attachment gets one address of the set.
#[derive(Debug, Clone)]
pub(crate) struct RangeSet {
    ranges: Vec<Range>,
}

#[derive(Debug, Clone)]
struct Range {
    subnet: IpNetwork,
    first: u128,
    last: u128,
    gateway: IpAddr,
}

/// Refuses sets that share an address, because this address could be allocated twice.
pub(crate) fn check_overlaps(sets: &[RangeSet]) -> Result<(), Error> {
    if sets.is_empty() {
        return Err(Error::invalid("ipam.ranges", "there is no range"));
    }
    for (index, set) in sets.iter().enumerate() {
        for (other, one) in sets.iter().enumerate().skip(index + 1) {
            if set.ranges.iter().any(|a| one.ranges.iter().any(|b| a.overlaps(b))) {
                let reason = format!("range set {index} ({set}) overlaps with {other} ({one})");
                return Err(Error::invalid("ipam.ranges", reason));
            }
        }
    }
    Ok(())
}

// === impl RangeSet ===

impl RangeSet {
    /// Checks the set with this index.
    pub(crate) fn new(index: usize, set: Vec<RangeConf>) -> Result<Self, Error> {
        let field = format!("ipam.ranges[{index}]");
        let ranges = set.into_iter().map(|conf| Range::new(&field, conf)).collect::<Result<Vec<_>, _>>()?;
        let Some(first) = ranges.first() else { return Err(Error::invalid(&field, "has no range")) };
        if ranges.iter().any(|range| range.subnet.is_ipv4() != first.subnet.is_ipv4()) {
            return Err(Error::invalid(&field, "mixes IPv4 and IPv6: each needs a set of its own"));
        }
        for (at, range) in ranges.iter().enumerate() {
            if ranges[at + 1..].iter().any(|other| range.overlaps(other)) {
                return Err(Error::invalid(
                    &field,
                    format!("{} overlaps with another of its ranges", range.subnet),
                ));
            }
        }
        Ok(Self { ranges })
    }

    pub(crate) fn contains(&self, address: IpAddr) -> bool {
        self.ranges.iter().any(|range| range.contains(address))
    }

    /// Number of usable addresses.
    pub(crate) fn size(&self) -> u128 {
        self.ranges.iter().map(Range::size).fold(0, u128::saturating_add)
    }

    /// The address with its prefix length and gateway.
    pub(crate) fn config(&self, address: IpAddr) -> Ip {
        let range = self.ranges.iter().find(|range| range.contains(address));
        let network = range.and_then(|range| IpNetwork::new(address, range.subnet.prefix()).ok());
        Ip {
            interface: None,
            address: network.unwrap_or_else(|| address.into()),
            gateway: range.map(|range| range.gateway),
        }
    }

    /// The gateway of the first range.
    pub(crate) fn gateway(&self) -> Option<IpAddr> {
        self.ranges.first().map(|range| range.gateway)
    }

    /// Refuses a requested address that is a gateway.
    pub(crate) fn check_requested(&self, address: IpAddr) -> Result<(), Error> {
        match self.ranges.iter().find(|range| range.gateway == address) {
            Some(range) => {
                Err(Error::invalid("ips", format!("{address} is the gateway of {}", range.subnet)))
            }
            None => Ok(()),
        }
    }

    /// All usable addresses, beginning after `after`, so that a freed address is reused as late as possible.
    pub(crate) fn candidates(&self, after: Option<IpAddr>) -> impl Iterator<Item = IpAddr> {
        let at = after.and_then(|after| self.ranges.iter().position(|range| range.contains(after)));
        let from = match (at, after) {
            (Some(_), Some(after)) => bits(after).checked_add(1),
            _ => None,
        };
        let start = at.unwrap_or(0);
        let order = (0..=self.ranges.len()).map(move |step| (start + step) % self.ranges.len());
        let walk = order.enumerate().flat_map(move |(step, index)| {
            let range = &self.ranges[index];
            let head = if step == 0 { from.unwrap_or(range.first) } else { range.first };
            (head..=range.last).map(|value| range.address(value)).filter(|address| *address != range.gateway)
        });
        walk.take(usize::try_from(self.size().saturating_mul(2).min(WALK_LIMIT)).unwrap_or(usize::MAX))
    }
}

impl fmt::Display for RangeSet {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, range) in self.ranges.iter().enumerate() {
            let comma = if index == 0 { "" } else { ", " };
            write!(out, "{comma}{}", range.subnet)?;
            if !range.is_whole() {
                write!(out, " from {} to {}", range.address(range.first), range.address(range.last))?;
            }
        }
        Ok(())
    }
}

// === impl Range ===

impl Range {
    fn new(field: &str, conf: RangeConf) -> Result<Self, Error> {
        let subnet = conf.subnet;
        if subnet.ip() != subnet.network() {
            let reason = format!("{subnet} has host bits set: the network is {}", subnet.network());
            return Err(Error::invalid(&format!("{field}.subnet"), reason));
        }
        let width = if subnet.is_ipv4() { 32 } else { 128 };
        if subnet.prefix() > width - 2 {
            return Err(Error::RangeTooSmall { range: subnet });
        }
        let usable = usable_range(subnet);
        let (low, high) = (*usable.start(), *usable.end());
        let within = |name: &str, address: Option<IpAddr>, default: u128| match address {
            None => Ok(default),
            Some(address) if subnet.contains(address) => Ok(bits(address)),
            Some(address) => {
                Err(Error::invalid(&format!("{field}.{name}"), format!("{address} is not in {subnet}")))
            }
        };
        let first = within("rangeStart", conf.range_start, low)?;
        let last = within("rangeEnd", conf.range_end, high)?;
        if first > last {
            return Err(Error::invalid(&format!("{field}.rangeStart"), "is after rangeEnd"));
        }
        let gateway = conf.gateway.unwrap_or_else(|| address(subnet.is_ipv4(), low));
        if gateway.is_ipv4() != subnet.is_ipv4() {
            return Err(Error::invalid(
                &format!("{field}.gateway"),
                format!("{gateway} is of another family"),
            ));
        }
        let range = Self { subnet, first, last, gateway };
        if range.size() == 0 {
            return Err(Error::RangeTooSmall { range: subnet });
        }
        Ok(range)
    }

    fn contains(&self, address: IpAddr) -> bool {
        address.is_ipv4() == self.subnet.is_ipv4() && (self.first..=self.last).contains(&bits(address))
    }

    fn overlaps(&self, other: &Self) -> bool {
        self.subnet.is_ipv4() == other.subnet.is_ipv4()
            && self.first <= other.last
            && other.first <= self.last
    }

    fn size(&self) -> u128 {
        (self.last - self.first).saturating_add(1) - u128::from(self.contains(self.gateway))
    }

    fn address(&self, value: u128) -> IpAddr {
        address(self.subnet.is_ipv4(), value)
    }

    fn is_whole(&self) -> bool {
        usable_range(self.subnet) == (self.first..=self.last)
    }
}

/// The usable addresses of a network: without the network address and (IPv4) the broadcast address.
fn usable_range(subnet: IpNetwork) -> RangeInclusive<u128> {
    let low = bits(subnet.network()) + 1;
    let high = match subnet {
        IpNetwork::V4(network) => u128::from(network.broadcast().to_bits()) - 1,
        IpNetwork::V6(network) => network.broadcast().to_bits(),
    };
    low..=high
}

fn bits(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(v4) => u128::from(v4.to_bits()),
        IpAddr::V6(v6) => v6.to_bits(),
    }
}

fn address(is_v4: bool, value: u128) -> IpAddr {
    match u32::try_from(value) {
        Ok(value) if is_v4 => Ipv4Addr::from_bits(value).into(),
        _ => Ipv6Addr::from_bits(value).into(),
    }
}

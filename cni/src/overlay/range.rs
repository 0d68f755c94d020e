//! Ranges of addresses.

use std::collections::BTreeMap;
use std::net::IpAddr;

use ipnetwork::IpNetwork;

/// The same addresses in as few ranges as possible: adjacent halves are merged.
#[must_use]
pub fn merged(ranges: impl Iterator<Item = IpNetwork>) -> Vec<IpNetwork> {
    let mut ranges: Vec<IpNetwork> = ranges.map(canonical).collect();
    ranges.sort_unstable();
    let mut merged: Vec<IpNetwork> = Vec::new();
    for mut range in ranges {
        if merged.last().is_some_and(|last| last.contains(range.network()) && last.prefix() <= range.prefix())
        {
            continue;
        }
        while let Some(both) = merged.last().and_then(|last| joined(*last, range)) {
            merged.pop();
            range = both;
        }
        merged.push(range);
    }
    merged
}

/// Joins the two halves of a range. `None` if they are not the halves of one range.
fn joined(low: IpNetwork, high: IpNetwork) -> Option<IpNetwork> {
    let prefix = low.prefix().checked_sub(1).filter(|_| low.prefix() == high.prefix())?;
    let whole = IpNetwork::new(low.network(), prefix).ok()?;
    let halves = low.is_ipv4() == high.is_ipv4() && whole.network() == low.network() && low != high;
    (halves && whole.contains(high.network())).then_some(whole)
}

/// The range in canonical form: with its first address.
pub(crate) fn canonical(range: IpNetwork) -> IpNetwork {
    IpNetwork::new(range.network(), range.prefix()).unwrap_or(range)
}

/// The second address of a range.
pub(crate) fn second(range: IpNetwork) -> Option<IpAddr> {
    match range {
        IpNetwork::V4(range) => range.nth(1).map(IpAddr::V4),
        IpNetwork::V6(range) => range.nth(1).map(IpAddr::V6),
    }
}

/// Whether two ranges have a common address.
pub(crate) fn overlap(one: IpNetwork, other: IpNetwork) -> bool {
    one.contains(other.network()) || other.contains(one.network())
}

/// Ranges that overlap the given one. `ranges` are canonical and do not overlap.
pub(crate) fn overlapping<T>(
    ranges: &BTreeMap<IpNetwork, T>,
    range: IpNetwork,
) -> impl Iterator<Item = (&IpNetwork, &T)> {
    let before = ranges.range(..range).next_back();
    let after = ranges.range(range..).take_while(move |(other, _)| overlap(**other, range));
    before.into_iter().filter(move |(other, _)| overlap(**other, range)).chain(after)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_side_by_side_become_one() {
        let merge = |ranges: &[&str]| {
            let merged = merged(ranges.iter().map(|range| range.parse().unwrap()));
            merged.iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        let all: Vec<String> = (0..256).map(|n| format!("10.42.{n}.0/24")).collect();
        assert_eq!(merge(&all.iter().map(String::as_str).collect::<Vec<_>>()), ["10.42.0.0/16"]);
        assert_eq!(merge(&["10.42.1.0/24", "10.42.2.0/24"]), ["10.42.1.0/24", "10.42.2.0/24"]);
        assert_eq!(
            merge(&["fd42:0:0:1::/64", "10.0.0.0/8", "10.1.0.0/16", "fd42::/64"]),
            ["10.0.0.0/8", "fd42::/63"]
        );
        assert_eq!(merge(&["0.0.0.0/1", "128.0.0.0/1"]), ["0.0.0.0/0"]);
        assert_eq!(merge(&["10.0.0.0/24", "10.0.0.0/24"]), ["10.0.0.0/24"]);
        assert_eq!(merge(&[]), Vec::<String>::new());
    }

    #[test]
    fn ranges_that_share_addresses_are_found_among_many() {
        let net = |text: &str| -> IpNetwork { text.parse().unwrap() };
        let many: BTreeMap<IpNetwork, ()> =
            ["10.1.0.0/16", "10.2.0.0/24", "10.2.1.0/24", "10.2.4.0/22", "fd42::/64", "fd42:0:0:1::/64"]
                .map(|range| (net(range), ()))
                .into();
        let found = |range: &str| -> Vec<String> {
            overlapping(&many, net(range)).map(|(range, ())| range.to_string()).collect()
        };
        assert_eq!(found("10.1.0.0/16"), ["10.1.0.0/16"]);
        assert_eq!(found("10.1.0.0/24"), ["10.1.0.0/16"]);
        assert_eq!(found("10.1.255.0/24"), ["10.1.0.0/16"]);
        assert_eq!(found("10.2.0.0/22"), ["10.2.0.0/24", "10.2.1.0/24"]);
        assert_eq!(found("10.0.0.0/8"), ["10.1.0.0/16", "10.2.0.0/24", "10.2.1.0/24", "10.2.4.0/22"]);
        assert_eq!(found("::/0"), ["fd42::/64", "fd42:0:0:1::/64"]);
        for free in ["10.2.2.0/23", "10.0.0.0/16", "11.0.0.0/8", "fd41::/64", "fd42:0:0:2::/64"] {
            assert_eq!(found(free), Vec::<String>::new(), "{free}");
        }
    }
}

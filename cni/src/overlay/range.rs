//! Ranges of addresses.

use ipnetwork::IpNetwork;

/// The same addresses in as few ranges as can be: neighbours that fill a greater range become it.
#[must_use]
pub fn merged(mut ranges: Vec<IpNetwork>) -> Vec<IpNetwork> {
    ranges.sort_by_key(|range| (range.network(), range.prefix()));
    let mut merged: Vec<IpNetwork> = Vec::new();
    for mut range in ranges {
        if merged.last().is_some_and(|last| last.contains(range.network()) && last.prefix() <= range.prefix())
        {
            continue;
        }
        while let Some(both) = merged.last().and_then(|last| whole(*last, range)) {
            merged.pop();
            range = both;
        }
        merged.push(range);
    }
    merged
}

/// The range of which these are the two halves.
fn whole(low: IpNetwork, high: IpNetwork) -> Option<IpNetwork> {
    let prefix = low.prefix().checked_sub(1).filter(|_| low.prefix() == high.prefix())?;
    let whole = IpNetwork::new(low.network(), prefix).ok()?;
    let halves = low.is_ipv4() == high.is_ipv4() && whole.network() == low.network() && low != high;
    (halves && whole.contains(high.network())).then_some(whole)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_side_by_side_become_one() {
        let merge = |ranges: &[&str]| {
            let merged = merged(ranges.iter().map(|range| range.parse().unwrap()).collect());
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
}

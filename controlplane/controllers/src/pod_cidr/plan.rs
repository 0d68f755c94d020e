//! Assigns a pod CIDR from the cluster's ranges to each node without a pod CIDR.

use std::collections::HashSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use ipnetwork::IpNetwork;

use crate::config::ControllersConfig;
use crate::object::{Node, ObjectExt};

/// The assignment of one node.
#[derive(Debug)]
pub(crate) enum Action {
    /// One pod CIDR of each address family.
    Assign(Arc<Node>, Vec<IpNetwork>),
    /// No pod CIDR is free.
    Exhausted(Arc<Node>),
}

/// The pod CIDRs of a node.
pub(crate) fn ranges(node: &Node) -> Vec<IpNetwork> {
    let all = node.spec.pod_cidrs.iter().flatten().chain(&node.spec.pod_cidr);
    all.filter_map(|text| text.parse().ok()).collect()
}

/// Plans all nodes together, so that no two nodes get the same pod CIDR. Pod CIDRs are assigned in ascending order,
/// starting after `last`. The pod CIDR of a deleted node therefore stays unused as long as possible: other nodes may
/// still have routes to it.
pub(crate) fn plan(nodes: &[Arc<Node>], config: &ControllersConfig, last: &[IpNetwork]) -> Vec<Action> {
    if config.cluster_cidrs.is_empty() {
        return Vec::new();
    }
    let taken: Vec<IpNetwork> = nodes.iter().flat_map(|node| ranges(node)).collect();
    let mut free: Vec<_> = config
        .cluster_cidrs
        .iter()
        .map(|cluster| {
            let mask = if cluster.is_ipv4() { config.node_mask_v4 } else { config.node_mask_v6 };
            Free::new(*cluster, mask, &taken, last)
        })
        .collect();
    let needy = nodes.iter().filter(|node| ranges(node).is_empty() && !node.is_being_deleted());
    needy
        .map(|node| match free.iter_mut().map(Iterator::next).collect() {
            Some(ranges) => Action::Assign(node.clone(), ranges),
            None => Action::Exhausted(node.clone()),
        })
        .collect()
}

/// Iterates over the free pod CIDRs of a cluster range.
struct Free {
    cluster: IpNetwork,
    mask: u8,
    first: u128,
    looked_at: u128,
    count: u128,
    /// Used ranges with the size of a pod CIDR. The field `other` has the used ranges of other sizes.
    same: HashSet<IpNetwork>,
    other: Vec<IpNetwork>,
}

impl Free {
    fn new(cluster: IpNetwork, mask: u8, taken: &[IpNetwork], last: &[IpNetwork]) -> Self {
        // A cluster range that is smaller than a pod CIDR contains no pod CIDR.
        let count = mask.checked_sub(cluster.prefix()).map_or(0, |bits| 1 << bits.min(32));
        let (same, other) = taken.iter().copied().partition(|range: &IpNetwork| range.prefix() == mask);
        let same: Vec<IpNetwork> = same;
        let same = same.into_iter().collect();
        let mut free = Self { cluster, mask, first: 0, looked_at: 0, count, same, other };
        free.first = last.iter().find_map(|range| free.number(*range)).map_or(0, |number| number + 1);
        free
    }

    /// The index of a pod CIDR in the cluster range. `None` if `range` is not a pod CIDR of the cluster range.
    fn number(&self, range: IpNetwork) -> Option<u128> {
        if range.prefix() != self.mask || !self.cluster.contains(range.network()) {
            return None;
        }
        match (range.network(), self.cluster.network()) {
            (IpAddr::V4(ip), IpAddr::V4(base)) => {
                let offset = ip.to_bits() ^ base.to_bits();
                offset.checked_shr(u32::from(32_u8.checked_sub(self.mask)?)).map(u128::from)
            }
            (IpAddr::V6(ip), IpAddr::V6(base)) => {
                let offset = ip.to_bits() ^ base.to_bits();
                offset.checked_shr(u32::from(128_u8.checked_sub(self.mask)?))
            }
            _ => None,
        }
    }

    fn at(&self, number: u128) -> Option<IpNetwork> {
        let address = match self.cluster.network() {
            IpAddr::V4(base) => {
                let offset =
                    u32::try_from(number.checked_shl(u32::from(32_u8.checked_sub(self.mask)?))?).ok()?;
                IpAddr::V4(Ipv4Addr::from_bits(base.to_bits() | offset))
            }
            IpAddr::V6(base) => {
                let offset = number.checked_shl(u32::from(128_u8.checked_sub(self.mask)?))?;
                IpAddr::V6(Ipv6Addr::from_bits(base.to_bits() | offset))
            }
        };
        IpNetwork::new(address, self.mask).ok()
    }
}

impl Iterator for Free {
    type Item = IpNetwork;

    fn next(&mut self) -> Option<IpNetwork> {
        while self.looked_at < self.count {
            let range = self.at((self.first + self.looked_at) % self.count)?;
            self.looked_at += 1;
            let overlaps =
                |other: &IpNetwork| other.contains(range.network()) || range.contains(other.network());
            if !self.same.contains(&range) && !self.other.iter().any(overlaps) {
                return Some(range);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn node(name: &str, ranges: &[&str]) -> Arc<Node> {
        let spec = json!({"podCIDR": ranges.first(), "podCIDRs": ranges});
        Arc::new(serde_json::from_value(json!({"metadata": {"name": name}, "spec": spec})).unwrap())
    }

    fn decide(nodes: &[Arc<Node>], clusters: &[&str], mask_v4: u8) -> Vec<String> {
        decide_after(&[], nodes, clusters, mask_v4)
    }

    fn decide_after(last: &[&str], nodes: &[Arc<Node>], clusters: &[&str], mask_v4: u8) -> Vec<String> {
        let last: Vec<IpNetwork> = last.iter().map(|text| text.parse().unwrap()).collect();
        let config = ControllersConfig {
            cluster_cidrs: clusters.iter().map(|text| text.parse().unwrap()).collect(),
            node_mask_v4: mask_v4,
            ..ControllersConfig::default()
        };
        let show = |action: Action| match action {
            Action::Assign(node, ranges) => {
                let ranges: Vec<_> = ranges.iter().map(ToString::to_string).collect();
                format!("{} {}", node.name(), ranges.join(" "))
            }
            Action::Exhausted(node) => format!("{} none", node.name()),
        };
        plan(nodes, &config, &last).into_iter().map(show).collect()
    }

    #[test]
    fn each_node_gets_the_first_free_range() {
        let nodes =
            [node("a", &["10.42.0.0/24"]), node("b", &[]), node("c", &["10.42.2.0/24"]), node("d", &[])];
        assert_eq!(decide(&nodes, &["10.42.0.0/16"], 24), ["b 10.42.1.0/24", "d 10.42.3.0/24"]);
    }

    #[test]
    fn a_freed_range_is_not_reused_before_its_turn() {
        let nodes = [node("a", &["10.42.0.0/24", "fd00::/64"]), node("b", &[]), node("c", &[])];
        let clusters = ["10.42.0.0/22", "fd00::/62"];
        let after = |last: &[&str]| decide_after(last, &nodes, &clusters, 24);
        let second = "b 10.42.2.0/24 fd00:0:0:2::/64";
        assert_eq!(
            after(&["10.42.1.0/24", "fd00:0:0:1::/64"])[0],
            second,
            "10.42.1.0/24 is free, but was used last"
        );
        let round = ["b 10.42.3.0/24 fd00:0:0:3::/64", "c 10.42.1.0/24 fd00:0:0:1::/64"];
        assert_eq!(after(&["10.42.2.0/24", "fd00:0:0:2::/64"]), round);
        // Pod CIDRs of another cluster range or size, assigned under an earlier configuration.
        for other in ["10.43.1.0/24", "10.42.1.0/25"] {
            assert_eq!(after(&[other])[0], "b 10.42.1.0/24 fd00:0:0:1::/64");
        }
    }

    #[test]
    fn ranges_of_other_sizes_are_not_assigned_again() {
        let nodes = [node("a", &["10.42.0.0/23"]), node("b", &["10.42.2.128/25"]), node("c", &[])];
        assert_eq!(decide(&nodes, &["10.42.0.0/16"], 24), ["c 10.42.3.0/24"]);
    }

    #[test]
    fn both_families_are_assigned_together_or_not_at_all() {
        let nodes = [node("a", &[]), node("b", &[]), node("c", &[])];
        let expected = ["a 10.42.0.0/24 fd00::/64", "b 10.42.1.0/24 fd00:0:0:1::/64", "c none"];
        assert_eq!(decide(&nodes, &["10.42.0.0/23", "fd00::/48"], 24), expected);
        assert!(decide(&nodes, &[], 24).is_empty());
    }

    #[test]
    fn a_range_smaller_than_a_pod_cidr_yields_none() {
        let nodes = [node("a", &[]), node("b", &[])];
        assert_eq!(decide(&nodes, &["10.42.0.0/28"], 24), ["a none", "b none"]);
        assert_eq!(decide(&nodes, &["fd00::/72"], 24), ["a none", "b none"]);
        assert_eq!(decide(&nodes, &["10.42.0.0/24"], 24), ["a 10.42.0.0/24", "b none"]);
    }
}

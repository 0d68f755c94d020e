//! The cluster's ranges: nodes' pod ranges are cut from one of each family, and services have one of their own. What
//! cannot be is refused at the start; a controller could only leave nodes without a range, or give them somebody
//! else's.

use ipnetwork::IpNetwork;

/// The ranges, all decided.
#[derive(Clone, Debug)]
pub(crate) struct Ranges {
    /// At most one of each family, as a node's `podCIDRs` may hold.
    pub(crate) cluster: Vec<IpNetwork>,
    pub(crate) service: IpNetwork,
    /// Prefix lengths of a node's ranges, of IPv4 and of IPv6.
    pub(crate) node_masks: [u8; 2],
}

/// What was asked for, and the defaults.
pub(super) fn decide(
    cluster: Vec<IpNetwork>,
    service: Option<IpNetwork>,
    [mask_v4, mask_v6]: [Option<u8>; 2],
) -> anyhow::Result<Ranges> {
    let cluster = if cluster.is_empty() { vec!["10.42.0.0/16".parse()?] } else { cluster };
    let of_v6_alone = cluster.iter().all(IpNetwork::is_ipv6);
    let ranges = Ranges {
        service: match service {
            Some(service) => service,
            None if of_v6_alone => "fd43::/112".parse()?,
            None => "10.43.0.0/16".parse()?,
        },
        cluster,
        node_masks: [mask_v4.unwrap_or(24), mask_v6.unwrap_or(64)],
    };
    ranges.check()?;
    Ok(ranges)
}

// === impl Ranges ===

impl Ranges {
    fn check(&self) -> anyhow::Result<()> {
        let of_v4 = self.cluster.iter().filter(|cidr| cidr.is_ipv4()).count();
        let twice = of_v4 > 1 || self.cluster.len() - of_v4 > 1;
        anyhow::ensure!(!twice, "cluster-cidr takes one range of each family, not {}", self.cluster.len());
        let service = self.service;
        let (family, shortest_room) = if service.is_ipv4() { ("IPv4", 30) } else { ("IPv6", 126) };
        anyhow::ensure!(
            self.cluster.iter().any(|cluster| cluster.is_ipv4() == service.is_ipv4()),
            "service-cidr {service} is of {family}, of which cluster-cidr gives pods no addresses"
        );
        anyhow::ensure!(
            service.prefix() <= shortest_room,
            "service-cidr {service} is too small: /{shortest_room} at most"
        );
        for cluster in &self.cluster {
            // The longest that hold a gateway and a pod.
            let (family, mask, longest) = match cluster {
                IpNetwork::V4(_) => ("ipv4", self.node_masks[0], 30),
                IpNetwork::V6(_) => ("ipv6", self.node_masks[1], 126),
            };
            anyhow::ensure!(
                mask <= longest,
                "node-cidr-mask-size-{family} {mask} leaves a node no room for a gateway and a pod: {longest} at most"
            );
            anyhow::ensure!(
                cluster.prefix() <= mask,
                "cluster-cidr {cluster} is smaller than the range of one node, a /{mask} \
                 (node-cidr-mask-size-{family})"
            );
            let overlap = cluster.contains(service.network()) || service.contains(cluster.network());
            anyhow::ensure!(
                !overlap,
                "cluster-cidr {cluster} and service-cidr {service} overlap: a pod would have the address of a service"
            );
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(cluster: &[&str], service: Option<&str>, masks: [Option<u8>; 2]) -> Result<Ranges, String> {
        let cluster = cluster.iter().map(|text| text.parse().unwrap()).collect();
        let decided = decide(cluster, service.map(|text| text.parse().unwrap()), masks);
        decided.map_err(|error| error.to_string())
    }

    #[test]
    fn ranges_that_can_be_are_taken() {
        let default = of(&[], None, [None; 2]).unwrap();
        assert_eq!(default.cluster, ["10.42.0.0/16".parse::<IpNetwork>().unwrap()]);
        assert_eq!((default.service.to_string().as_str(), default.node_masks), ("10.43.0.0/16", [24, 64]));
        assert_eq!(of(&["10.42.0.0/16", "fd00::/48"], None, [None; 2]).unwrap().cluster.len(), 2);
        let of_v6 = of(&["fd00::/48"], None, [None; 2]).unwrap();
        assert_eq!(of_v6.service.to_string(), "fd43::/112");
        assert!(of(&["10.42.0.0/16", "fd00::/48"], Some("fd01::/108"), [None; 2]).is_ok());
        assert!(of(&["10.42.0.0/28", "fd00::/72"], None, [Some(30), Some(80)]).is_ok());
        assert!(of(&["10.42.0.0/24", "fd00::/64"], Some("10.42.1.0/24"), [None; 2]).is_ok());
    }

    #[test]
    fn ranges_that_cannot_be_are_refused_with_what_where_and_why() {
        let small = "cluster-cidr 10.42.0.0/28 is smaller than the range of one node, a /24 (node-cidr-mask-size-ipv4)";
        let overlap = "cluster-cidr 10.0.0.0/8 and service-cidr 10.43.0.0/16 overlap: a pod would have the address of a service";
        for (cluster, masks, said) in [
            (&["10.42.0.0/28"][..], [None; 2], small),
            (&["fd00::/72"], [None; 2], "fd00::/72 is smaller than the range of one node, a /64"),
            (&["10.42.0.0/16"], [Some(15), None], "is smaller than the range of one node, a /15"),
            (&["10.42.0.0/16"], [Some(31), None], "node-cidr-mask-size-ipv4 31 leaves a node no room"),
            (&["fd00::/48"], [None, Some(127)], "node-cidr-mask-size-ipv6 127 leaves a node no room"),
            (&["10.0.0.0/8"], [None; 2], overlap),
            (&["10.43.7.0/24"], [None; 2], "and service-cidr 10.43.0.0/16 overlap"),
            (&["10.0.0.0/16", "10.1.0.0/16"], [None; 2], "one range of each family"),
            (&["fd43::/16"], [None; 2], "and service-cidr fd43::/112 overlap"),
        ] {
            let error = of(cluster, None, masks).unwrap_err();
            assert!(error.contains(said), "{cluster:?}: {error}");
        }
        for (cluster, service, said) in [
            (
                "fd00::/48",
                "10.43.0.0/16",
                "service-cidr 10.43.0.0/16 is of IPv4, of which cluster-cidr gives pods no",
            ),
            (
                "10.42.0.0/16",
                "fd43::/112",
                "service-cidr fd43::/112 is of IPv6, of which cluster-cidr gives pods no",
            ),
            ("10.42.0.0/16", "10.43.0.0/31", "service-cidr 10.43.0.0/31 is too small: /30 at most"),
        ] {
            let error = of(&[cluster], Some(service), [None; 2]).unwrap_err();
            assert!(error.contains(said), "{cluster}, {service}: {error}");
        }
    }
}

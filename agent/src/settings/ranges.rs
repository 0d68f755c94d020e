//! Ranges of the cluster's addresses. Each node gets a part of each pod range; services have a range of their own.
//!
//! Invalid ranges are rejected at the start of the process. Otherwise nodes would get no range, or addresses of pods
//! and services would overlap, which a controller would report only later.

use ipnetwork::IpNetwork;

/// Checked ranges.
#[derive(Clone, Debug)]
pub(crate) struct Ranges {
    /// Pod ranges, at most one of each family like a node's `podCIDRs`.
    pub(crate) cluster: Vec<IpNetwork>,
    /// Services' range of the default family.
    pub(crate) service: IpNetwork,
    /// Services' range of the other family.
    pub(crate) secondary_service: Option<IpNetwork>,
    /// Prefix lengths of a node's ranges, of IPv4 and of IPv6.
    pub(crate) node_masks: [u8; 2],
}

/// Checks the ranges. The default of the service range depends on the families of the cluster ranges.
pub(super) fn decide(
    cluster: Vec<IpNetwork>,
    services: Vec<IpNetwork>,
    node_masks: [u8; 2],
) -> anyhow::Result<Ranges> {
    anyhow::ensure!(!cluster.is_empty(), "cluster-cidr is empty: name at least one range");
    let only_v6 = cluster.iter().all(IpNetwork::is_ipv6);
    let (service, secondary_service) = match services[..] {
        [] if only_v6 => ("fd43::/112".parse()?, None),
        [] => ("10.43.0.0/16".parse()?, None),
        [one] => (one, None),
        [one, other] if one.is_ipv4() != other.is_ipv4() => (one, Some(other)),
        _ => {
            anyhow::bail!("service-cidr has {} ranges: use at most one range of each family", services.len())
        }
    };
    let ranges = Ranges { cluster, service, secondary_service, node_masks };
    ranges.check()?;
    Ok(ranges)
}

// === impl Ranges ===

impl Ranges {
    fn check(&self) -> anyhow::Result<()> {
        let of_v4 = self.cluster.iter().filter(|cidr| cidr.is_ipv4()).count();
        let twice = of_v4 > 1 || self.cluster.len() - of_v4 > 1;
        anyhow::ensure!(
            !twice,
            "cluster-cidr has {} ranges: use at most one range of each family",
            self.cluster.len()
        );
        self.services().try_for_each(|service| self.check_service(service))?;
        for cluster in &self.cluster {
            // The longest prefix that has room for a gateway and a pod.
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
        }
        Ok(())
    }

    #[cfg(feature = "controlplane")]
    /// Checks that the ranges of load balancers do not overlap the ranges of pods and services. Otherwise addresses of
    /// pods or services would be announced in the network of the nodes.
    pub(super) fn check_pool(&self, pool: Vec<IpNetwork>) -> anyhow::Result<Vec<IpNetwork>> {
        for range in &pool {
            let overlaps =
                |other: &IpNetwork| other.contains(range.network()) || range.contains(other.network());
            if let Some(other) = self.cluster.iter().copied().chain(self.services()).find(overlaps) {
                anyhow::bail!("load-balancer-pool {range} overlaps {other}, a range of pods or services");
            }
        }
        Ok(pool)
    }

    /// The ranges of services. The range of the default family is the first.
    fn services(&self) -> impl Iterator<Item = IpNetwork> + use<> {
        [self.service].into_iter().chain(self.secondary_service)
    }

    fn check_service(&self, service: IpNetwork) -> anyhow::Result<()> {
        let (family, longest) = if service.is_ipv4() { ("IPv4", 30) } else { ("IPv6", 126) };
        anyhow::ensure!(
            self.cluster.iter().any(|cluster| cluster.is_ipv4() == service.is_ipv4()),
            "service-cidr {service} is {family}, but cluster-cidr has no {family} range: pods could not reach services"
        );
        anyhow::ensure!(
            service.prefix() <= longest,
            "service-cidr {service} is too small: use a prefix length of at most {longest}"
        );
        for cluster in &self.cluster {
            let overlap = cluster.contains(service.network()) || service.contains(cluster.network());
            anyhow::ensure!(
                !overlap,
                "cluster-cidr {cluster} and service-cidr {service} overlap: a pod would have the address of a service"
            );
        }
        Ok(())
    }
}

/// Those ranges of load balancers that no permitted range contains. Nodes ignore such addresses. Without permitted ranges,
/// nodes permit all addresses.
#[cfg(feature = "controlplane")]
pub(super) fn ignored_pools(pool: &[IpNetwork], permitted: &[IpNetwork]) -> Vec<IpNetwork> {
    let is_permitted = |range: &IpNetwork| {
        permitted.iter().any(|other| other.prefix() <= range.prefix() && other.contains(range.network()))
    };
    pool.iter().copied().filter(|range| !permitted.is_empty() && !is_permitted(range)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(cluster: &[&str], service: Option<&str>, masks: [Option<u8>; 2]) -> Result<Ranges, String> {
        let cluster: &[&str] = if cluster.is_empty() { &["10.42.0.0/16"] } else { cluster };
        let cluster = cluster.iter().map(|text| text.parse().unwrap()).collect();
        let masks = [masks[0].unwrap_or(24), masks[1].unwrap_or(64)];
        let services = service.into_iter().flat_map(|all| all.split(','));
        let decided = decide(cluster, services.map(|one| one.parse().unwrap()).collect(), masks);
        decided.map_err(|error| error.to_string())
    }

    #[test]
    fn valid_ranges_are_accepted() {
        let default = of(&[], None, [None; 2]).unwrap();
        assert_eq!(default.cluster, ["10.42.0.0/16".parse::<IpNetwork>().unwrap()]);
        assert_eq!((default.service.to_string().as_str(), default.node_masks), ("10.43.0.0/16", [24, 64]));
        assert_eq!(of(&["10.42.0.0/16", "fd00::/48"], None, [None; 2]).unwrap().cluster.len(), 2);
        let of_v6 = of(&["fd00::/48"], None, [None; 2]).unwrap();
        assert_eq!(of_v6.service.to_string(), "fd43::/112");
        assert!(of(&["10.42.0.0/16", "fd00::/48"], Some("fd01::/108"), [None; 2]).is_ok());
        let dual = of(&["10.42.0.0/16", "fd00::/48"], Some("fd01::/108,10.43.0.0/16"), [None; 2]).unwrap();
        assert_eq!(dual.secondary_service.unwrap().to_string(), "10.43.0.0/16");
        assert!(of(&["10.42.0.0/28", "fd00::/72"], None, [Some(30), Some(80)]).is_ok());
        assert!(of(&["10.42.0.0/24", "fd00::/64"], Some("10.42.1.0/24"), [None; 2]).is_ok());
    }

    #[test]
    fn load_balancers_get_no_addresses_of_pods_or_services() {
        let ranges = of(&[], None, [None; 2]).unwrap();
        let check = |pool: &str| ranges.check_pool(vec![pool.parse().unwrap()]);
        assert!(check("192.168.1.240/28").is_ok());
        for pool in ["10.42.7.0/24", "10.43.0.0/16", "0.0.0.0/0"] {
            assert!(check(pool).unwrap_err().to_string().contains("overlaps"), "{pool}");
        }
    }

    #[cfg(feature = "controlplane")]
    #[test]
    fn pools_outside_of_the_permitted_ranges_are_found() {
        let parse =
            |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect::<Vec<IpNetwork>>();
        let pool = parse(&["192.168.1.240/28", "fd01::/120"]);
        let ignored = |permitted: &[&str]| ignored_pools(&pool, &parse(permitted));
        assert!(ignored(&[]).is_empty(), "all addresses are permitted");
        assert!(ignored(&["192.168.0.0/16", "fd01::/120"]).is_empty());
        assert_eq!(ignored(&["192.168.1.0/24"]), parse(&["fd01::/120"]));
        assert_eq!(
            ignored(&["192.168.1.240/29", "::/0"]),
            parse(&["192.168.1.240/28"]),
            "a part is permitted"
        );
    }

    #[test]
    fn invalid_ranges_are_refused_with_the_reason() {
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
            (&["10.0.0.0/16", "10.1.0.0/16"], [None; 2], "at most one range of each family"),
            (&["fd43::/16"], [None; 2], "and service-cidr fd43::/112 overlap"),
        ] {
            let error = of(cluster, None, masks).unwrap_err();
            assert!(error.contains(said), "{cluster:?}: {error}");
        }
        for (cluster, service, said) in [
            (
                "fd00::/48",
                "10.43.0.0/16",
                "service-cidr 10.43.0.0/16 is IPv4, but cluster-cidr has no IPv4 range",
            ),
            (
                "10.42.0.0/16",
                "fd43::/112",
                "service-cidr fd43::/112 is IPv6, but cluster-cidr has no IPv6 range",
            ),
            ("10.42.0.0/16", "10.43.0.0/16,10.44.0.0/16", "service-cidr has 2 ranges: use at most one"),
            (
                "10.42.0.0/16",
                "10.43.0.0/16,fd01::/108",
                "fd01::/108 is IPv6, but cluster-cidr has no IPv6 range",
            ),
            (
                "10.42.0.0/16",
                "10.43.0.0/31",
                "service-cidr 10.43.0.0/31 is too small: use a prefix length of at most 30",
            ),
        ] {
            let error = of(&[cluster], Some(service), [None; 2]).unwrap_err();
            assert!(error.contains(said), "{cluster}, {service}: {error}");
        }
    }
}

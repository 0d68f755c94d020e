//! The services of each address, sorted by address. The cache of services updates it with each change.

use std::collections::BTreeSet;
use std::net::IpAddr;

use ipnetwork::IpNetwork;

use super::service_index::ServiceIndex;
use crate::cache::Change;
use crate::object::{Key, Service};

/// The services of each address.
#[derive(Debug, Default)]
pub(crate) struct ServiceAddresses(ServiceIndex<IpAddr>);

/// The addresses of a service.
pub(crate) fn addresses(service: &Service) -> impl Iterator<Item = IpAddr> {
    let has_addresses = service.spec.type_.as_deref() != Some("ExternalName");
    let all = service.spec.cluster_ips.iter().flatten().filter(move |_| has_addresses);
    all.filter_map(|address| address.parse().ok())
}

// === impl ServiceAddresses ===

impl ServiceAddresses {
    /// Applies a change of a service. Returns the addresses whose services may have changed.
    pub(crate) fn follow(&self, change: &Change<'_, Service>) -> BTreeSet<IpAddr> {
        self.0.follow(change, |service| addresses(service).collect())
    }

    /// The services with this address.
    pub(crate) fn services(&self, address: IpAddr) -> Vec<Key> {
        self.0.services(address)
    }

    /// The addresses of all services.
    pub(crate) fn all(&self) -> Vec<IpAddr> {
        self.0.lock().keys().copied().collect()
    }

    /// The first address of a service that is in `range`, but not in the other ranges.
    pub(crate) fn first_only_in(&self, range: IpNetwork, others: &[IpNetwork]) -> Option<IpAddr> {
        let is_elsewhere = |address: &IpAddr| others.iter().any(|other| other.contains(*address));
        let services = self.0.lock();
        services
            .range(range.network()..=range.broadcast())
            .map(|(address, _)| *address)
            .find(|address| !is_elsewhere(address))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::json;

    use super::*;

    fn service(name: &str, ips: &[&str]) -> Arc<Service> {
        let value = json!({"metadata": {"namespace": "n", "name": name}, "spec": {"clusterIPs": ips}});
        Arc::new(serde_json::from_value(value).unwrap())
    }

    #[test]
    fn an_address_leads_to_its_services() {
        let (index, address) = (ServiceAddresses::default(), "10.0.0.1".parse::<IpAddr>().unwrap());
        let (one, none) = (service("a", &["10.0.0.1", "None"]), service("a", &[]));
        assert_eq!(index.follow(&Change { old: None, new: Some(&one) }), [address].into());
        assert_eq!(index.services(address), [Key::new("n", "a")]);
        assert!(index.follow(&Change { old: Some(&one), new: Some(&one) }).is_empty(), "nothing changed");
        assert_eq!(index.follow(&Change { old: Some(&one), new: Some(&none) }), [address].into());
        assert!(index.services(address).is_empty());
    }

    #[test]
    fn the_first_address_of_a_range_is_found() {
        let index = ServiceAddresses::default();
        for (name, ip) in [("a", "10.0.0.1"), ("b", "10.0.1.9"), ("c", "fd00::1")] {
            index.follow(&Change { old: None, new: Some(&service(name, &[ip])) });
        }
        let first = |range: &str, others: &[&str]| {
            let others: Vec<IpNetwork> = others.iter().map(|other| other.parse().unwrap()).collect();
            index.first_only_in(range.parse().unwrap(), &others).map(|address| address.to_string())
        };
        assert_eq!(first("10.0.0.0/16", &[]).as_deref(), Some("10.0.0.1"));
        assert_eq!(first("10.0.0.0/16", &["10.0.0.0/24"]).as_deref(), Some("10.0.1.9"));
        assert_eq!(first("10.0.0.0/16", &["10.0.0.0/8"]), None);
        assert_eq!(first("10.0.2.0/24", &[]), None);
        assert_eq!(first("fd00::/64", &[]).as_deref(), Some("fd00::1"));
    }
}

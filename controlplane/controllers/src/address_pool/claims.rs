//! The assignment of pool addresses to services.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use super::plan;
use crate::cache::Change;
use crate::object::{Key, ObjectExt, Service};

/// Addresses by service. A service holds its address from the decision until the service is deleted or leaves the pool,
/// so that no other service gets it before the status is written.
#[derive(Debug, Default)]
pub(crate) struct Claims {
    holders: BTreeMap<IpAddr, Key>,
    services: BTreeMap<Key, BTreeSet<IpAddr>>,
    /// Services without an address, because none was free.
    waiting: BTreeSet<Key>,
}

// === impl Claims ===

impl Claims {
    /// Applies a change of a service. Returns the services to reconcile.
    pub(crate) fn follow(&mut self, change: &Change<'_, Service>) -> BTreeSet<Key> {
        let Some(key) = change.latest().map(|service| service.key()) else { return BTreeSet::new() };
        match change.new.filter(|service| plan::is_ours(service)) {
            Some(service) => {
                let held = self.services.entry(key.clone()).or_default();
                // The status was written before this process started. The reconcile resolves an address of two
                // services.
                for address in plan::addresses(service) {
                    if self.holders.entry(address).or_insert_with(|| key.clone()) == &key {
                        held.insert(address);
                    }
                }
                let before: BTreeSet<IpAddr> =
                    change.old.into_iter().flat_map(|old| plan::addresses(old)).collect();
                let has_released = before.iter().any(|address| !held.contains(address));
                let mut changed =
                    if has_released { std::mem::take(&mut self.waiting) } else { BTreeSet::new() };
                changed.insert(key);
                changed
            }
            None => {
                let was_ours = self.services.contains_key(&key);
                self.waiting.remove(&key);
                self.set(&key, &BTreeSet::new());
                self.services.remove(&key);
                let mut changed = if was_ours { std::mem::take(&mut self.waiting) } else { BTreeSet::new() };
                // Its status still has the addresses if only its type or class changed.
                changed.extend(change.new.filter(|_| was_ours).map(|_| key));
                changed
            }
        }
    }

    /// Sets the addresses of a service.
    pub(crate) fn set(&mut self, key: &Key, addresses: &BTreeSet<IpAddr>) {
        let held = self.services.entry(key.clone()).or_default();
        let released: Vec<IpAddr> = held.difference(addresses).copied().collect();
        held.clone_from(addresses);
        for address in &released {
            self.holders.remove(address);
        }
        self.holders.extend(addresses.iter().map(|address| (*address, key.clone())));
    }

    /// Records that a service got no address.
    pub(crate) fn wait(&mut self, key: &Key) {
        self.waiting.insert(key.clone());
    }

    /// Whether no other service has the address.
    pub(crate) fn is_free(&self, address: IpAddr, key: &Key) -> bool {
        self.holders.get(&address).is_none_or(|holder| holder == key)
    }

    /// All services of the pool.
    pub(crate) fn all(&self) -> Vec<Key> {
        self.services.keys().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::json;

    use super::*;

    fn service(name: &str, class: &str, ip: &str) -> Arc<Service> {
        let value = json!({"metadata": {"namespace": "n", "name": name},
            "spec": {"type": "LoadBalancer", "loadBalancerClass": class},
            "status": {"loadBalancer": {"ingress": [{"ip": ip, "ipMode": "VIP"}]}}});
        Arc::new(serde_json::from_value(value).unwrap())
    }

    #[test]
    fn an_address_has_one_service_until_it_is_gone() {
        let (mut claims, ip) = (Claims::default(), "192.0.2.1".parse().unwrap());
        let (a, b) = (Key::new("n", "a"), Key::new("n", "b"));
        let (one, two) = (service("a", plan::CLASS, "192.0.2.1"), service("b", plan::CLASS, "192.0.2.1"));
        assert_eq!(claims.follow(&Change { old: None, new: Some(&one) }), [a.clone()].into());
        claims.follow(&Change { old: None, new: Some(&two) });
        assert!(claims.is_free(ip, &a) && !claims.is_free(ip, &b));
        claims.wait(&b);
        let other = service("a", "example.com/other", "192.0.2.1");
        let woken = claims.follow(&Change { old: Some(&one), new: Some(&other) });
        assert_eq!(
            woken,
            [a.clone(), b.clone()].into(),
            "its status is cleared, and the other one gets the address"
        );
        assert!(claims.is_free(ip, &b));
        claims.set(&b, &[ip].into());
        assert!(!claims.is_free(ip, &a));
        claims.follow(&Change { old: Some(&two), new: None });
        assert!(claims.is_free(ip, &a) && claims.all().is_empty());
    }
}

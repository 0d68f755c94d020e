//! The assignment of pool addresses to services.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnetwork::IpNetwork;

use super::runs::Runs;
use super::service::{addresses, is_ours};
use crate::cache::Change;
use crate::object::{Key, ObjectExt, Service};

/// Addresses by service. A service holds its address from the decision until the service is deleted or leaves the pool.
/// So no other service gets the address before the status is written.
#[derive(Debug, Default)]
pub(crate) struct Claims {
    holders: BTreeMap<IpAddr, Key>,
    services: BTreeMap<Key, BTreeSet<IpAddr>>,
    /// Number of nodes that have each address.
    nodes: BTreeMap<IpAddr, usize>,
    /// The addresses of services and nodes.
    taken: Runs,
    /// Services without an address, because no address was free.
    waiting: BTreeSet<Key>,
}

// === impl Claims ===

impl Claims {
    /// Applies a change of a service. Returns the services to reconcile.
    pub(crate) fn follow(&mut self, change: &Change<'_, Service>) -> BTreeSet<Key> {
        let Some(key) = change.latest().map(|service| service.key()) else { return BTreeSet::new() };
        match change.new.filter(|service| is_ours(service)) {
            Some(service) => {
                let held = self.services.entry(key.clone()).or_default();
                // The status may have been written before this process started. If two services have one address, the
                // reconcile resolves the conflict.
                for address in addresses(service) {
                    self.taken.add(address);
                    if self.holders.entry(address).or_insert_with(|| key.clone()) == &key {
                        held.insert(address);
                    }
                }
                let before: BTreeSet<IpAddr> =
                    change.old.into_iter().flat_map(|old| addresses(old)).collect();
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
                // If only the type or the class changed, the status still has the addresses.
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
        for address in released {
            self.holders.remove(&address);
            self.release(address);
        }
        for address in addresses {
            self.holders.insert(*address, key.clone());
            self.taken.add(*address);
        }
    }

    /// Replaces the addresses of one node.
    pub(crate) fn set_node(&mut self, old: &[IpAddr], new: &[IpAddr]) {
        for address in new {
            *self.nodes.entry(*address).or_default() += 1;
            self.taken.add(*address);
        }
        for address in old {
            if let Some(count) = self.nodes.get_mut(address) {
                *count -= 1;
                if *count == 0 {
                    self.nodes.remove(address);
                    self.release(*address);
                }
            }
        }
    }

    fn release(&mut self, address: IpAddr) {
        if !self.holders.contains_key(&address) && !self.nodes.contains_key(&address) {
            self.taken.remove(address);
        }
    }

    /// Records that a service got no address.
    pub(crate) fn wait(&mut self, key: &Key) {
        self.waiting.insert(key.clone());
    }

    /// Whether neither another service nor a node has the address.
    pub(crate) fn is_free(&self, address: IpAddr, key: &Key) -> bool {
        self.holders.get(&address).is_none_or(|holder| holder == key) && !self.nodes.contains_key(&address)
    }

    /// The lowest address of the range that no service and no node has.
    pub(crate) fn first_free(&self, range: &IpNetwork) -> Option<IpAddr> {
        self.taken.first_free(range)
    }

    /// The addresses that the service holds.
    pub(crate) fn held(&self, key: &Key) -> impl Iterator<Item = IpAddr> {
        self.services.get(key).into_iter().flatten().copied()
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

    use super::super::service::CLASS;
    use super::*;

    fn service(name: &str, class: &str, ip: &str) -> Arc<Service> {
        let value = json!({"metadata": {"namespace": "n", "name": name},
            "spec": {"type": "LoadBalancer", "loadBalancerClass": class},
            "status": {"loadBalancer": {"ingress": [{"ip": ip, "ipMode": "VIP"}]}}});
        Arc::new(serde_json::from_value(value).unwrap())
    }

    #[test]
    fn an_address_belongs_to_one_service_until_it_is_released() {
        let (mut claims, ip) = (Claims::default(), "192.0.2.1".parse().unwrap());
        let (a, b) = (Key::new("n", "a"), Key::new("n", "b"));
        let (one, two) = (service("a", CLASS, "192.0.2.1"), service("b", CLASS, "192.0.2.1"));
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

    #[test]
    fn an_address_is_free_when_its_last_holder_leaves_it() {
        let (mut claims, range) = (Claims::default(), "192.0.2.1/32".parse().unwrap());
        let (ip, key) = (IpAddr::from([192, 0, 2, 1]), Key::new("n", "a"));
        claims.set(&key, &[ip].into());
        claims.set_node(&[], &[ip]);
        claims.set_node(&[], &[ip]);
        claims.set_node(&[ip], &[ip]);
        claims.set(&key, &BTreeSet::new());
        assert!(!claims.is_free(ip, &key) && claims.first_free(&range).is_none());
        claims.set_node(&[ip], &[]);
        assert_eq!(claims.first_free(&range), None, "the other node has it");
        claims.set_node(&[ip], &[]);
        assert!(claims.is_free(ip, &key) && claims.first_free(&range) == Some(ip));
    }
}

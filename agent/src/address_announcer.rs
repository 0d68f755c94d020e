//! Announces the load balancer addresses that the control plane assigned to this node.
//!
//! Addresses have a lifetime. The kernel removes an address that the agent does not renew, because another node takes
//! over the services of a node that is not ready. While the API server is unreachable, the agent renews its addresses.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use coracle_error_chain::chain;
use coracle_values::object::Key;
use k8s_openapi::api::core::v1::{Node, Service};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::service_cache::ServiceCache;

/// Class of the services, and the condition of their status whose message is the name of the node. The controller of
/// the address pool writes it.
const CLASS: &str = "coracle.dev/address-pool";
const ANNOUNCED: &str = "coracle.dev/Announced";
const CHOSEN: &str = "NodeChosen";
/// Lifetime of an address, and interval of its renewal.
const LIFETIME: Duration = Duration::from_secs(60);
const RENEWAL: Duration = Duration::from_secs(20);
/// Maximum addresses of one node.
const ADDRESSES_MAX: usize = 1024;

/// The task that holds the addresses.
pub(crate) struct AddressAnnouncer {
    node_name: String,
    services: ServiceCache,
    assigned: BTreeMap<Key, BTreeSet<IpAddr>>,
    held: BTreeSet<IpAddr>,
}

// === impl AddressAnnouncer ===

impl AddressAnnouncer {
    pub(crate) fn new(node_name: &str, services: ServiceCache) -> Self {
        let (assigned, held) = (BTreeMap::new(), BTreeSet::new());
        Self { node_name: node_name.to_owned(), services, assigned, held }
    }

    /// Runs until dropped. Without an address only changes of services wake it.
    pub(crate) async fn run(mut self, node: watch::Receiver<Option<Arc<Node>>>) {
        let changes = self.services.subscribe();
        let mut progress = self.services.changes();
        if progress.wait_for(|progress| progress.listed).await.is_err() {
            return;
        }
        changes.take();
        self.read_services(self.services.keys());
        loop {
            let own = node.borrow().as_deref().and_then(node_address);
            self.hold(own).await;
            let renewal = (!self.held.is_empty()).then(|| Instant::now() + RENEWAL);
            // A change of another service must neither visit all addresses nor delay the renewal.
            loop {
                // Cancel-safe: changed keys stay in the subscription until they are returned.
                let is_other = tokio::select! {
                    changed = changes.next() => self.read_services(changed),
                    () = sleep_until_optional(renewal) => true,
                };
                if is_other {
                    break;
                }
            }
        }
    }

    /// Reads services again. Returns whether addresses of this node changed.
    fn read_services(&mut self, changed: impl IntoIterator<Item = Key>) -> bool {
        let mut is_other = false;
        for key in changed {
            let state = self.services.state(&key);
            let addresses = state.map(|(service, _)| assigned(&service, &self.node_name)).unwrap_or_default();
            is_other |= assign(&mut self.assigned, key, addresses);
        }
        is_other
    }

    /// Adds or renews the assigned addresses, and removes the others.
    async fn hold(&mut self, node: Option<IpAddr>) {
        let wanted = wanted(&self.assigned);
        for address in self.held.difference(&wanted) {
            if let Err(error) = coracle_cni::withdraw_address(*address).await {
                tracing::warn!(%address, error = chain(&error), "cannot remove a load balancer address");
            }
        }
        for address in &wanted {
            if let Err(error) = coracle_cni::announce_address(*address, node, LIFETIME).await {
                tracing::warn!(%address, error = chain(&error), "cannot announce a load balancer address");
            }
        }
        self.held = wanted;
    }
}

/// Waits until the time. Without a time it never returns.
async fn sleep_until_optional(time: Option<Instant>) {
    match time {
        None => std::future::pending().await,
        Some(at) => tokio::time::sleep_until(at).await,
    }
}

/// The addresses that the node holds: at most [`ADDRESSES_MAX`] of those that are assigned to it.
fn wanted(assigned: &BTreeMap<Key, BTreeSet<IpAddr>>) -> BTreeSet<IpAddr> {
    assigned.values().flatten().copied().take(ADDRESSES_MAX).collect()
}

/// Sets the addresses of a service. Returns whether it had others.
fn assign(all: &mut BTreeMap<Key, BTreeSet<IpAddr>>, key: Key, addresses: BTreeSet<IpAddr>) -> bool {
    let has_some = !addresses.is_empty();
    let is_other = all.get(&key).map_or(has_some, |before| *before != addresses);
    match has_some {
        true => drop(all.insert(key, addresses)),
        false => drop(all.remove(&key)),
    }
    is_other
}

/// The addresses of a service that this node announces.
fn assigned(service: &Service, node_name: &str) -> BTreeSet<IpAddr> {
    let spec = service.spec.as_ref();
    let is_ours = spec.is_some_and(|spec| {
        spec.type_.as_deref() == Some("LoadBalancer") && spec.load_balancer_class.as_deref() == Some(CLASS)
    });
    let status = service.status.as_ref().filter(|_| is_ours);
    let mut conditions = status.and_then(|status| status.conditions.as_ref()).into_iter().flatten();
    let is_chosen =
        conditions.any(|one| one.type_ == ANNOUNCED && one.reason == CHOSEN && one.message == node_name);
    let balancer = status.filter(|_| is_chosen).and_then(|status| status.load_balancer.as_ref());
    let entries = balancer.and_then(|balancer| balancer.ingress.as_ref()).into_iter().flatten();
    entries.filter_map(|entry| entry.ip.as_deref()?.parse().ok()).filter(may_be_announced).collect()
}

/// Whether the address can be used in the nodes' network.
fn may_be_announced(address: &IpAddr) -> bool {
    let is_special = match address {
        IpAddr::V4(ip) => ip.is_link_local() || ip.is_broadcast(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    };
    !is_special && !address.is_loopback() && !address.is_unspecified() && !address.is_multicast()
}

/// The first internal address of the node.
fn node_address(node: &Node) -> Option<IpAddr> {
    let all = node.status.as_ref()?.addresses.as_ref()?;
    all.iter()
        .filter(|address| address.type_ == "InternalIP")
        .find_map(|address| address.address.parse().ok())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_node_announces_the_addresses_that_it_was_chosen_for() {
        let of = |class: &str, node: &str, ip: &str| {
            let condition = json!({"type": ANNOUNCED, "status": "True", "reason": CHOSEN, "message": node,
                "lastTransitionTime": "2026-01-01T00:00:00Z"});
            let service = json!({"metadata": {}, "spec": {"type": "LoadBalancer", "loadBalancerClass": class},
                "status": {"loadBalancer": {"ingress": [{"ip": ip, "ipMode": "VIP"}]}, "conditions": [condition]}});
            assigned(&serde_json::from_value(service).unwrap(), "here").len()
        };
        assert_eq!(of(CLASS, "here", "192.0.2.1"), 1);
        assert_eq!(of(CLASS, "there", "192.0.2.1"), 0);
        assert_eq!(of("example.com/other", "here", "192.0.2.1"), 0);
        assert_eq!(of(CLASS, "here", "127.0.0.1"), 0);
    }

    #[test]
    fn only_a_change_of_its_own_addresses_concerns_the_node() {
        let (mut all, key) = (BTreeMap::new(), Key::new("n", "s"));
        let some = BTreeSet::from(["192.0.2.1".parse().unwrap()]);
        assert!(!assign(&mut all, key.clone(), BTreeSet::new()), "another service");
        assert!(assign(&mut all, key.clone(), some.clone()));
        assert!(!assign(&mut all, key.clone(), some));
        assert!(assign(&mut all, key, BTreeSet::new()) && all.is_empty());
    }

    #[test]
    fn a_node_holds_a_limited_number_of_addresses() {
        let address = |number: u32| IpAddr::from(std::net::Ipv4Addr::from(0x0a00_0000 + number));
        let service = |first: u32| (first..first + 600).map(address).collect::<BTreeSet<_>>();
        let mut all = BTreeMap::from([(Key::new("n", "a"), service(0))]);
        assert_eq!(wanted(&all).len(), 600);
        assign(&mut all, Key::new("n", "b"), service(600));
        assert_eq!(wanted(&all).len(), 1024);
    }
}

//! The ports that LoadBalancer services request at the nodes' addresses, and the service that gets each port.
//!
//! A service that serves a port keeps it. Otherwise the oldest service gets the port. So an older service that adds the
//! port, or becomes a load balancer, does not take the port from another service.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::plan::{self, Port, PortRange};
use crate::cache::Change;
use crate::object::{Key, ObjectExt, Service};

/// The order of claims on a port: services that serve the port come first. The other services are sorted by creation
/// time and name.
type Rank = (bool, Option<Time>, Key);

/// The claims of all LoadBalancer services that this controller serves.
#[derive(Debug, Default)]
pub(crate) struct Claims {
    ports: HashMap<Port, BTreeSet<Rank>>,
    services: BTreeMap<Key, Claim>,
}

#[derive(Debug, Default)]
struct Claim {
    uid: String,
    ports: Vec<(Port, Rank)>,
    /// Whether the external traffic policy is Local.
    is_local: bool,
}

// === impl Claims ===

impl Claims {
    /// Applies a change of a service. Returns the services to reconcile: this service, and the services that wait for
    /// its ports. A service that is being deleted keeps its ports until its status is empty, because the nodes serve
    /// the ports in the status.
    pub(crate) fn follow(&mut self, change: &Change<'_, Service>, reserved: &[PortRange]) -> BTreeSet<Key> {
        let Some(key) = change.latest().map(|service| service.key()) else { return BTreeSet::new() };
        let is_claiming =
            |service: &Arc<Service>| !service.is_being_deleted() || !plan::served(service).is_empty();
        let new = change.new.filter(|service| plan::is_ours(service) && is_claiming(service));
        let old = self.services.remove(&key);
        let new = new.map(|service| claim(service, old.as_ref(), reserved));
        let mut changed = BTreeSet::new();
        if old.is_some() || new.is_some() {
            changed.insert(key.clone());
        }
        for (port, rank) in old.iter().flat_map(|claim| &claim.ports) {
            if let Some(ranks) = self.ports.get_mut(port) {
                ranks.remove(rank);
                changed.extend(ranks.first().map(|(.., next)| next.clone()));
                if ranks.is_empty() {
                    self.ports.remove(port);
                }
            }
        }
        if let Some(new) = new {
            for (port, rank) in &new.ports {
                self.ports.entry(port.clone()).or_default().insert(rank.clone());
            }
            self.services.insert(key, new);
        }
        changed
    }

    /// The service that has a port, unless it is `except`.
    pub(crate) fn holder(&self, port: &Port, except: &Key) -> Option<Key> {
        let (.., first) = self.ports.get(port)?.first()?;
        (first != except).then(|| first.clone())
    }

    /// All LoadBalancer services that this controller serves.
    pub(crate) fn all(&self) -> Vec<Key> {
        self.services.keys().cloned().collect()
    }

    /// Whether this is a LoadBalancer service with the external traffic policy Local.
    pub(crate) fn is_local(&self, service: &Key) -> bool {
        self.services.get(service).is_some_and(|claim| claim.is_local)
    }
}

/// The claim of a service. While no node is ready, the status of the service is empty. So ports that the service served
/// according to its former claim still count as served. A service with a reserved port claims no port, because the
/// whole service is refused.
fn claim(service: &Arc<Service>, old: Option<&Claim>, reserved: &[PortRange]) -> Claim {
    let old = old.filter(|old| old.uid == service.uid());
    let held = old.into_iter().flat_map(|old| &old.ports).filter(|(_, (is_waiting, ..))| !is_waiting);
    let mut held: BTreeSet<Port> = held.map(|(port, _)| port.clone()).collect();
    held.extend(plan::served(service));
    let ports: BTreeSet<Port> =
        plan::ports(service).filter(|_| plan::reserved(service, reserved).is_none()).collect();
    let rank = |port: Port| {
        let rank = (!held.contains(&port), service.metadata.creation_timestamp.clone(), service.key());
        (port, rank)
    };
    Claim {
        uid: service.uid().to_owned(),
        ports: ports.into_iter().map(rank).collect(),
        is_local: plan::is_local(service),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn service(name: &str, created: u32, ports: &[u16], served: &[u16]) -> Arc<Service> {
        let list = |ports: &[u16]| -> Vec<Value> {
            ports.iter().map(|port| json!({"port": port, "protocol": "TCP"})).collect()
        };
        let ingress = json!([{"ip": "192.0.2.1", "ipMode": "Proxy", "ports": list(served)}]);
        let value = json!({
            "metadata": {"namespace": "n", "name": name, "uid": name, "creationTimestamp": format!("2026-01-01T00:00:{created:02}Z")},
            "spec": {"type": "LoadBalancer", "ports": list(ports)},
            "status": {"loadBalancer": {"ingress": ingress}},
        });
        Arc::new(serde_json::from_value(value).unwrap())
    }

    fn put(claims: &mut Claims, old: Option<&Arc<Service>>, new: Option<&Arc<Service>>) -> Vec<String> {
        let changed = claims.follow(&Change { old, new }, &[22..=22]);
        changed.into_iter().map(|key| key.name).collect()
    }

    fn holder(claims: &Claims, port: u16) -> Option<String> {
        claims.holder(&("TCP".to_owned(), port), &Key::new("", "")).map(|key| key.name)
    }

    #[test]
    fn the_oldest_service_gets_a_port_unless_another_one_serves_it() {
        let mut claims = Claims::default();
        let old = service("old", 1, &[80], &[]);
        put(&mut claims, None, Some(&service("young", 2, &[80], &[])));
        put(&mut claims, None, Some(&old));
        assert_eq!(holder(&claims, 80).as_deref(), Some("old"));
        put(&mut claims, None, Some(&service("young", 2, &[80], &[80])));
        assert_eq!(holder(&claims, 80).as_deref(), Some("young"), "it serves the port");
        // A service that serves another port has no advantage on this port.
        put(&mut claims, None, Some(&service("old", 1, &[443, 80], &[443])));
        assert_eq!(holder(&claims, 80).as_deref(), Some("young"));
        assert_eq!(claims.holder(&("UDP".to_owned(), 80), &Key::new("", "")), None);
    }

    #[test]
    fn a_service_keeps_its_ports_while_no_node_is_ready() {
        let mut claims = Claims::default();
        let (serving, bare) = (service("young", 2, &[80], &[80]), service("young", 2, &[80], &[]));
        put(&mut claims, None, Some(&serving));
        put(&mut claims, None, Some(&service("old", 1, &[80], &[])));
        put(&mut claims, Some(&serving), Some(&bare));
        assert_eq!(holder(&claims, 80).as_deref(), Some("young"));
        let none = service("young", 2, &[], &[]);
        put(&mut claims, Some(&bare), Some(&none));
        put(&mut claims, Some(&none), Some(&bare));
        assert_eq!(holder(&claims, 80).as_deref(), Some("old"), "the first service released the port");
    }

    #[test]
    fn the_next_service_is_reconciled_when_a_port_becomes_free() {
        let mut claims = Claims::default();
        let (one, two) = (service("one", 1, &[80], &[80]), service("two", 2, &[80], &[]));
        assert_eq!(put(&mut claims, None, Some(&one)), ["one"]);
        assert_eq!(put(&mut claims, None, Some(&two)), ["two"]);
        assert_eq!(put(&mut claims, Some(&one), None), ["one", "two"]);
        assert_eq!(holder(&claims, 80).as_deref(), Some("two"));
        assert_eq!(put(&mut claims, Some(&two), None), ["two"]);
        assert!(claims.ports.is_empty() && claims.services.is_empty());
    }

    #[test]
    fn a_service_that_is_being_deleted_keeps_its_ports_while_nodes_serve_them() {
        let mut claims = Claims::default();
        let one = service("one", 1, &[80], &[80]);
        put(&mut claims, None, Some(&one));
        put(&mut claims, None, Some(&service("two", 2, &[80], &[])));
        let deleted = |served: &[u16]| {
            let mut deleted = Service::clone(&service("one", 1, &[80], served));
            deleted.metadata.deletion_timestamp = deleted.metadata.creation_timestamp.clone();
            Arc::new(deleted)
        };
        let (ending, empty) = (deleted(&[80]), deleted(&[]));
        put(&mut claims, Some(&one), Some(&ending));
        assert_eq!(holder(&claims, 80).as_deref(), Some("one"));
        assert_eq!(put(&mut claims, Some(&ending), Some(&empty)), ["one", "two"]);
        assert_eq!(holder(&claims, 80).as_deref(), Some("two"));
    }

    #[test]
    fn a_service_with_a_reserved_port_claims_no_other_port() {
        let mut claims = Claims::default();
        put(&mut claims, None, Some(&service("bad", 1, &[22, 80], &[])));
        assert_eq!(holder(&claims, 80), None);
        assert_eq!(claims.all(), [Key::new("n", "bad")]);
    }
}

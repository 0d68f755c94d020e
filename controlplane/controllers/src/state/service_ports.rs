//! Index of the services by node port. The cache of services updates the index with each change.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::cache::Change;
use crate::object::{Key, ObjectExt, Service};

/// The services of each node port.
#[derive(Debug, Default)]
pub(crate) struct ServicePorts {
    services: Mutex<BTreeMap<u16, BTreeSet<Key>>>,
}

/// The node ports of a service, including the port of its health checks. A port with several protocols is in the set
/// once.
fn node_ports(service: &Service) -> BTreeSet<u16> {
    let spec = &service.spec;
    let of_ports = spec.ports.iter().flatten().filter_map(|port| port.node_port);
    let all = of_ports.chain(spec.health_check_node_port);
    all.filter_map(|port| u16::try_from(port).ok()).filter(|port| *port != 0).collect()
}

// === impl ServicePorts ===

impl ServicePorts {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<u16, BTreeSet<Key>>> {
        self.services.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Applies a change of a service. Returns the ports whose services may have changed.
    pub(crate) fn follow(&self, change: &Change<'_, Service>) -> BTreeSet<u16> {
        let of =
            |service: Option<&Arc<Service>>| service.map(|service| node_ports(service)).unwrap_or_default();
        let (old, new) = (of(change.old), of(change.new));
        if old == new && change.old.map(|service| service.uid()) == change.new.map(|service| service.uid()) {
            return BTreeSet::new();
        }
        let Some(key) = change.latest().map(|service| service.key()) else { return BTreeSet::new() };
        let mut services = self.lock();
        for port in &old {
            if let Some(keys) = services.get_mut(port) {
                keys.remove(&key);
                if keys.is_empty() {
                    services.remove(port);
                }
            }
        }
        for port in &new {
            services.entry(*port).or_default().insert(key.clone());
        }
        old.union(&new).copied().collect()
    }

    /// The services with this node port.
    pub(crate) fn services(&self, port: u16) -> Vec<Key> {
        self.lock().get(&port).into_iter().flatten().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn a_node_port_leads_to_its_services() {
        let service = |name: &str, spec: Value| -> Arc<Service> {
            let value = json!({"metadata": {"namespace": "n", "name": name}, "spec": spec});
            Arc::new(serde_json::from_value(value).unwrap())
        };
        let index = ServicePorts::default();
        let ports = json!([{"port": 53, "protocol": "TCP", "nodePort": 30053},
            {"port": 53, "protocol": "UDP", "nodePort": 30053}, {"port": 80}]);
        let one = service("a", json!({"ports": ports, "healthCheckNodePort": 30054}));
        let other = service("b", json!({"ports": [{"port": 80, "nodePort": 30054}]}));
        assert_eq!(index.follow(&Change { old: None, new: Some(&one) }), [30053, 30054].into());
        assert_eq!(index.follow(&Change { old: None, new: Some(&other) }), [30054].into());
        assert!(index.follow(&Change { old: Some(&one), new: Some(&one) }).is_empty(), "nothing changed");
        assert_eq!(index.services(30054), ["a", "b"].map(|name| Key::new("n", name)));
        let none = service("a", json!({}));
        assert_eq!(index.follow(&Change { old: Some(&one), new: Some(&none) }), [30053, 30054].into());
        assert_eq!((index.services(30053), index.services(30054)), (Vec::new(), vec![Key::new("n", "b")]));
    }
}

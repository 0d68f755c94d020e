//! Index of the services by node port. The cache of services updates the index with each change.

use std::collections::BTreeSet;

use super::service_index::ServiceIndex;
use crate::cache::Change;
use crate::object::{Key, Service};

/// The services of each node port.
#[derive(Debug, Default)]
pub(crate) struct ServicePorts(ServiceIndex<u16>);

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
    /// Applies a change of a service. Returns the ports whose services may have changed.
    pub(crate) fn follow(&self, change: &Change<'_, Service>) -> BTreeSet<u16> {
        self.0.follow(change, node_ports)
    }

    /// The services with this node port.
    pub(crate) fn services(&self, port: u16) -> Vec<Key> {
        self.0.services(port)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

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

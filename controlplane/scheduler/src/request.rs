//! What a pod asks of its node.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::ResourceRequirements;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use crate::object::{Container, PodSpec};
use crate::quantity::{milli, units};

/// Amounts of resources: CPU in thousandths, memory and storage in bytes, others in units.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Resources {
    pub(crate) cpu: i64,
    pub(crate) memory: i64,
    pub(crate) storage: i64,
    pub(crate) pods: i64,
    pub(crate) others: BTreeMap<String, i64>,
}

/// A port of the node that a pod takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HostPort {
    pub(crate) address: String,
    pub(crate) protocol: String,
    pub(crate) port: i32,
}

impl Resources {
    /// The amounts in a map of the API.
    pub(crate) fn of(map: Option<&BTreeMap<String, Quantity>>) -> Self {
        let mut resources = Self::default();
        for (name, quantity) in map.into_iter().flatten() {
            match name.as_str() {
                "cpu" => resources.cpu = milli(quantity),
                "memory" => resources.memory = units(quantity),
                "ephemeral-storage" => resources.storage = units(quantity),
                "pods" => resources.pods = units(quantity),
                other => drop(resources.others.insert(other.to_owned(), units(quantity))),
            }
        }
        resources
    }

    /// Adds `other` as often as `times` says (1 or -1).
    pub(crate) fn add(&mut self, other: &Self, times: i64) {
        self.cpu += times * other.cpu;
        self.memory += times * other.memory;
        self.storage += times * other.storage;
        self.pods += times * other.pods;
        for (name, amount) in &other.others {
            *self.others.entry(name.clone()).or_default() += times * amount;
        }
    }

    /// The larger of the two in each resource.
    fn max(mut self, other: &Self) -> Self {
        self.cpu = self.cpu.max(other.cpu);
        self.memory = self.memory.max(other.memory);
        self.storage = self.storage.max(other.storage);
        for (name, amount) in &other.others {
            let own = self.others.entry(name.clone()).or_default();
            *own = (*own).max(*amount);
        }
        self
    }
}

fn requests(resources: Option<&ResourceRequirements>) -> Resources {
    Resources::of(resources.and_then(|resources| resources.requests.as_ref()))
}

/// All that the pod asks for. Init containers run one after another, before the others; those that go on running
/// beside them count with both. What is asked for the pod as a whole replaces the sum.
pub(crate) fn of_pod(spec: &PodSpec) -> Resources {
    let mut total = Resources::default();
    for container in &spec.containers {
        total.add(&requests(container.resources.as_ref()), 1);
    }
    let mut beside = Resources::default();
    let mut peak = Resources::default();
    for container in spec.init_containers.iter().flatten() {
        let own = requests(container.resources.as_ref());
        if container.restart_policy.as_deref() == Some("Always") {
            beside.add(&own, 1);
            peak = peak.max(&beside);
        } else {
            let mut now = beside.clone();
            now.add(&own, 1);
            peak = peak.max(&now);
        }
    }
    total.add(&beside, 1);
    total = total.max(&peak);
    if let Some(asked) = spec.resources.as_ref().and_then(|resources| resources.requests.as_ref()) {
        let whole = Resources::of(Some(asked));
        total.cpu = if asked.contains_key("cpu") { whole.cpu } else { total.cpu };
        total.memory = if asked.contains_key("memory") { whole.memory } else { total.memory };
    }
    total.add(&Resources::of(spec.overhead.as_ref()), 1);
    total.pods = 1;
    total
}

/// The node's ports that the pod takes.
pub(crate) fn host_ports(spec: &PodSpec) -> Vec<HostPort> {
    let sidecars = spec.init_containers.iter().flatten();
    let sidecars = sidecars.filter(|container| container.restart_policy.as_deref() == Some("Always"));
    spec.containers.iter().chain(sidecars).flat_map(|container| ports(container, spec.host_network)).collect()
}

fn ports(container: &Container, host_network: Option<bool>) -> Vec<HostPort> {
    let mut taken = Vec::new();
    for port in container.ports.iter().flatten() {
        // With the host's network every port is the node's, even if the server did not write it so.
        let own = (host_network == Some(true)).then_some(port.container_port);
        let Some(number) = port.host_port.filter(|port| *port > 0).or(own) else { continue };
        taken.push(HostPort {
            address: port.host_ip.clone().filter(|ip| !ip.is_empty()).unwrap_or_else(|| "0.0.0.0".to_owned()),
            protocol: port.protocol.clone().unwrap_or_else(|| "TCP".to_owned()),
            port: number,
        });
    }
    taken
}

impl HostPort {
    /// Whether one of the two ports shuts the other out.
    pub(crate) fn conflicts(&self, other: &Self) -> bool {
        let all = |port: &Self| port.address == "0.0.0.0" || port.address == "::";
        self.port == other.port
            && self.protocol == other.protocol
            && (all(self) || all(other) || self.address == other.address)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn cpu(spec: serde_json::Value) -> i64 {
        of_pod(&serde_json::from_value(spec).unwrap()).cpu
    }

    fn container(cpu: &str) -> serde_json::Value {
        json!({"resources": {"requests": {"cpu": cpu}}})
    }

    fn sidecar(cpu: &str) -> serde_json::Value {
        json!({"restartPolicy": "Always", "resources": {"requests": {"cpu": cpu}}})
    }

    #[test]
    fn containers_add_up_and_init_containers_set_a_peak() {
        assert_eq!(cpu(json!({"containers": [container("1"), container("500m")]})), 1500);
        assert_eq!(cpu(json!({"containers": [container("1")], "initContainers": [container("3")]})), 3000);
        let init = [sidecar("1"), container("2"), sidecar("1")];
        assert_eq!(cpu(json!({"containers": [container("2")], "initContainers": init})), 4000);
        assert_eq!(cpu(json!({"containers": [container("1")], "overhead": {"cpu": "100m"}})), 1100);
        let whole = json!({"requests": {"cpu": "4"}});
        assert_eq!(cpu(json!({"containers": [container("1")], "resources": whole})), 4000);
    }

    #[test]
    fn a_port_of_all_addresses_shuts_every_other_out() {
        let port = |address: &str, port| HostPort { address: address.into(), protocol: "TCP".into(), port };
        assert!(port("0.0.0.0", 80).conflicts(&port("10.0.0.1", 80)));
        assert!(!port("10.0.0.2", 80).conflicts(&port("10.0.0.1", 80)));
        assert!(!port("0.0.0.0", 80).conflicts(&port("0.0.0.0", 81)));
    }
}

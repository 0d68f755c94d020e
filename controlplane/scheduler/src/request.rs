//! What a pod requests of its node: resources and host ports.

use coracle_values::pod_resources::{
    ContainerResources, PodResources, Resources, StatusResources, is_resize_infeasible,
};

use crate::object::{Container, ContainerStatus, Pod, PodSpec};

/// A host port of a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HostPort {
    pub(crate) address: String,
    pub(crate) protocol: String,
    pub(crate) port: i32,
}

/// The effective requests of a pod. While a resize is pending, the larger of the desired and the actual ones.
pub(crate) fn of_pod(pod: &Pod) -> Resources {
    let (spec, status) = (&pod.spec, &pod.status);
    let is_infeasible = is_resize_infeasible(status.conditions.as_ref(), pod.metadata.generation);
    let resources = |container, statuses| resources(container, statuses, is_infeasible);
    let inits = spec.init_containers.iter().flatten();
    PodResources {
        containers: spec.containers.iter().map(|c| resources(c, &status.container_statuses)).collect(),
        init_containers: inits.map(|c| resources(c, &status.init_container_statuses)).collect(),
        pod_level: spec.resources.as_ref(),
        overhead: spec.overhead.as_ref(),
    }
    .requests()
}

fn resources<'a>(
    container: &'a Container,
    statuses: &'a [ContainerStatus],
    is_infeasible: bool,
) -> ContainerResources<'a> {
    let status = statuses.iter().find(|status| status.name == container.name);
    let status = status.and_then(|status| {
        let allocated = status.allocated_resources.as_ref();
        Some(StatusResources { actual: status.resources.as_ref()?, allocated, is_infeasible })
    });
    ContainerResources { resources: container.resources.as_ref(), is_sidecar: is_sidecar(container), status }
}

fn is_sidecar(container: &Container) -> bool {
    container.restart_policy.as_deref() == Some("Always")
}

/// The host ports of a pod's containers and sidecars.
pub(crate) fn host_ports(spec: &PodSpec) -> Vec<HostPort> {
    let sidecars = spec.init_containers.iter().flatten();
    let sidecars = sidecars.filter(|container| is_sidecar(container));
    spec.containers.iter().chain(sidecars).flat_map(|container| ports(container, spec.host_network)).collect()
}

fn ports(container: &Container, host_network: Option<bool>) -> Vec<HostPort> {
    let mut taken = Vec::new();
    for port in container.ports.iter().flatten() {
        // With `hostNetwork` each container port is a host port. The API server's defaults say so, too.
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
    /// Whether the two ports cannot be on one node.
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

    #[test]
    fn a_port_on_all_addresses_conflicts_with_the_same_port_on_one() {
        let port = |address: &str, port| HostPort { address: address.into(), protocol: "TCP".into(), port };
        assert!(port("0.0.0.0", 80).conflicts(&port("10.0.0.1", 80)));
        assert!(!port("10.0.0.2", 80).conflicts(&port("10.0.0.1", 80)));
        assert!(!port("0.0.0.0", 80).conflicts(&port("0.0.0.0", 81)));
    }
}

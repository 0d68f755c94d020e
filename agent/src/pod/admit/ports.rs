//! Check of host ports against those of other pods.

use k8s_openapi::api::core::v1::{ContainerPort, Pod};

use super::facts::{Facts, HostPort, refuse};
use crate::pod::state::{Verdict, is_sidecar};

pub(super) fn check(facts: &Facts<'_>) -> Result<(), Verdict> {
    let clash =
        host_ports(facts.pod).any(|wanted| facts.used.ports.iter().any(|used| overlap(&wanted, used)));
    if clash {
        let message = "Pod was rejected: Predicate NodePorts failed: node(s) didn't have free ports for the requested pod ports";
        return Err(refuse("NodePorts", message));
    }
    Ok(())
}

/// The host ports of a pod's containers and sidecars.
pub(crate) fn host_ports(pod: &Pod) -> impl Iterator<Item = HostPort> {
    let spec = pod.spec.iter();
    let containers = spec.flat_map(|spec| {
        spec.init_containers.iter().flatten().filter(|c| is_sidecar(c)).chain(&spec.containers)
    });
    containers.flat_map(|c| c.ports.iter().flatten()).filter_map(host_port)
}

fn host_port(port: &ContainerPort) -> Option<HostPort> {
    Some(HostPort {
        port: port.host_port.filter(|p| *p > 0)?,
        ip: port.host_ip.clone().filter(|ip| ip != "0.0.0.0" && ip != "::").unwrap_or_default(),
        protocol: port.protocol.clone().unwrap_or_else(|| "TCP".to_owned()),
    })
}

fn overlap(a: &HostPort, b: &HostPort) -> bool {
    let same_address = a.ip == b.ip || a.ip.is_empty() || b.ip.is_empty();
    a.port == b.port && a.protocol == b.protocol && same_address
}

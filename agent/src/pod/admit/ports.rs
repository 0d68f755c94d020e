//! Checks that no other pod of the node has the host ports of a pod.

use std::collections::HashSet;

use k8s_openapi::api::core::v1::{ContainerPort, Pod};

use super::input::{AdmissionInput, HostPort, refuse};
use crate::pod::state::{Verdict, is_sidecar};

pub(super) fn check(input: &AdmissionInput<'_>) -> Result<(), Verdict> {
    let wanted: Vec<HostPort> = host_ports(input.pod).collect();
    if have_common_port(&wanted, &input.used.ports) {
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

/// Whether two lists have the same port of a common address. In linear time: a pod can have very many ports.
fn have_common_port(wanted: &[HostPort], used: &[HostPort]) -> bool {
    if wanted.is_empty() {
        return false;
    }
    let numbers: HashSet<(i32, &str)> = used.iter().map(|port| (port.port, &*port.protocol)).collect();
    let sockets: HashSet<(i32, &str, &str)> =
        used.iter().map(|port| (port.port, &*port.protocol, &*port.ip)).collect();
    wanted.iter().any(|port| {
        let (number, protocol) = (port.port, &*port.protocol);
        match &*port.ip {
            "" => numbers.contains(&(number, protocol)),
            ip => sockets.contains(&(number, protocol, ip)) || sockets.contains(&(number, protocol, "")),
        }
    })
}

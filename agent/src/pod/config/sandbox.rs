//! CRI configuration of a pod's sandbox.

use std::path::Path;

use coracle_proto::cri;
use k8s_openapi::api::core::v1::{Pod, PodSpec};

use super::{hostname, identity};
use crate::pod::security;

/// Inputs of a sandbox's configuration besides its pod.
pub(crate) struct SandboxInputs<'a> {
    pub(crate) log_dir: &'a Path,
    pub(crate) cgroup_parent: &'a str,
    pub(crate) cluster_domain: &'a str,
    pub(crate) dns: cri::DnsConfig,
    /// Id mapping of a pod with a user namespace.
    pub(crate) users: Option<cri::IdMapping>,
}

/// The name of a pod's directory under the log directory.
pub(crate) fn log_dir_name(pod: &Pod) -> String {
    let meta = &pod.metadata;
    let part = |s: &Option<String>| s.clone().unwrap_or_default();
    format!("{}_{}_{}", part(&meta.namespace), part(&meta.name), part(&meta.uid))
}

/// The configuration of a pod's sandbox.
pub(crate) fn config(
    pod: &Pod,
    spec: &PodSpec,
    attempt: u32,
    inputs: SandboxInputs<'_>,
) -> cri::PodSandboxConfig {
    let meta = &pod.metadata;
    let mut labels = identity(pod);
    labels.extend(meta.labels.iter().flatten().map(|(k, v)| (k.clone(), v.clone())));
    let (short, domain) = hostname(pod, inputs.cluster_domain);
    let full = match domain {
        Some(domain) if spec.set_hostname_as_fqdn == Some(true) => format!("{short}.{domain}"),
        _ => short,
    };
    let host_network = spec.host_network == Some(true);
    let sysctls = spec.security_context.iter().flat_map(|c| c.sysctls.iter().flatten());
    cri::PodSandboxConfig {
        metadata: Some(cri::PodSandboxMetadata {
            name: meta.name.clone().unwrap_or_default(),
            uid: meta.uid.clone().unwrap_or_default(),
            namespace: meta.namespace.clone().unwrap_or_default(),
            attempt,
        }),
        hostname: if host_network { String::new() } else { full },
        log_directory: inputs.log_dir.join(log_dir_name(pod)).to_string_lossy().into_owned(),
        dns_config: Some(inputs.dns),
        port_mappings: if host_network { Vec::new() } else { port_mappings(spec) },
        labels,
        annotations: meta.annotations.iter().flatten().map(|(k, v)| (k.clone(), v.clone())).collect(),
        linux: Some(cri::LinuxPodSandboxConfig {
            cgroup_parent: inputs.cgroup_parent.to_owned(),
            security_context: Some(security::sandbox(spec, inputs.users)),
            sysctls: sysctls.map(|s| (s.name.clone(), s.value.clone())).collect(),
            ..cri::LinuxPodSandboxConfig::default()
        }),
        windows: None,
    }
}

fn port_mappings(spec: &PodSpec) -> Vec<cri::PortMapping> {
    let sidecars = spec.init_containers.iter().flatten().filter(|c| crate::pod::state::is_sidecar(c));
    let ports = sidecars.chain(&spec.containers).flat_map(|c| c.ports.iter().flatten());
    ports
        .map(|port| cri::PortMapping {
            protocol: match port.protocol.as_deref() {
                Some("UDP") => cri::Protocol::Udp.into(),
                Some("SCTP") => cri::Protocol::Sctp.into(),
                _ => cri::Protocol::Tcp.into(),
            },
            container_port: port.container_port,
            host_port: port.host_port.unwrap_or_default(),
            host_ip: port.host_ip.clone().unwrap_or_default(),
        })
        .collect()
}

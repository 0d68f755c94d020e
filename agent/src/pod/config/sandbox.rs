//! CRI configuration of a pod's sandbox.

use std::collections::HashMap;
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
    // As upstream, the agent's labels with the pod's identity replace labels of the pod's author. The agent finds
    // sandboxes by its own labels.
    let own = meta.labels.iter().flatten().map(|(k, v)| (k.clone(), v.clone()));
    let mut labels: HashMap<String, String> = own.collect();
    labels.extend(identity(pod));
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

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

    use super::*;
    use crate::pod::config::{POD_NAME, POD_NAMESPACE, POD_UID};

    #[test]
    fn labels_of_a_pod_do_not_replace_its_identity() {
        let labels =
            [(POD_NAME, "etcd"), (POD_NAMESPACE, "kube-system"), (POD_UID, "victim"), ("app", "web")];
        let labels = labels.map(|(key, value)| (key.to_owned(), value.to_owned()));
        let metadata = ObjectMeta {
            name: Some("web".to_owned()),
            namespace: Some("shop".to_owned()),
            uid: Some("own".to_owned()),
            labels: Some(BTreeMap::from(labels)),
            ..ObjectMeta::default()
        };
        let pod = Pod { metadata, ..Pod::default() };
        let inputs = SandboxInputs {
            log_dir: Path::new("/logs"),
            cgroup_parent: "/pods",
            cluster_domain: "cluster.local",
            dns: cri::DnsConfig::default(),
            users: None,
        };
        let made = config(&pod, &PodSpec::default(), 0, inputs).labels;
        let value = |key: &str| made.get(key).map(String::as_str);
        assert_eq!([POD_NAME, POD_NAMESPACE, POD_UID].map(value), [Some("web"), Some("shop"), Some("own")]);
        assert_eq!(value("app"), Some("web"), "other labels are kept");
    }
}

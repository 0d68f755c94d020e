//! The network attachment of a pod: its names as `CNI_ARGS`, and its capabilities by the CNI conventions.

mod requested;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;

use coracle_cni::{Attachment, PortMapping, Protocol};
use coracle_proto::cri;
use coracle_quantity::Quantity;
use serde_json::{Value, json};

use crate::error::Error;

pub(crate) use requested::refuse as refuse_requested;

/// Name of the interface in every pod.
pub(crate) const INTERFACE: &str = "eth0";

/// The attachment of a pod, or the error of an invalid configuration.
pub(crate) fn of(id: &str, netns: PathBuf, config: &cri::PodSandboxConfig) -> Result<Attachment, Error> {
    let metadata = config.metadata.clone().unwrap_or_default();
    let args = [
        ("IgnoreUnknown", "1".to_owned()),
        ("K8S_POD_NAMESPACE", metadata.namespace),
        ("K8S_POD_NAME", metadata.name),
        ("K8S_POD_INFRA_CONTAINER_ID", id.to_owned()),
        ("K8S_POD_UID", metadata.uid),
    ];
    Ok(Attachment {
        id: id.to_owned(),
        netns,
        process: None,
        ifname: INTERFACE.to_owned(),
        args: args.map(|(key, value)| (key.to_owned(), value)).into(),
        ports: ports(&config.port_mappings)?,
        capabilities: capabilities(config)?,
    })
}

/// The capabilities, with the names that containerd uses.
fn capabilities(config: &cri::PodSandboxConfig) -> Result<BTreeMap<String, Value>, Error> {
    let mut capabilities = BTreeMap::new();
    capabilities.insert("io.kubernetes.cri.pod-annotations".to_owned(), json!(config.annotations));
    if let Some(dns) = &config.dns_config {
        let dns = json!({"servers": dns.servers, "searches": dns.searches, "options": dns.options});
        capabilities.insert("dns".to_owned(), dns);
    }
    if let Some(parent) = config.linux.as_ref().map(|linux| &linux.cgroup_parent).filter(|p| !p.is_empty()) {
        capabilities.insert("cgroupPath".to_owned(), json!(parent));
    }
    let mut limits = serde_json::Map::new();
    for way in ["ingress", "egress"] {
        let name = format!("kubernetes.io/{way}-bandwidth");
        if let Some(text) = config.annotations.get(&name) {
            limits.insert(format!("{way}Rate"), json!(rate(text).ok_or_else(|| wrong_rate(&name, text))?));
            // The largest burst of a token bucket: the annotation limits only the rate.
            limits.insert(format!("{way}Burst"), json!(u64::from(u32::MAX)));
        }
    }
    if !limits.is_empty() {
        capabilities.insert("bandwidth".to_owned(), limits.into());
    }
    capabilities.extend(requested::capabilities(&config.annotations)?);
    Ok(capabilities)
}

fn wrong_rate(name: &str, text: &str) -> Error {
    Error::invalid("annotations", format!("{name}: {text:?} is not a quantity from 1k to 1P"))
}

/// Parses a rate in bits per second: a Kubernetes quantity from 1k to 1P, rounded up.
fn rate(text: &str) -> Option<u64> {
    let rate = u64::try_from(Quantity::parse(text).ok()?.value()).ok()?;
    (1_000..=1_000_000_000_000_000).contains(&rate).then_some(rate)
}

/// The mappings with a host port.
fn ports(mappings: &[cri::PortMapping]) -> Result<Vec<PortMapping>, Error> {
    let number = |port: i32| {
        u16::try_from(port)
            .map_err(|_range| Error::invalid("port_mappings", format!("{port} is not a port number")))
    };
    let mut ports = Vec::new();
    for mapping in mappings.iter().filter(|mapping| mapping.host_port != 0) {
        let host_ip: Option<IpAddr> =
            match mapping.host_ip.as_str() {
                "" => None,
                text => Some(text.parse().map_err(|_not| {
                    Error::invalid("port_mappings", format!("{text:?} is not an IP address"))
                })?),
            };
        ports.push(PortMapping {
            host_ip,
            host_port: number(mapping.host_port)?,
            container_port: number(mapping.container_port)?,
            protocol: match mapping.protocol() {
                cri::Protocol::Tcp => Protocol::Tcp,
                cri::Protocol::Udp => Protocol::Udp,
                cri::Protocol::Sctp => Protocol::Sctp,
            },
        });
    }
    Ok(ports)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_quantities() {
        for (text, bits) in [
            ("1k", 1_000),
            ("10M", 10_000_000),
            ("1.5M", 1_500_000),
            ("2Ki", 2_048),
            ("5000", 5_000),
            ("1e6", 1_000_000),
            ("1000.5", 1_001),
            ("1000000000000000", 1_000_000_000_000_000),
        ] {
            assert_eq!(rate(text), Some(bits), "{text}");
        }
        for text in ["", "1", "2P", "1E", "-1M", "1.2.3M", "M", "10m", " 1M", "1 M"] {
            assert_eq!(rate(text), None, "{text}");
        }
    }

    #[test]
    fn names_and_limits_are_passed_to_the_network() {
        let config = cri::PodSandboxConfig {
            metadata: Some(cri::PodSandboxMetadata {
                name: "web".into(),
                namespace: "shop".into(),
                uid: "u".into(),
                ..Default::default()
            }),
            annotations: [("kubernetes.io/egress-bandwidth".to_owned(), "1M".to_owned())].into(),
            ..Default::default()
        };
        let found = of("id", "/n".into(), &config).unwrap();
        let args: Vec<_> = found.args.iter().map(|(key, value)| format!("{key}={value}")).collect();
        let want = "IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web;K8S_POD_INFRA_CONTAINER_ID=id;K8S_POD_UID=u";
        assert_eq!(args.join(";"), want);
        assert_eq!(
            found.capabilities["bandwidth"],
            json!({"egressRate": 1_000_000, "egressBurst": u32::MAX})
        );
    }
}

//! The properties of pods and nodes that policies refer to.

use std::net::IpAddr;
use std::sync::Arc;

use coracle_values::label_selector::Labels;
use ipnetwork::IpNetwork;
use k8s_openapi::api::core::v1::{Node, Pod};

/// The namespace under which nodes are stored. No pod has an empty namespace.
pub(crate) const NODES: &str = "";

/// A container port with a name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct NamedPort {
    pub(crate) name: String,
    pub(crate) protocol: u8,
    pub(crate) number: u16,
}

/// The properties of a pod that policies refer to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodFacts {
    /// Unique id of the pod.
    pub uid: String,
    pub(crate) namespace: String,
    /// Labels of the pod or node. Copies of the facts share them.
    pub(crate) labels: Arc<Labels>,
    /// Addresses of the pod.
    pub ips: Vec<IpAddr>,
    /// Time of the pod's creation in seconds since 1970.
    pub(crate) created: i64,
    /// Position in the order in which sandboxes got addresses on this node. If several pods have the same address, the
    /// address belongs to the pod with the greatest position. With 0 the sandbox is unknown, and the addresses come
    /// from the pod's status.
    pub sandbox: u64,
    /// Whether the pod runs on this node, so that policies are enforced for it here.
    pub(crate) is_local: bool,
    pub(crate) ports: Vec<NamedPort>,
    /// Whether the caller knows all policies that select the pod. Otherwise the table has no element of the pod, so
    /// that [`Enforcer::enforces`](crate::Enforcer::enforces) is false for it.
    pub are_policies_known: bool,
}

/// Number of a transport protocol. `None` for an unknown protocol.
pub(crate) fn protocol(name: Option<&str>) -> Option<u8> {
    match name.unwrap_or("TCP") {
        "TCP" => Some(6),
        "UDP" => Some(17),
        "SCTP" => Some(132),
        _ => None,
    }
}

/// Key of a node among the uids of pods. The key has a slash, and uids have no slash.
pub(crate) fn node_uid(name: &str) -> String {
    format!("node/{name}")
}

// === impl PodFacts ===

impl PodFacts {
    /// The facts of a pod, with the addresses of its status. `None` for pods with the node's network, which policies
    /// neither restrict nor name.
    #[must_use]
    pub fn of(pod: &Pod, node: &str) -> Option<Self> {
        let (meta, spec) = (&pod.metadata, pod.spec.as_ref()?);
        if spec.host_network == Some(true) {
            return None;
        }
        let status = pod.status.as_ref();
        let listed = status.and_then(|status| status.pod_ips.as_ref()).into_iter().flatten();
        let mut ips: Vec<IpAddr> = listed.filter_map(|ip| ip.ip.parse().ok()).collect();
        if ips.is_empty() {
            ips.extend(status.and_then(|status| status.pod_ip.as_ref()?.parse::<IpAddr>().ok()));
        }
        let containers = spec.containers.iter().chain(spec.init_containers.iter().flatten());
        let ports = containers.flat_map(|container| container.ports.iter().flatten()).filter_map(|port| {
            Some(NamedPort {
                name: port.name.clone()?,
                protocol: protocol(port.protocol.as_deref())?,
                number: u16::try_from(port.container_port).ok()?,
            })
        });
        Some(Self {
            uid: meta.uid.clone()?,
            namespace: meta.namespace.clone()?,
            labels: Arc::new(meta.labels.clone().unwrap_or_default()),
            ips,
            created: meta.creation_timestamp.as_ref().map_or(0, |time| time.0.as_second()),
            sandbox: 0,
            is_local: spec.node_name.as_deref() == Some(node),
            ports: ports.collect(),
            are_policies_known: true,
        })
    }

    /// The facts of a node, with the addresses of its status, and those of its interfaces in the ranges of its pods.
    /// Host names are not addresses.
    #[must_use]
    pub fn of_node(node: &Node) -> Option<Self> {
        let addresses = node.status.as_ref().and_then(|status| status.addresses.as_ref());
        let addresses =
            addresses.into_iter().flatten().filter_map(|address| address.address.parse::<IpAddr>().ok());
        let ranges = node.spec.as_ref().and_then(|spec| spec.pod_cidrs.as_ref());
        let ranges = ranges.into_iter().flatten().filter_map(|range| range.parse::<IpNetwork>().ok());
        Some(Self {
            uid: node_uid(node.metadata.name.as_deref()?),
            namespace: NODES.to_owned(),
            labels: Arc::new(node.metadata.labels.clone().unwrap_or_default()),
            ips: addresses.chain(ranges.flat_map(addresses_in)).collect(),
            created: 0,
            sandbox: 0,
            is_local: false,
            ports: Vec::new(),
            are_policies_known: false,
        })
    }

    /// Namespace of the pod.
    #[must_use]
    pub fn namespace(&self) -> &str {
        &self.namespace
    }
}

/// The addresses of a node in a range of its pods: the overlay's interface has the first address, and the bridge of the
/// pods the second one. Pods reach the node at these addresses, too.
fn addresses_in(range: IpNetwork) -> impl Iterator<Item = IpAddr> {
    let first = range.network();
    let second = match first {
        IpAddr::V4(first) => IpAddr::V4(u32::from(first).saturating_add(1).into()),
        IpAddr::V6(first) => IpAddr::V6(u128::from(first).saturating_add(1).into()),
    };
    [first, second].into_iter().filter(move |address| range.contains(*address))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn pods_on_the_nodes_network_have_no_facts() {
        let facts = |host_network: bool| {
            let spec = json!({"nodeName": "here", "hostNetwork": host_network, "containers": []});
            let pod = json!({"metadata": {"uid": "u", "namespace": "n"}, "spec": spec,
                "status": {"podIPs": [{"ip": "192.0.2.1"}]}});
            PodFacts::of(&serde_json::from_value(pod).unwrap(), "here")
        };
        assert!(facts(false).is_some());
        assert_eq!(facts(true), None, "a policy of the pod would restrict its node and other pods there");
    }

    #[test]
    fn a_node_has_addresses_in_the_ranges_of_its_pods() {
        let node = json!({"metadata": {"name": "here"}, "spec": {"podCIDRs": ["10.42.3.0/24", "fd42:0:0:3::/64"]},
            "status": {"addresses": [{"type": "InternalIP", "address": "192.0.2.1"},
                {"type": "Hostname", "address": "here"}]}});
        let facts = PodFacts::of_node(&serde_json::from_value(node).unwrap()).unwrap();
        let ips: Vec<String> = facts.ips.iter().map(ToString::to_string).collect();
        assert_eq!(ips, ["192.0.2.1", "10.42.3.0", "10.42.3.1", "fd42:0:0:3::", "fd42:0:0:3::1"]);
    }
}

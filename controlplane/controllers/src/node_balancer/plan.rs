//! Selects the nodes that serve a LoadBalancer service, as k3s's ServiceLB does. No I/O.
//!
//! An entry of the status names the ports that the node serves. It has `ipMode: Proxy`, so that only the node itself
//! accepts packets to its address. A node never serves ports that it uses itself. The node names these ports in the
//! annotation [`REFUSED`].

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::sync::Arc;

use k8s_openapi::api::core::v1::LoadBalancerIngress;
use serde_json::{Value, json};

use crate::object::{Key, Node, ObjectExt, Service};

/// The class of load balancers that this controller serves. It also serves load balancers without a class.
pub(crate) const CLASS: &str = "coracle.dev/node-addresses";
/// Label of nodes that serve load balancers. If a node has this label, nodes without the label serve no load balancers.
const ENABLE: &str = "coracle.dev/enable-lb";
/// Label of nodes that serve no load balancer, as upstream.
const EXCLUDE: &str = "node.kubernetes.io/exclude-from-external-load-balancers";
/// Annotation of a node: ports that it refuses to serve, as in `TCP/80,UDP/53`. The agent writes it.
const REFUSED: &str = "coracle.dev/refused-load-balancer-ports";
/// Ports of SSH, DNS, the API server, the kubelet, and the health checks of the service proxy.
const HOST_PORTS: [u16; 5] = [22, 53, 6443, 10250, 10256];

/// Maximum addresses of a node. Further addresses are ignored. The node reports its addresses, and each address is an
/// entry in the status of each service.
const ADDRESSES_MAX: usize = 16;

/// Protocol in upper case, and port number.
pub(crate) type Port = (String, u16);

/// Ports of any protocol.
pub(crate) type PortRange = RangeInclusive<u16>;

/// The desired entries of a service's status, or the reason why it gets no address.
#[derive(Debug, PartialEq)]
pub(crate) enum Decision {
    Serve(Vec<Value>),
    Refuse(String),
}

/// The fields of a node that affect load balancers.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct BalancerNode {
    name: String,
    /// Whether the node can serve: it is ready and not excluded.
    is_usable: bool,
    is_enabled: bool,
    /// The external addresses of the node, or its internal addresses if it has no external addresses.
    addresses: Vec<IpAddr>,
    refused: BTreeSet<Port>,
}

/// Whether this controller serves a service.
pub(crate) fn is_ours(service: &Service) -> bool {
    let spec = &service.spec;
    spec.type_.as_deref() == Some("LoadBalancer")
        && spec.load_balancer_class.as_deref().is_none_or(|class| class == CLASS)
}

/// Whether only nodes with endpoints serve a service.
pub(crate) fn is_local(service: &Service) -> bool {
    service.spec.external_traffic_policy.as_deref() == Some("Local")
}

/// The ports of a service.
pub(crate) fn ports(service: &Service) -> impl Iterator<Item = Port> {
    service.spec.ports.iter().flatten().filter_map(|port| {
        let protocol = port.protocol.clone().unwrap_or_else(|| "TCP".to_owned());
        Some((protocol, u16::try_from(port.port).ok()?))
    })
}

/// The entries of a service's status.
pub(crate) fn ingress(service: &Service) -> impl Iterator<Item = &LoadBalancerIngress> {
    let balancer = service.status.load_balancer.as_ref();
    balancer.and_then(|balancer| balancer.ingress.as_ref()).into_iter().flatten()
}

/// The ports that nodes serve according to a service's status.
pub(crate) fn served(service: &Service) -> BTreeSet<Port> {
    let ports = ingress(service).flat_map(|entry| entry.ports.iter().flatten());
    ports.filter_map(|port| Some((port.protocol.clone(), u16::try_from(port.port).ok()?))).collect()
}

/// The entries of a service's status that this controller did not write. A disabled controller keeps only these
/// entries.
pub(crate) fn foreign(service: &Service, nodes: &[BalancerNode]) -> Vec<Value> {
    let is_own = |entry: &&LoadBalancerIngress| {
        let ip = entry.ip.as_deref().and_then(|ip| ip.parse().ok());
        let is_node = ip.is_some_and(|ip| nodes.iter().any(|node| node.addresses.contains(&ip)));
        entry.ip_mode.as_deref() == Some("Proxy") && entry.ports.is_some() && is_node
    };
    ingress(service).filter(|entry| !is_own(entry)).map(|entry| json!(entry)).collect()
}

/// The first port of a service that no load balancer may use. `more` has ports of this cluster's own servers, and node
/// ports, which belong to other services.
pub(crate) fn reserved(service: &Service, more: &[PortRange]) -> Option<Port> {
    ports(service)
        .find(|(_, port)| HOST_PORTS.contains(port) || more.iter().any(|range| range.contains(port)))
}

/// Decides about a service. `local` has the nodes with ready endpoints, for the traffic policy Local. `holder` returns
/// the other service that has a port.
pub(crate) fn plan(
    service: &Service,
    nodes: &[BalancerNode],
    local: &BTreeSet<String>,
    more_reserved: &[PortRange],
    holder: impl Fn(&Port) -> Option<Key>,
) -> Decision {
    if let Some((protocol, port)) = reserved(service, more_reserved) {
        return Decision::Refuse(format!(
            "port {port}/{protocol} is reserved for the nodes; choose another port"
        ));
    }
    let conflict = ports(service).find_map(|port| Some((holder(&port)?, port)));
    if let Some((other, (protocol, port))) = conflict {
        return Decision::Refuse(format!(
            "port {port}/{protocol} of the nodes belongs to the LoadBalancer service {other}; choose another port"
        ));
    }
    let wanted: BTreeSet<Port> = ports(service).collect();
    let selects = nodes.iter().any(|node| node.is_enabled);
    let is_candidate = |node: &&BalancerNode| {
        node.is_usable && (node.is_enabled || !selects) && (!is_local(service) || local.contains(&node.name))
    };
    let candidates: Vec<&BalancerNode> = nodes.iter().filter(is_candidate).collect();
    let is_serving = |node: &&&BalancerNode| node.refused.is_disjoint(&wanted);
    let serving: Vec<&BalancerNode> = candidates.iter().filter(is_serving).copied().collect();
    if serving.is_empty() && !candidates.is_empty() {
        return Decision::Refuse("every node uses one of the ports itself; choose other ports".to_owned());
    }
    Decision::Serve(entries(service, &serving, &wanted))
}

/// The entries of the status, sorted by address.
fn entries(service: &Service, nodes: &[&BalancerNode], ports: &BTreeSet<Port>) -> Vec<Value> {
    let families = service.spec.ip_families.as_deref().unwrap_or_default();
    let has_family =
        |ip: &IpAddr| families.iter().any(|family| family == if ip.is_ipv4() { "IPv4" } else { "IPv6" });
    let requested = service.spec.load_balancer_ip.as_deref().filter(|ip| !ip.is_empty());
    let is_requested = |ip: &IpAddr| requested.is_none_or(|requested| requested.parse() == Ok(*ip));
    let all = nodes.iter().flat_map(|node| &node.addresses);
    let addresses: BTreeSet<&IpAddr> = all.filter(|ip| has_family(ip) && is_requested(ip)).collect();
    let ports: Vec<Value> =
        ports.iter().map(|(protocol, port)| json!({"port": port, "protocol": protocol})).collect();
    addresses.into_iter().map(|ip| json!({"ip": ip, "ipMode": "Proxy", "ports": ports})).collect()
}

// === impl BalancerNode ===

impl BalancerNode {
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Whether the node can serve: it is ready and not excluded.
    pub(crate) fn is_usable(&self) -> bool {
        self.is_usable
    }

    pub(crate) fn addresses(&self) -> &[IpAddr] {
        &self.addresses
    }

    pub(crate) fn of(node: &Arc<Node>) -> Self {
        let labels = node.metadata.labels.as_ref();
        let label = |name: &str| labels.and_then(|labels| labels.get(name)).map(String::as_str);
        let is_ready = node.condition("Ready").is_some_and(|ready| ready.status == "True");
        let of_type = |type_: &str| -> Vec<IpAddr> {
            let all = node.status.addresses.iter().flatten().filter(|address| address.type_ == type_);
            all.filter_map(|address| address.address.parse().ok()).take(ADDRESSES_MAX).collect()
        };
        let external = of_type("ExternalIP");
        let annotations = node.metadata.annotations.as_ref();
        let refused = annotations.and_then(|all| all.get(REFUSED)).map(String::as_str).unwrap_or_default();
        Self {
            name: node.name().to_owned(),
            is_usable: is_ready && label(EXCLUDE).is_none() && !node.is_being_deleted(),
            is_enabled: label(ENABLE) == Some("true"),
            addresses: if external.is_empty() { of_type("InternalIP") } else { external },
            refused: refused.split(',').filter_map(port).collect(),
        }
    }
}

/// Parses a port such as `TCP/80`.
fn port(text: &str) -> Option<Port> {
    let (protocol, number) = text.trim().split_once('/')?;
    Some((protocol.to_owned(), number.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(name: &str, number: u8, metadata: Value) -> BalancerNode {
        let mut value = json!({"metadata": metadata, "status": {
            "addresses": [{"type": "InternalIP", "address": format!("192.0.2.{number}")},
                {"type": "Hostname", "address": name}],
            "conditions": [{"type": "Ready", "status": "True"}]}});
        value["metadata"]["name"] = name.into();
        BalancerNode::of(&Arc::new(serde_json::from_value(value).unwrap()))
    }

    fn service(more: Value) -> Service {
        let mut spec = json!({"type": "LoadBalancer", "ipFamilies": ["IPv4"], "ports": [{"port": 80, "protocol": "TCP"}]});
        for (field, value) in more.as_object().unwrap() {
            spec[field] = value.clone();
        }
        serde_json::from_value(json!({"metadata": {"namespace": "n", "name": "s"}, "spec": spec})).unwrap()
    }

    fn decided(service: &Service, nodes: &[BalancerNode], local: &[&str]) -> Decision {
        let local = local.iter().map(|name| (*name).to_owned()).collect();
        plan(service, nodes, &local, &[7000..=7000, 30000..=32767], |_| None)
    }

    fn addresses(service: &Service, nodes: &[BalancerNode], local: &[&str]) -> Vec<String> {
        match decided(service, nodes, local) {
            Decision::Serve(all) => {
                all.iter().map(|entry| entry["ip"].as_str().unwrap().to_owned()).collect()
            }
            Decision::Refuse(why) => panic!("{why}"),
        }
    }

    #[test]
    fn the_ready_nodes_serve_with_their_own_ports() {
        let mut gone = node("c", 3, json!({}));
        gone.is_usable = false;
        let excluded = node("d", 4, json!({"labels": {EXCLUDE: ""}}));
        let nodes = [node("b", 2, json!({})), node("a", 1, json!({})), gone, excluded];
        assert_eq!(addresses(&service(json!({})), &nodes, &[]), ["192.0.2.1", "192.0.2.2"]);
        let Decision::Serve(all) = decided(&service(json!({})), &nodes, &[]) else { panic!() };
        assert_eq!(all[0]["ipMode"], "Proxy");
        assert_eq!(all[0]["ports"], json!([{"port": 80, "protocol": "TCP"}]));
        assert_eq!(addresses(&service(json!({"loadBalancerIP": "192.0.2.2"})), &nodes, &[]), ["192.0.2.2"]);
        assert!(addresses(&service(json!({"ipFamilies": ["IPv6"]})), &nodes, &[]).is_empty());
        let local = service(json!({"externalTrafficPolicy": "Local"}));
        assert_eq!(addresses(&local, &nodes, &["a", "c"]), ["192.0.2.1"]);
        assert!(addresses(&local, &nodes, &[]).is_empty());
    }

    #[test]
    fn a_node_does_not_fill_the_status_of_all_services_with_its_addresses() {
        let all: Vec<Value> = (0..200)
            .map(|number| json!({"type": "InternalIP", "address": format!("192.0.2.{number}")}))
            .collect();
        let value = json!({"metadata": {"name": "a"}, "status": {"addresses": all}});
        let node = BalancerNode::of(&Arc::new(serde_json::from_value(value).unwrap()));
        assert_eq!(node.addresses().len(), ADDRESSES_MAX);
        assert_eq!(node.addresses()[0].to_string(), "192.0.2.0");
    }

    #[test]
    fn labelled_nodes_serve_alone_and_external_addresses_come_first() {
        let chosen = node("a", 1, json!({"labels": {ENABLE: "true"}}));
        let nodes = [chosen, node("b", 2, json!({}))];
        assert_eq!(addresses(&service(json!({})), &nodes, &[]), ["192.0.2.1"]);
        let value = json!({"metadata": {"name": "a"}, "status": {"conditions": [{"type": "Ready", "status": "True"}],
            "addresses": [{"type": "InternalIP", "address": "10.0.0.1"}, {"type": "ExternalIP", "address": "198.51.100.1"}]}});
        let both = BalancerNode::of(&Arc::new(serde_json::from_value(value).unwrap()));
        assert_eq!(addresses(&service(json!({})), &[both], &[]), ["198.51.100.1"]);
    }

    #[test]
    fn a_disabled_controller_leaves_the_addresses_of_other_load_balancers() {
        let mut service = service(json!({}));
        let ports = json!([{"port": 80, "protocol": "TCP"}]);
        let other = json!({"ip": "198.51.100.9", "ipMode": "Proxy", "ports": ports});
        let ingress = json!([{"ip": "192.0.2.1", "ipMode": "Proxy", "ports": ports}, other]);
        service.status = serde_json::from_value(json!({"loadBalancer": {"ingress": ingress}})).unwrap();
        assert_eq!(foreign(&service, &[node("a", 1, json!({}))]), [other]);
    }

    #[test]
    fn other_classes_and_types_are_left_alone() {
        assert!(is_ours(&service(json!({}))) && is_ours(&service(json!({"loadBalancerClass": CLASS}))));
        assert!(!is_ours(&service(json!({"loadBalancerClass": "metallb.io/x"}))));
        assert!(!is_ours(&service(json!({"type": "NodePort"}))));
    }

    #[test]
    fn ports_of_the_nodes_are_refused() {
        let nodes = [node("a", 1, json!({}))];
        for port in [22, 53, 6443, 10250, 10256, 7000, 30000, 32767] {
            for protocol in ["TCP", "UDP", "SCTP"] {
                let ports = json!([{"port": 80, "protocol": "TCP"}, {"port": port, "protocol": protocol}]);
                let decision = decided(&service(json!({"ports": ports})), &nodes, &[]);
                assert!(
                    matches!(&decision, Decision::Refuse(why) if why.contains(&port.to_string())),
                    "{decision:?}"
                );
            }
        }
    }

    #[test]
    fn a_port_of_another_service_is_refused() {
        let nodes = [node("a", 1, json!({}))];
        let holder = |port: &Port| (port == &("TCP".to_owned(), 80)).then(|| Key::new("other", "web"));
        let decision = plan(&service(json!({})), &nodes, &BTreeSet::new(), &[], holder);
        assert!(matches!(&decision, Decision::Refuse(why) if why.contains("other/web")), "{decision:?}");
    }

    #[test]
    fn a_node_that_uses_the_port_itself_does_not_serve() {
        let busy = || node("a", 1, json!({"annotations": {REFUSED: "UDP/80, TCP/80,nonsense"}}));
        let nodes = [busy(), node("b", 2, json!({}))];
        assert_eq!(addresses(&service(json!({})), &nodes, &[]), ["192.0.2.2"]);
        assert!(matches!(decided(&service(json!({})), &[busy()], &[]), Decision::Refuse(_)));
    }
}

//! Compares the table's verdict on each packet with the meaning of the policies.

mod kernel;

use std::net::IpAddr;

use coracle_values::label_selector::LabelSelector;
use coracle_values::object::ObjectExt as _;
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::networking::v1::{NetworkPolicyPeer, NetworkPolicyPort};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::blocks::number;
use crate::cluster_policy::ClusterPolicy;
use crate::packet::Packet;
use crate::program::{Changes, Element, ElementId, Peer, Ports};

const TCP: u8 = 6;
const UDP: u8 = 17;

/// A model of the kernel's table. Only the recorded differences change it.
#[derive(Default)]
struct Kernel {
    chains: HashMap<Chain, Lines>,
    sets: HashMap<Set, Vec<crate::blocks::Range>>,
    elements: HashMap<(Set, ElementKey), Element>,
}

// === impl Kernel ===

impl Kernel {
    /// Applies changes as the kernel does, and panics where it would refuse them.
    fn apply(&mut self, program: &Program, changes: Changes) {
        for set in changes.new_sets {
            assert!(self.sets.insert(set, program.sets[&set].clone()).is_none(), "{set:?} exists");
        }
        for (set, keys) in changes.ended_elements {
            for key in keys {
                assert!(self.elements.remove(&(set, key)).is_some(), "an element of {set:?} is absent");
            }
        }
        for chain in changes.new_chains {
            assert!(self.chains.insert(chain, program.chains[&chain].clone()).is_none(), "{chain:?} exists");
        }
        for chain in changes.changed_chains {
            let lines = program.chains[&chain].clone();
            let before = self.chains.insert(chain, lines.clone());
            assert!(before.is_some_and(|before| before != lines), "{chain:?} is absent, or has these lines");
        }
        for (set, elements) in changes.new_elements {
            let is_fixed = matches!(set, Set::Isolated(..) | Set::Itself(..) | Set::Enforced(_));
            assert!(is_fixed || self.sets.contains_key(&set), "{set:?} does not exist");
            for (key, value) in elements {
                assert!(self.elements.insert((set, key), value).is_none(), "an element of {set:?} exists");
            }
        }
        for chain in changes.ended_chains {
            assert!(self.chains.remove(&chain).is_some(), "{chain:?} is absent");
        }
        for set in changes.ended_sets {
            assert!(self.sets.remove(&set).is_some(), "{set:?} is absent");
            self.elements.retain(|(other, _), _| *other != set);
        }
        self.check_references();
    }

    fn check_references(&self) {
        let groups = self.elements.values().flatten();
        groups.for_each(|group| assert!(self.chains.contains_key(&Chain::Group(*group))));
        for line in self.chains.values().flat_map(|lines| &lines.lines) {
            if let RuleAction::Jump(chain) = line.then {
                assert!(self.chains.contains_key(&chain), "{chain:?} is absent");
            }
            let named = match line.ports {
                Some(Ports::Named(set)) => Some(set),
                _ => None,
            };
            let peers = match line.peer {
                Some(Peer::In(set)) => Some(set),
                _ => None,
            };
            peers.iter().chain(&named).for_each(|set| assert!(self.sets.contains_key(set), "{set:?}"));
        }
    }

    fn has(&self, set: Set, key: ElementKey) -> bool {
        self.elements.contains_key(&(set, key))
    }

    fn passes(&self, packet: Packet) -> bool {
        [Direction::Egress, Direction::Ingress].into_iter().all(|direction| {
            let is_ipv4 = packet.from.is_ipv4();
            let pod = if direction == Direction::Egress { packet.from } else { packet.to };
            let dispatch = |tier| {
                let group = self.elements.get(&(Set::Isolated(tier, direction, is_ipv4), element(pod)));
                group.and_then(|group| self.chain(Chain::Group(group.unwrap()), packet))
            };
            // The first base chain: an accepted packet gets a mark, and a packet with the action Pass gets none.
            match dispatch(Tier::Admin) {
                Some(RuleAction::Drop) => return false,
                Some(RuleAction::Accept) => return true,
                _ => {}
            }
            if self.has(Set::Itself(direction, is_ipv4), element(packet.from).address(packet.to)) {
                return true;
            }
            dispatch(Tier::Namespaced).or_else(|| dispatch(Tier::Baseline)) != Some(RuleAction::Drop)
        })
    }

    /// The verdict of a chain. `None` if the chain returns.
    fn chain(&self, chain: Chain, packet: Packet) -> Option<RuleAction> {
        let Lines { direction, lines, .. } = &self.chains[&chain];
        lines.iter().filter(|line| self.matches(line, *direction, packet)).find_map(|line| match line.then {
            RuleAction::Jump(chain) => self.chain(chain, packet),
            verdict => Some(verdict),
        })
    }

    fn matches(&self, line: &Line, direction: Direction, packet: Packet) -> bool {
        let Packet { from, to, protocol, port } = packet;
        let peer = if direction == Direction::Ingress { from } else { to };
        let is_in_range = |(first, last): &(u128, u128)| (*first..=*last).contains(&number(peer));
        let is_peer = line.peer.is_none_or(|wanted| match wanted {
            Peer::In(set) => {
                set.is_ipv4() == peer.is_ipv4()
                    && (self.has(set, element(peer)) || self.sets[&set].iter().any(is_in_range))
            }
            Peer::Range(range, is_ipv4) => is_ipv4 == peer.is_ipv4() && is_in_range(&range),
        });
        is_peer
            && line.ports.as_ref().is_none_or(|ports| match ports {
                Ports::Protocol(wanted) => *wanted == protocol,
                Ports::Single(all) => all.contains(&(protocol, port)),
                Ports::Range(wanted, first, last) => *wanted == protocol && (*first..=*last).contains(&port),
                Ports::Named(set) => {
                    set.is_ipv4() == to.is_ipv4() && self.has(*set, element(to).protocol(protocol).port(port))
                }
            })
    }
}

/// The objects of a cluster, and the meaning of its policies, implemented directly from the API's documentation.
#[derive(Clone, Default)]
struct Cluster {
    namespaces: BTreeMap<String, Labels>,
    pods: BTreeMap<String, Pod>,
    policies: BTreeMap<Key, NetworkPolicy>,
    nodes: BTreeMap<String, Node>,
    /// Specifications by kind and name.
    cluster_policies: BTreeMap<(ClusterKind, String), Value>,
}

// === impl Cluster ===

impl Cluster {
    fn pod(&self, ip: IpAddr) -> Option<&Pod> {
        let has = |pod: &&Pod| PodFacts::of(pod, "here").is_some_and(|facts| facts.ips.contains(&ip));
        self.pods.values().find(has)
    }

    fn allows(&self, packet: Packet) -> bool {
        self.allows_in(Direction::Egress, packet.from, packet.to, packet)
            && self.allows_in(Direction::Ingress, packet.to, packet.from, packet)
    }

    fn allows_in(&self, direction: Direction, own: IpAddr, peer: IpAddr, packet: Packet) -> bool {
        let Some(pod) = self.pod(own) else { return true };
        if pod.spec.as_ref().unwrap().node_name.as_deref() != Some("here") {
            return true;
        }
        if let Some(decision) = self.tier("Admin", direction, pod, packet) {
            return decision;
        }
        let kind = if direction == Direction::Ingress { "Ingress" } else { "Egress" };
        let selecting: Vec<_> = self
            .policies
            .values()
            .filter(|policy| policy.metadata.namespace == pod.metadata.namespace)
            .map(|policy| policy.spec.as_ref().unwrap())
            .filter(|spec| spec.policy_types.iter().flatten().any(|name| name == kind))
            .filter(|spec| matches(spec.pod_selector.as_ref().unwrap(), pod.metadata.labels.as_ref()))
            .collect();
        if selecting.is_empty() {
            return self.tier("Baseline", direction, pod, packet).unwrap_or(true);
        }
        let namespace = pod.namespace();
        own == peer
            || selecting.iter().any(|spec| match direction {
                Direction::Ingress => spec.ingress.iter().flatten().any(|rule| {
                    self.is_peer(rule.from.as_deref(), namespace, peer)
                        && self.is_port(rule.ports.as_deref(), packet)
                }),
                Direction::Egress => spec.egress.iter().flatten().any(|rule| {
                    let names_need_a_pod =
                        |port: &NetworkPolicyPort| matches!(port.port, Some(IntOrString::String(_)));
                    let by_block = |peer: &NetworkPolicyPeer| peer.ip_block.is_some();
                    // A port's name is resolved in the pod that receives the packet. So with a named port the rule's
                    // `ipBlock` peers allow nothing.
                    rule.ports.as_deref().unwrap_or_default().iter().any(|port| {
                        let peers: Option<Vec<_>> = rule.to.as_ref().map(|peers| {
                            let usable =
                                |peer: &&NetworkPolicyPeer| !(names_need_a_pod(port) && by_block(peer));
                            peers.iter().filter(usable).cloned().collect()
                        });
                        let none_left = rule.to.as_ref().is_some_and(|to| !to.is_empty())
                            && peers.as_ref().is_some_and(Vec::is_empty);
                        !none_left
                            && self.is_peer(peers.as_deref(), namespace, peer)
                            && self.is_port(Some(std::slice::from_ref(port)), packet)
                    }) || rule.ports.as_deref().unwrap_or_default().is_empty()
                        && self.is_peer(rule.to.as_deref(), namespace, peer)
                }),
            })
    }

    /// The decision of the policies of the whole cluster in a tier. `None` if they leave it to the next tier.
    fn tier(&self, tier: &str, direction: Direction, pod: &Pod, packet: Packet) -> Option<bool> {
        let of = |kind: &ClusterKind, specification: &Value| match kind {
            ClusterKind::ClusterNetworkPolicy => specification["tier"] == tier,
            ClusterKind::AdminNetworkPolicy => tier == "Admin",
            ClusterKind::BaselineAdminNetworkPolicy => tier == "Baseline",
        };
        let mut policies: Vec<_> = self
            .cluster_policies
            .iter()
            .filter(|((kind, _), specification)| of(kind, specification))
            .collect();
        let priority = |kind, specification: &Value| match kind {
            ClusterKind::BaselineAdminNetworkPolicy => None,
            _ => specification["priority"].as_u64(),
        };
        policies.sort_by_key(|(key, specification)| (priority(key.0, specification).unwrap_or(2000), *key));
        let field = if direction == Direction::Ingress { "ingress" } else { "egress" };
        for (_, specification) in policies {
            if !self.is_selected(&specification["subject"], pod) {
                continue;
            }
            for rule in specification[field].as_array().into_iter().flatten() {
                let peers = rule["from"].as_array().or(rule["to"].as_array()).unwrap();
                let allows = matches!(rule["action"].as_str().unwrap(), "Allow" | "Accept");
                if peers.contains(&json!({})) {
                    match allows {
                        true => continue,
                        false => return Some(false),
                    }
                }
                let peer = if direction == Direction::Ingress { packet.from } else { packet.to };
                if !peers.iter().any(|wanted| self.is_cluster_peer(wanted, peer))
                    || !self.is_cluster_port(rule, packet)
                {
                    continue;
                }
                return match rule["action"].as_str().unwrap() {
                    "Pass" => None,
                    "Deny" => Some(false),
                    _ => Some(true),
                };
            }
        }
        None
    }

    /// Whether a subject or peer `{namespaces: …}` or `{pods: …}` selects a pod.
    fn is_selected(&self, subject: &Value, pod: &Pod) -> bool {
        let pods = &subject["pods"];
        let selector = subject.get("namespaces").unwrap_or(&pods["namespaceSelector"]);
        let labels = self.namespaces.get(pod.namespace());
        let is_in = *selector == json!({})
            || labels.is_some() && LabelSelector::from_object(selector).unwrap().matches(labels);
        is_in
            && LabelSelector::from_object(&pods["podSelector"]).unwrap().matches(pod.metadata.labels.as_ref())
    }

    fn is_cluster_peer(&self, peer: &Value, ip: IpAddr) -> bool {
        if let Some(selector) = peer.get("nodes") {
            let selector = LabelSelector::from_object(selector).unwrap();
            let has_ip = |node: &Node| PodFacts::of_node(node).unwrap().ips.contains(&ip);
            return self
                .nodes
                .values()
                .any(|node| has_ip(node) && selector.matches(node.metadata.labels.as_ref()));
        }
        if let Some(networks) = peer["networks"].as_array() {
            let contains = |network: &Value| {
                network.as_str().unwrap().parse::<ipnetwork::IpNetwork>().unwrap().contains(ip)
            };
            return networks.iter().any(contains);
        }
        self.pod(ip).is_some_and(|pod| self.is_selected(peer, pod))
    }

    fn is_cluster_port(&self, rule: &Value, packet: Packet) -> bool {
        let Some(ports) = rule["ports"].as_array().filter(|ports| !ports.is_empty()) else { return true };
        ports.iter().any(|port| {
            let number = crate::facts::protocol(Some("TCP")).unwrap();
            if let Some(wanted) = port["portNumber"]["port"].as_u64() {
                return number == packet.protocol && wanted == u64::from(packet.port);
            }
            if let Some(first) = port["portRange"]["start"].as_u64() {
                let last = port["portRange"]["end"].as_u64().unwrap();
                return number == packet.protocol && (first..=last).contains(&u64::from(packet.port));
            }
            let facts = self.pod(packet.to).and_then(|pod| PodFacts::of(pod, "here"));
            let is_named = |own: &crate::facts::NamedPort| {
                own.name == port["namedPort"].as_str().unwrap()
                    && (own.number, own.protocol) == (packet.port, packet.protocol)
            };
            facts.is_some_and(|facts| facts.ports.iter().any(is_named))
        })
    }

    fn is_peer(&self, peers: Option<&[NetworkPolicyPeer]>, namespace: &str, ip: IpAddr) -> bool {
        let Some(peers) = peers.filter(|peers| !peers.is_empty()) else { return true };
        peers.iter().any(|peer| {
            if let Some(block) = &peer.ip_block {
                let contains = |text: &String| text.parse::<ipnetwork::IpNetwork>().unwrap().contains(ip);
                return contains(&block.cidr) && !block.except.iter().flatten().any(contains);
            }
            let Some(pod) = self.pod(ip) else { return false };
            let is_in = match &peer.namespace_selector {
                None => pod.namespace() == namespace,
                Some(selector) => {
                    let labels = self.namespaces.get(pod.namespace());
                    *selector == Default::default() || labels.is_some() && matches(selector, labels)
                }
            };
            is_in && peer.pod_selector.as_ref().is_none_or(|own| matches(own, pod.metadata.labels.as_ref()))
        })
    }

    fn is_port(&self, ports: Option<&[NetworkPolicyPort]>, packet: Packet) -> bool {
        let Some(ports) = ports.filter(|ports| !ports.is_empty()) else { return true };
        ports.iter().any(|port| {
            crate::facts::protocol(port.protocol.as_deref()) == Some(packet.protocol)
                && match (&port.port, port.end_port) {
                    (None, _) => true,
                    (Some(IntOrString::Int(first)), end) => {
                        (*first..=end.unwrap_or(*first)).contains(&i32::from(packet.port))
                    }
                    (Some(IntOrString::String(name)), _) => {
                        let facts = self.pod(packet.to).and_then(|pod| PodFacts::of(pod, "here"));
                        facts.is_some_and(|facts| {
                            facts.ports.iter().any(|own| {
                                own.name == *name
                                    && own.number == packet.port
                                    && own.protocol == packet.protocol
                            })
                        })
                    }
                }
        })
    }
}

fn matches(
    selector: &k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector,
    labels: Option<&Labels>,
) -> bool {
    LabelSelector::try_from(selector).unwrap().matches(labels)
}

fn pod(number: u8, namespace: &str, app: &str, node: &str, port: u16) -> Pod {
    let (v4, v6) = (format!("10.42.0.{number}"), format!("fd42::{number:x}"));
    let containers = json!([{"name": "c", "ports": [{"name": "web", "containerPort": port}]}]);
    let pod = json!({"metadata": {"name": format!("p{number}"), "uid": format!("u{number}"), "namespace": namespace,
        "labels": {"app": app}}, "spec": {"nodeName": node, "containers": containers},
        "status": {"podIPs": [{"ip": v4}, {"ip": v6}]}});
    serde_json::from_value(pod).unwrap()
}

fn policy(namespace: &str, name: &str, spec: Value) -> NetworkPolicy {
    serde_json::from_value(json!({"metadata": {"namespace": namespace, "name": name}, "spec": spec})).unwrap()
}

fn labels(pairs: &[(&str, &str)]) -> Labels {
    pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
}

fn packets() -> impl Iterator<Item = Packet> {
    let ends: Vec<(IpAddr, bool)> = (1u8..=6)
        .flat_map(|number| [(format!("10.42.0.{number}"), true), (format!("fd42::{number:x}"), false)])
        .chain([
            ("192.0.2.1".to_owned(), true),
            ("192.0.2.2".to_owned(), true),
            ("10.42.0.99".to_owned(), true),
            ("2001:db8::1".to_owned(), false),
        ])
        .map(|(ip, is_ipv4)| (ip.parse().unwrap(), is_ipv4))
        .collect();
    let ports = [(TCP, 80), (TCP, 81), (TCP, 8080), (UDP, 80), (132, 80), (1, 0)];
    let others = ends.clone();
    ends.into_iter().flat_map(move |(from, is_ipv4)| {
        let to: Vec<IpAddr> =
            others.iter().filter(|(_, other)| *other == is_ipv4).map(|(to, _)| *to).collect();
        to.into_iter().flat_map(move |to| {
            ports.into_iter().map(move |(protocol, port)| Packet { from, to, protocol, port })
        })
    })
}

/// A change of the cluster.
#[derive(Clone, Debug)]
enum Change {
    Pod(u8, &'static str, &'static str, &'static str, u16),
    NoPod(u8),
    Namespace(&'static str, &'static str),
    NoNamespace(&'static str),
    Policy(&'static str, u8, Value),
    /// An existing policy gets the rules of this specification, and still selects the same pods.
    Rules(&'static str, u8, Value),
    NoPolicy(&'static str, u8),
    Node(u8, &'static str),
    NoNode(u8),
    ClusterPolicy(ClusterKind, u8, Value),
    ClusterRules(ClusterKind, u8, Value),
    NoClusterPolicy(ClusterKind, u8),
}

fn any_namespace() -> impl Strategy<Value = &'static str> {
    prop::sample::select(vec!["red", "blue"])
}

fn any_labels() -> impl Strategy<Value = Value> {
    prop::sample::select(vec![
        json!({}),
        json!({"matchLabels": {"app": "a"}}),
        json!({"matchExpressions": [{"key": "app", "operator": "NotIn", "values": ["a"]}]}),
    ])
}

fn any_peer() -> impl Strategy<Value = Value> {
    let teams = prop::sample::select(vec![
        json!({}),
        json!({"matchLabels": {"team": "x"}}),
        json!({"matchExpressions": [{"key": "team", "operator": "DoesNotExist"}]}),
    ]);
    let blocks = prop::sample::select(vec![
        json!({"cidr": "10.42.0.0/24", "except": ["10.42.0.0/30", "10.42.0.99/32"]}),
        json!({"cidr": "0.0.0.0/0", "except": ["10.42.0.0/16"]}),
        json!({"cidr": "fd42::/64", "except": ["fd42::4/126"]}),
        json!({"cidr": "::/0"}),
    ]);
    prop_oneof![
        any_labels().prop_map(|pods| json!({"podSelector": pods})),
        teams.clone().prop_map(|teams| json!({"namespaceSelector": teams})),
        (any_labels(), teams)
            .prop_map(|(pods, teams)| json!({"podSelector": pods, "namespaceSelector": teams})),
        blocks.prop_map(|block| json!({"ipBlock": block})),
    ]
}

fn any_rule(peers: &'static str) -> impl Strategy<Value = Value> {
    let port = prop::sample::select(vec![
        json!({"protocol": "TCP", "port": 80}),
        json!({"protocol": "TCP", "port": 80, "endPort": 81}),
        json!({"protocol": "UDP"}),
        json!({"port": "web"}),
        json!({"protocol": "SCTP", "port": 80}),
    ]);
    let peer = prop::collection::vec(any_peer(), 0..3);
    (peer, prop::collection::vec(port, 0..3))
        .prop_map(move |(all, ports)| json!({peers: all, "ports": ports}))
}

fn any_policy() -> impl Strategy<Value = Value> {
    let types =
        prop::sample::select(vec![json!(["Ingress"]), json!(["Egress"]), json!(["Ingress", "Egress"])]);
    let rules = (prop::collection::vec(any_rule("from"), 0..3), prop::collection::vec(any_rule("to"), 0..3));
    (any_labels(), types, rules).prop_map(|(pods, types, (ingress, egress))| {
        json!({"podSelector": pods, "policyTypes": types, "ingress": ingress, "egress": egress})
    })
}

fn any_cluster_peer(is_egress: bool) -> impl Strategy<Value = Value> {
    let teams = prop::sample::select(vec![
        json!({}),
        json!({"matchLabels": {"team": "x"}}),
        json!({"matchExpressions": [{"key": "team", "operator": "DoesNotExist"}]}),
    ]);
    let networks = prop::sample::select(vec![
        json!({"networks": ["10.42.0.0/30", "fd42::/64"]}),
        json!({"networks": ["0.0.0.0/0"]}),
        json!({"nodes": {}}),
        json!({"nodes": {"matchLabels": {"team": "x"}}}),
    ]);
    let networks = if is_egress { networks.boxed() } else { Just(json!({"namespaces": {}})).boxed() };
    prop_oneof![
        3 => teams.clone().prop_map(|teams| json!({"namespaces": teams})),
        3 => (any_labels(), teams)
            .prop_map(|(pods, teams)| json!({"pods": {"podSelector": pods, "namespaceSelector": teams}})),
        3 => networks,
        1 => Just(json!({})),
    ]
}

fn any_cluster_rules(field: &'static str) -> impl Strategy<Value = Vec<Value>> {
    let port = prop::sample::select(vec![
        json!({"portNumber": {"port": 80}}),
        json!({"portRange": {"start": 80, "end": 81}}),
        json!({"namedPort": "web"}),
    ]);
    let action = prop::sample::select(vec!["Accept", "Allow", "Deny", "Deny", "Pass"]);
    let peers = prop::collection::vec(any_cluster_peer(field == "to"), 1..3);
    let rule = (action, peers, prop::collection::vec(port, 0..3));
    let rule = rule.prop_map(move |(action, peers, mut ports)| {
        // The schemas of the kinds refuse named ports in rules with nodes or networks as peers.
        if peers.iter().any(|peer| peer.get("nodes").or(peer.get("networks")).is_some()) {
            ports.retain(|port| port.get("namedPort").is_none());
        }
        json!({"action": action, field: peers, "ports": ports})
    });
    prop::collection::vec(rule, 0..4)
}

fn any_cluster_policy() -> impl Strategy<Value = Value> {
    let tier = prop::sample::select(vec!["Admin", "Baseline"]);
    let subject = any_cluster_peer(false).prop_filter("a subject selects pods", |peer| *peer != json!({}));
    (tier, 0u16..4, subject, any_cluster_rules("from"), any_cluster_rules("to")).prop_map(
        |(tier, priority, subject, ingress, egress)| {
            json!({"tier": tier, "priority": priority, "subject": subject, "ingress": ingress, "egress": egress})
        },
    )
}

fn any_change() -> impl Strategy<Value = Change> {
    let app = prop::sample::select(vec!["a", "b"]);
    let node = prop::sample::select(vec!["here", "here", "there"]);
    let port = prop::sample::select(vec![80u16, 8080]);
    let pods = (1u8..=6, any_namespace(), app, node, port);
    let kind = prop::sample::select(ClusterKind::ALL.to_vec());
    let team = prop::sample::select(vec!["x", "y"]);
    prop_oneof![
        4 => pods.prop_map(|(number, namespace, app, node, port)| Change::Pod(number, namespace, app, node, port)),
        1 => (1u8..=6).prop_map(Change::NoPod),
        1 => (any_namespace(), prop::sample::select(vec!["x", "y"])).prop_map(|(name, team)| Change::Namespace(name, team)),
        1 => any_namespace().prop_map(Change::NoNamespace),
        6 => (any_namespace(), 0u8..3, any_policy(), any::<bool>()).prop_map(|(namespace, name, spec, only_rules)| match only_rules {
            true => Change::Rules(namespace, name, spec),
            false => Change::Policy(namespace, name, spec),
        }),
        1 => (any_namespace(), 0u8..3).prop_map(|(namespace, name)| Change::NoPolicy(namespace, name)),
        1 => (1u8..=2, team).prop_map(|(number, team)| Change::Node(number, team)),
        1 => (1u8..=2).prop_map(Change::NoNode),
        6 => (kind.clone(), 0u8..2, any_cluster_policy(), any::<bool>()).prop_map(|(kind, name, spec, only_rules)| match only_rules {
            true => Change::ClusterRules(kind, name, spec),
            false => Change::ClusterPolicy(kind, name, spec),
        }),
        1 => (kind, 0u8..2).prop_map(|(kind, name)| Change::NoClusterPolicy(kind, name)),
    ]
}

fn node(number: u8, team: &str) -> Node {
    serde_json::from_value(json!({"metadata": {"name": format!("n{number}"), "labels": {"team": team}}, "status": {"addresses": [
        {"type": "InternalIP", "address": format!("192.0.2.{number}")}, {"type": "Hostname", "address": "n"}]}}))
    .unwrap()
}

fn apply(model: &mut Model, cluster: &mut Cluster, change: Change) {
    match change {
        Change::ClusterPolicy(..) | Change::ClusterRules(..) | Change::NoClusterPolicy(..) => {
            apply_to_cluster_policies(model, cluster, change);
        }
        Change::Node(number, team) => {
            model.put_node(&node(number, team));
            cluster.nodes.insert(format!("n{number}"), node(number, team));
        }
        Change::NoNode(number) => {
            model.remove_node(&format!("n{number}"));
            cluster.nodes.remove(&format!("n{number}"));
        }
        Change::Pod(number, namespace, app, node, port) => {
            let pod = pod(number, namespace, app, node, port);
            // A pod's namespace never changes: another pod has another uid.
            let uid = format!("u{number}");
            if cluster.pods.get(&uid).is_some_and(|old| old.metadata.namespace != pod.metadata.namespace) {
                model.remove_pod(&uid);
            }
            model.put_pod(PodFacts::of(&pod, "here").unwrap());
            cluster.pods.insert(uid, pod);
        }
        Change::NoPod(number) => {
            model.remove_pod(&format!("u{number}"));
            cluster.pods.remove(&format!("u{number}"));
        }
        Change::Namespace(name, team) => {
            let labels = if team == "x" { labels(&[("team", team)]) } else { Labels::new() };
            model.put_namespace(name, labels.clone());
            cluster.namespaces.insert(name.to_owned(), labels);
        }
        Change::NoNamespace(name) => {
            model.remove_namespace(name);
            cluster.namespaces.remove(name);
        }
        Change::Policy(namespace, name, spec) => {
            let policy = policy(namespace, &name.to_string(), spec);
            model.put_policy(&policy);
            cluster.policies.insert(Key::of(&policy.metadata), policy);
        }
        Change::Rules(namespace, name, mut spec) => {
            let Some(old) = cluster.policies.get(&Key::new(namespace, &name.to_string())) else { return };
            let old = serde_json::to_value(&old.spec).unwrap();
            for field in ["podSelector", "policyTypes"] {
                spec[field] = old[field].clone();
            }
            apply(model, cluster, Change::Policy(namespace, name, spec));
        }
        Change::NoPolicy(namespace, name) => {
            let key = Key::new(namespace, &name.to_string());
            model.remove_policy(&key);
            cluster.policies.remove(&key);
        }
    }
}

/// [`apply`] for a change of policies of the whole cluster.
fn apply_to_cluster_policies(model: &mut Model, cluster: &mut Cluster, change: Change) {
    match change {
        Change::ClusterPolicy(kind, name, specification) => {
            model.put_cluster_policy(ClusterPolicy::parse(kind, &name.to_string(), &specification).unwrap());
            cluster.cluster_policies.insert((kind, name.to_string()), specification);
        }
        Change::ClusterRules(kind, name, mut specification) => {
            let Some(old) = cluster.cluster_policies.get(&(kind, name.to_string())) else { return };
            for field in ["tier", "priority", "subject"] {
                specification[field] = old[field].clone();
            }
            apply_to_cluster_policies(model, cluster, Change::ClusterPolicy(kind, name, specification));
        }
        Change::NoClusterPolicy(kind, name) => {
            model.remove_cluster_policy(kind, &name.to_string());
            cluster.cluster_policies.remove(&(kind, name.to_string()));
        }
        other => panic!("no change of policies of the whole cluster: {other:?}"),
    }
}

/// Number of random clusters, each with 12 changes on average. `CORACLE_PROPERTY_CHANGES` sets the total number of
/// changes.
fn cases() -> u32 {
    let changes = std::env::var("CORACLE_PROPERTY_CHANGES").ok().and_then(|text| text.parse::<u32>().ok());
    changes.map_or(40, |changes| changes.div_ceil(12))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_packet_has_the_verdict_of_the_policies(changes in prop::collection::vec(any_change(), 1..25)) {
        let (mut model, mut cluster, mut kernel) = (Model::default(), Cluster::default(), Kernel::default());
        for change in changes {
            let before: Vec<bool> = packets().map(|packet| model.program.allows(&packet)).collect();
            apply(&mut model, &mut cluster, change);
            let changes = model.program.changes();
            let changed = changes.addresses();
            for (packet, before) in packets().zip(before) {
                let is_same = model.program.allows(&packet) == before;
                prop_assert!(is_same || changed.contains(&packet.from) || changed.contains(&packet.to), "{:?}", packet);
            }
            kernel.apply(&model.program, changes);
        }
        for packet in packets() {
            prop_assert_eq!(kernel.passes(packet), cluster.allows(packet), "{:?}", packet);
            prop_assert_eq!(model.program.allows(&packet), cluster.allows(packet), "{:?}", packet);
        }
        let mut fresh = Kernel::default();
        let all = model.program.all();
        fresh.apply(&model.program, all);
        prop_assert_eq!(&fresh.elements, &kernel.elements);
        // Without policies the table is empty.
        for key in cluster.policies.keys() {
            model.remove_policy(key);
        }
        for (kind, name) in cluster.cluster_policies.keys() {
            model.remove_cluster_policy(*kind, name);
        }
        prop_assert!(model.is_empty() && !model.needs_nodes());
        let changes = model.program.changes();
        kernel.apply(&model.program, changes);
        prop_assert!(kernel.chains.is_empty() && kernel.sets.is_empty() && kernel.elements.is_empty());
    }
}

#[test]
fn a_change_of_one_pod_changes_its_elements_only() {
    let mut model = Model::default();
    model.put_policy(&policy(
        "red",
        "deny",
        json!({"podSelector": {}, "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"podSelector": {"matchLabels": {"app": "a"}}}]}]}),
    ));
    for number in 1..=100 {
        model.put_pod(PodFacts::of(&pod(number, "red", "a", "here", 80), "here").unwrap());
    }
    model.program.changes();
    model.put_pod(PodFacts::of(&pod(101, "red", "a", "here", 80), "here").unwrap());
    let changes = model.program.changes();
    let count = changes.new_elements.values().map(Vec::len).sum::<usize>();
    assert_eq!((count, changes.new_chains.len(), changes.new_sets.len()), (6, 0, 0));
    let own = PodFacts::of(&pod(101, "red", "a", "here", 80), "here").unwrap().ips;
    assert_eq!(changes.addresses(), own.into_iter().collect(), "only the new pod's connections are checked");
    model.put_pod(PodFacts::of(&pod(101, "red", "a", "here", 80), "here").unwrap());
    assert!(model.program.changes().is_empty());
}

#[test]
fn a_policy_with_other_rules_keeps_its_chains_and_the_elements_of_its_pods() {
    let (mut model, mut kernel) = (Model::default(), Kernel::default());
    let put = |model: &mut Model, name: &str, app: &str, block: &str| {
        let from = json!([{"ipBlock": {"cidr": block}}]);
        let ports = json!([{"port": 80}]);
        let spec = json!({"podSelector": {"matchLabels": {"app": app}}, "ingress": [{"from": from, "ports": ports}]});
        model.put_policy(&policy("red", name, spec));
    };
    for number in 0..20 {
        put(&mut model, &format!("p{number}"), "a", &format!("198.51.100.{number}/32"));
    }
    for (number, app) in [(1, "a"), (2, "a"), (3, "b")] {
        model.put_pod(PodFacts::of(&pod(number, "red", app, "here", 80), "here").unwrap());
    }
    let changes = model.program.changes();
    kernel.apply(&model.program, changes);
    let packet = |from: &str| Packet {
        from: from.parse().unwrap(),
        to: "10.42.0.1".parse().unwrap(),
        protocol: TCP,
        port: 80,
    };
    put(&mut model, "p7", "a", "192.0.2.1/32");
    let changes = model.program.changes();
    let chains = (changes.new_chains.len(), changes.changed_chains.len(), changes.ended_chains.len());
    assert_eq!(chains, (0, 1, 0), "groups and other policies stay as they are");
    assert!(changes.new_elements.is_empty() && changes.ended_elements.is_empty() && changes.may_forbid());
    let selected =
        [1, 2].map(|number| PodFacts::of(&pod(number, "red", "a", "here", 80), "here").unwrap().ips);
    assert_eq!(
        changes.addresses(),
        selected.into_iter().flatten().collect(),
        "connections of other pods stay"
    );
    kernel.apply(&model.program, changes);
    assert!(kernel.passes(packet("192.0.2.1")) && !kernel.passes(packet("198.51.100.7")));
    assert!(kernel.passes(packet("198.51.100.8")), "another policy");
    // The chain gets its former rules again before the transaction.
    put(&mut model, "p7", "a", "192.0.2.2/32");
    put(&mut model, "p7", "a", "192.0.2.1/32");
    let changes = model.program.changes();
    assert!(changes.is_empty() && changes.addresses().is_empty() && !changes.may_forbid());
    // A policy that selects other pods gets other chains.
    put(&mut model, "p7", "b", "192.0.2.1/32");
    let changes = model.program.changes();
    assert!(changes.changed_chains.is_empty() && !changes.new_chains.is_empty());
    kernel.apply(&model.program, changes);
    assert!(!kernel.passes(packet("192.0.2.1")), "the policy does not select the pod");
}

#[test]
fn rules_with_other_ranges_and_ports_get_other_sets_and_chains() {
    let (mut model, mut kernel) = (Model::default(), Kernel::default());
    model.put_pod(PodFacts::of(&pod(1, "red", "a", "here", 80), "here").unwrap());
    for last in [1, 2, 3] {
        let blocks = ["10.0.0.0/8".to_owned(), format!("192.0.2.{last}/32")];
        let from: Vec<_> = blocks.iter().map(|cidr| json!({"ipBlock": {"cidr": cidr}})).collect();
        let peers = [from, vec![json!({"podSelector": {}})]].concat();
        let ports = json!([{"port": 80 + last}, {"port": 90, "endPort": 99}]);
        let spec = json!({"podSelector": {}, "ingress": [{"from": peers, "ports": ports}]});
        model.put_policy(&policy("red", "p", spec));
        let changes = model.program.changes();
        let is_first = last == 1;
        let chains = (changes.new_chains.len(), changes.changed_chains.len(), changes.ended_chains.len());
        assert_eq!(chains, if is_first { (3, 0, 0) } else { (1, 1, 1) }, "{last}");
        kernel.apply(&model.program, changes);
        for number in 1..=3 {
            let from = format!("192.0.2.{number}").parse().unwrap();
            let packet = Packet { from, to: "10.42.0.1".parse().unwrap(), protocol: TCP, port: 80 + last };
            assert_eq!(kernel.passes(packet), number == last, "{number} {last}");
        }
    }
}

#[test]
fn rules_have_lines_for_the_address_families_of_the_pods_of_this_node() {
    let (mut model, mut kernel) = (Model::default(), Kernel::default());
    let from = json!([{"podSelector": {}}, {"ipBlock": {"cidr": "192.0.2.0/24"}}, {"ipBlock": {"cidr": "2001:db8::/64"}}]);
    let ports = json!([{"protocol": "TCP", "port": "web"}]);
    let rules = json!([{"from": from}, {"ports": ports}]);
    model.put_policy(&policy("red", "p", json!({"podSelector": {}, "ingress": rules})));
    let facts = |number, node| PodFacts::of(&pod(number, "red", "a", node, 80), "here").unwrap();
    let lines = |model: &Model| model.program.chains.values().map(|chain| chain.lines.len()).sum::<usize>();
    let mut v4_only = facts(1, "here");
    v4_only.ips.retain(IpAddr::is_ipv4);
    model.put_pod(v4_only);
    model.put_pod(facts(2, "there"));
    assert_eq!(lines(&model), 2 + 3, "a jump and a drop; a selection, a block and a named port");
    let changes = model.program.changes();
    kernel.apply(&model.program, changes);
    model.put_pod(facts(3, "here"));
    assert_eq!(lines(&model), 2 + 6);
    let changes = model.program.changes();
    assert_eq!((changes.new_chains.len(), changes.changed_chains.len()), (0, 1));
    kernel.apply(&model.program, changes);
    let passes = |from: &str, to: &str, port| {
        let (from, to) = (from.parse().unwrap(), to.parse().unwrap());
        kernel.passes(Packet { from, to, protocol: TCP, port })
    };
    assert!(passes("2001:db8::1", "fd42::3", 81) && passes("2001:db9::1", "fd42::3", 80));
    assert!(passes("fd42::2", "fd42::3", 81) && !passes("2001:db9::1", "fd42::3", 81));
    assert!(passes("192.0.2.1", "10.42.0.1", 81) && !passes("198.51.100.1", "10.42.0.1", 81));
}

#[test]
fn a_pod_is_restricted_together_with_its_first_ipv6_address() {
    let (mut model, mut kernel) = (Model::default(), Kernel::default());
    let rules = json!([{"from": [{"ipBlock": {"cidr": "2001:db8::/64"}}]}]);
    model.put_policy(&policy("red", "p", json!({"podSelector": {}, "ingress": rules})));
    let whole = PodFacts::of(&pod(1, "red", "a", "here", 80), "here").unwrap();
    let mut early = whole.clone();
    early.ips.retain(IpAddr::is_ipv4);
    model.put_pod(early);
    let changes = model.program.changes();
    kernel.apply(&model.program, changes);
    let added: BTreeSet<IpAddr> = whole.ips.iter().copied().filter(IpAddr::is_ipv6).collect();
    model.put_pod(whole);
    let changes = model.program.changes();
    assert!(changes.may_forbid() && !changes.changed_chains.is_empty());
    assert_eq!(changes.addresses(), added, "connections of the other family stay");
    kernel.apply(&model.program, changes);
    let passes = |from: &str| {
        let (from, to) = (from.parse().unwrap(), "fd42::1".parse().unwrap());
        kernel.passes(Packet { from, to, protocol: TCP, port: 80 })
    };
    assert!(passes("2001:db8::1") && !passes("2001:db9::1"));
}

#[test]
fn only_several_ranges_of_one_family_need_a_set() {
    let mut model = Model::default();
    model.put_pod(PodFacts::of(&pod(1, "red", "a", "here", 80), "here").unwrap());
    let mut sets_of = |blocks: &[&str]| {
        let peers: Vec<_> = blocks.iter().map(|cidr| json!({"ipBlock": {"cidr": cidr}})).collect();
        let rules = json!([{"from": peers, "ports": [{"port": 80}]}]);
        model.put_policy(&policy("red", "p", json!({"podSelector": {}, "ingress": rules})));
        model.program.sets.keys().filter(|set| matches!(set, Set::Blocks(..))).count()
    };
    assert_eq!(sets_of(&["10.0.0.0/8", "10.1.0.0/16", "fd00::/8"]), 0);
    assert_eq!(sets_of(&["10.0.0.0/8", "192.0.2.1/32", "fd00::/8"]), 1);
    assert_eq!(sets_of(&["10.0.0.0/8"]), 0, "the set of the previous version is removed");
}

#[test]
fn only_several_conditions_on_the_ports_of_several_peers_need_a_chain() {
    let mut model = Model::default();
    model.put_pod(PodFacts::of(&pod(1, "red", "a", "here", 80), "here").unwrap());
    let mut chains_of = |blocks: &[&str], ports: &Value| {
        let peers: Vec<_> = blocks.iter().map(|cidr| json!({"ipBlock": {"cidr": cidr}})).collect();
        let rules = json!([{"from": peers, "ports": ports}]);
        model.put_policy(&policy("red", "p", json!({"podSelector": {}, "ingress": rules})));
        model.program.chains.keys().filter(|chain| matches!(chain, Chain::Ports(..))).count()
    };
    let one_port = json!([{"port": 80}]);
    let two_ports = json!([{"port": 80}, {"port": 81}]);
    let port_and_range = json!([{"port": 80}, {"port": 90, "endPort": 99}]);
    let (peer, peers) = (&["10.0.0.0/8"][..], &["10.0.0.0/8", "fd00::/8"][..]);
    for (blocks, ports, chains) in [
        (peers, &one_port, 0),
        (peer, &two_ports, 0),
        (peers, &two_ports, 1),
        (peer, &port_and_range, 0),
        (peers, &port_and_range, 1),
    ] {
        assert_eq!(chains_of(blocks, ports), chains, "{blocks:?} {ports}");
    }
}

#[test]
fn the_latest_pod_has_an_address_that_two_pods_claim() {
    let mut model = Model::default();
    model.put_policy(&policy("red", "deny", json!({"podSelector": {"matchLabels": {"app": "a"}}})));
    model.put_pod(PodFacts::of(&pod(1, "red", "a", "here", 80), "here").unwrap());
    let mut next = PodFacts::of(&pod(2, "red", "a", "here", 80), "here").unwrap();
    next.ips = vec!["10.42.0.1".parse().unwrap()];
    model.put_pod(next);
    model.remove_pod("u1");
    let set = Set::Isolated(Tier::Namespaced, Direction::Ingress, true);
    let isolated = ElementId { set, key: element("10.42.0.1".parse().unwrap()) };
    assert!(model.program.element(&isolated).is_some(), "the second pod stays isolated");
}

/// An address that several pods have, one after another.
const SHARED: &str = "10.42.0.9";

/// A model with pod `a`, whose policy allows packets of pods with the label `friend`.
fn with_friends() -> Model {
    let mut model = Model::default();
    let from = json!([{"from": [{"podSelector": {"matchLabels": {"app": "friend"}}}]}]);
    let spec =
        json!({"podSelector": {"matchLabels": {"app": "a"}}, "policyTypes": ["Ingress"], "ingress": from});
    model.put_policy(&policy("red", "p", spec));
    model.put_pod(PodFacts::of(&pod(1, "red", "a", "here", 80), "here").unwrap());
    model
}

/// A pod with the shared address. A pod with a larger number is younger.
fn with_shared_address(number: u8, app: &str, node: &str) -> PodFacts {
    let mut pod = pod(number, "red", app, node, 80);
    let created = format!("2026-01-0{number}T00:00:00Z");
    pod.metadata.creation_timestamp = serde_json::from_value(json!(created)).unwrap();
    PodFacts { ips: vec![SHARED.parse().unwrap()], ..PodFacts::of(&pod, "here").unwrap() }
}

/// Whether packets from the shared address reach pod `a`.
fn shared_address_passes(model: &mut Model, kernel: &mut Kernel) -> bool {
    let changes = model.program.changes();
    kernel.apply(&model.program, changes);
    let (from, to) = (SHARED.parse().unwrap(), "10.42.0.1".parse().unwrap());
    kernel.passes(Packet { from, to, protocol: TCP, port: 80 })
}

#[test]
fn permissions_of_an_older_pod_do_not_apply_to_the_next_pod_with_its_address() {
    let (mut model, mut kernel) = (with_friends(), Kernel::default());
    let facts = |number, app| with_shared_address(number, app, "there");
    let mut passes = |model: &mut Model| shared_address_passes(model, &mut kernel);
    model.put_pod(facts(2, "friend"));
    assert!(passes(&mut model));
    model.put_pod(facts(3, "other"));
    assert!(!passes(&mut model), "the address belongs to the new pod");
    model.put_pod(facts(2, "stranger"));
    model.put_pod(facts(2, "friend"));
    assert!(!passes(&mut model), "a change of the old pod");
    model.remove_pod("u3");
    assert!(passes(&mut model), "the old pod has its address again");
    model.remove_pod("u2");
    model.put_pod(facts(3, "other"));
    model.put_pod(facts(2, "friend"));
    assert!(!passes(&mut model), "the order of the events does not matter");
    model.put_pod(PodFacts { ips: Vec::new(), ..facts(3, "other") });
    assert!(passes(&mut model), "the new pod has another address");
}

#[test]
fn the_latest_sandbox_of_this_node_has_its_address() {
    let (mut model, mut kernel) = (with_friends(), Kernel::default());
    let facts = |number, app, sandbox| PodFacts { sandbox, ..with_shared_address(number, app, "here") };
    let mut passes = |model: &mut Model| shared_address_passes(model, &mut kernel);
    // The younger pod had the address before a reboot, and has no sandbox yet.
    model.put_pod(facts(3, "other", 0));
    model.put_pod(facts(2, "friend", 1));
    assert!(passes(&mut model), "the address belongs to the older pod");
    model.put_pod(facts(3, "other", 2));
    assert!(!passes(&mut model), "the older pod lost its sandbox, and the younger one got the address");
    model.put_pod(facts(2, "friend", 3));
    assert!(passes(&mut model));
}

#[test]
fn an_address_has_the_policies_of_the_latest_sandbox_only() {
    let (mut model, mut kernel) = (with_friends(), Kernel::default());
    let open =
        json!({"podSelector": {"matchLabels": {"app": "open"}}, "policyTypes": ["Ingress"], "ingress": [{}]});
    model.put_policy(&policy("red", "open", open));
    let facts = |number, app, sandbox| PodFacts { sandbox, ..with_shared_address(number, app, "here") };
    let mut is_reached = |model: &mut Model| {
        let changes = model.program.changes();
        kernel.apply(&model.program, changes);
        let (from, to) = ("10.42.0.77".parse().unwrap(), SHARED.parse().unwrap());
        kernel.passes(Packet { from, to, protocol: TCP, port: 80 })
    };
    // The pods with the older sandboxes come last, as after a restart of the agent.
    model.put_pod(facts(3, "a", 2));
    model.put_pod(facts(2, "open", 1));
    assert!(!is_reached(&mut model), "the policy of the pod with the older sandbox applies");
    model.put_pod(facts(3, "free", 2));
    model.put_pod(facts(2, "a", 1));
    assert!(is_reached(&mut model), "a pod without policies is restricted by those of another pod");
    model.put_pod(facts(2, "a", 3));
    assert!(!is_reached(&mut model), "the restricted pod got the address");
    model.put_pod(facts(3, "free", 4));
    assert!(is_reached(&mut model), "the restricted pod lost the address");
    model.remove_pod("u3");
    assert!(!is_reached(&mut model), "the restricted pod has its address again");
}

#[test]
fn a_pod_of_an_unknown_namespace_has_unknown_policies() {
    let mut model = Model::default();
    assert!(model.has_all_policies_of("red"));
    let specification = json!({"priority": 1, "subject": {"namespaces": {}}});
    let policy = ClusterPolicy::parse(ClusterKind::AdminNetworkPolicy, "p", &specification).unwrap();
    model.put_cluster_policy(policy);
    assert!(!model.has_all_policies_of("red"));
    model.put_namespace("red", Labels::new());
    assert!(model.has_all_policies_of("red"));
}

#[test]
fn a_tenant_cannot_make_its_pod_look_like_a_node() {
    let (mut model, mut kernel) = (Model::default(), Kernel::default());
    let specification = json!({"priority": 1, "subject": {"namespaces": {}},
        "egress": [{"action": "Deny", "to": [{"nodes": {}}]}]});
    let policy = ClusterPolicy::parse(ClusterKind::AdminNetworkPolicy, "p", &specification).unwrap();
    model.put_cluster_policy(policy);
    model.put_namespace("red", Labels::new());
    let mut own = pod(1, "red", "a", "here", 80);
    own.metadata.name = Some("n1".to_owned());
    model.put_pod(PodFacts::of(&own, "here").unwrap());
    model.put_pod(PodFacts::of(&pod(2, "red", "a", "here", 80), "here").unwrap());
    model.put_node(&node(1, "x"));
    let changes = model.program.changes();
    kernel.apply(&model.program, changes);
    let to = |to: &str| Packet {
        from: "10.42.0.2".parse().unwrap(),
        to: to.parse().unwrap(),
        protocol: TCP,
        port: 80,
    };
    assert!(kernel.passes(to("10.42.0.1")) && !kernel.passes(to("192.0.2.1")));
}

#[test]
fn a_policy_whose_only_pod_is_replaced_gets_new_chains() {
    let (mut model, mut kernel) = (Model::default(), Kernel::default());
    let from = json!([{"from": [{"podSelector": {"matchLabels": {"app": "b"}}}]}]);
    model.put_policy(&policy(
        "red",
        "p",
        json!({"podSelector": {}, "policyTypes": ["Ingress"], "ingress": from}),
    ));
    for (old, new) in [(0, 1), (1, 2)] {
        // Both changes are in one transaction.
        model.remove_pod(&format!("u{old}"));
        model.put_pod(PodFacts::of(&pod(new, "red", "a", "here", 80), "here").unwrap());
        let changes = model.program.changes();
        kernel.apply(&model.program, changes);
    }
}

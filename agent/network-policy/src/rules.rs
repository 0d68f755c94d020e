//! Parsed rules of policies, and the parser of NetworkPolicies.

use std::collections::BTreeSet;

use coracle_values::label_selector::{LabelSelector, Labels};
use ipnetwork::IpNetwork;
use k8s_openapi::api::networking::v1::{NetworkPolicy, NetworkPolicyPeer, NetworkPolicyPort};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use crate::blocks::Block;
use crate::facts::{PodFacts, protocol};

/// Direction of packets, as seen by the selected pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Direction {
    /// Packets to the pod. The peer is the source.
    Ingress,
    /// Packets from the pod. The peer is the destination.
    Egress,
}

/// Tier of a policy. The tiers decide on a packet in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Tier {
    /// Policies of the cluster's administrators.
    Admin,
    /// NetworkPolicies. They decide on every packet of the pods that they select.
    Namespaced,
    /// Policies of the cluster's administrators for pods that no NetworkPolicy selects.
    Baseline,
}

/// Effect of a rule on the packets that match it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    Allow,
    Deny,
    /// The other rules of the tier are skipped, and the next tier decides on the packet.
    Pass,
}

/// A parsed policy.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Rules {
    /// Pods to which the policy applies.
    pub(crate) subject: PodPeer,
    /// Rules for packets to the pods. `None` if the policy does not restrict the direction. An empty list allows
    /// nothing.
    pub(crate) ingress: Option<Vec<Rule>>,
    pub(crate) egress: Option<Vec<Rule>>,
}

/// A rule: the packets of some peers and ports, and the action on these packets.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Rule {
    pub(crate) action: Action,
    /// `None` means all peers.
    pub(crate) peers: Option<Peers>,
    /// `None` means all ports of all protocols.
    pub(crate) ports: Option<PortList>,
}

/// Peers of a rule.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Peers {
    pub(crate) pods: Vec<PodPeer>,
    pub(crate) blocks: Vec<Block>,
}

/// Pods of some namespaces, or nodes.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct PodPeer {
    pub(crate) namespaces: Namespaces,
    pub(crate) pods: LabelSelector,
}

/// Namespaces of a peer.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Namespaces {
    /// The policy's own namespace.
    Own,
    Selected(LabelSelector),
    /// No namespaces: the selector of pods selects nodes.
    Nodes,
}

/// The name of a container port.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct NamedPort {
    /// Without a protocol, the name selects ports of all protocols.
    pub(crate) protocol: Option<u8>,
    pub(crate) name: String,
}

/// A range of ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PortRange {
    pub(crate) protocol: u8,
    pub(crate) first: u16,
    pub(crate) last: u16,
}

/// Ports of a rule.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct PortList {
    pub(crate) protocols: BTreeSet<u8>,
    pub(crate) single: BTreeSet<(u8, u16)>,
    pub(crate) ranges: BTreeSet<PortRange>,
    pub(crate) named: BTreeSet<NamedPort>,
}

/// Whether a selector selects a namespace with these labels. Unknown labels match only the empty selector.
pub(crate) fn selects_namespace(selector: &LabelSelector, labels: Option<&Labels>) -> bool {
    selector.is_empty() || labels.is_some() && selector.matches(labels)
}

// === impl Rules ===

impl Rules {
    /// Parses a policy. An invalid part allows nothing; a policy with an invalid pod selector is `None`.
    pub(crate) fn of(policy: &NetworkPolicy) -> Option<Self> {
        let spec = policy.spec.as_ref()?;
        let pods = match &spec.pod_selector {
            Some(selector) => LabelSelector::try_from(selector).ok()?,
            None => LabelSelector::default(),
        };
        let has_type = |name: &str, default: bool| match spec.policy_types.as_deref() {
            None | Some([]) => default,
            Some(types) => types.iter().any(|kind| kind == name),
        };
        let ingress = spec.ingress.iter().flatten();
        let ingress = ingress.map(|rule| Rule::of(rule.from.as_deref(), rule.ports.as_deref()));
        let egress = spec.egress.iter().flatten();
        let egress = egress.map(|rule| Rule::of(rule.to.as_deref(), rule.ports.as_deref()));
        Some(Self {
            subject: PodPeer { namespaces: Namespaces::Own, pods },
            ingress: has_type("Ingress", true).then(|| ingress.collect()),
            egress: has_type("Egress", spec.egress.is_some()).then(|| egress.collect()),
        })
    }

    pub(crate) fn of_direction(&self, direction: Direction) -> Option<&[Rule]> {
        match direction {
            Direction::Ingress => self.ingress.as_deref(),
            Direction::Egress => self.egress.as_deref(),
        }
    }

    /// Whether the policy restricts the direction for a pod. `namespace` has the labels of the pod's namespace. A
    /// policy without a namespace selector restricts only pods of its own namespace. For such a policy, the caller
    /// passes only pods of this namespace.
    pub(crate) fn restricts(&self, direction: Direction, pod: &PodFacts, namespace: Option<&Labels>) -> bool {
        let is_in = match &self.subject.namespaces {
            Namespaces::Own => true,
            Namespaces::Selected(selector) => selects_namespace(selector, namespace),
            Namespaces::Nodes => false,
        };
        is_in && self.of_direction(direction).is_some() && self.subject.pods.matches(Some(&pod.labels))
    }

    /// Whether a rule has nodes as peers.
    pub(crate) fn names_nodes(&self) -> bool {
        let rules = self.ingress.iter().chain(&self.egress).flatten();
        let mut peers = rules.filter_map(|rule| rule.peers.as_ref()).flat_map(|peers| &peers.pods);
        peers.any(|peer| peer.namespaces == Namespaces::Nodes)
    }
}

// === impl Rule ===

impl Rule {
    fn of(peers: Option<&[NetworkPolicyPeer]>, ports: Option<&[NetworkPolicyPort]>) -> Self {
        Self {
            action: Action::Allow,
            peers: peers.filter(|peers| !peers.is_empty()).map(Peers::of),
            ports: ports.filter(|ports| !ports.is_empty()).map(PortList::of),
        }
    }
}

// === impl Peers ===

impl Peers {
    fn of(all: &[NetworkPolicyPeer]) -> Self {
        let mut peers = Self::default();
        for peer in all {
            match &peer.ip_block {
                Some(block) => {
                    let Ok(network) = block.cidr.parse::<IpNetwork>() else { continue };
                    let except = block.except.iter().flatten().map(|text| text.parse());
                    // An exception that cannot be parsed may contain any address of the block. So the whole block is
                    // ignored.
                    let Ok(except) = except.collect::<Result<Vec<IpNetwork>, _>>() else { continue };
                    peers.blocks.push(Block { network, except });
                }
                None => peers.pods.extend(PodPeer::of(peer)),
            }
        }
        peers
    }
}

// === impl PodPeer ===

impl PodPeer {
    fn of(peer: &NetworkPolicyPeer) -> Option<Self> {
        if peer.namespace_selector.is_none() && peer.pod_selector.is_none() {
            return None;
        }
        let parse = |selector: &Option<_>| selector.as_ref().map(LabelSelector::try_from).transpose().ok();
        Some(Self {
            namespaces: parse(&peer.namespace_selector)?.map_or(Namespaces::Own, Namespaces::Selected),
            pods: parse(&peer.pod_selector)?.unwrap_or_default(),
        })
    }
}

// === impl PortList ===

impl PortList {
    fn of(all: &[NetworkPolicyPort]) -> Self {
        let mut ports = Self::default();
        for port in all {
            let Some(protocol) = protocol(port.protocol.as_deref()) else { continue };
            match (&port.port, port.end_port) {
                (None, _) => drop(ports.protocols.insert(protocol)),
                (Some(IntOrString::String(name)), _) => {
                    ports.named.insert(NamedPort { protocol: Some(protocol), name: name.clone() });
                }
                (Some(IntOrString::Int(first)), end) => {
                    let Ok(first) = u16::try_from(*first) else { continue };
                    match end.map(u16::try_from) {
                        None => drop(ports.single.insert((protocol, first))),
                        Some(Ok(last)) if last >= first => {
                            ports.ranges.insert(PortRange { protocol, first, last });
                        }
                        Some(_) => {}
                    }
                }
            }
        }
        ports
    }
}

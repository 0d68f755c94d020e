//! Parser of one rule of a policy of the whole cluster.

use coracle_values::label_selector::LabelSelector;
use ipnetwork::IpNetwork;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector as Selector;
use serde::Deserialize;
use serde_json::Value;

use super::{NamespacedPods, pods_of};
use crate::blocks::Block;
use crate::facts::protocol;
use crate::rules::{Action, Direction, NamedPort, Namespaces, Peers, PodPeer, PortList, PortRange, Rule};

/// A parsed rule. `problems` describes the parts that have no effect, or an effect other than the intended one.
pub(super) struct Parsed {
    /// `None` if the rule matches nothing.
    pub(super) rule: Option<Rule>,
    pub(super) problems: Vec<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawRule {
    #[serde(rename = "name")]
    _name: Option<String>,
    action: RawAction,
    from: Option<Vec<Peer>>,
    to: Option<Vec<Peer>>,
    /// Ports in `v1alpha1`.
    ports: Option<Vec<Port>>,
    /// Protocols with their ports in `v1alpha2`.
    protocols: Option<Vec<Protocol>>,
}

#[derive(Deserialize)]
enum RawAction {
    /// `Accept` in `v1alpha2`.
    #[serde(alias = "Accept")]
    Allow,
    Deny,
    Pass,
}

/// A peer has exactly one field. An unknown field is an error.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
enum Peer {
    Namespaces(Selector),
    Pods(NamespacedPods),
    Nodes(Selector),
    Networks(Vec<String>),
    DomainNames(Vec<String>),
}

/// An entry of `ports` in `v1alpha1`. It has exactly one field.
#[derive(Deserialize)]
enum Port {
    #[serde(rename = "portNumber")]
    Number { protocol: Option<String>, port: u16 },
    #[serde(rename = "namedPort")]
    Named(String),
    #[serde(rename = "portRange")]
    Range { protocol: Option<String>, start: u16, end: u16 },
}

/// An entry of `protocols` in `v1alpha2`. It has exactly one field.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
enum Protocol {
    Tcp(Attributes),
    Udp(Attributes),
    Sctp(Attributes),
    DestinationNamedPort(String),
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Attributes {
    destination_port: DestinationPort,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
enum DestinationPort {
    Number(u16),
    Range { start: u16, end: u16 },
}

/// Parses a rule. An invalid rule fails closed: it allows nothing, or denies everything.
pub(super) fn parse(value: &Value, direction: Direction) -> Parsed {
    let mut problems = Vec::new();
    match rule_of(value, direction, &mut problems) {
        Ok(rule) => Parsed { rule: Some(rule), problems },
        Err(problem) => {
            let allows = matches!(value["action"].as_str(), Some("Allow" | "Accept"));
            let effect = if allows { "it matches nothing" } else { "it denies everything" };
            problems.push(format!("{problem}; {effect}"));
            let closed = Rule { action: Action::Deny, peers: None, ports: None };
            Parsed { rule: (!allows).then_some(closed), problems }
        }
    }
}

fn rule_of(value: &Value, direction: Direction, problems: &mut Vec<String>) -> Result<Rule, String> {
    let raw = RawRule::deserialize(value).map_err(|error| error.to_string())?;
    let action = match raw.action {
        RawAction::Allow => Action::Allow,
        RawAction::Deny => Action::Deny,
        RawAction::Pass => Action::Pass,
    };
    let (peers, opposite, field, other) = match direction {
        Direction::Ingress => (raw.from, raw.to, "from", "to"),
        Direction::Egress => (raw.to, raw.from, "to", "from"),
    };
    let peers = peers.filter(|peers| !peers.is_empty() && opposite.is_none());
    let peers = peers.ok_or_else(|| {
        format!("the field {field} must have at least one peer, and the field {other} must be absent")
    })?;
    let mut ports = PortList::default();
    for port in raw.ports.iter().flatten() {
        port.add_to(&mut ports)?;
    }
    for protocol in raw.protocols.iter().flatten() {
        protocol.add_to(&mut ports)?;
    }
    if direction == Direction::Ingress && peers.iter().any(Peer::is_egress_only) {
        return Err("nodes, networks and domainNames are valid only in egress rules".to_owned());
    }
    let peers = peers_of(&peers, action, problems)?;
    Ok(Rule { action, peers: Some(peers), ports: Some(ports).filter(|ports| *ports != PortList::default()) })
}

fn peers_of(all: &[Peer], action: Action, problems: &mut Vec<String>) -> Result<Peers, String> {
    let mut peers = Peers::default();
    for peer in all {
        match peer {
            Peer::Namespaces(selector) => peers.pods.push(pods_of(selector, &Selector::default())?),
            Peer::Pods(pods) => peers.pods.push(pods_of(&pods.namespace_selector, &pods.pod_selector)?),
            Peer::Nodes(selector) => peers.pods.push(PodPeer {
                namespaces: Namespaces::Nodes,
                pods: LabelSelector::try_from(selector).map_err(|error| error.to_string())?,
            }),
            Peer::Networks(networks) => {
                for text in networks {
                    peers.blocks.push(Block { network: network_of(text)?, except: Vec::new() });
                }
            }
            Peer::DomainNames(names) if action == Action::Allow => {
                let names = names.join(", ");
                problems.push(format!("domainNames are not supported, and match nothing: {names}"));
            }
            Peer::DomainNames(_) => {
                return Err("domainNames are valid only in rules with the action Accept".to_owned());
            }
        }
    }
    Ok(peers)
}

/// A network in CIDR notation: with a prefix length.
fn network_of(text: &str) -> Result<IpNetwork, String> {
    let network = text.parse().ok().filter(|_| text.contains('/'));
    network.ok_or_else(|| format!("invalid network {text}"))
}

fn add_range(ports: &mut PortList, protocol: u8, first: u16, last: u16) -> Result<(), String> {
    if first == 0 || first > last {
        return Err(format!("invalid ports {first} to {last}"));
    }
    match first == last {
        true => drop(ports.single.insert((protocol, first))),
        false => drop(ports.ranges.insert(PortRange { protocol, first, last })),
    }
    Ok(())
}

// === impl Peer ===

impl Peer {
    /// Whether this peer is valid only in egress rules. The schema of ingress rules does not have its field.
    fn is_egress_only(&self) -> bool {
        match self {
            Self::Namespaces(_) | Self::Pods(_) => false,
            Self::Nodes(_) | Self::Networks(_) | Self::DomainNames(_) => true,
        }
    }
}

// === impl Port ===

impl Port {
    fn add_to(&self, ports: &mut PortList) -> Result<(), String> {
        let number = |name: &Option<String>| {
            let unknown = || format!("unknown protocol {}", name.as_deref().unwrap_or_default());
            protocol(name.as_deref()).ok_or_else(unknown)
        };
        match self {
            Self::Number { protocol, port } => add_range(ports, number(protocol)?, *port, *port),
            Self::Range { protocol, start, end } => add_range(ports, number(protocol)?, *start, *end),
            Self::Named(name) => {
                ports.named.insert(NamedPort { protocol: None, name: name.clone() });
                Ok(())
            }
        }
    }
}

// === impl Protocol ===

impl Protocol {
    fn add_to(&self, ports: &mut PortList) -> Result<(), String> {
        let (name, attributes) = match self {
            Self::Tcp(attributes) => ("TCP", attributes),
            Self::Udp(attributes) => ("UDP", attributes),
            Self::Sctp(attributes) => ("SCTP", attributes),
            Self::DestinationNamedPort(name) => {
                ports.named.insert(NamedPort { protocol: None, name: name.clone() });
                return Ok(());
            }
        };
        let (first, last) = match attributes.destination_port {
            DestinationPort::Number(number) => (number, number),
            DestinationPort::Range { start, end } => (start, end),
        };
        protocol(Some(name)).map_or(Ok(()), |number| add_range(ports, number, first, last))
    }
}

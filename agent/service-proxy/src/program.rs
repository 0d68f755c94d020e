//! The program of one service: its chains and elements in the table.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use coracle_nft::{Element, Key, Rule, Value, Verdict};

use crate::choice::Choice;
use crate::endpoints::Target;

/// The maps and sets of the table, each once for IPv4 and once for IPv6.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Map {
    /// Maps a cluster IP, protocol and port to a chain.
    Services,
    /// Maps a cluster IP, protocol, port and the number of a target to the target.
    Targets,
    /// Maps an external address, protocol and port to a chain.
    External,
    /// Maps a protocol and node port to a chain.
    NodePorts,
    /// Maps an address, protocol and port without endpoints to `reject` or `drop`.
    Rejected,
    /// Maps a protocol and node port without endpoints to `reject` or `drop`.
    RejectedPorts,
    /// Maps a load balancer address, protocol and port to a chain that checks the source.
    Guarded,
    /// All cluster IPs.
    ClusterIps,
    /// Each endpoint on this node, paired with itself: it matches connections of an endpoint to itself through its
    /// service.
    Hairpin,
}

/// Identifies an element: its map, its address family and its key.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct ElementId {
    pub(crate) map: Map,
    pub(crate) is_ipv4: bool,
    pub(crate) key: Key,
}

/// The value of a key in a map or set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Entry {
    /// An element of a set.
    Member,
    /// A chain.
    Verdict(Verdict),
    /// One of these targets, chosen at random. Only for [`Map::Services`], because the keys of the targets contain the
    /// destination.
    OneOf(Choice),
}

/// A set of clients that reached an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Affinity {
    pub(crate) is_ipv4: bool,
    pub(crate) timeout: Duration,
}

/// A port of a protocol without connections, such as UDP. Conntrack entries to the port may lead to former endpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct ConnectionlessPort {
    pub(crate) protocol: u8,
    pub(crate) is_ipv4: bool,
    /// `None` means any address of this machine.
    pub(crate) address: Option<IpAddr>,
    pub(crate) port: u16,
}

/// Changes of the map of targets.
pub(crate) struct TargetChanges {
    /// Elements to remove.
    pub(crate) ended: Vec<Element>,
    /// Elements to add.
    pub(crate) added: Vec<Element>,
}

/// The chains and elements of one service in the table.
#[derive(Debug, Default)]
pub(crate) struct Program {
    pub(crate) chains: BTreeMap<String, Vec<Rule>>,
    pub(crate) affinities: BTreeMap<String, Affinity>,
    pub(crate) elements: BTreeMap<ElementId, Entry>,
    /// The targets of ports of protocols without connections, such as UDP.
    pub(crate) connectionless: BTreeMap<ConnectionlessPort, BTreeSet<SocketAddr>>,
    /// For each chain that chooses a target: all its targets.
    #[cfg(test)]
    pub(crate) targets: BTreeMap<String, BTreeSet<Target>>,
}

/// The part of an applied program that is needed to compare it with the next program.
#[derive(Debug, Default)]
pub(crate) struct AppliedProgram {
    /// Names of chains with the hash of their rules.
    pub(crate) chains: BTreeMap<String, u64>,
    pub(crate) affinities: BTreeSet<String>,
    pub(crate) elements: Box<[ElementId]>,
    /// Number of elements in the map of targets.
    pub(crate) targets: usize,
    pub(crate) connectionless: BTreeMap<ConnectionlessPort, BTreeSet<SocketAddr>>,
}

// === impl Entry ===

impl Entry {
    /// Converts the entry to an element of its map.
    pub(crate) fn element(&self, element_id: &ElementId) -> Element {
        let value = match self {
            Self::Member => None,
            Self::Verdict(verdict) => Some(Value::Verdict(verdict.clone())),
            Self::OneOf(choice) => {
                let chain = balancing(choice.slots, element_id.is_ipv4);
                Some(Value::Verdict(Verdict::Goto(chain)))
            }
        };
        Element { key: element_id.key.clone(), value, expires: None }
    }

    /// The changes of the map of targets when an entry changes.
    pub(crate) fn target_changes(
        element_id: &ElementId,
        before: Option<&Self>,
        now: Option<&Self>,
    ) -> TargetChanges {
        let targets = |entry: Option<&Self>| match entry {
            Some(Self::OneOf(choice)) => Arc::clone(&choice.targets),
            _ => Arc::default(),
        };
        let (before, now) = (targets(before), targets(now));
        let of = |all: &[Target], others: &[Target]| {
            let numbered = (0u32..).zip(all).zip((0..).map(|at| others.get(at)));
            let differing = numbered.filter(|((_, target), other)| Some(*target) != *other);
            let element = |((number, target), _): ((u32, &Target), _)| {
                Element::pair(
                    element_id.key.clone().number(number),
                    Value::Target(target.address, target.port),
                )
            };
            differing.map(element).collect()
        };
        TargetChanges { ended: of(&before, &now), added: of(&now, &before) }
    }
}

// === impl Program ===

impl Program {
    /// Adds an element, unless the program has an element with this key.
    pub(crate) fn element(&mut self, map: Map, is_ipv4: bool, key: Key, entry: Entry) {
        self.elements.entry(ElementId { map, is_ipv4, key }).or_insert(entry);
    }

    pub(crate) fn summary(&self) -> AppliedProgram {
        let targets = |entry: &Entry| match entry {
            Entry::OneOf(choice) => choice.targets.len(),
            Entry::Member | Entry::Verdict(_) => 0,
        };
        AppliedProgram {
            chains: self.chains.iter().map(|(name, rules)| (name.clone(), hash(rules))).collect(),
            affinities: self.affinities.keys().cloned().collect(),
            elements: self.elements.keys().cloned().collect(),
            targets: self.elements.values().map(targets).sum(),
            connectionless: self.connectionless.clone(),
        }
    }
}

/// A hash of rules. After a collision the kernel would keep outdated rules until the next change. The probability of a
/// collision is about 2^-64 for each change.
pub(crate) fn hash(rules: &[Rule]) -> u64 {
    let mut hasher = DefaultHasher::new();
    rules.hash(&mut hasher);
    hasher.finish()
}

/// Name of the chain that chooses one of the targets of the destination, which have this number of slots.
pub(crate) fn balancing(slots: usize, is_ipv4: bool) -> String {
    format!("balance {slots}/{}", if is_ipv4 { 4 } else { 6 })
}

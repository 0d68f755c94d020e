//! The content of the table, and its changes since the last transaction.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;

use coracle_nft::Key;

use crate::blocks::Range;
use crate::rules::{Direction, Tier};

/// Names of sets and maps. The flag is true for IPv4.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Set {
    /// Map from the addresses of this node's pods to the chains of their groups in a tier.
    Isolated(Tier, Direction, bool),
    /// Each address of a pod of this node with NetworkPolicies, paired with itself: it matches packets of a pod to
    /// itself.
    Itself(Direction, bool),
    /// Addresses of the pods of this node whose policies are in the table, each with the pod's uid. No rule refers to
    /// this set: the agent reads it after a restart.
    Enforced(bool),
    /// Addresses of the pods of a selection.
    Addresses(u64, bool),
    /// Addresses, protocols and numbers of a named port of a selection.
    NamedPorts(u64, bool),
    /// IP blocks of a rule: policy, direction, position.
    Blocks(u64, Direction, usize, bool),
}

/// Names of chains.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Chain {
    /// Jumps to all policies of a tier that select the same pods. Packets on which no NetworkPolicy decides are
    /// dropped.
    Group(u64),
    /// Rules of a policy in one direction.
    Policy(u64, Direction),
    /// Ports of a rule of a policy.
    Ports(u64, Direction, usize),
}

/// Condition on the address of the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Peer {
    /// The address is in this set.
    In(Set),
    /// The address is in this range. The flag is true for IPv4. A range needs no set. The kernel searches all sets of a
    /// table by name, so each set makes every transaction slower.
    Range(Range, bool),
}

/// A rule of a chain. All parts must match.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Line {
    pub(crate) peer: Option<Peer>,
    pub(crate) ports: Option<Ports>,
    pub(crate) then: RuleAction,
}

/// Condition on the transport protocol and the destination port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Ports {
    Protocol(u8),
    Single(BTreeSet<(u8, u16)>),
    Range(u8, u16, u16),
    /// Destination, protocol and port are in this set.
    Named(Set),
}

/// The verdict on a packet that matches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RuleAction {
    Accept,
    Drop,
    /// The next tier decides on the packet.
    Pass,
    Jump(Chain),
}

/// The lines of a chain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Lines {
    pub(crate) tier: Tier,
    pub(crate) direction: Direction,
    pub(crate) lines: Vec<Line>,
}

/// Value of an element: the group of policies in a map of verdicts; `None` in a set.
pub(crate) type Element = Option<u64>;

/// The content of the table.
#[derive(Debug, Default)]
pub(crate) struct Program {
    pub(crate) chains: HashMap<Chain, Lines>,
    /// All sets except the fixed ones. A set of ranges is stored with its ranges.
    pub(crate) sets: HashMap<Set, Vec<Range>>,
    /// Claims of pods on elements, by the number of the pod. A pod claims elements of the addresses that it has. If two
    /// pods claim one element, the highest number decides.
    claims: HashMap<ElementId, BTreeMap<u64, Element>>,
    previous: PreviousObjects,
}

/// An element of a set.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct ElementId {
    pub(crate) set: Set,
    pub(crate) key: Key,
}

/// The state before the changes: the lines of each changed chain, whether each changed set existed, and the previous
/// value of each changed element. `None` for a chain or an element that did not exist.
#[derive(Debug, Default)]
struct PreviousObjects {
    chains: BTreeMap<Chain, Option<Lines>>,
    sets: BTreeMap<Set, bool>,
    elements: BTreeMap<ElementId, Option<Element>>,
    /// Addresses of the pods whose packets enter chains with replaced lines.
    concerned: BTreeSet<IpAddr>,
}

/// The difference between two states of the table.
#[derive(Debug, Default)]
pub(crate) struct Changes {
    pub(crate) new_sets: Vec<Set>,
    pub(crate) ended_sets: Vec<Set>,
    pub(crate) new_chains: Vec<Chain>,
    pub(crate) ended_chains: Vec<Chain>,
    /// Chains that keep their names and get other lines. The references to them stay as they are.
    pub(crate) changed_chains: Vec<Chain>,
    /// Addresses of the pods whose packets enter the changed chains.
    pub(crate) concerned: BTreeSet<IpAddr>,
    pub(crate) new_elements: BTreeMap<Set, Vec<(Key, Element)>>,
    pub(crate) ended_elements: BTreeMap<Set, Vec<Key>>,
}

// === impl Set ===

impl Set {
    pub(crate) fn is_ipv4(self) -> bool {
        match self {
            Self::Isolated(.., is_ipv4)
            | Self::Itself(_, is_ipv4)
            | Self::Enforced(is_ipv4)
            | Self::Addresses(_, is_ipv4)
            | Self::NamedPorts(_, is_ipv4)
            | Self::Blocks(.., is_ipv4) => is_ipv4,
        }
    }
}

// === impl Program ===

impl Program {
    /// Adds a chain, or replaces its lines. After a replacement, the caller passes the addresses of the pods whose
    /// packets enter the chain to [`concern`](Self::concern).
    pub(crate) fn put_chain(&mut self, chain: Chain, lines: Lines) {
        let before = self.chains.insert(chain, lines);
        self.previous.chains.entry(chain).or_insert(before);
    }

    pub(crate) fn remove_chain(&mut self, chain: Chain) {
        let before = self.chains.remove(&chain);
        self.previous.chains.entry(chain).or_insert(before);
    }

    /// Records addresses whose connections may get another verdict, because lines of their chains were replaced.
    pub(crate) fn concern(&mut self, addresses: impl IntoIterator<Item = IpAddr>) {
        self.previous.concerned.extend(addresses);
    }

    /// Adds a set. Its ranges are never changed.
    pub(crate) fn add_set(&mut self, set: Set, ranges: Vec<Range>) {
        self.previous.sets.entry(set).or_insert(false);
        self.sets.insert(set, ranges);
    }

    pub(crate) fn remove_set(&mut self, set: Set) {
        self.previous.sets.entry(set).or_insert(true);
        self.sets.remove(&set);
    }

    /// Adds the claim of a pod on an element.
    pub(crate) fn claim(&mut self, set: Set, key: &Key, pod: u64, element: Element) {
        self.record_before(set, key);
        self.claims.entry(ElementId { set, key: key.clone() }).or_default().insert(pod, element);
    }

    pub(crate) fn remove_claim(&mut self, set: Set, key: &Key, pod: u64) {
        self.record_before(set, key);
        let id = ElementId { set, key: key.clone() };
        if let Some(claims) = self.claims.get_mut(&id) {
            claims.remove(&pod);
            if claims.is_empty() {
                self.claims.remove(&id);
            }
        }
    }

    fn record_before(&mut self, set: Set, key: &Key) {
        let id = ElementId { set, key: key.clone() };
        if !self.previous.elements.contains_key(&id) {
            let before = self.element(&id);
            self.previous.elements.insert(id, before);
        }
    }

    /// The value of an element. `None` if the set has no such element.
    pub(crate) fn element(&self, id: &ElementId) -> Option<Element> {
        self.claims.get(id)?.values().next_back().copied()
    }

    /// The changes since the last call.
    pub(crate) fn changes(&mut self) -> Changes {
        let previous = std::mem::take(&mut self.previous);
        let mut changes = Changes::default();
        for (chain, before) in previous.chains {
            match (before, self.chains.get(&chain)) {
                (None, Some(_)) => changes.new_chains.push(chain),
                (Some(_), None) => changes.ended_chains.push(chain),
                (Some(before), Some(now)) if before != *now => changes.changed_chains.push(chain),
                _ => {}
            }
        }
        if !changes.changed_chains.is_empty() {
            changes.concerned = previous.concerned;
        }
        for (set, existed) in previous.sets {
            match (existed, self.sets.contains_key(&set)) {
                (false, true) => changes.new_sets.push(set),
                (true, false) => changes.ended_sets.push(set),
                _ => {}
            }
        }
        for (id, before) in previous.elements {
            let now = self.element(&id);
            if now == before {
                continue;
            }
            let ElementId { set, key } = id;
            // The elements of a removed set are removed with the set.
            let is_ended = changes.ended_sets.binary_search(&set).is_ok();
            if before.is_some() && !is_ended {
                changes.ended_elements.entry(set).or_default().push(key.clone());
            }
            if let Some(element) = now {
                changes.new_elements.entry(set).or_default().push((key, element));
            }
        }
        changes
    }

    /// All content as changes of an empty table. Clears the record of previous objects.
    pub(crate) fn all(&mut self) -> Changes {
        self.previous = PreviousObjects::default();
        let mut changes = Changes {
            new_sets: self.sets.keys().copied().collect(),
            new_chains: self.chains.keys().copied().collect(),
            ..Changes::default()
        };
        for id in self.claims.keys() {
            if let Some(element) = self.element(id) {
                changes.new_elements.entry(id.set).or_default().push((id.key.clone(), element));
            }
        }
        changes
    }
}

// === impl Changes ===

impl Changes {
    /// Whether the change may forbid a connection that was allowed: the policies of a pod or the rules of a policy
    /// changed, or a NetworkPolicy lost a peer. Other changes only allow more connections. The caller checks whether
    /// policies of other tiers exist: then every change may forbid connections.
    pub(crate) fn may_forbid(&self) -> bool {
        let has_no_peers = |set: &Set| {
            matches!(set, Set::Isolated(Tier::Namespaced, ..) | Set::Itself(..) | Set::Enforced(_))
        };
        let isolates = self.new_elements.keys().any(|set| matches!(set, Set::Isolated(..)));
        let excludes = self.ended_elements.keys().any(|set| !has_no_peers(set));
        isolates || excludes || !self.changed_chains.is_empty()
    }

    /// The addresses whose connections may get another verdict by the change. The verdict on a connection depends on
    /// the elements of its two addresses and on the chains of the pods that have these addresses. It also depends on
    /// ranges, but these never change. New sets are left out: only new and changed chains refer to them. A new chain
    /// applies to a pod only after an element of the pod, or a chain of the pod, has changed.
    pub(crate) fn addresses(&self) -> BTreeSet<IpAddr> {
        let new = self.new_elements.iter().filter(|(set, _)| self.new_sets.binary_search(set).is_err());
        let new = new.flat_map(|(set, all)| all.iter().map(|(key, _)| (*set, key)));
        let ended = self.ended_elements.iter().flat_map(|(set, all)| all.iter().map(|key| (*set, key)));
        let of_rules = new.chain(ended).filter(|(set, _)| !matches!(set, Set::Enforced(_)));
        let of_rules = of_rules.filter_map(|(set, key)| address(key, set.is_ipv4()));
        of_rules.chain(self.concerned.iter().copied()).collect()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.new_sets.is_empty()
            && self.ended_sets.is_empty()
            && self.new_chains.is_empty()
            && self.ended_chains.is_empty()
            && self.changed_chains.is_empty()
            && self.new_elements.is_empty()
            && self.ended_elements.is_empty()
    }
}

/// The address at the start of a key.
fn address(key: &Key, is_ipv4: bool) -> Option<IpAddr> {
    let bytes = key.as_bytes();
    match is_ipv4 {
        true => bytes.first_chunk::<4>().map(|octets| IpAddr::from(*octets)),
        false => bytes.first_chunk::<16>().map(|octets| IpAddr::from(*octets)),
    }
}

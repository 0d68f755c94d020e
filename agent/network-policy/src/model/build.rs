//! Chains and sets of one policy.

use coracle_values::label_selector::LabelSelector;

use super::selection::{Scope, Selection};
use super::{DIRECTIONS, Model};
use crate::blocks::ranges;
use crate::facts::NODES;
use crate::program::{Chain, Line, Lines, Peer, Ports, RuleAction, Set};
use crate::rules::{Action, Direction, NamedPort, Namespaces, PodPeer, PortList, Rule, Rules, Tier};

/// The objects of a policy in the table.
#[derive(Debug, Default)]
pub(super) struct Built {
    /// The number in the names of the chains to which groups jump. The number stays when the rules change.
    pub(super) number: u64,
    chains: Vec<Chain>,
    sets: Vec<Set>,
    selections: Vec<u64>,
}

/// The position of a rule in its policy.
#[derive(Clone, Copy)]
struct RulePosition<'a> {
    /// The number in the names of the rules' own chains and sets. Each build has a new number, because the ranges of a
    /// set in the kernel are never changed.
    build: u64,
    namespace: &'a str,
    tier: Tier,
    /// Pods to which the policy applies.
    subject: &'a PodPeer,
    direction: Direction,
    position: usize,
}

impl Model {
    /// Adds the chains and sets of a policy.
    pub(super) fn build(&mut self, tier: Tier, namespace: &str, rules: &Rules) -> Built {
        let number = self.next_number();
        self.build_as(number, tier, namespace, rules)
    }

    /// Replaces the rules in the chains of a policy that restricts the same directions as before. Groups still jump to
    /// these chains.
    pub(super) fn rebuild(&mut self, mut old: Built, tier: Tier, namespace: &str, rules: &Rules) -> Built {
        // This comes before the removal: a selection that both versions of the rules need is kept.
        let built = self.build_as(old.number, tier, namespace, rules);
        old.chains.retain(|chain| matches!(chain, Chain::Ports(..)));
        self.dismantle(old);
        built
    }

    fn build_as(&mut self, number: u64, tier: Tier, namespace: &str, rules: &Rules) -> Built {
        let build = self.next_number();
        let mut built = Built { number, ..Built::default() };
        for direction in DIRECTIONS {
            let Some(all) = rules.of_direction(direction) else { continue };
            let mut lines = Vec::new();
            for (position, rule) in all.iter().enumerate() {
                let place =
                    RulePosition { build, namespace, tier, subject: &rules.subject, direction, position };
                lines.extend(self.rule(&mut built, place, rule));
            }
            self.chain(&mut built, Chain::Policy(number, direction), Lines { tier, direction, lines });
        }
        built
    }

    /// Removes the chains and sets of a policy.
    pub(super) fn dismantle(&mut self, built: Built) {
        built.chains.into_iter().for_each(|chain| self.program.remove_chain(chain));
        built.sets.into_iter().for_each(|set| self.program.remove_set(set));
        built.selections.into_iter().for_each(|number| self.release_selection(number));
    }

    fn chain(&mut self, built: &mut Built, chain: Chain, lines: Lines) {
        self.program.put_chain(chain, lines);
        built.chains.push(chain);
    }

    fn rule(&mut self, built: &mut Built, place: RulePosition<'_>, rule: &Rule) -> Vec<Line> {
        let peers = self.peers(built, place, rule);
        let line = |peer, ports, then| Line { peer, ports, then };
        let then = match rule.action {
            Action::Allow => RuleAction::Accept,
            Action::Deny => RuleAction::Drop,
            Action::Pass => RuleAction::Pass,
        };
        let Some(ports) = &rule.ports else {
            return peers.into_iter().map(|peer| line(peer, None, then)).collect();
        };
        let conditions = self.conditions(built, place, ports);
        let mut lines: Vec<Line> = if needs_no_chain(&peers, &conditions) {
            let of_peer = |peer: &Option<Peer>| {
                let peer = *peer;
                conditions.iter().map(move |ports| line(peer, Some(ports.clone()), then))
            };
            peers.iter().flat_map(of_peer).collect()
        } else {
            let of_rule = Chain::Ports(place.build, place.direction, place.position);
            let lines = conditions.into_iter().map(|ports| line(None, Some(ports), then)).collect();
            self.chain(built, of_rule, Lines { tier: place.tier, direction: place.direction, lines });
            peers.iter().map(|peer| line(*peer, None, RuleAction::Jump(of_rule))).collect()
        };
        if place.direction == Direction::Egress {
            let named = self.named_of_peers(built, place, rule, ports);
            lines.extend(named.into_iter().map(|set| line(None, Some(Ports::Named(set)), then)));
        }
        lines
    }

    /// Conditions on the rule's peers. `None` in the list means all peers.
    fn peers(&mut self, built: &mut Built, place: RulePosition<'_>, rule: &Rule) -> Vec<Option<Peer>> {
        let Some(peers) = &rule.peers else { return vec![None] };
        let (mut conditions, families) = (Vec::new(), self.families);
        for peer in &peers.pods {
            let number = self.selected(built, place, peer, None);
            let sets = families.flags().map(|is_ipv4| Set::Addresses(number, is_ipv4));
            conditions.extend(sets.map(|set| Some(Peer::In(set))));
        }
        for is_ipv4 in families.flags() {
            let ranges = ranges(&peers.blocks, is_ipv4);
            match ranges[..] {
                [] => {}
                [range] => conditions.push(Some(Peer::Range(range, is_ipv4))),
                _ => {
                    let set = Set::Blocks(place.build, place.direction, place.position, is_ipv4);
                    self.program.add_set(set, ranges);
                    built.sets.push(set);
                    conditions.push(Some(Peer::In(set)));
                }
            }
        }
        conditions
    }

    /// Conditions on the ports of a rule. A named port is a port of the receiving pod: for ingress, of the pods
    /// that the policy selects.
    fn conditions(&mut self, built: &mut Built, place: RulePosition<'_>, list: &PortList) -> Vec<Ports> {
        let mut conditions: Vec<Ports> = list.protocols.iter().copied().map(Ports::Protocol).collect();
        if !list.single.is_empty() {
            conditions.push(Ports::Single(list.single.clone()));
        }
        let ranges = list.ranges.iter();
        conditions.extend(ranges.map(|range| Ports::Range(range.protocol, range.first, range.last)));
        if place.direction == Direction::Ingress {
            let own = place.subject;
            for port in &list.named {
                let number = self.selected(built, place, own, Some(port));
                let sets = self.families.flags().map(|is_ipv4| Set::NamedPorts(number, is_ipv4));
                conditions.extend(sets.map(Ports::Named));
            }
        }
        conditions
    }

    /// The sets with the named ports of the rule's peers, or of all pods if the rule has no peers. IP blocks
    /// have no named ports.
    fn named_of_peers(
        &mut self,
        built: &mut Built,
        place: RulePosition<'_>,
        rule: &Rule,
        list: &PortList,
    ) -> Vec<Set> {
        let anywhere = LabelSelector::default;
        let all = [PodPeer { namespaces: Namespaces::Selected(anywhere()), pods: anywhere() }];
        let peers = rule.peers.as_ref().map_or(&all[..], |peers| &peers.pods);
        let mut sets = Vec::new();
        for (peer, port) in peers.iter().flat_map(|peer| list.named.iter().map(move |port| (peer, port))) {
            let number = self.selected(built, place, peer, Some(port));
            sets.extend(self.families.flags().map(|is_ipv4| Set::NamedPorts(number, is_ipv4)));
        }
        sets
    }

    fn selected(
        &mut self,
        built: &mut Built,
        place: RulePosition<'_>,
        peer: &PodPeer,
        port: Option<&NamedPort>,
    ) -> u64 {
        let scope = match &peer.namespaces {
            Namespaces::Own => Scope::Namespace(place.namespace.to_owned()),
            Namespaces::Selected(selector) => Scope::Namespaces(selector.clone()),
            Namespaces::Nodes => Scope::Namespace(NODES.to_owned()),
        };
        let number = self.use_selection(Selection { scope, pods: peer.pods.clone(), port: port.cloned() });
        built.selections.push(number);
        number
    }
}

/// Whether a rule of a policy gets a line for each pair of a peer and a condition, instead of a chain for its ports.
/// With each change, the kernel validates all paths through the chains of the table. So a chain costs more than a few
/// lines. Several single ports are an anonymous set. With several peers, such a rule gets a chain, so that the set is
/// not repeated for each peer: each set makes every transaction slower. A named port has one condition for each IP
/// family. A pair with a peer of the other family would match nothing.
fn needs_no_chain(peers: &[Option<Peer>], conditions: &[Ports]) -> bool {
    match (peers, conditions) {
        ([] | [None], _) | (_, []) => true,
        ([_], _) => !conditions.iter().any(|ports| matches!(ports, Ports::Named(_))),
        (_, [Ports::Single(all)]) => all.len() == 1,
        (_, [Ports::Protocol(_) | Ports::Range(..)]) => true,
        _ => false,
    }
}

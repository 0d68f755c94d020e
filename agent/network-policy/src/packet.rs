//! The verdict of the table on one packet. Pure.

use std::net::IpAddr;

use coracle_nft::{Flow, Key};

use crate::blocks::is_within;
use crate::program::{Chain, ElementId, Line, Peer, Ports, Program, RuleAction, Set};
use crate::rules::{Direction, Tier};

/// The first packet of a connection as policies match it: with the translated destination and the client's own address.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Packet {
    pub(crate) from: IpAddr,
    pub(crate) to: IpAddr,
    pub(crate) protocol: u8,
    /// The destination's port.
    pub(crate) port: u16,
}

// === impl Packet ===

impl Packet {
    pub(crate) fn of(flow: &Flow) -> Self {
        Self { from: flow.from, to: flow.answered_by, protocol: flow.protocol, port: flow.answering_port }
    }
}

// === impl Program ===

impl Program {
    /// Whether the table accepts a packet.
    pub(crate) fn allows(&self, packet: &Packet) -> bool {
        [Direction::Egress, Direction::Ingress]
            .into_iter()
            .all(|direction| self.tiers(direction, packet) != Some(RuleAction::Drop))
    }

    /// The verdict of the tiers in order. `None` if no tier decides.
    fn tiers(&self, direction: Direction, packet: &Packet) -> Option<RuleAction> {
        let is_ipv4 = packet.from.is_ipv4();
        let decided = |verdict: &RuleAction| *verdict != RuleAction::Pass;
        let admin = self.tier(Tier::Admin, direction, packet).filter(decided);
        let itself = Key::default().address(packet.from).address(packet.to);
        let itself = ElementId { set: Set::Itself(direction, is_ipv4), key: itself };
        let is_itself = || self.element(&itself).map(|_| RuleAction::Accept);
        admin
            .or_else(is_itself)
            .or_else(|| self.tier(Tier::Namespaced, direction, packet))
            .or_else(|| self.tier(Tier::Baseline, direction, packet))
    }

    fn tier(&self, tier: Tier, direction: Direction, packet: &Packet) -> Option<RuleAction> {
        let pod = if direction == Direction::Egress { packet.from } else { packet.to };
        let set = Set::Isolated(tier, direction, pod.is_ipv4());
        let isolated = ElementId { set, key: Key::default().address(pod) };
        self.element(&isolated).flatten().and_then(|group| self.verdict(Chain::Group(group), packet))
    }

    /// The verdict of a chain. `None` if the chain returns. Chains have no loop: groups jump to policies, policies to
    /// ports.
    fn verdict(&self, chain: Chain, packet: &Packet) -> Option<RuleAction> {
        let lines = self.chains.get(&chain)?;
        let mut matching = lines.lines.iter().filter(|line| self.matches(line, lines.direction, packet));
        matching.find_map(|line| match line.then {
            RuleAction::Jump(chain) => self.verdict(chain, packet),
            verdict => Some(verdict),
        })
    }

    fn matches(&self, line: &Line, direction: Direction, packet: &Packet) -> bool {
        let peer = if direction == Direction::Ingress { packet.from } else { packet.to };
        line.peer.is_none_or(|wanted| self.is_peer(wanted, peer))
            && line.ports.as_ref().is_none_or(|ports| self.has_port(ports, packet))
    }

    fn is_peer(&self, wanted: Peer, peer: IpAddr) -> bool {
        let set = match wanted {
            Peer::In(set) => set,
            Peer::Range(range, is_ipv4) => return is_ipv4 == peer.is_ipv4() && is_within(range, peer),
        };
        let ranges = || self.sets.get(&set).into_iter().flatten();
        let is_element = || self.element(&ElementId { set, key: Key::default().address(peer) }).is_some();
        set.is_ipv4() == peer.is_ipv4() && (is_element() || ranges().any(|range| is_within(*range, peer)))
    }

    fn has_port(&self, ports: &Ports, packet: &Packet) -> bool {
        let Packet { to, protocol, port, .. } = *packet;
        match ports {
            Ports::Protocol(wanted) => *wanted == protocol,
            Ports::Single(all) => all.contains(&(protocol, port)),
            Ports::Range(wanted, first, last) => *wanted == protocol && (*first..=*last).contains(&port),
            Ports::Named(set) => {
                let key = Key::default().address(to).protocol(protocol).port(port);
                set.is_ipv4() == to.is_ipv4() && self.element(&ElementId { set: *set, key }).is_some()
            }
        }
    }
}

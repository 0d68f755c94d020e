//! Incremental plan: follows added, changed and removed peers. Pure.
//!
//! As long as no two peers share a range or a hardware address (`DesiredState::is_disjoint`), the plan is the union of
//! the plans of single peers. Then a change is planned only from the old and new state of the changed peers,
//! independent of the number of other peers. Otherwise, and when something else than peers changes, all peers are
//! planned again.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnetwork::IpNetwork;

use super::super::range::{canonical, overlapping, second};
use super::super::{PeerKind, ProbePath};
use super::{
    Change, DesiredState, Local, Node, OutInterface, Peer, Port, Tables, Uplink, difference, pod_mtu, wanted,
};

/// The plan of this node.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    node: Node,
    peers: BTreeMap<String, Peer>,
    path_mtus: BTreeMap<String, u32>,
    wanted: DesiredState,
}

impl Plan {
    /// Plans all peers.
    pub(crate) fn new(node: Node, peers: &BTreeMap<String, Peer>, path_mtus: &BTreeMap<String, u32>) -> Self {
        let wanted = wanted(&node, node.devices(peers), peers.iter(), path_mtus);
        Self { node, peers: peers.clone(), path_mtus: path_mtus.clone(), wanted }
    }

    /// Updates the plan. Returns the changes from the previous desired tables.
    pub(crate) fn follow(
        &mut self,
        local: &Local,
        peers: &BTreeMap<String, Peer>,
        path_mtus: &BTreeMap<String, u32>,
    ) -> Vec<Change> {
        if self.node.local == *local
            && let Some(changes) = self.follow_changed(peers, path_mtus)
        {
            return changes;
        }
        let node = Node { local: local.clone(), ..self.node.clone() };
        let before = std::mem::replace(self, Self::new(node, peers, path_mtus));
        difference(&self.wanted.tables, &before.wanted.tables)
    }

    /// Plans only the changed peers. Returns `None` and changes nothing if all peers must be planned.
    fn follow_changed(
        &mut self,
        peers: &BTreeMap<String, Peer>,
        path_mtus: &BTreeMap<String, u32>,
    ) -> Option<Vec<Change>> {
        let devices = self.node.devices(peers);
        if !self.wanted.is_disjoint || devices != self.wanted.tables.devices {
            return None;
        }
        let mut changed = differing(&self.peers, peers);
        changed.append(&mut differing(&self.path_mtus, path_mtus));
        let part = |peers: &BTreeMap<String, Peer>, path_mtus| {
            let changed = changed.iter().filter_map(|name| peers.get_key_value(name));
            wanted(&self.node, devices.clone(), changed, path_mtus)
        };
        let (was, is) = (part(&self.peers, &self.path_mtus), part(peers, path_mtus));
        if !self.remains_disjoint(&was, &is) {
            return None;
        }
        let changes = difference(&is.tables, &was.tables);
        self.wanted.exchange(&was, is, &changed);
        for name in changed {
            match peers.get(&name) {
                Some(peer) => drop(self.peers.insert(name, peer.clone())),
                None => drop(self.peers.remove(&name)),
            }
        }
        self.path_mtus.clone_from(path_mtus);
        Some(changes)
    }

    /// Whether no two peers share ranges or hardware addresses after the part `was` is replaced by the part `is`.
    fn remains_disjoint(&self, was: &DesiredState, is: &DesiredState) -> bool {
        let free = |range: &IpNetwork| {
            overlapping(&self.wanted.ranges, *range).all(|(other, _)| was.ranges.contains_key(other))
        };
        let (all, old) = (&self.wanted.announced, &was.announced);
        is.is_disjoint
            && is.ranges.keys().all(free)
            && is.announced.iter().all(|address| !all.contains(address) || old.contains(address))
    }

    pub(crate) fn tables(&self) -> &Tables {
        &self.wanted.tables
    }

    pub(crate) fn addresses(&self) -> &[IpAddr] {
        &self.node.local.addresses
    }

    pub(crate) fn uplinks(&self) -> &[Uplink] {
        &self.node.uplinks
    }

    /// Maximum packet size between pods on all devices.
    pub(crate) fn mtu(&self) -> Option<u32> {
        pod_mtu(&self.node.config, &self.node.uplinks)
    }

    /// Peers that cannot be reached, and why.
    pub(crate) fn refused(&self) -> &[(String, String)] {
        &self.wanted.refused
    }

    /// The paths to these peers that can be probed.
    pub(crate) fn paths(&self, peers: &BTreeSet<String>) -> Vec<ProbePath> {
        let of = |name: &String| self.peers.get(name).into_iter().flat_map(|peer| &peer.cidrs);
        let ranges = peers.iter().flat_map(|name| of(name).map(move |range| (name, canonical(*range))));
        ranges.filter_map(|(name, range)| self.probe_path(name, range)).collect()
    }

    fn probe_path(&self, peer: &str, range: IpNetwork) -> Option<ProbePath> {
        let reached = self.wanted.ranges.get(&range)?;
        let Peer { kind, bridged, .. } = self.peers.get(peer)?;
        let (to, mtu) = match (self.wanted.tables.routes.get(&range)?.out, kind) {
            // A device of the overlay has the first address of the range.
            (OutInterface::Device(port), _) => (range.network(), self.wanted.tables.devices.get(&port)?.mtu),
            // The bridge has the second address, but not on all nodes while it has no ports.
            (OutInterface::Interface(_), _) if *bridged => (second(range)?, self.mtu()?),
            // A peer with the backend host-gw has no device. In IPv6 the first address is the anycast address of the
            // range's routers (RFC 4291, 2.6.1), so the reply may come from another address.
            (OutInterface::Interface(_), PeerKind::Vxlan | PeerKind::Udp) if range.is_ipv4() => {
                (range.network(), self.mtu()?)
            }
            (OutInterface::Interface(_), _) => (reached.by, self.mtu()?),
        };
        (reached.answers && reached.peer == peer).then(|| ProbePath { peer: peer.to_owned(), to, mtu })
    }

    /// Target of each range of peers behind UDP.
    pub(crate) fn tunnels(&self) -> Vec<(IpNetwork, IpAddr)> {
        let routes = &self.wanted.tables.routes;
        let is_tunnel =
            |range| routes.get(range).is_some_and(|route| route.out == OutInterface::Device(Port::Tun));
        let ranges = self.wanted.ranges.iter().filter(|(range, _)| is_tunnel(range));
        ranges.map(|(range, reached)| (*range, reached.by)).collect()
    }
}

// === impl DesiredState ===

impl DesiredState {
    /// Replaces the part of the plan that belongs to these peers by another part.
    fn exchange(&mut self, was: &Self, is: Self, peers: &BTreeSet<String>) {
        let tables = &mut self.tables;
        for range in was.ranges.keys() {
            self.ranges.remove(range);
            tables.routes.remove(range);
        }
        for forward in &was.tables.forwards {
            tables.forwards.remove(forward);
        }
        for address in &was.announced {
            self.announced.remove(address);
        }
        for neighbour in was.tables.neighbours.keys() {
            tables.neighbours.remove(neighbour);
        }
        tables.routes.extend(is.tables.routes);
        tables.forwards.extend(is.tables.forwards);
        tables.neighbours.extend(is.tables.neighbours);
        self.announced.extend(is.announced);
        self.ranges.extend(is.ranges);
        self.refused.retain(|(name, _)| !peers.contains(name));
        self.refused.extend(is.refused);
        self.refused.sort_by(|(one, _), (other, _)| one.cmp(other));
    }
}

/// Names whose values differ.
fn differing<T: PartialEq>(one: &BTreeMap<String, T>, other: &BTreeMap<String, T>) -> BTreeSet<String> {
    let (mut one, mut other) = (one.iter().peekable(), other.iter().peekable());
    let mut names = BTreeSet::new();
    loop {
        let order = match (one.peek(), other.peek()) {
            (Some((left, _)), Some((right, _))) => left.cmp(right),
            (Some(_), None) => Ordering::Less,
            (None, Some(_)) => Ordering::Greater,
            (None, None) => return names,
        };
        let (left, right) = (one.next_if(|_| order.is_le()), other.next_if(|_| order.is_ge()));
        if left.map(|(_, value)| value) != right.map(|(_, value)| value) {
            names.extend(left.or(right).map(|(name, _)| name.clone()));
        }
    }
}

#[cfg(test)]
mod tests;

//! A plan that follows its peers as they come, change and leave. Pure.
//!
//! As long as no two peers have a range or a forwarding entry in common (`Wanted::apart`), what all of them need is
//! what each needs alone, put together. Then a change is planned for the peers that changed, as they were and as they
//! are, however many others there are. Otherwise, and when anything but peers changes, everything is planned anew.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnetwork::IpNetwork;

use super::super::range::{canonical, overlapping, second};
use super::super::{PeerKind, Way};
use super::{Change, Local, Node, Out, Peer, Port, Tables, Uplink, Wanted, difference, pod_mtu, wanted};

/// What is wanted on this node for its peers.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    node: Node,
    peers: BTreeMap<String, Peer>,
    narrow: BTreeMap<String, u32>,
    wanted: Wanted,
}

impl Plan {
    /// Plans everything.
    pub(crate) fn new(node: Node, peers: &BTreeMap<String, Peer>, narrow: &BTreeMap<String, u32>) -> Self {
        let wanted = wanted(&node, node.devices(peers), peers.iter(), narrow);
        Self { node, peers: peers.clone(), narrow: narrow.clone(), wanted }
    }

    /// Turns to what is so now; the steps from the tables that were wanted before.
    pub(crate) fn follow(
        &mut self,
        local: &Local,
        peers: &BTreeMap<String, Peer>,
        narrow: &BTreeMap<String, u32>,
    ) -> Vec<Change> {
        if self.node.local == *local
            && let Some(changes) = self.follow_changed(peers, narrow)
        {
            return changes;
        }
        let node = Node { local: local.clone(), ..self.node.clone() };
        let before = std::mem::replace(self, Self::new(node, peers, narrow));
        difference(&self.wanted.tables, &before.wanted.tables)
    }

    /// Plans the peers that changed alone; nothing is done unless that says all.
    fn follow_changed(
        &mut self,
        peers: &BTreeMap<String, Peer>,
        narrow: &BTreeMap<String, u32>,
    ) -> Option<Vec<Change>> {
        let devices = self.node.devices(peers);
        if !self.wanted.apart || devices != self.wanted.tables.devices {
            return None;
        }
        let mut changed = differing(&self.peers, peers);
        changed.append(&mut differing(&self.narrow, narrow));
        let part = |peers: &BTreeMap<String, Peer>, narrow| {
            let changed = changed.iter().filter_map(|name| peers.get_key_value(name));
            wanted(&self.node, devices.clone(), changed, narrow)
        };
        let (was, is) = (part(&self.peers, &self.narrow), part(peers, narrow));
        if !self.stays_apart(&was, &is) {
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
        self.narrow.clone_from(narrow);
        Some(changes)
    }

    /// Whether all peers have ranges and forwarding entries of their own when one part is exchanged for the other.
    fn stays_apart(&self, was: &Wanted, is: &Wanted) -> bool {
        let free = |range: &IpNetwork| {
            overlapping(&self.wanted.ranges, *range).all(|(other, _)| was.ranges.contains_key(other))
        };
        let (all, old) = (&self.wanted.tables.forwards, &was.tables.forwards);
        is.apart
            && is.ranges.keys().all(free)
            && is.tables.forwards.iter().all(|forward| !all.contains(forward) || old.contains(forward))
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

    /// Bytes of the longest packet between pods that passes every device.
    pub(crate) fn mtu(&self) -> Option<u32> {
        pod_mtu(&self.node.config, &self.node.uplinks)
    }

    /// Peers that cannot be reached as they are, and why.
    pub(crate) fn refused(&self) -> &[(String, String)] {
        &self.wanted.refused
    }

    /// The ways to these peers on which what passes can be tested.
    pub(crate) fn ways(&self, peers: &BTreeSet<String>) -> Vec<Way> {
        let of = |name: &String| self.peers.get(name).into_iter().flat_map(|peer| &peer.cidrs);
        let ranges = peers.iter().flat_map(|name| of(name).map(move |range| (name, canonical(*range))));
        ranges.filter_map(|(name, range)| self.way(name, range)).collect()
    }

    fn way(&self, peer: &str, range: IpNetwork) -> Option<Way> {
        let reached = self.wanted.ranges.get(&range)?;
        let Peer { kind, bridged, .. } = self.peers.get(peer)?;
        let (to, mtu) = match (self.wanted.tables.routes.get(&range)?.out, kind) {
            // A device of the overlay has the first address.
            (Out::Device(port), _) => (range.network(), self.wanted.tables.devices.get(&port)?.mtu),
            // A bridge behind it has the second, though not everybody's while nobody is on it.
            (Out::Interface(_), _) if *bridged => (second(range)?, self.mtu()?),
            // Who only routes has no device. And in IPv6 the first address is that of any router of the range as well
            // (RFC 4291, 2.6.1): what is sent to it may be answered from another.
            (Out::Interface(_), PeerKind::Vxlan | PeerKind::Udp) if range.is_ipv4() => {
                (range.network(), self.mtu()?)
            }
            (Out::Interface(_), _) => (reached.by, self.mtu()?),
        };
        (reached.answers && reached.peer == peer).then(|| Way { peer: peer.to_owned(), to, mtu })
    }

    /// Where each range of a peer's behind UDP leads.
    pub(crate) fn tunnels(&self) -> Vec<(IpNetwork, IpAddr)> {
        let routes = &self.wanted.tables.routes;
        let is_tunnel = |range| routes.get(range).is_some_and(|route| route.out == Out::Device(Port::Tun));
        let ranges = self.wanted.ranges.iter().filter(|(range, _)| is_tunnel(range));
        ranges.map(|(range, reached)| (*range, reached.by)).collect()
    }
}

// === impl Wanted ===

impl Wanted {
    /// Puts one part, that of these peers, in the place of another.
    fn exchange(&mut self, was: &Self, is: Self, peers: &BTreeSet<String>) {
        let tables = &mut self.tables;
        for range in was.ranges.keys() {
            self.ranges.remove(range);
            tables.routes.remove(range);
        }
        for forward in &was.tables.forwards {
            tables.forwards.remove(forward);
        }
        for neighbour in was.tables.neighbours.keys() {
            tables.neighbours.remove(neighbour);
        }
        tables.routes.extend(is.tables.routes);
        tables.forwards.extend(is.tables.forwards);
        tables.neighbours.extend(is.tables.neighbours);
        self.ranges.extend(is.ranges);
        self.refused.retain(|(name, _)| !peers.contains(name));
        self.refused.extend(is.refused);
        self.refused.sort_by(|(one, _), (other, _)| one.cmp(other));
    }
}

/// The names that do not stand for the same in both.
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

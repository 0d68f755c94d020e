//! Desired tables of the kernel for a set of peers, and the changes that lead to them. Pure.

mod difference;
mod follow;
mod owners;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::net::IpAddr;

pub(crate) use difference::difference;
use foldhash::fast::RandomState;
pub(crate) use follow::Plan;
use ipnetwork::IpNetwork;
use owners::{Owners, PlannedRange};

use super::range::{canonical, overlap, overlapping};
use super::{Backend, Local, Mac, OverlayConfig, Peer, PeerKind};

/// A device of the overlay.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Port {
    /// VXLAN between IPv4 addresses of nodes.
    Vxlan4,
    /// VXLAN between IPv6 addresses of nodes.
    Vxlan6,
    /// Plain UDP through a tun device.
    Tun,
}

/// Kind of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Kind {
    Vxlan { vni: u32, port: u16, local: IpAddr, link: u32, mac: Mac, learning: bool },
    Tun,
}

/// A device and its settings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Device {
    pub(crate) kind: Kind,
    pub(crate) mtu: u32,
    pub(crate) up: bool,
    pub(crate) addresses: BTreeSet<IpAddr>,
}

/// A forwarding entry: frames to a hardware address are sent to a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Forward {
    pub(crate) port: Port,
    pub(crate) mac: Mac,
    pub(crate) to: IpAddr,
}

/// A neighbour entry: the hardware address of a route's next hop.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Neighbour {
    pub(crate) port: Port,
    pub(crate) ip: IpAddr,
    pub(crate) mac: Mac,
}

/// Outgoing interface of a route.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OutInterface {
    Device(Port),
    /// A foreign interface with this index.
    Interface(u32),
}

/// A route to a peer's pods.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Route {
    pub(crate) via: Option<IpAddr>,
    pub(crate) out: OutInterface,
    /// Source address of the node's own packets.
    pub(crate) source: Option<IpAddr>,
    /// Path MTU, if smaller than the interface's.
    pub(crate) mtu: Option<u32>,
}

/// All objects of the overlay in the kernel. The maps use a fast hash, because a dump looks up each entry of each peer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Tables {
    pub(crate) devices: BTreeMap<Port, Device>,
    pub(crate) forwards: HashSet<Forward, RandomState>,
    /// The neighbour entries by the kernel's key: device and address.
    pub(crate) neighbours: HashMap<(Port, IpAddr), Mac, RandomState>,
    pub(crate) routes: HashMap<IpNetwork, Route, RandomState>,
}

/// An interface with an address of the node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Uplink {
    /// The node's address with the prefix length of its subnet.
    pub(crate) address: IpNetwork,
    pub(crate) index: u32,
    pub(crate) mtu: u32,
}

/// The parts of this node that determine the plan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Node {
    pub(crate) config: OverlayConfig,
    pub(crate) local: Local,
    pub(crate) uplinks: Vec<Uplink>,
}

/// The desired tables, and peers that cannot be reached.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct DesiredState {
    pub(crate) tables: Tables,
    /// Destination ranges of routes. They do not overlap.
    pub(crate) ranges: BTreeMap<IpNetwork, RangeOwner>,
    pub(crate) refused: Vec<(String, String)>,
    /// Hardware addresses of the forwarding entries.
    announced: HashSet<(Port, Mac), RandomState>,
    /// Whether no two peers share a range or a hardware address: then the desired entries of a peer do not depend on
    /// other peers.
    pub(crate) is_disjoint: bool,
}

/// Owner of a range.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RangeOwner {
    pub(crate) peer: String,
    /// Address of the peer for this range.
    pub(crate) by: IpAddr,
    /// Whether the path can be probed.
    pub(crate) answers: bool,
}

/// One change. Changes are ordered: conflicting objects are removed first, and an object is made before another object
/// uses it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Change {
    RemoveDevice(Port),
    MakeDevice(Port, Device),
    SetDevice(Port, Device),
    RemoveAddress(Port, IpAddr),
    AddAddress(Port, IpAddr),
    RemoveRoute(IpNetwork, Route),
    RemoveNeighbour(Neighbour),
    RemoveForward(Forward),
    AddForward(Forward),
    AddNeighbour(Neighbour),
    AddRoute(IpNetwork, Route),
}

/// Overhead of the tunnel per packet: outer IP, UDP, VXLAN and inner Ethernet headers (RFC 7348), or IP and UDP.
fn overhead(port: Port, outer_v6: bool) -> u32 {
    let ip = if outer_v6 { 40 } else { 20 };
    match port {
        Port::Vxlan4 | Port::Vxlan6 => ip + 8 + 8 + 14,
        Port::Tun => ip + 8,
    }
}

// === impl Change ===

impl Change {
    /// Whether the kernel removes further objects with this change, such as the routes of a removed device.
    pub(crate) fn removes_other_objects(&self) -> bool {
        matches!(
            self,
            Self::RemoveDevice(_) | Self::MakeDevice(..) | Self::SetDevice(..) | Self::RemoveAddress(..)
        )
    }
}

/// Maximum packet size between pods on all uplinks, independent of the peers.
pub(crate) fn pod_mtu(config: &OverlayConfig, uplinks: &[Uplink]) -> Option<u32> {
    let port = match config.backend {
        Backend::Vxlan { .. } => Some(Port::Vxlan4),
        Backend::Udp => Some(Port::Tun),
        Backend::HostGw => None,
    };
    // A machine without a network has only the loopback interface, which reaches no peer.
    let others = uplinks.iter().filter(|uplink| !uplink.address.ip().is_loopback());
    others.map(|uplink| device_mtu(config, port, uplink)).min()
}

fn device_mtu(config: &OverlayConfig, port: Option<Port>, uplink: &Uplink) -> u32 {
    let header = port.map_or(0, |port| overhead(port, uplink.address.is_ipv6()));
    let whole = uplink.mtu.saturating_sub(header);
    config.mtu.map_or(whole, |most| most.min(whole))
}

// === wanted ===

struct Planner<'a> {
    node: &'a Node,
    wanted: DesiredState,
}

/// The desired entries for these peers, with the devices for all peers. `path_mtus` has the peers
/// whose path MTU is smaller than the MTU of the device.
pub(crate) fn wanted<'a>(
    node: &Node,
    devices: BTreeMap<Port, Device>,
    peers: impl Iterator<Item = (&'a String, &'a Peer)>,
    path_mtus: &BTreeMap<String, u32>,
) -> DesiredState {
    let tables = Tables { devices, ..Tables::default() };
    let mut planner =
        Planner { node, wanted: DesiredState { tables, is_disjoint: true, ..DesiredState::default() } };
    planner.reserve(peers.size_hint().1.unwrap_or_default());
    let plan =
        |(name, peer): (&'a String, &'a Peer)| (name, planner.plan(name, peer, path_mtus.get(name).copied()));
    let planned: Vec<_> = peers.map(plan).collect();
    let owners = Owners::of(&planned);
    for (name, ranges) in planned {
        planner.add(name, ranges, &owners);
    }
    planner.wanted.refused.sort_by(|(one, _), (other, _)| one.cmp(other));
    planner.wanted
}

/// Whether pods of a peer use a family of addresses.
///
/// A peer with ranges of both families uses only the families of the addresses that it announces. Its ranges do not
/// show which families it uses. The cluster also assigns ranges of both families to a flannel node that is configured
/// for one family. A peer with ranges of one family uses that family, independent of its announced addresses.
fn uses_family(peer: &Peer, v6: bool) -> bool {
    let announces = |v6: bool| peer.ends.iter().any(|end| end.ip.is_ipv6() == v6);
    let has_range = |v6: bool| peer.cidrs.iter().any(|cidr| cidr.is_ipv6() == v6);
    announces(v6) || !(announces(!v6) && has_range(!v6))
}

impl Node {
    fn uplink(&self, v6: bool) -> Option<&Uplink> {
        self.uplinks.iter().find(|uplink| uplink.address.is_ipv6() == v6)
    }

    /// The devices for all these peers.
    pub(crate) fn devices(&self, peers: &BTreeMap<String, Peer>) -> BTreeMap<Port, Device> {
        let mut devices = BTreeMap::new();
        // A node without peers needs no devices.
        if peers.is_empty() {
            return devices;
        }
        let ours = &self.local.cidrs;
        if let Backend::Vxlan { vni, port, .. } = self.config.backend {
            for uplink in &self.uplinks {
                let v6 = uplink.address.is_ipv6();
                // Pod packets are carried in packets of their own family if both nodes have addresses of this family,
                // else in packets of the other family.
                let carried = |cidr: &&IpNetwork| {
                    cidr.is_ipv6() == v6 || self.uplinks.iter().all(|u| u.address.is_ipv6() == v6)
                };
                let kind = Kind::Vxlan {
                    vni,
                    port,
                    local: uplink.address.ip(),
                    link: uplink.index,
                    mac: hardware_address(&self.config.identity, v6),
                    learning: false,
                };
                let slot = if v6 { Port::Vxlan6 } else { Port::Vxlan4 };
                let addresses = ours.iter().filter(carried).map(IpNetwork::network).collect();
                let mtu = device_mtu(&self.config, Some(slot), uplink);
                devices.insert(slot, Device { kind, mtu, up: true, addresses });
            }
        }
        let is_udp = self.config.backend == Backend::Udp;
        let udp_peers = || peers.values().any(|peer| peer.kind == PeerKind::Udp);
        let tunnel =
            self.uplinks.iter().map(|uplink| device_mtu(&self.config, Some(Port::Tun), uplink)).min();
        if let Some(mtu) = tunnel
            && (is_udp || (matches!(self.config.backend, Backend::Vxlan { .. }) && udp_peers()))
        {
            // If there is a VXLAN device, that device has the addresses.
            let addresses = ours.iter().map(IpNetwork::network).filter(|_| is_udp).collect();
            devices.insert(Port::Tun, Device { kind: Kind::Tun, mtu, up: true, addresses });
        }
        devices
    }
}

impl Planner<'_> {
    /// Reserves capacity for a number of peers, each with a range of each of this node's families.
    fn reserve(&mut self, peers: usize) {
        let (tables, ranges) = (&mut self.wanted.tables, peers * self.node.local.cidrs.len());
        tables.forwards.reserve(ranges);
        tables.neighbours.reserve(ranges);
        tables.routes.reserve(ranges);
        self.wanted.announced.reserve(ranges);
    }

    /// Plans the ranges of a peer, independent of other peers.
    fn plan(&mut self, name: &str, peer: &Peer, path_mtu: Option<u32>) -> Vec<PlannedRange> {
        let mut planned = Vec::with_capacity(peer.cidrs.len());
        for range in peer.cidrs.iter().copied().map(canonical) {
            match self.plan_range(peer, range, path_mtu) {
                Ok(range) => planned.push(range),
                Err(reason) if uses_family(peer, range.is_ipv6()) => self.refuse(name, reason),
                Err(_not_in_use) => {}
            }
        }
        planned
    }

    /// Adds the entries for a peer, unless it announces the hardware address of another peer.
    fn add(&mut self, name: &str, planned: Vec<PlannedRange>, owners: &Owners<'_>) {
        if let Some(owner) = planned.iter().find_map(|range| owners.conflicting_owner(name, range)) {
            self.wanted.is_disjoint = false;
            return self.refuse(name, format!("its hardware address is that of {owner}"));
        }
        let is_shared = |address| self.wanted.announced.contains(&address);
        self.wanted.is_disjoint &= !planned.iter().filter_map(PlannedRange::announced).any(is_shared);
        planned.into_iter().for_each(|range| self.add_range(name, range));
    }

    /// Adds the entries for a range, unless an earlier peer has some of the addresses of the range.
    fn add_range(&mut self, name: &str, PlannedRange { to, by, answers, route, hop }: PlannedRange) {
        let taken = overlapping(&self.wanted.ranges, to).next();
        if let Some(reason) =
            taken.map(|(other, of)| format!("its range {to} overlaps {other} of {}", of.peer))
        {
            self.wanted.is_disjoint = false;
            return self.refuse(name, reason);
        }
        let tables = &mut self.wanted.tables;
        if let Some((forward, Neighbour { port, ip, mac })) = hop {
            self.wanted.announced.insert((forward.port, forward.mac));
            tables.forwards.insert(forward);
            tables.neighbours.insert((port, ip), mac);
        }
        tables.routes.insert(to, route);
        self.wanted.ranges.insert(to, RangeOwner { peer: name.to_owned(), by, answers });
    }

    fn refuse(&mut self, name: &str, reason: String) {
        self.wanted.refused.push((name.to_owned(), reason));
    }

    /// The path to a range of a peer. It does not depend on other peers.
    fn plan_range(&self, peer: &Peer, to: IpNetwork, path_mtu: Option<u32>) -> Result<PlannedRange, String> {
        let (node, v6) = (self.node, to.is_ipv6());
        if let Some(own) = node.local.cidrs.iter().find(|own| overlap(**own, to)) {
            return Err(format!("its range {to} overlaps {own} of this node"));
        }
        let end = |v6: bool| peer.ends.iter().find(|end| end.ip.is_ipv6() == v6 && node.uplink(v6).is_some());
        let Some(end) = end(v6).or_else(|| end(!v6)).copied() else {
            return Err("it has no address of a family that this node has".to_owned());
        };
        let direct = node.uplink(v6).filter(|u| end.ip.is_ipv6() == v6 && u.address.contains(end.ip));
        let (route, hop) = match (node.config.backend, peer.kind, direct) {
            (Backend::HostGw, PeerKind::HostGw, Some(uplink))
            | (Backend::Vxlan { direct_routing: true, .. }, PeerKind::Vxlan, Some(uplink)) => {
                (direct_route(uplink, end.ip, path_mtu), None)
            }
            (Backend::HostGw, PeerKind::HostGw, None) => {
                return Err(format!("{} is not in this node's subnet, as host-gw needs", end.ip));
            }
            (Backend::Vxlan { vni, .. }, PeerKind::Vxlan, _) => match end.vtep {
                Some((peer_vni, mac)) if peer_vni == vni => self.vxlan(to, end.ip, mac, path_mtu),
                Some((other, _)) => return Err(format!("its VNI is {other}, this node's is {vni}")),
                None => return Err("its hardware address is not announced".to_owned()),
            },
            (Backend::Vxlan { .. }, PeerKind::Udp, _)
            | (Backend::Udp, PeerKind::Udp | PeerKind::Vxlan, _) => {
                (self.tunnel_route(Port::Tun, None, to, path_mtu), None)
            }
            (_, kind, _) => {
                let backend = kind.name();
                return Err(format!("its backend is {backend}, which this node's backend does not support"));
            }
        };
        Ok(PlannedRange { to, by: end.ip, answers: uses_family(peer, v6), route, hop })
    }

    fn vxlan(
        &self,
        range: IpNetwork,
        to: IpAddr,
        mac: Mac,
        path_mtu: Option<u32>,
    ) -> (Route, Option<(Forward, Neighbour)>) {
        let port = if to.is_ipv6() { Port::Vxlan6 } else { Port::Vxlan4 };
        // As in flannel, the next hop is the first address of the peer's range. It has a permanent neighbour entry, so
        // that the kernel never sends a neighbour solicitation for it.
        let via = range.network();
        let hop = (Forward { port, mac, to }, Neighbour { port, ip: via, mac });
        (self.tunnel_route(port, Some(via), range, path_mtu), Some(hop))
    }

    fn tunnel_route(
        &self,
        port: Port,
        via: Option<IpAddr>,
        range: IpNetwork,
        path_mtu: Option<u32>,
    ) -> Route {
        let whole = self.wanted.tables.devices.get(&port).map_or(0, |device| device.mtu);
        let source = self.node.local.cidrs.iter().find(|own| own.is_ipv6() == range.is_ipv6());
        Route {
            via,
            out: OutInterface::Device(port),
            source: source.map(IpNetwork::network),
            mtu: path_mtu.filter(|path_mtu| *path_mtu < whole),
        }
    }
}

fn direct_route(uplink: &Uplink, via: IpAddr, path_mtu: Option<u32>) -> Route {
    let mtu = path_mtu.filter(|path_mtu| *path_mtu < uplink.mtu);
    Route { via: Some(via), out: OutInterface::Interface(uplink.index), source: None, mtu }
}

/// A locally administered hardware address derived from the node's name (FNV-1a): peers' entries stay valid when the
/// device is made again.
pub(crate) fn hardware_address(identity: &str, v6: bool) -> Mac {
    let bytes = identity.bytes().chain([u8::from(v6)]);
    let hash = bytes
        .fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3));
    let [a, b, c, d, e, f, ..] = hash.to_be_bytes();
    [(a & 0xfc) | 0x02, b, c, d, e, f]
}

#[cfg(test)]
mod tests;

//! What the kernel's tables must say for these peers, and what to change. Pure.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::net::IpAddr;

use foldhash::fast::RandomState;
use ipnetwork::IpNetwork;

use super::{Backend, Local, Mac, OverlayConfig, Peer, PeerKind, Way};

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

/// What a device is made as.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Kind {
    Vxlan { vni: u32, port: u16, local: IpAddr, link: u32, mac: Mac, learning: bool },
    Tun,
}

/// A device with what can be set about it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Device {
    pub(crate) kind: Kind,
    pub(crate) mtu: u32,
    pub(crate) up: bool,
    pub(crate) addresses: BTreeSet<IpAddr>,
}

/// Frames to a hardware address leave for a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Forward {
    pub(crate) port: Port,
    pub(crate) mac: Mac,
    pub(crate) to: IpAddr,
}

/// A route's next hop has a hardware address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Neighbour {
    pub(crate) port: Port,
    pub(crate) ip: IpAddr,
    pub(crate) mac: Mac,
}

/// Where a route leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Out {
    Device(Port),
    /// The interface of this index, which is not ours.
    Interface(u32),
}

/// A route to a peer's pods.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Route {
    pub(crate) via: Option<IpAddr>,
    pub(crate) out: Out,
    /// The source that the node itself uses.
    pub(crate) source: Option<IpAddr>,
    /// Bytes that pass, when fewer than the interface's.
    pub(crate) mtu: Option<u32>,
}

/// All that the overlay keeps in the kernel. Hashed fast: each change looks up every entry of every peer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Tables {
    pub(crate) devices: BTreeMap<Port, Device>,
    pub(crate) forwards: HashSet<Forward, RandomState>,
    pub(crate) neighbours: HashSet<Neighbour, RandomState>,
    pub(crate) routes: HashMap<IpNetwork, Route, RandomState>,
}

/// An interface that has one of the node's addresses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Uplink {
    /// The node's address, with the prefix of its subnet.
    pub(crate) address: IpNetwork,
    pub(crate) index: u32,
    pub(crate) mtu: u32,
}

/// What is wanted, and what of the peers cannot be had.
#[derive(Debug, Default)]
pub(crate) struct Wanted {
    pub(crate) tables: Tables,
    /// Where each range of a peer's behind UDP leads.
    pub(crate) tunnels: Vec<(IpNetwork, IpAddr)>,
    pub(crate) refused: Vec<(String, String)>,
    /// On which what passes can be tested.
    pub(crate) ways: Vec<Way>,
}

/// One step. They are in order: nothing is used before it is there, and what is in the way goes first.
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

/// What the tunnel adds to a packet: outer IP, UDP, VXLAN and inner Ethernet headers (RFC 7348), or IP and UDP.
fn overhead(port: Port, outer_v6: bool) -> u32 {
    let ip = if outer_v6 { 40 } else { 20 };
    match port {
        Port::Vxlan4 | Port::Vxlan6 => ip + 8 + 8 + 14,
        Port::Tun => ip + 8,
    }
}

// === impl Change ===

impl Change {
    /// Whether the kernel may have changed more than this with it: routes go with their device.
    pub(crate) fn has_consequences(&self) -> bool {
        matches!(
            self,
            Self::RemoveDevice(_) | Self::MakeDevice(..) | Self::SetDevice(..) | Self::RemoveAddress(..)
        )
    }
}

/// Bytes of the longest packet between pods that leaves by every uplink, whoever the peers are.
pub(crate) fn pod_mtu(config: &OverlayConfig, backend: Backend, uplinks: &[Uplink]) -> Option<u32> {
    let port = match backend {
        Backend::Vxlan { .. } => Some(Port::Vxlan4),
        Backend::Udp => Some(Port::Tun),
        Backend::HostGw => None,
    };
    // A machine without a network has the loopback interface, by which nobody is reached.
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
    config: &'a OverlayConfig,
    backend: Backend,
    local: &'a Local,
    uplinks: &'a [Uplink],
    wanted: Wanted,
}

/// What these peers need on a node with these uplinks. `narrow` knows peers to which less than a full packet passes.
pub(crate) fn wanted(
    (config, backend): (&OverlayConfig, Backend),
    (local, uplinks): (&Local, &[Uplink]),
    peers: &BTreeMap<String, Peer>,
    narrow: &HashMap<String, u32>,
) -> Wanted {
    let mut planner = Planner { config, backend, local, uplinks, wanted: Wanted::default() };
    // A node alone has no devices of the overlay's, and loses nothing by it.
    if !peers.is_empty() {
        planner.devices(peers.values().any(|peer| peer.kind == PeerKind::Udp));
    }
    let Wanted { tables, ways, .. } = &mut planner.wanted;
    let ranges = peers.values().map(|peer| peer.cidrs.len()).sum();
    tables.forwards.reserve(ranges);
    tables.neighbours.reserve(ranges);
    tables.routes.reserve(ranges);
    ways.reserve(ranges);
    let mut taken: BTreeMap<IpAddr, (IpNetwork, &str)> =
        local.cidrs.iter().map(|cidr| (cidr.network(), (*cidr, "this node"))).collect();
    for (name, peer) in peers {
        for cidr in &peer.cidrs {
            let added = match overlapping(&taken, cidr) {
                Some((other, of)) => Err(format!("its range {cidr} overlaps {other} of {of}")),
                None => {
                    match (speaks(peer, cidr.is_ipv6()), planner.peer(peer, *cidr, narrow.get(name).copied()))
                    {
                        (true, Ok(())) => {
                            planner.way(name, *cidr);
                            Ok(())
                        }
                        (true, refused) => refused,
                        (false, _) => Ok(()),
                    }
                }
            };
            match added {
                Ok(()) => drop(taken.insert(cidr.network(), (*cidr, name))),
                Err(reason) => planner.wanted.refused.push((name.clone(), reason)),
            }
        }
    }
    planner.wanted
}

/// Whether a peer can be held to a family of pods. The cluster gives each node a range of every family, also one of
/// flannel's that has been told of one family: its pods have no address of the other. Such a peer announces an address
/// of one family alone, and so does a node of ours that carries both in packets of one; what passes there is found by
/// the family of these packets. A peer with ranges of one family has them in use, whatever carries them.
fn speaks(peer: &Peer, v6: bool) -> bool {
    let announces = |v6: bool| peer.ends.iter().any(|end| end.ip.is_ipv6() == v6);
    let has_range = |v6: bool| peer.cidrs.iter().any(|cidr| cidr.is_ipv6() == v6);
    announces(v6) || !(announces(!v6) && has_range(!v6))
}

/// A range that shares addresses with this one. Ranges in the map share none with each other.
fn overlapping<'a>(
    taken: &BTreeMap<IpAddr, (IpNetwork, &'a str)>,
    cidr: &IpNetwork,
) -> Option<(IpNetwork, &'a str)> {
    let before = taken.range(..=cidr.network()).next_back();
    let after = taken.range(cidr.network()..).next();
    let shares = |other: &IpNetwork| other.contains(cidr.network()) || cidr.contains(other.network());
    before.into_iter().chain(after).map(|(_, found)| *found).find(|(other, _)| shares(other))
}

impl Planner<'_> {
    fn uplink(&self, v6: bool) -> Option<&Uplink> {
        self.uplinks.iter().find(|uplink| uplink.address.is_ipv6() == v6)
    }

    fn devices(&mut self, udp_peers: bool) {
        let ours = &self.local.cidrs;
        if let Backend::Vxlan { vni, port, .. } = self.backend {
            for uplink in self.uplinks {
                let v6 = uplink.address.is_ipv6();
                // Each family of pods goes in packets of its own family, if nodes have them, else in the other.
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
                let device =
                    Device { kind, mtu: device_mtu(self.config, Some(slot), uplink), up: true, addresses };
                self.wanted.tables.devices.insert(slot, device);
            }
        }
        let is_udp = self.backend == Backend::Udp;
        if let Some(narrowest) =
            self.uplinks.iter().map(|uplink| device_mtu(self.config, Some(Port::Tun), uplink)).min()
            && (is_udp || (udp_peers && matches!(self.backend, Backend::Vxlan { .. })))
        {
            // The addresses are the VXLAN device's where there is one.
            let addresses = ours.iter().map(IpNetwork::network).filter(|_| is_udp).collect();
            let device = Device { kind: Kind::Tun, mtu: narrowest, up: true, addresses };
            self.wanted.tables.devices.insert(Port::Tun, device);
        }
    }

    fn peer(&mut self, peer: &Peer, cidr: IpNetwork, narrow: Option<u32>) -> Result<(), String> {
        let end = |v6: bool| peer.ends.iter().find(|end| end.ip.is_ipv6() == v6 && self.uplink(v6).is_some());
        let v6 = cidr.is_ipv6();
        let Some(end) = end(v6).or_else(|| end(!v6)).copied() else {
            return Err("it has no address of a family that this node has".to_owned());
        };
        let direct = end.ip.is_ipv6() == v6 && self.uplink(v6).is_some_and(|u| u.address.contains(end.ip));
        match (self.backend, peer.kind) {
            (Backend::HostGw, PeerKind::HostGw) if direct => self.direct(cidr, end.ip, narrow),
            (Backend::HostGw, PeerKind::HostGw) => {
                return Err(format!("{} is not in this node's subnet, as host-gw needs", end.ip));
            }
            (Backend::Vxlan { direct_routing: true, .. }, PeerKind::Vxlan) if direct => {
                self.direct(cidr, end.ip, narrow);
            }
            (Backend::Vxlan { vni, .. }, PeerKind::Vxlan) => match end.vtep {
                Some((peer_vni, mac)) if peer_vni == vni => self.vxlan(cidr, (end.ip, mac), narrow),
                Some((other, _)) => return Err(format!("its VNI is {other}, ours {vni}")),
                None => return Err("its hardware address is not announced".to_owned()),
            },
            (Backend::Vxlan { .. }, PeerKind::Udp) | (Backend::Udp, PeerKind::Udp | PeerKind::Vxlan) => {
                self.udp(cidr, end.ip, narrow);
            }
            (_, kind) => return Err(format!("its backend is {}, which ours does not speak", kind.name())),
        }
        Ok(())
    }

    fn way(&mut self, peer: &str, cidr: IpNetwork) {
        let Some(route) = self.wanted.tables.routes.get(&cidr) else { return };
        let (to, mtu) = match route.out {
            // A device of the overlay has the first address, a bridge behind it the second.
            Out::Device(port) => (Some(cidr.network()), self.wanted.tables.devices.get(&port).map(|d| d.mtu)),
            Out::Interface(_) => (second(cidr), pod_mtu(self.config, self.backend, self.uplinks)),
        };
        if let (Some(to), Some(mtu)) = (to, mtu) {
            self.wanted.ways.push(Way { peer: peer.to_owned(), to, mtu });
        }
    }

    fn direct(&mut self, cidr: IpNetwork, via: IpAddr, narrow: Option<u32>) {
        let Some(uplink) = self.uplink(via.is_ipv6()) else { return };
        let mtu = narrow.filter(|narrow| *narrow < uplink.mtu);
        let route = Route { via: Some(via), out: Out::Interface(uplink.index), source: None, mtu };
        self.wanted.tables.routes.insert(cidr, route);
    }

    fn vxlan(&mut self, cidr: IpNetwork, (to, mac): (IpAddr, Mac), narrow: Option<u32>) {
        let port = if to.is_ipv6() { Port::Vxlan6 } else { Port::Vxlan4 };
        // As flannel has it: the next hop is the first address of the peer's range, whose holder is known, so that
        // nothing is ever asked over the network.
        let via = cidr.network();
        self.wanted.tables.forwards.insert(Forward { port, mac, to });
        self.wanted.tables.neighbours.insert(Neighbour { port, ip: via, mac });
        let route = self.through(port, Some(via), cidr, narrow);
        self.wanted.tables.routes.insert(cidr, route);
    }

    fn udp(&mut self, cidr: IpNetwork, to: IpAddr, narrow: Option<u32>) {
        let route = self.through(Port::Tun, None, cidr, narrow);
        self.wanted.tables.routes.insert(cidr, route);
        self.wanted.tunnels.push((cidr, to));
    }

    fn through(&self, port: Port, via: Option<IpAddr>, cidr: IpNetwork, narrow: Option<u32>) -> Route {
        let whole = self.wanted.tables.devices.get(&port).map_or(0, |device| device.mtu);
        let source = self.local.cidrs.iter().find(|own| own.is_ipv6() == cidr.is_ipv6());
        Route {
            via,
            out: Out::Device(port),
            source: source.map(IpNetwork::network),
            mtu: narrow.filter(|narrow| *narrow < whole),
        }
    }
}

fn second(cidr: IpNetwork) -> Option<IpAddr> {
    match cidr {
        IpNetwork::V4(cidr) => cidr.nth(1).map(IpAddr::V4),
        IpNetwork::V6(cidr) => cidr.nth(1).map(IpAddr::V6),
    }
}

/// A locally administered address that follows from the node's name, so that peers' entries stay true when the
/// device is made again (FNV-1a).
pub(crate) fn hardware_address(identity: &str, v6: bool) -> Mac {
    let bytes = identity.bytes().chain([u8::from(v6)]);
    let hash = bytes
        .fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3));
    let [a, b, c, d, e, f, ..] = hash.to_be_bytes();
    [(a & 0xfc) | 0x02, b, c, d, e, f]
}

// === difference ===

/// The steps from what is there to what is wanted.
pub(crate) fn difference(wanted: &Tables, seen: &Tables) -> Vec<Change> {
    let mut changes = Vec::new();
    let mut gone: HashSet<Port> = HashSet::new();
    for (port, device) in &seen.devices {
        if wanted.devices.get(port).is_none_or(|want| must_be_remade(want, device)) {
            changes.push(Change::RemoveDevice(*port));
            gone.insert(*port);
        }
    }
    for (port, want) in &wanted.devices {
        match seen.devices.get(port).filter(|_| !gone.contains(port)) {
            None => {
                changes.push(Change::MakeDevice(*port, want.clone()));
                changes.extend(want.addresses.iter().map(|ip| Change::AddAddress(*port, *ip)));
            }
            Some(have) => {
                if (&want.kind, want.mtu, want.up) != (&have.kind, have.mtu, have.up) {
                    changes.push(Change::SetDevice(*port, want.clone()));
                }
                let (add, remove) = (&want.addresses - &have.addresses, &have.addresses - &want.addresses);
                changes.extend(remove.iter().map(|ip| Change::RemoveAddress(*port, *ip)));
                changes.extend(add.iter().map(|ip| Change::AddAddress(*port, *ip)));
            }
        }
    }
    entries(wanted, seen, &gone, &mut changes);
    changes
}

/// The kernel changes addresses, uplink and MTU of a device that is there, but not these.
fn must_be_remade(want: &Device, have: &Device) -> bool {
    match (&want.kind, &have.kind) {
        (
            Kind::Vxlan { vni, port, mac, learning, local, .. },
            Kind::Vxlan {
                vni: has_vni,
                port: has_port,
                mac: has_mac,
                learning: has_learning,
                local: has_local,
                ..
            },
        ) => {
            (vni, port, mac, learning, local.is_ipv6())
                != (has_vni, has_port, has_mac, has_learning, has_local.is_ipv6())
        }
        (Kind::Tun, Kind::Tun) => false,
        _ => true,
    }
}

fn entries(wanted: &Tables, seen: &Tables, gone: &HashSet<Port>, changes: &mut Vec<Change>) {
    let leaves_by_gone = |route: &Route| matches!(route.out, Out::Device(port) if gone.contains(&port));
    for (to, have) in &seen.routes {
        // Another route to the same range is replaced, not removed first: no packet finds none.
        // But for IPv6: the kernel takes no next hop that another device's route leads to.
        let is_in_the_way = |want: &Route| to.is_ipv6() && want.out != have.out;
        if wanted.routes.get(to).is_none_or(is_in_the_way) && !leaves_by_gone(have) {
            changes.push(Change::RemoveRoute(*to, *have));
        }
    }
    let stays = |port: Port| !gone.contains(&port);
    for have in seen.neighbours.iter().filter(|n| stays(n.port)) {
        let replaced = |n: &&Neighbour| n.port == have.port && n.ip == have.ip;
        // The kernel replaces an entry of the same address; removing it afterwards would remove the new one.
        if !wanted.neighbours.contains(have) && !wanted.neighbours.iter().any(|n| replaced(&n)) {
            changes.push(Change::RemoveNeighbour(*have));
        }
    }
    let old = seen.forwards.iter().filter(|f| stays(f.port) && !wanted.forwards.contains(f));
    changes.extend(old.map(|f| Change::RemoveForward(*f)));
    let has = |port: Port| !gone.contains(&port);
    let new = wanted.forwards.iter().filter(|f| !has(f.port) || !seen.forwards.contains(f));
    changes.extend(new.map(|f| Change::AddForward(*f)));
    let new = wanted.neighbours.iter().filter(|n| !has(n.port) || !seen.neighbours.contains(n));
    changes.extend(new.map(|n| Change::AddNeighbour(*n)));
    for (to, want) in &wanted.routes {
        if leaves_by_gone(want) || seen.routes.get(to) != Some(want) {
            changes.push(Change::AddRoute(*to, *want));
        }
    }
}

#[cfg(test)]
mod tests;

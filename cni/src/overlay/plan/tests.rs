//! Tests of plans: the tables and changes for given peers.

use super::super::{End, Local};
use super::*;

pub(super) const VXLAN: Backend = Backend::Vxlan { vni: 1, port: 8472, direct_routing: false };

pub(super) fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

pub(super) fn net(text: &str) -> IpNetwork {
    text.parse().unwrap()
}

fn config() -> OverlayConfig {
    OverlayConfig {
        backend: VXLAN,
        interface: "o".into(),
        identity: "n0".into(),
        mtu: None,
        udp_port: 8285,
        route_protocol: OverlayConfig::ROUTE_PROTOCOL,
    }
}

fn uplinks(addresses: &[&str]) -> Vec<Uplink> {
    addresses.iter().map(|text| Uplink { address: net(text), index: 2, mtu: 1500 }).collect()
}

fn local() -> Local {
    Local { cidrs: vec![net("10.42.0.0/24"), net("fd42::/64")], addresses: Vec::new() }
}

/// The peer with this number. Its ranges and addresses contain the number.
pub(super) fn peer(number: u8, kind: PeerKind, families: &[u8]) -> (String, Peer) {
    let address =
        |v: &u8| if *v == 4 { ip(&format!("192.0.2.{number}")) } else { ip(&format!("2001:db8::{number}")) };
    let vtep = |v: &u8| (kind == PeerKind::Vxlan).then_some((1, [2, 0, 0, 0, number, *v]));
    let ends = families.iter().map(|v| End { ip: address(v), vtep: vtep(v) }).collect();
    let cidrs = vec![net(&format!("10.42.{number}.0/24")), net(&format!("fd42:0:0:{number}::/64"))];
    (format!("n{number}"), Peer { cidrs, kind, ends, bridged: true })
}

/// A node with this backend and these uplinks.
pub(super) fn node(backend: Backend, up: &[&str]) -> Node {
    Node { config: OverlayConfig { backend, ..config() }, local: local(), uplinks: uplinks(up) }
}

fn plan(backend: Backend, up: &[&str], peers: &[(String, Peer)]) -> Plan {
    Plan::new(node(backend, up), &peers.iter().cloned().collect(), &BTreeMap::new())
}

pub(super) const BOTH: &[&str] = &["192.0.2.100/24", "2001:db8::100/64"];

#[test]
fn each_pod_family_uses_outer_packets_of_the_same_family() {
    let made = plan(VXLAN, BOTH, &[peer(1, PeerKind::Vxlan, &[4, 6])]);
    assert_eq!(made.refused(), []);
    let tables = made.tables();
    let mtus: Vec<_> = tables.devices.iter().map(|(port, device)| (*port, device.mtu)).collect();
    assert_eq!(mtus, [(Port::Vxlan4, 1450), (Port::Vxlan6, 1430)]);
    let forwards = [
        Forward { port: Port::Vxlan4, mac: [2, 0, 0, 0, 1, 4], to: ip("192.0.2.1") },
        Forward { port: Port::Vxlan6, mac: [2, 0, 0, 0, 1, 6], to: ip("2001:db8::1") },
    ];
    assert_eq!(tables.forwards, forwards.into_iter().collect());
    let neighbours = [
        ((Port::Vxlan4, ip("10.42.1.0")), [2, 0, 0, 0, 1, 4]),
        ((Port::Vxlan6, ip("fd42:0:0:1::")), [2, 0, 0, 0, 1, 6]),
    ];
    assert_eq!(tables.neighbours, neighbours.into_iter().collect());
    let route = tables.routes[&net("10.42.1.0/24")];
    let (out, source) = (OutInterface::Device(Port::Vxlan4), Some(ip("10.42.0.0")));
    assert_eq!(route, Route { via: Some(ip("10.42.1.0")), out, source, mtu: None });
    assert_eq!(tables.routes[&net("fd42:0:0:1::/64")].out, OutInterface::Device(Port::Vxlan6));
}

#[test]
fn one_family_of_nodes_carries_both_families_of_pods() {
    for (up, families, port) in
        [(&BOTH[..1], &[4][..], Port::Vxlan4), (&BOTH[1..], &[6], Port::Vxlan6), (BOTH, &[4], Port::Vxlan4)]
    {
        let made = plan(VXLAN, up, &[peer(1, PeerKind::Vxlan, families)]);
        let tables = made.tables();
        assert_eq!((tables.forwards.len(), tables.neighbours.len()), (1, 2));
        assert!(tables.routes.values().all(|route| route.out == OutInterface::Device(port)), "{tables:?}");
    }
}

#[test]
fn unreachable_peers_are_refused_by_name_and_the_others_are_reached() {
    let mut other_vni = peer(2, PeerKind::Vxlan, &[4]);
    other_vni.1.ends[0].vtep = Some((7, [2; 6]));
    let mut overlapping = peer(3, PeerKind::Vxlan, &[4]);
    overlapping.1.cidrs = vec![net("10.42.1.128/25"), net("10.42.0.0/16")];
    let peers = [
        peer(1, PeerKind::Vxlan, &[4]),
        other_vni,
        overlapping,
        peer(4, PeerKind::HostGw, &[4]),
        peer(5, PeerKind::Vxlan, &[6]),
    ];
    let made = plan(VXLAN, &BOTH[..1], &peers);
    let refused: Vec<String> = made.refused().iter().map(|(name, why)| format!("{name}: {why}")).collect();
    assert_eq!(
        refused,
        [
            "n2: its VNI is 7, this node's is 1",
            "n3: its range 10.42.0.0/16 overlaps 10.42.0.0/24 of this node",
            "n3: its range 10.42.1.128/25 overlaps 10.42.1.0/24 of n1",
            "n4: its backend is host-gw, which this node's backend does not support",
            "n5: it has no address of a family that this node has",
        ]
    );
    assert_eq!(made.tables().routes.len(), 2);
}

#[test]
fn no_peer_gets_the_packets_for_another_one_by_its_hardware_address() {
    let with = |number: u8, mac: Mac| {
        let (name, mut one) = peer(number, PeerKind::Vxlan, &[4]);
        one.ends[0].vtep = Some((1, mac));
        (name, one)
    };
    let made = |mac: Mac| {
        let made = plan(VXLAN, &BOTH[..1], &[with(1, mac), with(2, mac)]);
        let to: Vec<String> = made.tables().forwards.iter().map(|forward| forward.to.to_string()).collect();
        (to, made.refused().to_vec(), made.tables().routes.len())
    };
    let refused =
        |name: &str, owner: &str| vec![(name.to_owned(), format!("its hardware address is that of {owner}"))];
    let derived = hardware_address("n2", false);
    assert_eq!(made(derived), (vec!["192.0.2.2".to_owned()], refused("n1", "n2"), 2));
    // If the address is derived from neither name, the first peer is the owner.
    assert_eq!(made([2; 6]), (vec!["192.0.2.1".to_owned()], refused("n2", "n1"), 2));
}

#[test]
fn a_peer_is_tested_and_refused_by_the_families_that_it_announced() {
    let only = |of: &str| {
        let mut one = peer(3, PeerKind::Vxlan, &[4]);
        one.1.cidrs.retain(|cidr| *cidr == net(of));
        one
    };
    let tested = |backend: Backend, peer: (String, Peer)| -> Vec<String> {
        let name = peer.0.clone();
        let made = plan(backend, BOTH, &[peer]);
        assert_eq!(made.refused(), []);
        made.paths(&BTreeSet::from([name])).iter().map(|way| way.to.to_string()).collect()
    };
    assert_eq!(tested(VXLAN, peer(1, PeerKind::Vxlan, &[4, 6])), ["10.42.1.0", "fd42:0:0:1::"]);
    // A flannel node with IPv4 only: its pods have no address of the IPv6 range that the cluster assigned.
    assert_eq!(tested(VXLAN, peer(1, PeerKind::Vxlan, &[4])), ["10.42.1.0"]);
    assert_eq!(tested(VXLAN, peer(1, PeerKind::Vxlan, &[6])), ["fd42:0:0:1::"]);
    assert_eq!(tested(Backend::HostGw, peer(1, PeerKind::HostGw, &[4])), ["10.42.1.1"]);
    // With ranges of one family, its pods have addresses of that family.
    assert_eq!(tested(VXLAN, only("10.42.3.0/24")), ["10.42.3.0"]);
    assert_eq!(tested(VXLAN, only("fd42:0:0:3::/64")), ["fd42:0:0:3::"]);
}

#[test]
fn nodes_in_one_subnet_use_no_tunnel() {
    let direct = Backend::Vxlan { vni: 1, port: 8472, direct_routing: true };
    let mut far = peer(2, PeerKind::Vxlan, &[4]);
    far.1.ends[0].ip = ip("198.51.100.2");
    let made = plan(direct, BOTH, &[peer(1, PeerKind::Vxlan, &[4, 6]), far]);
    let via = |text: &str| made.tables().routes[&net(text)];
    let straight =
        Route { via: Some(ip("192.0.2.1")), out: OutInterface::Interface(2), source: None, mtu: None };
    assert_eq!(via("10.42.1.0/24"), straight);
    assert_eq!(via("10.42.2.0/24").out, OutInterface::Device(Port::Vxlan4));
    let made = plan(Backend::HostGw, BOTH, &[peer(1, PeerKind::HostGw, &[4, 6])]);
    assert!(made.tables().devices.is_empty() && made.tables().routes.len() == 2);
    let mut far = peer(2, PeerKind::HostGw, &[4]);
    far.1.ends[0].ip = ip("198.51.100.2");
    let made = plan(Backend::HostGw, BOTH, &[far]);
    assert!(made.refused()[0].1.contains("not in this node's subnet"), "{:?}", made.refused());
}

#[test]
fn peers_without_vxlan_are_reached_by_udp() {
    let made = plan(VXLAN, BOTH, &[peer(1, PeerKind::Udp, &[4]), peer(2, PeerKind::Vxlan, &[4])]);
    assert_eq!(made.tables().routes[&net("10.42.1.0/24")].out, OutInterface::Device(Port::Tun));
    assert_eq!(made.tables().routes[&net("10.42.2.0/24")].out, OutInterface::Device(Port::Vxlan4));
    let paths: Vec<_> =
        made.tunnels().iter().map(|(range, node)| (range.to_string(), node.to_string())).collect();
    assert_eq!(paths[0], ("10.42.1.0/24".to_owned(), "192.0.2.1".to_owned()));
    let made = plan(Backend::Udp, BOTH, &[peer(2, PeerKind::Vxlan, &[4])]);
    assert_eq!((made.tunnels().len(), made.tables().devices[&Port::Tun].mtu), (2, 1452));
}

#[test]
fn a_range_is_independent_of_the_address_that_names_it() {
    let (mut reported, mut plain) = (peer(1, PeerKind::Vxlan, &[4, 6]), peer(1, PeerKind::Vxlan, &[4, 6]));
    reported.1.cidrs = vec![net("10.42.1.7/24"), net("fd42:0:0:1::7/64")];
    plain.1.cidrs = vec![net("10.42.1.0/24"), net("fd42:0:0:1::/64")];
    assert_eq!(plan(VXLAN, BOTH, &[reported]).tables(), plan(VXLAN, BOTH, &[plain]).tables());
}

#[test]
fn without_peers_there_are_no_routes_or_devices() {
    assert_eq!(*plan(VXLAN, BOTH, &[]).tables(), Tables::default());
}

#[test]
fn a_peer_with_a_smaller_mtu_gets_a_route_with_that_mtu() {
    let peers = BTreeMap::from([peer(1, PeerKind::Vxlan, &[4]), peer(2, PeerKind::Vxlan, &[4])]);
    let path_mtus = BTreeMap::from([("n1".to_owned(), 1300), ("n2".to_owned(), 1450)]);
    let made = Plan::new(node(VXLAN, &BOTH[..1]), &peers, &path_mtus);
    let tables = made.tables();
    assert_eq!(tables.routes[&net("10.42.1.0/24")].mtu, Some(1300));
    assert_eq!(tables.routes[&net("10.42.2.0/24")].mtu, None, "the device has this MTU");
}

/// The kernel's tables after these changes.
pub(super) fn after(mut tables: Tables, changes: &[Change]) -> Tables {
    for change in changes.iter().cloned() {
        match change {
            Change::RemoveDevice(port) => {
                tables.devices.remove(&port);
                tables.forwards.retain(|f| f.port != port);
                tables.neighbours.retain(|(of, _), _| *of != port);
                tables.routes.retain(|_, route| route.out != OutInterface::Device(port));
            }
            Change::MakeDevice(port, mut device) => {
                device.addresses.clear();
                tables.devices.insert(port, device);
            }
            Change::SetDevice(port, device) => {
                let had = std::mem::take(&mut tables.devices.get_mut(&port).unwrap().addresses);
                tables.devices.insert(port, Device { addresses: had, ..device });
            }
            Change::RemoveAddress(port, ip) => {
                assert!(tables.devices.get_mut(&port).unwrap().addresses.remove(&ip));
            }
            Change::AddAddress(port, ip) => {
                assert!(tables.devices.get_mut(&port).unwrap().addresses.insert(ip));
            }
            Change::RemoveRoute(to, _) => assert!(tables.routes.remove(&to).is_some()),
            Change::RemoveNeighbour(n) => {
                assert_eq!(tables.neighbours.remove(&(n.port, n.ip)), Some(n.mac));
            }
            Change::RemoveForward(f) => assert!(tables.forwards.remove(&f)),
            Change::AddForward(f) => assert!(tables.forwards.insert(f)),
            Change::AddNeighbour(n) => {
                tables.neighbours.insert((n.port, n.ip), n.mac);
            }
            Change::AddRoute(to, route) => {
                if let OutInterface::Device(port) = route.out {
                    assert!(tables.devices.contains_key(&port), "a route by a device that is not there");
                }
                tables.routes.insert(to, route);
            }
        }
    }
    tables
}

#[test]
fn changes_lead_from_any_tables_to_any_others_and_then_end() {
    let direct = Backend::Vxlan { vni: 1, port: 8472, direct_routing: true };
    let other = Backend::Vxlan { vni: 2, port: 4789, direct_routing: false };
    let (v, u) = (PeerKind::Vxlan, PeerKind::Udp);
    let mut moved = peer(1, v, &[4, 6]);
    moved.1.ends[0].ip = ip("192.0.2.77");
    let mut remade = peer(1, v, &[4, 6]);
    remade.1.ends[0].vtep = Some((1, [6; 6]));
    let all = [
        Tables::default(),
        plan(VXLAN, BOTH, &[peer(1, v, &[4, 6]), peer(2, v, &[4])]).tables().clone(),
        plan(VXLAN, BOTH, &[moved, peer(2, u, &[4])]).tables().clone(),
        plan(VXLAN, BOTH, &[remade]).tables().clone(),
        plan(VXLAN, &["192.0.2.200/24"], &[peer(1, v, &[4])]).tables().clone(),
        plan(direct, BOTH, &[peer(1, v, &[4]), peer(3, v, &[4, 6])]).tables().clone(),
        plan(other, BOTH, &[peer(2, v, &[4])]).tables().clone(),
        plan(Backend::Udp, BOTH, &[peer(1, u, &[4]), peer(2, v, &[6])]).tables().clone(),
        plan(Backend::HostGw, BOTH, &[peer(1, PeerKind::HostGw, &[4, 6])]).tables().clone(),
    ];
    for from in &all {
        for to in &all {
            let changes = difference(to, from);
            assert_eq!(&after(from.clone(), &changes), to, "{changes:#?}");
        }
        assert_eq!(difference(from, from), []);
    }
}

#[test]
fn a_changed_peer_causes_only_its_own_changes() {
    let many: Vec<_> = (1..200).map(|number| peer(number, PeerKind::Vxlan, &[4])).collect();
    let mut other = many.clone();
    other[7].1.ends[0].ip = ip("192.0.2.250");
    let (from, to) = (plan(VXLAN, &BOTH[..1], &many), plan(VXLAN, &BOTH[..1], &other));
    assert_eq!(difference(to.tables(), from.tables()).len(), 2);
}

#[test]
fn derived_hardware_addresses_are_distinct_and_locally_administered() {
    let all: HashSet<Mac> = (0..2000).map(|n| hardware_address(&format!("node-{n}"), n % 2 == 0)).collect();
    assert_eq!(all.len(), 2000);
    assert!(all.iter().all(|mac| mac[0] & 3 == 2));
}

//! After any sequence of changes, an incremental plan equals a complete plan.

use proptest::collection::vec;
use proptest::option::{of, weighted};
use proptest::prelude::*;
use proptest::sample::select;

use super::super::tests::{BOTH, VXLAN, after, ip, net, node, peer};
use super::*;
use crate::overlay::{Backend, End, PeerKind};

const DIRECT: Backend = Backend::Vxlan { vni: 1, port: 8472, direct_routing: true };

/// One change.
#[derive(Debug, Clone)]
enum Event {
    /// The peer with this number is added, changed or removed.
    Peer(u8, Option<Peer>),
    /// The path MTU to the peer that a probe found. `None` if the path has the full MTU.
    ProbeResult(u8, Option<u32>),
    /// The ranges of this node.
    Local(Vec<IpNetwork>),
}

fn name(number: u8) -> String {
    format!("n{number}")
}

fn any_peer(number: u8) -> impl Strategy<Value = Peer> {
    // Most peers have their own ranges. Some peers have ranges of other peers or of this node, a part or a union of
    // such ranges, or a range with host bits (`10.42.1.7/24`).
    let own = peer(number, PeerKind::Vxlan, &[4, 6]).1.cidrs;
    let ranges = vec![
        "10.42.1.0/24",
        "10.42.2.0/24",
        "10.42.2.128/25",
        "10.42.2.0/23",
        "10.42.1.7/24",
        "10.42.0.0/16",
        "10.42.99.0/24",
        "fd42:0:0:1::/64",
        "fd42:0:0:2::/63",
        "fd42:0:0:99::/64",
    ];
    let cidrs = prop_oneof![6 => Just(own), 1 => vec(select(ranges).prop_map(net), 0..3)];
    let kind = prop_oneof![6 => Just(PeerKind::Vxlan), 1 => Just(PeerKind::HostGw), 1 => Just(PeerKind::Udp)];
    // Most addresses are the peer's own. Some belong to other peers. Some peers have all addresses of peer 9, like a
    // node with two names.
    let v4 = select(vec![format!("192.0.2.{number}"), "198.51.100.9".to_owned()]);
    let v6 = select(vec![format!("2001:db8::{number}"), "2001:db8:9::9".to_owned()]);
    let vtep =
        move || weighted(0.9, (select(vec![1, 1, 1, 1, 7]), select(vec![[2, 0, 0, 0, 0, number], [2; 6]])));
    let ends = (of((v4, vtep())), of((v6, vtep()))).prop_map(|(v4, v6)| {
        v4.into_iter().chain(v6).map(|(text, vtep)| End { ip: ip(&text), vtep }).collect::<Vec<End>>()
    });
    let ends = prop_oneof![3 => ends, 1 => Just(peer(9, PeerKind::Vxlan, &[4, 6]).1.ends)];
    (cidrs, kind, ends).prop_map(|(cidrs, kind, ends)| Peer { cidrs, kind, ends, bridged: true })
}

fn any_event() -> impl Strategy<Value = Event> {
    let number = 1..7u8;
    let peer =
        number.clone().prop_flat_map(|n| weighted(0.8, any_peer(n)).prop_map(move |p| Event::Peer(n, p)));
    let probe =
        (number, of(select(&[1300, 1440, 9000][..]))).prop_map(|(n, bytes)| Event::ProbeResult(n, bytes));
    let own = select(vec![vec!["10.42.0.0/24", "fd42::/64"], vec!["10.42.99.0/24"]]);
    let local = own.prop_map(|own| Event::Local(own.into_iter().map(net).collect()));
    prop_oneof![12 => peer, 3 => probe, 1 => local]
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(512) })]

    #[test]
    fn an_incremental_plan_equals_a_complete_plan(
        backend in select(&[VXLAN, DIRECT, Backend::HostGw, Backend::Udp][..]),
        up in select(vec![BOTH, &BOTH[..1], &BOTH[1..]]),
        steps in vec(vec(any_event(), 1..4), 1..12),
    ) {
        let mut node = node(backend, up);
        let (mut peers, mut path_mtus) = (BTreeMap::new(), BTreeMap::new());
        let mut plan = Plan::new(node.clone(), &peers, &path_mtus);
        for events in steps {
            for event in events {
                match event {
                    Event::Peer(n, Some(peer)) => drop(peers.insert(name(n), peer)),
                    Event::Peer(n, None) => drop(peers.remove(&name(n))),
                    Event::ProbeResult(n, Some(bytes)) => drop(path_mtus.insert(name(n), bytes)),
                    Event::ProbeResult(n, None) => drop(path_mtus.remove(&name(n))),
                    Event::Local(cidrs) => node.local.cidrs = cidrs,
                }
            }
            let before = plan.tables().clone();
            let changes = plan.follow(&node.local, &peers, &path_mtus);
            prop_assert_eq!(&plan, &Plan::new(node.clone(), &peers, &path_mtus));
            prop_assert_eq!(&after(before, &changes), plan.tables(), "{:#?}", changes);
        }
    }
}

/// Peers 1 to 4, dual-stack.
fn four() -> BTreeMap<String, Peer> {
    (1..5).map(|number| peer(number, PeerKind::Vxlan, &[4, 6])).collect()
}

/// Whether only the changed peers are planned.
fn is_planned_alone(from: &BTreeMap<String, Peer>, to: &BTreeMap<String, Peer>) -> bool {
    let mut plan = Plan::new(node(VXLAN, BOTH), from, &BTreeMap::new());
    plan.follow_changed(to, &BTreeMap::new()).is_some()
}

#[test]
fn peers_without_common_ranges_are_planned_alone() {
    let all = four();
    let with = |peer: (String, Peer)| {
        let mut all = all.clone();
        all.extend([peer]);
        all
    };
    assert!(is_planned_alone(&all, &with(peer(5, PeerKind::Vxlan, &[4]))), "a new peer");
    assert!(is_planned_alone(&with(peer(5, PeerKind::Vxlan, &[4])), &all), "a removed peer");
    assert!(is_planned_alone(&all, &with(peer(4, PeerKind::Vxlan, &[6]))), "a changed peer");
    let mut moved = all.clone();
    let cidrs = moved.remove("n4").unwrap().cidrs;
    moved.insert("n9".to_owned(), Peer { cidrs, ..peer(9, PeerKind::Vxlan, &[4, 6]).1 });
    assert!(is_planned_alone(&all, &moved), "a new peer with the ranges of a removed peer");
    // A peer is not planned alone if it needs a device that no other peer needs, or if it shares entries with another
    // peer.
    let mut same_range = peer(5, PeerKind::Vxlan, &[4]);
    same_range.1.cidrs = all["n1"].cidrs.clone();
    let mut same_end = peer(5, PeerKind::Vxlan, &[4]);
    same_end.1.ends = all["n1"].ends.clone();
    let mut same_device = peer(5, PeerKind::Vxlan, &[4]);
    same_device.1.ends[0].vtep = all["n1"].ends[0].vtep;
    for other in [peer(5, PeerKind::Udp, &[4]), same_range, same_end, same_device] {
        assert!(!is_planned_alone(&all, &with(other.clone())), "{other:?} is added");
        assert!(!is_planned_alone(&with(other.clone()), &all), "{other:?} is removed");
    }
    assert!(!is_planned_alone(&BTreeMap::new(), &all), "the first peers");
}

#[test]
fn a_path_is_probed_at_an_address_that_every_peer_answers() {
    let to = |backend, kind, bridged| {
        let (name, one) = peer(1, kind, &[4, 6]);
        let peers = BTreeMap::from([(name.clone(), Peer { bridged, ..one })]);
        let plan = Plan::new(node(backend, BOTH), &peers, &BTreeMap::new());
        let paths = plan.paths(&BTreeSet::from([name]));
        paths.iter().map(|path| path.to.to_string()).collect::<Vec<_>>()
    };
    let (v, h) = (PeerKind::Vxlan, PeerKind::HostGw);
    let direct = Backend::Vxlan { vni: 1, port: 8472, direct_routing: true };
    let (device, bridge) = (["10.42.1.0", "fd42:0:0:1::"], ["10.42.1.1", "fd42:0:0:1::1"]);
    for bridged in [true, false] {
        assert_eq!(to(VXLAN, v, bridged), device);
    }
    assert_eq!(to(direct, v, true), bridge);
    assert_eq!(to(direct, v, false), ["10.42.1.0", "2001:db8::1"]);
    assert_eq!(to(Backend::HostGw, h, true), bridge);
    assert_eq!(to(Backend::HostGw, h, false), ["192.0.2.1", "2001:db8::1"]);
}

#[test]
fn names_that_differ_are_found_at_every_position() {
    let map = |text: &str| -> BTreeMap<String, char> {
        text.split_whitespace().map(|entry| (entry[..1].to_owned(), entry.chars().last().unwrap())).collect()
    };
    let differ = |one: &str, other: &str| {
        let names = differing(&map(one), &map(other));
        assert_eq!(names, differing(&map(other), &map(one)));
        names.into_iter().collect::<String>()
    };
    assert_eq!(differ("", ""), "");
    assert_eq!(differ("a1 b1 c1", "a1 b1 c1"), "");
    assert_eq!(differ("a1 b1 c1", "a2 b1 c2"), "ac");
    assert_eq!(differ("b1 d1", "a1 b1 c1 d1 e1"), "ace");
    assert_eq!(differ("a1 b1", ""), "ab");
}

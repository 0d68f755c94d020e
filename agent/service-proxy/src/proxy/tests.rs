//! Random changes of services. The applied differences must result in the table of a fresh start, and each packet must
//! reach an endpoint that the API's documentation allows.

use std::net::IpAddr;
use std::sync::Arc;

use coracle_nft::{Rule, Verdict};
use coracle_services::EndpointSlice;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::choice::{Choice, SHARED_MAX, limits, sizes};
use crate::endpoints::Target;
use crate::program::Map;

/// A model of the kernel's table. Only the recorded differences change it.
#[derive(Clone, Debug, Default, PartialEq)]
struct Kernel {
    chains: BTreeMap<String, Vec<Rule>>,
    affinities: BTreeMap<String, Affinity>,
    elements: BTreeMap<ElementId, Entry>,
    /// The maps of targets.
    targets: BTreeMap<(bool, coracle_nft::Key), coracle_nft::Value>,
}

// === impl Kernel ===

impl Kernel {
    /// Applies a difference in the order of the transaction, and panics where a kernel would refuse it.
    fn apply(&mut self, proxy: &Proxy, difference: Difference) {
        self.affinities.extend(difference.affinities);
        for (element_id, before) in &difference.before {
            assert_eq!(self.elements.get(element_id), before.as_ref(), "{element_id:?} is not as recorded");
            self.elements.remove(element_id);
        }
        self.change_targets(proxy, &difference.before);
        for chain in &difference.flushed {
            assert!(self.chains.contains_key(chain), "{chain} does not exist");
        }
        self.chains.extend(difference.chains);
        for element_id in difference.before.into_keys() {
            if let Some(entry) = proxy.element(&element_id) {
                self.elements.insert(element_id, entry);
            }
        }
        for chain in &difference.ended_chains {
            assert!(self.chains.remove(chain).is_some(), "{chain} does not exist");
        }
        for set in &difference.ended_affinities {
            assert!(self.affinities.remove(set).is_some(), "{set} does not exist");
        }
        let fixed = [layout::REJECT.to_owned(), layout::DROP.to_owned()];
        for entry in self.elements.values() {
            match entry {
                Entry::Member => {}
                Entry::Verdict(Verdict::Goto(chain)) => {
                    assert!(
                        self.chains.contains_key(chain) || fixed.contains(chain),
                        "{chain} does not exist"
                    );
                }
                Entry::OneOf(Choice { slots, targets }) => {
                    let is_possible = !targets.is_empty() && targets.len() <= SHARED_MAX.min(*slots);
                    assert!(is_possible && sizes().any(|size| size == *slots), "{slots} for {targets:?}");
                }
                Entry::Verdict(other) => panic!("{other:?}"),
            }
        }
    }

    /// Changes the maps of targets as the transaction: all removed elements first, then all added elements.
    fn change_targets(&mut self, proxy: &Proxy, before: &BTreeMap<ElementId, Option<Entry>>) {
        let mut added = Vec::new();
        for (element_id, before) in before {
            let now = proxy.element(element_id);
            let changes = Entry::target_changes(element_id, before.as_ref(), now.as_ref());
            for element in changes.ended {
                let removed = self.targets.remove(&(element_id.is_ipv4, element.key));
                assert_eq!(removed, element.value, "the element does not exist");
            }
            added.extend(changes.added.into_iter().map(|element| (element_id.is_ipv4, element)));
        }
        for (is_ipv4, element) in added {
            let former = self.targets.insert((is_ipv4, element.key), element.value.unwrap());
            assert_eq!(former, None, "the element exists");
        }
    }

    /// The targets that the rules of a chain with this number of slots choose for the key.
    fn chosen(&self, slots: usize, key: &coracle_nft::Key, is_ipv4: bool) -> BTreeSet<Target> {
        let mut chosen = BTreeSet::new();
        for limit in limits(slots) {
            let numbers = 0..u32::try_from(limit).unwrap();
            let found = numbers.map(|number| self.targets.get(&(is_ipv4, key.clone().number(number))));
            let found: Vec<_> = found.collect();
            chosen.extend(found.iter().flatten().map(|value| match value {
                coracle_nft::Value::Target(address, port) => Target { address: *address, port: *port },
                other => panic!("{other:?}"),
            }));
            if found.iter().all(Option::is_some) {
                return chosen;
            }
        }
        panic!("a packet passes all rules of {slots} slots");
    }

    /// The table of a fresh start with the same targets: their numbers, and the slots, depend on earlier changes.
    fn renumbered(mut self) -> Self {
        self.targets.clear();
        for (element_id, entry) in &mut self.elements {
            if let Entry::OneOf(choice) = entry {
                let mut targets = choice.targets.to_vec();
                targets.sort_unstable();
                *choice = Choice::of(&targets);
                let added = Entry::target_changes(element_id, None, Some(&*entry)).added;
                let added = added.into_iter().map(|one| ((element_id.is_ipv4, one.key), one.value.unwrap()));
                self.targets.extend(added);
            }
        }
        self
    }
}

/// Outcome for a packet to a cluster IP.
#[derive(Debug, PartialEq)]
enum Outcome {
    To(BTreeSet<Target>),
    Reject,
    Drop,
    /// The packet is not for a port of a service.
    None,
}

/// An endpoint: the number of its address, whether it is on this node, and its state: ready, terminating or unready.
type EndpointSpec = (u8, bool, u8);

#[derive(Clone, Debug)]
struct ServiceSpec {
    /// Creation time, in seconds. If several services claim an address, the oldest service has it.
    created: i64,
    ip: u8,
    families: u8,
    port: u8,
    is_udp: bool,
    is_local: bool,
    kind: u8,
    has_affinity: bool,
    endpoints: Vec<EndpointSpec>,
}

type Services = BTreeMap<u8, ServiceSpec>;

fn address(is_ipv4: bool, net: u8, number: u8) -> IpAddr {
    match is_ipv4 {
        true => IpAddr::from([10, net, 0, number]),
        false => format!("fd00:{net:x}::{number:x}").parse().unwrap(),
    }
}

// === impl ServiceSpec ===

impl ServiceSpec {
    fn has(&self, is_ipv4: bool) -> bool {
        self.families == 2 || (self.families == 0) == is_ipv4
    }

    fn protocol(&self) -> &'static str {
        if self.is_udp { "UDP" } else { "TCP" }
    }

    fn state(&self, key: Key) -> State {
        let families: Vec<bool> = [true, false].into_iter().filter(|is_ipv4| self.has(*is_ipv4)).collect();
        let ips: Vec<_> = families.iter().map(|is_ipv4| address(*is_ipv4, 43, self.ip)).collect();
        let (kind, node_port) = match self.kind {
            0 => ("ClusterIP", Value::Null),
            1 => ("NodePort", json!(30_000 + u16::from(self.ip))),
            _ => ("ExternalName", Value::Null),
        };
        let created = timestamp(self.created);
        let port = json!({"port": self.port, "protocol": self.protocol(), "nodePort": node_port});
        let service = json!({"metadata": {"namespace": "n", "name": key.name, "creationTimestamp": created},
            "spec": {"type": kind, "clusterIPs": ips, "clusterIP": ips[0], "ports": [port],
                "internalTrafficPolicy": if self.is_local { "Local" } else { "Cluster" },
                "sessionAffinity": if self.has_affinity { "ClientIP" } else { "None" }}});
        let slices = families.iter().map(|is_ipv4| Arc::new(self.slice(&key, *is_ipv4))).collect();
        (key, Some(ServiceState { service: Arc::new(serde_json::from_value(service).unwrap()), slices }))
    }

    fn slice(&self, key: &Key, is_ipv4: bool) -> EndpointSlice {
        let endpoints: Vec<Value> = self
            .endpoints
            .iter()
            .map(|(number, is_here, state)| {
                let conditions = match state {
                    0 => json!({"ready": true}),
                    1 => json!({"ready": false, "serving": true, "terminating": true}),
                    _ => json!({"ready": false, "serving": false}),
                };
                let node = if *is_here { "here" } else { "there" };
                json!({"addresses": [address(is_ipv4, 42, *number)], "conditions": conditions, "nodeName": node})
            })
            .collect();
        let labels = json!({"kubernetes.io/service-name": key.name});
        let slice = json!({"metadata": {"namespace": "n", "name": key.name, "labels": labels}, "endpoints": endpoints,
            "addressType": if is_ipv4 { "IPv4" } else { "IPv6" },
            "ports": [{"port": 8080, "protocol": self.protocol()}]});
        serde_json::from_value(slice).unwrap()
    }

    fn scope(&self) -> Scope {
        if self.is_local { Scope::Local } else { Scope::Cluster }
    }

    /// The endpoints that take traffic: the ready endpoints, or else the endpoints that serve while they terminate.
    fn targets(&self, is_ipv4: bool, scope: Scope) -> BTreeSet<Target> {
        let of = |wanted: u8| {
            let fits = |(_, is_here, state): &&EndpointSpec| {
                *state == wanted && (*is_here || scope == Scope::Cluster)
            };
            let all = self.endpoints.iter().filter(fits);
            all.map(|(number, ..)| Target { address: address(is_ipv4, 42, *number), port: 8080 }).collect()
        };
        let ready: BTreeSet<Target> = of(0);
        if ready.is_empty() { of(1) } else { ready }
    }
}

/// The endpoints that may receive a packet.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Scope {
    Local,
    Cluster,
}

/// A packet to a cluster IP.
struct Packet {
    is_ipv4: bool,
    ip: u8,
    port: u8,
    is_udp: bool,
}

fn timestamp(second: i64) -> String {
    format!("2026-01-01T00:00:{second:02}Z")
}

/// The outcome that the API's documentation requires for the packet. If several services have the cluster IP and the
/// port, the oldest service with endpoints gets the packet.
fn expected(services: &Services, packet: &Packet) -> Outcome {
    let &Packet { is_ipv4, ip, port, is_udp } = packet;
    let claims = |(_, spec): &(&u8, &ServiceSpec)| {
        spec.kind < 2 && spec.has(is_ipv4) && spec.ip == ip && spec.port == port && spec.is_udp == is_udp
    };
    let mut all: Vec<_> = services.iter().filter(claims).collect();
    all.sort_by_key(|(number, spec)| (spec.created, **number));
    let serving = all.iter().map(|(_, spec)| spec.targets(is_ipv4, spec.scope())).find(|all| !all.is_empty());
    match (serving, all.first()) {
        (Some(targets), _) => Outcome::To(targets),
        (None, Some((_, spec))) if spec.is_local && !spec.targets(is_ipv4, Scope::Cluster).is_empty() => {
            Outcome::Drop
        }
        (None, Some(_)) => Outcome::Reject,
        (None, None) => Outcome::None,
    }
}

/// The outcome that the table causes for the packet. `targets` has the targets of each chain that chooses an endpoint.
fn actual(
    kernel: &Kernel,
    targets: &BTreeMap<String, BTreeSet<Target>>,
    key: &coracle_nft::Key,
    is_ipv4: bool,
) -> Outcome {
    let at = |map| kernel.elements.get(&ElementId { map, is_ipv4, key: key.clone() });
    // The kernel looks up services before rejected ports.
    match (at(Map::Services), at(Map::Rejected)) {
        (Some(Entry::OneOf(choice)), _) => Outcome::To(kernel.chosen(choice.slots, key, is_ipv4)),
        (Some(Entry::Verdict(Verdict::Goto(chain))), _) => Outcome::To(targets[chain].clone()),
        (None, Some(Entry::Verdict(Verdict::Goto(chain)))) if chain == layout::REJECT => Outcome::Reject,
        (None, Some(Entry::Verdict(Verdict::Goto(chain)))) if chain == layout::DROP => Outcome::Drop,
        (None, None) => Outcome::None,
        other => panic!("{other:?}"),
    }
}

fn any_service() -> impl Strategy<Value = ServiceSpec> {
    let endpoints = prop::collection::vec((1u8..6, any::<bool>(), 0u8..3), 0..4);
    let kind = (0u8..3, any::<bool>(), any::<bool>(), any::<bool>());
    ((0i64..4, 1u8..4, 0u8..3, 80u8..82), kind, endpoints).prop_map(
        |((created, ip, families, port), (kind, is_udp, is_local, has_affinity), mut endpoints)| {
            let mut seen = BTreeSet::new();
            endpoints.retain(|(number, ..)| seen.insert(*number));
            ServiceSpec { created, ip, families, port, is_udp, is_local, kind, has_affinity, endpoints }
        },
    )
}

/// Number of random clusters, each with 10 changes on average. `CORACLE_PROPERTY_CHANGES` sets the total number of
/// changes.
fn cases() -> u32 {
    let changes = std::env::var("CORACLE_PROPERTY_CHANGES").ok().and_then(|text| text.parse::<u32>().ok());
    changes.map_or(40, |changes| changes.div_ceil(10))
}

fn key(number: u8) -> Key {
    Key::new("n", &format!("s{number}"))
}

fn proxy() -> Proxy {
    let node = NodeView { name: "here".to_owned(), ..NodeView::default() };
    Proxy::open("unused", node).unwrap()
}

fn elements(targets: &[Target]) -> BTreeMap<coracle_nft::Key, coracle_nft::Value> {
    let element_id =
        ElementId { map: Map::Services, is_ipv4: true, key: coracle_nft::Key::default().port(80) };
    let changes = Entry::target_changes(&element_id, None, Some(&Entry::OneOf(Choice::of(targets))));
    changes.added.into_iter().map(|element| (element.key, element.value.unwrap())).collect()
}

#[test]
fn a_change_of_one_service_visits_its_own_elements_only() {
    let state = |number: u8, remote: u8| {
        let endpoints = vec![(1, true, 0), (remote, false, 0)];
        let (created, ip, families, port, kind) = (0, number, 0, 80, 0);
        let (is_udp, is_local, has_affinity) = (false, false, false);
        let spec =
            ServiceSpec { created, ip, families, port, is_udp, is_local, kind, has_affinity, endpoints };
        spec.state(key(number))
    };
    let mut proxy = proxy();
    proxy.record((1..=100).map(|number| state(number, 2)));
    let difference = proxy.record([state(7, 3)]);
    assert!(difference.chains.is_empty() && difference.flushed.is_empty());
    let changed: Vec<_> = difference
        .before
        .iter()
        .filter(|(element_id, before)| proxy.element(element_id) != **before)
        .collect();
    let [(element_id, before)] = changed[..] else { panic!("{changed:?}") };
    let now = proxy.element(element_id);
    let targets = Entry::target_changes(element_id, before.as_ref(), now.as_ref());
    // The visited elements are the cluster IP, its port, and the endpoint on this node.
    assert_eq!((difference.before.len(), targets.ended.len(), targets.added.len()), (3, 1, 1));
}

#[test]
fn a_change_of_one_of_many_endpoints_changes_few_elements() {
    let state = |endpoints: &[u8]| {
        let endpoints = endpoints.iter().map(|number| (*number, false, 0)).collect();
        let (created, ip, families, port, kind) = (0, 1, 0, 80, 0);
        let (is_udp, is_local, has_affinity) = (false, false, false);
        let spec =
            ServiceSpec { created, ip, families, port, is_udp, is_local, kind, has_affinity, endpoints };
        spec.state(key(1))
    };
    let (mut proxy, mut all) = (proxy(), Vec::from_iter(1..=200_u8));
    proxy.record([state(&all)]);
    let mut change = |endpoints: &[u8]| {
        let difference = proxy.record([state(endpoints)]);
        assert!(difference.chains.is_empty() && difference.flushed.is_empty());
        let changed: Vec<_> =
            difference.before.iter().filter(|(id, before)| proxy.element(id) != **before).collect();
        let [(id, before)] = changed[..] else { panic!("{changed:?}") };
        let now = proxy.element(id);
        let element = |entry: &Option<Entry>| entry.as_ref().map(|entry| entry.element(id));
        assert_eq!(element(before), element(&now), "the destination keeps its chain");
        let targets = Entry::target_changes(id, before.as_ref(), now.as_ref());
        (targets.ended.len(), targets.added.len())
    };
    all.remove(3);
    assert_eq!(change(&all), (2, 1), "the last target gets the number");
    all.insert(3, 250);
    assert_eq!(change(&all), (0, 1));
    all[10] = 251;
    assert_eq!(change(&all), (1, 1));
}

proptest! {
    #[test]
    fn a_change_of_targets_is_their_difference(
        lists in prop::array::uniform2(prop::collection::btree_set(1u8..12, 0..8))
    ) {
        let element_id = ElementId { map: Map::Services, is_ipv4: true, key: coracle_nft::Key::default().port(80) };
        let [before, now] = lists.map(|numbers| -> Vec<Target> {
            numbers.into_iter().map(|number| Target { address: address(true, 42, number), port: 8080 }).collect()
        });
        let entry = |targets: &[Target]| (!targets.is_empty()).then(|| Entry::OneOf(Choice::of(targets)));
        let changes = Entry::target_changes(&element_id, entry(&before).as_ref(), entry(&now).as_ref());
        let (ended, added) = (changes.ended, changes.added);
        let mut kernel = elements(&before);
        for element in &ended {
            prop_assert_eq!(kernel.remove(&element.key), element.value.clone());
        }
        for element in &added {
            prop_assert_eq!(kernel.insert(element.key.clone(), element.value.clone().unwrap()), None);
        }
        prop_assert_eq!(kernel, elements(&now));
        let same = before.iter().zip(&now).filter(|(one, other)| one == other).count();
        prop_assert_eq!((ended.len(), added.len()), (before.len() - same, now.len() - same));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_packet_reaches_an_endpoint_of_its_service(
        changes in prop::collection::vec((0u8..5, prop::option::weighted(0.8, any_service())), 1..20)
    ) {
        let (mut proxy, mut kernel, mut services) = (proxy(), Kernel::default(), Services::new());
        for (number, spec) in changes {
            let state = spec.as_ref().map_or_else(|| (key(number), None), |spec| spec.state(key(number)));
            match spec {
                Some(spec) => drop(services.insert(number, spec)),
                None => drop(services.remove(&number)),
            }
            let difference = proxy.record([state]);
            kernel.apply(&proxy, difference);
        }
        let (mut fresh, mut anew) = (self::proxy(), Kernel::default());
        let all: Vec<State> = services.iter().map(|(number, spec)| spec.state(key(*number))).collect();
        let difference = fresh.record(all.clone());
        anew.apply(&fresh, difference);
        prop_assert_eq!(kernel.clone().renumbered(), anew);
        let mut targets = BTreeMap::new();
        for (_, state) in &all {
            let ServiceState { service, slices } = state.as_ref().unwrap();
            targets.extend(plan(service, slices, &fresh.node).targets);
        }
        for (is_ipv4, is_udp) in [(true, true), (true, false), (false, true), (false, false)] {
            for (ip, port) in (1..4).flat_map(|ip| (80..82).map(move |port| (ip, port))) {
                let packet = coracle_nft::Key::default().address(address(is_ipv4, 43, ip));
                let packet = packet.protocol(if is_udp { 17 } else { 6 }).port(u16::from(port));
                let (is, should_be) =
                    (actual(&kernel, &targets, &packet, is_ipv4), expected(&services, &Packet { is_ipv4, ip, port, is_udp }));
                prop_assert_eq!(is, should_be);
            }
        }
        let ended: Vec<State> = services.keys().map(|number| (key(*number), None)).collect();
        let difference = proxy.record(ended);
        kernel.apply(&proxy, difference);
        prop_assert_eq!(kernel, Kernel::default());
    }
}

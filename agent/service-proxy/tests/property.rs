//! After random changes, and flushes by other programs, the kernel's table equals the table of a fresh start. Random
//! packets go where a model of services sends them.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test panics")]

#[path = "property/conntrack.rs"]
mod conntrack;
#[path = "property/packets.rs"]
mod packets;

use std::collections::BTreeMap;
use std::sync::Arc;

use coracle_service_proxy::{NodeView, Proxy, State};
use coracle_services::ServiceState;
use coracle_testing::{in_new_namespace, run};
use coracle_values::object::Key;
use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng as _};
use serde_json::json;

const TABLE: &str = "test-services";

/// The table as sorted text: the order of chains and of elements has no meaning.
fn table() -> Vec<String> {
    let text = run("nft", &["--stateless", "list", "table", "inet", TABLE]);
    let mut blocks = vec![String::new()];
    for line in text.lines() {
        let words: Vec<&str> = line.split(',').map(str::trim).collect();
        let mut words: Vec<String> = words.join("\n").lines().map(str::to_owned).collect();
        blocks.last_mut().unwrap().push('\n');
        words.sort_unstable();
        blocks.last_mut().unwrap().push_str(&words.join(","));
        if line == "\t}" {
            blocks.push(String::new());
        }
    }
    let mut blocks: Vec<String> = blocks
        .into_iter()
        .map(|block| {
            // The proxy does not write the elements of this set: packets add clients. So they are not compared.
            let program =
                if block.contains("set clients ") { block.split("elements = ").next() } else { None };
            let block = program.unwrap_or(&block);
            // The text has the elements of a set on several lines.
            let mut all: Vec<String> = block
                .split(['\n', ','])
                .map(|part| part.trim_matches([' ', '\t', '{', '}']).to_owned())
                .collect();
            if block.contains("elements = ") {
                all = all.iter().map(|part| renumbered(part.trim_start_matches("elements = { "))).collect();
                all.sort_unstable();
            }
            all.retain(|part| !part.is_empty());
            all.join("\n")
        })
        .collect();
    blocks.sort_unstable();
    blocks
}

/// An element without the number of a target, and without the slots of a choice. Both depend on earlier changes.
fn renumbered(element: &str) -> String {
    let is_number = |word: &&str| word.starts_with("0x");
    let is_slots = |(before, _): &(&str, &str)| *before == "balance";
    let words = element.split(' ').filter(|word| !is_number(word)).collect::<Vec<_>>();
    let before = std::iter::once("").chain(words.iter().copied());
    let kept = before.zip(words.iter().copied()).filter(|pair| !is_slots(pair)).map(|(_, word)| word);
    kept.collect::<Vec<_>>().join(" ")
}

fn node() -> NodeView {
    NodeView {
        name: "here".to_owned(),
        pod_networks: vec!["10.42.0.0/24".parse().unwrap(), "fd42::/64".parse().unwrap()],
        service_ranges: vec!["10.43.0.0/16".parse().unwrap(), "fd43::/112".parse().unwrap()],
        external_ips: vec!["198.51.100.0/24".parse().unwrap()],
        ..NodeView::default()
    }
}

/// Conditions of an endpoint: mostly ready, sometimes terminating while it still serves, sometimes not ready.
fn random_conditions(random: &mut SmallRng) -> serde_json::Value {
    match random.random_range(0..10u8) {
        0 | 1 => json!({"ready": false, "serving": true, "terminating": true}),
        2 => json!({"ready": false}),
        _ => json!({"ready": true}),
    }
}

fn random_state(random: &mut SmallRng, key: Key, number: u8) -> State {
    if random.random_ratio(1, 5) {
        return (key, None);
    }
    let protocol = ["TCP", "TCP", "TCP", "UDP", "UDP", "SCTP"][random.random_range(0..6usize)];
    let ips = [format!("10.43.0.{number}"), format!("fd43::{number:x}")];
    let ips = if random.random_bool(0.5) { &ips[..] } else { &ips[..1] };
    let kind = if random.random_bool(0.3) { "NodePort" } else { "ClusterIP" };
    let external = [format!("198.51.100.{number}")];
    let external = if random.random_bool(0.3) { &external[..] } else { &[] };
    let service = json!({"metadata": {"namespace": "n", "name": key.name}, "spec": {
        "externalIPs": external,
        "type": kind, "clusterIP": ips[0], "clusterIPs": ips,
        "sessionAffinity": if random.random_bool(0.2) { "ClientIP" } else { "None" },
        "internalTrafficPolicy": if random.random_bool(0.2) { "Local" } else { "Cluster" },
        "externalTrafficPolicy": if random.random_bool(0.3) { "Local" } else { "Cluster" },
        "ports": [{"port": 80, "protocol": protocol, "nodePort": 30_000 + u16::from(number)}]}});
    let slices = ["IPv4", "IPv6"].iter().take(ips.len()).map(|family| {
        let endpoints: Vec<_> = (0..random.random_range(0..5u8))
            .map(|endpoint| {
                let address = match *family {
                    "IPv4" => format!("10.42.0.{}", 2 + endpoint),
                    _ => format!("fd42::{:x}", 2 + endpoint),
                };
                let node = if random.random_bool(0.5) { "here" } else { "there" };
                json!({"addresses": [address], "nodeName": node, "conditions": random_conditions(random)})
            })
            .collect();
        let labels = json!({"kubernetes.io/service-name": key.name});
        let slice = json!({"metadata": {"namespace": "n", "name": format!("{}-{family}", key.name), "labels": labels},
            "addressType": family, "endpoints": endpoints, "ports": [{"port": 8080, "protocol": protocol}]});
        Arc::new(serde_json::from_value(slice).unwrap())
    });
    let slices = slices.collect();
    (key, Some(ServiceState { service: Arc::new(serde_json::from_value(service).unwrap()), slices }))
}

/// Number of changes. `CORACLE_PROPERTY_CHANGES` sets the number; the default is 200.
fn changes() -> usize {
    std::env::var("CORACLE_PROPERTY_CHANGES").ok().and_then(|text| text.parse().ok()).unwrap_or(200)
}

#[test]
fn the_table_after_changes_and_flushes_is_that_of_a_fresh_start() {
    const CHECK_EVERY: usize = 50;
    const PACKETS: usize = 40;
    in_new_namespace(|| {
        packets::add_links();
        let mut random = SmallRng::seed_from_u64(7);
        let mut states: BTreeMap<Key, State> = BTreeMap::new();
        let mut proxy = Proxy::open(TABLE, node()).unwrap();
        proxy.replace(node(), []).unwrap();
        for step in 1..=changes() {
            let number = random.random_range(1..20u8);
            let key = Key::new("n", &format!("s{number}"));
            let state = random_state(&mut random, key.clone(), number);
            states.insert(key, state.clone());
            if random.random_ratio(1, 40) {
                run("nft", &["flush", "ruleset"]);
                assert!(!proxy.is_intact().unwrap(), "the flush is noticed");
                proxy.replace(node(), states.values().cloned()).unwrap();
            } else {
                proxy.change([state]).unwrap();
            }
            if step % CHECK_EVERY == 0 {
                assert!(proxy.is_intact().unwrap());
                let all: Vec<State> = states.values().cloned().collect();
                let fresh = in_new_namespace(move || {
                    let mut proxy = Proxy::open(TABLE, node()).unwrap();
                    proxy.replace(node(), all).unwrap();
                    table()
                });
                assert_eq!(table(), fresh, "after {step} changes");
                let all: Vec<State> = states.values().cloned().collect();
                if conntrack::are_entries_visible() {
                    packets::check(&mut random, &all, PACKETS);
                } else if step == CHECK_EVERY {
                    coracle_testing::skip_part!("packets: the kernel has no CONFIG_NF_CONNTRACK_PROCFS");
                }
            }
        }
    });
}

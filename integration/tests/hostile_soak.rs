//! Hostile clients and hostile pods beside 50 ordinary pods, for minutes or hours.
//!
//! Meanwhile no ordinary pod restarts or fails a probe, and the API server responds quickly to other clients.
//! Afterwards the processes use as much memory as before. `scripts/soak [MINUTES]` runs it.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::disallowed_methods,
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a test panics, waits, and prints its figures"
)]

#[path = "hostile_soak/attack.rs"]
mod attack;
#[path = "hostile/api_load/client.rs"]
#[allow(dead_code, reason = "shared with the tests of single attacks")]
mod client;
#[path = "hostile_soak/latency.rs"]
mod latency;
#[path = "hostile_soak/memory.rs"]
mod memory;
#[path = "hostile_soak/pods.rs"]
mod pods;
#[path = "hostile_soak/processor.rs"]
mod processor;

use std::fs;
use std::sync::Arc;
use std::thread::sleep;
use std::time::{Duration, Instant};

use attack::Attack;
use client::Address;
use coracle_integration::{Cluster, eventually, on_a_machine};
use latency::Latencies;
use memory::Memory;
use processor::Shares;

/// Time without load before the memory of the node is measured.
const REST: Duration = Duration::from_secs(20);
/// Seconds after the removal of the last hostile pod until the memory must be as before.
const RETURN: u64 = 60;
/// Maximum p99 latency of API requests of other clients.
const P99: Duration = Duration::from_millis(100);

#[test]
#[ignore = "takes minutes: scripts/soak"]
fn ordinary_pods_do_not_notice_hostile_clients_and_pods() {
    let minutes: f64 = std::env::var("SOAK_MINUTES").map_or(2.0, |text| text.parse().expect("a number"));
    client::raise_descriptors();
    on_a_machine(move |machine| {
        let mirrors = machine.start_registry();
        let shares = Shares::divide(machine.name());
        let config = machine.path("config.toml");
        let tokens = machine.path("tokens.csv");
        fs::write(&tokens, attack::TOKENS).unwrap();
        fs::write(&config, format!("[control-plane]\ntoken-auth-file = {tokens:?}\n")).unwrap();
        let config = config.to_str().unwrap();
        let flags = ["--image-gc-high-threshold", "100", "--pod-max-pids", "64", "--config", config];
        let mut cluster = Cluster::up_with(machine, &mirrors, &flags);
        shares.enter_node(cluster.pid());
        pods::start_ordinary(&cluster);
        let address = Address::of(machine);
        let account = pods::account(&cluster);
        sleep(REST);
        let [admin, other] = Latencies::sample(&address, &account, || sleep(Duration::from_secs(5)));
        let failed = pods::failed_probes(&cluster);
        let before = Memory::of(machine, cluster.pid());
        println!("before: {before}; API {admin}; service account {other}");

        pods::start_hostile(&cluster);
        let end = Instant::now() + Duration::from_secs_f64(minutes * 60.0);
        let attack = Arc::new(Attack::begin(&address, &cluster));
        let latencies = Latencies::sample(&address, &account, || watch_until(&cluster, machine, end));
        let [admin, other] = &latencies;
        attack.end();
        let during = Memory::of(machine, cluster.pid());
        println!("after {minutes} minutes: {during}; API {admin}; service account {other}; {attack}");

        pods::remove_hostile(&cluster);
        eventually("the memory to be what it was", RETURN, || {
            let after = Memory::of(machine, cluster.pid());
            let is_flat = after.is_flat_since(&before);
            is_flat.then(|| println!("afterwards: {after}")).or_else(|| {
                eprintln!("not yet: {after}");
                sleep(Duration::from_secs(5));
                None
            })
        });
        assert_eq!(pods::failed_probes(&cluster), failed, "probes of ordinary pods failed");
        pods::assert_undisturbed(&cluster);
        for latencies in &latencies {
            assert!(latencies.p99() < P99, "the API is slow for others: {latencies}");
        }
        cluster.down();
    });
}

/// Prints the node's memory once a minute.
fn watch_until(cluster: &Cluster, machine: &coracle_integration::Machine, end: Instant) {
    let mut next = Instant::now();
    while Instant::now() < end {
        if Instant::now() >= next {
            next += Duration::from_secs(60);
            let failed: Vec<String> = pods::failed_probes(cluster);
            println!(
                "{}; ordinary pods: {}, {} kinds of failed probes, last {:?}",
                Memory::of(machine, cluster.pid()),
                pods::condition(cluster),
                failed.len(),
                failed.last()
            );
        }
        sleep(Duration::from_millis(500));
    }
}

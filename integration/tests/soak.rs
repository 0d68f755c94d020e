//! A soak test. Four workers create pods, execute commands, stop and remove pods at random. Meanwhile the runtime and
//! shims are killed, and calls are cancelled. At the end nothing is left, and a long-running pod and the runtime use
//! no more memory.
//!
//! It takes half a minute. `SOAK_SECONDS=3600` makes it an hour; `SOAK_SEED` repeats the choices of an earlier run.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout, reason = "a test panics and prints")]

#[path = "soak/chance.rs"]
mod chance;
#[path = "soak/life.rs"]
mod life;
#[path = "recovery/node.rs"]
#[allow(dead_code, reason = "shared with the test that kills behind every step")]
mod node;
#[path = "soak/weight.rs"]
mod weight;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use chance::Chance;
use coracle_integration::{Machine, Trace, on_a_machine, within_async};
use coracle_testing::until;
use life::{Counters, Life};
use nix::sys::signal::{Signal, kill};
use node::Node;
use weight::Weight;

/// Number of concurrent workers.
const WORKERS: usize = 4;

#[test]
fn random_pods_and_kills_leave_nothing_and_memory_does_not_grow() {
    let seconds = setting("SOAK_SECONDS").unwrap_or(30);
    let seed = setting("SOAK_SEED").unwrap_or_else(|| u64::from(std::process::id()));
    println!("SOAK_SECONDS={seconds} SOAK_SEED={seed}");
    on_a_machine(move |machine| {
        let mirrors = machine.start_registry();
        let tokio = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        tokio.block_on(async {
            let mut node = Node::start(machine, &mirrors, None).await;
            node.whole_life().await.expect("all operations before the disturbances");
            node.pull().await.expect("the image");
            tokio::time::sleep(Duration::from_secs(1)).await;
            let clean = Trace::of(machine);
            let counters = Arc::new(Counters::default());
            let mut anchor = Life::new(machine, "anchor", Chance::new(seed), counters.clone());
            anchor.begin().await.expect("the start of the long-running pod");
            let storm = Duration::from_secs(seconds * 3 / 4);
            let mut node = disturb(machine, node, storm, &anchor, &counters).await;
            run_undisturbed(machine, &node, Duration::from_secs(seconds / 4), &anchor, &counters).await;
            anchor.end().await.expect("the end of the long-running pod");
            println!("{counters}");
            wait_until_clean(machine, &clean).await;
            assert_eq!(Trace::of(machine).since(&clean), Vec::<&str>::new(), "left after the soak");
            node.remove_all().await.expect("the removal of the image");
            node.stop();
        });
    });
}

fn setting(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|value| value.parse().expect("a number"))
}

/// Workers that run pods, one after the other, until `end`.
fn workers(
    machine: &Machine,
    name: &str,
    until: Instant,
    counters: &Arc<Counters>,
    seed: u64,
) -> Vec<tokio::task::JoinHandle<()>> {
    let worker = |number: usize| {
        let chance = Chance::new(seed.wrapping_mul(31).wrapping_add(number as u64));
        let mut life = Life::new(machine, &format!("{name}-{number}"), chance, counters.clone());
        tokio::spawn(async move {
            while Instant::now() < until {
                life.live().await;
            }
            life.clear().await;
        })
    };
    (0..WORKERS).map(worker).collect()
}

/// Kills the runtime and shims while pods run. Returns the last runtime.
async fn disturb(
    machine: &Machine,
    mut node: Node,
    lasts: Duration,
    anchor: &Life,
    counters: &Arc<Counters>,
) -> Node {
    let mirrors = machine.path("mirrors");
    let mut chance = anchor.chance();
    let seed = chance.below(u64::MAX);
    let until = Instant::now() + lasts;
    let workers = workers(machine, "storm", until, counters, seed);
    while Instant::now() < until {
        tokio::time::sleep(Duration::from_millis(200 + chance.below(2000))).await;
        counters.disturbances.fetch_add(1, Ordering::SeqCst);
        if chance.below(2) == 0 {
            node.stop();
            tokio::time::sleep(Duration::from_millis(chance.below(500))).await;
            node = Node::start(machine, &mirrors, None).await;
            counters.runtimes.fetch_add(1, Ordering::SeqCst);
        } else if let Some(shim) = chance.one_of(&shims(machine, anchor.sandbox())) {
            // The process may have exited meanwhile. The kernel does not reuse its pid so soon.
            kill(nix::unistd::Pid::from_raw(*shim), Signal::SIGKILL).ok();
            counters.shims.fetch_add(1, Ordering::SeqCst);
        }
        // Late events have arrived by now.
        tokio::time::sleep(Duration::from_millis(300)).await;
        counters.disturbances.fetch_add(1, Ordering::SeqCst);
    }
    for worker in workers {
        worker.await.expect("a worker during the disturbances");
    }
    node
}

/// Shims of the machine's pods, except the shim of the long-running pod.
fn shims(machine: &Machine, stays: &str) -> Vec<i32> {
    let ours = weight::shims(machine);
    ours.into_iter().filter(|(_, command)| !command.contains(stays)).map(|(pid, _)| pid).collect()
}

/// Runs pods without disturbance: nothing may fail, and memory must not grow.
async fn run_undisturbed(
    machine: &Machine,
    node: &Node,
    lasts: Duration,
    anchor: &Life,
    counters: &Arc<Counters>,
) {
    let seed = anchor.chance().below(u64::MAX);
    let mut first = None;
    for part in ["first", "last"] {
        let until = Instant::now() + lasts / 2;
        for worker in workers(machine, part, until, counters, seed) {
            worker.await.expect("a worker without disturbances");
        }
        wait_for_last_shim(machine, anchor.sandbox()).await;
        // The allocator returns freed memory after a second.
        tokio::time::sleep(Duration::from_secs(2)).await;
        let stays = weight::shims(machine)
            .iter()
            .map(|(pid, _)| *pid)
            .min()
            .expect("the shim of the long-running pod");
        let weights = || [node.pid(), stays.unsigned_abs()].map(Weight::of);
        match first {
            None => first = Some(weights()),
            Some(first) => wait_for_memory_of(first, weights).await,
        }
    }
}

/// Waits until runtime and shim use no more than before: idle threads exit after a while. Leaks stay.
async fn wait_for_memory_of([runtime, shim]: [Weight; 2], weights: impl Fn() -> [Weight; 2]) {
    let usage = until("memory, descriptors and threads not to grow", 10, || {
        let [later_runtime, later_shim] = weights();
        let usage =
            format!("runtime: {runtime:?}, then {later_runtime:?}\nshim: {shim:?}, then {later_shim:?}");
        let is_flat = later_runtime.is_flat_since(&runtime, 1024) && later_shim.is_flat_since(&shim, 16);
        if is_flat { Ok(usage) } else { Err(usage) }
    });
    println!("{}", usage.await);
}

/// Waits until only the long-running pod has a shim: cancelled calls are still being undone.
async fn wait_for_last_shim(machine: &Machine, stays: &str) {
    if within_async(20, || shims(machine, stays).is_empty()).await.is_none() {
        let log = std::fs::read_to_string(machine.path("runtime.log")).unwrap_or_default();
        let tail: Vec<&str> = log.lines().rev().take(40).collect();
        panic!(
            "shims are left: {:?} of {:?}; the log, newest first: {tail:#?}",
            shims(machine, stays),
            weight::shims(machine)
        );
    }
}

/// Waits, up to a time limit, until nothing is left.
async fn wait_until_clean(machine: &Machine, clean: &Trace) {
    let _is_clean = within_async(10, || Trace::of(machine).since(clean).is_empty()).await;
}

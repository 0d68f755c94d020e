//! A soak test. Four workers create pods, execute commands, stop and remove pods at random. Meanwhile the test kills
//! the runtime and shims, and cancels calls. At the end no resource of a pod is left. The memory of the runtime and of a
//! long-running pod has not grown.
//!
//! It takes half a minute. `SOAK_SECONDS=3600` makes it an hour; `SOAK_SEED` repeats the choices of an earlier run.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout, reason = "a test panics and prints")]

#[path = "recovery/node.rs"]
#[allow(dead_code, reason = "shared with the recovery test, which uses more of it")]
mod node;
#[path = "soak/pod_worker.rs"]
mod pod_worker;
#[path = "soak/process_usage.rs"]
mod process_usage;
#[path = "soak/random.rs"]
mod random;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use coracle_integration::{Machine, ResourceSnapshot, on_a_machine, within_async};
use coracle_testing::until;
use nix::sys::signal::{Signal, kill};
use node::Node;
use pod_worker::{Counters, PodWorker};
use process_usage::ProcessUsage;
use random::Random;

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
            node.full_lifecycle().await.expect("a pod without disturbances");
            node.pull().await.expect("the image");
            // Links are removed a moment after their pod.
            let clean = ResourceSnapshot::stable(|| ResourceSnapshot::of(machine)).await;
            let counters = Arc::new(Counters::default());
            let mut long_running =
                PodWorker::new(machine, "long-running", Random::new(seed), counters.clone());
            long_running.start_long_running().await.expect("the start of the long-running pod");
            let disturbance = Duration::from_secs(seconds * 3 / 4);
            let mut node = disturb(machine, node, disturbance, &long_running, &counters).await;
            run_undisturbed(machine, &node, Duration::from_secs(seconds / 4), &long_running, &counters).await;
            long_running.stop_long_running().await.expect("the end of the long-running pod");
            println!("{counters}");
            wait_until_clean(machine, &clean).await;
            assert_eq!(
                ResourceSnapshot::of(machine).added_since(&clean),
                Vec::<&str>::new(),
                "left after the soak"
            );
            node.remove_all().await.expect("the removal of the image");
            node.stop();
        });
    });
}

fn setting(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|value| value.parse().expect("a number"))
}

/// Starts workers. Each one runs pods, one after the other, until this time.
fn workers(
    machine: &Machine,
    name: &str,
    until: Instant,
    counters: &Arc<Counters>,
    seed: u64,
) -> Vec<tokio::task::JoinHandle<()>> {
    let worker = |number: usize| {
        let random = Random::new(seed.wrapping_mul(31).wrapping_add(number as u64));
        let mut pod_worker = PodWorker::new(machine, &format!("{name}-{number}"), random, counters.clone());
        tokio::spawn(async move {
            while Instant::now() < until {
                pod_worker.run_pod().await;
            }
            pod_worker.clear().await;
        })
    };
    (0..WORKERS).map(worker).collect()
}

/// Kills the runtime and shims while pods run. Returns the last runtime.
async fn disturb(
    machine: &Machine,
    mut node: Node,
    lasts: Duration,
    long_running: &PodWorker,
    counters: &Arc<Counters>,
) -> Node {
    let mirrors = machine.path("mirrors");
    let mut random = long_running.random();
    let seed = random.below(u64::MAX);
    let end = Instant::now() + lasts;
    let workers = workers(machine, "disturbed", end, counters, seed);
    while Instant::now() < end {
        tokio::time::sleep(Duration::from_millis(200 + random.below(2000))).await;
        counters.disturbances.fetch_add(1, Ordering::SeqCst);
        if random.below(2) == 0 {
            node.stop();
            tokio::time::sleep(Duration::from_millis(random.below(500))).await;
            node = Node::start(machine, &mirrors, None).await;
            counters.runtimes.fetch_add(1, Ordering::SeqCst);
        } else if let Some(shim) = random.one_of(&shims(machine, long_running.sandbox())) {
            // The process may have exited meanwhile. The kernel does not reuse its pid so soon.
            kill(nix::unistd::Pid::from_raw(*shim), Signal::SIGKILL).ok();
            let is_gone = || process_usage::shims(machine).iter().all(|(pid, _)| pid != shim);
            until("the end of the killed shim", 20, is_gone).await;
            counters.shims.fetch_add(1, Ordering::SeqCst);
        }
        counters.disturbances.fetch_add(1, Ordering::SeqCst);
    }
    for worker in workers {
        worker.await.expect("a worker during the disturbances");
    }
    node
}

/// Shims of the machine's pods, except the shim of the long-running pod.
fn shims(machine: &Machine, except: &str) -> Vec<i32> {
    let ours = process_usage::shims(machine);
    ours.into_iter().filter(|(_, command)| !command.contains(except)).map(|(pid, _)| pid).collect()
}

/// Runs pods without disturbance. No call may fail, and memory must not grow.
async fn run_undisturbed(
    machine: &Machine,
    node: &Node,
    lasts: Duration,
    long_running: &PodWorker,
    counters: &Arc<Counters>,
) {
    let seed = long_running.random().below(u64::MAX);
    let mut first = None;
    for part in ["first", "last"] {
        let until = Instant::now() + lasts / 2;
        for worker in workers(machine, part, until, counters, seed) {
            worker.await.expect("a worker without disturbances");
        }
        wait_for_last_shim(machine, long_running.sandbox()).await;
        let shim = process_usage::shims(machine)
            .iter()
            .map(|(pid, _)| *pid)
            .min()
            .expect("the shim of the long-running pod");
        let usages = || [node.pid(), shim.unsigned_abs()].map(ProcessUsage::of);
        match first {
            None => {
                // The allocator returns freed memory after a second. No event reports this. A shorter wait does not
                // fail the test: it only makes the first usage larger.
                tokio::time::sleep(Duration::from_secs(2)).await;
                first = Some(usages());
            }
            Some(first) => wait_for_memory_of(first, usages).await,
        }
    }
}

/// Waits until runtime and shim use no more than before: idle threads exit after some time, but leaks remain.
async fn wait_for_memory_of([runtime, shim]: [ProcessUsage; 2], usages: impl Fn() -> [ProcessUsage; 2]) {
    let usage = until("memory, descriptors and threads not to grow", 10, || {
        let [later_runtime, later_shim] = usages();
        let usage =
            format!("runtime: {runtime:?}, then {later_runtime:?}\nshim: {shim:?}, then {later_shim:?}");
        let has_not_grown =
            later_runtime.has_not_grown_since(&runtime, 1024) && later_shim.has_not_grown_since(&shim, 16);
        if has_not_grown { Ok(usage) } else { Err(usage) }
    });
    println!("{}", usage.await);
}

/// Waits until only the long-running pod has a shim. The runtime undoes cancelled calls after their end.
async fn wait_for_last_shim(machine: &Machine, except: &str) {
    if within_async(20, || shims(machine, except).is_empty()).await.is_none() {
        let log = std::fs::read_to_string(machine.path("runtime.log")).unwrap_or_default();
        let tail: Vec<&str> = log.lines().rev().take(40).collect();
        panic!(
            "shims are left: {:?} of {:?}; the log, newest first: {tail:#?}",
            shims(machine, except),
            process_usage::shims(machine)
        );
    }
}

/// Waits, up to a time limit, until no resource of a pod is left.
async fn wait_until_clean(machine: &Machine, clean: &ResourceSnapshot) {
    let _is_clean = within_async(10, || ResourceSnapshot::of(machine).added_since(clean).is_empty()).await;
}

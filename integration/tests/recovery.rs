//! The runtime and the shim are killed at every fault point. The next runtime must list the state of the kernel, undo
//! partial changes and accept the same pod again. The two runtimes together must send each transition exactly once to
//! event listeners. The next runtime is also killed, at every fault point of its recovery.
//!
//! `FAULT_POINTS=recover.,run.` selects the points with these prefixes.
//!
//! The test finds the points in the sources. A point that is not reached fails the test.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout, reason = "a test panics and prints")]

#[path = "recovery/node.rs"]
#[allow(dead_code, reason = "shared with the soak, which uses more of it")]
mod node;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use coracle_integration::{
    Machine, ResourceSnapshot, eventually_async, on_a_machine, repository, within_async,
};
use node::{Node, Received, received_once};

/// Names in all `coracle_fault::point("…")` below a directory.
fn points(dir: &Path, found: &mut BTreeSet<String>) {
    for entry in fs::read_dir(dir).unwrap().flatten() {
        let path = entry.path();
        if path.is_dir() {
            points(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = fs::read_to_string(&path).unwrap();
            let named = text.split("coracle_fault::point(\"").skip(1);
            found.extend(named.filter_map(|rest| rest.split('"').next()).map(str::to_owned));
        }
    }
}

/// The fault point at which the runtime is killed, and the point at which the next runtime is killed during recovery.
#[derive(Debug)]
struct KillPoint {
    point: String,
    again: Option<String>,
}

impl KillPoint {
    /// The point that this test case covers.
    fn name(&self) -> &str {
        self.again.as_ref().unwrap_or(&self.point)
    }
}

/// Points that the default network does not reach. `cni/killed.rs` covers them with the plugin executables.
fn is_of_plugin_executables(point: &str) -> bool {
    point.starts_with("tuning.") || point.starts_with("loopback.") || point == "firewall.marked"
}

/// Points that creating a local cluster reaches. `cluster/local_clusters.rs` covers them.
fn is_of_local_clusters(point: &str) -> bool {
    point.starts_with("virtual-host.")
}

/// Points that need a working CRIU or its replacement. `cri/tests/rpc/checkpoint_killed.rs` covers them.
fn is_of_checkpoints(point: &str) -> bool {
    point.starts_with("checkpoint") || point.starts_with("restore-pod.")
}

/// The point at which the first runtime is killed, so that the recovery reaches `point`.
fn first_kill(point: &str) -> &'static str {
    match point.strip_prefix("recover.").unwrap() {
        "limits" => "update.written",
        "numbered" => "start.runs",
        "stopped" => "stop-pod.begun",
        "bundle-forgotten" => "remove.forgotten",
        "ended" | "replayed" => "stop-pod.shim",
        of if of.starts_with("container-") => "create.made",
        // Recovery checks the network of every pod. A partly created pod has the most state.
        _ => "run.network",
    }
}

/// All kill points, or those that `FAULT_POINTS` selects.
fn kill_points() -> Vec<KillPoint> {
    let mut found = BTreeSet::new();
    ["cri", "cni/src"].iter().for_each(|part| points(&repository().join(part), &mut found));
    assert!(found.len() > 80, "{found:?}");
    found.retain(|point| {
        !is_of_plugin_executables(point) && !is_of_local_clusters(point) && !is_of_checkpoints(point)
    });
    let kill_point = |point: String| match point.starts_with("recover.") {
        true => KillPoint { point: first_kill(&point).to_owned(), again: Some(point) },
        false => KillPoint { point, again: None },
    };
    let only = std::env::var("FAULT_POINTS").ok();
    let is_wanted = |kill_point: &KillPoint| {
        only.as_ref().is_none_or(|only| only.split(',').any(|begin| kill_point.name().starts_with(begin)))
    };
    let wanted: Vec<KillPoint> = found.into_iter().map(kill_point).filter(is_wanted).collect();
    assert!(!wanted.is_empty(), "no fault point starts with {only:?}");
    wanted
}

#[test]
fn a_runtime_killed_at_any_fault_point_recovers_part_1() {
    kill_at_quarter_of_points(0);
}

#[test]
fn a_runtime_killed_at_any_fault_point_recovers_part_2() {
    kill_at_quarter_of_points(1);
}

#[test]
fn a_runtime_killed_at_any_fault_point_recovers_part_3() {
    kill_at_quarter_of_points(2);
}

#[test]
fn a_runtime_killed_at_any_fault_point_recovers_part_4() {
    kill_at_quarter_of_points(3);
}

/// Four tests run in parallel, each with a quarter of the points, because the tests mostly wait.
fn kill_at_quarter_of_points(quarter: usize) {
    on_a_machine(move |machine| {
        let mirrors = machine.start_registry();
        let tokio = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        tokio.block_on(async {
            let mut node = Node::start(machine, &mirrors, None).await;
            node.full_lifecycle().await.expect("all operations without faults");
            // Links and layers are removed a moment after their pod.
            ResourceSnapshot::stable(|| resources(machine)).await;
            node.stop();
            let clean = resources(machine);
            for kill_point in kill_points().into_iter().skip(quarter).step_by(4) {
                let began = Instant::now();
                kill_and_recover(machine, &mirrors, &kill_point, &clean).await;
                assert_eq!(
                    resources(machine).added_since(&clean),
                    Vec::<&str>::new(),
                    "left after {kill_point:?}"
                );
                println!("{kill_point:?}: {} ms", began.elapsed().as_millis());
            }
        });
    });
}

/// Kills a runtime at a point and checks what the next runtime recovers.
async fn kill_and_recover(
    machine: &Machine,
    mirrors: &Path,
    kill_point: &KillPoint,
    clean: &ResourceSnapshot,
) {
    let KillPoint { point, again } = kill_point;
    // As after a boot, so that this runtime creates the bridge.
    Command::new("ip").args(["link", "del", "coracle0"]).stderr(Stdio::null()).status().unwrap();
    let (mut node, starts) = start_armed(machine, mirrors, point).await;
    node.listen().await;
    let result = node.full_lifecycle().await;
    let reached = match point.strip_prefix("shim.") {
        // The next start may not reach this point.
        None if starts > 1 && result.is_ok() => true,
        None => node.has_crashed().await,
        Some(point) if point.starts_with("creator-") => result.is_err(),
        Some(_) => node.has_logged_a_shim_exit().await && node.has_sent_all_deletions().await,
    };
    assert!(reached, "{point} was not reached: {result:?}");
    node.stop();
    let received = node.received().await;
    let (known, started) = (node.known.clone(), node.started.clone());
    if let Some(again) = again {
        let recovering = Node::try_start(machine, mirrors, Some(again)).await;
        assert!(recovering.is_none(), "{again} was not reached in the recovery after {point}");
    }

    let mut node = Node::start(machine, mirrors, None).await;
    node.known.extend(known);
    node.started.extend(started);
    node.listen().await;
    let ready =
        node.lists_match_the_kernel().await.unwrap_or_else(|why| panic!("after {kill_point:?}: {why}"));
    // A pod whose network is partly removed is not reported as ready.
    assert!(ready == 0 || !point.starts_with("stop-pod."), "a pod is ready after {kill_point:?}");
    node.remove_all().await.unwrap_or_else(|status| panic!("removing after {kill_point:?}: {status}"));
    node.full_lifecycle()
        .await
        .unwrap_or_else(|status| panic!("the same pod again after {kill_point:?}: {status}"));
    wait_until_clean(machine, clean).await;
    all_received(&mut node, received, kill_point).await;
    node.stop();
}

/// Starts a runtime with an armed point. If the start itself reaches the point, a second runtime is started with it.
async fn start_armed(machine: &Machine, mirrors: &Path, point: &str) -> (Node, u32) {
    for starts in 1..10 {
        if let Some(node) = Node::try_start(machine, mirrors, Some(&format!("{point}:{starts}"))).await {
            return (node, starts);
        }
    }
    panic!("no runtime serves requests with the fault point {point}");
}

/// Waits until the events of both runtimes together contain each transition exactly once.
async fn all_received(node: &mut Node, before: Received, kill_point: &KillPoint) {
    eventually_async(&format!("all events of both runtimes, after {kill_point:?}"), 20, async || {
        let received = [before.clone(), node.received().await].concat();
        received_once(&received, &node.known, &node.started)
    })
    .await;
}

/// Waits, up to a time limit, until only resources of the running runtime are left.
async fn wait_until_clean(machine: &Machine, clean: &ResourceSnapshot) {
    let is_of_runtime = |resource: &&str| resource.starts_with("process ") || resource.ends_with(".sock");
    let _is_clean =
        within_async(20, || resources(machine).added_since(clean).iter().all(is_of_runtime)).await;
}

/// State in the kernel and on disk when no runtime runs.
fn resources(machine: &Machine) -> ResourceSnapshot {
    ResourceSnapshot::with(machine, &["root"])
}

//! The runtime and the shim are killed at every fault point. The next runtime must list the true state, undo partial
//! changes and allow the same pod again. Event listeners must receive each transition exactly once over both runtimes.
//! The next runtime is also killed, at every fault point of its recovery.
//!
//! `CUT=recover.,run.` selects the points with these prefixes.
//!
//! The points are read from the sources, so that no point is forgotten. A point that is not reached fails the test.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout, reason = "a test panics and prints")]

#[path = "recovery/node.rs"]
#[allow(dead_code, reason = "shared with the soak, which uses more of it")]
mod node;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use coracle_integration::{Machine, Trace, eventually_async, on_a_machine, repository, within_async};
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
fn is_of_executables(point: &str) -> bool {
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
fn before(point: &str) -> &'static str {
    match point.strip_prefix("recover.").unwrap() {
        "limits" => "update.written",
        "numbered" => "start.runs",
        "stopped" => "stop-pod.begun",
        "bundle-forgotten" => "remove.forgotten",
        "ended" | "told" => "stop-pod.shim",
        of if of.starts_with("container-") => "create.made",
        // Recovery checks the network of every pod. A partly created pod has the most state.
        _ => "run.network",
    }
}

fn cuts() -> Vec<KillPoint> {
    let mut found = BTreeSet::new();
    ["cri", "cni/src"].iter().for_each(|part| points(&repository().join(part), &mut found));
    assert!(found.len() > 80, "{found:?}");
    found.retain(|point| {
        !is_of_executables(point) && !is_of_local_clusters(point) && !is_of_checkpoints(point)
    });
    let cut = |point: String| match point.starts_with("recover.") {
        true => KillPoint { point: before(&point).to_owned(), again: Some(point) },
        false => KillPoint { point, again: None },
    };
    let only = std::env::var("CUT").ok();
    let is_wanted = |cut: &KillPoint| {
        only.as_ref().is_none_or(|only| only.split(',').any(|begin| cut.name().starts_with(begin)))
    };
    let wanted: Vec<KillPoint> = found.into_iter().map(cut).filter(is_wanted).collect();
    assert!(!wanted.is_empty(), "there is no {only:?}");
    wanted
}

#[test]
fn a_runtime_killed_at_any_fault_point_recovers() {
    quarter_of_the_cuts(0);
}

#[test]
fn a_runtime_killed_at_any_second_fault_point_recovers() {
    quarter_of_the_cuts(1);
}

#[test]
fn a_runtime_killed_at_any_third_fault_point_recovers() {
    quarter_of_the_cuts(2);
}

#[test]
fn a_runtime_killed_at_any_fourth_fault_point_recovers() {
    quarter_of_the_cuts(3);
}

/// Four tests run in parallel, each with a quarter of the points, because the tests mostly wait.
fn quarter_of_the_cuts(quarter: usize) {
    on_a_machine(move |machine| {
        let mirrors = machine.start_registry();
        let tokio = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        tokio.block_on(async {
            let mut node = Node::start(machine, &mirrors, None).await;
            node.whole_life().await.expect("all operations without faults");
            // Links and layers are removed a moment after their pod.
            tokio::time::sleep(Duration::from_secs(1)).await;
            node.stop();
            let clean = left(machine);
            for cut in cuts().into_iter().skip(quarter).step_by(4) {
                let began = Instant::now();
                one(machine, &mirrors, &cut, &clean).await;
                assert_eq!(left(machine).since(&clean), Vec::<&str>::new(), "left after {cut:?}");
                println!("{cut:?}: {} ms", began.elapsed().as_millis());
            }
        });
    });
}

/// Kills a runtime at a point and checks what the next runtime recovers.
async fn one(machine: &Machine, mirrors: &Path, cut_at: &KillPoint, clean: &Trace) {
    let KillPoint { point, again } = cut_at;
    // As after a boot, so that this runtime creates the bridge.
    Command::new("ip").args(["link", "del", "coracle0"]).stderr(Stdio::null()).status().unwrap();
    let (mut node, starts) = start_armed(machine, mirrors, point).await;
    node.listen().await;
    let cut = node.whole_life().await;
    let reached = match point.strip_prefix("shim.") {
        // The next start may not reach this point.
        None if starts > 1 && cut.is_ok() => true,
        None => node.has_crashed().await,
        Some(point) if point.starts_with("creator-") => cut.is_err(),
        Some(_) => node.has_logged_a_shim_exit().await && node.has_sent_all_deletions().await,
    };
    assert!(reached, "{point} was not reached: {cut:?}");
    node.stop();
    let received = node.received().await;
    let (known, started) = (node.known.clone(), node.started.clone());
    if let Some(again) = again {
        let way_back = Node::try_start(machine, mirrors, Some(again)).await;
        assert!(way_back.is_none(), "{again} was not reached on the way back from {point}");
    }

    let mut node = Node::start(machine, mirrors, None).await;
    node.known.extend(known);
    node.started.extend(started);
    node.listen().await;
    let ready = node.lists_match_the_kernel().await.unwrap_or_else(|why| panic!("after {cut_at:?}: {why}"));
    // A pod whose network is partly removed is not reported as ready.
    assert!(ready == 0 || !point.starts_with("stop-pod."), "a pod is ready after {cut_at:?}");
    node.remove_all().await.unwrap_or_else(|status| panic!("removing after {cut_at:?}: {status}"));
    node.whole_life().await.unwrap_or_else(|status| panic!("the same again after {cut_at:?}: {status}"));
    settled(machine, clean).await;
    all_received(&mut node, received, cut_at).await;
    node.stop();
}

/// Starts a runtime with an armed point. If the start itself reaches the point, a second runtime is started with it.
async fn start_armed(machine: &Machine, mirrors: &Path, point: &str) -> (Node, u32) {
    for starts in 1..10 {
        if let Some(node) = Node::try_start(machine, mirrors, Some(&format!("{point}:{starts}"))).await {
            return (node, starts);
        }
    }
    panic!("it never serves with {point} armed");
}

/// Waits until the events of both runtimes together contain each transition exactly once.
async fn all_received(node: &mut Node, before: Received, cut_at: &KillPoint) {
    eventually_async(&format!("all events of both runtimes, after {cut_at:?}"), 20, async || {
        let received = [before.clone(), node.received().await].concat();
        received_once(&received, &node.known, &node.started)
    })
    .await;
}

/// Waits, up to a time limit, until only the resources of the running runtime are left.
async fn settled(machine: &Machine, clean: &Trace) {
    let is_of_runtime = |trace: &&str| trace.starts_with("process ") || trace.ends_with(".sock");
    let _is_settled = within_async(20, || left(machine).since(clean).iter().all(is_of_runtime)).await;
}

/// State in the kernel and on disk when no runtime runs.
fn left(machine: &Machine) -> Trace {
    Trace::with(machine, &["root"])
}

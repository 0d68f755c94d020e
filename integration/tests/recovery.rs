//! The runtime and the shim killed behind every step that leaves something: what comes after is a true
//! picture, the half-made is undone, and the same pod can be made again; and listeners are told every transition once,
//! over both lives.
//!
//! The points are read from the sources, so that none can be forgotten; one that is not reached fails.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test panics")]

#[path = "recovery/node.rs"]
#[allow(dead_code, reason = "shared with the soak, which asks for more")]
mod node;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::time::Duration;

use coracle_integration::{Machine, Trace, on_a_machine};
use node::{Heard, Node, told_once};

/// All points of `coracle_fault::point("…")` below a directory.
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

fn all_points() -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    points(&Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("cri"), &mut found);
    assert!(found.len() > 20, "{found:?}");
    found
}

#[test]
fn killed_behind_any_step_everything_is_found_or_undone() {
    on_a_machine(|machine| {
        let mirrors = machine.start_registry();
        let tokio = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        tokio.block_on(async {
            let mut node = Node::start(machine, &mirrors, None).await;
            node.whole_life().await.expect("a life without faults");
            // Links and layers leave a moment after their pod.
            tokio::time::sleep(Duration::from_secs(1)).await;
            node.stop();
            let clean = left(machine);
            for point in all_points() {
                one(machine, &mirrors, &point, &clean).await;
                assert_eq!(left(machine).since(&clean), Vec::<&str>::new(), "left after {point}");
            }
        });
    });
}

/// A life cut short at a point, and what the next runtime makes of it.
async fn one(machine: &Machine, mirrors: &Path, point: &str, clean: &Trace) {
    let mut node = Node::start(machine, mirrors, Some(point)).await;
    node.listen().await;
    let cut = node.whole_life().await;
    let reached = match point.strip_prefix("shim.") {
        None => node.has_crashed().await,
        Some(point) if point.starts_with("creator-") => cut.is_err(),
        Some(_) => node.has_lost_a_shim().await,
    };
    assert!(reached, "{point} was not reached: {cut:?}");
    node.stop();
    let heard = node.heard().await;
    let (known, started) = (node.known.clone(), node.started.clone());

    let mut node = Node::start(machine, mirrors, None).await;
    node.known.extend(known);
    node.started.extend(started);
    node.listen().await;
    node.is_true().await.unwrap_or_else(|why| panic!("after {point}: {why}"));
    node.remove_all().await.unwrap_or_else(|status| panic!("removing after {point}: {status}"));
    node.whole_life().await.unwrap_or_else(|status| panic!("the same again after {point}: {status}"));
    settled(machine, clean).await;
    all_told(&mut node, heard).await.unwrap_or_else(|why| panic!("over both lives, after {point}: {why}"));
    node.stop();
}

/// Waits, for a while, until both lives together told everything once.
async fn all_told(node: &mut Node, before: Heard) -> Result<(), String> {
    let mut told = Ok(());
    for _ in 0..100 {
        let heard = [before.clone(), node.heard().await].concat();
        told = told_once(&heard, &node.known, &node.started);
        if told.is_ok() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    told
}

/// Waits, for a while, until nothing is left but the runtime that runs.
async fn settled(machine: &Machine, clean: &Trace) {
    for _ in 0..100 {
        let now = left(machine);
        if now.since(clean).iter().all(|trace| trace.starts_with("process ") || trace.ends_with(".sock")) {
            return;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// What is in the kernel and on the disk when no runtime runs.
fn left(machine: &Machine) -> Trace {
    Trace::with(machine, &["root"])
}

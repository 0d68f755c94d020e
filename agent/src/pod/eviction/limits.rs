//! Eviction of pods that exceed limits on their disk usage.
//!
//! The directories of pods with limits are measured every ten seconds, which is the kubelet's interval. After a slow
//! measurement, the next measurement starts only after fifty times its duration. Without such pods nothing is measured.
//! The measurements run in a separate task: a pod with many files must not delay evictions because of memory pressure.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Pod;
use tokio::sync::watch;

use super::plan::{self, is_limited};
use super::{Evicted, EvictionCause, INTERVAL, MIN_GRACE, MIN_INTERVAL_FACTOR, usage};
use crate::pod::NodeContext;
use crate::pod::state::has_ended;

/// The task that measures the pods with limits, and evicts pods that exceed their limits.
pub(crate) struct LimitEviction {
    node: Arc<NodeContext>,
    /// The number of pods with limits.
    limited: watch::Receiver<usize>,
    due: DueTimes,
}

/// When the next measurement of a pod is due, by uid.
#[derive(Debug, Default)]
struct DueTimes(HashMap<String, Instant>);

// === impl LimitEviction ===

impl LimitEviction {
    pub(crate) fn new(node: Arc<NodeContext>) -> Self {
        let limited = node.pods.limited();
        Self { node, limited, due: DueTimes::default() }
    }

    /// Measures and evicts until the future or the node's pods are dropped.
    pub(crate) async fn run(mut self) {
        loop {
            let measures = *self.limited.borrow_and_update() > 0;
            tokio::select! {
                // Both arms only wait, so dropping them loses nothing.
                () = tokio::time::sleep(INTERVAL), if measures => {}
                changed = self.limited.changed(), if !measures => if changed.is_err() { return },
            }
            self.round().await;
        }
    }

    async fn round(&mut self) {
        let pods = self.node.pods.all().into_iter().filter(|pod| is_running(pod) && is_limited(pod));
        let pods: Vec<Arc<Pod>> = pods.collect();
        self.due.keep(&pods);
        for pod in &pods {
            self.check(pod).await;
        }
    }

    /// Evicts a pod whose disk usage exceeds one of its own limits.
    async fn check(&mut self, pod: &Arc<Pod>) {
        let Some(uid) = pod.metadata.uid.as_deref() else { return };
        let begun = Instant::now();
        if !self.due.is_due(uid, begun) {
            return;
        }
        let used = usage::of(&self.node, pod).await;
        self.due.add(uid, begun, begun.elapsed());
        if let Some((message, signal)) = plan::exceeded(pod, &used) {
            tracing::info!(uid, message, "evicting a pod that exceeded a limit on its disk usage");
            let cause = EvictionCause::Limit(signal);
            self.node.evictions.request(uid, Evicted { message, cause, grace: MIN_GRACE });
        }
    }
}

// === impl DueTimes ===

impl DueTimes {
    fn is_due(&self, uid: &str, now: Instant) -> bool {
        self.0.get(uid).is_none_or(|due| now >= *due)
    }

    /// Adds a measurement with its start and its duration. After a slow measurement the next measurement is due later.
    fn add(&mut self, uid: &str, begun: Instant, took: Duration) {
        self.0.insert(uid.to_owned(), begun + (took * MIN_INTERVAL_FACTOR).max(INTERVAL));
    }

    /// Removes the entries of all other pods.
    fn keep(&mut self, pods: &[Arc<Pod>]) {
        let uids: HashSet<&str> = pods.iter().filter_map(|pod| pod.metadata.uid.as_deref()).collect();
        self.0.retain(|uid, _| uids.contains(uid.as_str()));
    }
}

/// Whether the pod has not ended and is not being deleted.
fn is_running(pod: &Pod) -> bool {
    !has_ended(pod) && pod.metadata.deletion_timestamp.is_none()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_measurement_is_repeated_after_fifty_times_its_duration() {
        let (mut due, begun) = (DueTimes::default(), Instant::now());
        assert!(due.is_due("u", begun));
        due.add("u", begun, Duration::from_millis(1));
        assert!(!due.is_due("u", begun + INTERVAL / 2) && due.is_due("u", begun + INTERVAL));
        due.add("u", begun, INTERVAL);
        assert!(!due.is_due("u", begun + INTERVAL * 49) && due.is_due("u", begun + INTERVAL * 50));
        let mut other = Pod::default();
        other.metadata.uid = Some("v".to_owned());
        due.keep(&[Arc::new(other), Arc::default()]);
        assert!(due.is_due("u", begun), "a pod that is not on the node any more");
    }
}

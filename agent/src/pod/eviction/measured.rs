//! Disk usage of pods for `/stats/summary`. The usage is measured when a client requests it. The results are cached for
//! a while, so that clients cannot keep the disk busy.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures::future::BoxFuture;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use tokio::time::timeout;

use super::{MIN_INTERVAL_FACTOR, usage};
use crate::pod::NodeContext;
use crate::server::{DiskUsageView, PodDiskUsage};

/// Maximum time for which a client waits for measurements. Measurements that take longer continue, and their results
/// are for the next client.
const LIMIT: Duration = Duration::from_secs(2);
/// Minimum interval of the measurements of a pod, as the kubelet's.
const INTERVAL: Duration = Duration::from_secs(60);

/// The disk usage of the node's pods. Cheap to clone.
#[derive(Clone)]
pub struct DiskUsages {
    node: Arc<NodeContext>,
    known: Arc<Mutex<Known>>,
    /// The task that measures holds the lock, so only one task measures at a time.
    measuring: Arc<tokio::sync::Mutex<()>>,
}

/// The last measurements by the uids of pods, and when the next measurements are due.
#[derive(Debug, Default)]
struct Known(HashMap<String, (PodDiskUsage, Instant)>);

// === impl DiskUsages ===

impl DiskUsages {
    pub(crate) fn new(node: Arc<NodeContext>) -> Self {
        Self { node, known: Arc::default(), measuring: Arc::default() }
    }

    async fn measured(&self, pods: &[Arc<Pod>]) -> HashMap<String, PodDiskUsage> {
        let (own, pods) = (self.clone(), pods.to_vec());
        let measuring = tokio::spawn(async move { own.measure(&pods).await });
        // After a timeout, the response has the cached measurements.
        let _ = timeout(LIMIT, measuring).await;
        self.lock().0.iter().map(|(uid, (measured, _))| (uid.clone(), *measured)).collect()
    }

    /// Measures the pods that are due, unless another task measures.
    async fn measure(&self, pods: &[Arc<Pod>]) {
        let Ok(_guard) = self.measuring.try_lock() else { return };
        self.lock().keep(pods);
        let due = self.lock().due(pods, Instant::now());
        if due.is_empty() {
            return;
        }
        // One list for all pods: the runtime searches all containers for each list.
        let mut layers = usage::layers(&self.node, None).await;
        for (uid, pod) in due {
            let begun = Instant::now();
            let layers = layers.remove(uid).unwrap_or_default();
            let total = usage::with_layers(&self.node, pod, layers).await.total();
            let measured = PodDiskUsage { bytes: total.bytes, inodes: total.inodes, time: Timestamp::now() };
            self.lock().add(uid, measured, begun, begun.elapsed());
        }
    }

    fn lock(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl DiskUsageView for DiskUsages {
    fn of<'a>(&'a self, pods: &'a [Arc<Pod>]) -> BoxFuture<'a, HashMap<String, PodDiskUsage>> {
        Box::pin(self.measured(pods))
    }
}

// === impl Known ===

impl Known {
    fn is_due(&self, uid: &str, now: Instant) -> bool {
        self.0.get(uid).is_none_or(|(_, due)| now >= *due)
    }

    /// The pods whose measurement is due, with their uids.
    fn due<'a>(&self, pods: &'a [Arc<Pod>], now: Instant) -> Vec<(&'a str, &'a Arc<Pod>)> {
        let all = pods.iter().filter_map(|pod| Some((pod.metadata.uid.as_deref()?, pod)));
        all.filter(|(uid, _)| self.is_due(uid, now)).collect()
    }

    /// Removes the measurements of all other pods.
    fn keep(&mut self, pods: &[Arc<Pod>]) {
        let uids: HashSet<&str> = pods.iter().filter_map(|pod| pod.metadata.uid.as_deref()).collect();
        self.0.retain(|uid, _| uids.contains(uid.as_str()));
    }

    /// Adds a measurement with its start and its duration. After a slow measurement the next measurement is due later.
    fn add(&mut self, uid: &str, measured: PodDiskUsage, begun: Instant, took: Duration) {
        let due = begun + INTERVAL.max(took * MIN_INTERVAL_FACTOR);
        self.0.insert(uid.to_owned(), (measured, due));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_measurements_of_other_pods_are_removed() {
        let mut known = Known::default();
        let measured = PodDiskUsage { bytes: 1, inodes: 1, time: Timestamp::UNIX_EPOCH };
        for uid in ["u", "v"] {
            known.add(uid, measured, Instant::now(), Duration::ZERO);
        }
        let mut pod = Pod::default();
        pod.metadata.uid = Some("v".to_owned());
        known.keep(&[Arc::new(pod), Arc::default()]);
        assert_eq!(known.0.keys().collect::<Vec<_>>(), ["v"]);
        let pods = ["u", "v"].map(|uid| {
            let mut pod = Pod::default();
            pod.metadata.uid = Some(uid.to_owned());
            Arc::new(pod)
        });
        let due: Vec<&str> = known.due(&pods, Instant::now()).into_iter().map(|(uid, _)| uid).collect();
        assert_eq!(due, ["u"]);
    }

    #[test]
    fn a_slow_measurement_is_repeated_later() {
        let (mut known, begun) = (Known::default(), Instant::now());
        let measured = PodDiskUsage { bytes: 1, inodes: 1, time: Timestamp::UNIX_EPOCH };
        assert!(known.is_due("u", begun));
        known.add("u", measured, begun, Duration::from_millis(10));
        assert!(!known.is_due("u", begun + INTERVAL / 2) && known.is_due("u", begun + INTERVAL));
        known.add("u", measured, begun, INTERVAL);
        assert!(!known.is_due("u", begun + INTERVAL * 49) && known.is_due("u", begun + INTERVAL * 50));
    }
}

//! Disk usage of pods for `/stats/summary`. The usage is measured when a client requests it. The results are cached for
//! a while, so that clients cannot keep the disk busy.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures::future::BoxFuture;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use tokio::time::timeout;

use super::due_times::DueTimes;
use super::usage;
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
    known: Arc<Mutex<DueTimes<PodDiskUsage>>>,
    /// The task that measures holds the lock, so only one task measures at a time.
    measuring: Arc<tokio::sync::Mutex<()>>,
}

// === impl DiskUsages ===

impl DiskUsages {
    pub(crate) fn new(node: Arc<NodeContext>) -> Self {
        let known = Arc::new(Mutex::new(DueTimes::new(INTERVAL)));
        Self { node, known, measuring: Arc::default() }
    }

    async fn measured(&self, pods: &[Arc<Pod>]) -> HashMap<String, PodDiskUsage> {
        let (own, pods) = (self.clone(), pods.to_vec());
        let measuring = tokio::spawn(async move { own.measure(&pods).await });
        // After a timeout, the response has the cached measurements.
        let _ = timeout(LIMIT, measuring).await;
        self.lock().iter().map(|(uid, measured)| (uid.clone(), *measured)).collect()
    }

    /// Measures the pods that are due, unless another task measures.
    async fn measure(&self, pods: &[Arc<Pod>]) {
        let Ok(_guard) = self.measuring.try_lock() else { return };
        self.lock().keep(pods);
        let due = due(&self.lock(), pods, Instant::now());
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

    fn lock(&self) -> MutexGuard<'_, DueTimes<PodDiskUsage>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl DiskUsageView for DiskUsages {
    fn of<'a>(&'a self, pods: &'a [Arc<Pod>]) -> BoxFuture<'a, HashMap<String, PodDiskUsage>> {
        Box::pin(self.measured(pods))
    }
}

/// The pods whose measurement is due, with their uids.
fn due<'a>(
    known: &DueTimes<PodDiskUsage>,
    pods: &'a [Arc<Pod>],
    now: Instant,
) -> Vec<(&'a str, &'a Arc<Pod>)> {
    let all = pods.iter().filter_map(|pod| Some((pod.metadata.uid.as_deref()?, pod)));
    all.filter(|(uid, _)| known.is_due(uid, now)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_measured_pod_is_not_due() {
        let mut known = DueTimes::new(INTERVAL);
        let measured = PodDiskUsage { bytes: 1, inodes: 1, time: Timestamp::UNIX_EPOCH };
        known.add("v", measured, Instant::now(), Duration::ZERO);
        let pods = ["u", "v"].map(|uid| {
            let mut pod = Pod::default();
            pod.metadata.uid = Some(uid.to_owned());
            Arc::new(pod)
        });
        let due: Vec<&str> = due(&known, &pods, Instant::now()).into_iter().map(|(uid, _)| uid).collect();
        assert_eq!(due, ["u"]);
    }
}

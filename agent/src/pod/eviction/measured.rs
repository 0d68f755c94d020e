//! Disk usage of pods for `/stats/summary`. A request gets the last measurements and does not wait. It begins the
//! measurements that are due, in the background.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use coracle_cri::background_walks;
use futures::future::BoxFuture;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;

use super::usage::{self, Layer, PodDirectories};
use crate::pod::NodeContext;
use crate::server::{DiskUsageView, PodDiskUsage};

/// Minimum interval of the measurements of a pod, as the kubelet's.
const INTERVAL: Duration = Duration::from_secs(60);
/// A pod with a writable layer that the runtime has not counted is due again after this time: the minimum interval of
/// the counts of the built-in runtime.
const RETRY: Duration = Duration::from_secs(10);

/// The disk usage of the node's pods. Cheap to clone.
#[derive(Clone)]
pub struct DiskUsages {
    node: Arc<NodeContext>,
    known: Arc<Mutex<Known>>,
    /// The task that begins measurements holds the lock, so there is only one such task at a time.
    beginning: Arc<tokio::sync::Mutex<()>>,
}

/// The measurements by the uids of pods.
#[derive(Debug, Default)]
struct Known(HashMap<String, Measurements>);

/// The measurements of one pod.
#[derive(Debug, Default)]
struct Measurements {
    /// The last measurement and its duration.
    last: Option<(PodDiskUsage, Duration)>,
    /// Due time of the next measurement. None while a measurement waits or runs.
    due: Option<Instant>,
    /// Since when the runtime has not counted a writable layer. None if it has counted all of them.
    uncounted_since: Option<Instant>,
}

// === impl DiskUsages ===

impl DiskUsages {
    pub(crate) fn new(node: Arc<NodeContext>) -> Self {
        Self { node, known: Arc::default(), beginning: Arc::default() }
    }

    /// Returns the last measurements. Begins due measurements in the background.
    fn measured(&self, pods: &[Arc<Pod>]) -> HashMap<String, PodDiskUsage> {
        let (own, pods) = (self.clone(), pods.to_vec());
        coracle_threads::spawn(async move { own.begin_due(&pods).await });
        lock(&self.known).last()
    }

    /// Begins due measurements. Does nothing if another task is beginning measurements.
    async fn begin_due(&self, pods: &[Arc<Pod>]) {
        let Ok(_guard) = self.beginning.try_lock() else { return };
        lock(&self.known).keep(pods);
        let due = lock(&self.known).due(pods, Instant::now());
        if due.is_empty() {
            return;
        }
        // One list for all pods: the runtime searches all containers for each list.
        let mut layers = usage::layers(&self.node, None).await;
        for (uid, pod) in due {
            let layers = layers.remove(uid).unwrap_or_default();
            let are_counted = layers.iter().all(|(_, layer)| layer.is_some());
            if lock(&self.known).may_begin(uid, are_counted, Instant::now()) {
                self.begin(uid, pod, layers);
            }
        }
    }

    /// Begins the measurement of a pod. `layers` has the usage of its writable layers.
    fn begin(&self, uid: &str, pod: &Pod, layers: Vec<Layer>) {
        let directories = PodDirectories::of(&self.node, pod, uid);
        let took = lock(&self.known).begin(uid);
        let (known, uid) = (Arc::clone(&self.known), uid.to_owned());
        background_walks::begin(took, move |limit| {
            let begun = Instant::now();
            let Some(usage) = directories.measure(&layers, limit) else { return false };
            let total = usage.total();
            let measured = PodDiskUsage { bytes: total.bytes, inodes: total.inodes, time: Timestamp::now() };
            lock(&known).end(&uid, measured, begun.elapsed());
            true
        });
    }
}

impl DiskUsageView for DiskUsages {
    fn of<'a>(&'a self, pods: &'a [Arc<Pod>]) -> BoxFuture<'a, HashMap<String, PodDiskUsage>> {
        Box::pin(std::future::ready(self.measured(pods)))
    }
}

fn lock(known: &Mutex<Known>) -> MutexGuard<'_, Known> {
    known.lock().unwrap_or_else(PoisonError::into_inner)
}

// === impl Known ===

impl Known {
    /// The last measurement of each pod that has one.
    fn last(&self) -> HashMap<String, PodDiskUsage> {
        self.0.iter().filter_map(|(uid, pod)| Some((uid.clone(), pod.last?.0))).collect()
    }

    fn is_due(&self, uid: &str, now: Instant) -> bool {
        self.0.get(uid).is_none_or(|pod| pod.due.is_some_and(|due| now >= due))
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

    /// Whether a measurement may begin. It waits for the counts of the pod's writable layers, but at most for one
    /// interval: a runtime may never count a layer.
    fn may_begin(&mut self, uid: &str, are_counted: bool, now: Instant) -> bool {
        let pod = self.0.entry(uid.to_owned()).or_default();
        if are_counted {
            pod.uncounted_since = None;
            return true;
        }
        pod.due = Some(now + RETRY);
        now >= *pod.uncounted_since.get_or_insert(now) + INTERVAL
    }

    /// Records that a measurement waits. Returns the duration of the pod's last measurement.
    fn begin(&mut self, uid: &str) -> Option<Duration> {
        let pod = self.0.entry(uid.to_owned()).or_default();
        pod.due = None;
        pod.last.map(|(_, took)| took)
    }

    /// Adds a measurement that has ended, and its duration. Does nothing if the pod was removed.
    fn end(&mut self, uid: &str, measured: PodDiskUsage, took: Duration) {
        if let Some(pod) = self.0.get_mut(uid) {
            pod.last = Some((measured, took));
            pod.due = Some(Instant::now() + INTERVAL);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEASURED: PodDiskUsage = PodDiskUsage { bytes: 1, inodes: 1, time: Timestamp::UNIX_EPOCH };

    fn pod(uid: &str) -> Arc<Pod> {
        let mut pod = Pod::default();
        pod.metadata.uid = Some(uid.to_owned());
        Arc::new(pod)
    }

    #[test]
    fn the_measurements_of_other_pods_are_removed() {
        let mut known = Known::default();
        for uid in ["u", "v"] {
            known.begin(uid);
            known.end(uid, MEASURED, Duration::ZERO);
        }
        known.keep(&[pod("v"), Arc::default()]);
        known.end("u", MEASURED, Duration::ZERO);
        assert_eq!(known.last(), HashMap::from([("v".to_owned(), MEASURED)]));
        let pods = ["u", "v"].map(pod);
        let due: Vec<&str> = known.due(&pods, Instant::now()).into_iter().map(|(uid, _)| uid).collect();
        assert_eq!(due, ["u"]);
    }

    #[test]
    fn a_measurement_is_due_once_and_again_after_the_interval() {
        let mut known = Known::default();
        let begun = Instant::now();
        assert!(known.is_due("u", begun));
        assert_eq!(known.begin("u"), None);
        assert!(!known.is_due("u", begun + INTERVAL * 100), "it waits or runs");
        assert!(known.last().is_empty());
        known.end("u", MEASURED, Duration::from_secs(3));
        assert!(!known.is_due("u", begun + INTERVAL / 2));
        assert!(known.is_due("u", Instant::now() + INTERVAL));
        assert_eq!(known.begin("u"), Some(Duration::from_secs(3)));
        assert_eq!(known.last(), HashMap::from([("u".to_owned(), MEASURED)]));
    }

    #[test]
    fn a_layer_that_is_never_counted_delays_measurements_once() {
        let mut known = Known::default();
        let begun = Instant::now();
        assert!(!known.may_begin("u", false, begun));
        assert!(!known.is_due("u", begun + RETRY / 2), "no list for each request");
        assert!(known.is_due("u", begun + RETRY));
        assert!(!known.may_begin("u", false, begun + INTERVAL / 2));
        assert!(known.may_begin("u", false, begun + INTERVAL));
        known.begin("u");
        assert!(!known.is_due("u", begun + INTERVAL * 100), "it waits or runs");
        known.end("u", MEASURED, Duration::ZERO);
        assert!(known.may_begin("u", false, begun + INTERVAL * 2), "later measurements do not wait again");
        assert!(known.may_begin("u", true, begun + INTERVAL * 3));
        assert!(!known.may_begin("u", false, begun + INTERVAL * 4), "a new container");
    }
}

//! Due times of the pods' measurements.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Pod;

/// Minimum interval of a pod's measurements, as a multiple of their duration. The measurements of one pod thus take at
/// most 2 % of a processor.
const MIN_INTERVAL_FACTOR: u32 = 50;

/// Due times of the next measurements, by the uids of measured pods.
#[derive(Debug)]
pub(super) struct DueTimes {
    /// Minimum interval of the measurements of a pod.
    interval: Duration,
    measured: HashMap<String, Instant>,
}

// === impl DueTimes ===

impl DueTimes {
    pub(super) fn new(interval: Duration) -> Self {
        Self { interval, measured: HashMap::new() }
    }

    pub(super) fn is_due(&self, uid: &str, now: Instant) -> bool {
        self.measured.get(uid).is_none_or(|due| now >= *due)
    }

    /// Adds a measurement with its start and its duration. After a slow measurement the next measurement is due later.
    pub(super) fn add(&mut self, uid: &str, begun: Instant, took: Duration) {
        let due = begun + self.interval.max(took * MIN_INTERVAL_FACTOR);
        self.measured.insert(uid.to_owned(), due);
    }

    /// Removes the due times of all other pods.
    pub(super) fn keep(&mut self, pods: &[Arc<Pod>]) {
        let uids: HashSet<&str> = pods.iter().filter_map(|pod| pod.metadata.uid.as_deref()).collect();
        self.measured.retain(|uid, _| uids.contains(uid.as_str()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INTERVAL: Duration = Duration::from_secs(10);

    #[test]
    fn a_slow_measurement_is_repeated_later() {
        let (mut due, begun) = (DueTimes::new(INTERVAL), Instant::now());
        assert!(due.is_due("u", begun));
        due.add("u", begun, Duration::from_millis(1));
        assert!(!due.is_due("u", begun + INTERVAL / 2) && due.is_due("u", begun + INTERVAL));
        due.add("u", begun, INTERVAL);
        assert!(!due.is_due("u", begun + INTERVAL * 49) && due.is_due("u", begun + INTERVAL * 50));
    }

    #[test]
    fn the_measurements_of_other_pods_are_removed() {
        let (mut due, begun) = (DueTimes::new(INTERVAL), Instant::now());
        for uid in ["u", "v"] {
            due.add(uid, begun, Duration::ZERO);
        }
        let mut pod = Pod::default();
        pod.metadata.uid = Some("v".to_owned());
        due.keep(&[Arc::new(pod), Arc::default()]);
        assert_eq!(due.measured.keys().map(String::as_str).collect::<Vec<_>>(), ["v"]);
        assert!(due.is_due("u", begun), "a pod that is not on the node any more");
    }
}

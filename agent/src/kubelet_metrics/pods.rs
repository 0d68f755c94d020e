//! Metrics of new pods, of the writes of their statuses, and of pods that only the runtime knows.

use std::time::Duration;

use prometheus::{Histogram, IntCounter, IntCounterVec};

use super::registered::Registered;

/// Bounds of the number of containers.
const CONTAINERS: [f64; 5] = [1.0, 2.0, 4.0, 8.0, 16.0];
/// Bounds in seconds of the write of a status.
const STATUS_WRITES: [f64; 11] = [0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 20.0, 30.0, 45.0, 60.0];

/// Metrics of new pods, of the writes of their statuses, of orphans and of restarts.
pub(crate) struct PodMetrics {
    containers: Histogram,
    status_writes: Histogram,
    orphans: IntCounter,
    /// Restarted pods, by whether they are static.
    restarts: IntCounterVec,
}

// === impl PodMetrics ===

impl PodMetrics {
    pub(super) fn new(all: &Registered<'_>) -> Self {
        let restarts = all.counters(
            "restarted_pods_total",
            "Number of pods that have been restarted because they were deleted and recreated with the same UID while the \
             kubelet was watching them (common for static pods, extremely uncommon for API pods)",
            &["static"],
        );
        // As in the kubelet, both samples exist from the start.
        ["", "true"].iter().for_each(|is_static| restarts.with_label_values(&[*is_static]).inc_by(0));
        Self {
            restarts,
            containers: all
                .with_buckets(&CONTAINERS)
                .histogram("containers_per_pod_count", "The number of containers per pod."),
            status_writes: all.with_buckets(&STATUS_WRITES).histogram(
                "pod_status_sync_duration_seconds",
                "Duration in seconds from the first change of a pod's status until the API server has the newest status.",
            ),
            orphans: all.counter(
                "orphaned_runtime_pods_total",
                "Number of pods that have been detected in the container runtime without being already known to the \
                 pod worker.",
            ),
        }
    }

    /// Observes the number of containers of a new pod, without init containers.
    pub(crate) fn added(&self, containers: usize) {
        self.containers.observe(f64::from(u32::try_from(containers).unwrap_or(u32::MAX)));
    }

    /// Observes the time from the first change of a status until its write.
    pub(crate) fn status_written(&self, after: Duration) {
        self.status_writes.observe(after.as_secs_f64());
    }

    /// Counts a pod of an earlier agent that is neither in the API nor in a manifest.
    pub(crate) fn orphan_found(&self) {
        self.orphans.inc();
    }

    /// Counts a static pod that starts again with the same uid after its end: its manifest was removed and came back.
    pub(crate) fn static_pod_restarted(&self) {
        self.restarts.with_label_values(&["true"]).inc();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use crate::kubelet_metrics::{Current, KubeletMetrics};

    #[test]
    fn new_pods_statuses_and_orphans_have_the_names_and_buckets_of_the_kubelet() {
        let metrics = KubeletMetrics::default();
        metrics.pods.added(3);
        metrics.pods.status_written(Duration::from_millis(70));
        metrics.pods.orphan_found();
        metrics.pods.static_pod_restarted();
        let text = metrics.text(&Current::default());
        for line in [
            "kubelet_containers_per_pod_count_bucket{le=\"2\"} 0",
            "kubelet_containers_per_pod_count_bucket{le=\"4\"} 1",
            "kubelet_pod_status_sync_duration_seconds_bucket{le=\"0.05\"} 0",
            "kubelet_pod_status_sync_duration_seconds_bucket{le=\"0.1\"} 1",
            "kubelet_orphaned_runtime_pods_total 1",
            "kubelet_restarted_pods_total{static=\"\"} 0",
            "kubelet_restarted_pods_total{static=\"true\"} 1",
        ] {
            assert!(text.lines().any(|other| other == line), "no {line} in\n{text}");
        }
    }
}

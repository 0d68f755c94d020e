//! Metrics of the starts of workers, sandboxes, containers and pods.

use std::time::Duration;

use prometheus::{DEFAULT_BUCKETS, Histogram, HistogramVec, IntCounter, IntCounterVec};

use super::{KubeletMetrics, Registered};

/// Bounds in seconds of the start of a pod.
const POD_STARTS: [f64; 25] = [
    0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 20.0, 30.0, 45.0, 60.0, 120.0, 180.0, 240.0, 300.0, 360.0,
    480.0, 600.0, 900.0, 1200.0, 1800.0, 2700.0, 3600.0,
];

/// Reasons of terminated containers that are values of the label.
const EXIT_REASONS: [&str; 8] = [
    "",
    "Completed",
    "Error",
    "OOMKilled",
    "StartError",
    "ContainerCannotRun",
    "ContainerStatusUnknown",
    "DeadlineExceeded",
];

/// Value of the label for all other reasons and codes.
const OTHER: &str = "other";

/// Starts of workers, sandboxes, containers and pods.
pub(super) struct StartMetrics {
    workers: Histogram,
    sandboxes: IntCounter,
    sandbox_errors: IntCounter,
    sandbox_durations: HistogramVec,
    sandbox_errors_by_handler: IntCounterVec,
    user_namespaced: IntCounter,
    user_namespaced_errors: IntCounter,
    containers: IntCounterVec,
    container_errors: IntCounterVec,
    terminations: IntCounterVec,
    pods: Histogram,
    /// Durations from the creation of a pod until it runs, with and without its pulls and init containers.
    pods_since_creation: [Histogram; 2],
}

// === impl StartMetrics ===

impl StartMetrics {
    pub(super) fn new(all: &Registered<'_>) -> Self {
        Self {
            workers: all.with_buckets(DEFAULT_BUCKETS).histogram(
                "pod_worker_start_duration_seconds",
                "Duration in seconds from kubelet seeing a pod to starting a worker.",
            ),
            sandboxes: all.counter("started_pods_total", "Cumulative number of pods started"),
            sandbox_errors: all
                .counter("started_pods_errors_total", "Cumulative number of errors when starting pods"),
            sandbox_durations: all.with_buckets(DEFAULT_BUCKETS).histograms(
                "run_podsandbox_duration_seconds",
                "Duration in seconds of the run_podsandbox operations. Broken down by RuntimeClass.Handler.",
                &["runtime_handler"],
            ),
            sandbox_errors_by_handler: all.counters(
                "run_podsandbox_errors_total",
                "Cumulative number of the run_podsandbox operation errors by RuntimeClass.Handler.",
                &["runtime_handler"],
            ),
            user_namespaced: all.counter(
                "started_user_namespaced_pods_total",
                "Cumulative number of pods with user namespaces started. This metric will only be collected on Linux.",
            ),
            user_namespaced_errors: all.counter(
                "started_user_namespaced_pods_errors_total",
                "Cumulative number of errors when starting pods with user namespaces. \
                 This metric will only be collected on Linux.",
            ),
            containers: all.counters(
                "started_containers_total",
                "Cumulative number of containers started",
                &["container_type"],
            ),
            container_errors: all.counters(
                "started_containers_errors_total",
                "Cumulative number of errors when starting containers",
                &["container_type", "code"],
            ),
            terminations: all.counters(
                "terminated_containers_total",
                "Cumulative number of container terminations.",
                &["container_type", "exit_code", "reason"],
            ),
            pods: all.with_buckets(&POD_STARTS).histogram(
                "pod_start_duration_seconds",
                "Duration in seconds from kubelet seeing a pod for the first time to the pod starting to run",
            ),
            pods_since_creation: since_creation(all),
        }
    }
}

// === impl KubeletMetrics ===

impl KubeletMetrics {
    /// Counts an attempt to start a sandbox.
    pub(crate) fn pod_started(&self, succeeded: bool) {
        self.starts.sandboxes.inc();
        if !succeeded {
            self.starts.sandbox_errors.inc();
        }
    }

    /// Counts a call that runs a sandbox, by the handler of its RuntimeClass. Only administrators make RuntimeClasses,
    /// so the label has few values.
    pub(crate) fn sandbox_run(&self, handler: &str, took: Duration, succeeded: bool) {
        self.starts.sandbox_durations.with_label_values(&[handler]).observe(took.as_secs_f64());
        if !succeeded {
            self.starts.sandbox_errors_by_handler.with_label_values(&[handler]).inc();
        }
    }

    /// Counts an attempt to start the sandbox of a pod with a user namespace. [`Self::pod_started`] counts it as well.
    pub(crate) fn user_namespaced_pod_started(&self, succeeded: bool) {
        self.starts.user_namespaced.inc();
        if !succeeded {
            self.starts.user_namespaced_errors.inc();
        }
    }

    /// Counts the end of a container. `kind` is as for [`Self::container_started`]. Another runtime may report any
    /// reason and any code, so unknown reasons and unknown codes count as [`OTHER`].
    pub(crate) fn container_terminated(&self, kind: &'static str, code: i32, reason: &str) {
        let code = if (0..=255).contains(&code) { code.to_string() } else { OTHER.to_owned() };
        let reason = EXIT_REASONS.into_iter().find(|known| *known == reason).unwrap_or(OTHER);
        self.starts.terminations.with_label_values(&[kind, code.as_str(), reason]).inc();
    }

    /// Counts an attempt to start a container. `kind` is `container`, `init_container` or `ephemeral_container`.
    /// `failure` is the reason in the container's status. The reason is a constant of the agent, so the label has few
    /// values.
    pub(crate) fn container_started(&self, kind: &'static str, failure: Option<&str>) {
        self.starts.containers.with_label_values(&[kind]).inc();
        if let Some(reason) = failure {
            self.starts.container_errors.with_label_values(&[kind, reason]).inc();
        }
    }

    /// Counts the start of a pod's worker. `after` is the time since the pod was received.
    pub(crate) fn worker_started(&self, after: Duration) {
        self.starts.workers.observe(after.as_secs_f64());
    }

    /// Counts a pod that runs. `after` is the time since the pod was received.
    pub(crate) fn pod_runs(&self, after: Duration) {
        self.starts.pods.observe(after.as_secs_f64());
    }

    /// Observes the time from the creation of a pod until it runs. `excluded` is the part of this time for pulls and
    /// init containers. `None` if the SLI does not include the pod.
    pub(crate) fn created_pod_runs(&self, after: Duration, excluded: Option<Duration>) {
        let [total, sli] = &self.starts.pods_since_creation;
        total.observe(after.as_secs_f64());
        if let Some(excluded) = excluded {
            sli.observe(after.saturating_sub(excluded).as_secs_f64());
        }
    }
}

/// The durations from the creation of a pod until it runs: all of it, and the part that the SLI includes.
fn since_creation(all: &Registered<'_>) -> [Histogram; 2] {
    [
        all.with_buckets(&POD_STARTS).histogram(
            "pod_start_total_duration_seconds",
            "Duration in seconds from the creation of a pod until it runs, with the time to pull images and to \
             run init containers",
        ),
        all.with_buckets(&POD_STARTS).histogram(
            "pod_start_sli_duration_seconds",
            "Duration in seconds from the creation of a pod without persistent volumes until it runs, without the \
             time to pull images and to run init containers",
        ),
    ]
}

//! Metrics of requests to the kubelet API.

use std::time::Duration;

use prometheus::{DEFAULT_BUCKETS, HistogramVec, IntCounterVec};

use super::{KubeletMetrics, Registered};

/// Requests to the kubelet API.
pub(super) struct RequestMetrics {
    total: IntCounterVec,
    durations: HistogramVec,
}

/// Labels of a request to the kubelet API.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RequestLabels {
    pub(crate) method: &'static str,
    pub(crate) path: &'static str,
    /// Whether the request is an exec, attach or port-forward.
    pub(crate) is_long: bool,
}

// === impl RequestMetrics ===

impl RequestMetrics {
    pub(super) fn new(all: &Registered<'_>) -> Self {
        let labels = ["method", "path", "server_type", "long_running"];
        Self {
            total: all.counters(
                "http_requests_total",
                "Number of the http requests received since the server started",
                &labels,
            ),
            durations: all.with_buckets(DEFAULT_BUCKETS).histograms(
                "http_requests_duration_seconds",
                "Duration in seconds until the response of a http request begins",
                &labels,
            ),
        }
    }
}

// === impl KubeletMetrics ===

impl KubeletMetrics {
    /// Counts a request to the kubelet API. `took` is the time until the response begins. The kubelet's duration of an
    /// exec, attach or port-forward includes the session. So no duration of these requests is recorded here.
    pub(crate) fn request(&self, labels: RequestLabels, took: Duration) {
        let values = [labels.method, labels.path, "readwrite", if labels.is_long { "true" } else { "false" }];
        self.requests.total.with_label_values(&values).inc();
        if !labels.is_long {
            self.requests.durations.with_label_values(&values).observe(took.as_secs_f64());
        }
    }
}

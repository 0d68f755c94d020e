//! The metrics `kubelet_pleg_*`: lists of the containers of a runtime that sends no events.

use std::sync::LazyLock;

use jiff::Timestamp;
use prometheus::{Gauge, Histogram, HistogramOpts, Opts, Registry, TextEncoder};
use tokio::time::Instant;

use crate::metric::valid;

/// The lists of this process.
static ALL: LazyLock<RelistMetrics> = LazyLock::new(RelistMetrics::default);

/// Durations of lists and of the intervals between them.
pub(crate) struct RelistMetrics {
    registry: Registry,
    lists: Histogram,
    intervals: Histogram,
    last: Gauge,
}

/// All metrics in the text format of Prometheus. Empty before the first list.
pub(crate) fn text() -> String {
    ALL.text()
}

/// The metrics of this process.
pub(crate) fn all() -> &'static RelistMetrics {
    &ALL
}

// === impl RelistMetrics ===

impl Default for RelistMetrics {
    fn default() -> Self {
        let full = |name: &str| format!("kubelet_pleg_{name}");
        let lists = HistogramOpts::new(
            full("relist_duration_seconds"),
            "Seconds that a list of all containers takes.",
        );
        let intervals =
            HistogramOpts::new(full("relist_interval_seconds"), "Seconds between the starts of two lists.");
        let last = Opts::new(full("last_seen_seconds"), "Time of the last list, in seconds since the epoch.");
        let metrics = Self {
            registry: Registry::new(),
            lists: valid(Histogram::with_opts(lists)),
            intervals: valid(Histogram::with_opts(intervals)),
            last: valid(Gauge::with_opts(last)),
        };
        valid(metrics.registry.register(Box::new(metrics.lists.clone())));
        valid(metrics.registry.register(Box::new(metrics.intervals.clone())));
        valid(metrics.registry.register(Box::new(metrics.last.clone())));
        metrics
    }
}

impl RelistMetrics {
    /// Counts the interval between the start of the list at `previous` and the list that starts now.
    pub(crate) fn begun(&self, previous: Option<Instant>) {
        if let Some(previous) = previous {
            self.intervals.observe(previous.elapsed().as_secs_f64());
        }
    }

    /// Counts a list that began at this time, including a failed list.
    pub(crate) fn ended(&self, began: Instant) {
        self.lists.observe(began.elapsed().as_secs_f64());
        self.last.set(Timestamp::now().as_duration().as_secs_f64());
    }

    fn text(&self) -> String {
        if self.lists.get_sample_count() == 0 {
            return String::new();
        }
        // Writing to memory cannot fail.
        TextEncoder::new().encode_to_string(&self.registry.gather()).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn lists_have_the_names_and_buckets_of_the_kubelet() {
        let metrics = RelistMetrics::default();
        metrics.begun(None);
        let first = Instant::now();
        assert_eq!(metrics.text(), "");
        tokio::time::advance(Duration::from_millis(200)).await;
        metrics.ended(first);
        tokio::time::advance(Duration::from_secs(1)).await;
        metrics.begun(Some(first));
        let text = metrics.text();
        for line in [
            "# TYPE kubelet_pleg_relist_duration_seconds histogram",
            "kubelet_pleg_relist_duration_seconds_bucket{le=\"0.1\"} 0",
            "kubelet_pleg_relist_duration_seconds_bucket{le=\"0.25\"} 1",
            "kubelet_pleg_relist_interval_seconds_bucket{le=\"1\"} 0",
            "kubelet_pleg_relist_interval_seconds_bucket{le=\"2.5\"} 1",
            "# TYPE kubelet_pleg_last_seen_seconds gauge",
        ] {
            assert!(text.lines().any(|other| other == line), "no {line} in\n{text}");
        }
    }
}

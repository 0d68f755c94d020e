//! Metrics of pods that the node ends: evictions, preemptions and the shutdown of the machine.

use std::time::Duration;

use prometheus::{DEFAULT_BUCKETS, HistogramVec, IntCounterVec, IntGauge};

use super::registered::Registered;

/// Counters of pods that the node ends, and the times of the last shutdown of the machine.
pub(crate) struct EndingMetrics {
    evictions: IntCounterVec,
    /// Age of the measurement that causes an eviction.
    stats_ages: HistogramVec,
    preemptions: IntCounterVec,
    /// Begin and end of the last graceful shutdown.
    shutdown: [IntGauge; 2],
}

// === impl EndingMetrics ===

impl EndingMetrics {
    pub(super) fn new(all: &Registered<'_>) -> Self {
        Self {
            evictions: all.counters(
                "evictions",
                "Cumulative number of pod evictions by eviction signal",
                &["eviction_signal"],
            ),
            stats_ages: all.with_buckets(DEFAULT_BUCKETS).histograms(
                "eviction_stats_age_seconds",
                "Time between when stats are collected, and when pod is evicted based on those stats by eviction signal",
                &["eviction_signal"],
            ),
            preemptions: all.counters(
                "preemptions",
                "Cumulative number of pod preemptions by preemption resource",
                &["preemption_signal"],
            ),
            shutdown: [
                all.gauge(
                    "graceful_shutdown_start_time_seconds",
                    "Start of the last graceful shutdown in seconds since the epoch; 0 if there was none",
                ),
                all.gauge(
                    "graceful_shutdown_end_time_seconds",
                    "End of the last graceful shutdown in seconds since the epoch; 0 if it has not ended",
                ),
            ],
        }
    }

    /// Counts an eviction by its signal.
    pub(crate) fn evicted(&self, signal: &'static str) {
        self.evictions.with_label_values(&[signal]).inc();
    }

    /// Observes the age of the measurement of the node that causes an eviction.
    pub(crate) fn evicting(&self, signal: &'static str, age: Duration) {
        self.stats_ages.with_label_values(&[signal]).observe(age.as_secs_f64());
    }

    /// Counts a pod that ends so that a critical pod fits. `resource` is the first resource that the node lacks. This
    /// is always a resource of the node, so the label has few values.
    pub(crate) fn preempted(&self, resource: &str) {
        self.preemptions.with_label_values(&[resource]).inc();
    }

    /// Sets the begin and the end of the last graceful shutdown, in seconds since the epoch.
    pub(crate) fn shutdown(&self, begin: i64, end: i64) {
        self.shutdown.iter().zip([begin, end]).for_each(|(gauge, time)| gauge.set(time));
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use crate::kubelet_metrics::{Current, KubeletMetrics};

    #[test]
    fn the_age_of_the_measurement_behind_an_eviction_has_the_name_and_buckets_of_the_kubelet() {
        let metrics = KubeletMetrics::default();
        metrics.endings.evicting("memory.available", Duration::from_millis(40));
        let text = metrics.text(&Current::default());
        for (bound, count) in [("0.025", 0), ("0.05", 1)] {
            let labels = format!("eviction_signal=\"memory.available\",le=\"{bound}\"");
            let line = format!("kubelet_eviction_stats_age_seconds_bucket{{{labels}}} {count}");
            assert!(text.lines().any(|other| other == line), "no {line} in\n{text}");
        }
    }

    #[test]
    fn preemptions_and_shutdowns_have_the_names_of_the_kubelet() {
        let metrics = KubeletMetrics::default();
        let has = |line: &str| metrics.text(&Current::default()).lines().any(|other| other == line);
        assert!(has("kubelet_graceful_shutdown_start_time_seconds 0"));
        metrics.endings.preempted("cpu");
        assert!(has("kubelet_preemptions{preemption_signal=\"cpu\"} 1"));
        metrics.endings.shutdown(100, 130);
        assert!(has("kubelet_graceful_shutdown_start_time_seconds 100"));
        assert!(has("kubelet_graceful_shutdown_end_time_seconds 130"));
        metrics.endings.shutdown(200, 0);
        assert!(has("kubelet_graceful_shutdown_end_time_seconds 0"));
    }
}

//! Metrics of pods that the node ends: evictions, preemptions and the shutdown of the machine.

use prometheus::{IntCounterVec, IntGauge};

use super::registered::Registered;

/// Counters of pods that the node ends, and the times of the last shutdown of the machine.
pub(crate) struct EndingMetrics {
    evictions: IntCounterVec,
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

    /// Counts a pod that ends so that a critical pod fits. `resource` is the first resource that the node lacks. It is a
    /// resource of the node, so the label has few values.
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
    use crate::kubelet_metrics::{Current, KubeletMetrics};

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

//! The metrics of autoscalers, in the text format of Prometheus. Source: `pkg/controller/podautoscaler/monitor`.
//!
//! Labels have values of fixed sets. A reconcile changes atomic numbers only.

use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// Upper bounds of the durations of reconciles, in milliseconds: from 1 ms to 16 s.
const BOUNDS: [u64; 15] = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384];
/// Values of the labels `action` and `error`, in the order of [`Scaling`].
const LABELS: [[&str; 2]; 4] =
    [["none", "none"], ["scale_up", "none"], ["scale_down", "none"], ["none", "internal"]];

/// Counts the reconciles of autoscalers. A clone shares the counts.
#[derive(Clone, Debug, Default)]
pub struct AutoscalerMetrics(Arc<[Counts; LABELS.len()]>);

/// The result of a reconcile of an autoscaler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scaling {
    /// The number of replicas is not changed.
    Kept,
    /// There are more replicas.
    Up,
    /// There are fewer replicas.
    Down,
    /// A request failed, or metrics are missing.
    Failed,
}

/// Reconciles with one result.
#[derive(Debug, Default)]
struct Counts {
    /// Numbers of durations in each bucket. The last bucket has no upper bound.
    buckets: [AtomicU64; BOUNDS.len() + 1],
    micros: AtomicU64,
}

// === impl AutoscalerMetrics ===

impl AutoscalerMetrics {
    /// Counts a reconcile of an autoscaler.
    pub(crate) fn reconciled(&self, scaling: Scaling, took: Duration) {
        let counts = &self.0[scaling as usize];
        let bucket = BOUNDS.iter().position(|bound| took <= Duration::from_millis(*bound));
        counts.buckets[bucket.unwrap_or(BOUNDS.len())].fetch_add(1, Relaxed);
        counts.micros.fetch_add(u64::try_from(took.as_micros()).unwrap_or(u64::MAX), Relaxed);
    }

    /// All metrics in the text format of Prometheus. Empty if no autoscaler was reconciled yet.
    #[must_use]
    pub fn text(&self) -> String {
        let all = LABELS.iter().zip(self.0.iter());
        let read = all.map(|([action, error], counts)| {
            let labels = format!("action=\"{action}\",error=\"{error}\"");
            let buckets: Vec<u64> = counts.buckets.iter().map(|count| count.load(Relaxed)).collect();
            (labels, buckets, Duration::from_micros(counts.micros.load(Relaxed)))
        });
        let read: Vec<_> = read.filter(|(_, buckets, _)| buckets.iter().any(|count| *count > 0)).collect();
        let mut text = String::new();
        if read.is_empty() {
            return text;
        }
        let name = "horizontal_pod_autoscaler_controller_reconciliations_total";
        // Writing to memory cannot fail.
        let _ = writeln!(text, "# HELP {name} Number of reconciles of autoscalers.\n# TYPE {name} counter");
        for (labels, buckets, _) in &read {
            let _ = writeln!(text, "{name}{{{labels}}} {}", buckets.iter().sum::<u64>());
        }
        let name = "horizontal_pod_autoscaler_controller_reconciliation_duration_seconds";
        let _ = writeln!(
            text,
            "# HELP {name} Duration of reconciles of autoscalers in seconds.\n# TYPE {name} histogram"
        );
        for (labels, buckets, sum) in &read {
            let bounds = BOUNDS.iter().map(|bound| Duration::from_millis(*bound).as_secs_f64().to_string());
            let mut count = 0;
            for (bound, bucket) in bounds.chain(["+Inf".to_owned()]).zip(buckets) {
                count += bucket;
                let _ = writeln!(text, "{name}_bucket{{{labels},le=\"{bound}\"}} {count}");
            }
            let sum = sum.as_secs_f64();
            let _ = writeln!(text, "{name}_sum{{{labels}}} {sum}\n{name}_count{{{labels}}} {count}");
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reconciles_have_the_names_labels_and_buckets_of_upstream() {
        let metrics = AutoscalerMetrics::default();
        assert_eq!(metrics.text(), "");
        metrics.reconciled(Scaling::Up, Duration::from_millis(3));
        metrics.reconciled(Scaling::Up, Duration::from_secs(20));
        metrics.reconciled(Scaling::Failed, Duration::from_millis(1));
        let text = metrics.text();
        let name = "horizontal_pod_autoscaler_controller_reconciliation";
        for line in [
            format!("# TYPE {name}s_total counter"),
            format!("{name}s_total{{action=\"scale_up\",error=\"none\"}} 2"),
            format!("{name}s_total{{action=\"none\",error=\"internal\"}} 1"),
            format!("# TYPE {name}_duration_seconds histogram"),
            format!("{name}_duration_seconds_bucket{{action=\"scale_up\",error=\"none\",le=\"0.002\"}} 0"),
            format!("{name}_duration_seconds_bucket{{action=\"scale_up\",error=\"none\",le=\"0.004\"}} 1"),
            format!("{name}_duration_seconds_bucket{{action=\"scale_up\",error=\"none\",le=\"16.384\"}} 1"),
            format!("{name}_duration_seconds_bucket{{action=\"scale_up\",error=\"none\",le=\"+Inf\"}} 2"),
            format!("{name}_duration_seconds_sum{{action=\"scale_up\",error=\"none\"}} 20.003"),
            format!("{name}_duration_seconds_bucket{{action=\"none\",error=\"internal\",le=\"0.001\"}} 1"),
        ] {
            assert!(text.lines().any(|other| other == line), "no {line} in\n{text}");
        }
        assert!(!text.contains("scale_down"), "{text}");
    }
}

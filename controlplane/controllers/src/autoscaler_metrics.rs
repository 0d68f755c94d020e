//! The metrics of autoscalers, in the text format of Prometheus. Source: `pkg/controller/podautoscaler/monitor`.
//!
//! Labels have values of fixed sets. A reconcile changes atomic numbers only.

use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// Upper bounds of the durations of reconciles, in milliseconds: from 1 ms to 16 s.
const BOUNDS: [u64; 15] = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384];
const PREFIX: &str = "horizontal_pod_autoscaler_controller";
/// Values of the labels `action` and `error`, in the order of [`Scaling`].
const LABELS: [[&str; 2]; 4] =
    [["none", "none"], ["scale_up", "none"], ["scale_down", "none"], ["none", "internal"]];

/// The types of metrics of an autoscaler.
const TYPES: [&str; 5] = ["Resource", "ContainerResource", "Pods", "Object", "External"];

/// Counts the work of autoscalers. A clone shares the counts.
#[derive(Clone, Debug, Default)]
pub struct AutoscalerMetrics(Arc<Work>);

#[derive(Debug, Default)]
struct Work {
    /// Reconciles by their result.
    reconciles: [Counts; LABELS.len()],
    /// Computations of metrics by type and result.
    computations: [[Counts; LABELS.len()]; TYPES.len()],
}

/// The result of a reconcile of an autoscaler, or the proposal of one of its metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scaling {
    /// The number of replicas is not changed.
    Kept,
    /// The number of replicas increases.
    Up,
    /// The number of replicas decreases.
    Down,
    /// A request failed, or metrics are missing.
    Failed,
}

/// Names of the metrics of one kind of work (without their common prefix), and the work in their help texts.
struct MetricNames {
    total: &'static str,
    duration: &'static str,
    help: &'static str,
}

/// Reconciles or computations with one result.
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
        self.0.reconciles[scaling as usize].observe(took);
    }

    /// Counts the computation of a metric with this type. Metrics of unknown types are not counted.
    pub(crate) fn computed(&self, metric_type: &str, scaling: Scaling, took: Duration) {
        if let Some(place) = TYPES.iter().position(|known| *known == metric_type) {
            self.0.computations[place][scaling as usize].observe(took);
        }
    }

    /// All metrics in the text format of Prometheus. Empty if no autoscaler was reconciled yet.
    #[must_use]
    pub fn text(&self) -> String {
        let labels = LABELS.map(|[action, error]| format!("action=\"{action}\",error=\"{error}\""));
        let reconciles = labels.iter().cloned().zip(&self.0.reconciles);
        let computations = TYPES.iter().zip(&self.0.computations).flat_map(|(metric_type, counts)| {
            let labels = labels.iter().map(move |labels| format!("{labels},metric_type=\"{metric_type}\""));
            labels.zip(counts)
        });
        let mut text = String::new();
        let names = MetricNames {
            total: "reconciliations_total",
            duration: "reconciliation_duration_seconds",
            help: "reconciles of autoscalers",
        };
        write(&mut text, &names, reconciles);
        let names = MetricNames {
            total: "metric_computation_total",
            duration: "metric_computation_duration_seconds",
            help: "computations of metrics of autoscalers",
        };
        write(&mut text, &names, computations);
        text
    }
}

/// Writes a counter and a histogram of the same work, if there was work.
fn write<'a>(text: &mut String, names: &MetricNames, counts: impl Iterator<Item = (String, &'a Counts)>) {
    let MetricNames { total, duration, help } = names;
    let read = counts.map(|(labels, counts)| {
        let buckets: Vec<u64> = counts.buckets.iter().map(|count| count.load(Relaxed)).collect();
        (labels, buckets, Duration::from_micros(counts.micros.load(Relaxed)))
    });
    let read: Vec<_> = read.filter(|(_, buckets, _)| buckets.iter().any(|count| *count > 0)).collect();
    if read.is_empty() {
        return;
    }
    let name = format!("{PREFIX}_{total}");
    // Writing to memory cannot fail.
    let _ = writeln!(text, "# HELP {name} Number of {help}.\n# TYPE {name} counter");
    for (labels, buckets, _) in &read {
        let _ = writeln!(text, "{name}{{{labels}}} {}", buckets.iter().sum::<u64>());
    }
    let name = format!("{PREFIX}_{duration}");
    let _ = writeln!(text, "# HELP {name} Duration of {help} in seconds.\n# TYPE {name} histogram");
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
}

// === impl Counts ===

impl Counts {
    fn observe(&self, took: Duration) {
        let bucket = BOUNDS.iter().position(|bound| took <= Duration::from_millis(*bound));
        self.buckets[bucket.unwrap_or(BOUNDS.len())].fetch_add(1, Relaxed);
        self.micros.fetch_add(u64::try_from(took.as_micros()).unwrap_or(u64::MAX), Relaxed);
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

    #[test]
    fn computations_of_metrics_are_counted_by_their_type() {
        let metrics = AutoscalerMetrics::default();
        metrics.computed("External", Scaling::Up, Duration::from_millis(3));
        metrics.computed("External", Scaling::Failed, Duration::from_millis(3));
        metrics.computed("unknown", Scaling::Up, Duration::from_millis(3));
        let text = metrics.text();
        let name = "horizontal_pod_autoscaler_controller_metric_computation";
        let labels = "action=\"scale_up\",error=\"none\",metric_type=\"External\"";
        for line in [
            format!("# TYPE {name}_total counter"),
            format!("{name}_total{{{labels}}} 1"),
            format!("{name}_total{{action=\"none\",error=\"internal\",metric_type=\"External\"}} 1"),
            format!("# TYPE {name}_duration_seconds histogram"),
            format!("{name}_duration_seconds_bucket{{{labels},le=\"0.002\"}} 0"),
            format!("{name}_duration_seconds_bucket{{{labels},le=\"0.004\"}} 1"),
        ] {
            assert!(text.lines().any(|other| other == line), "no {line} in\n{text}");
        }
        assert!(!text.contains("unknown") && !text.contains("reconciliation"), "{text}");
    }
}

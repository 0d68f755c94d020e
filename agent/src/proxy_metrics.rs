//! The metrics `kubeproxy_*` of the service proxy, in the text format of Prometheus.
//!
//! Source of names, labels and buckets: `pkg/proxy/metrics/metrics.go`. One transaction changes both address families,
//! so both have the same values.

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use prometheus::{
    Gauge, GaugeVec, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, Opts, Registry,
    TextEncoder, core::Collector, exponential_buckets,
};

use crate::metric::valid;

const LABELS: [&str; 1] = ["ip_family"];
/// Values of the label `ip_family`.
const FAMILIES: [&str; 2] = ["IPv4", "IPv6"];

/// The metrics of a service proxy. Cheap to clone.
#[derive(Clone, Default)]
pub(crate) struct ProxyMetrics(Arc<Families>);

struct Families {
    registry: Registry,
    transactions: [Histogram; FAMILIES.len()],
    failures: [IntCounter; FAMILIES.len()],
    queued: [Gauge; FAMILIES.len()],
    synced: [Gauge; FAMILIES.len()],
    programmed: [Histogram; FAMILIES.len()],
}

// === impl ProxyMetrics ===

impl ProxyMetrics {
    /// Records the start of a change.
    pub(crate) fn queued(&self, now: Timestamp) {
        self.0.queued.iter().for_each(|gauge| gauge.set(seconds(now)));
    }

    /// Counts a committed transaction.
    pub(crate) fn synced(&self, took: Duration, now: Timestamp) {
        self.0.transactions.iter().for_each(|histogram| histogram.observe(took.as_secs_f64()));
        self.0.synced.iter().for_each(|gauge| gauge.set(seconds(now)));
    }

    /// Counts a transaction that failed.
    pub(crate) fn failed(&self) {
        self.0.failures.iter().for_each(IntCounter::inc);
    }

    /// Counts changes of endpoints that are in the table now. `triggers` has the times of the changes.
    pub(crate) fn programmed(&self, triggers: &[Timestamp], now: Timestamp) {
        for trigger in triggers {
            // The clocks of machines differ: a negative duration counts as 0.
            let took = (seconds(now) - seconds(*trigger)).max(0.0);
            self.0.programmed.iter().for_each(|histogram| histogram.observe(took));
        }
    }

    /// All metrics in the text format of Prometheus.
    pub(crate) fn text(&self) -> String {
        // Writing to memory cannot fail, and each family has samples.
        TextEncoder::new().encode_to_string(&self.0.registry.gather()).unwrap_or_default()
    }
}

impl std::fmt::Debug for ProxyMetrics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ProxyMetrics").finish_non_exhaustive()
    }
}

/// Seconds since the epoch.
fn seconds(time: Timestamp) -> f64 {
    time.as_duration().as_secs_f64()
}

// === impl Families ===

impl Default for Families {
    fn default() -> Self {
        let registry = Registry::new();
        let transactions = histogram(
            &registry,
            "sync_proxy_rules_duration_seconds",
            valid(exponential_buckets(0.001, 2.0, 15)),
            "Duration of a transaction of the service proxy in seconds.",
        );
        let programmed = histogram(
            &registry,
            "network_programming_duration_seconds",
            programming_buckets(),
            "Seconds from the change of a pod or Service until its endpoints are in the table.",
        );
        let opts = options(
            "sync_proxy_rules_nftables_sync_failures_total",
            "Number of transactions of the service proxy that failed.",
        );
        let failures = registered(&registry, IntCounterVec::new(opts, &LABELS));
        let queued = gauge(
            &registry,
            "sync_proxy_rules_last_queued_timestamp_seconds",
            "Start of the last change, in seconds since the epoch.",
        );
        let synced = gauge(
            &registry,
            "sync_proxy_rules_last_timestamp_seconds",
            "Time of the last committed transaction, in seconds since the epoch.",
        );
        Self {
            transactions: FAMILIES.map(|family| transactions.with_label_values(&[family])),
            failures: FAMILIES.map(|family| failures.with_label_values(&[family])),
            queued: FAMILIES.map(|family| queued.with_label_values(&[family])),
            synced: FAMILIES.map(|family| synced.with_label_values(&[family])),
            programmed: FAMILIES.map(|family| programmed.with_label_values(&[family])),
            registry,
        }
    }
}

/// Bounds in seconds: 0.25 and 0.5, then whole seconds up to 59, steps of 5 up to 115, and steps of 30 up to 300.
fn programming_buckets() -> Vec<f64> {
    let seconds = (1..60).chain((60..120).step_by(5)).chain((120..=300).step_by(30));
    [0.25, 0.5].into_iter().chain(seconds.map(f64::from)).collect()
}

fn full(name: &str) -> String {
    format!("kubeproxy_{name}")
}

fn options(name: &str, help: &str) -> Opts {
    Opts::new(full(name), help)
}

fn histogram(registry: &Registry, name: &str, buckets: Vec<f64>, help: &str) -> HistogramVec {
    let opts = HistogramOpts::new(full(name), help).buckets(buckets);
    registered(registry, HistogramVec::new(opts, &LABELS))
}

fn gauge(registry: &Registry, name: &str, help: &str) -> GaugeVec {
    registered(registry, GaugeVec::new(options(name, help), &LABELS))
}

fn registered<C: Collector + Clone + 'static>(registry: &Registry, made: prometheus::Result<C>) -> C {
    let collector = valid(made);
    valid(registry.register(Box::new(collector.clone())));
    collector
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_have_the_names_types_labels_and_buckets_of_kube_proxy() {
        let metrics = ProxyMetrics::default();
        let time = |seconds| Timestamp::from_second(seconds).unwrap();
        metrics.queued(time(90));
        metrics.synced(Duration::from_millis(3), time(100));
        metrics.failed();
        metrics.programmed(&[time(98), time(30), time(200)], time(100));
        let text = metrics.text();
        for line in [
            "# TYPE kubeproxy_sync_proxy_rules_duration_seconds histogram",
            "kubeproxy_sync_proxy_rules_duration_seconds_bucket{ip_family=\"IPv4\",le=\"0.002\"} 0",
            "kubeproxy_sync_proxy_rules_duration_seconds_bucket{ip_family=\"IPv4\",le=\"0.004\"} 1",
            "kubeproxy_sync_proxy_rules_duration_seconds_count{ip_family=\"IPv6\"} 1",
            "kubeproxy_sync_proxy_rules_nftables_sync_failures_total{ip_family=\"IPv4\"} 1",
            "# TYPE kubeproxy_sync_proxy_rules_last_timestamp_seconds gauge",
            "kubeproxy_sync_proxy_rules_last_timestamp_seconds{ip_family=\"IPv4\"} 100",
            "kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds{ip_family=\"IPv6\"} 90",
            "# TYPE kubeproxy_network_programming_duration_seconds histogram",
            "kubeproxy_network_programming_duration_seconds_bucket{ip_family=\"IPv4\",le=\"0.25\"} 1",
            "kubeproxy_network_programming_duration_seconds_bucket{ip_family=\"IPv4\",le=\"2\"} 2",
            "kubeproxy_network_programming_duration_seconds_bucket{ip_family=\"IPv4\",le=\"65\"} 2",
            "kubeproxy_network_programming_duration_seconds_bucket{ip_family=\"IPv4\",le=\"70\"} 3",
            "kubeproxy_network_programming_duration_seconds_bucket{ip_family=\"IPv4\",le=\"300\"} 3",
        ] {
            assert!(text.lines().any(|other| other == line), "no {line} in\n{text}");
        }
        assert_eq!(programming_buckets().len(), 2 + 59 + 12 + 7);
    }
}

//! Makes and registers metrics.

use prometheus::core::Collector;
use prometheus::{
    Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry,
};

use super::valid;

/// Makes metrics of the subsystem `kubelet` and registers them.
pub(super) struct Registered<'a>(pub(super) &'a Registry);

// === impl Registered ===

impl Registered<'_> {
    pub(super) fn counter(&self, name: &str, help: &str) -> IntCounter {
        self.registered(valid(IntCounter::new(full(name), help)))
    }

    pub(super) fn gauge(&self, name: &str, help: &str) -> IntGauge {
        self.registered(valid(IntGauge::new(full(name), help)))
    }

    pub(super) fn gauges(&self, name: &str, help: &str, labels: &[&str]) -> IntGaugeVec {
        self.registered(valid(IntGaugeVec::new(Opts::new(full(name), help), labels)))
    }

    pub(super) fn counters(&self, name: &str, help: &str, labels: &[&str]) -> IntCounterVec {
        self.registered(valid(IntCounterVec::new(Opts::new(full(name), help), labels)))
    }

    pub(super) fn histogram(&self, (name, buckets): (&str, &[f64]), help: &str) -> Histogram {
        let opts = HistogramOpts::new(full(name), help).buckets(buckets.to_vec());
        self.registered(valid(Histogram::with_opts(opts)))
    }

    pub(super) fn histograms(
        &self,
        (name, buckets): (&str, &[f64]),
        help: &str,
        labels: &[&str],
    ) -> HistogramVec {
        let opts = HistogramOpts::new(full(name), help).buckets(buckets.to_vec());
        self.registered(valid(HistogramVec::new(opts, labels)))
    }

    fn registered<C: Collector + Clone + 'static>(&self, metric: C) -> C {
        valid(self.0.register(Box::new(metric.clone())));
        metric
    }
}

/// The name of a metric of the subsystem.
fn full(name: &str) -> String {
    format!("kubelet_{name}")
}

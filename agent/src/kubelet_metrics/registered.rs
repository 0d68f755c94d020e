//! Makes and registers metrics.

use prometheus::core::Collector;
use prometheus::{
    Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry,
};

use super::valid;

/// Makes metrics of the subsystem `kubelet` and registers them.
pub(super) struct Registered<'a>(pub(super) &'a Registry);

/// Makes histograms with the same buckets and registers them.
pub(super) struct Buckets<'a> {
    all: &'a Registered<'a>,
    /// Upper bounds of the buckets.
    bounds: &'a [f64],
}

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

    /// Makes histograms whose buckets have these upper bounds.
    pub(super) fn with_buckets<'b>(&'b self, bounds: &'b [f64]) -> Buckets<'b> {
        Buckets { all: self, bounds }
    }

    fn registered<C: Collector + Clone + 'static>(&self, metric: C) -> C {
        valid(self.0.register(Box::new(metric.clone())));
        metric
    }
}

// === impl Buckets ===

impl Buckets<'_> {
    pub(super) fn histogram(&self, name: &str, help: &str) -> Histogram {
        self.all.registered(valid(Histogram::with_opts(self.opts(name, help))))
    }

    pub(super) fn histograms(&self, name: &str, help: &str, labels: &[&str]) -> HistogramVec {
        self.all.registered(valid(HistogramVec::new(self.opts(name, help), labels)))
    }

    fn opts(&self, name: &str, help: &str) -> HistogramOpts {
        HistogramOpts::new(full(name), help).buckets(self.bounds.to_vec())
    }
}

/// The name of a metric of the subsystem.
fn full(name: &str) -> String {
    format!("kubelet_{name}")
}

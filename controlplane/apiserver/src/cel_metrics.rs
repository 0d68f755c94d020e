//! Durations of the rules of custom resources in CEL (`x-kubernetes-validations`). Source:
//! `k8s.io/apiserver/pkg/cel/metrics`.
//!
//! As upstream, expressions of other APIs are not measured. The histograms belong to the process, because a custom
//! resource does not know its server.

use std::{sync::LazyLock, time::Duration};

use prometheus::{Histogram, HistogramOpts, core::Collector};

static COMPILATIONS: LazyLock<Histogram> = LazyLock::new(|| {
    histogram("compilation", "Duration of the compilation of the rules of a schema in seconds.")
});
static EVALUATIONS: LazyLock<Histogram> = LazyLock::new(|| {
    histogram("evaluation", "Duration of the evaluation of the rules for an object in seconds.")
});

/// The histograms have the default buckets, as upstream.
fn histogram(work: &str, help: &str) -> Histogram {
    let options = HistogramOpts::new(format!("apiserver_cel_{work}_duration_seconds"), help);
    Histogram::with_opts(options).unwrap_or_else(|error| unreachable!("invalid metric: {error}"))
}

/// Counts the compilation of the rules of a schema.
pub(crate) fn compiled(took: Duration) {
    COMPILATIONS.observe(took.as_secs_f64());
}

/// Counts the evaluation of the rules for an object.
pub(crate) fn evaluated(took: Duration) {
    EVALUATIONS.observe(took.as_secs_f64());
}

pub(crate) fn collectors() -> [Box<dyn Collector>; 2] {
    [Box::new(COMPILATIONS.clone()), Box::new(EVALUATIONS.clone())]
}

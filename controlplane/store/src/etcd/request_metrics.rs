//! Counts and durations of the operations on etcd, by operation, group and resource. Source:
//! `apiserver/pkg/storage/etcd3/metrics`.
//!
//! The metrics belong to the process. The group and the resource are the first two segments of a key, which clients
//! cannot choose freely: only the definitions of resources add segments.

use std::{future::Future, sync::LazyLock, time::Instant};

use prometheus::{HistogramOpts, HistogramVec, IntCounterVec, Opts, core::Collector};

use crate::{Error, Expect, Write};

const LABELS: [&str; 3] = ["operation", "group", "resource"];
const OPERATIONS: [&str; 5] = [GET, LIST, CREATE, UPDATE, DELETE];
pub(super) const GET: &str = "get";
pub(super) const LIST: &str = "list";
const CREATE: &str = "create";
const UPDATE: &str = "update";
const DELETE: &str = "delete";

/// Buckets of durations, in seconds.
const BUCKETS: [f64; 23] = [
    0.005, 0.025, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 15.0,
    20.0, 30.0, 45.0, 60.0,
];

static DURATIONS: LazyLock<HistogramVec> = LazyLock::new(|| {
    let help = "Duration of the operations on etcd in seconds, by operation and resource.";
    let options = HistogramOpts::new("etcd_request_duration_seconds", help).buckets(BUCKETS.to_vec());
    valid(HistogramVec::new(options, &LABELS))
});
static REQUESTS: LazyLock<IntCounterVec> = LazyLock::new(|| {
    counter("etcd_requests_total", "Number of operations on etcd, by operation and resource.")
});
static ERRORS: LazyLock<IntCounterVec> = LazyLock::new(|| {
    counter("etcd_request_errors_total", "Number of failed operations on etcd, by operation and resource.")
});

fn counter(name: &str, help: &str) -> IntCounterVec {
    valid(IntCounterVec::new(Opts::new(name, help), &LABELS))
}

fn valid<T>(made: prometheus::Result<T>) -> T {
    made.unwrap_or_else(|error| unreachable!("invalid metric: {error}"))
}

/// The metrics of all operations on etcd in this process. They have no values without a store on etcd.
pub fn etcd_metrics() -> [Box<dyn Collector>; 3] {
    [Box::new(DURATIONS.clone()), Box::new(REQUESTS.clone()), Box::new(ERRORS.clone())]
}

/// Removes the counts of a resource that is not served any more.
pub fn forget_etcd_metrics(group: &str, resource: &str) {
    for operation in OPERATIONS {
        let labels = [operation, group, resource];
        // An error means that there are no such counts.
        let _ = DURATIONS.remove_label_values(&labels);
        let _ = REQUESTS.remove_label_values(&labels);
        let _ = ERRORS.remove_label_values(&labels);
    }
}

/// The operation of a write.
pub(super) fn of_write(write: &Write) -> &'static str {
    match (&write.value, write.expect) {
        (None, _) => DELETE,
        (Some(_), Expect::Absent) => CREATE,
        (Some(_), Expect::Revision(_)) => UPDATE,
    }
}

/// Runs an operation on a key or on a prefix of keys, and counts it.
pub(super) async fn measured<T>(
    operation: &str,
    key: &str,
    request: impl Future<Output = Result<T, Error>>,
) -> Result<T, Error> {
    let began = Instant::now();
    let outcome = request.await;
    let mut segments = key.split('/');
    let group = segments.next().unwrap_or_default();
    let labels = [operation, group, segments.next().unwrap_or_default()];
    DURATIONS.with_label_values(&labels).observe(began.elapsed().as_secs_f64());
    REQUESTS.with_label_values(&labels).inc();
    // As upstream, a condition that does not hold is no failure of etcd.
    if !matches!(outcome, Ok(_) | Err(Error::Conflict { .. } | Error::Guard { .. })) {
        ERRORS.with_label_values(&labels).inc();
    }
    outcome
}

#[cfg(test)]
mod tests {
    use std::future::ready;

    use super::*;

    #[tokio::test]
    async fn operations_are_counted_by_resource_until_it_is_removed() {
        let key = "metrics.example/cups/default/a";
        let unavailable = || Error::Unavailable { detail: String::new() };
        for outcome in [Ok(1), Err(Error::Conflict { found: None, at: 1 }), Err(unavailable())] {
            let is_ok = outcome.is_ok();
            assert_eq!(measured(GET, key, ready(outcome)).await.is_ok(), is_ok);
        }
        assert!(measured(LIST, "metrics.example/mugs/", ready(Err::<(), _>(unavailable()))).await.is_err());
        let of_cups = [GET, "metrics.example", "cups"];
        let counts =
            || (REQUESTS.with_label_values(&of_cups).get(), ERRORS.with_label_values(&of_cups).get());
        assert_eq!(counts(), (3, 1));
        assert_eq!(DURATIONS.with_label_values(&of_cups).get_sample_count(), 3);
        assert_eq!(ERRORS.with_label_values(&[LIST, "metrics.example", "mugs"]).get(), 1);
        forget_etcd_metrics("metrics.example", "cups");
        assert_eq!(counts(), (0, 0));
    }
}

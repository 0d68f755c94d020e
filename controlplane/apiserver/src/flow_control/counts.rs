//! Counters of flow schemas, for metrics.
//!
//! The histograms of a schema are looked up once. Afterwards a request changes only atomic numbers.

use std::{
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use prometheus::{Histogram, HistogramOpts, HistogramVec, core::Collector, proto::MetricFamily};

use super::level::Rejection;

/// Upper bounds of the buckets of waiting and execution times, in seconds, as upstream.
const BOUNDS: [f64; 13] = [0.0, 0.005, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 15.0, 30.0];
/// Values of the last label of the times in queues: whether the request got its seats.
const EXECUTED: [&str; 2] = ["false", "true"];
/// Values of the last label of the times of execution: whether the request is a watch.
const TYPES: [&str; 2] = ["regular", "watch"];

/// Histograms of the waiting and execution times of requests, by level and schema.
pub(super) struct Times {
    waits: HistogramVec,
    executions: HistogramVec,
}

/// Counters of one schema and level.
#[derive(Default)]
pub(super) struct Counts {
    dispatched: AtomicU64,
    rejected: [AtomicU64; Rejection::ALL.len()],
    waiting: Load,
    executing: Load,
    /// Times in the queue, in the order of [`EXECUTED`].
    waits: [OnceLock<Histogram>; EXECUTED.len()],
    /// Times of execution, in the order of [`TYPES`].
    executions: [OnceLock<Histogram>; TYPES.len()],
}

/// The current number of requests, and of their seats.
#[derive(Default)]
struct Load {
    requests: AtomicU64,
    seats: AtomicU64,
}

/// The counters of one schema for metrics.
pub(crate) struct SchemaCounts {
    pub(crate) schema: String,
    pub(crate) level: String,
    pub(crate) dispatched: u64,
    /// Number of rejections by reason.
    pub(crate) rejected: [(&'static str, u64); Rejection::ALL.len()],
    /// Requests in the queue, and the seats that they wait for.
    pub(crate) waiting: [u64; 2],
    /// Requests in execution, and their seats.
    pub(crate) executing: [u64; 2],
}

/// The names of a priority level and of a schema of this level.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Labels<'a> {
    pub(super) level: &'a str,
    pub(super) schema: &'a str,
}

/// A request in a queue. When this value is dropped, the request no longer counts as queued.
pub(super) struct Queued {
    counts: Arc<Counts>,
    seats: u64,
}

/// A request that has its seats. When this value is dropped, the request no longer counts as executing.
pub(super) struct Executing {
    counts: Arc<Counts>,
    seats: u64,
    started: Instant,
    times: Histogram,
}

// === impl Times ===

impl Times {
    pub(super) fn new() -> Self {
        let last = |label| ["priority_level", "flow_schema", label];
        Self {
            waits: histograms(
                "request_wait_duration_seconds",
                "Length of time a request spent waiting in its queue.",
                &last("execute"),
            ),
            executions: histograms(
                "request_execution_seconds",
                "Duration of the execution of a request, for a watch until its first events are collected.",
                &last("type"),
            ),
        }
    }

    /// Counts the time of a request in its queue.
    pub(super) fn waited(&self, counts: &Counts, labels: Labels<'_>, executed: bool, took: Duration) {
        let at = usize::from(executed);
        let Labels { level, schema } = labels;
        let times =
            counts.waits[at].get_or_init(|| self.waits.with_label_values(&[level, schema, EXECUTED[at]]));
        times.observe(took.as_secs_f64());
    }

    /// Counts a request that has received its seats.
    pub(super) fn execute(
        &self,
        counts: &Arc<Counts>,
        labels: Labels<'_>,
        is_watch: bool,
        seats: u64,
    ) -> Executing {
        let at = usize::from(is_watch);
        let Labels { level, schema } = labels;
        let times = counts.executions[at]
            .get_or_init(|| self.executions.with_label_values(&[level, schema, TYPES[at]]));
        counts.dispatched.fetch_add(1, Ordering::Relaxed);
        counts.executing.add(seats);
        Executing { counts: Arc::clone(counts), seats, started: Instant::now(), times: times.clone() }
    }

    /// Removes the histograms of a schema that does not exist any more.
    pub(super) fn forget(&self, labels: Labels<'_>) {
        let Labels { level, schema } = labels;
        for (times, values) in [(&self.waits, EXECUTED), (&self.executions, TYPES)] {
            for value in values {
                // An error means that no request was counted.
                let _ = times.remove_label_values(&[level, schema, value]);
            }
        }
    }

    pub(super) fn collect(&self) -> Vec<MetricFamily> {
        self.waits.collect().into_iter().chain(self.executions.collect()).collect()
    }
}

fn histograms(name: &str, help: &str, labels: &[&str]) -> HistogramVec {
    let options = HistogramOpts::new(format!("apiserver_flowcontrol_{name}"), help);
    let made = HistogramVec::new(options.buckets(BOUNDS.to_vec()), labels);
    made.unwrap_or_else(|error| unreachable!("invalid metric: {error}"))
}

// === impl Counts ===

impl Counts {
    pub(super) fn reject(&self, why: Rejection) {
        if let Some(count) = self.rejected.get(why as usize) {
            count.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Counts a request that waits in the queue.
    pub(super) fn queue(self: &Arc<Self>, seats: u64) -> Queued {
        self.waiting.add(seats);
        Queued { counts: Arc::clone(self), seats }
    }

    /// The current counts.
    pub(super) fn read(&self, labels: Labels<'_>) -> SchemaCounts {
        let Labels { level, schema } = labels;
        let rejected = Rejection::ALL.map(|why| {
            (why.name(), self.rejected.get(why as usize).map_or(0, |count| count.load(Ordering::Relaxed)))
        });
        SchemaCounts {
            schema: schema.to_owned(),
            level: level.to_owned(),
            dispatched: self.dispatched.load(Ordering::Relaxed),
            rejected,
            waiting: self.waiting.read(),
            executing: self.executing.read(),
        }
    }
}

// === impl Load ===

impl Load {
    fn add(&self, seats: u64) {
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.seats.fetch_add(seats, Ordering::Relaxed);
    }

    fn remove(&self, seats: u64) {
        self.requests.fetch_sub(1, Ordering::Relaxed);
        self.seats.fetch_sub(seats, Ordering::Relaxed);
    }

    fn read(&self) -> [u64; 2] {
        [&self.requests, &self.seats].map(|number| number.load(Ordering::Relaxed))
    }
}

// === impl Queued ===

impl Drop for Queued {
    fn drop(&mut self) {
        self.counts.waiting.remove(self.seats);
    }
}

// === impl Executing ===

impl Drop for Executing {
    fn drop(&mut self) {
        self.counts.executing.remove(self.seats);
        self.times.observe(self.started.elapsed().as_secs_f64());
    }
}

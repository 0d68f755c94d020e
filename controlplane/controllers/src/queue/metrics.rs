//! The metrics `workqueue_*` of the queues, in the text format of Prometheus.
//!
//! Source of names, help texts and buckets: `component-base/metrics/prometheus/workqueue`. The times of work in
//! progress are computed when the metrics are read, so an idle queue has no cost.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// Names of controllers, each with the name of its queue upstream. All other queues have the controller's name with
/// underscores.
const UPSTREAM: [(&str, &str); 22] = [
    ("replica-set", "replicaset"),
    ("replication-controller", "replicationmanager"),
    ("stateful-set", "statefulset"),
    ("daemon-set", "daemonset"),
    ("job-orphan", "job_orphan_pod"),
    ("cron-job", "cronjob"),
    ("ttl-after-finished", "ttl_jobs_to_delete"),
    ("service-account", "serviceaccount"),
    ("root-ca", "root_ca_cert_publisher"),
    ("account-token", "serviceaccount_tokens_secret"),
    ("endpoints", "endpoint"),
    ("ip-address", "ipaddresses"),
    ("bootstrap-signer", "bootstrap_signer_queue"),
    ("taint-eviction", "noexec_taint_pod"),
    ("stale-disruption", "stale_pod_disruption"),
    ("cluster-role-aggregation", "ClusterRoleAggregator"),
    ("attributes-class-protection", "vacprotection"),
    ("pod-group-protection", "podgroupprotection"),
    ("horizontal-pod-autoscaler", "horizontalpodautoscaler"),
    ("node-lifecycle", "node_lifecycle_controller"),
    ("garbage", "garbage_collector_attempt_to_delete"),
    ("garbage-orphan", "garbage_collector_attempt_to_orphan"),
];

/// Upper bounds of the buckets: nanoseconds, and seconds as text.
const BUCKETS: [(u128, &str); 10] = [
    (10, "1e-08"),
    (100, "1e-07"),
    (1_000, "1e-06"),
    (10_000, "1e-05"),
    (100_000, "0.0001"),
    (1_000_000, "0.001"),
    (10_000_000, "0.01"),
    (100_000_000, "0.1"),
    (1_000_000_000, "1"),
    (10_000_000_000, "10"),
];

/// The metrics of all queues. A clone shares them.
#[derive(Clone, Debug, Default)]
pub struct QueueMetrics(Arc<Mutex<BTreeMap<String, Arc<QueueMeter>>>>);

/// Counts the work of one queue.
#[derive(Debug, Default)]
pub(crate) struct QueueMeter(Mutex<Counts>);

#[derive(Debug, Default)]
struct Counts {
    depth: u64,
    adds: u64,
    retries: u64,
    waits: Histogram,
    works: Histogram,
    /// Start times of the work in progress, by a running number.
    running: BTreeMap<u64, Instant>,
    next: u64,
}

#[derive(Clone, Debug, Default)]
struct Histogram {
    /// Number of durations up to each bound of [`BUCKETS`].
    buckets: [u64; BUCKETS.len()],
    count: u64,
    sum: Duration,
}

/// A guard for work in progress. The work ends when the guard is dropped.
pub(super) struct Running<'a> {
    meter: &'a QueueMeter,
    number: u64,
}

/// The state of a queue at one time.
struct Reading {
    name: String,
    depth: u64,
    adds: u64,
    retries: u64,
    waits: Histogram,
    works: Histogram,
    /// Durations of the work in progress.
    running: Vec<Duration>,
}

// === impl QueueMetrics ===

impl QueueMetrics {
    /// The meter of a controller's queue. A new queue of the same controller continues the counts.
    pub(crate) fn of(&self, controller: &str) -> Arc<QueueMeter> {
        let upstream =
            UPSTREAM.iter().find(|(own, _)| *own == controller).map(|(_, name)| (*name).to_owned());
        let name = upstream.unwrap_or_else(|| controller.replace('-', "_"));
        let meter = self.lock().entry(name).or_default().clone();
        meter.lock().depth = 0;
        meter
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Arc<QueueMeter>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All metrics in the text format of Prometheus. Empty if no controller has run yet.
    #[must_use]
    pub fn text(&self) -> String {
        let now = Instant::now();
        let all: Vec<Reading> = self.lock().iter().map(|(name, meter)| meter.read(name, now)).collect();
        let mut text = String::new();
        let longest = |one: &Reading| seconds(one.running.iter().max().copied().unwrap_or_default());
        let head = Head { name: "depth", kind: "gauge", help: "Number of queued keys." };
        push(&mut text, head, &all, |one| one.depth.to_string());
        let help = "Number of keys that were added.";
        push(&mut text, Head { name: "adds_total", kind: "counter", help }, &all, |one| one.adds.to_string());
        let help = "Number of keys that were added with a delay.";
        push(&mut text, Head { name: "retries_total", kind: "counter", help }, &all, |one| {
            one.retries.to_string()
        });
        let help = "Sum of the durations of the work in progress in seconds.";
        let head = Head { name: "unfinished_work_seconds", kind: "gauge", help };
        push(&mut text, head, &all, |one| seconds(one.running.iter().sum()));
        let help = "Duration of the longest work in progress in seconds.";
        let head = Head { name: "longest_running_processor_seconds", kind: "gauge", help };
        push(&mut text, head, &all, longest);
        let help = "Seconds that a key waits in the queue.";
        let head = Head { name: "queue_duration_seconds", kind: "histogram", help };
        push_histograms(&mut text, head, &all, |one| &one.waits);
        let help = "Seconds that the work on a key takes.";
        let head = Head { name: "work_duration_seconds", kind: "histogram", help };
        push_histograms(&mut text, head, &all, |one| &one.works);
        text
    }
}

fn seconds(duration: Duration) -> String {
    duration.as_secs_f64().to_string()
}

/// The lines HELP and TYPE of a metric. The name lacks the prefix `workqueue_`.
#[derive(Clone, Copy)]
struct Head<'a> {
    name: &'a str,
    kind: &'a str,
    help: &'a str,
}

fn push_head(text: &mut String, head: Head<'_>) {
    let Head { name, kind, help } = head;
    // Writing to memory cannot fail.
    let _ = writeln!(text, "# HELP workqueue_{name} {help}\n# TYPE workqueue_{name} {kind}");
}

fn push(text: &mut String, head: Head<'_>, all: &[Reading], value: impl Fn(&Reading) -> String) {
    if !all.is_empty() {
        push_head(text, head);
    }
    for one in all {
        let _ = writeln!(text, "workqueue_{}{{name=\"{}\"}} {}", head.name, one.name, value(one));
    }
}

fn push_histograms(
    text: &mut String,
    head: Head<'_>,
    all: &[Reading],
    histogram: impl Fn(&Reading) -> &Histogram,
) {
    if !all.is_empty() {
        push_head(text, head);
    }
    let metric = head.name;
    for one in all {
        let (name, found) = (&one.name, histogram(one));
        for ((_, bound), count) in BUCKETS.iter().zip(found.buckets) {
            let _ = writeln!(text, "workqueue_{metric}_bucket{{name=\"{name}\",le=\"{bound}\"}} {count}");
        }
        let (count, sum) = (found.count, seconds(found.sum));
        let _ = writeln!(text, "workqueue_{metric}_bucket{{name=\"{name}\",le=\"+Inf\"}} {count}");
        let _ = writeln!(text, "workqueue_{metric}_sum{{name=\"{name}\"}} {sum}");
        let _ = writeln!(text, "workqueue_{metric}_count{{name=\"{name}\"}} {count}");
    }
}

// === impl QueueMeter ===

impl QueueMeter {
    fn lock(&self) -> MutexGuard<'_, Counts> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn read(&self, name: &str, now: Instant) -> Reading {
        let counts = self.lock();
        Reading {
            name: name.to_owned(),
            depth: counts.depth,
            adds: counts.adds,
            retries: counts.retries,
            waits: counts.waits.clone(),
            works: counts.works.clone(),
            running: counts.running.values().map(|start| now.saturating_duration_since(*start)).collect(),
        }
    }

    /// Counts a new key in the queue.
    pub(super) fn added(&self) {
        let mut counts = self.lock();
        counts.adds += 1;
        counts.depth += 1;
    }

    /// Counts a key that a worker takes after a wait in the queue.
    pub(super) fn taken(&self, waited: Duration) {
        let mut counts = self.lock();
        counts.depth = counts.depth.saturating_sub(1);
        counts.waits.observe(waited);
    }

    /// Counts a key that is added after a delay.
    pub(super) fn retried(&self) {
        self.lock().retries += 1;
    }

    /// Begins the work on a key.
    pub(super) fn begin(&self) -> Running<'_> {
        let mut counts = self.lock();
        counts.next += 1;
        let number = counts.next;
        counts.running.insert(number, Instant::now());
        Running { meter: self, number }
    }
}

// === impl Histogram ===

impl Histogram {
    fn observe(&mut self, took: Duration) {
        let nanoseconds = took.as_nanos();
        for (count, (bound, _)) in self.buckets.iter_mut().zip(BUCKETS) {
            *count += u64::from(nanoseconds <= bound);
        }
        self.count += 1;
        self.sum = self.sum.saturating_add(took);
    }
}

// === impl Running ===

impl Drop for Running<'_> {
    fn drop(&mut self) {
        let mut counts = self.meter.lock();
        if let Some(start) = counts.running.remove(&self.number) {
            counts.works.observe(start.elapsed());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::queue::{Next, Queue};

    /// The value of a metric of the queue `replicaset`, with further labels.
    fn value(metrics: &QueueMetrics, name: &str, more: &str) -> f64 {
        let (text, start) = (metrics.text(), format!("workqueue_{name}{{name=\"replicaset\"{more}}} "));
        let mut values = text.lines().filter_map(|line| line.strip_prefix(&start));
        values.next().unwrap_or_else(|| panic!("no {start}: {text}")).parse().unwrap()
    }

    /// The paused clock moves only while all tasks wait for a timer.
    #[tokio::test(start_paused = true)]
    async fn waits_work_and_retries_of_a_queue_are_measured() {
        let metrics = QueueMetrics::default();
        assert_eq!(metrics.text(), "");
        let queue = Queue::measured(metrics.of("replica-set"));
        queue.add("a");
        queue.add("a");
        queue.add("b");
        let of = |name: &str| value(&metrics, name, "");
        assert_eq!((of("depth"), of("adds_total"), of("queue_duration_seconds_count")), (2.0, 2.0, 0.0));
        tokio::time::sleep(Duration::from_millis(50)).await;
        let work = queue.work("test", |key| async move {
            tokio::time::sleep(Duration::from_secs(if key == "a" { 5 } else { 20 })).await;
            Ok(if key == "a" { Next::After(Duration::from_secs(3600)) } else { Next::Wait })
        });
        let watch = async {
            tokio::time::sleep(Duration::from_secs(2)).await;
            queue.add("a");
            assert_eq!((of("depth"), of("adds_total")), (2.0, 3.0), "again while a worker handles it");
            for name in ["unfinished_work_seconds", "longest_running_processor_seconds"] {
                assert!((2.0..2.1).contains(&of(name)), "{name}: {}", of(name));
            }
            tokio::time::sleep(Duration::from_secs(100)).await;
        };
        tokio::select! {
            () = work => unreachable!("work has no end"),
            () = watch => {}
        }
        assert_eq!((of("depth"), of("adds_total"), of("retries_total")), (0.0, 3.0, 2.0));
        assert_eq!((of("unfinished_work_seconds"), of("longest_running_processor_seconds")), (0.0, 0.0));
        assert_eq!((of("work_duration_seconds_count"), of("queue_duration_seconds_count")), (3.0, 3.0));
        let bucket = |name: &str, bound: &str| value(&metrics, name, &format!(",le=\"{bound}\""));
        assert_eq!(bucket("work_duration_seconds_bucket", "1"), 0.0);
        assert_eq!(bucket("work_duration_seconds_bucket", "10"), 2.0);
        assert_eq!(bucket("work_duration_seconds_bucket", "+Inf"), 3.0);
        assert_eq!(bucket("queue_duration_seconds_bucket", "0.1"), 1.0);
        assert!(of("work_duration_seconds_sum") >= 30.0);
    }

    #[test]
    fn a_queue_of_a_new_term_continues_the_counts_without_the_former_keys() {
        let metrics = QueueMetrics::default();
        Queue::measured(metrics.of("replica-set")).add("a");
        Queue::measured(metrics.of("replica-set")).add("a");
        assert_eq!((value(&metrics, "depth", ""), value(&metrics, "adds_total", "")), (1.0, 2.0));
        metrics.of("pod-gc");
        let text = metrics.text();
        assert!(text.contains("workqueue_depth{name=\"pod_gc\"} 0\n"), "{text}");
        assert!(text.contains("# TYPE workqueue_queue_duration_seconds histogram\n"), "{text}");
    }
}

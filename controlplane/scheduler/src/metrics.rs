//! The metrics `scheduler_*`, in the text format of Prometheus.
//!
//! Source of names, labels and buckets: `pkg/scheduler/metrics/metrics.go`. Events are counted as they occur, and the
//! lengths of the queue are set after each event, so an idle scheduler does no work. The label `profile` has names of
//! the configuration; all other labels have values of fixed sets.

use std::collections::BTreeSet;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use prometheus::{
    Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry,
    TextEncoder, core::Collector, exponential_buckets,
};
use tokio::time::Instant;

/// All attempts for a pod from this number on share one label.
const MANY_ATTEMPTS: u32 = 15;
/// Names of the queue's states, in the order of [`QueueLengths`].
const QUEUES: [&str; 4] = ["active", "backoff", "unschedulable", "gated"];

/// The metrics of a scheduler. A clone shares them.
#[derive(Clone, Default)]
pub struct SchedulerMetrics(Arc<Families>);

struct Families {
    registry: Registry,
    attempts: IntCounterVec,
    attempt_durations: HistogramVec,
    algorithm: Histogram,
    extension_points: HistogramVec,
    pod_attempts: Histogram,
    pod_durations: HistogramVec,
    preemptions: IntCounter,
    victims: Histogram,
    incoming: IntCounterVec,
    /// Refused pods by plugin and profile.
    unschedulable: IntGaugeVec,
    /// Number of running tasks, in the order of [`Operation`].
    tasks: [IntGauge; 2],
    permit_waits: HistogramVec,
    evaluations: IntCounterVec,
    /// Pods in each of [`QUEUES`].
    pending: [IntGauge; QUEUES.len()],
}

/// The result of an attempt to schedule a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AttemptResult {
    Scheduled,
    Unschedulable,
    Error,
}

/// A step of an attempt that is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ExtensionPoint {
    PreFilter,
    Filter,
    PostFilter,
    Score,
    Reserve,
    PreBind,
    Bind,
}

/// A queue of pods that wait for an attempt. As upstream, gated pods count as unschedulable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum QueueName {
    Active,
    Backoff,
    Unschedulable,
}

/// The current attempt to schedule a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Attempt {
    pub(crate) started: Instant,
    /// Start of the first attempt for the pod.
    pub(crate) first_started: Instant,
    /// Number of attempts so far, with this one.
    pub(crate) number: u32,
}

/// The work of a task of the scheduler.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Operation {
    /// Binding of a pod, including the wait for its volumes and devices.
    Binding,
    /// Scoring of nodes by an extender.
    PrioritizingExtender,
}

/// A plugin and the number of its evaluations.
pub(crate) type Evaluation = (&'static str, u64);

/// A task in the metric of running tasks. Dropping it removes the task from the metric.
pub(crate) struct RunningTask(IntGauge);

/// A refused pod in the metric of unschedulable pods. Dropping it removes the pod from the metric.
pub(crate) struct RefusedPod(Vec<IntGauge>);

/// The numbers of pods in the queue by their state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct QueueLengths {
    pub(crate) active: usize,
    pub(crate) backoff: usize,
    pub(crate) unschedulable: usize,
    pub(crate) gated: usize,
}

// === impl SchedulerMetrics ===

impl SchedulerMetrics {
    /// Counts an attempt by its result. `profile` is the name of a profile of the configuration.
    pub(crate) fn attempted(&self, result: AttemptResult, profile: &str, took: Duration) {
        let labels = [result.name(), profile];
        self.0.attempts.with_label_values(&labels).inc();
        self.0.attempt_durations.with_label_values(&labels).observe(took.as_secs_f64());
    }

    /// Counts a pod that was bound.
    pub(crate) fn pod_scheduled(&self, attempt: &Attempt) {
        self.0.pod_attempts.observe(f64::from(attempt.number));
        let number = match attempt.number {
            MANY_ATTEMPTS.. => format!("{MANY_ATTEMPTS}+"),
            number => number.to_string(),
        };
        let took = attempt.first_started.elapsed();
        self.0.pod_durations.with_label_values(&[number.as_str()]).observe(took.as_secs_f64());
    }

    /// Records the duration of a search for the node of a pod, including preemption.
    pub(crate) fn searched(&self, took: Duration) {
        self.0.algorithm.observe(took.as_secs_f64());
    }

    /// Records the result of an extension point's plugins for a pod of a profile, and their duration from `start`
    /// until now.
    pub(crate) fn ran(&self, point: ExtensionPoint, result: AttemptResult, profile: &str, start: Instant) {
        let status = match (point, result) {
            // A pre-filter refuses a pod for reasons that preemption does not resolve.
            (ExtensionPoint::PreFilter, AttemptResult::Unschedulable) => "UnschedulableAndUnresolvable",
            _ => result.status(),
        };
        let labels = [point.name(), status, profile];
        self.0.extension_points.with_label_values(&labels).observe(start.elapsed().as_secs_f64());
    }

    /// Runs the plugins of an extension point for a pod of a profile, and records their result and duration.
    pub(crate) async fn measure<T, E>(
        &self,
        point: ExtensionPoint,
        profile: &str,
        work: impl Future<Output = Result<T, E>>,
    ) -> Result<T, E> {
        let start = Instant::now();
        let result = work.await;
        self.ran(point, AttemptResult::of(&result), profile, start);
        result
    }

    /// Counts a search for pods to preempt.
    pub(crate) fn preemption_attempted(&self) {
        self.0.preemptions.inc();
    }

    /// Counts the victims of a preemption.
    pub(crate) fn preempted(&self, victims: usize) {
        #[expect(clippy::cast_precision_loss, reason = "a node has less than 2^53 pods")]
        self.0.victims.observe(victims as f64);
    }

    /// Counts a pod that is added to a queue because of an event.
    pub(crate) fn pod_queued(&self, queue: QueueName, event: &'static str) {
        self.0.incoming.with_label_values(&[queue.name(), event]).inc();
    }

    /// Counts a pod as unschedulable because of these plugins, until the result is dropped.
    pub(crate) fn refused(&self, plugins: &BTreeSet<&'static str>, profile: &str) -> RefusedPod {
        let gauges = plugins.iter().map(|plugin| {
            let gauge = self.0.unschedulable.with_label_values(&[*plugin, profile]);
            gauge.inc();
            gauge
        });
        RefusedPod(gauges.collect())
    }

    /// Counts a running task. The task counts until the caller drops the returned value.
    pub(crate) fn running(&self, operation: Operation) -> RunningTask {
        let [binding, prioritizing] = &self.0.tasks;
        let gauge = match operation {
            Operation::Binding => binding,
            Operation::PrioritizingExtender => prioritizing,
        };
        gauge.inc();
        RunningTask(gauge.clone())
    }

    /// Records the time from the reservation of a node for a pod until the decision about its gang. In upstream, the
    /// pods of a gang wait for it in the extension point Permit.
    pub(crate) fn waited_for_gang(&self, result: AttemptResult, wait: Duration) {
        self.0.permit_waits.with_label_values(&[result.status()]).observe(wait.as_secs_f64());
    }

    /// Counts the evaluations of plugins at an extension point, for a pod with this profile.
    pub(crate) fn evaluated(&self, point: ExtensionPoint, evaluations: &[Evaluation], profile: &str) {
        for (plugin, count) in evaluations {
            self.0.evaluations.with_label_values(&[*plugin, point.name(), profile]).inc_by(*count);
        }
    }

    /// Sets the lengths of the queue.
    pub(crate) fn set_pending(&self, lengths: QueueLengths) {
        let QueueLengths { active, backoff, unschedulable, gated } = lengths;
        for (gauge, length) in self.0.pending.iter().zip([active, backoff, unschedulable, gated]) {
            gauge.set(i64::try_from(length).unwrap_or(i64::MAX));
        }
    }

    /// All metrics in the text format of Prometheus.
    #[must_use]
    pub fn text(&self) -> String {
        let mut families = self.0.registry.gather();
        // The encoder refuses a family without samples.
        families.retain(|family| !family.get_metric().is_empty());
        // Writing to memory cannot fail.
        TextEncoder::new().encode_to_string(&families).unwrap_or_default()
    }
}

impl std::fmt::Debug for SchedulerMetrics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SchedulerMetrics").finish_non_exhaustive()
    }
}

/// All metrics are equal: configurations that differ only in their metrics are equal.
impl PartialEq for SchedulerMetrics {
    fn eq(&self, _other: &Self) -> bool {
        true
    }
}

// === impl Families ===

impl Default for Families {
    fn default() -> Self {
        let registry = Registry::new();
        let all = Registrar(&registry);
        let attempt_labels = ["result", "profile"];
        let pending =
            all.gauges("pending_pods", "Number of pods without a node, by their queue.", &["queue"]);
        Self {
            attempts: all.counters(
                "schedule_attempts_total",
                "Number of attempts to schedule pods, by the result. error: the scheduler or a request failed.",
                &attempt_labels,
            ),
            attempt_durations: all.histograms(
                "scheduling_attempt_duration_seconds",
                Buckets { first: 0.001, count: 15 },
                "Duration of an attempt in seconds, with the binding.",
                &attempt_labels,
            ),
            algorithm: all.histogram(
                "scheduling_algorithm_duration_seconds",
                Buckets { first: 0.001, count: 15 },
                "Duration of the search for a node in seconds.",
            ),
            extension_points: all.histograms(
                "framework_extension_point_duration_seconds",
                Buckets { first: 0.0001, count: 12 },
                "Duration of all plugins of an extension point in seconds.",
                &["extension_point", "status", "profile"],
            ),
            pod_attempts: all.histogram(
                "pod_scheduling_attempts",
                Buckets { first: 1.0, count: 5 },
                "Number of attempts until a pod is bound.",
            ),
            pod_durations: all.histograms(
                "pod_scheduling_sli_duration_seconds",
                Buckets { first: 0.01, count: 20 },
                "Seconds from the first attempt for a pod until it is bound.",
                &["attempts"],
            ),
            preemptions: all.counter("preemption_attempts_total", "Number of searches for pods to preempt."),
            victims: all.histogram(
                "preemption_victims",
                Buckets { first: 1.0, count: 7 },
                "Number of preempted pods.",
            ),
            incoming: all.counters(
                "queue_incoming_pods_total",
                "Number of pods that were added to a queue, by the queue and the event.",
                &["queue", "event"],
            ),
            unschedulable: all.unschedulable(),
            pending: QUEUES.map(|queue| pending.with_label_values(&[queue])),
            tasks: all.tasks(),
            permit_waits: all.permit_waits(),
            evaluations: all.evaluations(),
            registry,
        }
    }
}

/// Creates metrics in a registry.
struct Registrar<'a>(&'a Registry);

/// The bounds of a histogram's buckets. Each bound is twice the previous bound.
struct Buckets {
    first: f64,
    count: usize,
}

impl Registrar<'_> {
    fn add<T: Collector + Clone + 'static>(&self, made: prometheus::Result<T>) -> T {
        let collector = valid(made);
        valid(self.0.register(Box::new(collector.clone())));
        collector
    }

    fn tasks(&self) -> [IntGauge; 2] {
        let tasks = self.gauges("goroutines", "Number of running tasks, by operation.", &["operation"]);
        ["binding", "prioritizing_extender"].map(|operation| tasks.with_label_values(&[operation]))
    }

    fn unschedulable(&self) -> IntGaugeVec {
        self.gauges(
            "unschedulable_pods",
            "Number of unschedulable pods, by the plugins that refused them. A pod counts for each of its plugins.",
            &["plugin", "profile"],
        )
    }

    fn permit_waits(&self) -> HistogramVec {
        self.histograms(
            "permit_wait_duration_seconds",
            Buckets { first: 0.001, count: 15 },
            "Seconds from the reservation of a node for a pod of a gang until the gang is decided.",
            &["result"],
        )
    }

    fn evaluations(&self) -> IntCounterVec {
        self.counters(
            "plugin_evaluation_total",
            "Number of evaluations of a plugin, by the extension point. Equal pods share evaluations.",
            &["plugin", "extension_point", "profile"],
        )
    }

    fn counter(&self, name: &str, help: &str) -> IntCounter {
        self.add(IntCounter::new(full(name), help))
    }

    fn counters(&self, name: &str, help: &str, labels: &[&str]) -> IntCounterVec {
        self.add(IntCounterVec::new(Opts::new(full(name), help), labels))
    }

    fn gauges(&self, name: &str, help: &str, labels: &[&str]) -> IntGaugeVec {
        self.add(IntGaugeVec::new(Opts::new(full(name), help), labels))
    }

    fn histogram(&self, name: &str, buckets: Buckets, help: &str) -> Histogram {
        self.add(Histogram::with_opts(options(name, buckets, help)))
    }

    fn histograms(&self, name: &str, buckets: Buckets, help: &str, labels: &[&str]) -> HistogramVec {
        self.add(HistogramVec::new(options(name, buckets, help), labels))
    }
}

fn full(name: &str) -> String {
    format!("scheduler_{name}")
}

fn options(name: &str, Buckets { first, count }: Buckets, help: &str) -> HistogramOpts {
    HistogramOpts::new(full(name), help).buckets(valid(exponential_buckets(first, 2.0, count)))
}

/// Unwraps a result that is an error only if a metric in this file is invalid.
fn valid<T>(made: prometheus::Result<T>) -> T {
    made.unwrap_or_else(|error| unreachable!("invalid metric: {error}"))
}

// === impl AttemptResult ===

impl AttemptResult {
    fn name(self) -> &'static str {
        match self {
            Self::Scheduled => "scheduled",
            Self::Unschedulable => "unschedulable",
            Self::Error => "error",
        }
    }

    /// The status of plugins with this result.
    fn status(self) -> &'static str {
        match self {
            Self::Scheduled => "Success",
            Self::Unschedulable => "Unschedulable",
            Self::Error => "Error",
        }
    }

    /// The result of plugins that succeed or fail.
    pub(crate) fn of<T, E>(result: &Result<T, E>) -> Self {
        if result.is_ok() { Self::Scheduled } else { Self::Error }
    }
}

// === impl RunningTask ===

impl Drop for RunningTask {
    fn drop(&mut self) {
        self.0.dec();
    }
}

// === impl RefusedPod ===

impl Drop for RefusedPod {
    fn drop(&mut self) {
        self.0.iter().for_each(IntGauge::dec);
    }
}

// === impl QueueName ===

impl QueueName {
    fn name(self) -> &'static str {
        match self {
            Self::Active => "active",
            Self::Backoff => "backoff",
            Self::Unschedulable => "unschedulable",
        }
    }
}

// === impl ExtensionPoint ===

impl ExtensionPoint {
    fn name(self) -> &'static str {
        match self {
            Self::PreFilter => "PreFilter",
            Self::Filter => "Filter",
            Self::PostFilter => "PostFilter",
            Self::Score => "Score",
            Self::Reserve => "Reserve",
            Self::PreBind => "PreBind",
            Self::Bind => "Bind",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn metrics_have_the_names_types_labels_and_buckets_of_kube_scheduler() {
        let metrics = SchedulerMetrics::default();
        let first_started = Instant::now();
        tokio::time::advance(Duration::from_secs(5)).await;
        metrics.attempted(AttemptResult::Unschedulable, "default-scheduler", Duration::from_millis(3));
        metrics.pod_scheduled(&Attempt { started: Instant::now(), first_started, number: 2 });
        metrics.pod_scheduled(&Attempt { started: Instant::now(), first_started, number: 99 });
        metrics.searched(Duration::from_millis(2));
        metrics.ran(ExtensionPoint::Bind, AttemptResult::Error, "p", first_started);
        metrics.preemption_attempted();
        metrics.preempted(3);
        metrics.pod_queued(QueueName::Backoff, "ScheduleAttemptFailure");
        metrics.set_pending(QueueLengths { active: 4, backoff: 3, unschedulable: 2, gated: 1 });
        metrics.waited_for_gang(AttemptResult::Scheduled, Duration::from_millis(3));
        metrics.evaluated(ExtensionPoint::Filter, &[("NodeName", 2), ("NodePorts", 1)], "p");
        metrics.evaluated(ExtensionPoint::Filter, &[("NodeName", 3)], "p");
        let text = metrics.text();
        for line in [
            "# TYPE scheduler_schedule_attempts_total counter",
            "scheduler_schedule_attempts_total{profile=\"default-scheduler\",result=\"unschedulable\"} 1",
            "# TYPE scheduler_scheduling_attempt_duration_seconds histogram",
            "scheduler_scheduling_attempt_duration_seconds_bucket{profile=\"default-scheduler\",result=\"unschedulable\",le=\"0.002\"} 0",
            "scheduler_scheduling_attempt_duration_seconds_bucket{profile=\"default-scheduler\",result=\"unschedulable\",le=\"0.004\"} 1",
            "scheduler_scheduling_algorithm_duration_seconds_bucket{le=\"16.384\"} 1",
            "scheduler_framework_extension_point_duration_seconds_count{extension_point=\"Bind\",profile=\"p\",status=\"Error\"} 1",
            "scheduler_pod_scheduling_attempts_bucket{le=\"2\"} 1",
            "scheduler_pod_scheduling_attempts_bucket{le=\"16\"} 1",
            "scheduler_pod_scheduling_sli_duration_seconds_bucket{attempts=\"2\",le=\"2.56\"} 0",
            "scheduler_pod_scheduling_sli_duration_seconds_bucket{attempts=\"2\",le=\"5.12\"} 1",
            "scheduler_pod_scheduling_sli_duration_seconds_count{attempts=\"15+\"} 1",
            "scheduler_preemption_attempts_total 1",
            "scheduler_preemption_victims_bucket{le=\"4\"} 1",
            "# TYPE scheduler_queue_incoming_pods_total counter",
            "scheduler_queue_incoming_pods_total{event=\"ScheduleAttemptFailure\",queue=\"backoff\"} 1",
            "# TYPE scheduler_pending_pods gauge",
            "scheduler_pending_pods{queue=\"active\"} 4",
            "scheduler_pending_pods{queue=\"backoff\"} 3",
            "scheduler_pending_pods{queue=\"unschedulable\"} 2",
            "scheduler_pending_pods{queue=\"gated\"} 1",
            "# TYPE scheduler_permit_wait_duration_seconds histogram",
            "scheduler_permit_wait_duration_seconds_bucket{result=\"Success\",le=\"0.002\"} 0",
            "scheduler_permit_wait_duration_seconds_bucket{result=\"Success\",le=\"0.004\"} 1",
            "scheduler_permit_wait_duration_seconds_bucket{result=\"Success\",le=\"16.384\"} 1",
            "# TYPE scheduler_plugin_evaluation_total counter",
            "scheduler_plugin_evaluation_total{extension_point=\"Filter\",plugin=\"NodeName\",profile=\"p\"} 5",
            "scheduler_plugin_evaluation_total{extension_point=\"Filter\",plugin=\"NodePorts\",profile=\"p\"} 1",
        ] {
            assert!(text.lines().any(|other| other == line), "no {line} in\n{text}");
        }
    }

    #[test]
    fn a_refused_pod_counts_for_each_plugin_until_it_is_dropped() {
        let metrics = SchedulerMetrics::default();
        let line = |plugin: &str, count: u8| {
            format!("scheduler_unschedulable_pods{{plugin=\"{plugin}\",profile=\"p\"}} {count}\n")
        };
        let one = metrics.refused(&["NodeAffinity", "NodePorts"].into(), "p");
        let other = metrics.refused(&["NodePorts"].into(), "p");
        let text = metrics.text();
        assert!(text.contains(&line("NodeAffinity", 1)) && text.contains(&line("NodePorts", 2)), "{text}");
        assert!(text.contains("# TYPE scheduler_unschedulable_pods gauge\n"));
        drop((one, other));
        let text = metrics.text();
        assert!(text.contains(&line("NodeAffinity", 0)) && text.contains(&line("NodePorts", 0)), "{text}");
    }

    #[test]
    fn a_task_counts_until_it_is_dropped() {
        let metrics = SchedulerMetrics::default();
        let line = |operation: &str, count: u8| {
            format!("scheduler_goroutines{{operation=\"{operation}\"}} {count}\n")
        };
        let running = [Operation::Binding, Operation::Binding, Operation::PrioritizingExtender]
            .map(|operation| metrics.running(operation));
        let text = metrics.text();
        assert!(text.contains("# TYPE scheduler_goroutines gauge\n"), "{text}");
        assert!(
            text.contains(&line("binding", 2)) && text.contains(&line("prioritizing_extender", 1)),
            "{text}"
        );
        drop(running);
        let text = metrics.text();
        assert!(
            text.contains(&line("binding", 0)) && text.contains(&line("prioritizing_extender", 0)),
            "{text}"
        );
    }

    #[test]
    fn the_queues_are_shown_before_the_first_pod() {
        let text = SchedulerMetrics::default().text();
        assert!(text.contains("scheduler_pending_pods{queue=\"active\"} 0\n"), "{text}");
        assert!(!text.contains("scheduler_schedule_attempts_total"), "{text}");
    }
}

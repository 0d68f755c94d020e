//! Counts attempts to schedule pods.

use super::Scheduler;
use crate::config::Profile;
use crate::decide::{Unschedulable, decide_measured};
use crate::groups::placement::Outcome;
use crate::metrics::{Attempt, AttemptResult, Evaluation};
use crate::object::Pod;
use coracle_values::object::ObjectExt;

impl Scheduler {
    /// Sets the metrics of the queue's lengths.
    pub(super) fn measure_queue(&self) {
        self.config.metrics.set_pending(self.queue.lengths());
    }

    /// Searches the best node for a pod.
    pub(super) fn search(&mut self, pod: &Pod, profile: &Profile) -> Result<String, Unschedulable> {
        let metrics = &self.config.metrics;
        let ran = |point, result, start, evaluations: &[Evaluation]| {
            metrics.ran(point, result, pod.scheduler(), start);
            metrics.evaluated(point, evaluations, pod.scheduler());
        };
        decide_measured(pod, profile, &mut self.snapshot, ran)
    }

    /// Counts the pods that waited for the decision about their gang.
    pub(super) fn count_waits(&self, outcome: &Outcome) {
        let result = if outcome.verdict.is_scheduled() {
            AttemptResult::Scheduled
        } else if outcome.verdict.is_error() {
            AttemptResult::Error
        } else {
            AttemptResult::Unschedulable
        };
        for wait in &outcome.waits {
            self.config.metrics.waited_for_gang(result, *wait);
        }
    }

    /// Counts the attempt for a pod that was refused, or whose scheduling failed. A gated pod has no attempt.
    pub(super) fn count_refusal(&mut self, pod: &Pod, result: AttemptResult) {
        if let Some(attempt) = self.queue.finish_attempt(pod.uid()) {
            self.config.metrics.attempted(result, pod.scheduler(), attempt.started.elapsed());
        }
    }

    /// Counts the attempt that ended with a binding.
    pub(super) fn count_binding(&self, pod: &Pod, attempt: &Attempt, result: AttemptResult) {
        let metrics = &self.config.metrics;
        metrics.attempted(result, pod.scheduler(), attempt.started.elapsed());
        if result == AttemptResult::Scheduled {
            metrics.pod_scheduled(attempt);
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::test_scheduler::scheduler_of_accepting_server;
    use crate::fixture;

    #[tokio::test]
    async fn attempts_are_counted_by_their_result() {
        let mut scheduler = scheduler_of_accepting_server();
        for name in ["a", "b"] {
            scheduler.snapshot.set_node(&fixture::node(name, json!({})));
        }
        let of = |names: &[&str]| {
            let field = json!({"key": "metadata.name", "operator": "In", "values": names});
            json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution":
                {"nodeSelectorTerms": [{"matchFields": [field]}]}}})
        };
        for (name, cpu, affinity) in
            [("fits", "3", json!({})), ("large", "30", json!({})), ("named", "1", of(&[]))]
        {
            let container = json!({"resources": {"requests": {"cpu": cpu}}});
            scheduler.queue.add(fixture::pod(name, json!({"containers": [container], "affinity": affinity})));
            scheduler.schedule_next();
        }
        while let Some(Ok(bound)) = scheduler.bindings.join_next().await {
            scheduler.bound(bound);
        }
        scheduler.measure_queue();
        let text = scheduler.config.metrics.text();
        let profile = "profile=\"default-scheduler\"";
        for line in [
            format!("scheduler_schedule_attempts_total{{{profile},result=\"scheduled\"}} 1"),
            format!("scheduler_schedule_attempts_total{{{profile},result=\"unschedulable\"}} 2"),
            "scheduler_scheduling_algorithm_duration_seconds_count 3".to_owned(),
            "scheduler_pod_scheduling_attempts_sum 1".to_owned(),
            "scheduler_preemption_attempts_total 2".to_owned(),
            "scheduler_pending_pods{queue=\"unschedulable\"} 2".to_owned(),
        ] {
            assert!(text.lines().any(|other| other == line), "no {line} in\n{text}");
        }
        for (point, status, count) in [
            ("PreFilter", "Success", 2),
            ("PreFilter", "UnschedulableAndUnresolvable", 1),
            ("Filter", "Success", 2),
            ("Score", "Success", 1),
            ("Reserve", "Success", 1),
            ("Bind", "Success", 1),
            ("PostFilter", "Unschedulable", 2),
        ] {
            let labels = format!("extension_point=\"{point}\",{profile},status=\"{status}\"");
            let line =
                format!("scheduler_framework_extension_point_duration_seconds_count{{{labels}}} {count}");
            assert!(text.lines().any(|other| other == line), "no {line} in\n{text}");
        }
        // The second pod has other requests, so the filters of both nodes are computed again.
        for (point, plugin, count) in [
            ("PreFilter", "NodeResourcesFit", 2),
            ("Filter", "NodeResourcesFit", 4),
            ("Score", "ImageLocality", 2),
        ] {
            let labels = format!("extension_point=\"{point}\",plugin=\"{plugin}\",{profile}");
            let line = format!("scheduler_plugin_evaluation_total{{{labels}}} {count}");
            assert!(text.lines().any(|other| other == line), "no {line} in\n{text}");
        }
    }
}

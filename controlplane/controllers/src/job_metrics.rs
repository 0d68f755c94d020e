//! The metrics of jobs and cron jobs, in the text format of Prometheus. Source: `pkg/controller/job/metrics` and
//! `pkg/controller/cronjob/metrics`.
//!
//! The values of the labels are from fixed sets, so the number of time series is limited.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use k8s_openapi::api::batch::v1::JobStatus;

use crate::metric_text::{Histogram, head, line};

/// Upper bounds of the durations of reconciles, in seconds.
const SYNCS: [f64; 15] = [
    0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.024, 2.048, 4.096, 8.192, 16.384, 32.768,
    65.536,
];
/// Upper bounds of the delays of cron jobs, in seconds.
const DELAYS: [f64; 10] = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0];
/// The reasons why jobs end.
const REASONS: [&str; 7] = [
    "BackoffLimitExceeded",
    "CompletionsReached",
    "DeadlineExceeded",
    "FailedIndexes",
    "MaxFailedIndexesExceeded",
    "PodFailurePolicy",
    "SuccessPolicy",
];

/// Counts the work on jobs. A clone shares the counts.
#[derive(Clone, Debug, Default)]
pub struct JobMetrics(Arc<Mutex<Counts>>);

/// The labels of a reconcile of a job.
#[derive(Clone, Copy, Debug)]
pub(crate) struct JobSync {
    pub(crate) completion_mode: &'static str,
    pub(crate) succeeded: bool,
    /// The action of the reconcile.
    pub(crate) action: &'static str,
}

/// Counts by the values of their labels.
#[derive(Debug, Default)]
struct Counts {
    /// Completion mode, result, action.
    syncs: BTreeMap<[&'static str; 3], Histogram>,
    /// Completion mode, result, reason.
    finished: BTreeMap<[&'static str; 3], u64>,
    /// Completion mode, result.
    pods: BTreeMap<[&'static str; 2], u64>,
    delays: Histogram,
    /// Failed pods by the action of the failure policy.
    policy_actions: BTreeMap<&'static str, u64>,
    /// Ended pods that got or lost the tracking finalizer, by the event.
    tracked: BTreeMap<&'static str, u64>,
}

// === impl JobMetrics ===

impl JobMetrics {
    /// Counts a reconcile of a job.
    pub(crate) fn synced(&self, sync: JobSync, took: Duration) {
        let result = if sync.succeeded { "success" } else { "error" };
        let labels = [sync.completion_mode, result, sync.action];
        self.lock().syncs.entry(labels).or_default().observe(&SYNCS, took.as_secs_f64());
    }

    /// Counts the pods and the end of a job from a written status.
    pub(crate) fn counted(&self, mode: &'static str, old: &JobStatus, new: &JobStatus) {
        let more = |old: Option<i32>, new: Option<i32>| {
            let added = new.unwrap_or_default().saturating_sub(old.unwrap_or_default());
            u64::try_from(added).unwrap_or_default()
        };
        let mut counts = self.lock();
        for (result, count) in
            [("succeeded", more(old.succeeded, new.succeeded)), ("failed", more(old.failed, new.failed))]
        {
            if count > 0 {
                *counts.pods.entry([mode, result]).or_default() += count;
            }
        }
        if let Some([result, reason]) = end(new).filter(|_| end(old).is_none()) {
            *counts.finished.entry([mode, result, reason]).or_default() += 1;
        }
    }

    /// Counts failed pods by the action of their job's failure policy.
    pub(crate) fn handled(&self, actions: &[&'static str]) {
        if actions.is_empty() {
            return;
        }
        let mut counts = self.lock();
        for action in actions {
            *counts.policy_actions.entry(*action).or_default() += 1;
        }
    }

    /// Counts an ended pod that got (`add`) or lost (`delete`) the tracking finalizer.
    pub(crate) fn tracked(&self, event: &'static str) {
        *self.lock().tracked.entry(event).or_default() += 1;
    }

    /// Counts a job that a cron job created this many seconds after its scheduled time.
    pub(crate) fn created_after(&self, seconds: f64) {
        self.lock().delays.observe(&DELAYS, seconds);
    }

    /// All metrics in the text format of Prometheus. Empty if there was no job yet.
    #[must_use]
    pub fn text(&self) -> String {
        let counts = self.lock();
        let mut text = String::new();
        let name = "job_controller_job_sync_duration_seconds";
        head(&mut text, name, "histogram", "Duration of reconciles of jobs in seconds.", counts.syncs.len());
        for (labels, syncs) in &counts.syncs {
            syncs.write(&mut text, name, &sync_labels(labels), &SYNCS);
        }
        let name = "job_controller_job_syncs_total";
        head(&mut text, name, "counter", "Number of reconciles of jobs.", counts.syncs.len());
        for (labels, syncs) in &counts.syncs {
            line(&mut text, name, &sync_labels(labels), syncs.count);
        }
        let name = "job_controller_jobs_finished_total";
        head(&mut text, name, "counter", "Number of jobs that ended.", counts.finished.len());
        for ([mode, result, reason], count) in &counts.finished {
            let labels = format!("completion_mode=\"{mode}\",result=\"{result}\",reason=\"{reason}\"");
            line(&mut text, name, &labels, *count);
        }
        let name = "job_controller_job_pods_finished_total";
        let help = "Number of ended pods that the status of their job counts.";
        head(&mut text, name, "counter", help, counts.pods.len());
        for ([mode, result], count) in &counts.pods {
            line(&mut text, name, &format!("completion_mode=\"{mode}\",result=\"{result}\""), *count);
        }
        let name = "job_controller_pod_failures_handled_by_failure_policy_total";
        let help =
            "Number of failed pods by the action of the first rule of the failure policy that matches.";
        head(&mut text, name, "counter", help, counts.policy_actions.len());
        for (action, count) in &counts.policy_actions {
            line(&mut text, name, &format!("action=\"{action}\""), *count);
        }
        let name = "job_controller_terminated_pods_tracking_finalizer_total";
        let help = "Number of ended pods that got or lost the finalizer batch.kubernetes.io/job-tracking.";
        head(&mut text, name, "counter", help, counts.tracked.len());
        for (event, count) in &counts.tracked {
            line(&mut text, name, &format!("event=\"{event}\""), *count);
        }
        let name = "cronjob_controller_job_creation_skew_duration_seconds";
        let help = "Seconds from the scheduled time of a cron job until its job is created.";
        head(&mut text, name, "histogram", help, usize::from(counts.delays.count > 0));
        if counts.delays.count > 0 {
            counts.delays.write(&mut text, name, "", &DELAYS);
        }
        text
    }

    fn lock(&self) -> MutexGuard<'_, Counts> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The result and the reason of a job that has ended. `None` for other jobs.
fn end(status: &JobStatus) -> Option<[&'static str; 2]> {
    let ends = status.conditions.iter().flatten().filter(|condition| condition.status == "True");
    let mut ends = ends.filter_map(|condition| {
        let result = match condition.type_.as_str() {
            "Complete" => "succeeded",
            "Failed" => "failed",
            _ => return None,
        };
        let reason = condition.reason.as_deref().unwrap_or_default();
        let known = REASONS.iter().find(|known| **known == reason);
        Some([result, known.copied().unwrap_or("other")])
    });
    ends.next()
}

fn sync_labels([mode, result, action]: &[&str; 3]) -> String {
    format!("completion_mode=\"{mode}\",result=\"{result}\",action=\"{action}\"")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn status(succeeded: i32, condition: &str) -> JobStatus {
        let condition = json!({"type": condition, "status": "True", "reason": "CompletionsReached"});
        serde_json::from_value(json!({"succeeded": succeeded, "conditions": [condition]})).unwrap()
    }

    #[test]
    fn pods_and_the_end_of_a_job_are_counted_once() {
        let metrics = JobMetrics::default();
        assert_eq!(metrics.text(), "");
        let steps =
            [status(0, "Suspended"), status(1, "Suspended"), status(3, "Complete"), status(3, "Complete")];
        for pair in steps.windows(2) {
            metrics.counted("Indexed", &pair[0], &pair[1]);
        }
        let text = metrics.text();
        for line in [
            "job_controller_job_pods_finished_total{completion_mode=\"Indexed\",result=\"succeeded\"} 3",
            "job_controller_jobs_finished_total{completion_mode=\"Indexed\",result=\"succeeded\",reason=\"CompletionsReached\"} 1",
        ] {
            assert!(text.lines().any(|other| other == line), "no {line} in\n{text}");
        }
        assert!(!text.contains("failed") && !text.contains("syncs"), "{text}");
    }

    #[test]
    fn policies_and_finalizers_are_counted_by_action_and_event() {
        let metrics = JobMetrics::default();
        metrics.handled(&[]);
        assert_eq!(metrics.text(), "");
        metrics.handled(&["Ignore", "FailJob", "Ignore"]);
        for event in ["add", "add", "delete"] {
            metrics.tracked(event);
        }
        let text = metrics.text();
        for line in [
            "job_controller_pod_failures_handled_by_failure_policy_total{action=\"Ignore\"} 2",
            "job_controller_pod_failures_handled_by_failure_policy_total{action=\"FailJob\"} 1",
            "job_controller_terminated_pods_tracking_finalizer_total{event=\"add\"} 2",
            "job_controller_terminated_pods_tracking_finalizer_total{event=\"delete\"} 1",
            "# TYPE job_controller_terminated_pods_tracking_finalizer_total counter",
        ] {
            assert!(text.lines().any(|other| other == line), "no {line} in\n{text}");
        }
    }

    #[test]
    fn reconciles_and_delays_are_histograms() {
        let metrics = JobMetrics::default();
        let sync = JobSync { completion_mode: "NonIndexed", succeeded: true, action: "tracking" };
        metrics.synced(sync, Duration::from_millis(500));
        metrics.synced(sync, Duration::from_millis(1));
        metrics.created_after(3.0);
        let text = metrics.text();
        let labels = "completion_mode=\"NonIndexed\",result=\"success\",action=\"tracking\"";
        let name = "job_controller_job_sync_duration_seconds";
        let delay = "cronjob_controller_job_creation_skew_duration_seconds";
        for line in [
            format!("{name}_bucket{{{labels},le=\"0.256\"}} 1"),
            format!("{name}_bucket{{{labels},le=\"0.512\"}} 2"),
            format!("{name}_count{{{labels}}} 2"),
            format!("job_controller_job_syncs_total{{{labels}}} 2"),
            format!("{delay}_bucket{{le=\"2\"}} 0"),
            format!("{delay}_bucket{{le=\"4\"}} 1"),
            format!("{delay}_bucket{{le=\"+Inf\"}} 1"),
            format!("# TYPE {delay} histogram"),
        ] {
            assert!(text.lines().any(|other| other == line), "no {line} in\n{text}");
        }
    }
}

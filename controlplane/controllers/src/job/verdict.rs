//! The counts of a job from its status and its pods, and whether the job must end.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use jiff::Timestamp;

use super::indexes::Indexes;
use super::pods::{
    all_earlier, earlier_failures, failed_pods, has_failed, has_succeeded, index_of, is_indexed,
    is_terminating, is_tracked,
};
use super::policy::{self, Failure};
use crate::object::{Job, ObjectExt, Pod};
use crate::state::job_failures::FailedPods;

/// The result of a finished job, with reason and message of its condition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Fails { reason: String, message: String },
    Succeeds { reason: String, message: String },
}

/// The observed state of a job, made from the job and all pods that it controls.
#[derive(Debug)]
pub(crate) struct ObservedJob<'a> {
    pub(super) job: &'a Job,
    pub(super) pods: &'a [Arc<Pod>],
    pub(super) now: Timestamp,
    /// Succeeded pods, or completed indexes, including pods and indexes that are not in the status yet.
    pub(super) succeeded: i32,
    /// Failed pods, including pods that are not in the status yet.
    pub(super) failed: i32,
    pub(super) completed: Indexes,
    pub(super) failed_indexes: Indexes,
    /// The last failed pod of each index that must be retried. That pod keeps its finalizer until there is a new pod.
    pub(super) retried: HashMap<i32, Arc<Pod>>,
    pub(super) verdict: Option<Verdict>,
    /// Failed pods after the last success, for the back-off.
    pub(super) failures: FailedPods,
}

impl<'a> ObservedJob<'a> {
    /// The observed state of a job and its pods at the time `now`.
    pub(crate) fn of(job: &'a Job, pods: &'a [Arc<Pod>], now: Timestamp) -> Self {
        let mut observed = Self {
            job,
            pods,
            now,
            succeeded: 0,
            failed: 0,
            completed: Indexes::default(),
            failed_indexes: Indexes::default(),
            retried: HashMap::new(),
            verdict: None,
            failures: failed_pods(job, pods),
        };
        observed.count();
        observed.verdict = observed.former_verdict().or_else(|| observed.failure());
        if is_indexed(job) {
            observed.count_indexes();
            observed.verdict =
                observed.verdict.take().or_else(|| observed.index_failure()).or_else(|| observed.success());
        }
        observed
    }

    /// The state with the verdict `decided`. The verdict was made before pods were deleted, and the deletion must not
    /// change it.
    pub(super) fn with_verdict(mut self, decided: Option<Verdict>) -> Self {
        self.verdict = decided.or(self.verdict);
        self
    }

    /// The state with the failed pods of earlier reconciles.
    pub(super) fn with_failures(mut self, former: &FailedPods) -> Self {
        self.failures = former.and(&self.failures);
        self
    }

    /// Pods that are neither finished nor being deleted.
    pub(super) fn active(&self) -> impl Iterator<Item = &'a Arc<Pod>> + use<'a> {
        self.pods.iter().filter(|pod| pod.is_active())
    }

    /// Number of pods that are being deleted and have not ended.
    pub(super) fn terminating(&self) -> usize {
        self.pods.iter().filter(|pod| is_terminating(pod)).count()
    }

    /// Whether a pod counts as failed. When a job fails, its remaining pods fail with it.
    pub(super) fn counts_as_failed(&self, pod: &Pod) -> bool {
        let dropped = matches!(self.verdict, Some(Verdict::Fails { .. })) && !has_succeeded(pod);
        has_failed(self.job, pod) || (dropped && pod.is_being_deleted())
    }

    fn count(&mut self) {
        let status = &self.job.status;
        let lists = status.uncounted_terminated_pods.as_ref();
        let listed = |list: Option<&Option<Vec<String>>>| -> HashSet<String> {
            list.into_iter().flatten().flatten().cloned().collect()
        };
        let succeeded = listed(lists.map(|lists| &lists.succeeded));
        let failed = listed(lists.map(|lists| &lists.failed));
        let tracked = || self.pods.iter().filter(|pod| is_tracked(pod));
        let new_succeeded =
            tracked().filter(|pod| has_succeeded(pod) && !succeeded.contains(pod.uid())).count();
        let new_failed = tracked()
            .filter(|pod| has_failed(self.job, pod) && !failed.contains(pod.uid()) && self.is_counted(pod))
            .count();
        let sum = |counted: Option<i32>, listed: usize, new: usize| {
            counted.unwrap_or_default().saturating_add(i32::try_from(listed + new).unwrap_or(i32::MAX))
        };
        self.succeeded = sum(status.succeeded, succeeded.len(), new_succeeded);
        self.failed = sum(status.failed, failed.len(), new_failed);
    }

    /// Whether the failure of this pod counts.
    pub(super) fn is_counted(&self, pod: &Pod) -> bool {
        let valid = !is_indexed(self.job) || index_of(self.job, pod).is_some();
        valid && policy::failure(self.job, pod) != Failure::Ignored
    }

    /// The action of the failure policy about a failed pod. `None` if no rule matches, or the pod has an invalid index.
    pub(super) fn policy_action(&self, pod: &Pod) -> Option<&'static str> {
        let valid = !is_indexed(self.job) || index_of(self.job, pod).is_some();
        policy::action(self.job, pod).filter(|_| valid)
    }

    fn count_indexes(&mut self) {
        let (job, limit) = (self.job, self.job.spec.completions.unwrap_or_default());
        let tracked: Vec<_> = self.pods.iter().filter(|pod| is_tracked(pod)).collect();
        let done = tracked.iter().filter(|pod| has_succeeded(pod)).filter_map(|pod| index_of(job, pod));
        self.completed = Indexes::parse(job.status.completed_indexes.as_deref().unwrap_or_default(), limit);
        self.completed.extend(done);
        self.succeeded = self.completed.total();
        let Some(allowed) = job.spec.backoff_limit_per_index else { return };
        self.failed_indexes = Indexes::parse(job.status.failed_indexes.as_deref().unwrap_or_default(), limit);
        let failed: Vec<_> = tracked.iter().filter(|pod| has_failed(job, pod)).collect();
        let over = failed.iter().filter(|pod| match policy::failure(job, pod) {
            Failure::FailsIndex => true,
            Failure::Ignored => earlier_failures(pod) > allowed,
            Failure::Counts | Failure::FailsJob(_) => earlier_failures(pod) >= allowed,
        });
        let over: Vec<i32> = over.filter_map(|pod| index_of(job, pod)).collect();
        self.failed_indexes.extend(over.into_iter().filter(|index| !self.completed.has(*index)));
        let mut present: HashSet<i32> = self.active().filter_map(|pod| index_of(job, pod)).collect();
        // The pod with the most failures is the last pod of its index.
        let mut failed: Vec<&Arc<Pod>> = failed.into_iter().copied().collect();
        failed.sort_by_key(|pod| {
            std::cmp::Reverse((all_earlier(pod), pod.metadata.creation_timestamp.clone()))
        });
        for pod in failed {
            let Some(index) = index_of(job, pod) else { continue };
            if !self.completed.has(index) && !self.failed_indexes.has(index) && present.insert(index) {
                self.retried.insert(index, pod.clone());
            }
        }
    }

    /// The verdict of an earlier reconcile.
    fn former_verdict(&self) -> Option<Verdict> {
        let text = |value: &Option<String>| value.clone().unwrap_or_default();
        if let Some(target) = self.job.condition("FailureTarget") {
            return Some(Verdict::Fails { reason: text(&target.reason), message: text(&target.message) });
        }
        let met = self.job.condition("SuccessCriteriaMet")?;
        Some(Verdict::Succeeds { reason: text(&met.reason), message: text(&met.message) })
    }

    fn failure(&self) -> Option<Verdict> {
        let failed = self.pods.iter().filter(|pod| has_failed(self.job, pod));
        let by_policy = failed.map(|pod| policy::failure(self.job, pod)).find_map(|failure| match failure {
            Failure::FailsJob(message) => Some(message),
            Failure::Counts | Failure::Ignored | Failure::FailsIndex => None,
        });
        if let Some(message) = by_policy.filter(|_| self.job.spec.pod_failure_policy.is_some()) {
            return fails("PodFailurePolicy", message);
        }
        let limit = self.job.spec.backoff_limit.unwrap_or(6);
        if self.failed > limit || self.restarts_exceed(limit) {
            return fails("BackoffLimitExceeded", "Job has reached the specified backoff limit".to_owned());
        }
        if self.deadline().is_some_and(|deadline| deadline <= self.now) {
            return fails("DeadlineExceeded", "Job was active longer than specified deadline".to_owned());
        }
        None
    }

    /// The time at which the job reaches its active deadline. `None` if the job has no deadline or is suspended.
    pub(super) fn deadline(&self) -> Option<Timestamp> {
        if self.job.spec.suspend == Some(true) {
            return None;
        }
        let start = self.job.status.start_time.as_ref()?.0;
        let seconds = self.job.spec.active_deadline_seconds?;
        Timestamp::from_second(start.as_second().saturating_add(seconds)).ok()
    }

    /// Whether the containers of the pods have restarted too often in their pods. Without the restart policy
    /// `OnFailure` this is always false.
    fn restarts_exceed(&self, limit: i32) -> bool {
        let is_open = |pod: &&Arc<Pod>| matches!(pod.status.phase.as_deref(), Some("Running" | "Pending"));
        let statuses = self.pods.iter().filter(is_open).map(|pod| &pod.status);
        let restarts = statuses
            .flat_map(|status| [&status.container_statuses, &status.init_container_statuses])
            .fold(0_i32, |sum, containers| sum.saturating_add(containers.all_restarts));
        if restarts == 0 || restarts < limit {
            return false;
        }
        self.job.spec.template.value()["spec"]["restartPolicy"] == "OnFailure"
    }

    fn index_failure(&self) -> Option<Verdict> {
        self.job.spec.backoff_limit_per_index?;
        let failed = self.failed_indexes.total();
        if self.job.spec.max_failed_indexes.is_some_and(|most| failed > most) {
            let message = "Job has exceeded the specified maximal number of failed indexes";
            return fails("MaxFailedIndexesExceeded", message.to_owned());
        }
        let completions = self.job.spec.completions.unwrap_or_default();
        if failed > 0 && failed.saturating_add(self.completed.total()) >= completions {
            return fails("FailedIndexes", "Job has failed indexes".to_owned());
        }
        None
    }

    fn success(&self) -> Option<Verdict> {
        let message = policy::success(self.job, &self.completed)?;
        Some(Verdict::Succeeds { reason: "SuccessPolicy".to_owned(), message })
    }
}

fn fails(reason: &str, message: String) -> Option<Verdict> {
    Some(Verdict::Fails { reason: reason.to_owned(), message })
}

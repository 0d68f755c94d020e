//! The pods of a job: their states and indexes.

use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::FINALIZER;
use crate::annotation::{JOB_INDEX, JOB_INDEX_FAILURES, JOB_INDEX_IGNORED_FAILURES};
use crate::object::{Job, ObjectExt, Pod};
use crate::state::job_failures::FailedPods;

/// Whether the job is indexed.
pub(super) fn is_indexed(job: &Job) -> bool {
    job.spec.completion_mode.as_deref() == Some("Indexed")
}

/// The completion mode of the job, as metrics name it.
pub(super) fn completion_mode(job: &Job) -> &'static str {
    if is_indexed(job) { "Indexed" } else { "NonIndexed" }
}

/// Whether a terminating pod is replaced only after it has ended.
pub(super) fn replaces_only_failed(job: &Job) -> bool {
    job.spec.pod_replacement_policy.as_deref() == Some("Failed") || job.spec.pod_failure_policy.is_some()
}

/// Whether the pod is being deleted and has not ended.
pub(super) fn is_terminating(pod: &Pod) -> bool {
    !pod.finished() && pod.is_being_deleted()
}

/// Whether the pod has succeeded.
pub(super) fn has_succeeded(pod: &Pod) -> bool {
    pod.status.phase.as_deref() == Some("Succeeded")
}

/// Whether the pod has failed. A pod that is being deleted also counts as failed, unless only ended pods are replaced.
pub(super) fn has_failed(job: &Job, pod: &Pod) -> bool {
    pod.status.phase.as_deref() == Some("Failed") || (is_terminating(pod) && !replaces_only_failed(job))
}

/// Whether the pod has the tracking finalizer: the status of the job does not count it yet.
pub(super) fn is_tracked(pod: &Pod) -> bool {
    pod.metadata.finalizers.iter().flatten().any(|name| name == FINALIZER)
}

/// The completion index of a pod of an indexed job. `None` if the pod has no index, or an index that is not below
/// `spec.completions`.
pub(super) fn index_of(job: &Job, pod: &Pod) -> Option<i32> {
    let index = number(pod, JOB_INDEX)?;
    (0..job.spec.completions.unwrap_or_default()).contains(&index).then_some(index)
}

/// Number of earlier failures of the pod's index.
pub(super) fn earlier_failures(pod: &Pod) -> i32 {
    number(pod, JOB_INDEX_FAILURES).unwrap_or_default()
}

/// Number of earlier ignored failures of the pod's index.
pub(super) fn earlier_ignored(pod: &Pod) -> i32 {
    number(pod, JOB_INDEX_IGNORED_FAILURES).unwrap_or_default()
}

/// Number of all earlier failures of the pod's index, including ignored failures.
pub(super) fn all_earlier(pod: &Pod) -> i32 {
    earlier_failures(pod).saturating_add(earlier_ignored(pod))
}

fn number(pod: &Pod, annotation: &str) -> Option<i32> {
    pod.metadata.annotations.as_ref()?.get(annotation)?.parse().ok()
}

/// The time at which the pod ended, or an estimate. Estimates are the request to delete it, its last change of the
/// condition Ready, and its creation, in this order.
pub(super) fn finished_at(pod: &Pod) -> Option<Timestamp> {
    let (status, deleted) = (&pod.status, deletion_requested_at(pod));
    if is_terminating(pod) && deleted.is_some() {
        return deleted;
    }
    let ends = [&status.container_statuses.finished_at, &status.init_container_statuses.finished_at];
    let ended = ends.into_iter().flatten().max();
    let ready = || pod.condition("Ready").and_then(|ready| ready.last_transition_time.as_ref());
    let time = |time: Option<&Time>| time.map(|time| time.0);
    time(ended)
        .or(deleted)
        .or_else(|| time(ready()))
        .or_else(|| time(pod.metadata.creation_timestamp.as_ref()))
}

/// The pods that failed after the last success. As upstream, failures that the failure policy ignores count, so that
/// their pods are not replaced without a delay. Pods that this controller deleted because they were not needed have no
/// finalizer and do not count.
pub(super) fn failed_pods(job: &Job, pods: &[Arc<Pod>]) -> FailedPods {
    let success = pods.iter().filter(|pod| has_succeeded(pod)).filter_map(|pod| finished_at(pod)).max();
    let failed =
        pods.iter().filter(|pod| has_failed(job, pod) && (is_tracked(pod) || !pod.is_being_deleted()));
    FailedPods::new(success, failed.filter_map(|pod| Some((pod.uid(), finished_at(pod)?))))
}

/// The time of the request to delete the pod. `deletionTimestamp` is the end of the grace period.
fn deletion_requested_at(pod: &Pod) -> Option<Timestamp> {
    let end = pod.metadata.deletion_timestamp.as_ref()?.0;
    let grace = pod.metadata.deletion_grace_period_seconds.unwrap_or_default();
    Timestamp::from_second(end.as_second().saturating_sub(grace)).ok()
}

/// Whether a change of a pod can change the plan or the status of its job.
pub(super) fn is_relevant(old: &Pod, new: &Pod) -> bool {
    old.status.phase != new.status.phase
        || old.ready_since().is_some() != new.ready_since().is_some()
        || old.is_being_deleted() != new.is_being_deleted()
        || old.status.container_statuses != new.status.container_statuses
        || old.status.init_container_statuses != new.status.init_container_statuses
        || old.metadata.finalizers != new.metadata.finalizers
        || old.metadata.labels != new.metadata.labels
        || old.metadata.owner_references != new.metadata.owner_references
        || old.uid() != new.uid()
}

/// Clones of the shared pointers to pods, for the plan's actions.
pub(super) fn shared<'a>(pods: impl IntoIterator<Item = &'a Arc<Pod>>) -> Vec<Arc<Pod>> {
    pods.into_iter().cloned().collect()
}

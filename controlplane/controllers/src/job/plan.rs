//! The plan of a job: pods to create and to delete.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use super::pods::{
    all_earlier, earlier_failures, earlier_ignored, finished_at, index_of, is_indexed, is_terminating,
    replaces_only_failed, shared,
};
use super::policy::{self, Failure};
pub(crate) use super::verdict::ObservedJob;
use crate::object::Pod;
use crate::queue::until;
use crate::replica_set::sort_for_deletion;

/// Maximum number of pods that one reconcile creates or deletes. Source: `MaxPodCreateDeletePerSync` of upstream's job
/// controller.
const BURST: usize = 500;
/// Minimum time between reconciles that change [`BURST`] pods. Source: `syncJobBatchPeriod` of upstream's job
/// controller.
const BATCH_PERIOD: Duration = Duration::from_secs(1);
/// Back-off after the first failed pod. It doubles with each further failure, up to [`MAX_BACKOFF`].
const FIRST_BACKOFF: Duration = Duration::from_secs(10);
const MAX_BACKOFF: Duration = Duration::from_secs(600);

/// A change of a job's pods.
#[derive(Debug)]
pub(crate) enum Change {
    Nothing,
    /// Pods are missing, but their back-off is not over.
    Wait(Duration),
    Create(Vec<NewPod>),
    /// Pods of a job that ends. They keep their finalizer until they are counted.
    Delete(Vec<Arc<Pod>>),
    /// Pods of a suspended job, or pods above the desired number. They lose their finalizer before the deletion, so
    /// that they do not count as failed.
    Discard(Vec<Arc<Pod>>),
}

/// A pod to create.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct NewPod {
    /// The completion index, for indexed jobs.
    pub(crate) index: Option<i32>,
    /// Failures of the index. `None` for jobs without a back-off limit per index.
    pub(crate) failures: Option<IndexFailures>,
}

/// Numbers of failed pods of one index.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct IndexFailures {
    /// Failures that count towards the back-off limit.
    pub(crate) counted: i32,
    /// Failures that the pod failure policy ignores.
    pub(crate) ignored: i32,
}

impl Change {
    /// Time after the change before the next reconcile of the job, in proportion to the changed pods. `None` if no pods
    /// change. This limits the rate at which a job with a very large parallelism creates pods.
    pub(crate) fn pause(&self) -> Option<Duration> {
        let pods = match self {
            Self::Nothing | Self::Wait(_) => 0,
            Self::Create(pods) => pods.len(),
            Self::Delete(pods) | Self::Discard(pods) => pods.len(),
        };
        let pods = u32::try_from(pods.min(BURST)).ok().filter(|pods| *pods > 0)?;
        Some(BATCH_PERIOD * pods / BURST as u32)
    }
}

/// Plans the change of a job's pods.
pub(crate) fn plan(observed: &ObservedJob<'_>) -> Change {
    let job = observed.job;
    let active: Vec<&Arc<Pod>> = observed.active().collect();
    if observed.verdict.is_some() {
        return delete(shared(active), Change::Delete);
    }
    if job.metadata.deletion_timestamp.is_some() {
        return Change::Nothing;
    }
    if job.spec.suspend == Some(true) {
        return delete(shared(active), Change::Discard);
    }
    let wanted = desired_active(observed, active.len());
    if is_indexed(job) {
        let excess = misplaced(observed, &active);
        if !excess.is_empty() {
            return delete(excess, Change::Discard);
        }
    }
    if active.len() > wanted {
        let mut pods = shared(active.iter().copied());
        sort_for_deletion(&mut pods, &HashMap::new(), observed.now);
        pods.truncate(active.len() - wanted);
        return delete(pods, Change::Discard);
    }
    let terminating = if replaces_only_failed(job) { observed.terminating() } else { 0 };
    let missing = wanted.saturating_sub(active.len() + terminating).min(BURST);
    match missing {
        0 => Change::Nothing,
        missing => create(observed, missing),
    }
}

fn delete(mut pods: Vec<Arc<Pod>>, change: impl FnOnce(Vec<Arc<Pod>>) -> Change) -> Change {
    pods.truncate(BURST);
    if pods.is_empty() { Change::Nothing } else { change(pods) }
}

/// The desired number of active pods.
fn desired_active(observed: &ObservedJob<'_>, active: usize) -> usize {
    let parallelism = observed.job.spec.parallelism.unwrap_or(1);
    let wanted = match observed.job.spec.completions {
        // After the first success the remaining pods run to their end, and no new pods are created.
        None if observed.succeeded > 0 => return active,
        None => parallelism,
        Some(completions) => parallelism.min(
            completions.saturating_sub(observed.succeeded).saturating_sub(observed.failed_indexes.total()),
        ),
    };
    usize::try_from(wanted).unwrap_or_default()
}

/// Active pods to delete: their index is invalid, completed or failed, or an older active pod has the same
/// index.
fn misplaced(observed: &ObservedJob<'_>, active: &[&Arc<Pod>]) -> Vec<Arc<Pod>> {
    let mut active = active.to_vec();
    active.sort_by(|one, other| one.metadata.creation_timestamp.cmp(&other.metadata.creation_timestamp));
    let mut seen = HashSet::new();
    let misplaced = active.into_iter().filter(|pod| {
        index_of(observed.job, pod).is_none_or(|index| {
            observed.completed.has(index) || observed.failed_indexes.has(index) || !seen.insert(index)
        })
    });
    shared(misplaced)
}

fn create(observed: &ObservedJob<'_>, missing: usize) -> Change {
    let job = observed.job;
    if !is_indexed(job) || job.spec.backoff_limit_per_index.is_none() {
        let wait = backoff(observed);
        if let Some(wait) = wait {
            return Change::Wait(wait);
        }
    }
    if !is_indexed(job) {
        return Change::Create(vec![NewPod::default(); missing]);
    }
    let mut used = observed.completed.clone();
    used.extend(observed.active().filter_map(|pod| index_of(job, pod)));
    if replaces_only_failed(job) {
        used.extend(
            observed.pods.iter().filter(|pod| is_terminating(pod)).filter_map(|pod| index_of(job, pod)),
        );
    }
    let completions = job.spec.completions.unwrap_or_default();
    if job.spec.backoff_limit_per_index.is_none() {
        let free = used.first_absent(missing, completions);
        return created(
            free.into_iter().map(|index| NewPod { index: Some(index), failures: None }).collect(),
        );
    }
    used.merge(&observed.failed_indexes);
    let mut waits = Vec::new();
    let mut pods = Vec::new();
    // Indexes in back-off do not delay the other indexes.
    for index in used.first_absent(missing + observed.retried.len(), completions) {
        let last = observed.retried.get(&index);
        if let Some(wait) =
            last.and_then(|last| remaining(observed, all_earlier(last).saturating_add(1), finished_at(last)))
        {
            waits.push(wait);
        } else if pods.len() < missing {
            let failures = last.map(|last| next_failures(observed, last)).unwrap_or_default();
            pods.push(NewPod { index: Some(index), failures: Some(failures) });
        }
    }
    match waits.into_iter().min() {
        Some(wait) if pods.is_empty() => Change::Wait(wait),
        Some(_) | None => created(pods),
    }
}

fn created(pods: Vec<NewPod>) -> Change {
    if pods.is_empty() { Change::Nothing } else { Change::Create(pods) }
}

/// The failure counts for the replacement of this failed pod.
fn next_failures(observed: &ObservedJob<'_>, last: &Pod) -> IndexFailures {
    let (counted, ignored) = (earlier_failures(last), earlier_ignored(last));
    match policy::failure(observed.job, last) {
        Failure::Ignored => IndexFailures { counted, ignored: ignored.saturating_add(1) },
        Failure::Counts | Failure::FailsIndex | Failure::FailsJob(_) => {
            IndexFailures { counted: counted.saturating_add(1), ignored }
        }
    }
}

/// The remaining back-off. It depends on the number of pods that failed since the last success.
fn backoff(observed: &ObservedJob<'_>) -> Option<Duration> {
    let (failures, last) = observed.failures.count_and_last()?;
    remaining(observed, failures, Some(last))
}

/// The remaining back-off after `failures` failures, the last at `last`. `None` if it is over.
fn remaining(observed: &ObservedJob<'_>, failures: i32, last: Option<jiff::Timestamp>) -> Option<Duration> {
    let exponent = u32::try_from(failures.saturating_sub(1)).unwrap_or_default().min(16);
    let wait = FIRST_BACKOFF.saturating_mul(2_u32.pow(exponent)).min(MAX_BACKOFF);
    until(last?.checked_add(wait).ok()?, observed.now)
}

#[cfg(test)]
mod tests;

//! The status of a job, and the pods that lose their finalizer after the status is written.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use coracle_events::Event;
use jiff::Timestamp;
use k8s_openapi::api::batch::v1::{JobCondition, JobStatus, UncountedTerminatedPods};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::pods::{has_failed, has_succeeded, index_of, is_indexed, is_tracked, shared};
use super::verdict::{ObservedJob, Verdict};
use crate::object::{ObjectExt, Pod};
use crate::queue::until;

/// Maximum number of uids in the lists of uncounted pods, which limits the size of the object.
const MAX_UNCOUNTED: usize = 500;

/// The outcome of a reconcile.
#[derive(Debug)]
pub(crate) struct Update {
    pub(crate) status: JobStatus,
    /// Pods that lose their finalizer after the status is written.
    pub(crate) finalize: Vec<Arc<Pod>>,
    pub(crate) events: Vec<Event>,
    /// Actions of the failure policy about pods that the status counts or ignores from now on.
    pub(crate) policy_actions: Vec<&'static str>,
    /// Delay of the next reconcile if nothing changes.
    pub(crate) again: Option<Duration>,
}

/// Plans the status.
pub(crate) fn update(observed: &ObservedJob<'_>) -> Update {
    let job = observed.job;
    let mut update = Update {
        status: job.status.clone(),
        finalize: Vec::new(),
        events: Vec::new(),
        policy_actions: Vec::new(),
        again: None,
    };
    if job.finished() {
        update.finalize = shared(observed.pods.iter().filter(|pod| is_tracked(pod)));
        return update;
    }
    let lists = count(observed, &mut update);
    let status = &mut update.status;
    if is_indexed(job) {
        let text = observed.completed.to_string();
        status.completed_indexes = (!text.is_empty()).then_some(text);
        status.succeeded = positive(observed.completed.total());
        if job.spec.backoff_limit_per_index.is_some() {
            status.failed_indexes = Some(observed.failed_indexes.to_string());
        }
    }
    let active = observed.active().count();
    status.active = positive(size(active));
    status.ready = Some(size(observed.active().filter(|pod| pod.ready_since().is_some()).count()));
    status.terminating = Some(size(observed.terminating()));
    let suspended = job.spec.suspend == Some(true);
    if status.start_time.is_none() && !suspended {
        status.start_time = Some(Time(seconds(observed.now)));
    }
    let verdict = observed.verdict.clone().or_else(|| completed(observed, active));
    match &verdict {
        Some(verdict) => end(observed, verdict, &lists, active, &mut update),
        None => suspend(observed, suspended, &mut update),
    }
    update.status.uncounted_terminated_pods = Some(lists);
    update.again = observed.deadline().and_then(|deadline| until(deadline, observed.now));
    update
}

/// Counts finished pods. If a listed pod has lost its finalizer, the function moves its uid into the counters. Adds the
/// uids of newly finished pods. Returns the lists of uncounted pods.
fn count(observed: &ObservedJob<'_>, update: &mut Update) -> UncountedTerminatedPods {
    let job = observed.job;
    let tracked: HashSet<&str> =
        observed.pods.iter().filter(|pod| is_tracked(pod)).map(|pod| pod.uid()).collect();
    let known = job.status.uncounted_terminated_pods.clone().unwrap_or_default();
    let split = |list: Option<Vec<String>>| -> (Vec<String>, Vec<String>) {
        list.unwrap_or_default().into_iter().partition(|uid| tracked.contains(uid.as_str()))
    };
    let (mut succeeded, counted_succeeded) = split(known.succeeded);
    let (mut failed, counted_failed) = split(known.failed);
    let add =
        |count: Option<i32>, more: usize| positive(count.unwrap_or_default().saturating_add(size(more)));
    update.status.succeeded = add(job.status.succeeded, counted_succeeded.len());
    update.status.failed = add(job.status.failed, counted_failed.len());
    for pod in observed.pods.iter().filter(|pod| is_tracked(pod)) {
        let (uid, full) = (pod.uid(), succeeded.len() + failed.len() >= MAX_UNCOUNTED);
        let listed = |list: &[String]| list.iter().any(|known| known == uid);
        let mut removable = true;
        if listed(&failed) || listed(&succeeded) {
        } else if has_succeeded(pod) {
            // For an indexed job, the completed index counts, not the pod.
            if !is_indexed(job) {
                if full {
                    continue;
                }
                succeeded.push(uid.to_owned());
            }
        } else if observed.counts_as_failed(pod) {
            if observed.is_counted(pod) {
                if full {
                    continue;
                }
                failed.push(uid.to_owned());
                update.policy_actions.extend(observed.policy_action(pod));
            } else if !keeps_finalizer(observed, pod) {
                // An ignored pod is in no list. So its action is recorded when the pod loses its finalizer.
                update.policy_actions.extend(observed.policy_action(pod));
            }
        } else {
            removable = job.is_being_deleted() || observed.verdict.is_some() && pod.is_being_deleted();
        }
        if removable && !keeps_finalizer(observed, pod) {
            update.finalize.push(pod.clone());
        }
    }
    let list = |list: Vec<String>| (!list.is_empty()).then_some(list);
    UncountedTerminatedPods { succeeded: list(succeeded), failed: list(failed) }
}

/// Whether a failed pod keeps its finalizer until its index has a new pod.
fn keeps_finalizer(observed: &ObservedJob<'_>, pod: &Pod) -> bool {
    let job = observed.job;
    if observed.verdict.is_some() || job.is_being_deleted() || !has_failed(job, pod) {
        return false;
    }
    let last = index_of(job, pod).and_then(|index| observed.retried.get(&index));
    last.is_some_and(|last| last.uid() == pod.uid())
}

/// The verdict if enough pods have succeeded and no pod is active. `None` otherwise.
fn completed(observed: &ObservedJob<'_>, active: usize) -> Option<Verdict> {
    let enough = match observed.job.spec.completions {
        None => observed.succeeded > 0,
        Some(completions) => observed.succeeded >= completions,
    };
    (enough && active == 0).then(|| Verdict::Succeeds {
        reason: "CompletionsReached".to_owned(),
        message: "Reached expected number of succeeded pods".to_owned(),
    })
}

/// Writes the verdict. The job ends when no pod is active, terminating or uncounted.
fn end(
    observed: &ObservedJob<'_>,
    verdict: &Verdict,
    lists: &UncountedTerminatedPods,
    active: usize,
    update: &mut Update,
) {
    let (interim, last, reason, message) = match verdict {
        Verdict::Fails { reason, message } => ("FailureTarget", "Failed", reason, message),
        Verdict::Succeeds { reason, message } => ("SuccessCriteriaMet", "Complete", reason, message),
    };
    let status = &mut update.status;
    set(status, Condition { type_: interim, is_true: true, reason, message }, observed.now);
    let open = lists.succeeded.is_some() || lists.failed.is_some();
    if open || active > 0 || observed.terminating() > 0 {
        return;
    }
    if status.start_time.is_none() {
        status.start_time = Some(Time(seconds(observed.now)));
    }
    set(status, Condition { type_: last, is_true: true, reason, message }, observed.now);
    let wanted = observed.job.spec.completions;
    if last == "Complete" && wanted.is_some_and(|wanted| status.succeeded.unwrap_or_default() > wanted) {
        let message = "Too many succeeded pods running after completion count reached";
        update.events.push(Event::warning("TooManySucceededPods", message.to_owned()));
    }
    update.events.push(match verdict {
        Verdict::Fails { .. } => Event::warning(known_reason(reason), message.clone()),
        Verdict::Succeeds { .. } => {
            status.completion_time = Some(Time(seconds(observed.now)));
            Event::normal("Completed", "Job completed".to_owned())
        }
    });
}

/// The reason of a failed job's event.
fn known_reason(reason: &str) -> &'static str {
    match reason {
        "PodFailurePolicy" => "PodFailurePolicy",
        "DeadlineExceeded" => "DeadlineExceeded",
        "MaxFailedIndexesExceeded" => "MaxFailedIndexesExceeded",
        "FailedIndexes" => "FailedIndexes",
        _ => "BackoffLimitExceeded",
    }
}

fn suspend(observed: &ObservedJob<'_>, suspended: bool, update: &mut Update) {
    let status = &mut update.status;
    let was = observed.job.has("Suspended");
    if suspended && !was {
        set(status, SUSPENDED, observed.now);
        // As upstream, a suspended job has no start time, so that its pod template may be changed.
        status.start_time = None;
        update.events.push(Event::normal("Suspended", "Job suspended".to_owned()));
    } else if was && !suspended {
        set(status, RESUMED, observed.now);
        // The start time of a resumed job is the time of its resumption.
        status.start_time = Some(Time(seconds(observed.now)));
        update.events.push(Event::normal("Resumed", "Job resumed".to_owned()));
    }
}

/// A condition of a job without its times.
#[derive(Clone, Copy)]
struct Condition<'a> {
    type_: &'a str,
    is_true: bool,
    reason: &'a str,
    message: &'a str,
}

const SUSPENDED: Condition<'static> =
    Condition { type_: "Suspended", is_true: true, reason: "JobSuspended", message: "Job suspended" };
const RESUMED: Condition<'static> =
    Condition { type_: "Suspended", is_true: false, reason: "JobResumed", message: "Job resumed" };

/// Sets a condition. A condition with the same status stays as it is.
fn set(status: &mut JobStatus, condition: Condition<'_>, now: Timestamp) {
    let Condition { type_, is_true, reason, message } = condition;
    let value = if is_true { "True" } else { "False" };
    let conditions = status.conditions.get_or_insert_default();
    if conditions.iter().any(|condition| condition.type_ == type_ && condition.status == value) {
        return;
    }
    conditions.retain(|condition| condition.type_ != type_);
    conditions.push(JobCondition {
        type_: type_.to_owned(),
        status: value.to_owned(),
        reason: Some(reason.to_owned()),
        message: Some(message.to_owned()),
        last_probe_time: Some(Time(seconds(now))),
        last_transition_time: Some(Time(seconds(now))),
    });
}

fn seconds(time: Timestamp) -> Timestamp {
    Timestamp::from_second(time.as_second()).unwrap_or(time)
}

fn size(count: usize) -> i32 {
    i32::try_from(count).unwrap_or(i32::MAX)
}

fn positive(count: i32) -> Option<i32> {
    (count > 0).then_some(count)
}

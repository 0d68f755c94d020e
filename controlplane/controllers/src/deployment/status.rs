//! The desired status of a deployment.

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::apps::v1::{DeploymentCondition, DeploymentStatus, ReplicaSetCondition};

use super::condition::{AVAILABLE, Conditions, PROGRESSING, REPLICA_FAILURE, condition};
use super::revision::History;
use super::rolling::{Bounds, available, desired, size};
use crate::object::{Deployment, ObjectExt, ReplicaSet};

/// The counts and the condition `Available`.
pub(crate) fn counts(
    deployment: &Deployment,
    history: &History,
    mut conditions: Conditions,
    now: Timestamp,
) -> DeploymentStatus {
    let sum = |field: &dyn Fn(&ReplicaSet) -> i32| history.all().map(|set| field(set)).sum::<i32>();
    let available = sum(&available);
    let bounds = Bounds::of(deployment);
    let new = if available >= bounds.fewest() {
        let message = "Deployment has minimum availability.".to_owned();
        condition(AVAILABLE, "True", "MinimumReplicasAvailable", message, now)
    } else {
        let message = "Deployment does not have minimum availability.".to_owned();
        condition(AVAILABLE, "False", "MinimumReplicasUnavailable", message, now)
    };
    conditions.set(new);
    DeploymentStatus {
        observed_generation: deployment.metadata.generation,
        replicas: positive(sum(&|set| set.status.replicas)),
        updated_replicas: positive(history.new.as_deref().map_or(0, |set| set.status.replicas)),
        ready_replicas: positive(sum(&|set| set.status.ready_replicas.unwrap_or_default())),
        available_replicas: positive(available),
        unavailable_replicas: positive(sum(&size) - available),
        collision_count: deployment.status.collision_count,
        terminating_replicas: terminating(history),
        conditions: Some(conditions.0),
    }
}

/// The number of pods that are being deleted. `None` if one of the sets does not report its number. A set that was
/// never reconciled does not count.
fn terminating(history: &History) -> Option<i32> {
    let observed = |set: &&Arc<ReplicaSet>| {
        set.status.observed_generation.unwrap_or_default() != 0 || set.status.terminating_replicas.is_some()
    };
    history.all().filter(observed).map(|set| set.status.terminating_replicas).sum()
}

fn positive(count: i32) -> Option<i32> {
    (count > 0).then_some(count)
}

/// The status during and after a rollout, with the conditions `Progressing` and `ReplicaFailure`. Also returns the
/// delay after which a rollout without progress must be reconciled again.
pub(crate) fn rollout(
    deployment: &Deployment,
    history: &History,
    conditions: Conditions,
    now: Timestamp,
) -> (DeploymentStatus, Option<Duration>) {
    let mut status = counts(deployment, history, conditions, now);
    let mut conditions = Conditions(status.conditions.take().unwrap_or_default());
    let seconds = deadline(deployment);
    if seconds.is_none() {
        conditions.remove(PROGRESSING);
    }
    // A rollout that has ended stays complete until the template or the size changes.
    let ended = status.replicas == status.updated_replicas
        && conditions.reason(PROGRESSING) == Some("NewReplicaSetAvailable");
    if let (Some(seconds), false) = (seconds, ended) {
        let deadline = Deadline { seconds, now };
        progress(deployment, history, &status, &mut conditions, deadline);
    }
    conditions.remove(REPLICA_FAILURE);
    if let Some(failure) = replica_failure(history) {
        conditions.set(DeploymentCondition {
            type_: Some(REPLICA_FAILURE.to_owned()),
            status: failure.status.clone(),
            reason: failure.reason.clone(),
            message: failure.message.clone(),
            last_transition_time: failure.last_transition_time.clone(),
            last_update_time: failure.last_transition_time.clone(),
        });
    }
    status.conditions = Some(conditions.0);
    let wait = time_to_deadline(deployment, &status, now);
    (status, wait)
}

/// progressDeadlineSeconds. `None` for the largest number, which means no deadline.
pub(crate) fn deadline(deployment: &Deployment) -> Option<i64> {
    deployment.spec.progress_deadline_seconds.filter(|seconds| *seconds != i32::MAX).map(i64::from)
}

/// Maximum time of a rollout without progress, and the current time.
#[derive(Clone, Copy)]
struct Deadline {
    seconds: i64,
    now: Timestamp,
}

fn progress(
    deployment: &Deployment,
    history: &History,
    status: &DeploymentStatus,
    conditions: &mut Conditions,
    deadline: Deadline,
) {
    let now = deadline.now;
    let subject = match history.new.as_deref() {
        Some(new) => format!("ReplicaSet \"{}\"", new.name()),
        None => format!("Deployment \"{}\"", deployment.name()),
    };
    if is_complete(deployment, status) {
        let message = format!("{subject} has successfully progressed.");
        conditions.set(condition(PROGRESSING, "True", "NewReplicaSetAvailable", message, now));
    } else if has_progressed(&deployment.status, status) {
        let message = format!("{subject} is progressing.");
        conditions.replace(condition(PROGRESSING, "True", "ReplicaSetUpdated", message, now));
    } else if timed_out(conditions, deadline) {
        let message = format!("{subject} has timed out progressing.");
        conditions.set(condition(PROGRESSING, "False", "ProgressDeadlineExceeded", message, now));
    }
}

/// Whether all pods have the new template and are available.
pub(crate) fn is_complete(deployment: &Deployment, status: &DeploymentStatus) -> bool {
    let desired = desired(deployment);
    let is = |count: Option<i32>| count.unwrap_or_default() == desired;
    is(status.updated_replicas)
        && is(status.replicas)
        && is(status.available_replicas)
        && status.observed_generation >= deployment.metadata.generation
}

fn has_progressed(old: &DeploymentStatus, new: &DeploymentStatus) -> bool {
    let of = |count: Option<i32>| count.unwrap_or_default();
    let outdated = |status: &DeploymentStatus| of(status.replicas) - of(status.updated_replicas);
    of(new.updated_replicas) > of(old.updated_replicas)
        || outdated(new) < outdated(old)
        || of(new.ready_replicas) > of(old.ready_replicas)
        || of(new.available_replicas) > of(old.available_replicas)
}

fn timed_out(conditions: &Conditions, deadline: Deadline) -> bool {
    let Deadline { seconds, now } = deadline;
    match conditions.reason(PROGRESSING) {
        None | Some("NewReplicaSetAvailable") => false,
        Some("ProgressDeadlineExceeded") => true,
        Some(_) => updated_at(conditions).is_some_and(|since| since.as_second() + seconds < now.as_second()),
    }
}

fn updated_at(conditions: &Conditions) -> Option<Timestamp> {
    conditions.get(PROGRESSING)?.last_update_time.as_ref().map(|time| time.0)
}

/// The time until a rollout without progress reaches its deadline.
fn time_to_deadline(deployment: &Deployment, status: &DeploymentStatus, now: Timestamp) -> Option<Duration> {
    let deadline = deadline(deployment)?;
    let conditions = Conditions(status.conditions.clone().unwrap_or_default());
    let over = matches!(
        conditions.reason(PROGRESSING),
        None | Some("NewReplicaSetAvailable" | "ProgressDeadlineExceeded" | "DeploymentPaused")
    );
    if over || is_complete(deployment, status) {
        return None;
    }
    let due = updated_at(&conditions)?.as_second() + deadline + 1;
    Some(Duration::from_secs((due - now.as_second()).max(1).unsigned_abs()))
}

/// The condition ReplicaFailure of the new set, otherwise of any set.
fn replica_failure(history: &History) -> Option<ReplicaSetCondition> {
    let failing = |set: &ReplicaSet| {
        let mut conditions = set.status.conditions.iter().flatten();
        conditions.find(|condition| condition.type_.as_deref() == Some(REPLICA_FAILURE)).cloned()
    };
    history.new.iter().chain(&history.old).find_map(|set| failing(set))
}

/// Whether two statuses are equal. An absent count equals zero; the order of conditions does not matter.
pub(crate) fn are_equal(one: &DeploymentStatus, other: &DeploymentStatus) -> bool {
    let counts = |status: &DeploymentStatus| {
        [
            status.replicas,
            status.updated_replicas,
            status.ready_replicas,
            status.available_replicas,
            status.unavailable_replicas,
        ]
        .map(Option::unwrap_or_default)
    };
    let conditions = |status: &DeploymentStatus| {
        let mut conditions = status.conditions.clone().unwrap_or_default();
        conditions.sort_by(|one, other| one.type_.cmp(&other.type_));
        conditions
    };
    counts(one) == counts(other)
        && one.observed_generation == other.observed_generation
        && one.collision_count == other.collision_count
        && one.terminating_replicas == other.terminating_replicas
        && conditions(one) == conditions(other)
}

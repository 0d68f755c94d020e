//! The status of a stateful set.

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::apps::v1::StatefulSetStatus;

use super::pods::{available_at, is_available, is_ready, ordinal, revision};
use crate::object::{ObjectExt, Pod, StatefulSet};
use crate::queue::until;

/// The names of the current and the update revision.
#[derive(Clone, Copy, Debug)]
pub(super) struct Revisions<'a> {
    pub(super) current: &'a str,
    pub(super) update: &'a str,
    pub(super) collisions: i32,
}

/// The desired status, and the time after which it may change without an event.
pub(super) fn status(
    set: &StatefulSet,
    pods: &[Arc<Pod>],
    revisions: Revisions<'_>,
    now: Timestamp,
) -> (StatefulSetStatus, Option<Duration>) {
    let own: Vec<&Arc<Pod>> = pods.iter().filter(|pod| ordinal(set, pod).is_some()).collect();
    let count = |is: &dyn Fn(&Pod) -> bool| {
        i32::try_from(own.iter().filter(|pod| is(pod)).count()).unwrap_or(i32::MAX)
    };
    let of = |name: &str| count(&|pod| !pod.is_being_deleted() && revision(pod) == name);
    let replicas = count(&|_| true);
    let (ready, updated) = (count(&is_ready), of(revisions.update));
    let desired = set.spec.replicas.unwrap_or(1);
    let strategy = set.spec.update_strategy.as_ref().and_then(|strategy| strategy.type_.as_deref());
    // A rolling update is complete when every pod has the update revision and is ready.
    let complete =
        strategy != Some("OnDelete") && updated == desired && ready == desired && replicas == desired;
    let current = if complete { revisions.update } else { revisions.current };
    let waits = own.iter().filter_map(|pod| available_at(set, pod, now)).filter_map(|at| until(at, now));
    let positive = |count: i32| (count > 0).then_some(count);
    let status = StatefulSetStatus {
        available_replicas: Some(count(&|pod| is_available(set, pod, now))),
        collision_count: Some(revisions.collisions),
        conditions: set.status.conditions.clone(),
        current_replicas: positive(of(current)),
        current_revision: Some(current.to_owned()),
        observed_generation: set.metadata.generation,
        ready_replicas: positive(ready),
        replicas,
        update_revision: Some(revisions.update.to_owned()),
        updated_replicas: positive(updated),
    };
    (status, waits.min())
}

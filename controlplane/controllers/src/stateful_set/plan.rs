//! The plan of a stateful set: pods to create and to delete. With ordered management there is one step at a time.

use std::collections::BTreeMap;
use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use super::pods::{is_available, ordinal, revision};
use crate::object::{ObjectExt, Pod, StatefulSet};
use crate::stateful_set_metrics::SetAvailability;

/// Maximum number of pods that one reconcile creates. Each new pod causes another reconcile.
const BURST: usize = 500;

/// The input of the plan.
pub(crate) struct Snapshot<'a> {
    pub(crate) set: &'a StatefulSet,
    /// The pods that the set controls.
    pub(crate) pods: &'a [Arc<Pod>],
    /// The name of the update revision.
    pub(crate) update: &'a str,
    /// Whether a claim of the pod with this ordinal is about to be deleted, so that the pod must be created later.
    pub(crate) stale: &'a dyn Fn(i32) -> bool,
    pub(crate) now: Timestamp,
}

/// A planned action.
#[derive(Debug)]
pub(crate) enum Action {
    /// Creates the pod with this ordinal, with the update revision or the current revision.
    Create {
        ordinal: i32,
        updated: bool,
    },
    Delete(Arc<Pod>),
}

/// The desired ordinals of a set.
pub(super) fn ordinals(set: &StatefulSet) -> std::ops::Range<i32> {
    let start = set.spec.ordinals.as_ref().and_then(|ordinals| ordinals.start).unwrap_or_default();
    start..start.saturating_add(set.spec.replicas.unwrap_or(1))
}

/// Whether the action deletes a pod that does not have one of the desired [`ordinals`].
pub(super) fn is_above_size(set: &StatefulSet, action: &Action) -> bool {
    let Action::Delete(pod) = action else { return false };
    ordinal(set, pod).is_some_and(|ordinal| !ordinals(set).contains(&ordinal))
}

/// Whether the action belongs to a step after the creation and replacement of pods. If an earlier action fails,
/// upstream does not run this step.
pub(super) fn is_later_step(set: &StatefulSet, action: &Action) -> bool {
    let Action::Delete(pod) = action else { return false };
    !pod.finished() || is_above_size(set, action)
}

/// Whether the pods are created and deleted in parallel.
fn is_parallel(set: &StatefulSet) -> bool {
    set.spec.pod_management_policy.as_deref() == Some("Parallel")
}

/// Plans the actions.
pub(crate) fn plan(snapshot: &Snapshot<'_>) -> Vec<Action> {
    let set = snapshot.set;
    let mut actions = Vec::new();
    if set.is_being_deleted() {
        return actions;
    }
    let range = ordinals(set);
    let (mut replicas, mut condemned) = (BTreeMap::new(), BTreeMap::new());
    for pod in snapshot.pods {
        let Some(ordinal) = ordinal(set, pod) else { continue };
        let place = if range.contains(&ordinal) { &mut replicas } else { &mut condemned };
        place.insert(ordinal, pod.clone());
    }
    if fill(snapshot, &replicas, &mut actions) && shrink(snapshot, &replicas, &condemned, &mut actions) {
        roll(snapshot, &replicas, &mut actions);
    }
    actions
}

type Pods = BTreeMap<i32, Arc<Pod>>;

/// Plans missing pods and the replacement of finished pods. Returns whether the following steps may run. With ordered
/// management they wait until all desired pods are available. With parallel management they always run, as upstream
/// (`runForAll`).
fn fill(snapshot: &Snapshot<'_>, replicas: &Pods, actions: &mut Vec<Action>) -> bool {
    let (set, ordered) = (snapshot.set, !is_parallel(snapshot.set));
    let mut created = 0;
    // The loop stops after `BURST` new pods, because a tenant may set `replicas` to 2147483647.
    for ordinal in ordinals(set) {
        if created == BURST {
            let later = replicas.range(ordinal..).map(|(_, pod)| pod);
            let ended = later.filter(|pod| pod.finished() && !pod.is_being_deleted());
            actions.extend(ended.cloned().map(Action::Delete));
            break;
        }
        let done = match replicas.get(&ordinal) {
            Some(pod) if pod.finished() => {
                if !pod.is_being_deleted() {
                    actions.push(Action::Delete(pod.clone()));
                }
                false
            }
            None if (snapshot.stale)(ordinal) => false,
            None => {
                created += 1;
                actions.push(Action::Create { ordinal, updated: is_updated(set, ordinal) });
                false
            }
            Some(pod) => !pod.is_being_deleted() && is_available(set, pod, snapshot.now),
        };
        if ordered && !done {
            return false;
        }
    }
    true
}

/// Whether a new pod has the update revision. Pods below the partition have the current revision. Without
/// `rollingUpdate`, the first `status.currentReplicas` pods have it.
pub(super) fn is_updated(set: &StatefulSet, ordinal: i32) -> bool {
    let strategy = set.spec.update_strategy.as_ref();
    if strategy.and_then(|strategy| strategy.type_.as_deref()) == Some("OnDelete") {
        return true;
    }
    let start = ordinals(set).start;
    let first = match strategy.and_then(|strategy| strategy.rolling_update.as_ref()) {
        Some(rolling) => rolling.partition.unwrap_or_default(),
        None => set.status.current_replicas.unwrap_or_default(),
    };
    ordinal >= start.saturating_add(first)
}

/// Plans the deletion of pods whose ordinals are not desired, highest ordinal first. Returns whether the update may
/// run.
fn shrink(snapshot: &Snapshot<'_>, replicas: &Pods, condemned: &Pods, actions: &mut Vec<Action>) -> bool {
    let (set, ordered) = (snapshot.set, !is_parallel(snapshot.set));
    let healthy = |pod: &Pod| !pod.is_being_deleted() && is_available(set, pod, snapshot.now);
    let complete = ordinals(set).all(|ordinal| replicas.get(&ordinal).is_some_and(|pod| healthy(pod)));
    let first_unhealthy =
        if complete { condemned.values().find(|pod| !healthy(pod)).map(|pod| pod.uid()) } else { None };
    for pod in condemned.values().rev() {
        if pod.is_being_deleted() {
            if ordered {
                return false;
            }
            continue;
        }
        if ordered && !healthy(pod) && first_unhealthy != Some(pod.uid()) {
            return false;
        }
        actions.push(Action::Delete(pod.clone()));
        if ordered {
            return false;
        }
    }
    true
}

/// Plans the deletion of pods with old revisions, highest ordinal first. With `maxUnavailable`, at most that number of
/// pods is unavailable afterwards. Without this field, one pod is deleted at a time, and only if all pods with a higher
/// ordinal are available. Missing pods are unavailable. Sources: `updateStatefulSetAfterInvariantEstablished`, and
/// `updateStatefulSet` without the gate `MaxUnavailableStatefulSet`.
fn roll(snapshot: &Snapshot<'_>, replicas: &Pods, actions: &mut Vec<Action>) {
    let set = snapshot.set;
    let strategy = set.spec.update_strategy.as_ref();
    if strategy.and_then(|strategy| strategy.type_.as_deref()) == Some("OnDelete") {
        return;
    }
    let rolling = strategy.and_then(|strategy| strategy.rolling_update.as_ref());
    let range = ordinals(set);
    let partition = rolling.and_then(|rolling| rolling.partition).unwrap_or_default();
    let first = range.start.saturating_add(partition).max(range.start);
    let is_old = |pod: &Arc<Pod>| revision(pod) != snapshot.update && !pod.is_being_deleted();
    let is_unavailable = |pod: &Arc<Pod>| pod.is_being_deleted() || !is_available(set, pod, snapshot.now);
    let allowed = rolling.and_then(|rolling| rolling.max_unavailable.as_ref());
    let chosen: Vec<&Arc<Pod>> = if let Some(allowed) = allowed {
        let missing = range.len().saturating_sub(replicas.len());
        let unavailable = replicas.values().filter(|pod| is_unavailable(pod)).count();
        let room = max_unavailable(allowed, set).saturating_sub(missing.saturating_add(unavailable));
        let pods = replicas.range(first..).rev().map(|(_, pod)| pod);
        pods.filter(|pod| is_old(pod)).take(room).collect()
    } else {
        // The pods with the highest ordinals, without a gap.
        let highest = replicas.range(first..).rev().zip((first..range.end).rev());
        let present = highest.take_while(|((ordinal, _), expected)| *ordinal == expected);
        let mut pods = present.map(|((_, pod), _)| pod);
        pods.find(|pod| is_old(pod) || is_unavailable(pod)).filter(|pod| is_old(pod)).into_iter().collect()
    };
    // The deletion of finished pods is already planned (`fill`).
    let chosen = chosen.into_iter().filter(|pod| !pod.finished());
    actions.extend(chosen.cloned().map(Action::Delete));
}

/// The availability of the desired pods. `None` without rolling updates.
pub(super) fn availability(set: &StatefulSet, pods: &[Arc<Pod>], now: Timestamp) -> Option<SetAvailability> {
    let strategy = set.spec.update_strategy.as_ref();
    if strategy.and_then(|strategy| strategy.type_.as_deref()) == Some("OnDelete") {
        return None;
    }
    let rolling = strategy.and_then(|strategy| strategy.rolling_update.as_ref());
    let allowed = rolling.and_then(|rolling| rolling.max_unavailable.as_ref());
    let range = ordinals(set);
    let is_desired = |pod: &Pod| ordinal(set, pod).is_some_and(|ordinal| range.contains(&ordinal));
    let is_ready =
        |pod: &&Arc<Pod>| is_desired(pod) && !pod.is_being_deleted() && is_available(set, pod, now);
    let available = pods.iter().filter(is_ready).count();
    Some(SetAvailability {
        is_parallel: is_parallel(set),
        max_unavailable: allowed.map_or(1, |value| max_unavailable(value, set)),
        unavailable: range.len().saturating_sub(available),
    })
}

/// `maxUnavailable` as a number, at least 1. A percentage refers to the number of replicas.
fn max_unavailable(value: &IntOrString, set: &StatefulSet) -> usize {
    let replicas = set.spec.replicas.unwrap_or(1);
    let number = match value {
        IntOrString::Int(number) => *number,
        IntOrString::String(text) => {
            let percent: i32 =
                text.strip_suffix('%').and_then(|number| number.parse().ok()).unwrap_or_default();
            replicas.saturating_mul(percent) / 100
        }
    };
    usize::try_from(number.max(1)).unwrap_or(1)
}

#[cfg(test)]
mod tests;

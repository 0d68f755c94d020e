//! The size of each replica set of a deployment during a rollout.

use std::cmp::Reverse;
use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use super::revision::{DESIRED_REPLICAS, History, MAX_REPLICAS, by_age, number};
use crate::object::{Deployment, ObjectExt, ReplicaSet};

/// A replica set with its desired size.
pub(crate) struct Size {
    pub(crate) set: Arc<ReplicaSet>,
    pub(crate) to: i32,
}

/// The bounds of a rolling update, in pods.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Bounds {
    pub(crate) desired: i32,
    pub(crate) surge: i32,
    pub(crate) unavailable: i32,
}

/// `spec.replicas` of the deployment.
pub(crate) fn desired(deployment: &Deployment) -> i32 {
    deployment.spec.replicas.unwrap_or(1)
}

/// `spec.replicas` of the set.
pub(crate) fn size(set: &ReplicaSet) -> i32 {
    set.spec.replicas.unwrap_or(1)
}

/// `status.availableReplicas` of the set.
pub(crate) fn available(set: &ReplicaSet) -> i32 {
    set.status.available_replicas.unwrap_or_default()
}

/// Whether the strategy is Recreate.
pub(crate) fn recreates(deployment: &Deployment) -> bool {
    deployment.spec.strategy.as_ref().and_then(|strategy| strategy.type_.as_deref()) == Some("Recreate")
}

impl Bounds {
    /// The deployment's bounds. maxSurge is rounded up, and maxUnavailable is rounded down. If both are 0, one pod may
    /// be unavailable. Otherwise the update could never begin.
    pub(crate) fn of(deployment: &Deployment) -> Self {
        let desired = desired(deployment);
        if recreates(deployment) {
            return Self { desired, surge: 0, unavailable: 0 };
        }
        let rolling = deployment.spec.strategy.as_ref().and_then(|strategy| strategy.rolling_update.as_ref());
        let surge = share(rolling.and_then(|rolling| rolling.max_surge.as_ref()), desired, 99);
        let mut unavailable = share(rolling.and_then(|rolling| rolling.max_unavailable.as_ref()), desired, 0);
        if surge == 0 && unavailable == 0 {
            unavailable = 1;
        }
        let unavailable = unavailable.min(desired);
        Self { desired, surge, unavailable }
    }

    /// Maximum number of pods.
    pub(crate) fn most(self) -> i32 {
        self.desired + self.surge
    }

    /// Minimum number of available pods.
    pub(crate) fn fewest(self) -> i32 {
        self.desired - self.unavailable
    }
}

/// A number, or a percentage of `whole`. `round` is 0 to round down, 99 to round up. The default is 25%.
fn share(value: Option<&IntOrString>, whole: i32, round: i32) -> i32 {
    let percent = match value {
        Some(IntOrString::Int(number)) => return *number,
        Some(IntOrString::String(text)) => {
            text.strip_suffix('%').and_then(|number| number.parse().ok()).unwrap_or_default()
        }
        None => 25,
    };
    whole.saturating_mul(percent).saturating_add(round) / 100
}

/// The size of the new set: as many pods as maxSurge allows.
pub(crate) fn new_size(deployment: &Deployment, history: &History) -> i32 {
    let bounds = Bounds::of(deployment);
    let own = history.new.as_deref().map(size).unwrap_or_default();
    if recreates(deployment) || own > bounds.desired {
        return bounds.desired;
    }
    let total: i32 = history.all().map(|set| size(set)).sum();
    let room = (bounds.most() - total).max(0);
    own + room.min(bounds.desired - own)
}

/// Reduced sizes of old sets: first by their unavailable pods, then by as many pods as maxUnavailable allows.
pub(crate) fn shrink_old(deployment: &Deployment, history: &History) -> Vec<Size> {
    let bounds = Bounds::of(deployment);
    let Some(new) = history.new.as_deref() else { return Vec::new() };
    let total: i32 = history.all().map(|set| size(set)).sum();
    let new_unavailable = size(new) - available(new);
    let mut allowed = total - bounds.fewest() - new_unavailable;
    if allowed <= 0 {
        return Vec::new();
    }
    let mut sizes: Vec<Size> = history
        .old
        .iter()
        .map(|set| Size { set: set.clone(), to: size(set) })
        .filter(|size| size.to > 0)
        .collect();
    for target in &mut sizes {
        let gone = allowed.min(target.to - available(&target.set)).max(0);
        target.to -= gone;
        allowed -= gone;
    }
    let in_service: i32 = history.all().map(|set| available(set)).sum();
    let mut spare = (in_service - bounds.fewest()).max(0);
    for target in &mut sizes {
        let gone = spare.min(target.to);
        target.to -= gone;
        spare -= gone;
    }
    sizes.retain(|target| target.to != size(&target.set));
    sizes
}

/// Whether the deployment's size changed since its sets were last scaled.
pub(crate) fn is_rescaled(deployment: &Deployment, history: &History) -> bool {
    let desired = desired(deployment);
    let mut active = history.all().filter(|set| size(set) > 0);
    active.any(|set| number(&**set, DESIRED_REPLICAS).is_some_and(|written| written != desired))
}

/// New sizes after the deployment's size changed, also during a rollout. Each set keeps its share, so that the part of
/// the pods with the new template does not change.
pub(crate) fn rescale(deployment: &Deployment, history: &History) -> Vec<Size> {
    let bounds = Bounds::of(deployment);
    let active: Vec<_> = history.all().filter(|set| size(set) > 0).cloned().collect();
    let only = match active.as_slice() {
        [] => history.new.clone().or_else(|| history.old.last().cloned()),
        [only] => Some(only.clone()),
        _ => None,
    };
    if let Some(only) = only {
        // As upstream, a set of the right size keeps its annotations, even if maxSurge has changed.
        let is_scaled = size(&only) == bounds.desired && !is_rescaled(deployment, history);
        return if is_scaled { Vec::new() } else { vec![Size { to: bounds.desired, set: only }] };
    }
    if history.new.as_deref().is_some_and(|new| is_saturated(new, bounds.desired)) {
        let old = history.old.iter().filter(|set| size(set) > 0);
        return old.map(|set| Size { set: set.clone(), to: 0 }).collect();
    }
    if recreates(deployment) {
        return Vec::new();
    }
    proportional(deployment, bounds, active)
}

fn is_saturated(new: &ReplicaSet, desired: i32) -> bool {
    size(new) == desired && number(new, DESIRED_REPLICAS) == Some(desired) && available(new) == desired
}

fn proportional(deployment: &Deployment, bounds: Bounds, mut active: Vec<Arc<ReplicaSet>>) -> Vec<Size> {
    let total: i32 = active.iter().map(|set| size(set)).sum();
    let allowed = if bounds.desired > 0 { bounds.most() } else { 0 };
    let change = allowed - total;
    // The larger set is first. If two sets have the same size, the newer set grows first, and the older set shrinks
    // first.
    active.sort_by(|one, other| by_age(one, other));
    if change > 0 {
        active.reverse();
    }
    active.sort_by_key(|set| Reverse(size(set)));
    let mut done = 0;
    let mut sizes = Vec::new();
    for set in active {
        let part = fraction(deployment, bounds, &set);
        let left = change - done;
        let part = match change {
            1.. => part.clamp(0, left.max(0)),
            0 => 0,
            _ => part.clamp(left.min(0), 0),
        };
        done += part;
        sizes.push(Size { to: size(&set) + part, set });
    }
    if let Some(first) = sizes.first_mut() {
        first.to = (first.to + change - done).max(0);
    }
    sizes
}

/// The change of a set's size after which the set has the same share of the total as at the last scaling.
fn fraction(deployment: &Deployment, bounds: Bounds, set: &ReplicaSet) -> i32 {
    if bounds.desired == 0 {
        return -size(set);
    }
    let whole = number(set, MAX_REPLICAS).filter(|whole| *whole != 0).or(deployment.status.replicas);
    let Some(whole) = whole.filter(|whole| *whole != 0) else { return 0 };
    let desired = f64::from(size(set)) * f64::from(bounds.most()) / f64::from(whole);
    // Pod counts are far below the limits of a float and of an i32.
    #[expect(clippy::cast_possible_truncation, reason = "rounded to a pod count")]
    let desired = desired.round() as i32;
    desired - size(set)
}

/// Old sets that still have pods, each with desired size 0.
pub(crate) fn empty_old(history: &History) -> Vec<Size> {
    let old = history.old.iter().filter(|set| size(set) > 0 && !set.is_being_deleted());
    old.map(|set| Size { set: set.clone(), to: 0 }).collect()
}

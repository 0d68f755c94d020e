//! The rolling update of a daemon set: with unavailable pods, or with a second pod on a node (surge).

use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use super::observed::{ObservedDaemonSet, Plan};
use crate::object::{DaemonSet, ObjectExt, Pod};

/// Whether a node may have a second pod during an update.
pub(super) fn surges(set: &DaemonSet) -> bool {
    bounds(set, 1).is_some_and(|bounds| bounds.surge > 0)
}

/// The limits of a rolling update.
struct Bounds {
    /// `maxSurge` as a number.
    surge: usize,
    /// `maxUnavailable` as a number.
    unavailable: usize,
}

/// The limits of the set's update strategy. `None` for other strategies than `RollingUpdate`.
fn bounds(set: &DaemonSet, desired: usize) -> Option<Bounds> {
    let strategy = set.spec.update_strategy.as_ref()?;
    if strategy.type_.as_deref().unwrap_or("RollingUpdate") != "RollingUpdate" {
        return None;
    }
    let rolling = strategy.rolling_update.as_ref();
    let surge = scaled(rolling.and_then(|rolling| rolling.max_surge.as_ref()), desired, 0);
    let unavailable = scaled(rolling.and_then(|rolling| rolling.max_unavailable.as_ref()), desired, 1);
    let unavailable = if surge == 0 && unavailable == 0 { 1 } else { unavailable };
    Some(Bounds { surge, unavailable })
}

/// A number, or a percentage of `whole`, rounded up.
fn scaled(value: Option<&IntOrString>, whole: usize, absent: usize) -> usize {
    match value {
        None => absent,
        Some(IntOrString::Int(number)) => usize::try_from(*number).unwrap_or_default(),
        Some(IntOrString::String(text)) => {
            let percent: usize =
                text.strip_suffix('%').and_then(|number| number.parse().ok()).unwrap_or_default();
            whole.saturating_mul(percent).div_ceil(100)
        }
    }
}

/// The pods of a node: of the current template and of old templates. `None` if the node has several pods of the current
/// template, or several pods of old templates.
type Pair<'a> = (Option<&'a Arc<Pod>>, Option<&'a Arc<Pod>>);

fn pair<'a>(observed: &ObservedDaemonSet<'_>, pods: &'a [Arc<Pod>]) -> Option<Pair<'a>> {
    let alive = || pods.iter().filter(|pod| !pod.is_being_deleted());
    let mut new = alive().filter(|pod| observed.is_updated(pod));
    let mut old = alive().filter(|pod| !observed.is_updated(pod));
    let pair = (new.next(), old.next());
    (new.next().is_none() && old.next().is_none()).then_some(pair)
}

/// Plans the update of pods with old templates.
pub(super) fn update(observed: &ObservedDaemonSet<'_>, plan: &mut Plan) {
    let desired = observed.desired();
    match bounds(observed.snapshot.set, desired) {
        None => {}
        Some(Bounds { surge: 0, unavailable }) => replace(observed, unavailable, plan),
        Some(Bounds { surge, .. }) => surge_update(observed, surge, desired, plan),
    }
}

/// Deletes old pods: all unavailable pods, and as many available pods as `maxUnavailable` permits.
fn replace(observed: &ObservedDaemonSet<'_>, allowed: usize, plan: &mut Plan) {
    let mut unavailable = 0;
    let mut candidates = Vec::new();
    for pods in observed.by_node.values() {
        match pair(observed, pods) {
            None | Some((None, None) | (Some(_), Some(_))) => unavailable += 1,
            Some((Some(new), None)) => unavailable += usize::from(!observed.is_available(new)),
            Some((None, Some(old))) if !observed.is_available(old) => {
                unavailable += 1;
                plan.delete.push(old.clone());
            }
            Some((None, Some(old))) => candidates.push(old.clone()),
        }
    }
    plan.delete.extend(candidates.into_iter().take(allowed.saturating_sub(unavailable)));
}

/// Creates new pods beside old pods, and deletes each old pod once its new pod is available.
fn surge_update(observed: &ObservedDaemonSet<'_>, surge: usize, desired: usize, plan: &mut Plan) {
    let (mut surging, mut available) = (0, 0);
    let (mut candidates, mut unwanted) = (Vec::new(), Vec::new());
    for (node, pods) in &observed.by_node {
        let Some((new, old)) = pair(observed, pods) else {
            surging += 1;
            continue;
        };
        available += usize::from(old.or(new).is_some_and(|pod| observed.is_available(pod)));
        let Some(old) = old else { continue };
        let runs = observed.fits.get(node).is_some_and(|fit| fit.runs);
        match new {
            Some(new) if observed.is_available(new) => plan.delete.push(old.clone()),
            Some(_) => surging += 1,
            None if runs && observed.is_available(old) => candidates.push(node.clone()),
            None if runs => plan.create.push(node.clone()),
            None if observed.is_available(old) => unwanted.push(old.clone()),
            None => plan.delete.push(old.clone()),
        }
    }
    plan.delete.extend(unwanted.into_iter().take(available.saturating_sub(desired)));
    plan.create.extend(candidates.into_iter().take(surge.saturating_sub(surging)));
}

/// Deletes surplus pods of a node with surge. At most one new pod and one old pod stay. The old pod stays only while it
/// is ready and the new pod is not available.
pub(super) fn prune(observed: &ObservedDaemonSet<'_>, running: &[Arc<Pod>], plan: &mut Plan) {
    let (new, old): (Vec<&Arc<Pod>>, Vec<&Arc<Pod>>) =
        running.iter().partition(|pod| observed.is_updated(pod));
    plan.delete.extend(new.iter().skip(1).chain(old.iter().skip(1)).map(|pod| (*pod).clone()));
    if let (Some(new), Some(old)) = (new.first(), old.first())
        && (old.ready_since().is_none() || observed.is_available(new))
    {
        plan.delete.push((*old).clone());
    }
}

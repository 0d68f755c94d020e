//! The desired status of a pod disruption budget, from its pods and their controllers.

use std::collections::BTreeMap;
use std::sync::Arc;

use coracle_values::label_selector;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::policy::v1::PodDisruptionBudgetStatus;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use crate::object::{ObjectExt, Pod, PodDisruptionBudget};

/// Time after which an evicted pod that was not deleted counts as not evicted, as upstream.
const DELETION_TIMEOUT: SignedDuration = SignedDuration::from_secs(120);
const CONDITION: &str = "DisruptionAllowed";

/// The controller of a pod, with its scale.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Controller {
    /// The pod has no controller.
    None,
    /// A controller with a scale.
    Known { uid: String, scale: i32 },
    /// The controller does not exist.
    Unknown,
    /// The scale cannot be read, for this reason.
    Failed(String),
}

/// A pod that a budget selects, with its controller.
#[derive(Clone, Debug)]
pub(crate) struct SelectedPod {
    pub(crate) pod: Arc<Pod>,
    pub(crate) controller: Controller,
}

/// The result for a budget.
#[derive(Debug)]
pub(crate) struct Verdict {
    pub(crate) status: PodDisruptionBudgetStatus,
    /// Time of the next reconcile if nothing changes.
    pub(crate) recheck: Option<Timestamp>,
    /// Pods that were evicted but not deleted.
    pub(crate) overdue: Vec<Arc<Pod>>,
    /// Whether the budget needs the desired numbers of pods of the controllers (`maxUnavailable`, or a percentage), but
    /// some pods have no controller.
    pub(crate) unmanaged: bool,
    /// The reason why the expected number is unknown. In this case no disruption is allowed.
    pub(crate) failure: Option<String>,
}

/// Expected number of pods, and minimum number of healthy pods.
struct Expected {
    pods: i32,
    healthy: i32,
    unmanaged: bool,
}

/// The scales of all controllers of a budget's pods.
struct Scale {
    total: i32,
    /// Whether some pods have no controller.
    unmanaged: bool,
}

/// Evicted pods that are not being deleted.
struct EvictedPods {
    /// The times of evictions within [`DELETION_TIMEOUT`], by the names of the pods.
    disrupted: BTreeMap<String, Time>,
    /// The pods whose eviction is older than [`DELETION_TIMEOUT`].
    overdue: Vec<Arc<Pod>>,
}

/// Whether the budget selects the pod.
pub(crate) fn selects(budget: &PodDisruptionBudget, pod: &Pod) -> bool {
    let selector = budget.spec.selector.as_ref();
    selector.is_some_and(|selector| label_selector::selects(selector, pod.metadata.labels.as_ref()))
}

/// Whether the status depends on the scales of the pods' controllers.
pub(crate) fn needs_scale(budget: &PodDisruptionBudget) -> bool {
    let least = &budget.spec.min_available;
    budget.spec.max_unavailable.is_some() || matches!(least, Some(IntOrString::String(_)))
}

/// The desired status.
pub(crate) fn verdict(budget: &PodDisruptionBudget, pods: &[SelectedPod], now: Timestamp) -> Verdict {
    let now = Timestamp::from_second(now.as_second()).unwrap_or(now);
    let expected = match expected(budget, pods) {
        Ok(expected) => expected,
        Err(why) => return failed(budget, why, now),
    };
    let EvictedPods { disrupted, overdue } = evicted(budget, pods, now);
    let is_healthy = |pod: &Pod| {
        !pod.is_being_deleted() && !disrupted.contains_key(pod.name()) && pod.ready_since().is_some()
    };
    let healthy = count(pods.iter().filter(|selected| is_healthy(&selected.pod)).count());
    // Without pods no disruption is allowed, because new pods may be created before the next reconcile.
    let allowed = if expected.pods > 0 { (healthy - expected.healthy).max(0) } else { 0 };
    let recheck = disrupted.values().map(|time| time.0).min();
    let generation = budget.metadata.generation;
    let (met, reason) = if allowed > 0 { ("True", "SufficientPods") } else { ("False", "InsufficientPods") };
    let condition = condition(met, reason, String::new(), generation);
    Verdict {
        status: PodDisruptionBudgetStatus {
            conditions: Some(with(budget, condition, now)),
            current_healthy: Some(healthy),
            desired_healthy: Some(expected.healthy),
            disrupted_pods: (!disrupted.is_empty()).then_some(disrupted),
            disruptions_allowed: Some(allowed),
            expected_pods: Some(expected.pods),
            observed_generation: generation,
        },
        // One second is added, because times in the API are whole seconds.
        recheck: recheck
            .and_then(|time| time.checked_add(DELETION_TIMEOUT + SignedDuration::from_secs(1)).ok()),
        overdue,
        unmanaged: expected.unmanaged,
        failure: None,
    }
}

/// The status while the expected number is unknown: no disruption is allowed.
fn failed(budget: &PodDisruptionBudget, why: String, now: Timestamp) -> Verdict {
    let mut status = budget.status.clone();
    status.disruptions_allowed = Some(0);
    let condition = condition("False", "SyncFailed", why.clone(), status.observed_generation);
    status.conditions = Some(with(budget, condition, now));
    Verdict { status, recheck: None, overdue: Vec::new(), unmanaged: false, failure: Some(why) }
}

fn expected(budget: &PodDisruptionBudget, pods: &[SelectedPod]) -> Result<Expected, String> {
    let (least, most) = (&budget.spec.min_available, &budget.spec.max_unavailable);
    if let Some(most) = most {
        let Scale { total: scale, unmanaged } = scale(pods)?;
        let healthy = (scale - share(most, scale)?).max(0);
        return Ok(Expected { pods: scale, healthy, unmanaged });
    }
    match least {
        None => Ok(Expected { pods: 0, healthy: 0, unmanaged: false }),
        Some(IntOrString::Int(least)) => {
            Ok(Expected { pods: count(pods.len()), healthy: *least, unmanaged: false })
        }
        Some(part) => {
            let Scale { total: scale, unmanaged } = scale(pods)?;
            Ok(Expected { pods: scale, healthy: share(part, scale)?, unmanaged })
        }
    }
}

/// The sum of the scales of all controllers.
fn scale(pods: &[SelectedPod]) -> Result<Scale, String> {
    let (mut scales, mut unmanaged) = (BTreeMap::new(), false);
    for SelectedPod { pod, controller } in pods {
        match controller {
            Controller::None => unmanaged = true,
            Controller::Known { uid, scale } => drop(scales.insert(uid.as_str(), *scale)),
            Controller::Unknown => return Err(format!("found no controllers for pod {:?}", pod.name())),
            Controller::Failed(why) => return Err(why.clone()),
        }
    }
    Ok(Scale { total: scales.into_values().fold(0, i32::saturating_add), unmanaged })
}

/// A number, or a percentage of the whole, rounded up.
fn share(part: &IntOrString, whole: i32) -> Result<i32, String> {
    let text = match part {
        IntOrString::Int(number) => return Ok(*number),
        IntOrString::String(text) => text,
    };
    let percent = text.strip_suffix('%').and_then(|number| number.parse::<i32>().ok());
    let percent = percent.ok_or_else(|| format!("{text:?} is not a percentage"))?;
    Ok(whole.saturating_mul(percent).saturating_add(99) / 100)
}

/// The evicted pods that are not being deleted.
fn evicted(budget: &PodDisruptionBudget, pods: &[SelectedPod], now: Timestamp) -> EvictedPods {
    let (mut disrupted, mut overdue) = (BTreeMap::new(), Vec::new());
    let known = budget.status.disrupted_pods.as_ref();
    for pod in pods.iter().map(|selected| &selected.pod).filter(|pod| !pod.is_being_deleted()) {
        let Some(since) = known.and_then(|known| known.get(pod.name())) else { continue };
        if now.duration_since(since.0) > DELETION_TIMEOUT {
            overdue.push(pod.clone());
        } else {
            disrupted.insert(pod.name().to_owned(), since.clone());
        }
    }
    EvictedPods { disrupted, overdue }
}

fn condition(status: &str, reason: &str, message: String, generation: Option<i64>) -> Condition {
    Condition {
        last_transition_time: Time(Timestamp::UNIX_EPOCH),
        message,
        observed_generation: generation,
        reason: reason.to_owned(),
        status: status.to_owned(),
        type_: CONDITION.to_owned(),
    }
}

/// The budget's conditions with this condition set. Its transition time changes only if its status changes.
fn with(budget: &PodDisruptionBudget, mut condition: Condition, now: Timestamp) -> Vec<Condition> {
    let mut all = budget.status.conditions.clone().unwrap_or_default();
    let known = all.iter_mut().find(|known| known.type_ == condition.type_);
    let since = known.as_ref().filter(|known| known.status == condition.status);
    condition.last_transition_time = since.map_or(Time(now), |known| known.last_transition_time.clone());
    match known {
        Some(known) => *known = condition,
        None => all.push(condition),
    }
    all
}

fn count(number: usize) -> i32 {
    i32::try_from(number).unwrap_or(i32::MAX)
}

#[cfg(test)]
mod tests;

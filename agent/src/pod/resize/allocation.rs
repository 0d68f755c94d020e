//! Allocated resources: which resize the node accepts, and in which order resizes are evaluated. Pure.
//!
//! Source: `pkg/kubelet/allocation/allocation_manager.go`.

use std::cmp::Reverse;

use k8s_openapi::api::core::v1::{Container, Pod, PodSpec};
use k8s_openapi::jiff::Timestamp;

use crate::cgroup::resources::{Amount, pod_requests};
use crate::cgroup::{QosClass, qos_class};
use crate::pod::resize_state::PendingResize;

/// A pending resize in the order in which resizes are evaluated. Resizes that request no more than before are first.
/// The other resizes are sorted by priority, QoS class and age.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Candidate {
    grows: bool,
    priority: Reverse<i32>,
    is_not_guaranteed: bool,
    since: Timestamp,
}

impl Candidate {
    /// The candidate of a pod with its allocated version.
    pub(crate) fn of(pod: &Pod, allocated: &Pod, since: Timestamp) -> Self {
        let (new, old) = (pod_requests(pod), pod_requests(allocated));
        Self {
            grows: new.cpu_millis > old.cpu_millis || new.memory > old.memory,
            priority: Reverse(pod.spec.as_ref().and_then(|spec| spec.priority).unwrap_or(0)),
            is_not_guaranteed: qos_class(pod) != QosClass::Guaranteed,
            since,
        }
    }
}

/// Whether two versions of a pod have different resources.
pub(crate) fn differs(a: &Pod, b: &Pod) -> bool {
    let (Some(a), Some(b)) = (&a.spec, &b.spec) else { return false };
    let differs = |container: &Container| {
        named(b, &container.name).is_some_and(|other| {
            other.resources.clone().unwrap_or_default() != container.resources.clone().unwrap_or_default()
        })
    };
    a.resources != b.resources || all(a).any(differs)
}

/// The pod with the resources of another version.
pub(crate) fn with_resources(pod: &Pod, from: &Pod) -> Pod {
    let mut pod = pod.clone();
    if let (Some(spec), Some(from)) = (&mut pod.spec, &from.spec) {
        spec.resources.clone_from(&from.resources);
        for container in spec.init_containers.iter_mut().flatten().chain(&mut spec.containers) {
            if let Some(other) = named(from, &container.name) {
                container.resources.clone_from(&other.resources);
            }
        }
    }
    pod
}

fn all(spec: &PodSpec) -> impl Iterator<Item = &Container> {
    spec.init_containers.iter().flatten().chain(&spec.containers)
}

fn named<'a>(spec: &'a PodSpec, name: &str) -> Option<&'a Container> {
    all(spec).find(|container| container.name == name)
}

/// A resize that this node never accepts.
pub(crate) fn infeasible(pod: &Pod, message: &str) -> PendingResize {
    PendingResize { reason: "Infeasible", message: message.to_owned(), generation: pod.metadata.generation }
}

/// Accepts a resize, or returns why it is not accepted now. `used` has the requests of other pods,
/// `capacity` the node's allocatable resources. Only resources that grow are checked.
pub(crate) fn check_resize(
    pod: &Pod,
    allocated: &Pod,
    used: Amount,
    capacity: Amount,
) -> Result<(), PendingResize> {
    let (new, old) = (pod_requests(pod), pod_requests(allocated));
    let pending =
        |reason, message| Err(PendingResize { reason, message, generation: pod.metadata.generation });
    for (name, requested, held, used, capacity) in [
        ("cpu", new.cpu_millis, old.cpu_millis, used.cpu_millis, capacity.cpu_millis),
        ("memory", new.memory, old.memory, used.memory, capacity.memory),
    ] {
        if requested <= held {
            continue;
        }
        if requested > capacity {
            let message = format!(
                "Node didn't have enough capacity: {name}, requested: {requested}, capacity: {capacity}"
            );
            return pending("Infeasible", message);
        }
        if used + requested > capacity {
            let message = format!(
                "Node didn't have enough resource: {name}, requested: {requested}, used: {used}, capacity: {capacity}"
            );
            return pending("Deferred", message);
        }
    }
    Ok(())
}

/// The pod with the resources that its status reports. None if the status records no pending resize.
pub(crate) fn reported(pod: &Pod) -> Option<Pod> {
    condition(pod)?;
    let status = pod.status.as_ref()?;
    let mut reported = pod.clone();
    let spec = reported.spec.as_mut()?;
    if let Some(resources) = status.resources.as_ref().filter(|_| spec.resources.is_some()) {
        spec.resources = Some(resources.clone());
    }
    let statuses = || status.init_container_statuses.iter().chain(&status.container_statuses).flatten();
    for container in spec.init_containers.iter_mut().flatten().chain(&mut spec.containers) {
        let known = statuses().find(|s| s.name == container.name).and_then(|s| s.resources.as_ref());
        if let Some(resources) = known {
            container.resources = Some(resources.clone());
        }
    }
    Some(reported)
}

/// Whether a pod's status has the condition of a resize that is not complete.
pub(super) fn is_in_progress(pod: &Pod) -> bool {
    let mut conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    conditions.any(|condition| condition.type_ == "PodResizeInProgress")
}

/// The pending resize that a pod's status records, and when it was first recorded.
pub(crate) fn condition(pod: &Pod) -> Option<(PendingResize, Option<Timestamp>)> {
    let conditions = pod.status.as_ref()?.conditions.as_ref()?;
    let condition = conditions.iter().find(|c| c.type_ == "PodResizePending")?;
    let is_infeasible = condition.reason.as_deref() == Some("Infeasible");
    let pending = PendingResize {
        reason: if is_infeasible { "Infeasible" } else { "Deferred" },
        message: condition.message.clone().unwrap_or_default(),
        generation: condition.observed_generation,
    };
    Some((pending, condition.last_transition_time.as_ref().map(|time| time.0)))
}

//! In-place resize of pods (KEP-1287).
//!
//! ```text
//!   spec in the API ──► pending (Deferred, Infeasible) ──► allocated ──► in progress ──► actuated
//!                       pod sync evaluates                   pod sync       the worker's jobs
//! ```
//! Pod sync compares the resources of a pod in the API with the allocated resources ([`mod@allocation`]), and informs
//! the pod's worker through [`Resizes`]. The worker compares the allocated resources with the resources of the running
//! containers ([`ResizeState`]).

pub(crate) mod allocation;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use coracle_values::pod_resources::Side;
use coracle_values::quantity::{millis_of, value_of};
use k8s_openapi::api::core::v1::{Container, ContainerStatus, Pod, ResourceRequirements};
use serde::Serialize;

use super::resize_state::{InProgress, KernelLimits, PendingResize, ResizeState};
use super::state::{ObservedContainer, ObservedPod};
use crate::cgroup::{Machine, container_resources, effective_resources, status_resources};
use crate::kubelet_metrics::RequestedChange;

/// A resize that pod sync has accepted.
#[derive(Clone, Debug)]
pub(crate) struct AcceptedResize {
    /// The version of the pod that has the new resources.
    pub(crate) pod: Arc<Pod>,
}

/// Decisions of pod sync about resizes, for the pods' workers; cheap to clone.
#[derive(Clone, Debug, Default)]
pub(crate) struct Resizes {
    pods: Arc<Mutex<HashMap<String, Decisions>>>,
}

#[derive(Clone, Debug, Default)]
struct Decisions {
    pending: Option<PendingResize>,
    accepted: Option<AcceptedResize>,
}

/// The way in which a running container gets other resources.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    Update,
    Restart,
}

/// The resources that a container of the pod gets, with the limits that it inherits from the pod.
pub(crate) fn wanted(pod: &Pod, container: &Container) -> ResourceRequirements {
    let pod_level = pod.spec.as_ref().and_then(|spec| spec.resources.as_ref());
    effective_resources(pod_level, container.resources.as_ref())
}

/// The change from the actual resources to the resources that the container gets. None if CPU and memory are equal.
pub(crate) fn change(pod: &Pod, container: &Container, actual: &ResourceRequirements) -> Option<Change> {
    let (new, old) = (amounts(Some(&wanted(pod, container))), amounts(Some(actual)));
    if new == old {
        return None;
    }
    let restarts = container.resize_policy.iter().flatten().any(|policy| {
        let resource = usize::from(policy.resource_name == "memory");
        policy.restart_policy == "RestartContainer" && new[resource] != old[resource]
    });
    Some(if restarts { Change::Restart } else { Change::Update })
}

/// Whether the container gets less memory or CPU than it has.
pub(crate) fn is_decreasing(pod: &Pod, container: &Container, actual: &ResourceRequirements) -> bool {
    let (new, old) = (amounts(Some(&wanted(pod, container))), amounts(Some(actual)));
    new.iter().flatten().zip(old.iter().flatten()).any(|(new, old)| new < old)
}

/// Requests and limits of CPU in millicores, then of memory in bytes. Absent amounts are 0.
fn amounts(resources: Option<&ResourceRequirements>) -> [[i64; 2]; 2] {
    const SIDES: [Side; 2] = [Side::Requests, Side::Limits];
    [
        SIDES.map(|side| side.get(resources, "cpu").map_or(0, millis_of)),
        SIDES.map(|side| side.get(resources, "memory").map_or(0, value_of)),
    ]
}

/// The resources of containers that differ between two versions of a pod.
pub(crate) fn requested_changes(old: &Pod, new: &Pod) -> Vec<RequestedChange> {
    let before: HashMap<&str, &Container> =
        all_containers(old).map(|container| (container.name.as_str(), container)).collect();
    let mut changes = Vec::new();
    for container in all_containers(new) {
        let Some(known) = before.get(container.name.as_str()) else { continue };
        let pairs = amounts(known.resources.as_ref()).into_iter().zip(amounts(container.resources.as_ref()));
        for ((old, new), resource) in pairs.zip(["cpu", "memory"]) {
            for ((old, new), requirement) in old.into_iter().zip(new).zip(["requests", "limits"]) {
                changes.push(RequestedChange { resource, requirement, old, new });
            }
        }
    }
    changes.retain(|change| change.old != change.new);
    changes
}

fn all_containers(pod: &Pod) -> impl Iterator<Item = &Container> {
    pod.spec.iter().flat_map(|spec| spec.init_containers.iter().flatten().chain(&spec.containers))
}

/// Whether the pod's cgroup or a container has other resources than the allocated resources, or is restarting to get
/// them.
pub(crate) fn is_resizing(pod: &Pod, observed: &ObservedPod, resize: &ResizeState) -> bool {
    let Some(spec) = &pod.spec else { return false };
    if resize.is_cgroup_due {
        return true;
    }
    spec.init_containers.iter().flatten().chain(&spec.containers).any(|container| {
        let Some(current) = observed.current(&container.name) else { return false };
        let actual = resize.actuated(current).filter(|_| current.running());
        resize.is_restarted(current) || actual.is_some_and(|actual| change(pod, container, actual).is_some())
    })
}

/// Whether a resize of the pod was accepted and is not complete, by its status.
pub(crate) fn is_unfinished(pod: &Pod) -> bool {
    allocation::is_in_progress(pod) || is_unreported(pod)
}

/// Whether the resources in the status differ from the resources in the pod's specification. An agent then accepted a
/// resize, and ended before it wrote the condition to the API server.
fn is_unreported(pod: &Pod) -> bool {
    let (Some(status), Some(spec)) = (&pod.status, &pod.spec) else { return false };
    let whole = status.resources.as_ref();
    let reported: HashMap<String, ResourceRequirements> = reported_actuated(pod).collect();
    let ids = status.init_container_statuses.iter().chain(&status.container_statuses).flatten();
    let mut actual = ids.filter_map(|s| Some((&s.name, reported.get(container_id(s)?)?)));
    whole.is_some_and(|whole| amounts(Some(whole)) != amounts(Some(&status_resources(pod))))
        || actual.any(|(name, actual)| {
            let mut containers = spec.init_containers.iter().flatten().chain(&spec.containers);
            let container = containers.find(|container| container.name == *name);
            container.is_some_and(|container| change(pod, container, actual).is_some())
        })
}

/// The resources of the running containers in the status, by container id. A container without own limits runs with the
/// former limits of the pod as a whole.
fn reported_actuated(pod: &Pod) -> impl Iterator<Item = (String, ResourceRequirements)> {
    let status = pod.status.as_ref();
    let pod_level = pod.spec.as_ref().and_then(|spec| spec.resources.as_ref());
    // Earlier versions of the agent did not report pod-level resources.
    let whole = status.and_then(|status| status.resources.as_ref());
    let inherited = pod_level.map(|desired| whole.unwrap_or(desired));
    let containers = status.into_iter().flat_map(|s| {
        s.init_container_statuses.iter().flatten().chain(s.container_statuses.iter().flatten())
    });
    containers.filter_map(move |s| {
        s.state.as_ref()?.running.as_ref()?;
        Some((container_id(s)?.to_owned(), effective_resources(inherited, Some(s.resources.as_ref()?))))
    })
}

/// The id of a container in the runtime.
fn container_id(status: &ContainerStatus) -> Option<&str> {
    Some(status.container_id.as_deref()?.split_once("://")?.1)
}

/// The resources of a pod in the message of an event.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Summary<'a> {
    #[serde(skip_serializing_if = "Vec::is_empty")]
    init_containers: Vec<Amounts<'a>>,
    containers: Vec<Amounts<'a>>,
    generation: i64,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<&'a str>,
}

#[derive(Serialize)]
struct Amounts<'a> {
    name: &'a str,
    resources: ResourceRequirements,
}

/// The message of an event about a resize: a text, and the resources of the pod as JSON.
pub(crate) fn event_message(text: &str, pod: &Pod, generation: Option<i64>, error: Option<&str>) -> String {
    let spec = pod.spec.as_ref();
    let summary = Summary {
        init_containers: of_each(spec.and_then(|s| s.init_containers.as_deref()).unwrap_or_default()),
        containers: of_each(spec.map(|s| s.containers.as_slice()).unwrap_or_default()),
        generation: generation.unwrap_or(0),
        error,
    };
    serde_json::to_string(&summary).map_or_else(|_| text.to_owned(), |json| format!("{text}: {json}"))
}

fn of_each(containers: &[Container]) -> Vec<Amounts<'_>> {
    let one = |c: &'_ Container| c.resources.clone().unwrap_or_default();
    containers.iter().map(|c| Amounts { name: &c.name, resources: one(c) }).collect()
}

// === impl Resizes ===

impl Resizes {
    /// Records why a resize is not accepted. Returns whether the reason or the generation is new.
    pub(crate) fn defer(&self, uid: &str, pending: PendingResize) -> bool {
        let mut pods = self.lock();
        let known = &mut pods.entry(uid.to_owned()).or_default().pending;
        let is_new = known
            .as_ref()
            .is_none_or(|known| (known.reason, known.generation) != (pending.reason, pending.generation));
        *known = Some(pending);
        is_new
    }

    /// Records that a resize is accepted.
    pub(crate) fn accept(&self, uid: &str, pod: &Arc<Pod>) {
        let accepted = Some(AcceptedResize { pod: Arc::clone(pod) });
        self.lock().insert(uid.to_owned(), Decisions { pending: None, accepted });
    }

    /// The resize of a pod that is not accepted.
    pub(crate) fn pending(&self, uid: &str) -> Option<PendingResize> {
        self.lock().get(uid)?.pending.clone()
    }

    /// The accepted resize of a pod. The resize is returned once, and only if `desired` has the resources of the
    /// resize: a worker may still use an older version of the pod.
    pub(crate) fn take_accepted(&self, uid: &str, desired: &Pod) -> Option<AcceptedResize> {
        self.lock().get_mut(uid)?.accepted.take_if(|accepted| !allocation::differs(&accepted.pod, desired))
    }

    /// Removes a pending resize. An accepted resize stays for the worker.
    pub(crate) fn remove(&self, uid: &str) {
        let mut pods = self.lock();
        if let Some(known) = pods.get_mut(uid) {
            known.pending = None;
            if known.accepted.is_none() {
                pods.remove(uid);
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Decisions>> {
        self.pods.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl ResizeState ===

impl ResizeState {
    /// The state that a pod's status records.
    pub(crate) fn of(pod: &Pod) -> Self {
        let status = pod.status.as_ref();
        let whole = status.and_then(|status| status.resources.as_ref());
        let mut conditions = status.and_then(|s| s.conditions.as_ref()).into_iter().flatten();
        let reported = conditions.find(|c| c.type_ == "PodResizeInProgress").map(|c| InProgress {
            generation: c.observed_generation,
            error: c.message.clone().filter(|_| c.reason.as_deref() == Some("Error")),
        });
        let unreported = || InProgress { generation: pod.metadata.generation, error: None };
        let in_progress = reported.or_else(|| is_unreported(pod).then(unreported));
        Self {
            is_cgroup_due: in_progress.is_some(),
            pod_before: in_progress.as_ref().and(whole).cloned().map(Box::new),
            actuated: reported_actuated(pod).collect(),
            in_progress,
            ..Self::default()
        }
    }

    /// Records the allocated resources for running containers whose limits in the kernel already match them: an earlier
    /// agent has resized these containers.
    pub(crate) fn adopt(&mut self, pod: &Pod, observed: &ObservedPod, machine: Machine) {
        let Some(spec) = &pod.spec else { return };
        for container in spec.init_containers.iter().flatten().chain(&spec.containers) {
            let Some(current) = observed.current(&container.name).filter(|c| c.running()) else { continue };
            let limits = KernelLimits::of(&container_resources(pod, container, machine));
            let is_changed =
                self.actuated(current).is_some_and(|actual| change(pod, container, actual).is_some());
            if is_changed && current.limits == Some(limits) {
                self.actuated.insert(current.id.clone(), wanted(pod, container));
            }
        }
    }

    /// The resources that a container has. None if they are not recorded: the caller then assumes the allocated
    /// resources.
    pub(crate) fn actuated<'a>(
        &'a self,
        container: &'a ObservedContainer,
    ) -> Option<&'a ResourceRequirements> {
        self.actuated.get(&container.id).or(container.created_with.as_ref())
    }

    /// Whether an ended container was stopped to start again with other resources.
    pub(crate) fn is_restarted(&self, container: &ObservedContainer) -> bool {
        container.exit().is_some() && self.restarts.contains(&container.id)
    }
}

#[cfg(test)]
mod tests;

//! Restart policies and restart rules of containers. Source: `ContainerShouldRestart` in `pkg/api/v1/pod` and
//! `ShouldAllContainersRestart` in `pkg/kubelet/container` of Kubernetes.
//!
//! A restart of all containers is not stored. The exited container that triggered it is removed last, so a restarted
//! agent finds it in the runtime and continues. The attempts of the removed containers are recorded ([`record`]).

pub(crate) mod record;
pub(crate) mod stops;

use std::path::Path;

use coracle_values::CollectMap;
use coracle_values::restart::{self, RESTART_ALL};
use k8s_openapi::api::core::v1::{Container, ContainerRestartRule, Pod, PodSpec, PodStatus};
use k8s_openapi::jiff::Timestamp;

use super::removed::{Removed, RemovedContainers};
use super::state::{ContainerRun, Exit, ObservedContainer, ObservedPod, Shape, WorkerState, is_sidecar};

/// Type of the pod condition that is true while all containers restart.
pub(crate) const ALL_RESTARTING: &str = "AllContainersRestarting";

/// The containers of a pod and their exits.
pub(crate) struct Exits<'a> {
    pub(crate) spec: &'a PodSpec,
    pub(crate) observed: &'a ObservedPod,
    pub(crate) state: &'a WorkerState,
}

// === impl Exits ===

impl<'a> Exits<'a> {
    /// The exited containers that trigger a restart of all containers. Exits after the end of the pod do not trigger a
    /// restart: a sidecar exits because the pod stops.
    pub(crate) fn triggers(&self) -> Vec<&'a ObservedContainer> {
        let shape = Shape::of(self.spec);
        let all = shape.inits().iter().chain(shape.mains());
        let with_rules = all.filter(|container| container.restart_policy_rules.is_some());
        let triggers: Vec<(&ObservedContainer, Timestamp)> = with_rules
            .filter_map(|container| {
                let (observed, exit) = self.last_exit(container)?;
                let is_trigger = restart::matching_action(rules(container), exit.code) == Some(RESTART_ALL);
                is_trigger.then_some((observed, exit.finished))
            })
            .collect();
        if triggers.is_empty() {
            return Vec::new();
        }
        let ended = self.ended_at();
        let before = |finished: Timestamp| ended.is_none_or(|ended| finished < ended);
        triggers.into_iter().filter(|(_, finished)| before(*finished)).map(|(trigger, _)| trigger).collect()
    }

    /// Whether all containers of the pod must stop and start again.
    pub(crate) fn restart_all(&self) -> bool {
        !self.triggers().is_empty()
    }

    /// The time since which no container starts again: an init container has failed for good, or all main containers
    /// have ended for good. None if a container may still start.
    pub(crate) fn ended_at(&self) -> Option<Timestamp> {
        let mut mains = Shape::of(self.spec).mains().iter();
        let last = mains.try_fold(Timestamp::MIN, |last, c| Some(last.max(self.final_exit(c)?.finished)));
        [self.init_failed_at(), last].into_iter().flatten().min()
    }

    /// The time of the first exit of an init container that has failed and does not start again.
    pub(crate) fn init_failed_at(&self) -> Option<Timestamp> {
        let inits = Shape::of(self.spec).inits().iter().filter(|c| !is_sidecar(c));
        let exits = inits.filter_map(|c| self.final_exit(c)).filter(|exit| exit.code != 0);
        exits.map(|exit| exit.finished).min()
    }

    /// The exit of a container that does not start again.
    fn final_exit(&self, container: &Container) -> Option<&'a Exit> {
        let (_, exit) = self.last_exit(container)?;
        (!restarts_after(self.spec, container, exit.code)).then_some(exit)
    }

    /// The newest container of this name, if it has exited and its exit code decides whether it starts again.
    fn last_exit(&self, container: &Container) -> Option<(&'a ObservedContainer, &'a Exit)> {
        let latest = self.observed.latest(&container.name)?;
        let exit = latest.exit()?;
        (!self.is_stopped_to_restart(container, latest)).then_some((latest, exit))
    }

    /// Whether an ended container starts again regardless of its exit code and rules. This is the case if the agent
    /// stopped the container for a resize or another image. It is also the case after a failed probe, unless the policy
    /// is Never.
    pub(crate) fn is_stopped_to_restart(&self, container: &Container, observed: &ObservedContainer) -> bool {
        if observed.exit().is_none() {
            return false;
        }
        if self.state.resize.is_restarted(observed) || self.state.redefined.contains(&observed.id) {
            return true;
        }
        let request = self.state.kill_requests.get(&observed.id);
        request.is_some_and(|request| request.restarts) && restarts_on_failure(self.spec, container)
    }
}

/// Whether a container starts again after an exit with this code.
pub(crate) fn restarts_after(spec: &PodSpec, container: &Container, code: i32) -> bool {
    let (of_pod, own) = (spec.restart_policy.as_deref(), container.restart_policy.as_deref());
    restart::restarts_after(of_pod, own, rules(container), code)
}

/// Whether a container starts again after a failed probe.
pub(crate) fn restarts_on_failure(spec: &PodSpec, container: &Container) -> bool {
    policy(spec, container) != Some("Never")
}

/// The container's own restart policy, or the restart policy of the pod.
fn policy<'a>(spec: &'a PodSpec, container: &'a Container) -> Option<&'a str> {
    container.restart_policy.as_deref().or(spec.restart_policy.as_deref())
}

/// Whether an exit may restart all containers of the pod.
pub(crate) fn may_restart_all(spec: &PodSpec) -> bool {
    let containers = spec.init_containers.iter().flatten().chain(&spec.containers);
    containers.flat_map(rules).any(|rule| rule.action == RESTART_ALL)
}

fn rules(container: &Container) -> &[ContainerRestartRule] {
    container.restart_policy_rules.as_deref().unwrap_or_default()
}

/// The containers that a restart of all containers removes, with their next attempts. Triggers and crashed containers
/// also have the time of their exit: without it, the restart would reset the back-off of a crashing container.
pub(crate) fn removed(observed: &ObservedPod, ids: &[String], triggers: &[String]) -> RemovedContainers {
    let mut removed = RemovedContainers::new();
    let containers = observed.containers.iter().filter(|c| ids.contains(&c.id) || triggers.contains(&c.id));
    for container in containers {
        let Some(latest) = observed.latest(&container.name) else { continue };
        let is_trigger = triggers.contains(&latest.id);
        let crashed = latest.exit().filter(|exit| is_trigger || exit.code != 0).map(|exit| exit.finished);
        let ran = u32::from(latest.run != ContainerRun::Created);
        removed.insert(latest.name.clone(), Removed { attempt: latest.attempt + ran, crashed });
    }
    removed
}

/// The containers that an earlier agent removed, according to the record and the pod's status.
pub(crate) fn removed_before(pod: &Pod, pod_dir: &Path) -> RemovedContainers {
    let mut removed = removed_in_status(pod.status.as_ref());
    if pod.spec.as_ref().is_some_and(may_restart_all) {
        removed.extend(record::read(pod_dir));
    }
    removed
}

/// The removed containers according to the pod's status, in case the record could not be written.
fn removed_in_status(status: Option<&PodStatus>) -> RemovedContainers {
    let Some(status) = status else { return RemovedContainers::new() };
    let is_restarting =
        status.conditions.iter().flatten().any(|c| c.type_ == ALL_RESTARTING && c.status == "True");
    let all = status.init_container_statuses.iter().chain(&status.container_statuses).flatten();
    let attempts = all.filter_map(|container| {
        let count = u32::try_from(container.restart_count).ok()?;
        let is_removed = container.container_id.is_none() && count > 0;
        match (is_removed, is_restarting && container.container_id.is_some()) {
            // The restart count of a removed container already includes its next run.
            (true, _) => Some((container.name.clone(), count)),
            // The entry is ignored if the container still exists.
            (false, true) => Some((container.name.clone(), count.saturating_add(1))),
            (false, false) => None,
        }
    });
    attempts.map(|(name, attempt)| (name, Removed { attempt, crashed: None })).collect_map()
}

/// Drops the containers that have been created again.
pub(crate) fn forget_created(removed: &mut RemovedContainers, observed: &ObservedPod) {
    removed.retain(|name, removed| {
        let latest = observed.latest(name);
        latest.is_none_or(|c| c.attempt < removed.attempt || c.run == ContainerRun::Created)
    });
}

#[cfg(test)]
mod tests;

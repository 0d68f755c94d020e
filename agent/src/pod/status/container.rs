//! Statuses of containers.

use coracle_events::printable;
use coracle_values::pod_resources::Side;
use k8s_openapi::api::core::v1::{
    Container, ContainerState, ContainerStateRunning, ContainerStateTerminated, ContainerStateWaiting,
    ContainerStatus, ContainerUser, ResourceRequirements, VolumeMount, VolumeMountStatus,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;

use super::input::StatusInput;
use crate::pod::removed::Removed;
use crate::pod::restart::{may_restart_all, restarts_after};
use crate::pod::state::{ContainerRun, Exit, ObservedContainer, Shape, Waiting, is_sidecar};

/// Maximum size in bytes of a waiting container's message.
const WAITING_MAX: usize = 2048;
/// Maximum size in bytes of the messages of all ended containers of a pod, in equal shares, as upstream.
const ENDS_MAX: usize = 12 * 1024;

/// Truncates the messages of ended containers to their share.
pub(super) fn limit_ends<'a>(lists: impl Iterator<Item = &'a mut Vec<ContainerStatus>>) {
    let mut all: Vec<&mut ContainerStatus> = lists.flatten().collect();
    let share = ENDS_MAX / all.len().max(1);
    for state in all.iter_mut().flat_map(|s| s.state.iter_mut().chain(&mut s.last_state)) {
        let Some(message) = state.terminated.as_mut().and_then(|end| end.message.as_mut()) else { continue };
        message.truncate(message.floor_char_boundary(share));
    }
}

pub(super) fn statuses(containers: &[Container], input: &StatusInput<'_>) -> Vec<ContainerStatus> {
    containers.iter().map(|container| container_status(container, input)).collect()
}

/// Statuses of init containers and sidecars. After the loss of the sandbox, an init container runs again although its
/// policy does not restart it. The API server refuses a status that shows this restart. So the status of such a
/// container stays until its next exit, but shows it as not ready. Source: `ValidateInitContainerStateTransition` of
/// `pkg/apis/core/validation`.
pub(super) fn init_statuses(shape: &Shape<'_>, input: &StatusInput<'_>) -> Vec<ContainerStatus> {
    let mut all = statuses(shape.inits(), input);
    if !may_restart_all(shape.spec) {
        for (status, container) in all.iter_mut().zip(shape.inits()) {
            if let Some(old) = reported_end(shape, container, input).filter(|_| !has_ended(status)) {
                *status = ContainerStatus { ready: status.ready, ..old.clone() };
            }
        }
    }
    all
}

/// The last status of a container, if it shows an end after which the container does not start again.
fn reported_end<'a>(
    shape: &Shape<'_>,
    container: &Container,
    input: &StatusInput<'a>,
) -> Option<&'a ContainerStatus> {
    let known = [input.last, input.pod.status.as_ref()].into_iter().flatten();
    let mut known = known.filter_map(|status| {
        status.init_container_statuses.as_ref()?.iter().find(|old| old.name == container.name)
    });
    let old = known.find(|old| has_ended(old))?;
    let code = old.state.as_ref()?.terminated.as_ref()?.exit_code;
    (!restarts_after(shape.spec, container, code)).then_some(old)
}

fn has_ended(status: &ContainerStatus) -> bool {
    status.state.as_ref().is_some_and(|state| state.terminated.is_some())
}

/// Statuses of ephemeral containers: they are never ready and not restarted.
pub(super) fn added(containers: &[Container], input: &StatusInput<'_>) -> Vec<ContainerStatus> {
    let mut all = statuses(containers, input);
    for status in &mut all {
        (status.ready, status.started) = (false, None);
        let end = status.last_state.take_if(|last| last.terminated.is_some());
        if let Some(end) = end.filter(|_| input.observed.latest(&status.name).is_none()) {
            status.state = Some(end);
        }
        status.last_state = Some(ContainerState::default());
    }
    all
}

fn container_status(container: &Container, input: &StatusInput<'_>) -> ContainerStatus {
    let is_init = input
        .pod
        .spec
        .as_ref()
        .and_then(|s| s.init_containers.as_ref())
        .is_some_and(|inits| inits.iter().any(|i| i.name == container.name));
    let Some(observed) = input.observed.latest(&container.name) else {
        return unobserved_status(container, input);
    };
    let waiting = input.state.waiting.get(&container.name);
    let will_run =
        !input.finished && (waiting.is_some() || restarts_despite_its_policy(container, observed, input));
    let (state, last_state) = match &observed.run {
        ContainerRun::Running { started } => (running(*started), before(input, observed)),
        ContainerRun::Exited(exit) if will_run => {
            (waiting_state(waiting, input), terminated(input, observed, exit))
        }
        ContainerRun::Exited(exit) => (terminated(input, observed, exit), before(input, observed)),
        ContainerRun::Created => (waiting_state(waiting, input), before(input, observed)),
        ContainerRun::Unknown => (unknown_end(input, observed), before(input, observed)),
    };
    let started = started(container, observed, input);
    let ready = if is_init && !is_sidecar(container) {
        observed.succeeded()
    } else {
        observed.running()
            && started
            && (container.readiness_probe.is_none() || probed(input, observed).ready)
    };
    ContainerStatus {
        name: container.name.clone(),
        image: observed.image.clone(),
        image_id: observed.image_id.clone(),
        container_id: Some(container_id(input, observed)),
        restart_count: i32::try_from(observed.attempt).unwrap_or(i32::MAX),
        state: Some(state),
        last_state: Some(last_state),
        started: Some(started),
        ready,
        resources: Some(resources(container, observed, input)),
        allocated_resources: container.resources.as_ref().and_then(|r| r.requests.clone()),
        user: observed.user.clone().map(|linux| ContainerUser { linux: Some(linux) }),
        volume_mounts: volume_mounts(container),
        ..ContainerStatus::default()
    }
}

/// Whether an ended container starts again although its policy does not restart it after this exit code. This is the
/// case if the agent stopped the container because a probe failed, or for a resize or another image. The status must
/// not show the container as ended, because the API server would then refuse a status that shows it as running.
fn restarts_despite_its_policy(
    container: &Container,
    observed: &ObservedContainer,
    input: &StatusInput<'_>,
) -> bool {
    let (Some(spec), Some(exit)) = (input.pod.spec.as_ref(), observed.exit()) else { return false };
    !restarts_after(spec, container, exit.code)
        && input.exits(&Shape::of(spec)).is_stopped_to_restart(container, observed)
}

/// The state of a waiting container, with the reason if it is known.
fn waiting_state(waiting: Option<&Waiting>, input: &StatusInput<'_>) -> ContainerState {
    match waiting {
        Some(w) => wait(w.reason.clone(), w.message.clone()),
        None => wait(initial_waiting_reason(input).to_owned(), String::new()),
    }
}

/// The current resources of a running container. For other containers, the resources of their next run. Limits that a
/// container inherits from its pod do not count as limits of the container.
fn resources(
    container: &Container,
    observed: &ObservedContainer,
    input: &StatusInput<'_>,
) -> ResourceRequirements {
    let mut resources = container.resources.clone().unwrap_or_default();
    let Some(actuated) = input.state.resize.actuated(observed).filter(|_| observed.running()) else {
        return resources;
    };
    let pod_level = input.pod.spec.as_ref().and_then(|spec| spec.resources.as_ref());
    let own = container.resources.as_ref();
    let is_inherited =
        |name: &str| Side::Limits.get(own, name).is_none() && Side::Limits.get(pod_level, name).is_some();
    for (side, list, actual) in [
        (Side::Requests, &mut resources.requests, &actuated.requests),
        (Side::Limits, &mut resources.limits, &actuated.limits),
    ] {
        for name in ["cpu", "memory"] {
            if side == Side::Limits && is_inherited(name) {
                continue;
            }
            match actual.as_ref().and_then(|actual| actual.get(name)) {
                Some(amount) => drop(list.get_or_insert_default().insert(name.to_owned(), amount.clone())),
                None => drop(list.as_mut().and_then(|list| list.remove(name))),
            }
        }
        list.take_if(|list| list.is_empty());
    }
    resources
}

fn probed(input: &StatusInput<'_>, observed: &ObservedContainer) -> crate::pod::state::Probed {
    input.state.probed.get(&observed.id).copied().unwrap_or_default()
}

/// Whether a running container has passed its startup probe.
pub(super) fn started(container: &Container, observed: &ObservedContainer, input: &StatusInput<'_>) -> bool {
    observed.running() && (container.startup_probe.is_none() || probed(input, observed).started)
}

fn unobserved_status(container: &Container, input: &StatusInput<'_>) -> ContainerStatus {
    let known = input.last.or(input.pod.status.as_ref());
    let old = known.and_then(|status| {
        let all = status.container_statuses.iter().chain(&status.init_container_statuses);
        let all = all.chain(&status.ephemeral_container_statuses).flatten();
        all.into_iter().find(|s| s.name == container.name)
    });
    if let Some(removed) = input.state.removed.get(&container.name).filter(|_| !input.finished) {
        return removed_status(container, removed, old, input);
    }
    // The container has run, but the runtime does not report it: after a reboot, or at the pod's end.
    if let Some(old) = old.filter(|s| s.container_id.is_some()) {
        return ContainerStatus { ready: false, started: Some(false), ..lost_status(old.clone(), input) };
    }
    waiting_status(container, waiting_state(input.state.waiting.get(&container.name), input))
}

/// The status of a container without an id, in this state.
fn waiting_status(container: &Container, state: ContainerState) -> ContainerStatus {
    ContainerStatus {
        name: container.name.clone(),
        image: container.image.clone().unwrap_or_default(),
        state: Some(state),
        last_state: Some(ContainerState::default()),
        started: Some(false),
        allocated_resources: container.resources.as_ref().and_then(|r| r.requests.clone()),
        volume_mounts: volume_mounts(container),
        ..ContainerStatus::default()
    }
}

/// The waiting reason of a container that has not started yet and has not failed.
fn initial_waiting_reason(input: &StatusInput<'_>) -> &'static str {
    let inits = input.pod.spec.as_ref().and_then(|s| s.init_containers.as_ref());
    if inits.is_none_or(Vec::is_empty) { "ContainerCreating" } else { "PodInitializing" }
}

/// The mount status of each volume. Recursive read-only mode is reported for read-only mounts.
fn volume_mounts(container: &Container) -> Option<Vec<VolumeMountStatus>> {
    let one = |mount: &VolumeMount| {
        let is_read_only = mount.read_only == Some(true);
        // If a required mode is not possible, the container does not start. So the status can show every requested mode
        // as enabled.
        let mode = match mount.recursive_read_only.as_deref() {
            None | Some("Disabled") => "Disabled",
            Some(_) => "Enabled",
        };
        VolumeMountStatus {
            name: mount.name.clone(),
            mount_path: mount.mount_path.clone(),
            read_only: is_read_only.then_some(true),
            recursive_read_only: is_read_only.then(|| mode.to_owned()),
            ..VolumeMountStatus::default()
        }
    };
    container.volume_mounts.as_ref().map(|mounts| mounts.iter().map(one).collect())
}

/// The status of a container that a restart of all containers removed. Its restart count is the count of its next run.
fn removed_status(
    container: &Container,
    removed: &Removed,
    old: Option<&ContainerStatus>,
    input: &StatusInput<'_>,
) -> ContainerStatus {
    let message = "The container was removed, because all containers of the pod restart".to_owned();
    let reason = "RestartingAllContainers".to_owned();
    let state = match input.state.waiting.get(&container.name) {
        Some(w) => wait(w.reason.clone(), w.message.clone()),
        None => wait(reason.clone(), message.clone()),
    };
    // If the last status shows the container as running, its exit is not known.
    let last_end = old.and_then(last_known_end).unwrap_or_else(|| ContainerStateTerminated {
        exit_code: 137,
        reason: Some(reason),
        message: Some(message),
        ..ContainerStateTerminated::default()
    });
    ContainerStatus {
        restart_count: i32::try_from(removed.attempt).unwrap_or(i32::MAX),
        last_state: Some(ContainerState { terminated: Some(last_end), ..ContainerState::default() }),
        ..waiting_status(container, state)
    }
}

/// The last end of a container in its status. None while the container runs.
fn last_known_end(old: &ContainerStatus) -> Option<ContainerStateTerminated> {
    let state = old.state.as_ref()?;
    let before = old.last_state.as_ref().filter(|_| state.waiting.is_some());
    state.terminated.clone().or_else(|| before?.terminated.clone())
}

fn lost_status(mut old: ContainerStatus, input: &StatusInput<'_>) -> ContainerStatus {
    if old.state.as_ref().is_some_and(|s| s.terminated.is_some()) {
        return old;
    }
    let end = ContainerState {
        terminated: Some(ContainerStateTerminated {
            exit_code: 137,
            reason: Some("ContainerStatusUnknown".to_owned()),
            message: Some("The container could not be located when the pod was terminated".to_owned()),
            container_id: old.container_id.clone(),
            ..ContainerStateTerminated::default()
        }),
        ..ContainerState::default()
    };
    if input.finished {
        old.state = Some(end);
    } else {
        old.state = Some(wait(initial_waiting_reason(input).to_owned(), String::new()));
        old.last_state = Some(end);
    }
    old
}

fn before(input: &StatusInput<'_>, observed: &ObservedContainer) -> ContainerState {
    input
        .observed
        .ended_before(&observed.name, observed.attempt)
        .and_then(|c| c.exit().map(|exit| terminated(input, c, exit)))
        .or_else(|| end_from_last_status(input, observed))
        .unwrap_or_default()
}

/// The end of the container's previous run from the last status, if the runtime has removed that container.
fn end_from_last_status(input: &StatusInput<'_>, observed: &ObservedContainer) -> Option<ContainerState> {
    if observed.attempt == 0 {
        return None;
    }
    let status = input.last.or(input.pod.status.as_ref())?;
    let all = status.container_statuses.iter().chain(&status.init_container_statuses).flatten();
    let old = all.into_iter().find(|s| s.name == observed.name)?;
    let own_id = container_id(input, observed);
    // If the last status already has the id of this run, the end of the previous run is only in its `lastState`.
    let own_state = Some(&old.state).filter(|_| old.container_id.as_deref() != Some(&own_id));
    let mut ends = own_state.into_iter().chain([&old.last_state]).flatten();
    ends.find(|state| state.terminated.is_some()).cloned()
}

/// The API's form of a container id: `<runtime>://<id>`.
fn container_id(input: &StatusInput<'_>, observed: &ObservedContainer) -> String {
    format!("{}://{}", input.runtime_name, observed.id)
}

fn running(started: Timestamp) -> ContainerState {
    ContainerState {
        running: Some(ContainerStateRunning { started_at: Some(seconds(started)) }),
        ..ContainerState::default()
    }
}

fn wait(reason: String, message: String) -> ContainerState {
    ContainerState {
        waiting: Some(ContainerStateWaiting {
            reason: Some(reason),
            message: (!message.is_empty()).then(|| printable(&message, WAITING_MAX)),
        }),
        ..ContainerState::default()
    }
}

fn terminated(input: &StatusInput<'_>, observed: &ObservedContainer, exit: &Exit) -> ContainerState {
    let reason = match (exit.reason.as_str(), exit.code) {
        ("", 0) => "Completed",
        ("", _) => "Error",
        (given, _) => given,
    };
    ContainerState {
        terminated: Some(ContainerStateTerminated {
            container_id: Some(container_id(input, observed)),
            exit_code: exit.code,
            reason: Some(reason.to_owned()),
            message: (!exit.message.is_empty()).then(|| exit.message.clone()),
            started_at: Some(seconds(exit.started)),
            finished_at: Some(seconds(exit.finished)),
            signal: None,
        }),
        ..ContainerState::default()
    }
}

fn unknown_end(input: &StatusInput<'_>, observed: &ObservedContainer) -> ContainerState {
    let exit = Exit {
        code: 137,
        reason: "ContainerStatusUnknown".to_owned(),
        message: "The container could not be located when the pod was terminated".to_owned(),
        ..Exit::default()
    };
    terminated(input, observed, &exit)
}

/// Truncates a time to seconds as in the API, so that fractions do not count as a difference.
fn seconds(at: Timestamp) -> Time {
    Time(Timestamp::from_second(at.as_second()).unwrap_or(at))
}

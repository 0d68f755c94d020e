//! Planning for one pod. The inputs are the desired, observed and worker state and the time. The outputs are actions
//! and the time of the next pass. Pure and total; all decisions about a pod are made here.

mod resize;

use std::collections::BTreeSet;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Container, Pod, ResourceRequirements};
use k8s_openapi::jiff::{SignedDuration, Timestamp};

use super::restart::{Exits, restarts_after, restarts_on_failure};
use super::state::{
    ContainerRun, DesiredPod, KillRequest, ObservedContainer, ObservedPod, SANDBOX, Shape, VOLUMES, Verdict,
    Waiting, WorkerState, is_sidecar,
};

/// Time for which a failed pull is reported with its own reason. After this time, the reason is `ImagePullBackOff`.
const SHOW_FAILURE: SignedDuration = SignedDuration::from_secs(1);

/// An action on the pod.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Action {
    /// Stop the containers, then the sandbox, within this grace period in seconds.
    StopPod { grace: i64 },
    /// Remove containers, volumes, cgroup, directories and logs; then report the end to the API.
    Finish,
    /// Create the cgroup and the volumes, or adopt the cgroup and the volumes that an earlier agent created.
    Prepare,
    /// There is no running sandbox. Stop the rest of the last sandbox, prepare, and create the next sandbox.
    MakeSandbox { attempt: u32, first: Vec<String> },
    /// Start these containers, in this order.
    Start(Vec<StartContainer>),
    /// Stop and remove all containers, so that the pod starts again with its init containers, in the same sandbox. The
    /// triggers are removed last: while they exist, a restarted agent knows that the restart is not complete.
    RestartAll { others: Vec<String>, triggers: Vec<String> },
    /// Stop one container while the pod continues. `message` is the message of the event.
    Stop { id: String, name: String, grace: i64, message: String },
    /// Change the limits of the pod's cgroup and of these running containers. `before` has the resources that the
    /// containers have now.
    Resize { before: Arc<Pod>, containers: Vec<ResizeContainer> },
    /// Remove ended containers whose status is not needed any more.
    RemoveContainers(Vec<String>),
    /// Remove stopped sandboxes without containers.
    RemoveSandboxes(Vec<String>),
    /// The pod has ended but its object exists: stop the sandboxes that this agent has not stopped, unmount its
    /// volumes, remove its cgroup.
    Release { unstopped: Vec<String> },
    /// Mark the pod as failed with this reason.
    FailPod(Verdict),
}

/// A container to start.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct StartContainer {
    pub(crate) name: String,
    pub(crate) attempt: u32,
    /// The id of a container that was created but never started. That container is removed first.
    pub(crate) instead_of: Option<String>,
    /// The end of the previous run of the container. The back-off starts at this time.
    pub(crate) crashed: Option<Timestamp>,
    /// The pod with the resources that its cgroup has, while a resize is pending.
    pub(crate) pod_before: Option<Arc<Pod>>,
}

/// A running container to resize.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ResizeContainer {
    pub(crate) name: String,
    pub(crate) id: String,
    /// The current resources of the container.
    pub(crate) before: ResourceRequirements,
}

/// Actions, reasons why containers wait, and the time of the next pass.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Plan {
    pub(crate) actions: Vec<Action>,
    /// Ids of containers that are stopped to start again with other resources.
    pub(crate) resize_restarts: Vec<String>,
    /// Ids of containers that are stopped to start again with another image.
    pub(crate) redefined: Vec<String>,
    pub(crate) waiting: Vec<(String, Waiting)>,
    pub(crate) wake: Option<Timestamp>,
}

/// Inputs of the plan.
pub(crate) struct PlanInput<'a> {
    pub(crate) desired: &'a DesiredPod,
    pub(crate) observed: &'a ObservedPod,
    pub(crate) state: &'a WorkerState,
    pub(crate) now: Timestamp,
}

/// Plans the actions.
pub(crate) fn plan(input: &PlanInput<'_>) -> Plan {
    let mut plan = Plan::default();
    let pod = input.desired.pod();
    let Some(spec) = pod.spec.as_ref() else {
        plan.actions.push(Action::Finish);
        return plan;
    };
    let shape = Shape::of(spec);
    if let Some(grace) = input.desired.ending() {
        // A pod with a long grace period can be evicted during its deletion.
        let grace = input.state.evicted_grace().map_or(grace, |evicted| evicted.min(grace));
        end(input, grace, &mut plan);
        return plan;
    }
    if ended(pod, &shape, input) {
        if input.observed.alive() {
            let own = || grace_of(spec.termination_grace_period_seconds);
            let grace = input.state.evicted_grace().unwrap_or_else(own);
            plan.actions.push(Action::StopPod { grace });
        } else if !input.state.released {
            let ids = input.observed.sandboxes.iter().map(|sandbox| &sandbox.id);
            let unstopped = ids.filter(|id| !input.state.stopped.contains(*id)).cloned().collect();
            plan.actions.push(Action::Release { unstopped });
        }
        return plan;
    }
    if deadline_passed(input, spec.active_deadline_seconds, &mut plan) {
        return plan;
    }
    if let Some(restart) = restart_all(input, &shape) {
        plan.actions.push(restart);
        return plan;
    }
    match input.observed.sandbox() {
        None => make_sandbox(input, &shape, &mut plan),
        Some(_) if !input.state.prepared => prepare(input, &mut plan),
        Some(_) => run(input, &shape, &mut plan),
    }
    remove_old(input, &shape, &mut plan);
    plan
}

fn grace_of(seconds: Option<i64>) -> i64 {
    seconds.unwrap_or(30).max(0)
}

fn end(input: &PlanInput<'_>, grace: i64, plan: &mut Plan) {
    let action = if input.observed.alive() { Action::StopPod { grace } } else { Action::Finish };
    plan.actions.push(action);
}

/// Whether no container of this pod starts again: the pod was rejected or has failed, or its containers have ended and
/// are not restarted.
pub(crate) fn ended(pod: &Pod, shape: &Shape<'_>, input: &PlanInput<'_>) -> bool {
    let phase = pod.status.as_ref().and_then(|s| s.phase.as_deref());
    if input.state.verdict.is_some() || matches!(phase, Some("Failed" | "Succeeded")) {
        return true;
    }
    let exits = exits(input, shape);
    exits.ended_at().is_some() && !exits.restart_all()
}

fn exits<'a>(input: &PlanInput<'a>, shape: &Shape<'a>) -> Exits<'a> {
    Exits { spec: shape.spec, observed: input.observed, state: input.state }
}

/// The restart of all containers, if an exit has triggered it.
fn restart_all(input: &PlanInput<'_>, shape: &Shape<'_>) -> Option<Action> {
    let triggers: Vec<String> = exits(input, shape).triggers().iter().map(|c| c.id.clone()).collect();
    if triggers.is_empty() {
        return None;
    }
    let names: BTreeSet<&str> = shape.inits().iter().chain(shape.mains()).map(|c| c.name.as_str()).collect();
    let others = input.observed.containers.iter();
    let others = others.filter(|c| names.contains(c.name.as_str()) && !triggers.contains(&c.id));
    Some(Action::RestartAll { others: others.map(|c| c.id.clone()).collect(), triggers })
}

fn deadline_passed(input: &PlanInput<'_>, seconds: Option<i64>, plan: &mut Plan) -> bool {
    let (Some(seconds), Some(start)) = (seconds, input.state.start_time) else { return false };
    let due = start.checked_add(SignedDuration::from_secs(seconds)).unwrap_or(Timestamp::MAX);
    if input.now < due {
        wake_at(plan, due);
        return false;
    }
    plan.actions.push(Action::FailPod(Verdict {
        reason: "DeadlineExceeded".to_owned(),
        message: "Pod was active on the node longer than the specified deadline".to_owned(),
    }));
    true
}

fn make_sandbox(input: &PlanInput<'_>, shape: &Shape<'_>, plan: &mut Plan) {
    if let Some(until) = input.state.pod_retries.since_failure(SANDBOX, input.now) {
        wake_at(plan, until);
        return;
    }
    let attempt = input.observed.sandboxes.first().map_or(0, |s| s.attempt + 1);
    let first = match shape.inits().first() {
        Some(init) => std::slice::from_ref(init),
        None => shape.mains(),
    };
    let first = first.iter().filter(|c| {
        let image = c.image.as_deref().unwrap_or_default();
        input.state.pulls.since_failure(image, input.now).is_none()
    });
    plan.actions.push(Action::MakeSandbox { attempt, first: first.map(|c| c.name.clone()).collect() });
}

fn prepare(input: &PlanInput<'_>, plan: &mut Plan) {
    match input.state.pod_retries.since_failure(VOLUMES, input.now) {
        Some(until) => wake_at(plan, until),
        None => plan.actions.push(Action::Prepare),
    }
}

fn run(input: &PlanInput<'_>, shape: &Shape<'_>, plan: &mut Plan) {
    plan_stops(input, shape, plan);
    let due = resize::plan(input, shape, plan);
    let mut starts = Vec::new();
    let initialized = inits(input, shape, plan, &mut starts);
    let exits = exits(input, shape);
    if initialized {
        for container in shape.mains() {
            let latest = input.observed.latest(&container.name);
            let is_restarted = latest.is_some_and(|c| exits.is_stopped_to_restart(container, c));
            if is_restarted || restarts(latest, shape, container) {
                start(input, container, plan, &mut starts);
            }
        }
    }
    for added in shape.ephemerals() {
        if !was_started(input, &added.name) {
            start(input, &added, plan, &mut starts);
        }
    }
    if starts.is_empty() {
        return;
    }
    match due {
        resize::Due::No => {}
        // The next plan starts the containers, because the start depends on the result of the resize.
        resize::Due::Now => return,
        resize::Due::Later(before) => {
            starts.iter_mut().for_each(|start| start.pod_before = Some(Arc::clone(&before)))
        }
    }
    plan.actions.push(Action::Start(starts));
}

/// Whether an ephemeral container was started before. After a boot, only the pod's status records the start.
fn was_started(input: &PlanInput<'_>, name: &str) -> bool {
    let reported =
        input.desired.pod().status.as_ref().and_then(|status| status.ephemeral_container_statuses.as_ref());
    match input.observed.latest(name) {
        Some(latest) => latest.run != ContainerRun::Created,
        None => reported.into_iter().flatten().any(|one| one.name == name && one.container_id.is_some()),
    }
}

fn plan_stops(input: &PlanInput<'_>, shape: &Shape<'_>, plan: &mut Plan) {
    for container in input.observed.containers.iter().filter(|c| c.may_run()) {
        let in_sandbox = input.observed.sandbox().is_some_and(|s| s.id == container.sandbox);
        let kill_request = input.state.kill_requests.get(&container.id);
        let name = &container.name;
        let message = match kill_request {
            Some(request) => kill_message(shape, name, request),
            None if !in_sandbox => format!("Stopping container {name}"),
            None if container.run == ContainerRun::Unknown => {
                let kind = if is_init(shape, name) { "Init container" } else { "Container" };
                format!("{kind} is in \"unknown\" state, try killing it before restart")
            }
            None if redefined(shape, container) => {
                plan.redefined.push(container.id.clone());
                format!("Container {name} definition changed, will be restarted")
            }
            None => continue,
        };
        plan.actions.push(Action::Stop {
            id: container.id.clone(),
            name: name.clone(),
            grace: grace_of(
                kill_request.and_then(|c| c.grace).or(shape.spec.termination_grace_period_seconds),
            ),
            message,
        });
    }
}

/// The kubelet's message about the stop of a container after a failed probe, or after a failed postStart hook.
fn kill_message(shape: &Shape<'_>, name: &str, request: &KillRequest) -> String {
    let why = &request.why;
    if !request.restarts {
        return why.clone();
    }
    if is_init(shape, name) {
        return format!("Init container {name} {why}");
    }
    let is_restarted = shape.container(name).is_some_and(|c| restarts_on_failure(shape.spec, c));
    format!("Container {name} {why}{}", if is_restarted { ", will be restarted" } else { "" })
}

fn is_init(shape: &Shape<'_>, name: &str) -> bool {
    shape.inits().iter().any(|init| init.name == name)
}

/// Whether a main container's image was changed in the spec.
fn redefined(shape: &Shape<'_>, observed: &ObservedContainer) -> bool {
    let wanted = shape.mains().iter().find(|c| c.name == observed.name);
    wanted.is_some_and(|wanted| observed.has_other_image(wanted))
}

/// Plans the init containers in their order. Returns whether the main containers can start.
fn inits(
    input: &PlanInput<'_>,
    shape: &Shape<'_>,
    plan: &mut Plan,
    starts: &mut Vec<StartContainer>,
) -> bool {
    // A main container in this sandbox proves that initialization has completed.
    let over = shape.mains().iter().any(|c| input.observed.current(&c.name).is_some());
    for init in shape.inits() {
        let current = input.observed.current(&init.name);
        if is_sidecar(init) {
            match current {
                Some(c) if c.may_run() && (over || sidecar_started(input, init, c)) => {}
                Some(c) if c.may_run() => return false,
                _ => {
                    start(input, init, plan, starts);
                    if !over {
                        return false;
                    }
                }
            }
            continue;
        }
        match current {
            _ if over => {}
            Some(c) if c.succeeded() => {}
            Some(c) if c.may_run() => return false,
            Some(c) if c.exit().is_some() && !restarts(Some(c), shape, init) => return false,
            _ => {
                start(input, init, plan, starts);
                return false;
            }
        }
    }
    true
}

fn sidecar_started(input: &PlanInput<'_>, init: &Container, observed: &ObservedContainer) -> bool {
    init.startup_probe.is_none() || input.state.probed.get(&observed.id).is_some_and(|p| p.started)
}

fn restarts(latest: Option<&ObservedContainer>, shape: &Shape<'_>, container: &Container) -> bool {
    match latest.map(|c| &c.run) {
        None | Some(ContainerRun::Created) => true,
        Some(ContainerRun::Running { .. } | ContainerRun::Unknown) => false,
        Some(ContainerRun::Exited(exit)) => restarts_after(shape.spec, container, exit.code),
    }
}

/// Plans the start of a container, unless a back-off is running.
fn start(input: &PlanInput<'_>, container: &Container, plan: &mut Plan, starts: &mut Vec<StartContainer>) {
    let name = &container.name;
    let latest = input.observed.latest(name);
    // A container that was stopped for a resize did not crash.
    let ended = latest.filter(|c| !input.state.resize.is_restarted(c));
    let removed = input.state.removed.get(name).filter(|_| latest.is_none());
    let crashed = ended.and_then(ObservedContainer::exit).map(|e| e.finished);
    let crashed = crashed.or_else(|| removed?.crashed);
    if let Some((until, seconds)) = crash_wait(input, name, crashed, removed.is_some()) {
        wake_at(plan, until);
        plan.waiting.push((name.clone(), crash_loop(seconds, container, input.desired.pod())));
        return;
    }
    let image = container.image.as_deref().unwrap_or_default();
    if let Some(until) = input.state.pulls.since_failure(image, input.now) {
        wait_for_pull(input, name, image, until, plan);
        return;
    }
    if let Some(until) = input.state.retries.since_failure(name, input.now) {
        wake_at(plan, until);
        return;
    }
    let created = latest.filter(|c| c.run == ContainerRun::Created);
    starts.push(StartContainer {
        name: name.clone(),
        attempt: latest.map_or_else(
            || removed.map_or(0, |removed| removed.attempt),
            |c| if created.is_some() { c.attempt } else { c.attempt + 1 },
        ),
        instead_of: created.map(|c| c.id.clone()),
        crashed,
        pod_before: None,
    });
}

/// The end and the length in seconds of a container's back-off. `is_removed` is true if a restart of all containers
/// removed the container. In this case the back-off of the pod applies, too, and the later end of the two back-offs
/// counts.
fn crash_wait(
    input: &PlanInput<'_>,
    name: &str,
    crashed: Option<Timestamp>,
    is_removed: bool,
) -> Option<(Timestamp, i64)> {
    let crashes = &input.state.crashes;
    let until = crashed.and_then(|end| crashes.until(name, end, input.now));
    let own = until.map(|until| (until, crashes.seconds(name)));
    let wait = input.state.restart_wait.filter(|_| is_removed);
    let of_pod = wait.and_then(|wait| Some((wait.until(input.now)?, wait.seconds)));
    own.max(of_pod)
}

fn wait_for_pull(input: &PlanInput<'_>, name: &String, image: &str, until: Timestamp, plan: &mut Plan) {
    let shown = input.state.pulls.failed_at(image).and_then(|at| at.checked_add(SHOW_FAILURE).ok());
    if let Some(shown) = shown.filter(|shown| input.now < *shown) {
        wake_at(plan, shown);
        return;
    }
    wake_at(plan, until);
    let cause = match input.state.waiting.get(name) {
        Some(w) if w.reason == "ImagePullBackOff" => {
            plan.waiting.push((name.clone(), w.clone()));
            return;
        }
        Some(w) => format!(": {}: {}", w.reason, w.message),
        None => String::new(),
    };
    let message = format!("Back-off pulling image \"{image}\"{cause}");
    plan.waiting.push((name.clone(), Waiting { reason: "ImagePullBackOff".to_owned(), message }));
}

fn crash_loop(seconds: i64, container: &Container, pod: &Pod) -> Waiting {
    let (length, meta) = (length_text(seconds), &pod.metadata);
    Waiting {
        reason: "CrashLoopBackOff".to_owned(),
        message: format!(
            "back-off {length} restarting failed container={} pod={}_{}({})",
            container.name,
            meta.name.as_deref().unwrap_or_default(),
            meta.namespace.as_deref().unwrap_or_default(),
            meta.uid.as_deref().unwrap_or_default(),
        ),
    }
}

/// Formats seconds as a duration of Go. People search logs and events for this form.
fn length_text(seconds: i64) -> String {
    match (seconds / 60, seconds % 60) {
        (0, s) => format!("{s}s"),
        (m, s) => format!("{m}m{s}s"),
    }
}

/// Plans the removal of ended containers and of empty sandboxes. For each container of the spec, the latest attempt and
/// the last ended attempt before it are kept, for the status and the log.
fn remove_old(input: &PlanInput<'_>, shape: &Shape<'_>, plan: &mut Plan) {
    let old = |c: &&ObservedContainer| {
        let Some(latest) = input.observed.latest(&c.name) else { return false };
        let previous = input.observed.ended_before(&c.name, latest.attempt).map(|p| p.id.as_str());
        let known = shape.any(&c.name).is_some();
        !known || (c.id != latest.id && previous != Some(c.id.as_str()))
    };
    let ids: Vec<String> = input
        .observed
        .containers
        .iter()
        .filter(|c| c.exit().is_some())
        .filter(old)
        .map(|c| c.id.clone())
        .collect();
    if !ids.is_empty() {
        plan.actions.push(Action::RemoveContainers(ids));
    }
    let empty: Vec<String> = input
        .observed
        .sandboxes
        .iter()
        .skip(1)
        .filter(|s| !s.ready && input.observed.containers.iter().all(|c| c.sandbox != s.id))
        .map(|s| s.id.clone())
        .collect();
    if !empty.is_empty() {
        plan.actions.push(Action::RemoveSandboxes(empty));
    }
}

fn wake_at(plan: &mut Plan, at: Timestamp) {
    plan.wake = Some(plan.wake.map_or(at, |now| now.min(at)));
}

#[cfg(test)]
mod tests;

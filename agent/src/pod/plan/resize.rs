//! Planning of resizes: running containers whose resources differ from the allocated resources.

use std::sync::Arc;

use k8s_openapi::api::core::v1::{Container, Pod};

use super::{Action, Plan, PlanInput, ResizeContainer, grace_of, redefined, wake_at};
use crate::pod::resize::{Change, change};
use crate::pod::state::{ObservedContainer, RESIZE, Shape};

/// Whether the limits of the pod's cgroup must still change.
pub(super) enum Due {
    /// The cgroup has the limits of the pod.
    No,
    /// This plan changes the limits.
    Now,
    /// The last attempt failed, for example because of the memory usage, and its back-off is running. The value is the
    /// pod with the current resources of its cgroup and of its running containers.
    Later(Arc<Pod>),
}

/// Plans updates of running containers, and stops of containers whose resize policy requires a restart.
pub(super) fn plan(input: &PlanInput<'_>, shape: &Shape<'_>, plan: &mut Plan) -> Due {
    let (mut containers, mut is_due) = (Vec::new(), input.state.resize.is_cgroup_due);
    for (container, observed) in running(input, shape) {
        let is_condemned = input.state.kill_requests.contains_key(&observed.id) || redefined(shape, observed);
        let Some(before) = input.state.resize.actuated(observed).filter(|_| !is_condemned) else { continue };
        match change(input.desired.pod(), container, before) {
            None => continue,
            Some(Change::Update) => containers.push(ResizeContainer {
                name: container.name.clone(),
                id: observed.id.clone(),
                before: before.clone(),
            }),
            Some(Change::Restart) => {
                plan.resize_restarts.push(observed.id.clone());
                plan.actions.push(Action::Stop {
                    id: observed.id.clone(),
                    name: container.name.clone(),
                    grace: grace_of(shape.spec.termination_grace_period_seconds),
                    message: format!("Container {} resize requires restart", container.name),
                });
            }
        }
        is_due = true;
    }
    if !is_due {
        return Due::No;
    }
    let before = before(input, shape);
    if let Some(until) = input.state.pod_retries.since_failure(RESIZE, input.now) {
        wake_at(plan, until);
        return Due::Later(before);
    }
    plan.actions.push(Action::Resize { before, containers });
    Due::Now
}

/// The containers that run in the current sandbox.
fn running<'a>(
    input: &'a PlanInput<'_>,
    shape: &Shape<'a>,
) -> impl Iterator<Item = (&'a Container, &'a ObservedContainer)> {
    let all = shape.inits().iter().chain(shape.mains());
    all.filter_map(|c| Some((c, input.observed.current(&c.name).filter(|observed| observed.running())?)))
}

/// The pod with the resources that its cgroup and its running containers have.
fn before(input: &PlanInput<'_>, shape: &Shape<'_>) -> Arc<Pod> {
    let mut pod = Pod::clone(input.desired.pod());
    let actuated: Vec<_> = running(input, shape)
        .filter_map(|(c, observed)| Some((&c.name, input.state.resize.actuated(observed)?)))
        .collect();
    if let Some(spec) = &mut pod.spec {
        if let Some(whole) = input.state.resize.pod_before.as_deref().filter(|_| spec.resources.is_some()) {
            spec.resources = Some(whole.clone());
        }
        for container in spec.init_containers.iter_mut().flatten().chain(&mut spec.containers) {
            if let Some((_, resources)) = actuated.iter().find(|(name, _)| **name == container.name) {
                container.resources = Some((*resources).clone());
            }
        }
    }
    Arc::new(pod)
}

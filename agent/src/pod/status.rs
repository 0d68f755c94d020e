//! Computation of a pod's `PodStatus` from the observed and the worker's state. Pure; [`mod@write`] sends changes.

mod condition;
mod container;
mod input;
mod phase;
pub(crate) mod write;

pub(crate) use condition::is_overruled;
pub(crate) use input::StatusInput;

use k8s_openapi::api::core::v1::{HostIP, PodIP, PodStatus, ResourceRequirements};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::state::{ObservedPod, Shape};
use crate::cgroup::{status_requests, status_resources};

/// The status that the API should have.
pub(crate) fn status(input: &StatusInput<'_>) -> PodStatus {
    let pod = input.pod;
    let Some(spec) = pod.spec.as_ref() else { return PodStatus::default() };
    let shape = Shape::of(spec);
    let api = pod.status.clone().unwrap_or_default();
    let initialized = phase::initialized(&shape, input);
    let mut inits = container::init_statuses(&shape, input);
    let mut mains = container::statuses(shape.mains(), input);
    let mut added = container::added(&shape.ephemerals(), input);
    container::limit_ends([&mut inits, &mut mains, &mut added].into_iter());
    // A rejected pod has no containers to report.
    let refused = input.state.verdict.is_some()
        && *input.observed == ObservedPod::default()
        && input.last.is_none_or(is_unreported);
    // While a resize is in progress, the pod has the former resources.
    let resources =
        input.state.resize.pod_before.as_deref().cloned().unwrap_or_else(|| status_resources(pod));
    let resources = Some(resources).filter(|resources| *resources != ResourceRequirements::default());
    let (inits, mains) = if refused { (Vec::new(), Vec::new()) } else { (inits, mains) };
    let phase = match api.phase.as_deref() {
        // These phases are final in the API server.
        Some(end @ ("Failed" | "Succeeded")) => end,
        _ => phase::phase(&shape, input, &mains),
    };
    let verdict = input.state.verdict.as_ref();
    let ips = addresses(input, spec.host_network == Some(true));
    let mut status = PodStatus {
        phase: Some(phase.to_owned()),
        reason: verdict.map(|v| v.reason.clone()).or_else(|| api.reason.clone()),
        message: verdict.map(|v| v.message.clone()).or_else(|| api.message.clone()),
        start_time: input.state.start_time.map(Time),
        host_ip: input.host_ips.first().cloned(),
        host_ips: some(input.host_ips.iter().map(|ip| HostIP { ip: ip.clone() }).collect()),
        pod_ip: ips.first().cloned(),
        pod_ips: some(ips.into_iter().map(|ip| PodIP { ip }).collect()),
        observed_generation: pod.metadata.generation,
        init_container_statuses: some(inits),
        container_statuses: some(mains),
        ephemeral_container_statuses: some(if refused { Vec::new() } else { added }),
        conditions: None,
        resources: if refused { api.resources.clone() } else { resources },
        allocated_resources: if refused { api.allocated_resources.clone() } else { status_requests(pod) },
        ..api
    };
    status.conditions = Some(condition::conditions(input, &shape, &status, initialized));
    if verdict.is_some() && (input.observed.alive() || input.holds_resources) {
        delay_end(&mut status, input);
    }
    status
}

/// Keeps the former phase with its reason and message. The controller of an evicted or overdue pod replaces the pod as
/// soon as its end is reported. So, as upstream, the agent reports the end after the containers have ended and the
/// resources are free.
fn delay_end(status: &mut PodStatus, input: &StatusInput<'_>) {
    let api = input.pod.status.as_ref();
    if matches!(api.and_then(|api| api.phase.as_deref()), Some("Failed" | "Succeeded")) {
        return;
    }
    let former = input.last.or(api);
    let phase = former.and_then(|former| former.phase.clone());
    status.phase = Some(phase.unwrap_or_else(|| "Pending".to_owned()));
    status.reason = former.and_then(|former| former.reason.clone());
    status.message = former.and_then(|former| former.message.clone());
}

fn is_unreported(status: &PodStatus) -> bool {
    status.container_statuses.is_none()
}

fn some<T>(list: Vec<T>) -> Option<Vec<T>> {
    (!list.is_empty()).then_some(list)
}

fn addresses(input: &StatusInput<'_>, host_network: bool) -> Vec<String> {
    if host_network {
        return if input.state.start_time.is_some() { input.host_ips.to_vec() } else { Vec::new() };
    }
    match input.observed.sandboxes.first() {
        Some(sandbox) if !sandbox.ips.is_empty() => sandbox.ips.clone(),
        Some(sandbox) if sandbox.ready => Vec::new(),
        // An ended pod keeps its addresses.
        _ => {
            let known = input.last.and_then(|s| s.pod_ips.as_ref());
            known
                .or(input.pod.status.as_ref().and_then(|s| s.pod_ips.as_ref()))
                .map_or_else(Vec::new, |ips| ips.iter().map(|ip| ip.ip.clone()).collect())
        }
    }
}

#[cfg(test)]
mod tests;

//! The phase of a pod from the states of its containers.

use k8s_openapi::api::core::v1::ContainerStatus;

use super::facts::Facts;
use crate::pod::state::{ObservedContainer, RestartPolicy, Shape, is_sidecar};

/// Whether every init container has completed in the ready sandbox, or had before the pod ended.
pub(super) fn initialized(shape: &Shape<'_>, facts: &Facts<'_>) -> bool {
    let main_was = shape.mains().iter().any(|c| match facts.observed.sandbox() {
        Some(_) => facts.observed.current(&c.name).is_some(),
        None => facts.observed.latest(&c.name).is_some(),
    });
    main_was
        || shape.inits().iter().all(|init| {
            let observed = match facts.observed.sandbox() {
                Some(_) => facts.observed.current(&init.name),
                None => facts.observed.latest(&init.name),
            };
            observed.is_some_and(|c| {
                if is_sidecar(init) {
                    c.running() && super::container::started(init, c, facts)
                } else {
                    ObservedContainer::succeeded(c)
                }
            })
        })
}

#[derive(Default)]
struct Count {
    unknown: usize,
    waiting: usize,
    running: usize,
    stopped: usize,
    succeeded: usize,
}

pub(super) fn phase(shape: &Shape<'_>, facts: &Facts<'_>, mains: &[ContainerStatus]) -> &'static str {
    if facts.state.verdict.is_some() {
        return "Failed";
    }
    let policy = shape.restart();
    if crate::pod::plan::init_failed_for_good(shape, facts.observed) {
        return "Failed";
    }
    if !initialized(shape, facts) {
        // Ended before it was initialized: no container will run.
        return if facts.finished { "Failed" } else { "Pending" };
    }
    let count = count(mains);
    if count.waiting > 0 {
        return if facts.finished { "Failed" } else { "Pending" };
    }
    if count.unknown > 0 {
        return "Pending";
    }
    if count.running > 0 {
        return "Running";
    }
    let is_restarted = |c: &ObservedContainer| facts.state.resize.is_restarted(c);
    if shape.mains().iter().any(|c| facts.observed.latest(&c.name).is_some_and(is_restarted)) {
        return "Running";
    }
    match (facts.finished, policy) {
        _ if count.stopped == 0 => "Pending",
        (false, RestartPolicy::Always) => "Running",
        _ if count.stopped == count.succeeded => "Succeeded",
        (true, _) | (false, RestartPolicy::Never) => "Failed",
        (false, RestartPolicy::OnFailure) => "Running",
    }
}

fn count(statuses: &[ContainerStatus]) -> Count {
    let mut count = Count::default();
    for status in statuses {
        let state = status.state.as_ref();
        let ended_before = status.last_state.as_ref().is_some_and(|s| s.terminated.is_some());
        match state {
            Some(s) if s.running.is_some() => count.running += 1,
            Some(s) if s.terminated.is_some() => {
                count.stopped += 1;
                let code = s.terminated.as_ref().map_or(1, |t| t.exit_code);
                count.succeeded += usize::from(code == 0);
            }
            Some(s) if s.waiting.is_some() && ended_before => count.stopped += 1,
            Some(s) if s.waiting.is_some() => count.waiting += 1,
            _ => count.unknown += 1,
        }
    }
    count
}

//! The phase of a pod from the states of its containers.

use k8s_openapi::api::core::v1::{Container, ContainerStatus};

use super::input::StatusInput;
use crate::pod::restart::restarts_after;
use crate::pod::state::{ObservedContainer, Shape, is_sidecar};

/// Whether every init container has completed in the ready sandbox, or had completed before the pod ended.
pub(super) fn initialized(shape: &Shape<'_>, input: &StatusInput<'_>) -> bool {
    let main_was = shape.mains().iter().any(|c| match input.observed.sandbox() {
        Some(_) => input.observed.current(&c.name).is_some(),
        None => input.observed.latest(&c.name).is_some(),
    });
    main_was
        || shape.inits().iter().all(|init| {
            let observed = match input.observed.sandbox() {
                Some(_) => input.observed.current(&init.name),
                None => input.observed.latest(&init.name),
            };
            observed.is_some_and(|c| {
                if is_sidecar(init) {
                    c.running() && super::container::started(init, c, input)
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
    /// Number of the stopped containers that start again.
    restarting: usize,
}

pub(super) fn phase(shape: &Shape<'_>, input: &StatusInput<'_>, mains: &[ContainerStatus]) -> &'static str {
    if input.state.verdict.is_some() {
        return "Failed";
    }
    let exits = input.exits(shape);
    let restarts_all = exits.restart_all();
    if !restarts_all && exits.init_failed_at().is_some() {
        return if input.holds_resources { "Pending" } else { "Failed" };
    }
    if !initialized(shape, input) {
        // The pod has ended before it was initialized, so no main container will run.
        return if input.finished { "Failed" } else { "Pending" };
    }
    let restarts = |container: &Container, code: i32| {
        restarts_all
            || input.state.removed.contains_key(&container.name)
            || input
                .observed
                .latest(&container.name)
                .is_some_and(|c| exits.is_stopped_to_restart(container, c))
            || restarts_after(shape.spec, container, code)
    };
    let count = count(shape.mains().iter().zip(mains), restarts);
    if count.waiting > 0 {
        return if input.finished { "Failed" } else { "Pending" };
    }
    if count.unknown > 0 {
        return "Pending";
    }
    if count.running > 0 {
        return "Running";
    }
    match count.stopped {
        0 => "Pending",
        _ if count.restarting > 0 && !input.finished => "Running",
        _ if input.holds_resources => "Running",
        stopped if stopped == count.succeeded => "Succeeded",
        _ => "Failed",
    }
}

/// Counts main containers by their states. `restarts` decides whether an ended container starts again, by its exit
/// code.
fn count<'a>(
    statuses: impl Iterator<Item = (&'a Container, &'a ContainerStatus)>,
    restarts: impl Fn(&Container, i32) -> bool,
) -> Count {
    let mut count = Count::default();
    for (container, status) in statuses {
        let last_end = status.last_state.as_ref().and_then(|s| s.terminated.as_ref());
        match &status.state {
            Some(s) if s.running.is_some() => count.running += 1,
            Some(s) if s.terminated.is_some() => {
                count.stopped += 1;
                let code = s.terminated.as_ref().map_or(1, |t| t.exit_code);
                count.succeeded += usize::from(code == 0);
                count.restarting += usize::from(restarts(container, code));
            }
            Some(s) if s.waiting.is_some() => match last_end {
                Some(end) => {
                    count.stopped += 1;
                    count.restarting += usize::from(restarts(container, end.exit_code));
                }
                None => count.waiting += 1,
            },
            _ => count.unknown += 1,
        }
    }
    count
}

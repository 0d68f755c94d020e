//! Conditions of a pod. Conditions of other components are preserved.

use k8s_openapi::api::core::v1::{ContainerStatus, PodCondition, PodStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;

use super::input::StatusInput;
use crate::pod::restart::{ALL_RESTARTING, may_restart_all};
use crate::pod::state::{PREEMPTING, Shape, is_sidecar};

const OURS: [&str; 5] =
    ["PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady", "PodScheduled"];

/// Types of the conditions of a resize that is not accepted yet, and of a resize that is not complete.
const RESIZE: [&str; 2] = ["PodResizePending", "PodResizeInProgress"];

/// Type of the condition of a pod that the node or another component ends, such as an eviction.
const DISRUPTION: &str = "DisruptionTarget";

/// Message in the condition of a preempted pod. The text is upstream's.
const PREEMPTED: &str = "Pod was preempted by Kubelet to accommodate a critical pod.";

struct EvaluatedCondition {
    kind: &'static str,
    fault: Option<(&'static str, String)>,
}

pub(super) fn conditions(
    input: &StatusInput<'_>,
    shape: &Shape<'_>,
    status: &PodStatus,
    initialized: bool,
) -> Vec<PodCondition> {
    let containers = containers_ready(shape, status);
    let evaluated = [
        EvaluatedCondition {
            kind: OURS[0],
            fault: input.observed.sandbox().is_none().then(|| ("", String::new())),
        },
        EvaluatedCondition {
            kind: OURS[1],
            fault: not_initialized(shape, status, initialized || was_initialized(input)),
        },
        EvaluatedCondition { kind: OURS[2], fault: containers.clone().or_else(|| gates(input, shape)) },
        EvaluatedCondition { kind: OURS[3], fault: containers },
        EvaluatedCondition { kind: OURS[4], fault: None },
    ];
    let completed = status.phase.as_deref() == Some("Succeeded");
    let mut conditions: Vec<PodCondition> =
        evaluated.into_iter().map(|evaluated| dated(evaluated, input, completed)).collect();
    let foreign = input.pod.status.iter().filter_map(|s| s.conditions.as_ref()).flatten();
    let disruption = disruption(input);
    let is_foreign = |c: &&PodCondition| {
        !OURS.contains(&c.type_.as_str())
            && !RESIZE.contains(&c.type_.as_str())
            && c.type_ != ALL_RESTARTING
            && (disruption.is_none() || c.type_ != DISRUPTION)
    };
    conditions.extend(foreign.filter(is_foreign).cloned());
    conditions.extend(disruption);
    conditions.extend(all_restarting(input, shape, status));
    if !matches!(status.phase.as_deref(), Some("Succeeded" | "Failed")) {
        conditions.extend(resize(input));
    }
    conditions
}

/// The conditions of a resize.
fn resize(input: &StatusInput<'_>) -> impl Iterator<Item = PodCondition> {
    let resize = &input.state.resize;
    let pending = resize.pending.as_ref().map(|pending| PodCondition {
        reason: Some(pending.reason.to_owned()),
        message: Some(pending.message.clone()),
        observed_generation: pending.generation,
        ..dated(EvaluatedCondition { kind: RESIZE[0], fault: None }, input, false)
    });
    let in_progress = resize.in_progress.as_ref().map(|progress| PodCondition {
        reason: progress.error.as_ref().map(|_| "Error".to_owned()),
        message: progress.error.clone(),
        observed_generation: progress.generation,
        ..dated(EvaluatedCondition { kind: RESIZE[1], fault: None }, input, false)
    });
    pending.into_iter().chain(in_progress)
}

/// The condition [`ALL_RESTARTING`]. None for a pod without a rule that restarts all containers.
fn all_restarting(input: &StatusInput<'_>, shape: &Shape<'_>, status: &PodStatus) -> Option<PodCondition> {
    if !may_restart_all(shape.spec) {
        return None;
    }
    let reason = match status.phase.as_deref() {
        Some("Succeeded") => "PodCompleted",
        Some("Failed") => "PodFailed",
        _ if input.exits(shape).restart_all() => {
            let restarting = dated(EvaluatedCondition { kind: ALL_RESTARTING, fault: None }, input, false);
            return Some(PodCondition {
                reason: Some("RestartAllContainersStarted".to_owned()),
                message: Some("A container exited, and its restart rules restart all containers".to_owned()),
                observed_generation: None,
                ..restarting
            });
        }
        _ => "",
    };
    let fault = Some((reason, String::new()));
    let done = dated(EvaluatedCondition { kind: ALL_RESTARTING, fault }, input, false);
    Some(PodCondition { observed_generation: None, ..done })
}

/// The condition of a pod that the node ends: the node is short of a resource, the machine shuts down, or a critical
/// pod needs the resources.
fn disruption(input: &StatusInput<'_>) -> Option<PodCondition> {
    let verdict = input.state.verdict.as_ref().filter(|_| input.state.disrupted)?;
    let condition = dated(EvaluatedCondition { kind: DISRUPTION, fault: None }, input, false);
    let message = if verdict.reason == PREEMPTING { PREEMPTED } else { verdict.message.as_str() };
    Some(PodCondition {
        reason: Some("TerminationByKubelet".to_owned()),
        message: Some(message.to_owned()),
        ..condition
    })
}

fn dated(evaluated: EvaluatedCondition, input: &StatusInput<'_>, completed: bool) -> PodCondition {
    let status = if evaluated.fault.is_none() { "True" } else { "False" };
    let (reason, message) = evaluated.fault.unwrap_or_default();
    // Upstream's reason for a pod that ran to its end.
    let reason = if completed && evaluated.kind == "Initialized" { "PodCompleted" } else { reason };
    let api = input.pod.status.as_ref();
    let old = [input.last, api].into_iter().flatten().find_map(|s| {
        s.conditions.iter().flatten().find(|c| c.type_ == evaluated.kind && c.status == status)
    });
    let now = Time(Timestamp::from_second(input.now.as_second()).unwrap_or(input.now));
    PodCondition {
        type_: evaluated.kind.to_owned(),
        status: status.to_owned(),
        reason: (!reason.is_empty()).then(|| reason.to_owned()),
        message: (!message.is_empty()).then_some(message),
        last_transition_time: Some(old.and_then(|c| c.last_transition_time.clone()).unwrap_or(now)),
        observed_generation: input.pod.metadata.generation,
        last_probe_time: None,
    }
}

/// Whether another component has changed readiness since the last report. The node lifecycle controller sets the pods
/// of an unreachable node to not ready. The agent corrects this when the node is reachable again.
pub(crate) fn is_overruled(reported: &PodStatus, api: &PodStatus) -> bool {
    let of = |status: &PodStatus, type_: &str| {
        status.conditions.iter().flatten().find(|c| c.type_ == type_).cloned()
    };
    OURS.iter().any(|type_| match (of(reported, type_), of(api, type_)) {
        (Some(reported), Some(api)) => {
            reported.status != api.status && reported.last_transition_time < api.last_transition_time
        }
        _ => false,
    })
}

/// Whether the last status says that the pod is initialized. The condition stays while init containers run again.
fn was_initialized(input: &StatusInput<'_>) -> bool {
    let last = input.last.or(input.pod.status.as_ref());
    let conditions = last.iter().flat_map(|status| status.conditions.iter().flatten());
    conditions.into_iter().any(|c| c.type_ == "Initialized" && c.status == "True")
}

fn not_initialized(
    shape: &Shape<'_>,
    status: &PodStatus,
    initialized: bool,
) -> Option<(&'static str, String)> {
    if initialized || status.phase.as_deref() == Some("Succeeded") {
        return None;
    }
    let incomplete: Vec<&str> = named(status.init_container_statuses.as_deref(), |s| {
        let sidecar = shape.container(&s.name).is_some_and(is_sidecar);
        if sidecar { s.started != Some(true) } else { !s.ready }
    });
    Some((
        "ContainersNotInitialized",
        format!("containers with incomplete status: [{}]", incomplete.join(" ")),
    ))
}

fn containers_ready(shape: &Shape<'_>, status: &PodStatus) -> Option<(&'static str, String)> {
    match status.phase.as_deref() {
        Some("Succeeded") => return Some(("PodCompleted", String::new())),
        Some("Failed") => return Some(("PodFailed", String::new())),
        _ => {}
    }
    let mut unready = named(status.init_container_statuses.as_deref(), |s| {
        shape.container(&s.name).is_some_and(is_sidecar) && !s.ready
    });
    unready.extend(named(status.container_statuses.as_deref(), |s| !s.ready));
    (!unready.is_empty())
        .then(|| ("ContainersNotReady", format!("containers with unready status: [{}]", unready.join(" "))))
}

fn gates(input: &StatusInput<'_>, shape: &Shape<'_>) -> Option<(&'static str, String)> {
    let given = input.pod.status.as_ref().and_then(|s| s.conditions.as_deref()).unwrap_or_default();
    let faults: Vec<String> = shape
        .spec
        .readiness_gates
        .iter()
        .flatten()
        .filter_map(|gate| {
            let kind = &gate.condition_type;
            match given.iter().find(|c| c.type_ == *kind) {
                Some(c) if c.status == "True" => None,
                Some(PodCondition { status, .. }) => {
                    Some(format!("the status of pod readiness gate \"{kind}\" is not \"True\", but {status}"))
                }
                None => {
                    Some(format!("corresponding condition of pod readiness gate \"{kind}\" does not exist."))
                }
            }
        })
        .collect();
    (!faults.is_empty()).then(|| ("ReadinessGatesNotReady", faults.join(", ")))
}

fn named(statuses: Option<&[ContainerStatus]>, which: impl Fn(&ContainerStatus) -> bool) -> Vec<&str> {
    statuses.unwrap_or_default().iter().filter(|s| which(s)).map(|s| s.name.as_str()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_later_change_by_another_component_overrules_and_a_late_echo_does_not() {
        let status = |status: &str, second: i64| PodStatus {
            conditions: Some(vec![PodCondition {
                type_: "Ready".to_owned(),
                status: status.to_owned(),
                last_transition_time: Some(Time(Timestamp::from_second(second).unwrap())),
                ..PodCondition::default()
            }]),
            ..PodStatus::default()
        };
        assert!(is_overruled(&status("True", 5), &status("False", 6)));
        assert!(!is_overruled(&status("True", 5), &status("False", 4)));
        assert!(!is_overruled(&status("True", 5), &status("True", 6)));
        assert!(!is_overruled(&status("True", 5), &PodStatus::default()));
    }
}

//! Pods: readiness, the derived status, restarts.

use jiff::Timestamp;
use serde_json::Value;

use super::age::age;
use super::{AGE, Column, NAME, age_cell, items, name, or_none, string, wide};

pub(crate) const COLUMNS: &[Column] = &[
    NAME,
    string("Ready", "Number of ready containers, and of all containers."),
    string("Status", "The state of the pod, derived from the states of its containers."),
    string("Restarts", "Number of restarts of the pod's containers, and the time since the last one."),
    AGE,
    wide(string("IP", "Address of the pod.")),
    wide(string("Node", "Node that the pod is bound to.")),
    wide(string(
        "Nominated Node",
        "Node on which other pods are deleted (preemption), so that this pod fits.",
    )),
    wide(string("Readiness Gates", "Number of readiness gates that are true, and of all readiness gates.")),
];

/// The status of a pod, derived from its containers.
struct Summary {
    reason: String,
    ready: usize,
    total: usize,
    restarts: i64,
    last_restart: Value,
}

pub(crate) fn cells(pod: &Value, now: Timestamp) -> Vec<Value> {
    let (spec, status) = (&pod["spec"], &pod["status"]);
    let summary = summarize(pod);
    let restarts = match (summary.restarts, &summary.last_restart) {
        (0, _) | (_, Value::Null) => summary.restarts.to_string(),
        (count, last) => format!("{count} ({} ago)", age(last, now)),
    };
    let gates = items(&spec["readinessGates"]);
    let total = gates.len();
    let open =
        gates.filter(|gate| condition_is_true(status, gate["conditionType"].as_str().unwrap_or_default()));
    let gates = if total == 0 { "<none>".to_owned() } else { format!("{}/{total}", open.count()) };
    vec![
        name(pod),
        format!("{}/{}", summary.ready, summary.total).into(),
        summary.reason.into(),
        restarts.into(),
        age_cell(pod, now),
        or_none(pod_ip(status)),
        or_none(&spec["nodeName"]),
        or_none(&status["nominatedNodeName"]),
        gates.into(),
    ]
}

fn pod_ip(status: &Value) -> &Value {
    if status["podIPs"][0]["ip"].is_string() { &status["podIPs"][0]["ip"] } else { &status["podIP"] }
}

fn summarize(pod: &Value) -> Summary {
    let (spec, status) = (&pod["spec"], &pod["status"]);
    let sidecars = items(&spec["initContainers"]).filter(|container| is_sidecar(container)).count();
    let mut summary = Summary {
        reason: initial_reason(status),
        ready: 0,
        total: items(&spec["containers"]).len() + sidecars,
        restarts: 0,
        last_restart: Value::Null,
    };
    let sidecar_part = add_init_containers(spec, status, &mut summary);
    if let Some((restarts, last)) = sidecar_part {
        summary.restarts = restarts;
        summary.last_restart = last;
        add_containers(status, &mut summary);
    }
    let phase = status["phase"].as_str().unwrap_or_default();
    if pod["metadata"]["deletionTimestamp"].is_string() {
        if status["reason"] == "NodeLost" {
            summary.reason = "Unknown".to_owned();
        } else if !matches!(phase, "Succeeded" | "Failed") {
            summary.reason = "Terminating".to_owned();
        }
    }
    summary
}

fn initial_reason(status: &Value) -> String {
    let gated = items(&status["conditions"])
        .any(|condition| condition["type"] == "PodScheduled" && condition["reason"] == "SchedulingGated");
    let own = status["reason"].as_str().filter(|reason| !reason.is_empty());
    let reason = if gated { Some("SchedulingGated") } else { own.or(status["phase"].as_str()) };
    reason.unwrap_or_default().to_owned()
}

/// Evaluates the init containers up to the first unfinished init container. If all are done, or the pod has the
/// condition Initialized, returns the restarts of the sidecars: then the containers determine the status.
fn add_init_containers(spec: &Value, status: &Value, summary: &mut Summary) -> Option<(i64, Value)> {
    let total = items(&spec["initContainers"]).len();
    let (mut sidecar_restarts, mut sidecar_last) = (0, Value::Null);
    let mut initializing = false;
    for (index, container) in items(&status["initContainerStatuses"]).enumerate() {
        let declared = items(&spec["initContainers"]).find(|declared| declared["name"] == container["name"]);
        let sidecar = declared.is_some_and(is_sidecar);
        add_restarts(container, &mut summary.restarts, &mut summary.last_restart);
        if sidecar {
            add_restarts(container, &mut sidecar_restarts, &mut sidecar_last);
        }
        let (ended, waiting) = (&container["state"]["terminated"], &container["state"]["waiting"]);
        if ended.is_object() && ended["exitCode"].as_i64().unwrap_or(0) == 0 {
            continue;
        }
        if sidecar && container["started"] == true {
            summary.ready += usize::from(container["ready"] == true);
            continue;
        }
        let waits_for =
            waiting["reason"].as_str().filter(|reason| !matches!(*reason, "" | "PodInitializing"));
        summary.reason = match waits_for {
            _ if ended.is_object() => format!("Init:{}", end_reason(ended)),
            Some(reason) => format!("Init:{reason}"),
            None => format!("Init:{index}/{total}"),
        };
        initializing = true;
        break;
    }
    (!initializing || condition_is_true(status, "Initialized")).then_some((sidecar_restarts, sidecar_last))
}

fn add_containers(status: &Value, summary: &mut Summary) {
    let mut has_running = false;
    for container in items(&status["containerStatuses"]).rev() {
        add_restarts(container, &mut summary.restarts, &mut summary.last_restart);
        let state = &container["state"];
        let waits_for = state["waiting"]["reason"].as_str().filter(|reason| !reason.is_empty());
        if let Some(reason) = waits_for {
            summary.reason = reason.to_owned();
        } else if state["terminated"].is_object() {
            summary.reason = end_reason(&state["terminated"]);
        } else if container["ready"] == true && state["running"].is_object() {
            has_running = true;
            summary.ready += 1;
        }
    }
    if summary.reason == "Completed" && has_running {
        let ready = condition_is_true(status, "Ready");
        summary.reason = if ready { "Running" } else { "NotReady" }.to_owned();
    }
}

fn add_restarts(container: &Value, restarts: &mut i64, last: &mut Value) {
    *restarts += container["restartCount"].as_i64().unwrap_or(0);
    let ended = &container["lastState"]["terminated"]["finishedAt"];
    // RFC 3339 texts in UTC have the same order as their times.
    if ended.as_str() > last.as_str() {
        *last = ended.clone();
    }
}

fn end_reason(ended: &Value) -> String {
    match (ended["reason"].as_str(), ended["signal"].as_i64()) {
        (Some(reason), _) if !reason.is_empty() => reason.to_owned(),
        (_, Some(signal)) if signal != 0 => format!("Signal:{signal}"),
        _ => format!("ExitCode:{}", ended["exitCode"].as_i64().unwrap_or(0)),
    }
}

fn is_sidecar(container: &Value) -> bool {
    container["restartPolicy"] == "Always"
}

fn condition_is_true(status: &Value, kind: &str) -> bool {
    items(&status["conditions"]).any(|condition| condition["type"] == kind && condition["status"] == "True")
}

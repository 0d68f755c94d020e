//! Deployments, replica sets, controller revisions, replication controllers, pod templates.

use serde_json::Value;

use super::selector::is_label_selector;
use super::{Causes, Path, pod, text};
use coracle_values::label_selector::LabelSelector;

const PERCENT: &str = "a valid percent string must be a numeric string followed by an ending '%' (e.g. '1%',  or '93%', regex used for validation is '[0-9]+%')";

pub(crate) fn deployment(causes: &mut Causes, object: &Value, old: Option<&Value>) {
    let (path, spec) = (Path::root("spec"), &object["spec"]);
    causes.not_negative(&path.field("replicas"), &spec["replicas"]);
    if selector(causes, &path, spec) {
        template_of(causes, &path.field("template"), &spec["template"], "ReplicaSet");
    }
    strategy(causes, &path.field("strategy"), &spec["strategy"]);
    for name in ["minReadySeconds", "revisionHistoryLimit", "progressDeadlineSeconds"] {
        causes.not_negative(&path.field(name), &spec[name]);
    }
    let deadline = &spec["progressDeadlineSeconds"];
    if deadline.as_i64().is_some_and(|deadline| deadline <= spec["minReadySeconds"].as_i64().unwrap_or(0)) {
        causes.invalid(
            &path.field("progressDeadlineSeconds"),
            deadline,
            "must be greater than minReadySeconds",
        );
    }
    check_selector_unchanged(causes, spec, old);
}

pub(crate) fn replica_set(causes: &mut Causes, object: &Value, old: Option<&Value>) {
    let (path, spec) = (Path::root("spec"), &object["spec"]);
    causes.not_negative(&path.field("replicas"), &spec["replicas"]);
    causes.not_negative(&path.field("minReadySeconds"), &spec["minReadySeconds"]);
    if selector(causes, &path, spec) {
        template_of(causes, &path.field("template"), &spec["template"], "ReplicaSet");
    }
    check_selector_unchanged(causes, spec, old);
}

pub(crate) fn controller_revision(causes: &mut Causes, object: &Value, old: Option<&Value>) {
    causes.not_negative(&Path::root("revision"), &object["revision"]);
    match old {
        None if object["data"].is_null() => causes.required(&Path::root("data"), "data is mandatory"),
        None if !object["data"].is_object() => {
            causes.required(&Path::root("data"), "data must be a valid JSON object");
        }
        Some(old) if object["data"] != old["data"] => {
            causes.invalid(&Path::root("data"), &object["data"], "field is immutable");
        }
        _ => {}
    }
}

pub(crate) fn replication_controller(causes: &mut Causes, object: &Value, _old: Option<&Value>) {
    let (path, spec) = (Path::root("spec"), &object["spec"]);
    causes.not_negative(&path.field("minReadySeconds"), &spec["minReadySeconds"]);
    let selector = &spec["selector"];
    if selector.as_object().is_none_or(serde_json::Map::is_empty) {
        causes.required(&path.field("selector"), "");
    }
    causes.not_negative(&path.field("replicas"), &spec["replicas"]);
    let here = path.field("template");
    if spec["template"].is_null() {
        return causes.required(&here, "");
    }
    let labels = &spec["template"]["metadata"]["labels"];
    if !selector.as_object().into_iter().flatten().all(|(name, value)| labels.get(name) == Some(value)) {
        let at = here.field("metadata").field("labels");
        causes.invalid(&at, labels, "`selector` does not match template `labels`");
    }
    template_of(causes, &here, &spec["template"], "ReplicationController");
}

pub(crate) fn pod_template(causes: &mut Causes, object: &Value, _old: Option<&Value>) {
    pod::template(causes, &Path::root("template"), &object["template"]);
}

/// Checks the status of a deployment.
pub(super) fn deployment_status(causes: &mut Causes, status: &Value, old: &Value) {
    let others = ["unavailableReplicas", "terminatingReplicas"];
    counts(causes, status, "updatedReplicas", &others, "readyReplicas");
    collisions(causes, &Path::root("status"), status, old);
}

/// Checks the status of a replica set or of a replication controller.
pub(super) fn replica_status(causes: &mut Causes, status: &Value) {
    counts(causes, status, "fullyLabeledReplicas", &["terminatingReplicas"], "readyReplicas");
}

/// Checks the counts in a status. `part`, `readyReplicas` and `availableReplicas` are at most `replicas`; `others` have
/// no maximum. `ready` is the name of the count of ready pods in a message.
pub(super) fn counts(causes: &mut Causes, status: &Value, part: &str, others: &[&str], ready: &str) {
    let path = Path::root("status");
    let parts = [part, "readyReplicas", "availableReplicas"];
    for name in ["replicas", "observedGeneration"].iter().chain(&parts).chain(others) {
        causes.not_negative(&path.field(name), &status[*name]);
    }
    let count = |name: &str| status[name].as_i64().unwrap_or(0);
    for name in parts {
        if count(name) > count("replicas") {
            causes.invalid(&path.field(name), &status[name], "cannot be greater than status.replicas");
        }
    }
    if count("availableReplicas") > count("readyReplicas") {
        let detail = format!("cannot be greater than {ready}");
        causes.invalid(&path.field("availableReplicas"), &status["availableReplicas"], &detail);
    }
}

/// Checks a selector and the labels of the template. Returns false if the selector is invalid. In this case upstream
/// does not check the template.
fn selector(causes: &mut Causes, path: &Path, spec: &Value) -> bool {
    let (here, selector) = (path.field("selector"), &spec["selector"]);
    if selector.is_null() {
        causes.required(&here, "");
    } else if !is_label_selector(causes, &here, selector) {
        causes.invalid_selector(&here, selector, "invalid label selector");
        return false;
    } else if LabelSelector::from_object(selector).is_ok_and(|parsed| parsed.is_empty()) {
        // The error of replica sets also names deployments, as upstream.
        causes.invalid(&here, selector, "empty selector is invalid for deployment");
        return true;
    }
    selected_template(causes, path, spec);
    true
}

/// Checks that the selector of a spec matches the labels of its template. An absent selector matches nothing.
pub(super) fn selected_template(causes: &mut Causes, path: &Path, spec: &Value) {
    let (labels, selector) = (&spec["template"]["metadata"]["labels"], &spec["selector"]);
    let Ok(parsed) = LabelSelector::from_object(selector) else { return };
    if selector.is_null() || !parsed.matches_by(|key| labels.get(key).and_then(Value::as_str)) {
        let at = path.field("template").field("metadata").field("labels");
        causes.invalid(&at, labels, "`selector` does not match template `labels`");
    }
}

pub(super) fn check_selector_unchanged(causes: &mut Causes, spec: &Value, old: Option<&Value>) {
    if old.is_some_and(|old| old["spec"]["selector"] != spec["selector"]) {
        let here = Path::root("spec").field("selector");
        causes.invalid_selector(&here, &spec["selector"], "field is immutable");
    }
}

/// Checks the collision count: it never decreases.
pub(super) fn collisions(causes: &mut Causes, path: &Path, status: &Value, old: &Value) {
    let here = path.field("collisionCount");
    causes.not_negative(&here, &status["collisionCount"]);
    let count = |status: &Value| status["collisionCount"].as_i64();
    if count(old).is_some_and(|old| count(status).unwrap_or(0) < old) {
        causes.invalid(&here, &count(status).unwrap_or(0).into(), "cannot be decremented");
    }
}

/// Checks the pod template of a workload whose pods always restart. `owner` is the workload's kind.
pub(super) fn template_of(causes: &mut Causes, path: &Path, template: &Value, owner: &str) {
    pod::template(causes, path, template);
    restarts(causes, &path.field("spec"), &template["spec"], owner);
}

/// Checks that the pods of a workload always restart, and have no deadline.
pub(super) fn restarts(causes: &mut Causes, here: &Path, spec: &Value, owner: &str) {
    if !text(&spec["restartPolicy"]).is_empty() && spec["restartPolicy"] != "Always" {
        causes.unsupported(&here.field("restartPolicy"), &spec["restartPolicy"], &["Always"]);
    }
    if !spec["activeDeadlineSeconds"].is_null() {
        let detail = format!("activeDeadlineSeconds in {owner} is not Supported");
        causes.forbidden(&here.field("activeDeadlineSeconds"), &detail);
    }
}

fn strategy(causes: &mut Causes, path: &Path, strategy: &Value) {
    let (here, rolling) = (path.field("rollingUpdate"), &strategy["rollingUpdate"]);
    match text(&strategy["type"]) {
        "Recreate" if !rolling.is_null() => {
            causes.forbidden(&here, "may not be specified when strategy `type` is 'Recreate'");
        }
        "Recreate" => {}
        "RollingUpdate" if rolling.is_null() => {
            causes.required(&here, "this should be defaulted and never be nil")
        }
        "RollingUpdate" => {
            let (unavailable, surge) = (&rolling["maxUnavailable"], &rolling["maxSurge"]);
            int_or_percent(causes, &here.field("maxUnavailable"), unavailable);
            int_or_percent(causes, &here.field("maxSurge"), surge);
            if is_zero(unavailable) && is_zero(surge) {
                causes.invalid(
                    &here.field("maxUnavailable"),
                    unavailable,
                    "may not be 0 when `maxSurge` is 0",
                );
            }
            if percent(unavailable).is_some_and(|percent| percent > 100) {
                causes.invalid(&here.field("maxUnavailable"), unavailable, "must not be greater than 100%");
            }
        }
        _ => causes.unsupported(path, strategy, &["Recreate", "RollingUpdate"]),
    }
}

pub(super) fn int_or_percent(causes: &mut Causes, path: &Path, value: &Value) {
    match value {
        Value::String(_) if percent(value).is_none() => causes.invalid(path, value, PERCENT),
        _ => causes.not_negative(path, value),
    }
}

pub(super) fn percent(value: &Value) -> Option<u64> {
    let digits = value.as_str()?.strip_suffix('%').filter(|digits| !digits.is_empty())?;
    digits.bytes().all(|byte| byte.is_ascii_digit()).then(|| digits.parse().ok()).flatten()
}

/// Whether a number or percentage is 0. A text that is neither a number nor a percentage counts as 0. Source:
/// `getIntOrPercentValue`.
pub(super) fn is_zero(value: &Value) -> bool {
    match value {
        Value::String(text) => percent(value).unwrap_or_else(|| text.parse().unwrap_or(0)) == 0,
        _ => value.is_null() || *value == 0,
    }
}

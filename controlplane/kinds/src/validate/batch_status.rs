//! The status of jobs.

use std::collections::HashSet;

use serde_json::Value;

use super::batch_policy::indexes;
use super::{Causes, Path, items, text};

/// Checks a changed status of a job. A job's end is final, and its counters never decrease.
pub(super) fn job(causes: &mut Causes, new: &Value, old: &Value) {
    let (path, status, spec) = (Path::root("status"), &new["status"], &new["spec"]);
    for name in ["active", "succeeded", "failed", "ready", "terminating"] {
        causes.not_negative(&path.field(name), &status[name]);
    }
    check_uncounted(causes, &path.field("uncountedTerminatedPods"), &status["uncountedTerminatedPods"]);
    conditions(causes, &path.field("conditions"), status, &old["status"]);
    finished(causes, &path, status);
    times(causes, &path, new, &old["status"]);
    let completions = spec["completions"].as_i64();
    for name in ["completedIndexes", "failedIndexes"] {
        if let (Some(list), Some(completions)) = (status[name].as_str(), completions)
            && let Err(error) = indexes(list, completions)
        {
            causes.invalid(&path.field(name), &status[name], &format!("error parsing {name}: {error}"));
        }
    }
    if spec["completionMode"] != "Indexed" && !text(&status["completedIndexes"]).is_empty() {
        let detail = "cannot set non-empty completedIndexes when non-indexed completion mode";
        causes.invalid(&path.field("completedIndexes"), &status["completedIndexes"], detail);
    }
    if spec["backoffLimitPerIndex"].is_null() && !status["failedIndexes"].is_null() {
        let detail = "cannot set non-null failedIndexes when backoffLimitPerIndex is null";
        causes.invalid(&path.field("failedIndexes"), &status["failedIndexes"], detail);
    }
    if count(status, "ready") > count(status, "active") {
        causes.invalid(&path.field("ready"), &status["ready"], "cannot set more ready pods than active");
    }
    for name in ["failed", "succeeded"] {
        if count(status, name) < count(&old["status"], name) {
            let value = count(status, name).into();
            causes.invalid(&path.field(name), &value, &format!("cannot decrease the {name} counter"));
        }
    }
}

fn count(status: &Value, name: &str) -> i64 {
    status[name].as_i64().unwrap_or(0)
}

fn is(status: &Value, condition: &str) -> bool {
    items(&status["conditions"]).any(|(_, item)| item["type"] == condition && item["status"] == "True")
}

fn check_uncounted(causes: &mut Causes, path: &Path, lists: &Value) {
    let mut seen = HashSet::new();
    for list in ["succeeded", "failed"] {
        for (index, uid) in items(&lists[list]) {
            let here = path.field(list).index(index);
            if text(uid).is_empty() {
                causes.invalid(&here, uid, "must not be empty");
            } else if !seen.insert(text(uid)) {
                causes.duplicate(&here, uid);
            }
        }
    }
}

fn conditions(causes: &mut Causes, path: &Path, status: &Value, old: &Value) {
    let list = &status["conditions"];
    let mut refuse = |wrong: bool, detail: &str| {
        if wrong {
            causes.invalid(path, list, detail);
        }
    };
    let (complete, failed) = (is(status, "Complete"), is(status, "Failed"));
    let (target, met) = (is(status, "FailureTarget"), is(status, "SuccessCriteriaMet"));
    refuse(complete && failed, "cannot set Complete=True and Failed=true conditions");
    refuse(complete && target, "cannot set Complete=True and FailureTarget=true conditions");
    refuse(failed && !target, "cannot set Failed=True condition without the FailureTarget=true condition");
    refuse(
        complete && !met,
        "cannot set Complete=True condition without the SuccessCriteriaMet=true condition",
    );
    refuse(met && failed, "cannot set SuccessCriteriaMet=True and Failed=true conditions");
    refuse(met && target, "cannot set SuccessCriteriaMet=True and FailureTarget=true conditions");
    for name in ["Failed", "Complete", "FailureTarget"] {
        let lost = is(old, name) && !is(status, name);
        refuse(lost, &format!("cannot disable the terminal {name}=True condition"));
    }
    let lost = is(old, "SuccessCriteriaMet") && !met;
    refuse(lost, "cannot disable the SuccessCriteriaMet=True condition");
}

fn finished(causes: &mut Causes, path: &Path, status: &Value) {
    if !is(status, "Complete") && !is(status, "Failed") {
        return;
    }
    for name in ["active", "terminating"] {
        if count(status, name) > 0 {
            let detail = format!("{name}>0 is invalid for finished job");
            causes.invalid(&path.field(name), &status[name], &detail);
        }
    }
    if status["startTime"].is_null() {
        causes.required(&path.field("startTime"), "startTime is required for finished job");
    }
    let uncounted = &status["uncountedTerminatedPods"];
    if ["succeeded", "failed"].iter().any(|list| items(&uncounted[list]).next().is_some()) {
        let detail = "must be empty for finished job";
        causes.invalid(&path.field("uncountedTerminatedPods"), uncounted, detail);
    }
}

fn times(causes: &mut Causes, path: &Path, job: &Value, old: &Value) {
    let status = &job["status"];
    let here = path.field("completionTime");
    let (start, end) = (&status["startTime"], &status["completionTime"]);
    let complete = is(status, "Complete");
    if !end.is_null() && !complete {
        causes.invalid(&here, end, "cannot set completionTime when there is no Complete=True condition");
    }
    if end.is_null() && complete {
        causes.required(&here, "completionTime is required for Complete jobs");
    }
    let time = |value: &Value| value.as_str().and_then(|text| text.parse::<jiff::Timestamp>().ok());
    if time(start).zip(time(end)).is_some_and(|(start, end)| end < start) {
        causes.invalid(&here, end, "must be equal to or after `startTime`");
    }
    if !end.is_null() && !old["completionTime"].is_null() && time(end) != time(&old["completionTime"]) {
        causes.invalid(&here, end, "field is immutable");
    }
    let restarted = !old["startTime"].is_null() && time(start) != time(&old["startTime"]);
    if restarted && job["spec"]["suspend"] != true {
        let detail = "field is immutable for unsuspended job once set";
        causes.invalid(&path.field("startTime"), start, detail);
    }
}

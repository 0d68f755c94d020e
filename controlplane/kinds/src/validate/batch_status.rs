//! The status of jobs.
//!
//! As upstream, most rules apply only if a field that they compare has changed. After a change of the job's
//! specification, the former status may violate them until the controller has replaced it. Source:
//! `getStatusValidationOptions` and `validateJobStatus`.

use std::collections::HashSet;

use serde_json::Value;

use super::batch_policy::indexes;
use super::{Causes, Path, items, text};

/// Checks a changed status of a job. A job's end is final. Its counters never decrease, except `succeeded` of an
/// indexed job that can shrink.
pub(super) fn job(causes: &mut Causes, new: &Value, old: &Value) {
    let path = Path::root("status");
    let change = Change { spec: &new["spec"], new: &new["status"], old: &old["status"] };
    for name in ["active", "succeeded", "failed", "ready", "terminating"] {
        causes.not_negative(&path.field(name), &change.new[name]);
    }
    uncounted(causes, &path.field("uncountedTerminatedPods"), &change.new["uncountedTerminatedPods"]);
    change.ends(causes, &path.field("conditions"));
    change.completion_time(causes, &path);
    change.finished(causes, &path);
    change.indexes(causes, &path);
    change.counters(causes, &path);
    change.start_time(causes, &path);
}

fn count(status: &Value, name: &str) -> i64 {
    status[name].as_i64().unwrap_or(0)
}

fn has(status: &Value, condition: &str, value: &str) -> bool {
    items(&status["conditions"]).any(|(_, item)| item["type"] == condition && item["status"] == value)
}

fn is(status: &Value, condition: &str) -> bool {
    has(status, condition, "True")
}

fn is_finished(status: &Value) -> bool {
    is(status, "Complete") || is(status, "Failed")
}

fn time(value: &Value) -> Option<jiff::Timestamp> {
    value.as_str()?.parse().ok()
}

fn uncounted(causes: &mut Causes, path: &Path, lists: &Value) {
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

/// A change of a job's status.
struct Change<'a> {
    spec: &'a Value,
    new: &'a Value,
    old: &'a Value,
}

// === impl Change ===

impl Change<'_> {
    /// Whether the condition became true, or is no longer true.
    fn changes(&self, condition: &str) -> bool {
        is(self.new, condition) != is(self.old, condition)
    }

    fn changes_end(&self) -> bool {
        is_finished(self.new) != is_finished(self.old)
    }

    fn changes_count(&self, name: &str) -> bool {
        count(self.new, name) != count(self.old, name)
    }

    fn changes_text(&self, name: &str) -> bool {
        self.new[name].as_str() != self.old[name].as_str()
    }

    fn changes_time(&self, name: &str) -> bool {
        self.new[name].is_null() != self.old[name].is_null() || time(&self.new[name]) != time(&self.old[name])
    }

    /// Checks the conditions that end a job or announce its end.
    fn ends(&self, causes: &mut Causes, path: &Path) {
        let mut refuse = |wrong: bool, detail: &str| {
            if wrong {
                causes.invalid_without_value(path, detail);
            }
        };
        let (complete, failed) = (is(self.new, "Complete"), is(self.new, "Failed"));
        let (target, met) = (is(self.new, "FailureTarget"), is(self.new, "SuccessCriteriaMet"));
        let (completes, fails) = (self.changes("Complete"), self.changes("Failed"));
        refuse(
            (completes || fails) && complete && failed,
            "cannot set Complete=True and Failed=true conditions",
        );
        refuse(
            (completes || self.changes("FailureTarget")) && complete && target,
            "cannot set Complete=True and FailureTarget=true conditions",
        );
        refuse(
            (fails || self.changes_text("failedIndexes")) && failed && !target,
            "cannot set Failed=True condition without the FailureTarget=true condition",
        );
        refuse(
            (completes || self.changes("SuccessCriteriaMet")) && complete && !met,
            "cannot set Complete=True condition without the SuccessCriteriaMet=true condition",
        );
        refuse(met && failed, "cannot set SuccessCriteriaMet=True and Failed=true conditions");
        refuse(met && target, "cannot set SuccessCriteriaMet=True and FailureTarget=true conditions");
        refuse(
            !self.spec["successPolicy"].is_null() && !met && complete,
            "cannot set Complete=True for Job with SuccessPolicy unless SuccessCriteriaMet=True",
        );
        for name in ["Failed", "Complete", "FailureTarget"] {
            let lost = is(self.old, name) && !is(self.new, name);
            refuse(lost, &format!("cannot disable the terminal {name}=True condition"));
        }
        let had_met = is(self.old, "SuccessCriteriaMet");
        refuse(had_met && !met, "cannot disable the SuccessCriteriaMet=True condition");
        refuse(
            is(self.old, "Complete") && !had_met && met,
            "cannot set SuccessCriteriaMet=True for Job already has Complete=true conditions",
        );
    }

    fn completion_time(&self, causes: &mut Causes, path: &Path) {
        let here = path.field("completionTime");
        let (start, end) = (&self.new["startTime"], &self.new["completionTime"]);
        let complete = is(self.new, "Complete");
        if self.changes("Complete") || self.changes_time("completionTime") {
            if !end.is_null() && !complete {
                causes.invalid(
                    &here,
                    end,
                    "cannot set completionTime when there is no Complete=True condition",
                );
            }
            if end.is_null() && complete {
                causes.required(&here, "completionTime is required for Complete jobs");
            }
        }
        let times_change = self.changes_time("startTime") || self.changes_time("completionTime");
        if times_change && time(start).zip(time(end)).is_some_and(|(start, end)| end < start) {
            causes.invalid(&here, end, "must be equal to or after `startTime`");
        }
        let has_both = !end.is_null() && !self.old["completionTime"].is_null();
        if has_both && self.changes_time("completionTime") {
            causes.invalid(&here, end, "field is immutable");
        }
    }

    fn finished(&self, causes: &mut Causes, path: &Path) {
        if !is_finished(self.new) {
            return;
        }
        for name in ["active", "terminating"] {
            if (self.changes_end() || self.changes_count(name)) && count(self.new, name) > 0 {
                let detail = format!("{name}>0 is invalid for finished job");
                causes.invalid(&path.field(name), &self.new[name], &detail);
            }
        }
        let is_empty_and_suspended = self.spec["suspend"] == true && self.spec["completions"] == 0;
        let starts = (self.changes_end() || self.changes_time("startTime")) && !is_empty_and_suspended;
        if starts && self.new["startTime"].is_null() {
            causes.required(&path.field("startTime"), "startTime is required for finished job");
        }
        let uncounted = &self.new["uncountedTerminatedPods"];
        let changes = self.changes_end() || *uncounted != self.old["uncountedTerminatedPods"];
        if changes && ["succeeded", "failed"].iter().any(|list| items(&uncounted[list]).next().is_some()) {
            let detail = "must be empty for finished job";
            causes.invalid(&path.field("uncountedTerminatedPods"), uncounted, detail);
        }
    }

    fn indexes(&self, causes: &mut Causes, path: &Path) {
        let (completed, failed) = ("completedIndexes", "failedIndexes");
        let (completed_path, failed_path) = (path.field(completed), path.field(failed));
        let (completed_changes, failed_changes) = (self.changes_text(completed), self.changes_text(failed));
        let has_limit = !self.spec["backoffLimitPerIndex"].is_null();
        let completions = self.spec["completions"].as_i64();
        for (name, is_checked) in [(completed, completed_changes), (failed, failed_changes && has_limit)] {
            if is_checked
                && let (Some(list), Some(completions)) = (self.new[name].as_str(), completions)
                && let Err(error) = indexes(list, completions)
            {
                let detail = format!("error parsing {name}: {error}");
                causes.invalid(&path.field(name), &self.new[name], &detail);
            }
        }
        let is_indexed = self.spec["completionMode"] == "Indexed";
        if completed_changes && !is_indexed && !text(&self.new[completed]).is_empty() {
            let detail = "cannot set non-empty completedIndexes when non-indexed completion mode";
            causes.invalid(&completed_path, &self.new[completed], detail);
        }
        if failed_changes && !has_limit && !self.new[failed].is_null() {
            let detail = "cannot set non-null failedIndexes when backoffLimitPerIndex is null";
            causes.invalid(&failed_path, &self.new[failed], detail);
        }
        if (completed_changes || failed_changes)
            && let Some(completions) = completions
            && let Some(index) = overlap(text(&self.new[completed]), text(&self.new[failed]), completions)
        {
            let detail = format!("failedIndexes and completedIndexes overlap at index: {index}");
            causes.invalid(&failed_path, &self.new[failed], &detail);
        }
    }

    fn counters(&self, causes: &mut Causes, path: &Path) {
        let changes = self.changes_count("ready") || self.changes_count("active");
        if changes && count(self.new, "ready") > count(self.new, "active") {
            let detail = "cannot set more ready pods than active";
            causes.invalid(&path.field("ready"), &self.new["ready"], detail);
        }
        // An indexed job with equal parallelism and completions can shrink.
        let may_shrink = self.spec["completionMode"] == "Indexed"
            && self.spec["completions"].as_i64() == self.spec["parallelism"].as_i64();
        for (name, is_checked) in [("failed", true), ("succeeded", !may_shrink)] {
            if is_checked && count(self.new, name) < count(self.old, name) {
                let value = count(self.new, name).into();
                causes.invalid(&path.field(name), &value, &format!("cannot decrease the {name} counter"));
            }
        }
    }

    /// Checks that a start time, once set, changes only while the job is suspended or when it is resumed.
    fn start_time(&self, causes: &mut Causes, path: &Path) {
        let resumes = is(self.old, "Suspended") && has(self.new, "Suspended", "False");
        let restarts = !self.old["startTime"].is_null() && self.changes_time("startTime");
        if restarts && !resumes && self.spec["suspend"] != true {
            let detail = "field is immutable for unsuspended job once set";
            causes.invalid(&path.field("startTime"), &self.new["startTime"], detail);
        }
    }
}

/// The first index that is in both lists. Malformed intervals are ignored.
fn overlap(completed: &str, failed: &str, completions: i64) -> Option<i64> {
    let (completed, failed) = (intervals(completed, completions), intervals(failed, completions));
    let (mut completed, mut failed) = (completed.peekable(), failed.peekable());
    while let (Some((first, last)), Some((other_first, other_last))) = (completed.peek(), failed.peek()) {
        if first <= other_last && other_first <= last {
            return Some(*first.max(other_first));
        }
        if first <= other_first {
            completed.next();
        } else {
            failed.next();
        }
    }
    None
}

/// The first and last index of each well-formed interval of a list like `1,3-5`.
fn intervals(list: &str, completions: i64) -> impl Iterator<Item = (i64, i64)> + '_ {
    list.split(',').filter(move |part| indexes(part, completions).is_ok()).filter_map(|part| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some((first.parse().ok()?, last.parse().ok()?))
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn causes(spec: &Value, new: &Value, old: &Value) -> Vec<String> {
        let mut causes = Causes::default();
        let object = |status: &Value| json!({"spec": spec, "status": status});
        job(&mut causes, &object(new), &object(old));
        causes.into_list().into_iter().map(|cause| cause.field).collect()
    }

    fn suspended(value: &str, start: &str) -> Value {
        json!({"startTime": start, "conditions": [{"type": "Suspended", "status": value}]})
    }

    #[test]
    fn a_resumed_job_gets_a_new_start_time() {
        let (before, after) = ("2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z");
        let spec = json!({"suspend": false});
        let (old, new) = (suspended("True", before), suspended("False", after));
        assert!(causes(&spec, &new, &old).is_empty());
        let running = suspended("False", before);
        assert_eq!(causes(&spec, &new, &running), ["status.startTime"]);
    }

    #[test]
    fn indexes_above_the_completions_stay_until_they_change() {
        let spec = json!({"completionMode": "Indexed", "completions": 2, "parallelism": 2});
        let old = json!({"completedIndexes": "0-3", "succeeded": 4, "active": 1});
        let fewer = json!({"completedIndexes": "0-3", "succeeded": 4, "active": 0});
        assert!(causes(&spec, &fewer, &old).is_empty());
        let shrunk = json!({"completedIndexes": "0-1", "succeeded": 2, "active": 1});
        assert!(causes(&spec, &shrunk, &old).is_empty(), "an elastic indexed job shrinks");
        let wrong = json!({"completedIndexes": "0-2", "succeeded": 4, "active": 1});
        assert_eq!(causes(&spec, &wrong, &old), ["status.completedIndexes"]);
    }

    #[test]
    fn an_index_is_either_completed_or_failed() {
        let spec = json!({"completionMode": "Indexed", "completions": 9, "backoffLimitPerIndex": 1});
        let status = |failed: &str| json!({"completedIndexes": "0-1,5", "failedIndexes": failed});
        assert!(causes(&spec, &status("2,3-4,6"), &json!({})).is_empty());
        assert_eq!(causes(&spec, &status("2,4-6"), &json!({})), ["status.failedIndexes"]);
        assert_eq!(overlap("0-1,x,5", "7-1,4-6", 9), Some(5));
    }

    #[test]
    fn the_end_of_a_job_is_final() {
        let time = "2026-01-01T00:00:00Z";
        let conditions = |names: &[&str]| -> Value {
            names.iter().map(|name| json!({"type": name, "status": "True"})).collect()
        };
        let complete = json!({"startTime": time, "completionTime": time,
            "conditions": conditions(&["SuccessCriteriaMet", "Complete"])});
        assert!(causes(&json!({}), &complete, &json!({"startTime": time})).is_empty());
        assert!(!causes(&json!({}), &json!({"startTime": time}), &complete).is_empty());
        let alone = json!({"startTime": time, "conditions": conditions(&["Failed"])});
        assert_eq!(causes(&json!({}), &alone, &json!({"startTime": time})), ["status.conditions"]);
        let suspended =
            json!({"completionTime": time, "conditions": conditions(&["SuccessCriteriaMet", "Complete"])});
        assert!(causes(&json!({"suspend": true, "completions": 0}), &suspended, &json!({})).is_empty());
        assert_eq!(causes(&json!({"suspend": true}), &suspended, &json!({})), ["status.startTime"]);
    }
}

//! The failure and success policies of jobs.

use std::collections::HashSet;

use serde_json::Value;

use super::{Causes, Path, format, items, text};

const MAX_RULES: usize = 20;
const MAX_PATTERNS: usize = 20;
const MAX_EXIT_CODES: usize = 255;
const MAX_INDEXES_BYTES: usize = 64 * 1024;
const ACTIONS: &[&str] = &["Count", "FailIndex", "FailJob", "Ignore"];

/// Checks `podFailurePolicy`.
pub(super) fn failure(causes: &mut Causes, path: &Path, spec: &Value) {
    let rules = &spec["podFailurePolicy"]["rules"];
    let here = path.field("podFailurePolicy").field("rules");
    too_many(causes, &here, rules, MAX_RULES);
    let pod = &spec["template"]["spec"];
    let names: HashSet<&str> = ["containers", "initContainers"]
        .into_iter()
        .flat_map(|list| items(&pod[list]))
        .map(|(_, container)| text(&container["name"]))
        .collect();
    for (index, rule) in items(rules) {
        let here = here.index(index);
        action(causes, &here.field("action"), rule, spec);
        let (codes, conditions) = (&rule["onExitCodes"], &rule["onPodConditions"]);
        let has_conditions = items(conditions).next().is_some();
        if !codes.is_null() {
            exit_codes(causes, &here.field("onExitCodes"), codes, &names);
        }
        pod_conditions(causes, &here.field("onPodConditions"), conditions);
        if !codes.is_null() && has_conditions {
            let detail = "specifying both OnExitCodes and OnPodConditions is not supported";
            causes.invalid_without_value(&here, detail);
        }
        if codes.is_null() && !has_conditions {
            let detail = "specifying one of OnExitCodes and OnPodConditions is required";
            causes.invalid_without_value(&here, detail);
        }
    }
}

/// Checks the rules of `successPolicy`.
pub(super) fn success(causes: &mut Causes, path: &Path, spec: &Value) {
    let rules = &spec["successPolicy"]["rules"];
    if items(rules).next().is_none() {
        causes.required(path, "at least one rules must be specified when the successPolicy is specified");
    }
    too_many(causes, path, rules, MAX_RULES);
    let completions = spec["completions"].as_i64().unwrap_or(0);
    for (index, rule) in items(rules) {
        let here = path.index(index);
        let (count, listed) = (&rule["succeededCount"], &rule["succeededIndexes"]);
        if count.is_null() && listed.is_null() {
            causes.required(&here, "at least one of succeededCount or succeededIndexes must be specified");
        }
        let mut total = None;
        if let Some(listed_text) = listed.as_str() {
            let here = here.field("succeededIndexes");
            if listed_text.len() > MAX_INDEXES_BYTES {
                causes.too_long(&here, MAX_INDEXES_BYTES);
            }
            match indexes(listed_text, completions) {
                Ok(count) => total = Some(count),
                Err(error) => {
                    total = Some(0);
                    causes.invalid(&here, listed, &format!("error parsing succeededIndexes: {error}"));
                }
            }
        }
        let here = here.field("succeededCount");
        causes.not_negative(&here, count);
        let number = count.as_i64().unwrap_or(0);
        if number > completions {
            let detail =
                format!("must be less than or equal to {completions} (the number of specified completions)");
            causes.invalid(&here, count, &detail);
        }
        if let Some(total) = total.filter(|total| number > *total) {
            let detail = format!(
                "must be less than or equal to {total} (the number of indexes in the specified succeededIndexes field)"
            );
            causes.invalid(&here, count, &detail);
        }
    }
}

/// The number of indexes in a text like `1,3-5`; an error if it is malformed or has an index above the completions.
pub(super) fn indexes(list: &str, completions: i64) -> Result<i64, String> {
    let mut total = 0;
    let mut last = None;
    for part in list.split(',').filter(|_| !list.is_empty()) {
        let limits: Vec<&str> = part.split('-').collect();
        if limits.len() > 2 {
            return Err(format!(
                "the fragment {part:?} violates the requirement that an index interval can have at most two parts separated by '-'"
            ));
        }
        let mut numbers = [0; 2];
        for (slot, text) in numbers.iter_mut().zip(limits.iter().cycle()) {
            *slot = text
                .parse::<i64>()
                .map_err(|_wrong| format!("cannot convert string to integer for index: {text:?}"))?;
            if *slot >= completions {
                return Err(format!("too large index: {text:?}"));
            }
        }
        let [first, end] = numbers;
        if limits.len() == 2 && first >= end {
            return Err(format!("non-increasing order, previous: {first}, current: {end}"));
        }
        if let Some(last) = last.filter(|last| *last >= first) {
            return Err(format!("non-increasing order, previous: {last}, current: {first}"));
        }
        total += end - first + 1;
        last = Some(end);
    }
    Ok(total)
}

fn too_many(causes: &mut Causes, path: &Path, list: &Value, most: usize) {
    let count = items(list).count();
    if count > most {
        causes.too_many(path, count, most);
    }
}

fn action(causes: &mut Causes, path: &Path, rule: &Value, spec: &Value) {
    match text(&rule["action"]) {
        "" => causes.required(path, "valid values: [\"Count\" \"FailIndex\" \"FailJob\" \"Ignore\"]"),
        "FailIndex" if spec["backoffLimitPerIndex"].is_null() => {
            causes.invalid(path, &rule["action"], "requires the backoffLimitPerIndex to be set");
        }
        action if ACTIONS.contains(&action) => {}
        _ => causes.unsupported(path, &rule["action"], ACTIONS),
    }
}

fn exit_codes(causes: &mut Causes, path: &Path, codes: &Value, names: &HashSet<&str>) {
    let operator = text(&codes["operator"]);
    match operator {
        "" => causes.required(&path.field("operator"), "valid values: [\"In\" \"NotIn\"]"),
        "In" | "NotIn" => {}
        _ => causes.unsupported(&path.field("operator"), &codes["operator"], &["In", "NotIn"]),
    }
    if codes["containerName"].as_str().is_some_and(|name| !names.contains(name)) {
        let detail = "must be one of the container or initContainer names in the pod template";
        causes.invalid(&path.field("containerName"), &codes["containerName"], detail);
    }
    let (here, values) = (path.field("values"), &codes["values"]);
    if items(values).next().is_none() {
        causes.invalid(&here, values, "at least one value is required");
    }
    too_many(causes, &here, values, MAX_EXIT_CODES);
    let mut seen = HashSet::new();
    let mut ordered = true;
    let mut before = i64::MIN;
    for (index, value) in items(values) {
        let number = value.as_i64().unwrap_or(0);
        if operator == "In" && number == 0 {
            causes.invalid(&here.index(index), value, "must not be 0 for the In operator");
        }
        if !seen.insert(number) {
            causes.duplicate(&here.index(index), value);
        }
        ordered &= before <= number;
        before = number;
    }
    if !ordered {
        causes.invalid(&here, values, "must be ordered");
    }
}

fn pod_conditions(causes: &mut Causes, path: &Path, patterns: &Value) {
    too_many(causes, path, patterns, MAX_PATTERNS);
    for (index, pattern) in items(patterns) {
        let here = path.index(index);
        let name = text(&pattern["type"]);
        causes.format(&here.field("type"), name, format::qualified_name(name));
        let status = here.field("status");
        match text(&pattern["status"]) {
            "" => causes.required(&status, "valid values: [\"False\" \"True\" \"Unknown\"]"),
            "True" | "False" | "Unknown" => {}
            _ => causes.unsupported(&status, &pattern["status"], &["False", "True", "Unknown"]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn malformed_indexes_count_as_none() {
        let rule = serde_json::json!({"succeededIndexes": "x", "succeededCount": 1});
        let spec = serde_json::json!({"completions": 3, "successPolicy": {"rules": [rule]}});
        let mut causes = Causes::default();
        success(&mut causes, &Path::root("rules"), &spec);
        let fields: Vec<String> = causes.into_list().into_iter().map(|cause| cause.field).collect();
        assert_eq!(fields, ["rules[0].succeededIndexes", "rules[0].succeededCount"]);
    }

    #[test]
    fn indexes_are_counted_or_refused_with_upstreams_text() {
        assert_eq!(indexes("", 5), Ok(0));
        assert_eq!(indexes("0,2-4", 5), Ok(4));
        for (text, error) in [
            ("5", "too large index: \"5\""),
            ("x", "cannot convert string to integer for index: \"x\""),
            ("3,1", "non-increasing order, previous: 3, current: 1"),
            ("3-3", "non-increasing order, previous: 3, current: 3"),
        ] {
            assert_eq!(indexes(text, 5), Err(error.to_owned()));
        }
    }
}

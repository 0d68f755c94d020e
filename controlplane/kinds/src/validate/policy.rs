//! Limit ranges, priority classes, runtime classes.

use std::collections::{BTreeSet, HashSet};

use serde_json::Value;

use super::{Causes, Path, entries, format, items, meta, resources, scheduling, text};
use coracle_values::Quantity;

/// Largest priority that a user may define. Source: `pkg/apis/scheduling/types.go`.
const HIGHEST_USER_PRIORITY: i64 = 1_000_000_000;
const SYSTEM_CLASSES: [(&str, i64); 2] =
    [("system-cluster-critical", 2_000_000_000), ("system-node-critical", 2_000_001_000)];
const LIMIT_TYPES: &[&str] = &["Container", "PersistentVolumeClaim", "Pod"];

pub(crate) fn priority_class(causes: &mut Causes, class: &Value, old: Option<&Value>) {
    let (name, value) = (text(&class["metadata"]["name"]), class["value"].as_i64().unwrap_or(0));
    if let Some(old) = old {
        if value != old["value"].as_i64().unwrap_or(0) {
            causes.forbidden(&Path::root("value"), "may not be changed in an update.");
        }
        if class["preemptionPolicy"] != old["preemptionPolicy"] {
            causes.invalid(&Path::root("preemptionPolicy"), &class["preemptionPolicy"], "field is immutable");
        }
        return;
    }
    if name.starts_with("system-") {
        if let Some(problem) = system_class(class, name, value) {
            let path = Path::root("metadata").field("name");
            let detail = format!(
                "priority class names with 'system-' prefix are reserved for system use only. error: {problem}"
            );
            causes.forbidden(&path, &detail);
        }
    } else if value > HIGHEST_USER_PRIORITY {
        let detail = format!("maximum allowed value of a user defined priority is {HIGHEST_USER_PRIORITY}");
        causes.forbidden(&Path::root("value"), &detail);
    }
    let policies = &["PreemptLowerPriority", "Never"];
    causes.one_of(&Path::root("preemptionPolicy"), &class["preemptionPolicy"], policies);
}

/// The reason why a class is not a system priority class. `None` if it is a system priority class. Source:
/// `IsKnownSystemPriorityClass`.
fn system_class(class: &Value, name: &str, value: i64) -> Option<String> {
    match SYSTEM_CLASSES.iter().find(|(known, _)| *known == name) {
        None => Some(format!("{name} is not a known system priority class")),
        Some((_, priority)) if *priority != value => {
            Some(format!("value of {name} PriorityClass must be {priority}"))
        }
        Some(_) if class["globalDefault"] == true => {
            Some(format!("globalDefault of {name} PriorityClass must be false"))
        }
        Some(_) => None,
    }
}

pub(crate) fn runtime_class(causes: &mut Causes, class: &Value, old: Option<&Value>) {
    let (path, handler) = (Path::root("handler"), text(&class["handler"]));
    if handler.is_empty() {
        causes.required(&path, "");
    } else {
        causes.format(&path, handler, format::dns1123_label(handler));
    }
    resources::overhead(causes, &Path::root("overhead"), &class["overhead"]["podFixed"]);
    let path = Path::root("scheduling");
    meta::labels(causes, &path.field("nodeSelector"), &class["scheduling"]["nodeSelector"]);
    scheduling::tolerations(causes, &path.field("tolerations"), &class["scheduling"]["tolerations"]);
    let mut seen = HashSet::new();
    for (index, toleration) in items(&class["scheduling"]["tolerations"]) {
        if !seen.insert(["key", "operator", "value", "effect"].map(|field| text(&toleration[field]))) {
            causes.duplicate(&path.field("tolerations").index(index), toleration);
        }
    }
    // This check comes last, because upstream first validates the object, and then the update.
    if old.is_some_and(|old| old["handler"] != class["handler"]) {
        causes.invalid(&Path::root("handler"), &class["handler"], "field is immutable");
    }
}

pub(crate) fn limit_range(causes: &mut Causes, object: &Value, _old: Option<&Value>) {
    let mut types = HashSet::new();
    for (index, limit) in items(&object["spec"]["limits"]) {
        let path = Path::root("spec").field("limits").index(index);
        let kind = text(&limit["type"]);
        limit_type(causes, &path.field("type"), &limit["type"]);
        if !types.insert(kind) {
            causes.duplicate(&path.field("type"), &limit["type"]);
        }
        limit_item(causes, &path, limit);
    }
}

fn limit_type(causes: &mut Causes, path: &Path, value: &Value) {
    let kind = text(value);
    if LIMIT_TYPES.contains(&kind) {
        return;
    }
    let problems = format::qualified_name(kind);
    if problems.is_empty() && !kind.contains('/') {
        causes.invalid(path, value, "must be a standard limit type or fully qualified");
    }
    causes.format(path, kind, problems);
}

fn limit_item(causes: &mut Causes, path: &Path, limit: &Value) {
    let lists = ["max", "min", "default", "defaultRequest", "maxLimitRequestRatio"];
    let kind = text(&limit["type"]);
    let mut names: BTreeSet<&str> = BTreeSet::new();
    for list in lists {
        let is_default = matches!(list, "default" | "defaultRequest");
        if kind == "Pod" && is_default {
            if entries(&limit[list]).next().is_some() {
                causes.forbidden(&path.field(list), "may not be specified when `type` is 'Pod'");
            }
            continue;
        }
        for (name, _) in entries(&limit[list]) {
            let here = path.field(list).key(name);
            if matches!(kind, "Pod" | "Container") {
                resources::container_name(causes, &here, name);
            } else {
                resources::standard_name(causes, &here, name);
            }
            names.insert(name);
        }
    }
    let has_storage = |list: &str| !limit[list]["storage"].is_null();
    if kind == "PersistentVolumeClaim" && !has_storage("min") && !has_storage("max") {
        let detail = "either minimum or maximum storage value is required, but neither was provided";
        causes.required(&path.field("limits"), detail);
    }
    for name in names {
        amounts(causes, path, limit, name);
        if kind != "Pod" {
            check_request_equals_limit(causes, path, limit, name);
        }
    }
}

/// Checks that the amounts of one resource are in order: minimum, default request, default, maximum.
fn amounts(causes: &mut Causes, path: &Path, limit: &Value, name: &str) {
    let amount = |list: &str| Quantity::parse(limit[list][name].as_str()?).ok();
    let rules = [
        ("min", "max", "min", "min", "min value {low} is greater than max value {high}"),
        (
            "min",
            "defaultRequest",
            "defaultRequest",
            "defaultRequest",
            "min value {low} is greater than default request value {high}",
        ),
        (
            "defaultRequest",
            "max",
            "defaultRequest",
            "defaultRequest",
            "default request value {low} is greater than max value {high}",
        ),
        (
            "defaultRequest",
            "default",
            "defaultRequest",
            "defaultRequest",
            "default request value {low} is greater than default limit value {high}",
        ),
        ("min", "default", "default", "min", "min value {low} is greater than default value {high}"),
        ("default", "max", "default", "max", "default value {low} is greater than max value {high}"),
    ];
    // `at` is the path of the error, and `shown` is the amount that the error shows.
    for (low, high, at, shown, detail) in rules {
        let (Some(small), Some(large)) = (amount(low), amount(high)) else { continue };
        if small > large {
            let detail = detail.replace("{low}", &small.to_string()).replace("{high}", &large.to_string());
            causes.invalid(&path.field(at).key(name), &limit[shown][name], &detail);
        }
    }
    let Some(ratio) = amount("maxLimitRequestRatio") else { return };
    let here = path.field("maxLimitRequestRatio").key(name);
    if Quantity::parse("1").is_ok_and(|one| ratio < one) {
        causes.invalid(&here, &limit["maxLimitRequestRatio"][name], &format!("ratio {ratio} is less than 1"));
    }
    if let (Some(min), Some(max)) = (amount("min"), amount("max"))
        && let Some(most) = exceeded(ratio, min, max)
    {
        let detail = format!("ratio {ratio} is greater than max/min = {most}");
        causes.invalid(&here, &limit["maxLimitRequestRatio"][name], &detail);
    }
}

/// The quotient of `max` and `min` as text with six decimal places. `None` if the quotient does not exceed `ratio`.
fn exceeded(ratio: Quantity, min: Quantity, max: Quantity) -> Option<String> {
    let [ratio, min, max] = [ratio, min, max].map(Quantity::thousandths);
    if min <= 0 || max < 0 || ratio.saturating_mul(min) <= max.saturating_mul(1000) {
        return None;
    }
    let most = max.saturating_mul(1_000_000).saturating_add(min / 2) / min;
    Some(format!("{}.{:06}", most / 1_000_000, most % 1_000_000))
}

/// Checks that default request and default limit are equal, for a resource that cannot be overcommitted.
fn check_request_equals_limit(causes: &mut Causes, path: &Path, limit: &Value, name: &str) {
    let amount = |list: &str| Quantity::parse(limit[list][name].as_str()?).ok();
    let (Some(own), Some(request)) = (amount("default"), amount("defaultRequest")) else { return };
    if own != request && resources::is_exact(name) {
        let detail = format!("default value {own} must equal to defaultRequest value {request} in {name}");
        causes.invalid(&path.field("defaultRequest").key(name), &limit["defaultRequest"][name], &detail);
    }
}

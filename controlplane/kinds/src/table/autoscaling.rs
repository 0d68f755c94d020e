//! Horizontal pod autoscalers.

use jiff::Timestamp;
use serde_json::Value;

use super::{AGE, Column, NAME, age_cell, items, name, string};

/// Number of metrics that the column shows.
const SHOWN: usize = 2;

pub(crate) const AUTOSCALER: &[Column] = &[
    NAME,
    string("Reference", "The object whose pods are scaled."),
    string("Targets", "Current and target value of each metric."),
    string("MinPods", "Minimum number of pods."),
    string("MaxPods", "Maximum number of pods."),
    string("Replicas", "Number of pods that the autoscaler observed last."),
    AGE,
];

pub(crate) fn autoscaler(object: &Value, now: Timestamp) -> Vec<Value> {
    let (spec, status) = (&object["spec"], &object["status"]);
    let target = &spec["scaleTargetRef"];
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let fewest = spec["minReplicas"].as_i64().map_or("<unset>".to_owned(), |number| number.to_string());
    vec![
        name(object),
        format!("{}/{}", text(&target["kind"]), text(&target["name"])).into(),
        metrics(&spec["metrics"], &status["currentMetrics"]).into(),
        fewest.into(),
        spec["maxReplicas"].as_i64().unwrap_or(0).into(),
        status["currentReplicas"].as_i64().unwrap_or(0).into(),
        age_cell(object, now),
    ]
}

fn metrics(specs: &Value, statuses: &Value) -> String {
    let all: Vec<String> =
        items(specs).enumerate().map(|(index, metric)| of_metric(metric, &statuses[index])).collect();
    match all.len() {
        0 => "<none>".to_owned(),
        count if count > SHOWN => format!("{} + {} more...", all[..SHOWN].join(", "), count - SHOWN),
        _ => all.join(", "),
    }
}

fn of_metric(metric: &Value, status: &Value) -> String {
    let (source, is_resource) = match metric["type"].as_str().unwrap_or_default() {
        "External" => ("external", false),
        "Pods" => ("pods", false),
        "Object" => ("object", false),
        "Resource" => ("resource", true),
        "ContainerResource" => ("containerResource", true),
        _ => return "<unknown type>".to_owned(),
    };
    let (target, current) = (&metric[source]["target"], &status[source]["current"]);
    let amount = |value: &Value| value.as_str().unwrap_or("<unknown>").to_owned();
    let percent = |value: &Value, absent: &str| {
        value.as_i64().map_or_else(|| absent.to_owned(), |number| format!("{number}%"))
    };
    let has_average = !target["averageValue"].is_null();
    if is_resource {
        let (now, wanted) = if has_average {
            (amount(&current["averageValue"]), amount(&target["averageValue"]))
        } else {
            let (now, wanted) = (&current["averageUtilization"], &target["averageUtilization"]);
            (percent(now, "<unknown>"), percent(wanted, "<auto>"))
        };
        return format!("{}: {now}/{wanted}", metric[source]["name"].as_str().unwrap_or_default());
    }
    let field = if has_average { "averageValue" } else { "value" };
    let suffix = if has_average && source != "pods" { " (avg)" } else { "" };
    format!("{}/{}{suffix}", amount(&current[field]), amount(&target[field]))
}

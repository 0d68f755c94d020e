//! Events of `events.k8s.io`. Source: `pkg/apis/core/validation/events.go`.

use serde_json::Value;

use super::{Causes, Path, format, text};

/// Fields that never change.
const IMMUTABLE: [&str; 14] = [
    "regarding",
    "reason",
    "note",
    "deprecatedSource",
    "deprecatedFirstTimestamp",
    "deprecatedLastTimestamp",
    "deprecatedCount",
    "type",
    "eventTime",
    "action",
    "related",
    "reportingController",
    "reportingInstance",
    "kind",
];

pub(crate) fn event(causes: &mut Causes, event: &Value, old: Option<&Value>) {
    content(causes, event);
    match old {
        None => {
            for field in
                ["deprecatedFirstTimestamp", "deprecatedLastTimestamp", "deprecatedCount", "deprecatedSource"]
            {
                let value = &event[field];
                let is_unset =
                    value.is_null() || *value == 0 || value.as_object().is_some_and(|map| map.is_empty());
                if !is_unset {
                    causes.invalid(&Path::root(field), &"".into(), "needs to be unset");
                }
            }
            series(causes, event);
        }
        Some(old) => {
            if old["series"] != event["series"] {
                series(causes, event);
            }
            for field in IMMUTABLE.into_iter().filter(|field| event[*field] != old[*field]) {
                causes.invalid(&Path::root(field), &event[field], "field is immutable");
            }
        }
    }
}

fn content(causes: &mut Causes, event: &Value) {
    if event["eventTime"].is_null() {
        causes.required(&Path::root("eventTime"), "");
    }
    let (about, own) = (text(&event["regarding"]["namespace"]), text(&event["metadata"]["namespace"]));
    if about.is_empty() && !matches!(own, "default" | "kube-system") {
        let path = Path::root("regarding").field("namespace");
        causes.invalid(&path, &about.into(), "does not match event.namespace");
    }
    let (path, controller) = (Path::root("reportingController"), text(&event["reportingController"]));
    if controller.is_empty() {
        causes.required(&path, "");
    } else {
        causes.format(&path, controller, format::qualified_name(controller));
    }
    for field in ["reportingInstance", "action", "reason"] {
        let path = Path::root(field);
        match text(&event[field]).len() {
            0 => causes.required(&path, ""),
            1..=128 => {}
            _ => causes.invalid(&path, &"".into(), "can have at most 128 characters"),
        }
    }
    if text(&event["note"]).len() > 1024 {
        causes.invalid(&Path::root("note"), &"".into(), "can have at most 1024 characters");
    }
    if !matches!(text(&event["type"]), "Normal" | "Warning") {
        causes.invalid(&Path::root("type"), &"".into(), "has invalid value: ");
    }
}

fn series(causes: &mut Causes, event: &Value) {
    let series = &event["series"];
    if !series.is_object() {
        return;
    }
    if series["count"].as_i64().unwrap_or(0) < 2 {
        causes.invalid(&Path::root("series").field("count"), &"".into(), "should be at least 2");
    }
    if series["lastObservedTime"].is_null() {
        causes.required(&Path::root("series").field("lastObservedTime"), "");
    }
}

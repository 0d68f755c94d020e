//! Events of both groups. Source: `pkg/apis/core/validation/events.go`.

use serde_json::Value;

use super::{Causes, Path, format, text};

/// Fields that never change, and their names in errors: as in the core group.
const IMMUTABLE: [(&str, &str); 13] = [
    ("regarding", "involvedObject"),
    ("reason", "reason"),
    ("note", "message"),
    ("deprecatedSource", "source"),
    ("deprecatedFirstTimestamp", "firstTimestamp"),
    ("deprecatedLastTimestamp", "lastTimestamp"),
    ("deprecatedCount", "count"),
    ("type", "type"),
    ("eventTime", "eventTime"),
    ("action", "action"),
    ("related", "related"),
    ("reportingController", "reportingController"),
    ("reportingInstance", "reportingInstance"),
];
/// Fields that only events of the core group may have.
const DEPRECATED: std::ops::Range<usize> = 3..7;

pub(crate) fn event(causes: &mut Causes, event: &Value, old: Option<&Value>) {
    content(causes, event, &EVENTS);
    match old {
        None => {
            if event["eventTime"].is_null() {
                causes.required(&Path::root("eventTime"), "");
            }
            for (field, name) in &IMMUTABLE[DEPRECATED] {
                let value = &event[*field];
                let is_unset =
                    value.is_null() || *value == 0 || value.as_object().is_some_and(|map| map.is_empty());
                if !is_unset {
                    causes.invalid(&Path::root(name), &"".into(), "needs to be unset");
                }
            }
            series(causes, event);
            let kind = text(&event["type"]);
            if !matches!(kind, "Normal" | "Warning") {
                causes.invalid(&Path::root("type"), &"".into(), &format!("has invalid value: {kind}"));
            }
        }
        Some(old) => {
            if old["series"] != event["series"] {
                series(causes, event);
            }
            for (field, name) in IMMUTABLE.into_iter().filter(|(field, _)| event[field] != old[field]) {
                let (empty, value) = (Value::from(""), &event[field]);
                // In Go, an absent time is null, and an absent text is empty.
                let is_time = field.ends_with("Time") || field.ends_with("Timestamp");
                let is_text = old[field].is_string() && !is_time;
                let value = if value.is_null() && is_text { &empty } else { value };
                causes.invalid(&Path::root(name), value, "field is immutable");
            }
        }
    }
}

/// The names of fields that depend on the group of an event.
struct Names {
    about: &'static str,
    note: &'static str,
    controller: &'static str,
}

const CORE: Names = Names { about: "involvedObject", note: "message", controller: "reportingComponent" };
const EVENTS: Names = Names { about: "regarding", note: "note", controller: "reportingController" };

/// Checks an event of the core group.
pub(crate) fn core(causes: &mut Causes, event: &Value, _old: Option<&Value>) {
    content(causes, event, &CORE);
}

/// Checks the rules of both groups. Events of old clients have no `eventTime`, and lack the fields that were introduced
/// together with `eventTime`.
fn content(causes: &mut Causes, event: &Value, names: &Names) {
    let (about, own) = (text(&event[names.about]["namespace"]), text(&event["metadata"]["namespace"]));
    let path = Path::root("involvedObject").field("namespace");
    let mismatch = "does not match event.namespace";
    if event["eventTime"].is_null() {
        if about != own && !(about.is_empty() && own == "default") {
            causes.invalid(&path, &about.into(), mismatch);
        }
        return;
    }
    if about.is_empty() && !matches!(own, "default" | "kube-system") {
        causes.invalid(&path, &about.into(), mismatch);
    }
    let (path, controller) = (Path::root(names.controller), text(&event[names.controller]));
    if controller.is_empty() {
        causes.required(&path, "");
    }
    causes.format(&path, controller, format::qualified_name(controller));
    for field in ["reportingInstance", "action", "reason"] {
        let path = Path::root(field);
        match text(&event[field]).len() {
            0 => causes.required(&path, ""),
            1..=128 => {}
            _ => causes.invalid(&path, &"".into(), "can have at most 128 characters"),
        }
    }
    if text(&event[names.note]).len() > 1024 {
        causes.invalid(&Path::root("message"), &"".into(), "can have at most 1024 characters");
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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn errors_have_the_names_of_the_core_group() {
        let good = json!({"metadata": {"namespace": "n"}, "eventTime": "2026-01-01T00:00:00.000000Z", "action": "a",
            "reason": "r", "reportingController": "c", "reportingInstance": "i", "type": "Normal", "note": "n",
            "regarding": {"namespace": "n"}});
        let problems = |field: &str, value: Value, old: Option<&Value>| {
            let (mut causes, mut changed) = (Causes::default(), good.clone());
            changed[field] = value;
            event(&mut causes, &changed, old);
            let list = causes.into_list().into_iter();
            list.map(|cause| format!("{} {}", cause.field, cause.message)).collect::<Vec<_>>()
        };
        assert_eq!(problems("type", "Normal".into(), None), Vec::<String>::new());
        assert_eq!(problems("type", "x".into(), None), ["type Invalid value: \"\": has invalid value: x"]);
        assert_eq!(
            problems("deprecatedCount", 1.into(), None),
            ["count Invalid value: \"\": needs to be unset"]
        );
        assert_eq!(
            problems("regarding", json!({}), None),
            ["involvedObject.namespace Invalid value: \"\": does not match event.namespace"]
        );
        assert_eq!(
            problems("note", Value::Null, Some(&good)),
            ["message Invalid value: \"\": field is immutable"]
        );
        assert_eq!(
            problems("eventTime", Value::Null, Some(&good)),
            ["eventTime Invalid value: null: field is immutable"]
        );
    }

    #[test]
    fn events_of_the_core_group_with_a_time_have_a_reporter() {
        let problems = |event: Value| {
            let mut causes = Causes::default();
            core(&mut causes, &event, None);
            causes.into_list().into_iter().map(|cause| cause.field).collect::<Vec<_>>()
        };
        let old = |about: &str, own: &str| {
            problems(json!({"metadata": {"namespace": own}, "involvedObject": {"namespace": about}}))
        };
        assert_eq!(old("n", "n"), Vec::<String>::new());
        assert_eq!(old("", "default"), Vec::<String>::new());
        assert_eq!(old("", "kube-system"), ["involvedObject.namespace"]);
        let new = json!({"metadata": {"namespace": "kube-system"}, "involvedObject": {},
            "eventTime": "2026-01-01T00:00:00.000000Z", "message": "m".repeat(1025)});
        let mut found = problems(new);
        found.dedup();
        assert_eq!(found, ["reportingComponent", "reportingInstance", "action", "reason", "message"]);
    }
}

//! Events.

use jiff::Timestamp;
use serde_json::Value;

use super::age::age;
use super::{Column, NAME, name, string, wide};

pub(crate) const COLUMNS: &[Column] = &[
    string("Last Seen", "Time since the last occurrence."),
    string("Type", "Normal or Warning."),
    string("Reason", "Reason of the event."),
    string("Object", "Object that the event is about."),
    wide(string("Subobject", "Part of the object, such as a container.")),
    wide(string("Source", "Component that reports the event.")),
    string("Message", "Text of the event."),
    wide(string("First Seen", "Time since the first occurrence.")),
    wide(string("Count", "Number of occurrences.")),
    wide(NAME),
];

pub(crate) fn cells(event: &Value, now: Timestamp) -> Vec<Value> {
    let first = pick([&event["firstTimestamp"], &event["eventTime"]]);
    let last = pick([&event["series"]["lastObservedTime"], pick([&event["lastTimestamp"], first])]);
    let count = event["series"]["count"].as_i64().or(event["count"].as_i64()).unwrap_or(0);
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let object = &event["involvedObject"];
    let target = format!("{}/{}", text(&object["kind"]).to_lowercase(), text(&object["name"]));
    vec![
        age(last, now).into(),
        event["type"].clone(),
        event["reason"].clone(),
        target.into(),
        text(&object["fieldPath"]).into(),
        source(event).into(),
        text(&event["message"]).trim().into(),
        age(first, now).into(),
        // An event without a count happened once.
        count.max(1).into(),
        name(event),
    ]
}

fn pick(candidates: [&Value; 2]) -> &Value {
    let [first, second] = candidates;
    if first.is_string() { first } else { second }
}

fn source(event: &Value) -> String {
    let source = |name: &str| event["source"][name].as_str().filter(|text| !text.is_empty());
    let component = source("component").or(event["reportingComponent"].as_str()).unwrap_or_default();
    let host = source("host").or(event["reportingInstance"].as_str()).unwrap_or_default();
    if host.is_empty() { component.to_owned() } else { format!("{component}, {host}") }
}

//! Events.

use jiff::Timestamp;
use serde_json::Value;

use super::age::age;
use super::{Column, NAME, name, string, wide};

pub(crate) const COLUMNS: &[Column] = &[
    string("Last Seen", "When it happened last."),
    string("Type", "Normal or Warning."),
    string("Reason", "One word for what happened."),
    string("Object", "What it happened to."),
    wide(string("Subobject", "Which part of the object.")),
    wide(string("Source", "Who reports it.")),
    string("Message", "What happened."),
    wide(string("First Seen", "When it happened first.")),
    wide(string("Count", "How often it happened.")),
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

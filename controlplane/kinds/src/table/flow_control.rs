//! Flow schemas and priority levels.

use jiff::Timestamp;
use serde_json::Value;

use super::{AGE, Column, NAME, age_cell, items, name, or_none, string};

pub(crate) const FLOW_SCHEMA: &[Column] = &[
    NAME,
    string("PriorityLevel", "Priority level of the matching requests."),
    string("MatchingPrecedence", "Of matching schemas, the one with the lowest number is chosen."),
    string("DistinguisherMethod", "How requests are divided into flows."),
    AGE,
    string("MissingPL", "Whether the priority level does not exist."),
];

pub(crate) fn flow_schema(object: &Value, now: Timestamp) -> Vec<Value> {
    let spec = &object["spec"];
    let dangling = items(&object["status"]["conditions"]).find(|condition| condition["type"] == "Dangling");
    vec![
        name(object),
        spec["priorityLevelConfiguration"]["name"].as_str().unwrap_or_default().into(),
        spec["matchingPrecedence"].as_i64().unwrap_or(0).into(),
        or_none(&spec["distinguisherMethod"]["type"]),
        age_cell(object, now),
        dangling.and_then(|condition| condition["status"].as_str()).unwrap_or("?").into(),
    ]
}

pub(crate) const PRIORITY_LEVEL: &[Column] = &[
    NAME,
    string("Type", "Whether the level has a limit."),
    string("NominalConcurrencyShares", "Share of the server's concurrency."),
    string("Queues", "Number of queues."),
    string("HandSize", "Number of queues that a flow may use."),
    string("QueueLengthLimit", "Maximum requests in a queue."),
    AGE,
];

pub(crate) fn priority_level(object: &Value, now: Timestamp) -> Vec<Value> {
    let spec = &object["spec"];
    let queuing = &spec["limited"]["limitResponse"]["queuing"];
    let number = |value: &Value| if value.is_number() { value.clone() } else { "<none>".into() };
    vec![
        name(object),
        spec["type"].as_str().unwrap_or_default().into(),
        number(&spec["limited"]["nominalConcurrencyShares"]),
        number(&queuing["queues"]),
        number(&queuing["handSize"]),
        number(&queuing["queueLengthLimit"]),
        age_cell(object, now),
    ]
}

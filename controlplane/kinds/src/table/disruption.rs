//! Pod disruption budgets.

use jiff::Timestamp;
use serde_json::Value;

use super::{AGE, Column, NAME, age_cell, integer, name, string};

pub(crate) const BUDGET: &[Column] = &[
    NAME,
    string("Min Available", "How many pods must stay available."),
    string("Max Unavailable", "How many pods may be unavailable."),
    integer("Allowed Disruptions", "How many pods may be evicted now."),
    AGE,
];

pub(crate) fn budget(object: &Value, now: Timestamp) -> Vec<Value> {
    let number = |value: &Value| match value {
        Value::Null => "N/A".into(),
        Value::String(_) => value.clone(),
        value => value.to_string().into(),
    };
    let spec = &object["spec"];
    let allowed = object["status"]["disruptionsAllowed"].as_i64().unwrap_or(0);
    let (least, most) = (number(&spec["minAvailable"]), number(&spec["maxUnavailable"]));
    vec![name(object), least, most, allowed.into(), age_cell(object, now)]
}

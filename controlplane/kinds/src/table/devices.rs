//! Device classes, claims of devices, slices of devices.

use jiff::Timestamp;
use serde_json::Value;

use super::{AGE, Column, NAME, age_cell, items, name, string};

pub(crate) const PLAIN: &[Column] = &[NAME, AGE];

pub(crate) fn plain(object: &Value, now: Timestamp) -> Vec<Value> {
    vec![name(object), age_cell(object, now)]
}

pub(crate) const CLAIM: &[Column] =
    &[NAME, string("State", "Whether devices are allocated, and reserved for pods."), AGE];

pub(crate) fn claim(object: &Value, now: Timestamp) -> Vec<Value> {
    let status = &object["status"];
    let mut states = Vec::new();
    if !object["metadata"]["deletionTimestamp"].is_null() {
        states.push("deleted");
    }
    if status["allocation"].is_null() {
        states.push("pending");
    } else {
        states.push("allocated");
        if items(&status["reservedFor"]).next().is_some() {
            states.push("reserved");
        }
    }
    vec![name(object), states.join(",").into(), age_cell(object, now)]
}

pub(crate) const SLICE: &[Column] = &[
    NAME,
    string("Node", "The node of the devices."),
    string("Driver", "The driver of the devices."),
    string("Pool", "The pool of the devices."),
    AGE,
];

pub(crate) fn slice(object: &Value, now: Timestamp) -> Vec<Value> {
    let spec = &object["spec"];
    let text = |value: &Value| Value::from(value.as_str().unwrap_or_default());
    let (node, driver, pool) = (text(&spec["nodeName"]), text(&spec["driver"]), text(&spec["pool"]["name"]));
    vec![name(object), node, driver, pool, age_cell(object, now)]
}

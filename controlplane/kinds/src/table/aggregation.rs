//! API services.

use jiff::Timestamp;
use serde_json::Value;

use super::{AGE, Column, NAME, age_cell, items, name, string};

pub(crate) const API_SERVICE: &[Column] = &[
    NAME,
    string("Service", "The service that serves the group version."),
    string("Available", "Whether the service responds."),
    AGE,
];

pub(crate) fn api_service(object: &Value, now: Timestamp) -> Vec<Value> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let reference = &object["spec"]["service"];
    let service = match reference {
        Value::Null => "Local".to_owned(),
        _ => format!("{}/{}", text(&reference["namespace"]), text(&reference["name"])),
    };
    let available = items(&object["status"]["conditions"]).find(|condition| condition["type"] == "Available");
    let available = available.map_or_else(
        || "Unknown".to_owned(),
        |condition| match text(&condition["status"]) {
            status if status == "True" => status,
            status => format!("{status} ({})", text(&condition["reason"])),
        },
    );
    vec![name(object), service.into(), available.into(), age_cell(object, now)]
}

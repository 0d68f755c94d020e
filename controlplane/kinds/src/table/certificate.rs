//! Certificate signing requests.

use jiff::Timestamp;
use serde_json::Value;

use super::{AGE, Column, NAME, age, age_cell, items, name, string};

pub(crate) const COLUMNS: &[Column] = &[
    NAME,
    AGE,
    string("SignerName", "Signer of the certificate."),
    string("Requestor", "User that made the request."),
    string("RequestedDuration", "Requested validity of the certificate."),
    string("Condition", "Whether the request is approved, denied, failed or issued."),
];

pub(crate) fn cells(request: &Value, now: Timestamp) -> Vec<Value> {
    let spec = &request["spec"];
    let duration = spec["expirationSeconds"].as_i64().map_or_else(|| "<none>".to_owned(), age::span);
    let text = |value: &Value| Value::from(value.as_str().unwrap_or_default());
    vec![
        name(request),
        age_cell(request, now),
        text(&spec["signerName"]),
        text(&spec["username"]),
        duration.into(),
        condition(&request["status"]).into(),
    ]
}

fn condition(status: &Value) -> String {
    let has = |type_: &str| items(&status["conditions"]).any(|condition| condition["type"] == type_);
    let mut words = Vec::new();
    words.extend(has("Approved").then_some("Approved"));
    words.extend(has("Denied").then_some("Denied"));
    if words.is_empty() {
        words.push("Pending");
    }
    words.extend(has("Failed").then_some("Failed"));
    words.extend(status["certificate"].as_str().is_some_and(|pem| !pem.is_empty()).then_some("Issued"));
    words.join(",")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn conditions_are_words() {
        for (status, word) in [
            (json!({}), "Pending"),
            (json!({"conditions": [{"type": "Approved"}], "certificate": "x"}), "Approved,Issued"),
            (json!({"conditions": [{"type": "Denied"}]}), "Denied"),
            (json!({"conditions": [{"type": "Approved"}, {"type": "Failed"}]}), "Approved,Failed"),
        ] {
            assert_eq!(condition(&status), word);
        }
    }
}

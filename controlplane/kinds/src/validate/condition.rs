//! Conditions of the type `meta/v1` Condition.

use std::collections::HashSet;

use serde_json::Value;

use super::{Causes, Path, format, items, text};

/// Maximum size of the reason of a condition, in bytes.
const MAX_REASON: usize = 1024;
/// Maximum size of the message of a condition, in bytes.
const MAX_MESSAGE: usize = 32768;
const REASON: &str = "a condition reason must start with alphabetic character, optionally followed by a string of \
    alphanumeric characters or '_,:', and must end with an alphanumeric character or '_' (e.g. 'my_name',  or 'MY_NAME',  \
    or 'MyName',  or 'ReasonA,ReasonB',  or 'ReasonA:ReasonB', regex used for validation is \
    '[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?')";

pub(super) fn conditions(causes: &mut Causes, path: &Path, list: &Value) {
    let mut seen = HashSet::new();
    for (index, condition) in items(list) {
        let (here, type_) = (path.index(index), text(&condition["type"]));
        if type_.is_empty() {
            causes.required(&here.field("type"), "must be set");
        } else {
            causes.format(&here.field("type"), type_, format::qualified_name(type_));
        }
        if !seen.insert(type_) {
            causes.duplicate(&here.field("type"), &type_.into());
        }
        check_one(causes, &here, condition);
    }
}

fn check_one(causes: &mut Causes, here: &Path, condition: &Value) {
    let status = &condition["status"];
    if !["True", "False", "Unknown"].contains(&text(status)) {
        causes.unsupported(&here.field("status"), status, &["False", "True", "Unknown"]);
    }
    causes.not_negative(&here.field("observedGeneration"), &condition["observedGeneration"]);
    if condition["lastTransitionTime"].is_null() {
        causes.required(&here.field("lastTransitionTime"), "must be set");
    }
    let reason = text(&condition["reason"]);
    if reason.is_empty() {
        causes.required(&here.field("reason"), "must be set");
    } else if !is_reason(reason) {
        causes.invalid(&here.field("reason"), &reason.into(), REASON);
    } else if reason.len() > MAX_REASON {
        causes.too_long(&here.field("reason"), MAX_REASON);
    }
    if text(&condition["message"]).len() > MAX_MESSAGE {
        causes.too_long(&here.field("message"), MAX_MESSAGE);
    }
}

fn is_reason(text: &str) -> bool {
    let word = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    text.bytes().next().is_some_and(|first| first.is_ascii_alphabetic())
        && text.bytes().last().is_some_and(word)
        && text.bytes().all(|byte| word(byte) || b",:".contains(&byte))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_condition_has_all_required_fields() {
        let good = json!({"type": "example.com/Ready", "status": "Unknown", "reason": "A:b,C_", "message": "m",
            "lastTransitionTime": "2026-01-01T00:00:00Z", "observedGeneration": 1});
        let said = |field: &str, value: Value| {
            let (mut condition, mut causes) = (good.clone(), Causes::default());
            condition[field] = value;
            conditions(&mut causes, &Path::root("c"), &json!([condition]));
            causes.into_list().into_iter().map(|cause| cause.field).collect::<Vec<_>>()
        };
        assert_eq!(said("message", "".into()), Vec::<String>::new());
        for (field, value) in [
            ("type", json!("")),
            ("type", json!("a b")),
            ("status", json!("Maybe")),
            ("observedGeneration", json!(-1)),
            ("lastTransitionTime", Value::Null),
            ("reason", json!("")),
            ("reason", json!("1a")),
            ("reason", json!("a,")),
            ("message", json!("m".repeat(MAX_MESSAGE + 1))),
        ] {
            assert_eq!(said(field, value), [format!("c[0].{field}")]);
        }
    }
}

//! Role bindings: role and subjects.

use jiff::Timestamp;
use serde_json::Value;

use super::{AGE, Column, NAME, age_cell, items, name, string, wide};

pub(crate) const BINDING: &[Column] = &[
    NAME,
    string("Role", "Role that the binding grants."),
    AGE,
    wide(string("Users", "Users that get the role.")),
    wide(string("Groups", "Groups that get the role.")),
    wide(string("ServiceAccounts", "Service accounts that get the role.")),
];

pub(crate) fn binding(object: &Value, now: Timestamp) -> Vec<Value> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let role = format!("{}/{}", text(&object["roleRef"]["kind"]), text(&object["roleRef"]["name"]));
    let of_kind = |kind: &str| -> Value {
        let found = items(&object["subjects"]).filter(|subject| subject["kind"] == kind);
        let names = found.map(|subject| match subject["namespace"].as_str() {
            Some(namespace) if kind == "ServiceAccount" => format!("{namespace}/{}", text(&subject["name"])),
            _ => text(&subject["name"]),
        });
        names.collect::<Vec<_>>().join(", ").into()
    };
    let [users, groups, accounts] = ["User", "Group", "ServiceAccount"].map(of_kind);
    vec![name(object), role.into(), age_cell(object, now), users, groups, accounts]
}

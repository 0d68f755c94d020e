//! Migrations of stored objects.

use jiff::Timestamp;
use serde_json::Value;

use super::{Column, NAME, items, name, string};

pub(crate) const MIGRATION: &[Column] = &[
    // As upstream, the name is plain text here.
    Column { format: "", ..NAME },
    string("Resource", "The resource whose objects are migrated."),
    string("Status", "Last condition of the migration."),
];

pub(crate) fn migration(object: &Value, _now: Timestamp) -> Vec<Value> {
    let text = |field: &str| object["spec"]["resource"][field].as_str().unwrap_or_default();
    let resource = match text("group") {
        "" => text("resource").to_owned(),
        group => format!("{}.{group}", text("resource")),
    };
    let is_known = |type_: &&str| matches!(*type_, "Running" | "Failed" | "Succeeded");
    let holding = items(&object["status"]["conditions"]).filter(|condition| condition["status"] == "True");
    let mut types = holding.filter_map(|condition| condition["type"].as_str());
    let status = types.rfind(is_known);
    vec![name(object), resource.into(), status.unwrap_or("Unknown").into()]
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_last_condition_that_holds_is_the_status() {
        let of = |resource: Value, conditions: Value| {
            let object = json!({"metadata": {"name": "m"}, "spec": {"resource": resource},
                "status": {"conditions": conditions}});
            migration(&object, Timestamp::UNIX_EPOCH)
        };
        assert_eq!(of(json!({"resource": "secrets"}), json!(null)), ["m", "secrets", "Unknown"]);
        let conditions =
            json!([{"type": "Running", "status": "False"}, {"type": "Succeeded", "status": "True"}]);
        let resource = json!({"group": "apps", "resource": "deployments"});
        assert_eq!(of(resource, conditions), ["m", "deployments.apps", "Succeeded"]);
    }
}

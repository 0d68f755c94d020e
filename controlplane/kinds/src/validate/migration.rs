//! Migrations of stored objects. Source: `pkg/apis/storagemigration/validation`.

use serde_json::Value;

use super::{Causes, Path, condition, format, items, text};

/// Checks a migration.
pub(crate) fn migration(causes: &mut Causes, object: &Value, old: Option<&Value>) {
    let (path, resource) = (Path::root("spec").field("resource"), &object["spec"]["resource"]);
    match text(&resource["resource"]) {
        "" => causes.required(&path.field("resource"), "resource is required to be set"),
        name => causes.format(&path.field("resource"), name, format::dns1035_label(name)),
    }
    let group = text(&resource["group"]);
    if !group.is_empty() {
        causes.format(&path.field("group"), group, format::dns1123_subdomain(group));
    }
    if old.is_some_and(|old| old["spec"] != object["spec"]) {
        causes.invalid(&Path::root("spec"), &object["spec"], "field is immutable");
    }
}

/// Checks the status of a migration.
pub(crate) fn status(causes: &mut Causes, new: &Value, old: &Value) {
    let path = Path::root("status");
    let (here, version) = (path.field("resourceVersion"), &new["status"]["resourceVersion"]);
    let is_number =
        text(version).bytes().all(|byte| byte.is_ascii_digit()) && !text(version).starts_with('0');
    if !is_number {
        let detail = format!("resource version is not well formed: {}", text(version));
        causes.invalid(&here, version, &detail);
    }
    let before = text(&old["status"]["resourceVersion"]);
    if !before.is_empty() && before != text(version) {
        causes.invalid(&here, &text(version).into(), "field is immutable");
    }
    let (here, list) = (path.field("conditions"), &new["status"]["conditions"]);
    condition::conditions(causes, &here, list);
    let ended = |object: &Value, type_: &str| {
        items(&object["status"]["conditions"])
            .any(|(_, condition)| condition["type"] == type_ && condition["status"] == "True")
    };
    if ended(new, "Succeeded") && ended(new, "Failed") {
        let detail = "Both success and failed conditions cannot be true at the same time";
        causes.invalid(&here, list, detail);
    }
    for (type_, word) in [("Succeeded", "Success"), ("Failed", "Failed")] {
        if ended(old, type_) && !ended(new, type_) {
            let detail = format!("{word} condition cannot be set to false once it is true");
            causes.invalid(&here, list, &detail);
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::tests::found;
    use super::*;

    fn of(resource: &Value) -> Value {
        json!({"spec": {"resource": resource}})
    }

    #[test]
    fn the_resource_is_a_name_and_immutable() {
        let one = of(&json!({"group": "apps", "resource": "deployments"}));
        let check = |new: &Value, old: Option<&Value>| found(|causes| migration(causes, new, old));
        assert!(check(&one, Some(&one)).is_empty());
        let refused = ["spec.resource.resource: Required value: resource is required to be set"];
        assert_eq!(check(&of(&json!({"group": "apps"})), None), refused);
        assert_eq!(check(&of(&json!({"group": "A", "resource": "A"})), None).len(), 2);
        let other = of(&json!({"group": "", "resource": "secrets"}));
        assert!(check(&other, Some(&one))[0].ends_with("field is immutable"));
    }

    #[test]
    fn an_end_is_final_and_a_resource_version_is_kept() {
        let condition = |type_: &str, status: &str| {
            json!({"type": type_, "status": status, "reason": "R", "message": "",
                "lastTransitionTime": "2026-01-01T00:00:00Z"})
        };
        let with = |version: &str, conditions: &[Value]| json!({"status": {"resourceVersion": version, "conditions": conditions}});
        let check = |new: &Value, old: &Value| found(|causes| status(causes, new, old));
        let (new, done) = (with("", &[]), with("7", &[condition("Succeeded", "True")]));
        assert!(check(&new, &json!({})).is_empty() && check(&done, &new).is_empty());
        assert!(check(&with("8", &[condition("Succeeded", "True")]), &done)[0].contains("immutable"));
        assert!(check(&with("7", &[]), &done)[0].contains("Success condition cannot be set to false"));
        let both = with("7", &[condition("Succeeded", "True"), condition("Failed", "True")]);
        assert!(check(&both, &done)[0].contains("cannot be true at the same time"));
        assert!(check(&with("x", &[]), &json!({}))[0].contains("not well formed"));
    }
}

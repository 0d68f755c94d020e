//! Role bindings.

use serde_json::Value;

use super::{child, each, fill};

const GROUP: &str = "rbac.authorization.k8s.io";

/// Sets the API groups of the role and of the subjects. Service accounts keep the core group, which is empty.
pub(crate) fn binding(object: &mut Value) {
    if object["roleRef"].is_object()
        && let Some(role) = child(object, "roleRef")
    {
        fill(role, "apiGroup", GROUP);
    }
    let Some(map) = object.as_object_mut() else { return };
    for subject in each(map, "subjects") {
        if matches!(subject.get("kind").and_then(Value::as_str), Some("User" | "Group")) {
            fill(subject, "apiGroup", GROUP);
        }
    }
}

//! The finalizers of a PodGroup. No I/O. Source: `pkg/controller/scheduling/podgroupprotection`.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

/// The finalizer that protects a group while it has active pods.
const FINALIZER: &str = "scheduling.k8s.io/podgroup-protection";

/// The finalizers of a group without [`FINALIZER`]. `None` if the group is not being deleted, has active pods or does
/// not have that finalizer.
pub(super) fn released(group: &ObjectMeta, has_members: bool) -> Option<Vec<&str>> {
    let held = group.finalizers.as_deref().unwrap_or_default();
    let is_due = group.deletion_timestamp.is_some() && !has_members;
    let is_held = held.iter().any(|finalizer| finalizer == FINALIZER);
    (is_due && is_held)
        .then(|| held.iter().map(String::as_str).filter(|finalizer| *finalizer != FINALIZER).collect())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn a_deleted_group_is_released_when_it_has_no_active_pods() {
        let meta = |fields: Value| -> ObjectMeta { serde_json::from_value(fields).unwrap() };
        let deleted =
            meta(json!({"deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": ["a/b", FINALIZER]}));
        assert_eq!(released(&deleted, false), Some(vec!["a/b"]));
        assert_eq!(released(&deleted, true), None);
        assert_eq!(released(&meta(json!({"finalizers": [FINALIZER]})), false), None);
        let other = json!({"deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": ["a/b"]});
        assert_eq!(released(&meta(other), false), None);
    }
}

//! The Scale in requests for the subresource `scale`. Webhooks and policies get and change the Scale; all other plugins
//! get the workload.
//!
//! Source: `scaleUpdatedObjectInfo` of `pkg/registry/apps/deployment/storage`.

use coracle_kinds::{Resource, scale};
use serde_json::Value;

use crate::{
    error::{ApiError, Result},
    object_meta::text,
};

/// Writes the replicas of a changed Scale into the workload. Returns whether the replicas changed. As upstream, the
/// uid and the resourceVersion are preconditions, and all other fields have no effect.
///
/// # Errors
/// A precondition does not hold, or the replicas are invalid.
pub(super) fn store(kind: &Resource, workload: &mut Value, changed: &Value) -> Result<bool> {
    let name = text(workload, "name");
    let (uid, stored) = (text(changed, "uid"), text(workload, "uid"));
    if !uid.is_empty() && uid != stored {
        let why = format!("Precondition failed: UID in precondition: {uid}, UID in object meta: {stored}");
        return Err(ApiError::conflict(kind, name, why));
    }
    let revision = text(changed, "resourceVersion");
    if !matches!(revision, "" | "0") && revision != text(workload, "resourceVersion") {
        return Err(ApiError::modified(kind, name));
    }
    let replicas = scale::replicas(changed).map_err(|causes| ApiError::invalid_scale(name, &causes))?;
    let is_changed = scale::read(kind, workload)["spec"]["replicas"] != replicas;
    if is_changed {
        scale::set_replicas(kind, workload, replicas);
    }
    Ok(is_changed)
}

/// Sets the replicas of a decoded Scale if they are absent: a decoded Scale omits a 0.
pub(super) fn show_replicas(scale: &mut Value) {
    let replicas = scale["spec"]["replicas"].as_i64().unwrap_or(0);
    scale["spec"]["replicas"] = replicas.into();
}

#[cfg(test)]
mod tests {
    use coracle_kinds::{kind::by_kind, patch};
    use serde_json::json;

    use super::*;

    #[test]
    fn only_the_replicas_of_a_changed_scale_are_stored() {
        let kind = by_kind("apps/v1", "Deployment").unwrap();
        let before =
            json!({"metadata": {"name": "d", "uid": "u", "resourceVersion": "7"}, "spec": {"replicas": 2}});
        let store = |change: Value| {
            let mut workload = before.clone();
            let changed = patch::merge(&scale::read(kind, &before), &change).unwrap();
            super::store(kind, &mut workload, &changed).map(|is_changed| (is_changed, workload))
        };
        let (is_changed, workload) =
            store(json!({"spec": {"replicas": 0}, "metadata": {"name": "e"}})).unwrap();
        assert!(is_changed);
        assert_eq!(
            (&workload["spec"], &workload["metadata"]),
            (&json!({"replicas": 0}), &before["metadata"])
        );
        let same = store(json!({"metadata": {"labels": {"a": "b"}, "resourceVersion": "0"}})).unwrap();
        assert_eq!(same, (false, before.clone()));
        for (change, code) in [
            (json!({"metadata": {"uid": "v"}}), 409),
            (json!({"metadata": {"resourceVersion": "6"}}), 409),
            (json!({"spec": {"replicas": -1}}), 422),
        ] {
            assert_eq!(store(change.clone()).unwrap_err().code, code, "{change}");
        }
        let mut decoded = json!({"kind": "Scale"});
        show_replicas(&mut decoded);
        assert_eq!(decoded, json!({"kind": "Scale", "spec": {"replicas": 0}}));
    }
}

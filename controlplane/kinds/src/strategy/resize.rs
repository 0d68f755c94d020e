//! Updates of `/resize` of a pod: only resources and resize policies change.
//!
//! Source: `dropNonResizeUpdates` of `pkg/registry/core/pod/strategy.go`.

use serde_json::Value;

use super::prepare_for_update;
use crate::Resource;

/// Prepares an update of `/resize` of a pod. Added, removed, renamed and reordered containers stay in the new object,
/// so that validation refuses them.
pub fn prepare_for_resize(kind: &Resource, new: &mut Value, old: &Value) {
    let spec = resized(new["spec"].take(), &old["spec"]);
    let owners = new["metadata"]["managedFields"].take();
    *new = old.clone();
    new["spec"] = spec;
    if let Some(metadata) = new["metadata"].as_object_mut() {
        match owners {
            Value::Null => metadata.remove("managedFields"),
            owners => metadata.insert("managedFields".to_owned(), owners),
        };
    }
    prepare_for_update(kind, new, old);
}

/// The old spec with the resources and resize policies of the new spec. If the number of containers or of init
/// containers differs, the new spec is returned. If their names differ, the new list is kept. In both cases validation
/// refuses the change.
fn resized(mut new: Value, old: &Value) -> Value {
    const LISTS: [&str; 2] = ["containers", "initContainers"];
    let length = |spec: &Value, list: &str| spec[list].as_array().map_or(0, Vec::len);
    if LISTS.iter().any(|list| length(&new, list) != length(old, list)) {
        return new;
    }
    let mut spec = old.clone();
    copy(&new, &mut spec, "resources");
    for list in LISTS {
        // An absent list is not indexed mutably, because that would create it.
        let [new, kept] = [&mut new, &mut spec].map(|spec| spec.get_mut(list).and_then(Value::as_array_mut));
        let (Some(new), Some(kept)) = (new, kept) else { continue };
        if new.iter().zip(kept.iter()).any(|(new, old)| new["name"] != old["name"]) {
            *kept = std::mem::take(new);
            continue;
        }
        for (new, kept) in new.iter().zip(kept) {
            copy(new, kept, "resources");
            copy(new, kept, "resizePolicy");
        }
    }
    spec
}

/// Copies a field, or removes it if it is absent.
fn copy(from: &Value, to: &mut Value, field: &str) {
    let Some(to) = to.as_object_mut() else { return };
    match from.get(field) {
        Some(value) => to.insert(field.to_owned(), value.clone()),
        None => to.remove(field),
    };
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::kind::by_kind;

    fn pod(containers: &Value) -> Value {
        json!({"metadata": {"name": "p", "labels": {"a": "b"}, "generation": 1}, "spec": {"containers": containers},
            "status": {"phase": "Running"}})
    }

    #[test]
    fn only_resources_change_and_their_change_increases_the_generation() {
        let kind = by_kind("v1", "Pod").unwrap();
        let old = pod(&json!([{"name": "c", "image": "i", "resources": {"requests": {"cpu": "1"}}}]));
        let mut new = old.clone();
        new["spec"]["containers"][0] =
            json!({"name": "c", "image": "other", "resources": {"requests": {"cpu": "2"}}});
        new["spec"]["hostNetwork"] = true.into();
        new["metadata"]["labels"] = json!({"x": "y"});
        new["status"] = json!({});
        prepare_for_resize(kind, &mut new, &old);
        let mut expect = old.clone();
        expect["spec"]["containers"][0]["resources"]["requests"]["cpu"] = "2".into();
        expect["metadata"]["generation"] = 2.into();
        assert_eq!(new, expect);
        let mut same = old.clone();
        prepare_for_resize(kind, &mut same, &old);
        assert_eq!(same, old);
    }

    #[test]
    fn added_and_renamed_containers_stay_for_validation() {
        let kind = by_kind("v1", "Pod").unwrap();
        let old = pod(&json!([{"name": "c"}]));
        for containers in [json!([{"name": "d"}]), json!([{"name": "c"}, {"name": "d"}])] {
            let mut new = pod(&containers);
            prepare_for_resize(kind, &mut new, &old);
            assert_eq!(new["spec"]["containers"], containers);
        }
    }
}

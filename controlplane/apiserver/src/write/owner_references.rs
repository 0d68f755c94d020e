//! Removes repeated owner references, with a warning. Source: `dedupOwnerReferencesAndAddWarning` of the handlers.

use std::collections::HashSet;

use serde_json::Value;

use crate::{call::Call, warnings::Warnings};

/// Maximum number of repeated references whose uids a warning names.
const MAX_NAMED: usize = 100;

/// Removes the repeated references of a create or an update. As upstream, repeated references of a patch are removed
/// only after admission.
pub(super) fn deduplicate_sent(call: &Call, object: &mut Value) {
    if call.info.verb != "patch" {
        deduplicate(&call.warnings, object, "");
    }
}

/// Removes the references that are repeated after mutating admission.
pub(super) fn deduplicate_admitted(call: &Call, object: &mut Value) {
    deduplicate(&call.warnings, object, " after mutating admission happens");
}

fn deduplicate(warnings: &Warnings, object: &mut Value, when: &str) {
    let list = object.pointer_mut("/metadata/ownerReferences").and_then(Value::as_array_mut);
    let Some(list) = list.filter(|list| list.len() > 1) else { return };
    let (mut known, mut repeated) = (HashSet::new(), Vec::new());
    list.retain(|reference| {
        let is_new = known.insert(reference.to_string());
        if !is_new && repeated.len() < MAX_NAMED {
            repeated.push(reference["uid"].as_str().unwrap_or_default().to_owned());
        }
        is_new
    });
    if !repeated.is_empty() {
        warnings.add(format!(
            ".metadata.ownerReferences contains duplicate entries{when}; API server dedups owner references in 1.20+, and \
             may reject such requests as early as 1.24; please fix your requests; duplicate UID(s) observed: {}",
            repeated.join(", ")
        ));
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_equal_references_are_removed() {
        let reference =
            |uid: &str, name: &str| json!({"apiVersion": "v1", "kind": "K", "name": name, "uid": uid});
        let (one, other) = (reference("u", "a"), reference("u", "b"));
        let mut object = json!({"metadata": {"ownerReferences": [one, other, one]}});
        let warnings = Warnings::default();
        deduplicate(&warnings, &mut object, "");
        assert_eq!(object["metadata"]["ownerReferences"], json!([one, other]));
        let found = warnings.take();
        assert!(found.len() == 1 && found[0].ends_with("duplicate UID(s) observed: u"), "{found:?}");
        deduplicate(&warnings, &mut object, "");
        assert_eq!(warnings.take(), Vec::<String>::new());
    }
}

//! The annotation of client-side apply. A server-side apply of kubectl keeps it up to date.

use serde_json::{Map, Value};

/// The configuration that `kubectl apply` sent last, as JSON text.
const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";

/// The last applied configuration of an object.
pub(crate) fn last_applied(object: &Value) -> Option<&str> {
    object["metadata"]["annotations"][LAST_APPLIED].as_str().filter(|text| !text.is_empty())
}

/// Records a configuration in an object that has the annotation already.
pub(crate) fn refresh(object: &mut Value, config: &Value) {
    if last_applied(object).is_none() {
        return;
    }
    let mut config = config.clone();
    if let Some(annotations) = annotations_of(&mut config) {
        annotations.remove(LAST_APPLIED);
    }
    if let Some(annotations) = annotations_of(object) {
        annotations.insert(LAST_APPLIED.to_owned(), format!("{config}\n").into());
    }
}

fn annotations_of(object: &mut Value) -> Option<&mut Map<String, Value>> {
    object.get_mut("metadata")?.get_mut("annotations")?.as_object_mut()
}

//! Whether an object is initialized, according to its `metadata.initializers`.

use serde_json::Value;

/// Whether an object has not been initialized yet: the object has pending initializers, or an initializer has failed.
pub fn is_uninitialized(object: &Value) -> bool {
    !object["metadata"]["initializers"].is_null()
}

/// Whether initializers of an object are pending.
pub fn is_pending(object: &Value) -> bool {
    object["metadata"]["initializers"]["pending"].as_array().is_some_and(|list| !list.is_empty())
}

/// The failure of an initializer: a Status. `None` if no initializer has failed.
pub fn failure(object: &Value) -> Option<&Value> {
    Some(&object["metadata"]["initializers"]["result"]).filter(|result| !result.is_null())
}

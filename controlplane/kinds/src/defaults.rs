//! Fills absent fields as the API promises.

use serde_json::Value;

use crate::Kind;

/// Fills absent fields of an object, idempotently.
pub fn apply(kind: &Kind, object: &mut Value) {
    (kind.rules.defaults)(object);
}

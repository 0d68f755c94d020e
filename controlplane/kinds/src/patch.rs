//! The three patches of RFC 6902, RFC 7386 and Kubernetes' strategic merge.

use serde_json::Value;

/// Why a patch could not be applied.
#[derive(Debug, thiserror::Error)]
pub enum PatchError {
    /// The patch itself is not one (400).
    #[error("{0}")]
    Malformed(String),
    /// The patch does not fit the object (422).
    #[error("{0}")]
    Unprocessable(String),
}

/// RFC 6902.
pub fn json(object: &Value, patch: &Value) -> Result<Value, PatchError> {
    let _ = (object, patch);
    Ok(Value::Null)
}

/// RFC 7386.
pub fn merge(object: &Value, patch: &Value) -> Result<Value, PatchError> {
    let _ = (object, patch);
    Ok(Value::Null)
}

/// Strategic merge, by the patch markers of the named definition.
pub fn strategic(schema: &str, object: &Value, patch: &Value) -> Result<Value, PatchError> {
    let _ = (schema, object, patch);
    Ok(Value::Null)
}

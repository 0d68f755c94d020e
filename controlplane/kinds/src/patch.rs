//! The three patch types: JSON patch (RFC 6902), merge patch (RFC 7386), strategic merge patch.

mod json;
mod strategic;

use serde_json::Value;

/// A patch could not be applied.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum PatchError {
    /// The patch is malformed (400).
    #[error("{0}")]
    Malformed(String),
    /// The patch does not fit the object (422).
    #[error("{0}")]
    Unprocessable(String),
    /// The patch or an intermediate object exceeds a limit (413).
    #[error("{0}")]
    TooLarge(String),
}

/// Applies a JSON patch (RFC 6902).
pub fn json(object: &Value, patch: &Value) -> Result<Value, PatchError> {
    json::apply(object, patch)
}

/// Applies a merge patch (RFC 7386).
pub fn merge(object: &Value, patch: &Value) -> Result<Value, PatchError> {
    if !patch.is_object() {
        return Err(PatchError::Malformed(
            "error decoding patch: a merge patch must be an object".to_owned(),
        ));
    }
    let mut object = object.clone();
    json_patch::merge(&mut object, patch);
    Ok(object)
}

/// Applies a strategic merge patch, by the patch markers of the named definition.
pub fn strategic(schema: &str, object: &Value, patch: &Value) -> Result<Value, PatchError> {
    strategic::apply(schema, object, patch)
}

#[cfg(test)]
mod tests;

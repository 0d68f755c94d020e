//! The three patches: RFC 6902, RFC 7386 and Kubernetes' strategic merge.

mod strategic;

use serde::Deserialize;
use serde_json::Value;

/// A JSON patch with more operations is refused, as upstream does.
const MAX_OPERATIONS: usize = 10_000;

/// Why a patch could not be applied.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
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
    let patch = json_patch::Patch::deserialize(patch)
        .map_err(|error| PatchError::Malformed(format!("error decoding patch: {error}")))?;
    if patch.0.len() > MAX_OPERATIONS {
        let count = patch.0.len();
        let problem =
            format!("The allowed maximum operations in a JSON patch is {MAX_OPERATIONS}, got {count}");
        return Err(PatchError::Malformed(problem));
    }
    let mut object = object.clone();
    json_patch::patch(&mut object, &patch).map_err(|error| PatchError::Unprocessable(error.to_string()))?;
    Ok(object)
}

/// RFC 7386.
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

/// Strategic merge, by the patch markers of the named definition.
pub fn strategic(schema: &str, object: &Value, patch: &Value) -> Result<Value, PatchError> {
    strategic::apply(schema, object, patch)
}

#[cfg(test)]
mod tests;

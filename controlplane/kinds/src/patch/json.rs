//! JSON patch (RFC 6902) with limits on the size and the cost of the result.
//!
//! Upstream limits the number of operations and the total size of `copy`. This module also limits the depth and the
//! steps. `move` can nest an object deeper than a recursive encoder can handle. Inserting at the front of a long list
//! moves all its elements.

use json_patch::{AddOperation, PatchOperation};
use serde::Deserialize;
use serde_json::Value;

use super::PatchError;

/// Maximum operations of one patch, as upstream.
const MAX_OPERATIONS: usize = 10_000;
/// Maximum bytes that the `copy` operations of one patch add, as upstream (`JSONPatchMaxCopyBytes`).
const MAX_COPIED: usize = 3 << 20;
/// Maximum depth of an object while it is patched: the limit of the JSON decoder.
const MAX_DEPTH: usize = 120;
/// Maximum nodes that the operations of one patch visit or move.
const MAX_STEPS: usize = 50_000_000;

/// Size of a part of an object.
struct Measure {
    /// Bytes of the compact encoding, without escapes.
    bytes: usize,
    nodes: usize,
    depth: usize,
}

/// Cost of the operations so far.
#[derive(Default)]
struct Cost {
    copied: usize,
    steps: usize,
}

pub(super) fn apply(object: &Value, patch: &Value) -> Result<Value, PatchError> {
    let count = patch.as_array().map_or(0, Vec::len);
    if count > MAX_OPERATIONS {
        return Err(PatchError::TooLarge(format!(
            "Request entity too large: The allowed maximum operations in a JSON patch is {MAX_OPERATIONS}, got {count}"
        )));
    }
    let operations = match patch {
        // As upstream, null means no operations.
        Value::Null => &[],
        Value::Array(operations) if operations.iter().all(Value::is_object) => operations.as_slice(),
        _ => {
            let message = "error decoding patch: a JSON patch must be a list of operations".to_owned();
            return Err(PatchError::Malformed(message));
        }
    };
    let mut object = object.clone();
    let mut used = Cost::default();
    for (index, operation) in operations.iter().enumerate() {
        let operation = PatchOperation::deserialize(operation)
            .map_err(|error| PatchError::Unprocessable(format!("operation '/{index}': {error}")))?;
        let Some(operation) = lenient(&object, operation) else { continue };
        used.count(&object, &operation)?;
        json_patch::patch_unsafe(&mut object, std::slice::from_ref(&operation)).map_err(|error| {
            let cause = error.to_string().replacen("operation '/0'", &format!("operation '/{index}'"), 1);
            PatchError::Unprocessable(cause)
        })?;
    }
    Ok(object)
}

/// The operation for an absent field of a present map, which upstream reads as null: `replace` adds the field, `test`
/// finds null, `copy` copies null. `None` if there is nothing to do. Source: `partialDoc.get` of `evanphx/json-patch`.
fn lenient(object: &Value, operation: PatchOperation) -> Option<PatchOperation> {
    let is_missing = |path: &str| {
        let parent = path.rsplit_once('/').and_then(|(parent, _)| object.pointer(parent));
        parent.is_some_and(Value::is_object) && object.pointer(path).is_none()
    };
    match operation {
        PatchOperation::Replace(replace) if is_missing(replace.path.as_str()) => {
            Some(PatchOperation::Add(AddOperation { path: replace.path, value: replace.value }))
        }
        PatchOperation::Test(test) if test.value.is_null() && is_missing(test.path.as_str()) => None,
        PatchOperation::Copy(copy) if is_missing(copy.from.as_str()) => {
            Some(PatchOperation::Add(AddOperation { path: copy.path, value: Value::Null }))
        }
        other => Some(other),
    }
}

// === impl Cost ===

impl Cost {
    /// Adds the cost of an operation before it runs.
    fn count(&mut self, object: &Value, operation: &PatchOperation) -> Result<(), PatchError> {
        let at = operation.path().as_str();
        self.step(siblings(object, at))?;
        match operation {
            PatchOperation::Add(add) => self.place(at, &measure(&add.value)),
            PatchOperation::Replace(replace) => self.place(at, &measure(&replace.value)),
            PatchOperation::Test(test) => self.step(measure(&test.value).nodes),
            PatchOperation::Remove(_) => Ok(()),
            PatchOperation::Move(moved) => {
                self.step(siblings(object, moved.from.as_str()))?;
                let Some(value) = object.pointer(moved.from.as_str()) else { return Ok(()) };
                self.place(at, &measure(value))
            }
            PatchOperation::Copy(copy) => {
                let Some(value) = object.pointer(copy.from.as_str()) else { return Ok(()) };
                let size = measure(value);
                self.copied += size.bytes;
                if self.copied > MAX_COPIED {
                    return Err(PatchError::TooLarge(format!(
                        "Unable to complete the copy, the accumulated size increase of copy is {}, exceeding the \
                         limit {MAX_COPIED}",
                        self.copied
                    )));
                }
                self.place(at, &size)
            }
        }
    }

    /// Checks the depth of a value that is placed at a pointer, and counts its nodes as steps.
    fn place(&mut self, at: &str, size: &Measure) -> Result<(), PatchError> {
        let depth = at.bytes().filter(|byte| *byte == b'/').count() + size.depth;
        if depth > MAX_DEPTH {
            return Err(PatchError::TooLarge(format!(
                "the patch nests an object {depth} levels deep, exceeding the limit {MAX_DEPTH}"
            )));
        }
        self.step(size.nodes)
    }

    fn step(&mut self, steps: usize) -> Result<(), PatchError> {
        self.steps += steps;
        if self.steps > MAX_STEPS {
            return Err(PatchError::TooLarge(format!(
                "the patch visits more than {MAX_STEPS} elements of the object"
            )));
        }
        Ok(())
    }
}

/// The number of elements in the list of a pointer: an insertion or a removal moves them.
fn siblings(object: &Value, pointer: &str) -> usize {
    let parent = pointer.rsplit_once('/').and_then(|(parent, _)| object.pointer(parent));
    parent.and_then(Value::as_array).map_or(1, |list| list.len() + 1)
}

fn measure(value: &Value) -> Measure {
    let mut size = Measure { bytes: 2, nodes: 1, depth: 0 };
    let mut add = |name: usize, inner: &Value| {
        let inner = measure(inner);
        size.bytes += name + inner.bytes + 1;
        size.nodes += inner.nodes;
        size.depth = size.depth.max(inner.depth + 1);
    };
    match value {
        Value::Object(map) => map.iter().for_each(|(name, inner)| add(name.len() + 3, inner)),
        Value::Array(list) => list.iter().for_each(|inner| add(0, inner)),
        Value::String(text) => size.bytes += text.len(),
        Value::Null | Value::Bool(_) | Value::Number(_) => size.bytes += 2,
    }
    size
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn too_large(object: &Value, operations: Vec<Value>) -> String {
        match apply(object, &Value::Array(operations)) {
            Err(PatchError::TooLarge(message)) => message,
            other => panic!("{:?}", other.map(|_| "applied")),
        }
    }

    #[test]
    fn copies_are_limited_in_total() {
        let object = json!({"data": {"a": "x".repeat(1000)}});
        let double = |at| json!({"op": "copy", "from": "/data", "path": format!("/data/b{at}")});
        // Each copy contains the previous one, so the size doubles: 30 copies would be a terabyte.
        let message = too_large(&object, (0..30).map(double).collect());
        assert!(message.starts_with("Unable to complete the copy, the accumulated size"), "{message}");
        let few: Value = (0..3).map(double).collect();
        assert!(apply(&object, &few).is_ok());
    }

    #[test]
    fn moves_cannot_nest_without_end() {
        let step = |_| {
            [
                json!({"op": "add", "path": "/b", "value": {}}),
                json!({"op": "move", "from": "/a", "path": "/b/a"}),
                json!({"op": "move", "from": "/b", "path": "/a"}),
            ]
        };
        let message = too_large(&json!({"a": {}}), (0..3000).flat_map(step).collect());
        assert!(message.contains("levels deep"), "{message}");
    }

    #[test]
    fn insertions_into_a_long_list_are_limited() {
        let object = json!({"list": vec![0; 1_000_000]});
        let insert = |_| json!({"op": "add", "path": "/list/0", "value": 0});
        let message = too_large(&object, (0..9_000).map(insert).collect());
        assert!(message.contains("visits more than"), "{message}");
    }

    #[test]
    fn operations_are_limited() {
        let test = json!({"op": "test", "path": "/a", "value": 1});
        let message = too_large(&json!({"a": 1}), vec![test; MAX_OPERATIONS + 1]);
        assert!(message.ends_with("in a JSON patch is 10000, got 10001"), "{message}");
    }

    #[test]
    fn an_operation_that_fails_is_named() {
        let patch = json!([{"op": "add", "path": "/b", "value": 1}, {"op": "remove", "path": "/c"}]);
        let Err(PatchError::Unprocessable(message)) = apply(&json!({}), &patch) else { panic!("applied") };
        assert!(message.contains("operation '/1'"), "{message}");
    }
}

//! The definitions of the API's types: decoding of objects by field types, unknown and duplicate fields, canonical
//! form.
//!
//! Start at [`decode`]. Objects are JSON trees (`serde_json::Value`). [`model`] has the definitions, which are
//! generated from Kubernetes' OpenAPI documents (`data/generate.py`) and found by their names. Invariants: no I/O, no
//! clock, no panic on any input, nothing about the semantics of a kind.

mod canonical;
mod check;
pub mod model;
mod order;
mod parse;
pub mod shape;
mod tree_path;

use serde_json::Value;

use canonical::UnknownFields;
pub use tree_path::TreePath;

/// `fieldValidation` of a write.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FieldValidation {
    /// Ignore: unknown and duplicate fields are removed without a warning.
    Ignore,
    /// Warn: each unknown or duplicate field is removed with a warning.
    #[default]
    Warn,
    /// Strict: an unknown or duplicate field is an error.
    Strict,
}

/// A parsed JSON text.
#[derive(Clone, Debug, PartialEq)]
pub struct Parsed {
    /// The tree. For a duplicate key, the tree has the last value.
    pub value: Value,
    /// Messages of the form `duplicate field "spec.replicas"`.
    pub duplicates: Vec<String>,
    /// Hashes of the paths of all keys in the order of the document, as [`parse_json`] makes them.
    pub keys: Vec<u64>,
}

/// A body is not a valid object of its kind (400 BadRequest; `Display` is the whole message).
#[derive(Debug, thiserror::Error)]
pub enum SchemaError {
    /// The body is not JSON.
    #[error("couldn't get version/kind; json parse error: {0}")]
    Syntax(
        /// The error of the parser.
        String,
    ),
    /// A value has the wrong type, or in strict validation a field is unknown or duplicate.
    #[error("{kind} in version \"{version}\" cannot be handled as a {kind}: {problem}")]
    Decode {
        /// The object's kind.
        kind: String,
        /// The object's version without its group.
        version: String,
        /// The defect.
        problem: String,
    },
}

/// Parses JSON and records duplicate keys.
pub fn parse_json(bytes: &[u8]) -> Result<Parsed, SchemaError> {
    parse::parse(bytes).map_err(|error| SchemaError::Syntax(syntax(&error)))
}

/// The error of the parser. For an incomplete text, the message is Go's message.
fn syntax(error: &serde_json::Error) -> String {
    if error.is_eof() { "unexpected end of JSON input".to_owned() } else { error.to_string() }
}

/// Checks the metadata of an object and makes it canonical. Another schema describes the other fields of the object.
/// Returns warnings such as `unknown field "metadata.foo"`.
///
/// # Errors
/// A value has the wrong type.
pub fn decode_metadata(object: &mut Value) -> Result<Vec<String>, String> {
    let Some(metadata) = object.get_mut("metadata").filter(|metadata| !metadata.is_null()) else {
        return Ok(Vec::new());
    };
    let definition = model::schemas().find(METADATA).ok_or_else(|| format!("no definition {METADATA}"))?;
    let notes = check::conform_field(definition, "metadata", metadata)?;
    if let Some(metadata) = metadata.as_object_mut() {
        canonical::object(model::schemas(), definition, metadata, UnknownFields::Keep);
    }
    Ok(notes)
}

/// Name of the definition of metadata.
pub const METADATA: &str = "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta";

/// Checks an object against the named definition (for example `io.k8s.api.core.v1.Pod`). Removes unknown fields,
/// rewrites times and quantities, and makes the object canonical. Returns the object, and warnings such as
/// `unknown field "spec.foo"`.
pub fn decode(
    schema: &str,
    parsed: Parsed,
    validation: FieldValidation,
) -> Result<(Value, Vec<String>), SchemaError> {
    let (mut value, notes) = decode_config(schema, parsed, validation)?;
    canonical(schema, &mut value);
    Ok((value, notes))
}

/// Makes an object of a definition canonical. Removes fields that Go omits because they are zero or empty, and adds
/// the fields that Go always writes.
pub fn canonical(schema: &str, value: &mut Value) {
    canonical_with(schema, value, UnknownFields::Keep);
}

/// Does the same as [`canonical`] for a stored object, and removes fields that the definition does not have. A server
/// with definitions of another version may have stored such fields. Returns whether there were such fields.
pub fn canonical_stored(schema: &str, value: &mut Value) -> bool {
    canonical_with(schema, value, UnknownFields::Remove)
}

fn canonical_with(schema: &str, value: &mut Value, unknown: UnknownFields) -> bool {
    match (model::schemas().find(schema), value.as_object_mut()) {
        (Some(definition), Some(map)) => canonical::object(model::schemas(), definition, map, unknown),
        _ => false,
    }
}

/// Does the same as [`decode`], for the configuration of a server-side apply. Fields that the manager sets to zero are
/// kept.
pub fn decode_config(
    schema: &str,
    parsed: Parsed,
    validation: FieldValidation,
) -> Result<(Value, Vec<String>), SchemaError> {
    let Parsed { mut value, duplicates, keys } = parsed;
    let problem = |value: &Value, problem: String| {
        let api_version = value["apiVersion"].as_str().unwrap_or_default();
        let version = api_version.rsplit('/').next().unwrap_or_default().to_owned();
        SchemaError::Decode { kind: value["kind"].as_str().unwrap_or_default().to_owned(), version, problem }
    };
    let Some(definition) = model::schemas().find(schema) else {
        return Err(problem(&value, format!("no definition {schema}")));
    };
    let mut notes = check::conform(definition, &mut value).map_err(|error| problem(&value, error))?;
    notes.splice(0..0, duplicates);
    order::by_document(&mut notes, &keys);
    match validation {
        FieldValidation::Ignore => Ok((value, Vec::new())),
        FieldValidation::Warn => Ok((value, notes)),
        FieldValidation::Strict if notes.is_empty() => Ok((value, notes)),
        FieldValidation::Strict => {
            Err(problem(&value, format!("strict decoding error: {}", notes.join(", "))))
        }
    }
}

#[cfg(test)]
mod tests;

//! The metadata of objects: access to its fields, times in the API's format, and generated names.

use rand::RngExt as _;
use serde_json::{Value, json};

/// Letters of generated names: no vowels, so that they form no words, and no letters that are easily confused.
const ALPHABET: &[u8] = b"bcdfghjklmnpqrstvwxz2456789";

/// A field of the metadata as text.
pub(crate) fn text<'a>(object: &'a Value, field: &str) -> &'a str {
    object["metadata"][field].as_str().unwrap_or_default()
}

/// The metadata of an object as a map. Adds it if absent; `None` if the object or its metadata is not a map.
pub(crate) fn metadata_mut(object: &mut Value) -> Option<&mut serde_json::Map<String, Value>> {
    let object = object.as_object_mut()?;
    object.entry("metadata").or_insert_with(|| json!({})).as_object_mut()
}

/// The current time in the API's format: RFC 3339, UTC, whole seconds.
pub(crate) fn now() -> String {
    jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

/// A name from a prefix, which is truncated so that five random letters fit.
pub(crate) fn generated(base: &str) -> String {
    let mut base = base.to_owned();
    base.truncate(base.floor_char_boundary(58));
    base + &random_suffix()
}

/// Five random letters.
pub(crate) fn random_suffix() -> String {
    let mut random = rand::rng();
    (0..5).map(|_| char::from(ALPHABET[random.random_range(0..ALPHABET.len())])).collect()
}

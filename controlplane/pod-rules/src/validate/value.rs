//! Access to JSON values: an absent value counts as empty.

use serde_json::Value;

/// The text of a field. Empty if absent.
pub fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// A list's elements with their indexes.
pub fn items(value: &Value) -> impl Iterator<Item = (usize, &Value)> {
    value.as_array().into_iter().flatten().enumerate()
}

/// A map's entries.
pub fn entries(value: &Value) -> impl Iterator<Item = (&String, &Value)> {
    value.as_object().into_iter().flatten()
}

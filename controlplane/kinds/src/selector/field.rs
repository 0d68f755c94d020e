//! Definition of a selectable field of a built-in kind.

use serde_json::Value;

/// A field that lists and watches can select by.
#[derive(Clone, Copy)]
pub struct Field {
    /// Its path as clients write it: `spec.nodeName`.
    pub name: &'static str,
    /// Reads its value from an object, as text.
    pub value: fn(&Value) -> String,
}

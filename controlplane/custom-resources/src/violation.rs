//! Violations with their field paths, with the messages of `apimachinery/pkg/util/validation/field`.

use std::fmt;

use serde_json::Value;

/// One violation, as in `details.causes` of a Status.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// `FieldValueRequired`, `FieldValueInvalid`, …
    pub reason: &'static str,
    /// `spec.versions[0].name`; `<nil>` for the object as a whole, as upstream prints it.
    pub field: String,
    /// `Required value`, `Invalid value: "x": …`.
    pub message: String,
}

/// Collects violations.
#[derive(Debug, Default)]
pub struct Violations {
    list: Vec<Violation>,
}

/// Path of a value. The empty path is the object as a whole. It is cut at [`MAX_PATH`] bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Path(String);

/// Maximum number of violations of one object. The text of each can be as long as the object's keys.
const MAX_VIOLATIONS: usize = 200;

/// Maximum length of a value that is quoted in a message, in bytes.
const MAX_QUOTED: usize = 4096;

/// Maximum length of a path in bytes. Each element below a key has its own path, and a key can be a megabyte long.
const MAX_PATH: usize = 2048;

// === impl Path ===

impl Path {
    /// The path of a top-level field.
    pub fn root(name: &str) -> Path {
        Path(extended("", &[name]))
    }

    /// The path of a field of this object.
    #[must_use]
    pub fn field(&self, name: &str) -> Path {
        let dot = if self.0.is_empty() { "" } else { "." };
        Path(extended(&self.0, &[dot, name]))
    }

    /// The path of an element of this list.
    #[must_use]
    pub fn index(&self, index: usize) -> Path {
        Path(extended(&self.0, &["[", &index.to_string(), "]"]))
    }

    /// The path of an entry of this map.
    #[must_use]
    pub fn key(&self, key: &str) -> Path {
        Path(extended(&self.0, &["[", key, "]"]))
    }

    /// The path as plain text; empty for the object as a whole.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_empty() { "<nil>" } else { &self.0 })
    }
}

// === impl Violations ===

impl Violations {
    /// Whether there are no violations.
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Number of violations.
    pub fn len(&self) -> usize {
        self.list.len()
    }

    /// The violations in the order of their discovery.
    pub fn as_slice(&self) -> &[Violation] {
        &self.list
    }

    /// The violations in the order of their discovery.
    pub fn into_list(self) -> Vec<Violation> {
        self.list
    }

    /// Removes the violations after the first `len`.
    pub fn truncate(&mut self, len: usize) {
        self.list.truncate(len);
    }

    /// Appends the violations of another collection.
    pub fn append(&mut self, other: Violations) {
        for violation in other.list {
            self.push(violation);
        }
    }

    /// Adds a violation.
    pub fn push(&mut self, violation: Violation) {
        if self.list.len() < MAX_VIOLATIONS {
            self.list.push(violation);
        }
    }

    /// Reports that a required value is missing.
    pub fn required(&mut self, path: &Path, detail: &str) {
        self.add("FieldValueRequired", path, with("Required value".to_owned(), detail));
    }

    /// Reports that a value is invalid.
    pub fn invalid(&mut self, path: &Path, value: &Value, detail: &str) {
        self.add("FieldValueInvalid", path, with(format!("Invalid value: {}", quoted(value)), detail));
    }

    /// Reports that an object or a list is invalid. The message does not contain its value.
    pub fn invalid_whole(&mut self, path: &Path, detail: &str) {
        self.add("FieldValueInvalid", path, with("Invalid value".to_owned(), detail));
    }

    /// Reports that a value has another type than its schema.
    pub fn type_invalid(&mut self, path: &Path, value: &Value, detail: &str) {
        self.add("FieldValueTypeInvalid", path, with(format!("Invalid value: {}", quoted(value)), detail));
    }

    /// Reports that a value is forbidden here.
    pub fn forbidden(&mut self, path: &Path, detail: &str) {
        self.add("FieldValueForbidden", path, with("Forbidden".to_owned(), detail));
    }

    /// Reports that a value is not one of the supported values.
    pub fn unsupported(&mut self, path: &Path, value: &Value, supported: &[String]) {
        let mut left = MAX_QUOTED;
        let mut known: Vec<String> = Vec::new();
        for word in supported {
            let word = format!("{word:?}");
            let Some(rest) = left.checked_sub(word.len()) else {
                known.push("...".to_owned());
                break;
            };
            left = rest;
            known.push(word);
        }
        let message = format!("Unsupported value: {}: supported values: {}", quoted(value), known.join(", "));
        self.add("FieldValueNotSupported", path, message);
    }

    /// Reports that a value is duplicate.
    pub fn duplicate(&mut self, path: &Path, value: &Value) {
        self.add("FieldValueDuplicate", path, format!("Duplicate value: {}", quoted(value)));
    }

    /// Reports that a text is too long.
    pub fn too_long(&mut self, path: &Path, max: i64) {
        self.add("FieldValueTooLong", path, format!("Too long: may not be more than {max} bytes"));
    }

    /// Reports that a list or an object has too many elements.
    pub fn too_many(&mut self, path: &Path, actual: usize, max: i64) {
        let unit = if max == 1 { "item" } else { "items" };
        self.add("FieldValueTooMany", path, format!("Too many: {actual}: must have at most {max} {unit}"));
    }

    /// Reports all problems of a name's format in one violation, joined as in upstream. Without problems, it reports
    /// nothing.
    pub fn format(&mut self, path: &Path, value: &str, problems: &[String]) {
        if !problems.is_empty() {
            self.invalid(path, &value.into(), &problems.join(","));
        }
    }

    fn add(&mut self, reason: &'static str, path: &Path, message: String) {
        self.push(Violation { reason, field: path.to_string(), message });
    }
}

fn with(head: String, detail: &str) -> String {
    if detail.is_empty() { head } else { format!("{head}: {detail}") }
}

/// A path with more parts, cut at [`MAX_PATH`] bytes.
pub(crate) fn extended(path: &str, parts: &[&str]) -> String {
    let mut text = path.to_owned();
    for part in parts {
        let left = MAX_PATH.saturating_sub(text.len());
        text.push_str(&part[..part.floor_char_boundary(left)]);
        if part.len() > left {
            text.truncate(text.floor_char_boundary(MAX_PATH - 3));
            text.push_str("...");
            break;
        }
    }
    text
}

/// The value as JSON, cut at [`MAX_QUOTED`] bytes.
fn quoted(value: &Value) -> String {
    let mut text = value.to_string();
    if text.len() > MAX_QUOTED {
        text.truncate(text.floor_char_boundary(MAX_QUOTED));
        text.push_str("...");
    }
    text
}

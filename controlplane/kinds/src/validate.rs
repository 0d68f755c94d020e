//! Rules on the values of objects; every violation is one cause with its field path.

use serde_json::Value;

use crate::Kind;

/// One violation, as `details.causes` carries it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cause {
    /// `FieldValueRequired`, `FieldValueInvalid`, …
    pub reason: &'static str,
    /// `spec.containers[0].image`.
    pub field: String,
    /// `Required value`, `Invalid value: "x": …`.
    pub message: String,
}

/// Collects violations.
#[derive(Debug, Default)]
pub struct Causes {
    list: Vec<Cause>,
}

/// Rules for a new object (after defaulting).
pub fn create(kind: &Kind, object: &Value) -> Vec<Cause> {
    let mut causes = Causes::default();
    (kind.rules.validate)(&mut causes, object, None);
    causes.list
}

/// Rules for an update through the main path (after `strategy` and defaulting).
pub fn update(kind: &Kind, new: &Value, old: &Value) -> Vec<Cause> {
    let mut causes = Causes::default();
    (kind.rules.validate)(&mut causes, new, Some(old));
    causes.list
}

/// Rules for an update through `/status`.
pub fn status_update(kind: &Kind, new: &Value, old: &Value) -> Vec<Cause> {
    let _ = (kind, new, old);
    Vec::new()
}

/// Rules for a Binding.
pub fn binding(binding: &Value) -> Vec<Cause> {
    let _ = binding;
    Vec::new()
}

/// `Deployment.apps "x" is invalid: spec.selector: Required value` or, with several causes, a bracketed list.
pub fn message(kind: &Kind, name: &str, causes: &[Cause]) -> String {
    let texts: Vec<String> = causes.iter().map(|cause| format!("{}: {}", cause.field, cause.message)).collect();
    let all = if let [one] = texts.as_slice() { one.clone() } else { format!("[{}]", texts.join(", ")) };
    format!("{} \"{name}\" is invalid: {all}", kind.qualified_kind())
}

//! Fields by which lists and watches can select objects.

use std::sync::Arc;

use serde_json::Value;

use crate::fields::{self, Field};

/// A field by which lists and watches can select objects.
#[derive(Clone, Debug)]
pub struct SelectableField {
    /// The path of the field as clients write it: `spec.nodeName`.
    pub name: Arc<str>,
    /// The path of the field in the stored version.
    pub stored: Arc<str>,
    /// The way to read the value of the field.
    pub value: FieldValue,
}

/// The way to read the value of a selectable field, as text.
#[derive(Clone, Debug)]
pub enum FieldValue {
    /// A function of a built-in row reads the value.
    Function(fn(&Value) -> String),
    /// The name of the field is the path of the value: a text, boolean or integer. An absent value is empty.
    Path,
}

/// The fields of every resource.
pub(super) fn common() -> Vec<SelectableField> {
    fields::COMMON.iter().map(SelectableField::from).collect()
}

// === impl SelectableField ===

impl SelectableField {
    /// A field whose name is the path of its value: `spec.color`.
    pub fn at_path(name: &str) -> SelectableField {
        SelectableField { name: name.into(), stored: name.into(), value: FieldValue::Path }
    }

    /// The value in an object, as text.
    pub fn read(&self, object: &Value) -> String {
        match self.value {
            FieldValue::Function(read) => read(object),
            FieldValue::Path => match self.name.split('.').fold(object, |value, name| &value[name]) {
                Value::String(text) => text.clone(),
                value @ (Value::Bool(_) | Value::Number(_)) => value.to_string(),
                Value::Null | Value::Array(_) | Value::Object(_) => String::new(),
            },
        }
    }
}

impl From<&Field> for SelectableField {
    fn from(field: &Field) -> SelectableField {
        SelectableField {
            name: field.name.into(),
            stored: field.name.into(),
            value: FieldValue::Function(field.value),
        }
    }
}

//! Printer columns of custom resources (`registry/customresource/tableconvertor`).

use jiff::Timestamp;
use serde_json::Value;

use crate::definition::{Column, Version};
use crate::json_path::JsonPath;

/// A column with its parsed path.
#[derive(Clone, Debug)]
pub struct PrinterColumn {
    /// Heading.
    pub name: String,
    /// `string`, `integer`, `number`, `boolean` or `date`.
    pub kind: String,
    /// OpenAPI format; may be empty.
    pub format: String,
    /// Help text.
    pub description: String,
    /// Columns with a priority above 0 are shown only in wide output.
    pub priority: i64,
    path: Option<JsonPath>,
}

/// The columns of a version after the column Name. A column whose path is malformed or exceeds the limits of
/// [`JsonPath`] is left out. Without definitions there is one column, Age.
pub fn of_version(version: &Version) -> Vec<PrinterColumn> {
    if version.additional_printer_columns.is_empty() {
        return vec![PrinterColumn {
            name: "Age".to_owned(),
            kind: "date".to_owned(),
            format: String::new(),
            description: "CreationTimestamp is a timestamp representing the server time when this object was created. \
                          It is not guaranteed to be set in happens-before order across separate operations. Clients \
                          may not set this value. It is represented in RFC3339 form and is in UTC.\n\nPopulated by \
                          the system. Read-only. Null for lists. More info: \
                          https://git.k8s.io/community/contributors/devel/sig-architecture/api-conventions.md#metadata"
                .to_owned(),
            priority: 0,
            path: JsonPath::parse(".metadata.creationTimestamp"),
        }];
    }
    version.additional_printer_columns.iter().filter_map(PrinterColumn::new).collect()
}

// === impl PrinterColumn ===

impl PrinterColumn {
    fn new(column: &Column) -> Option<PrinterColumn> {
        let path = JsonPath::parse(&column.json_path)?;
        let description = if column.description.is_empty() {
            format!("Custom resource definition column (in JSONPath format): {}", column.json_path)
        } else {
            column.description.clone()
        };
        Some(PrinterColumn {
            name: column.name.clone(),
            kind: column.kind.clone(),
            format: column.format.clone(),
            description,
            priority: column.priority,
            path: Some(path),
        })
    }

    /// The cell of an object. The caller formats dates as ages with `age`.
    pub fn cell(&self, object: &Value, age: impl Fn(Timestamp) -> String) -> Value {
        let Some(value) = self.path.as_ref().and_then(|path| path.first(object)) else { return Value::Null };
        match (self.kind.as_str(), value) {
            (_, Value::Null) => Value::Null,
            ("string", Value::String(_)) => value.clone(),
            ("string", other) => Value::String(other.to_string()),
            ("integer", Value::Number(number)) => integer(number),
            ("number", Value::Number(_)) | ("boolean", Value::Bool(_)) => value.clone(),
            ("date", Value::String(text)) => match text.parse::<Timestamp>() {
                Ok(at) => Value::String(age(at)),
                Err(_) => Value::String("<invalid>".to_owned()),
            },
            _ => Value::Null,
        }
    }
}

/// The number without its fraction.
fn integer(number: &serde_json::Number) -> Value {
    match (number.as_i64(), number.as_f64()) {
        (Some(whole), _) => whole.into(),
        (None, Some(float)) => {
            #[expect(clippy::cast_possible_truncation, reason = "saturates, as intended")]
            let whole = float as i64;
            whole.into()
        }
        _ => Value::Null,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn cells_have_the_type_of_their_column() {
        let object = json!({"a": "text", "b": 1.5, "c": true, "d": {"e": 1}, "t": "2024-01-01T00:00:00Z"});
        let cell = |kind: &str, path: &str| {
            let column =
                Column { name: "x".into(), kind: kind.into(), json_path: path.into(), ..Column::default() };
            PrinterColumn::new(&column).unwrap().cell(&object, |_| "1d".to_owned())
        };
        assert_eq!(cell("string", ".a"), json!("text"));
        assert_eq!(cell("string", ".d"), json!(r#"{"e":1}"#));
        assert_eq!(cell("integer", ".b"), json!(1));
        assert_eq!(cell("number", ".b"), json!(1.5));
        assert_eq!(cell("boolean", ".a"), Value::Null);
        assert_eq!(cell("date", ".t"), json!("1d"));
        assert_eq!(cell("date", ".a"), json!("<invalid>"));
        assert_eq!(cell("string", ".missing"), Value::Null);
    }

    #[test]
    fn a_column_with_a_refused_path_is_left_out() {
        let column = |path: String| Column {
            name: "x".into(),
            kind: "string".into(),
            json_path: path,
            ..Column::default()
        };
        let columns = vec![column(".a".to_owned()), column("[?(@".repeat(100_000))];
        let version = Version { additional_printer_columns: columns, ..Version::default() };
        assert_eq!(of_version(&version).len(), 1);
    }
}

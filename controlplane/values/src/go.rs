//! Booleans as Go reads them, and the names that Go's JSON decoder gives to values. Annotations, options and messages of
//! the API use both.

use serde_json::Value;

/// A boolean in one of the spellings of `strconv.ParseBool`.
#[must_use]
pub fn parse_bool(text: &str) -> Option<bool> {
    match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Some(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Some(false),
        _ => None,
    }
}

/// The kind of a value in the messages of `encoding/json`.
#[must_use]
pub fn json_kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "bool",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn booleans_have_the_spellings_of_go() {
        for text in ["1", "t", "T", "true", "TRUE", "True"] {
            assert_eq!(parse_bool(text), Some(true), "{text}");
        }
        for text in ["0", "f", "F", "false", "FALSE", "False"] {
            assert_eq!(parse_bool(text), Some(false), "{text}");
        }
        for text in ["", "yes", "tRUE", " true", "2"] {
            assert_eq!(parse_bool(text), None, "{text:?}");
        }
    }

    #[test]
    fn kinds_have_the_names_of_go() {
        let kinds = json!([null, true, 1.5, "a", [], {}]);
        let names: Vec<_> = kinds.as_array().unwrap().iter().map(json_kind).collect();
        assert_eq!(names, ["null", "bool", "number", "string", "array", "object"]);
    }
}

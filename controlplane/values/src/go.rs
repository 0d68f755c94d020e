//! Booleans as Go reads them, quoted text as Go prints it, and Go's names of JSON kinds and architectures. Annotations,
//! options, messages and labels of the API use them.

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

/// The text in quotation marks, as `%q` of `fmt` prints it.
#[must_use]
pub fn quoted(text: &str) -> String {
    let mut made = String::with_capacity(text.len() + 2);
    made.push('"');
    for character in text.chars() {
        match character {
            '"' | '\\' => made.extend(['\\', character]),
            '\u{7}' => made.push_str("\\a"),
            '\u{8}' => made.push_str("\\b"),
            '\u{c}' => made.push_str("\\f"),
            '\n' => made.push_str("\\n"),
            '\r' => made.push_str("\\r"),
            '\t' => made.push_str("\\t"),
            '\u{b}' => made.push_str("\\v"),
            _ if character.is_ascii_control() => {
                made.push_str(&format!("\\x{:02x}", u32::from(character)));
            }
            _ if character.is_control() => made.push_str(&format!("\\u{:04x}", u32::from(character))),
            _ => made.push(character),
        }
    }
    made.push('"');
    made
}

/// The architecture of this program: `GOARCH`. Labels of nodes and image indexes use it.
#[must_use]
pub fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        "x86" => "386",
        "powerpc64" => "ppc64le",
        other => other,
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

    #[test]
    fn quoted_text_has_the_escapes_of_go() {
        let text = "a\"\\\u{7}\u{8}\u{c}\n\r\t\u{b}\u{1}\u{7f}\u{85}\u{e9}";
        assert_eq!(quoted(text), "\"a\\\"\\\\\\a\\b\\f\\n\\r\\t\\v\\x01\\x7f\\u0085\u{e9}\"");
    }

    #[test]
    fn the_architecture_has_the_name_of_go() {
        assert!(!["x86_64", "aarch64", "x86", "powerpc64"].contains(&architecture()));
    }
}

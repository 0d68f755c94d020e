//! Lists of strings in JSON values.

use serde_json::Value;

/// The strings in a list. Elements of other types are skipped. Empty if the value is not a list.
pub fn texts(list: &Value) -> impl Iterator<Item = &str> {
    list.as_array().into_iter().flatten().filter_map(Value::as_str)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_strings_of_lists_are_returned() {
        let of = |value: Value| texts(&value).map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(of(json!(["a", 1, "b", null])), ["a", "b"]);
        assert!(of(json!("a")).is_empty() && of(Value::Null).is_empty());
    }
}

//! Merge patches (RFC 7386) between two values.

use serde_json::{Map, Value};

/// The merge patch that changes `old` to `new`. Removed fields are null in it. `None` if the values are equal.
#[must_use]
pub fn difference(old: &Value, new: &Value) -> Option<Value> {
    let (Value::Object(old), Value::Object(new)) = (old, new) else {
        return (old != new).then(|| new.clone());
    };
    let mut patch = Map::new();
    for name in old.keys().filter(|name| !new.contains_key(*name)) {
        patch.insert(name.clone(), Value::Null);
    }
    for (name, value) in new {
        let before = old.get(name).unwrap_or(&Value::Null);
        if let Some(change) = difference(before, value) {
            patch.insert(name.clone(), change);
        }
    }
    (!patch.is_empty()).then_some(Value::Object(patch))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_patch_has_changed_fields_and_null_for_removed_ones() {
        let old = json!({"a": 1, "b": {"c": [1], "d": 2}, "e": 3});
        assert_eq!(difference(&old, &old), None);
        let new = json!({"a": 1, "b": {"c": [2]}, "f": {}});
        assert_eq!(difference(&old, &new), Some(json!({"b": {"c": [2], "d": null}, "e": null, "f": {}})));
    }
}

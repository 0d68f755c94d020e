//! Uniqueness in lists of type `set` and `map` (`apiserver/schema/listtype`).

use std::collections::HashMap;

use serde_json::{Map, Value};

use crate::schema::Schema;
use crate::violation::{Path, Violations};

/// Checks that elements of sets and keys of maps are unique.
pub(crate) fn validate(object: &Value, schema: &Schema, violations: &mut Violations) {
    node(object, schema, &Path::default(), violations);
}

fn node(value: &Value, schema: &Schema, path: &Path, violations: &mut Violations) {
    match value {
        Value::Object(map) => {
            for (name, inner) in map {
                if let Some(property) = schema.properties.get(name.as_str()) {
                    node(inner, property, &path.field(name), violations);
                } else if let Some(additional) = schema.additional_schema() {
                    node(inner, additional, &path.key(name), violations);
                }
            }
        }
        Value::Array(list) => {
            match schema.list_type.as_deref() {
                Some("set") => {
                    for index in repeated(list.iter().map(Value::to_string)) {
                        violations.duplicate(&path.index(index), &list[index]);
                    }
                }
                Some("map") => map_keys(list, schema, path, violations),
                _ => {}
            }
            if let Some(item) = schema.item() {
                for (index, inner) in list.iter().enumerate() {
                    node(inner, item, &path.index(index), violations);
                }
            }
        }
        _ => {}
    }
}

fn map_keys(list: &[Value], schema: &Schema, path: &Path, violations: &mut Violations) {
    if let Some(index) = list.iter().position(|item| !item.is_null() && !item.is_object()) {
        let detail = "must be an object for an array of list-type map";
        violations.invalid(&path.index(index), &list[index], detail);
        return;
    }
    let keys: Vec<Value> = list.iter().map(|item| key(item, schema)).collect();
    for index in repeated(keys.iter().map(Value::to_string)) {
        violations.duplicate(&path.index(index), &keys[index]);
    }
}

fn key(item: &Value, schema: &Schema) -> Value {
    let fields = schema.list_keys.iter();
    let present = fields.filter_map(|name| item.get(&**name).map(|value| (name.to_string(), value.clone())));
    Value::Object(present.collect::<Map<String, Value>>())
}

/// Indexes of the second occurrences of repeated texts. As upstream, later occurrences are not reported.
fn repeated(texts: impl Iterator<Item = String>) -> Vec<usize> {
    let mut seen: HashMap<String, usize> = HashMap::new();
    let mut found = Vec::new();
    for (index, text) in texts.enumerate() {
        let times = seen.entry(text).or_default();
        *times += 1;
        if *times == 2 {
            found.push(index);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn duplicates_are_reported_once() {
        let schema = Schema::parse(&json!({"type": "object", "properties": {
            "set": {"type": "array", "x-kubernetes-list-type": "set", "items": {"type": "string"}},
            "map": {"type": "array", "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["k"],
                "items": {"type": "object", "properties": {"k": {"type": "string"}}}}}}))
        .unwrap();
        let mut violations = Violations::default();
        let object =
            json!({"set": ["a", "b", "a", "a"], "map": [{"k": "x"}, {"k": "y"}, {"k": "x", "z": 1}]});
        validate(&object, &schema, &mut violations);
        let found: Vec<String> =
            violations.as_slice().iter().map(|cause| format!("{}: {}", cause.field, cause.message)).collect();
        assert_eq!(found, [r#"map[2]: Duplicate value: {"k":"x"}"#, r#"set[2]: Duplicate value: "a""#]);
    }
}

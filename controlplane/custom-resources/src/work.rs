//! Estimated work of the pruning, defaulting and validation of an object. The caller must not do heavy work on an async
//! worker.
//!
//! The estimate is an upper bound. It does not include rules in CEL. For messages it includes only the texts of the
//! schema. It stops as soon as an object is heavy.

use serde_json::{Map, Value};

use crate::schema::{Checks, Schema};

/// Work above which an object is heavy. A unit is about one nanosecond.
const MAX_LIGHT: usize = 1_000_000;

/// Cost of rules in CEL that corresponds to [`MAX_LIGHT`]. A unit of cost is about 50 nanoseconds.
pub(crate) const MAX_LIGHT_COST: u64 = 20_000;

/// Maximum work of reading a value whose rules an async worker may evaluate to measure their cost. One step of an
/// expression, such as a match with a pattern, may process the whole value.
const MAX_TRIED: usize = 32 << 10;

/// Work of one value and one node of the schema, without the texts of the value.
const NODE: usize = 200;

/// Work of one value that the schema does not describe.
const OPAQUE: usize = 20;

/// Work of one required field, and of one allowed value.
const NAME: usize = 20;

/// Maximum bytes of the allowed values in a message.
pub(crate) const MAX_WORDS: usize = 8192;

/// Whether the work of these objects may take more than about a millisecond.
pub(crate) fn is_heavy<'a>(objects: impl IntoIterator<Item = &'a Value>, schema: &Schema) -> bool {
    let mut estimate = Estimate { left: MAX_LIGHT };
    !objects.into_iter().all(|object| estimate.value(object, schema))
}

/// Whether the values are so short that an async worker may evaluate their rules to measure the cost.
pub(crate) fn is_short<'a>(values: impl IntoIterator<Item = &'a Value>) -> bool {
    let mut estimate = Estimate { left: MAX_TRIED };
    values.into_iter().all(|value| estimate.opaque(value))
}

/// The work of a comparison with an equal value, in units of a few nanoseconds.
pub(crate) fn comparison(value: &Value) -> usize {
    match value {
        Value::Object(map) => {
            1 + map.iter().map(|(name, inner)| name.len() / 16 + comparison(inner)).sum::<usize>()
        }
        Value::Array(list) => 1 + list.iter().map(comparison).sum::<usize>(),
        Value::String(text) => 1 + text.len() / 16,
        _ => 1,
    }
}

/// The work of each byte of a text.
fn work_of_byte(schema: &Schema) -> usize {
    let format = if schema.format.is_empty() { 0 } else { 20 };
    let pattern = schema.checks.as_ref().and_then(|checks| checks.pattern.as_ref());
    1 + format + pattern.map_or(0, |pattern| pattern.work)
}

/// The work of a message that lists the allowed values.
fn message(allowed: &[Value]) -> usize {
    let len = |value: &Value| match value {
        Value::String(text) => text.len(),
        Value::Array(_) | Value::Object(_) => MAX_WORDS,
        _ => 8,
    };
    2 * allowed.iter().map(len).fold(0, usize::saturating_add).min(MAX_WORDS)
}

/// The estimate so far. Each method returns false if the objects are heavy.
struct Estimate {
    /// The remaining part of [`MAX_LIGHT`].
    left: usize,
}

// === impl Estimate ===

impl Estimate {
    fn charge(&mut self, work: usize) -> bool {
        let left = self.left.checked_sub(work);
        self.left = left.unwrap_or(0);
        left.is_some()
    }

    fn value(&mut self, value: &Value, schema: &Schema) -> bool {
        // Defaulting replaces null, also in lists and in fields without a name in the schema.
        let default = schema.default.as_ref().filter(|_| value.is_null() && !schema.nullable);
        let value = default.unwrap_or(value);
        let is_light =
            self.charge(NODE) && schema.checks.as_ref().is_none_or(|checks| self.checks(value, checks));
        is_light
            && match value {
                Value::String(text) => self.text(text, schema),
                Value::Array(list) => self.list(list, schema),
                Value::Object(map) => self.object(map, schema),
                _ => true,
            }
    }

    fn text(&mut self, text: &str, schema: &Schema) -> bool {
        // A message contains several copies of the pattern.
        let pattern = schema.checks.as_ref().and_then(|checks| checks.pattern.as_ref());
        let message = pattern.map_or(0, |pattern| 2 * pattern.text.len());
        self.charge(message) && self.charge(text.len().saturating_mul(work_of_byte(schema)))
    }

    /// Adds the work of checks of a value against other schemas and lists.
    fn checks(&mut self, value: &Value, checks: &Checks) -> bool {
        let known = checks.one_of_values.as_ref().map_or(0, Vec::len);
        let names = checks.required.len().saturating_add(known).saturating_mul(NAME);
        let lists = [&checks.all_of, &checks.any_of, &checks.one_of];
        self.charge(names)
            && self.charge(checks.one_of_values.as_deref().map_or(0, message))
            && (known == 0 || self.opaque(value) && self.charge(known.saturating_mul(comparison(value))))
            && lists.into_iter().flatten().chain(checks.not.as_deref()).all(|inner| self.value(value, inner))
    }

    fn list(&mut self, list: &[Value], schema: &Schema) -> bool {
        // Unique items are compared as texts.
        let is_unique =
            schema.list_type.is_some() || schema.checks.as_ref().is_some_and(|checks| checks.unique_items);
        (!is_unique || list.iter().all(|inner| self.opaque(inner)))
            && list.iter().all(|inner| self.described(inner, schema.item()))
    }

    fn object(&mut self, map: &Map<String, Value>, schema: &Schema) -> bool {
        map.iter().all(|(name, inner)| self.charge(name.len()) && self.described(inner, schema.field(name)))
            && schema.properties_with_default().all(|property| {
                map.contains_key(property.name) || self.value(property.default, property.schema)
            })
    }

    fn described(&mut self, value: &Value, schema: Option<&Schema>) -> bool {
        match schema {
            Some(schema) => self.value(value, schema),
            None => self.opaque(value),
        }
    }

    fn opaque(&mut self, value: &Value) -> bool {
        self.charge(OPAQUE)
            && match value {
                Value::Object(map) => {
                    map.iter().all(|(name, inner)| self.charge(name.len()) && self.opaque(inner))
                }
                Value::Array(list) => list.iter().all(|inner| self.opaque(inner)),
                Value::String(text) => self.charge(text.len()),
                _ => true,
            }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn heavy(schema: &Value, object: &Value) -> bool {
        is_heavy([object], &Schema::parse(schema).unwrap())
    }

    #[test]
    fn an_ordinary_object_of_a_large_schema_is_light() {
        let field = json!({"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63});
        let fields: Map<String, Value> =
            (0..1000).map(|number| (format!("field{number}"), field.clone())).collect();
        let spec = json!({"type": "object", "properties": fields, "required": ["field0"]});
        let schema = json!({"type": "object", "properties": {"spec": spec}});
        let set: Map<String, Value> =
            (0..30).map(|number| (format!("field{number}"), json!("a-name-of-ordinary-length"))).collect();
        let metadata =
            json!({"name": "a", "labels": {"app": "a"}, "annotations": {"note": "x".repeat(10_000)}});
        assert!(!heavy(&schema, &json!({"kind": "A", "metadata": metadata, "spec": set})));
    }

    #[test]
    fn many_or_large_patterns_are_heavy_for_long_texts() {
        let many = json!({"type": "string", "allOf": vec![json!({"pattern": "[ab]"}); 100]});
        assert!(heavy(&many, &json!("b".repeat(1000))));
        assert!(!heavy(&many, &json!("b".repeat(100))));
        let large = json!({"type": "string", "pattern": "^([ab]{100}){100}c"});
        assert!(heavy(&large, &json!("b".repeat(1000))));
        assert!(!heavy(&large, &json!("b".repeat(100))));
        let list = json!({"type": "array", "items": large});
        assert!(heavy(&list, &json!(vec!["b".repeat(100); 10])));
    }

    #[test]
    fn large_objects_and_lists_of_the_schema_are_heavy() {
        let names: Vec<String> = (0..10_000).map(|number| format!("n{number}")).collect();
        let items = |item: Value| json!({"type": "array", "items": item});
        let list = |count: usize| json!(vec![json!({}); count]);
        assert!(heavy(&items(json!({"type": "object"})), &list(10_000)));
        assert!(!heavy(&items(json!({"type": "object"})), &list(100)));
        assert!(heavy(&items(json!({"type": "object", "required": names})), &list(100)));
        assert!(heavy(&items(json!({"enum": names})), &list(100)));
        assert!(heavy(&items(json!({"not": {"anyOf": vec![json!({}); 1000]}})), &list(100)));
        let kept = json!({"type": "object", "x-kubernetes-preserve-unknown-fields": true});
        assert!(heavy(&kept, &json!({"a": "x".repeat(2 << 20)})), "fields that the schema does not describe");
        let set = json!({"type": "array", "x-kubernetes-list-type": "set"});
        assert!(heavy(&set, &json!(vec!["a"; 50_000])));
    }

    #[test]
    fn a_small_object_with_large_defaults_is_heavy() {
        let item = json!({"type": "object", "properties": {"a": {"type": "array", "default": vec![1; 1000],
            "items": {"type": "integer"}}}});
        let schema = json!({"type": "array", "items": item});
        assert!(heavy(&schema, &json!(vec![json!({}); 10])));
        assert!(!heavy(&schema, &json!(vec![json!({"a": []}); 10])));
        let nested = json!({"type": "object", "properties": {"b": {"type": "array", "default": vec![json!({}); 10],
            "items": item}}});
        assert!(heavy(&nested, &json!({})), "defaults of a default");
        assert!(heavy(&nested, &json!({"b": null})), "a default instead of null");
        let mut element = json!({"type": "array", "default": vec![1; 1000], "items": {"type": "integer"}});
        let nulls = json!(vec![Value::Null; 10]);
        assert!(heavy(&json!({"type": "array", "items": element}), &nulls));
        element["nullable"] = true.into();
        assert!(!heavy(&json!({"type": "array", "items": element}), &nulls), "null is kept");
    }

    #[test]
    fn messages_with_long_texts_of_the_schema_are_heavy() {
        let items = |item: Value| json!({"type": "array", "items": item});
        let list = |count: usize| json!(vec![""; count]);
        let long = "x".repeat(100_000);
        for allowed in [json!(long), json!({ "a": long })] {
            assert!(heavy(&items(json!({"enum": [allowed]})), &list(100)));
            assert!(!heavy(&items(json!({"enum": [allowed]})), &list(10)));
        }
        assert!(!heavy(&items(json!({"enum": ["TCP", "UDP"]})), &list(1000)), "short values");
        let pattern = format!("^[{}]$", "ab".repeat(10_000));
        assert!(heavy(&items(json!({"type": "string", "pattern": pattern})), &list(100)));
        assert!(!heavy(&items(json!({"type": "string", "pattern": pattern})), &list(10)));
    }

    #[test]
    fn the_old_object_counts() {
        let schema = Schema::parse(&json!({"type": "array", "items": {"type": "integer"}})).unwrap();
        let [small, half, large] = [1, 3000, 10_000].map(|count| json!(vec![1; count]));
        assert!(!is_heavy([&small, &half], &schema));
        assert!(is_heavy([&small, &large], &schema));
        assert!(is_heavy([&half, &half], &schema));
    }
}

//! Defaulting of custom resources (`apiserver/schema/defaulting`).

use serde_json::Value;

use crate::schema::{DefaultedProperty, Schema};

/// Maximum number of copied default nodes of one object. Without this limit, a small object could copy a large default
/// very often.
const MAX_COPIED: usize = 1_000_000;

/// The defaults of an object need too much memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooManyDefaults;

/// Removes the nulls of fields that are not nullable and have no default. Then sets the defaults.
pub(crate) fn default(object: &mut Value, schema: &Schema) -> Result<(), TooManyDefaults> {
    drop_nulls(object, schema);
    Defaulter { left: MAX_COPIED }.value(object, schema)
}

/// Whether the value has all defaults.
pub(crate) fn is_complete(value: &Value, schema: &Schema) -> bool {
    match value {
        Value::Object(map) => {
            let present = |name: &str, property: &Schema| {
                map.get(name).is_some_and(|old| !old.is_null() || property.nullable)
            };
            schema.properties_with_default().all(|property| present(property.name, property.schema))
                && map
                    .iter()
                    .all(|(name, inner)| schema.field(name).is_none_or(|field| is_complete(inner, field)))
        }
        Value::Array(list) => {
            schema.item().is_none_or(|item| list.iter().all(|inner| is_complete(inner, item)))
        }
        _ => true,
    }
}

fn drop_nulls(value: &mut Value, schema: &Schema) {
    match value {
        Value::Object(map) => map.retain(|name, inner| match schema.field(name) {
            Some(field) if inner.is_null() => field.nullable || field.default.is_some(),
            Some(field) => {
                drop_nulls(inner, field);
                true
            }
            None => true,
        }),
        Value::Array(list) => {
            if let Some(item) = schema.item() {
                for inner in list {
                    drop_nulls(inner, item);
                }
            }
        }
        _ => {}
    }
}

struct Defaulter {
    left: usize,
}

impl Defaulter {
    fn value(&mut self, value: &mut Value, schema: &Schema) -> Result<(), TooManyDefaults> {
        match value {
            Value::Object(map) => {
                for DefaultedProperty { name, default, schema } in schema.properties_with_default() {
                    let missing = map.get(name).is_none_or(|old| old.is_null() && !schema.nullable);
                    if missing {
                        map.insert(name.to_owned(), self.copy(default)?);
                    }
                }
                for (name, inner) in map.iter_mut() {
                    let Some(field) = schema.field(name) else { continue };
                    self.element(inner, field)?;
                }
                Ok(())
            }
            Value::Array(list) => match schema.item() {
                Some(item) => list.iter_mut().try_for_each(|inner| self.element(inner, item)),
                None => Ok(()),
            },
            _ => Ok(()),
        }
    }

    fn element(&mut self, value: &mut Value, schema: &Schema) -> Result<(), TooManyDefaults> {
        if value.is_null()
            && !schema.nullable
            && let Some(default) = &schema.default
        {
            *value = self.copy(default)?;
        }
        self.value(value, schema)
    }

    fn copy(&mut self, default: &Value) -> Result<Value, TooManyDefaults> {
        self.left = self.left.checked_sub(size(default)).ok_or(TooManyDefaults)?;
        Ok(default.clone())
    }
}

/// Number of nodes and bytes of text of a value.
fn size(value: &Value) -> usize {
    match value {
        Value::Object(map) => 1 + map.iter().map(|(name, inner)| name.len() + size(inner)).sum::<usize>(),
        Value::Array(list) => 1 + list.iter().map(size).sum::<usize>(),
        Value::String(text) => 1 + text.len(),
        _ => 1,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn schema() -> Schema {
        Schema::parse(&json!({"type": "object", "properties": {
            "a": {"type": "string", "default": "A"},
            "n": {"type": "string", "nullable": true, "default": "N"},
            "plain": {"type": "string"},
            "nested": {"type": "object", "default": {}, "properties": {"b": {"type": "integer", "default": 1}}},
            "list": {"type": "array", "items": {"type": "object", "properties": {"c": {"type": "string", "default": "C"}}}},
            "map": {"type": "object", "additionalProperties": {"type": "object", "properties": {"d": {"type": "string", "default": "D"}}}},
        }}))
        .unwrap()
    }

    #[test]
    fn defaults_reach_nested_fields() {
        let mut object = json!({"list": [{}], "map": {"x": {}}});
        default(&mut object, &schema()).unwrap();
        assert_eq!(
            object,
            json!({"a": "A", "n": "N", "nested": {"b": 1}, "list": [{"c": "C"}], "map": {"x": {"d": "D"}}})
        );
    }

    #[test]
    fn nulls_of_fields_that_are_not_nullable_are_removed() {
        let mut object = json!({"a": null, "n": null, "plain": null});
        default(&mut object, &schema()).unwrap();
        assert_eq!(object, json!({"a": "A", "n": null, "nested": {"b": 1}}));
    }

    #[test]
    fn a_large_default_cannot_be_multiplied_without_end() {
        let schema = Schema::parse(&json!({"type": "array", "items": {"type": "object", "properties": {
            "x": {"type": "string", "default": "y".repeat(100_000)}}}}))
        .unwrap();
        let mut object = Value::Array(vec![json!({}); 100]);
        assert_eq!(default(&mut object, &schema), Err(TooManyDefaults));
        assert!(!is_complete(&object, &schema));
    }
}

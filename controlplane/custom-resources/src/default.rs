//! Defaulting of custom resources (`apiserver/schema/defaulting`).

use serde_json::Value;

use crate::schema::{DefaultedProperty, Schema};

/// Maximum size of the copied defaults of one object, by [`size`]. Without this limit, a small object could copy a
/// large default very often. At the limit the defaults take about 50 MB of memory.
const MAX_COPIED: usize = 1_000_000;
/// Size of an object with fields, without its fields. Its first field allocates a node of a tree, which has room for 11
/// fields.
const OBJECT: usize = 12;

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
                        let node = if map.is_empty() { OBJECT } else { 0 };
                        self.charge(node + name.len())?;
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
        self.charge(size(default))?;
        Ok(default.clone())
    }

    fn charge(&mut self, size: usize) -> Result<(), TooManyDefaults> {
        self.left = self.left.checked_sub(size).ok_or(TooManyDefaults)?;
        Ok(())
    }
}

/// Number of nodes and bytes of text of a value. An object with fields counts as [`OBJECT`] nodes.
fn size(value: &Value) -> usize {
    match value {
        Value::Object(map) if map.is_empty() => 1,
        Value::Object(map) => {
            OBJECT + map.iter().map(|(name, inner)| name.len() + size(inner)).sum::<usize>()
        }
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

    /// The memory of `{"x": 1}` is that of a dozen values without fields.
    #[test]
    fn defaults_with_long_names_and_in_many_empty_objects_are_limited() {
        let schema = |name: &str| {
            Schema::parse(&json!({"type": "array", "items": {"type": "object", "properties": {
                name: {"type": "integer", "default": 1}}}}))
            .unwrap()
        };
        let (short, long) = (schema("x"), schema(&"x".repeat(1000)));
        let objects = |count: usize| Value::Array(vec![json!({}); count]);
        assert_eq!(default(&mut objects(50_000), &short), Ok(()));
        assert_eq!(default(&mut objects(100_000), &short), Err(TooManyDefaults));
        assert_eq!(default(&mut objects(500), &long), Ok(()));
        assert_eq!(default(&mut objects(1000), &long), Err(TooManyDefaults));
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

//! The fields that the writer of a value owns.

use serde_json::Value;

use super::{TypedValue, identity};
use crate::{
    field_set::FieldSet,
    path::PathElement,
    schema::{Schema, TypeId},
};

/// The fields of an object: each leaf, each element of a list, each entry of a map. Declared fields that are objects
/// are not owned themselves, unless they are empty or null.
pub(crate) fn fields_of(schema: &Schema, of: TypeId, value: &Value) -> FieldSet {
    let mut fields = FieldSet::default();
    match TypedValue::new(schema, of, value) {
        TypedValue::Leaf | TypedValue::Map(None) => {}
        TypedValue::Map(Some(object)) => {
            for (name, part) in object {
                let element = PathElement::field(name);
                let below = schema.below(of, &element);
                fields.insert_below(&element, fields_of(schema, below, part));
                if is_owned(schema, below, part) || !schema.declares(of, name) {
                    fields.insert_element(element);
                }
            }
        }
        TypedValue::List(items) => {
            for (index, item) in (0..).zip(items) {
                let element = identity(schema, of, item).unwrap_or(PathElement::Index(index));
                fields.insert_below(&element, fields_of(schema, schema.below(of, &element), item));
                fields.insert_element(element);
            }
        }
    }
    fields
}

/// Whether a declared field is owned itself.
fn is_owned(schema: &Schema, of: TypeId, value: &Value) -> bool {
    let is_empty_object = value.as_object().is_some_and(serde_json::Map::is_empty);
    value.is_null() || is_empty_object || matches!(TypedValue::new(schema, of, value), TypedValue::Leaf)
}

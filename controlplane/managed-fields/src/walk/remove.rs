//! Removes fields from an object.

use serde_json::{Map, Value};

use super::{TypedValue, identity};
use crate::{
    field_set::FieldSet,
    path::PathElement,
    schema::{Schema, TypeId},
};

/// The value without the fields of a set. Objects and lists stay when their last part is removed.
pub(crate) fn remove(schema: &Schema, of: TypeId, value: &Value, fields: &FieldSet) -> Value {
    if fields.is_empty() {
        return value.clone();
    }
    match TypedValue::new(schema, of, value) {
        TypedValue::Leaf | TypedValue::Map(None) => value.clone(),
        TypedValue::Map(Some(object)) => {
            let kept = object.iter().filter_map(|(name, part)| {
                let kept = part_of(schema, of, &PathElement::field(name), part, fields)?;
                Some((name.clone(), kept))
            });
            Value::Object(kept.collect::<Map<_, _>>())
        }
        TypedValue::List(items) => {
            let kept = (0..).zip(items).filter_map(|(index, item)| {
                let element = identity(schema, of, item).unwrap_or(PathElement::Index(index));
                part_of(schema, of, &element, item, fields)
            });
            Value::Array(kept.collect())
        }
    }
}

/// A part without the fields of the set. `None` if the part itself is in the set.
fn part_of(
    schema: &Schema,
    of: TypeId,
    element: &PathElement,
    part: &Value,
    fields: &FieldSet,
) -> Option<Value> {
    (!fields.has(element)).then(|| remove(schema, schema.below(of, element), part, fields.below(element)))
}

//! The canonical form of an object: exactly the fields that Go writes.
//!
//! Go decodes into structs. When it encodes, it omits most fields that are zero or empty, and writes some fields that
//! the client omitted. The canonical form also omits fields that Go writes as null, because clients read null as
//! absent.

use serde_json::{Map, Value};

use super::METADATA;
use super::model::{Definition, Presence, Property, Schemas, ValueType};

/// The treatment of fields that the definition does not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum UnknownFields {
    Keep,
    /// All unknown fields are removed except `metadata.initializers`, which no definition has.
    Remove,
}

/// Makes an object canonical. Values that do not have the type of their field are unchanged. Returns whether an unknown
/// field was removed.
pub(super) fn object(
    schemas: &Schemas,
    definition: &Definition,
    map: &mut Map<String, Value>,
    unknown: UnknownFields,
) -> bool {
    let mut removed = false;
    map.retain(|name, value| {
        let Some(property) = definition.property(name) else {
            let is_kept = unknown == UnknownFields::Keep || is_initializers(definition, name);
            removed |= !is_kept;
            return is_kept;
        };
        if !matches!(property.value_type, ValueType::Text | ValueType::Any) {
            removed |= below(schemas, &property.value_type, value, unknown);
        }
        match property.presence {
            Presence::NotZero => !is_zero(value),
            Presence::Present | Presence::Zero | Presence::Null => !value.is_null(),
        }
    });
    for index in &definition.always {
        let Some(property) = definition.properties.get(usize::from(*index)) else { continue };
        if !map.contains_key(&*property.name) {
            map.insert(property.name.clone().into(), zero_value(schemas, property));
        }
    }
    removed
}

fn is_initializers(definition: &Definition, name: &str) -> bool {
    name == "initializers" && *definition.name == *METADATA
}

fn below(schemas: &Schemas, value_type: &ValueType, value: &mut Value, unknown: UnknownFields) -> bool {
    match (value_type, value) {
        (ValueType::Object(id) | ValueType::Choice(id), Value::Object(map)) => {
            object(schemas, schemas.get(*id), map, unknown)
        }
        (ValueType::List(item), Value::Array(list)) if is_deep(item) => {
            list.iter_mut().fold(false, |found, element| below(schemas, item, element, unknown) | found)
        }
        (ValueType::Map(item), Value::Object(map)) if is_deep(item) => {
            map.values_mut().fold(false, |found, element| below(schemas, item, element, unknown) | found)
        }
        _ => false,
    }
}

/// Whether values of a type can have fields.
fn is_deep(value_type: &ValueType) -> bool {
    matches!(value_type, ValueType::Object(_) | ValueType::Choice(_) | ValueType::List(_) | ValueType::Map(_))
}

fn is_zero(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(flag) => !flag,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
    }
}

/// The zero value of a field that Go always writes.
fn zero_value(schemas: &Schemas, property: &Property) -> Value {
    match &property.value_type {
        ValueType::Bool => false.into(),
        ValueType::Int32 | ValueType::Int64 | ValueType::Number | ValueType::IntOrString => 0.into(),
        ValueType::Text | ValueType::Bytes => "".into(),
        ValueType::Quantity => "0".into(),
        ValueType::Object(id) => {
            let mut map = Map::new();
            object(schemas, schemas.get(*id), &mut map, UnknownFields::Keep);
            map.into()
        }
        ValueType::Any
        | ValueType::Time
        | ValueType::MicroTime
        | ValueType::Choice(_)
        | ValueType::List(_)
        | ValueType::Map(_) => Value::Null,
    }
}

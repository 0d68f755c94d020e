//! The canonical form of an object: exactly the fields that Go writes.
//!
//! Go decodes into structs. When it encodes, it omits most fields that are zero or empty, and writes some fields that
//! the client omitted. The canonical form omits fields that Go writes as null: clients read both as absent.

use serde_json::{Map, Value};

use super::model::{Definition, Presence, Property, Schemas, ValueType};

/// Makes an object canonical. Values that do not have the type of their field are unchanged.
pub(super) fn object(schemas: &Schemas, definition: &Definition, map: &mut Map<String, Value>) {
    map.retain(|name, value| {
        let Some(property) = definition.property(name) else { return true };
        if !matches!(property.value_type, ValueType::Text | ValueType::Any) {
            below(schemas, &property.value_type, value);
        }
        match property.presence {
            Presence::NotZero => !is_zero(value),
            Presence::Present | Presence::Zero | Presence::Null => !value.is_null(),
        }
    });
    for index in &definition.always {
        let Some(property) = definition.properties.get(usize::from(*index)) else { continue };
        if !map.contains_key(&*property.name) {
            map.insert(property.name.clone().into(), absent(schemas, property));
        }
    }
}

fn below(schemas: &Schemas, value_type: &ValueType, value: &mut Value) {
    match (value_type, value) {
        (ValueType::Object(id) | ValueType::Choice(id), Value::Object(map)) => {
            object(schemas, schemas.get(*id), map)
        }
        (ValueType::List(item), Value::Array(list)) if is_deep(item) => {
            list.iter_mut().for_each(|element| below(schemas, item, element));
        }
        (ValueType::Map(item), Value::Object(map)) if is_deep(item) => {
            map.values_mut().for_each(|element| below(schemas, item, element));
        }
        _ => {}
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
fn absent(schemas: &Schemas, property: &Property) -> Value {
    match &property.value_type {
        ValueType::Bool => false.into(),
        ValueType::Int32 | ValueType::Int64 | ValueType::Number | ValueType::IntOrString => 0.into(),
        ValueType::Text | ValueType::Bytes => "".into(),
        ValueType::Quantity => "0".into(),
        ValueType::Object(id) => {
            let mut map = Map::new();
            object(schemas, schemas.get(*id), &mut map);
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

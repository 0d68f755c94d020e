//! The canonical form of an object: exactly the fields that Go writes.
//!
//! Go decodes into structs. When it encodes, it omits most fields that are zero or empty, and writes some fields that
//! the client omitted. The canonical form omits fields that Go writes as null: clients read both as absent.

use serde_json::{Map, Value};

use super::model::{Definition, Presence, Property, Schemas, Shape};

/// Makes an object canonical. Values that do not have the type of their field are unchanged.
pub(super) fn object(schemas: &Schemas, definition: &Definition, map: &mut Map<String, Value>) {
    map.retain(|name, value| {
        let Some(property) = definition.property(name) else { return true };
        if !matches!(property.shape, Shape::Text | Shape::Any) {
            below(schemas, &property.shape, value);
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

fn below(schemas: &Schemas, shape: &Shape, value: &mut Value) {
    match (shape, value) {
        (Shape::Object(id) | Shape::Choice(id), Value::Object(map)) => object(schemas, schemas.get(*id), map),
        (Shape::List(item), Value::Array(list)) if is_deep(item) => {
            list.iter_mut().for_each(|element| below(schemas, item, element));
        }
        (Shape::Map(item), Value::Object(map)) if is_deep(item) => {
            map.values_mut().for_each(|element| below(schemas, item, element));
        }
        _ => {}
    }
}

/// Whether values of a shape can have fields.
fn is_deep(shape: &Shape) -> bool {
    matches!(shape, Shape::Object(_) | Shape::Choice(_) | Shape::List(_) | Shape::Map(_))
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
    match &property.shape {
        Shape::Bool => false.into(),
        Shape::Int32 | Shape::Int64 | Shape::Number | Shape::IntOrString => 0.into(),
        Shape::Text | Shape::Bytes => "".into(),
        Shape::Quantity => "0".into(),
        Shape::Object(id) => {
            let mut map = Map::new();
            object(schemas, schemas.get(*id), &mut map);
            map.into()
        }
        Shape::Any | Shape::Time | Shape::MicroTime | Shape::Choice(_) | Shape::List(_) | Shape::Map(_) => {
            Value::Null
        }
    }
}

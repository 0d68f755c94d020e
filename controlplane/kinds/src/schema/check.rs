//! Checks a tree against its definition. It checks types, records and removes unknown fields and nulls, and makes
//! strings canonical.

use base64::Engine;
use jiff::Timestamp;
use serde_json::{Map, Value};

use super::model::{Definition, Property, Schemas, Shape, schemas};
use coracle_values::Quantity;

/// Maximum number of recorded unknown fields: the path of each can be as long as the text.
const MAX_NOTES: usize = 100;

/// The path of a value, in the two forms of messages.
#[derive(Clone, Default)]
struct Place {
    /// `spec.containers[0].name`.
    indexed: String,
    /// `spec.containers.name`, with the names of embedded structs.
    plain: String,
    /// Name of the innermost struct.
    owner: String,
    /// Go type of the value, if it does not follow from the shape.
    go: Option<&'static str>,
}

impl Place {
    fn field(&self, owner: &Definition, property: &'static Property) -> Place {
        let (within, go) = match &property.go {
            Some(go) => (&*go.within, Some(&*go.of)),
            None => ("", None),
        };
        Place {
            indexed: self.named(&property.name),
            plain: if self.plain.is_empty() {
                format!("{within}{}", property.name)
            } else {
                format!("{}.{within}{}", self.plain, property.name)
            },
            owner: owner.short_name().to_owned(),
            go,
        }
    }

    /// The indexed path of a field.
    fn named(&self, name: &str) -> String {
        if self.indexed.is_empty() { name.to_owned() } else { format!("{}.{name}", self.indexed) }
    }

    fn item(&self, index: usize) -> Place {
        let go = self.go.and_then(|go| go.strip_prefix("[]"));
        Place { indexed: format!("{}[{index}]", self.indexed), go, ..self.clone() }
    }

    fn entry(&self, name: &str) -> Place {
        let go = self.go.and_then(|go| go.strip_prefix("map[string]"));
        Place { indexed: format!("{}.{name}", self.indexed), go, ..self.clone() }
    }
}

/// Checks and normalizes an object in place. Returns the messages for unknown fields, or the first type error.
pub(super) fn conform(definition: &'static Definition, value: &mut Value) -> Result<Vec<String>, String> {
    let mut check = Check { schemas: schemas(), unknown: Vec::new() };
    let Value::Object(map) = value else {
        return Err(format!(
            "json: cannot unmarshal {} into Go value of type {}",
            go_value(value),
            definition.go_type()
        ));
    };
    check.object(definition, map, &Place::default())?;
    Ok(check.unknown)
}

/// As [`conform`], for an object in a field of another one.
pub(super) fn conform_field(
    definition: &'static Definition,
    field: &str,
    value: &mut Value,
) -> Result<Vec<String>, String> {
    let mut check = Check { schemas: schemas(), unknown: Vec::new() };
    let place = Place { indexed: field.to_owned(), plain: field.to_owned(), ..Place::default() };
    let Value::Object(map) = value else {
        let (found, wanted) = (go_value(value), definition.go_type());
        return Err(format!("json: cannot unmarshal {found} into Go struct field .{field} of type {wanted}"));
    };
    check.object(definition, map, &place)?;
    Ok(check.unknown)
}

struct Check {
    schemas: &'static Schemas,
    unknown: Vec<String>,
}

impl Check {
    fn object(
        &mut self,
        definition: &'static Definition,
        map: &mut Map<String, Value>,
        place: &Place,
    ) -> Result<(), String> {
        let mut dropped = Vec::new();
        for (name, value) in map.iter_mut() {
            let Some(property) = definition.property(name) else {
                if self.unknown.len() < MAX_NOTES {
                    self.unknown.push(format!("unknown field \"{}\"", place.named(name)));
                }
                dropped.push(name.clone());
                continue;
            };
            if value.is_null() {
                dropped.push(name.clone());
                continue;
            }
            if is_scalar_ok(&property.shape, value) {
                continue;
            }
            self.value(&property.shape, value, &place.field(definition, property))?;
        }
        for name in dropped {
            map.remove(&name);
        }
        Ok(())
    }

    fn value(&mut self, shape: &Shape, value: &mut Value, place: &Place) -> Result<(), String> {
        match (shape, &mut *value) {
            (Shape::Any, _) => Ok(()),
            (Shape::Choice(_), Value::Bool(_) | Value::Array(_)) => Ok(()),
            (Shape::Object(id) | Shape::Choice(id), Value::Object(map)) => {
                self.object(self.schemas.get(*id), map, place)
            }
            (Shape::List(item), Value::Array(list)) => {
                for (index, element) in list.iter_mut().enumerate() {
                    fill_null(item, element);
                    self.value(item, element, &place.item(index))?;
                }
                Ok(())
            }
            (Shape::Map(item), Value::Object(map)) => {
                for (name, element) in map.iter_mut() {
                    fill_null(item, element);
                    self.value(item, element, &place.entry(name))?;
                }
                Ok(())
            }
            (Shape::Object(_) | Shape::Choice(_) | Shape::List(_) | Shape::Map(_), _) => {
                Err(self.mismatch(shape, value, place))
            }
            _ => self.scalar(shape, value, place),
        }
    }

    fn scalar(&self, shape: &Shape, value: &mut Value, place: &Place) -> Result<(), String> {
        if is_scalar_ok(shape, value) {
            return Ok(());
        }
        match (shape, &*value) {
            (Shape::Bytes, Value::String(text)) => {
                base64::engine::general_purpose::STANDARD.decode(text).map(|_| ()).map_err(|error| {
                    format!("illegal base64 data at input byte {}", base64_offset(text, &error))
                })
            }
            (Shape::Time | Shape::MicroTime, Value::String(text)) => {
                *value = time(text, matches!(shape, Shape::MicroTime))?;
                Ok(())
            }
            (Shape::Quantity, Value::String(_) | Value::Number(_)) => {
                let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
                let quantity = Quantity::parse(text.trim()).map_err(|error| error.to_string())?;
                *value = Value::String(quantity.to_string());
                Ok(())
            }
            (Shape::IntOrString, Value::Number(number)) => Err(format!(
                "json: cannot unmarshal number {number} into Go struct field {}.{} of type int32",
                place.owner, place.plain
            )),
            (Shape::IntOrString, _) => {
                Err(format!("json: cannot unmarshal {} into Go value of type int32", go_value(value)))
            }
            _ => Err(self.mismatch(shape, value, place)),
        }
    }

    fn mismatch(&self, shape: &Shape, value: &Value, place: &Place) -> String {
        format!(
            "json: cannot unmarshal {} into Go struct field {}.{} of type {}",
            match shape {
                Shape::Int32 | Shape::Int64 => go_number(value),
                _ => go_value(value).to_owned(),
            },
            place.owner,
            place.plain,
            place.go.map_or_else(|| self.go_type(shape), str::to_owned)
        )
    }

    fn go_type(&self, shape: &Shape) -> String {
        match shape {
            Shape::Any => "runtime.RawExtension".to_owned(),
            Shape::Bool => "bool".to_owned(),
            Shape::Int32 => "int32".to_owned(),
            Shape::Int64 => "int64".to_owned(),
            Shape::Number => "float64".to_owned(),
            Shape::Text | Shape::Time | Shape::MicroTime => "string".to_owned(),
            Shape::Bytes => "[]uint8".to_owned(),
            Shape::IntOrString => "intstr.IntOrString".to_owned(),
            Shape::Quantity => "resource.Quantity".to_owned(),
            Shape::Object(id) | Shape::Choice(id) => self.schemas.get(*id).go_type().to_owned(),
            Shape::List(item) => format!("[]{}", self.go_type(item)),
            Shape::Map(item) => format!("map[string]{}", self.go_type(item)),
        }
    }
}

/// Whether the value has the type of the shape. Does not check elements.
fn is_scalar_ok(shape: &Shape, value: &Value) -> bool {
    match shape {
        Shape::Bool => value.is_boolean(),
        Shape::Int32 => value.as_i64().is_some_and(|number| i32::try_from(number).is_ok()),
        Shape::Int64 => value.is_i64(),
        Shape::Number => value.is_number(),
        Shape::Text => value.is_string(),
        Shape::IntOrString => {
            value.is_string() || value.as_i64().is_some_and(|number| i32::try_from(number).is_ok())
        }
        _ => false,
    }
}

/// A null in a list or map means the zero value of its type.
fn fill_null(shape: &Shape, value: &mut Value) {
    if value.is_null() {
        *value = match shape {
            Shape::Any => Value::Null,
            Shape::Bool => Value::Bool(false),
            Shape::Int32 | Shape::Int64 | Shape::Number | Shape::IntOrString => 0.into(),
            Shape::Text | Shape::Bytes | Shape::Time | Shape::MicroTime => Value::String(String::new()),
            Shape::Quantity => Value::String("0".to_owned()),
            Shape::Object(_) | Shape::Choice(_) | Shape::Map(_) => Value::Object(Map::new()),
            Shape::List(_) => Value::Array(Vec::new()),
        };
    }
}

fn time(text: &str, micro: bool) -> Result<Value, String> {
    let Ok(at) = text.parse::<Timestamp>() else {
        let layout = if micro { "2006-01-02T15:04:05.000000Z07:00" } else { "2006-01-02T15:04:05Z07:00" };
        return Err(format!("parsing time {text:?} as {layout:?}: cannot parse {text:?} as \"2006\""));
    };
    let format = if micro { "%Y-%m-%dT%H:%M:%S.%6fZ" } else { "%Y-%m-%dT%H:%M:%SZ" };
    Ok(Value::String(at.strftime(format).to_string()))
}

/// The position that Go reports. For an incomplete group of four letters it is the start of the group.
fn base64_offset(text: &str, error: &base64::DecodeError) -> usize {
    match error {
        base64::DecodeError::InvalidByte(at, _) | base64::DecodeError::InvalidLastSymbol(at, _) => *at,
        base64::DecodeError::InvalidLength(_) | base64::DecodeError::InvalidPadding => text.len() / 4 * 4,
    }
}

fn go_value(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "bool",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

/// A number that does not fit, with all its digits.
fn go_number(value: &Value) -> String {
    match value {
        Value::Number(number) => format!("number {number}"),
        _ => go_value(value).to_owned(),
    }
}

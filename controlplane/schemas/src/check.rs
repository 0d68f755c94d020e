//! Checks a tree against its definition: checks types, records and removes unknown fields, removes nulls, and makes
//! strings canonical.

use base64::Engine;
use jiff::Timestamp;
use serde_json::{Map, Value};

use super::model::{Definition, Property, Schemas, ValueType, schemas};
use coracle_values::{Quantity, go};

/// Maximum number of recorded unknown fields: the path of each can be as long as the object's text.
const MAX_NOTES: usize = 100;

/// The path of a value. Its text is made for messages only: most objects have no errors.
struct ValuePath<'a> {
    above: Option<&'a ValuePath<'a>>,
    step: Step<'a>,
}

/// The last step of a path.
enum Step<'a> {
    /// The object itself, with the name of its field in another object. The name is empty if the object is not in
    /// another object.
    Root(&'a str),
    /// A field of a struct.
    Field(&'static Definition, &'static Property),
    /// An element of a list.
    Item(usize),
    /// A value of a map.
    Entry(&'a str),
}

impl<'a> ValuePath<'a> {
    fn root(name: &'a str) -> Self {
        ValuePath { above: None, step: Step::Root(name) }
    }

    fn below(&'a self, step: Step<'a>) -> Self {
        ValuePath { above: Some(self), step }
    }

    /// `spec.containers[0].name`.
    fn indexed(&self) -> String {
        let above = || self.above.map(ValuePath::indexed).unwrap_or_default();
        match &self.step {
            Step::Root(name) => (*name).to_owned(),
            Step::Field(_, property) => {
                self.above.map_or_else(String::new, |above| above.named(&property.name))
            }
            Step::Item(index) => format!("{}[{index}]", above()),
            Step::Entry(name) => format!("{}.{name}", above()),
        }
    }

    /// The indexed path of a field.
    fn named(&self, name: &str) -> String {
        let own = self.indexed();
        if own.is_empty() { name.to_owned() } else { format!("{own}.{name}") }
    }

    /// `spec.containers.name`, with the names of embedded structs.
    fn plain(&self) -> String {
        let above = self.above.map(ValuePath::plain).unwrap_or_default();
        match &self.step {
            Step::Root(name) => (*name).to_owned(),
            Step::Field(_, property) => {
                let within = property.go.as_ref().map_or("", |go| &go.within);
                let dot = if above.is_empty() { "" } else { "." };
                format!("{above}{dot}{within}{}", property.name)
            }
            Step::Item(_) | Step::Entry(_) => above,
        }
    }

    /// Name of the innermost struct.
    fn owner(&self) -> &str {
        match &self.step {
            Step::Root(_) => "",
            Step::Field(owner, _) => owner.short_name(),
            Step::Item(_) | Step::Entry(_) => self.above.map_or("", ValuePath::owner),
        }
    }

    /// Go type of the value, if it does not follow from `value_type`.
    fn go_type_name(&self) -> Option<&'static str> {
        match &self.step {
            Step::Root(_) => None,
            Step::Field(_, property) => property.go.as_ref().map(|go| &*go.of),
            Step::Item(_) => self.above?.go_type_name()?.strip_prefix("[]"),
            Step::Entry(_) => self.above?.go_type_name()?.strip_prefix("map[string]"),
        }
    }
}

/// Checks and normalizes an object in place. Returns the messages for unknown fields, or the first type error.
pub(super) fn conform(definition: &'static Definition, value: &mut Value) -> Result<Vec<String>, String> {
    let mut check = Check { schemas: schemas(), unknown: Vec::new() };
    let Value::Object(map) = value else {
        return Err(format!(
            "json: cannot unmarshal {} into Go value of type {}",
            go::json_kind(value),
            definition.go_type()
        ));
    };
    check.object(definition, map, &ValuePath::root(""))?;
    Ok(check.unknown)
}

/// Does the same as [`conform`], for an object in a field of another object.
pub(super) fn conform_field(
    definition: &'static Definition,
    field: &str,
    value: &mut Value,
) -> Result<Vec<String>, String> {
    let mut check = Check { schemas: schemas(), unknown: Vec::new() };
    let Value::Object(map) = value else {
        let (found, wanted) = (go::json_kind(value), definition.go_type());
        return Err(format!("json: cannot unmarshal {found} into Go struct field .{field} of type {wanted}"));
    };
    check.object(definition, map, &ValuePath::root(field))?;
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
        place: &ValuePath<'_>,
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
            if value.is_null() || is_ignored(property, value) {
                dropped.push(name.clone());
                continue;
            }
            if is_scalar_ok(&property.value_type, value) {
                continue;
            }
            self.value(&property.value_type, value, &place.below(Step::Field(definition, property)))?;
        }
        for name in dropped {
            map.remove(&name);
        }
        Ok(())
    }

    fn value(
        &mut self,
        value_type: &ValueType,
        value: &mut Value,
        place: &ValuePath<'_>,
    ) -> Result<(), String> {
        match (value_type, &mut *value) {
            (ValueType::Any, _) => Ok(()),
            (ValueType::Choice(_), Value::Bool(_) | Value::Array(_)) => Ok(()),
            (ValueType::Object(id) | ValueType::Choice(id), Value::Object(map)) => {
                self.object(self.schemas.get(*id), map, place)
            }
            (ValueType::List(item), Value::Array(list)) => {
                for (index, element) in list.iter_mut().enumerate() {
                    fill_null(item, element);
                    if !element.is_null() {
                        self.value(item, element, &place.below(Step::Item(index)))?;
                    }
                }
                Ok(())
            }
            (ValueType::Map(item), Value::Object(map)) => {
                for (name, element) in map.iter_mut() {
                    fill_null(item, element);
                    if !element.is_null() {
                        self.value(item, element, &place.below(Step::Entry(name)))?;
                    }
                }
                Ok(())
            }
            (ValueType::Object(_) | ValueType::Choice(_) | ValueType::List(_) | ValueType::Map(_), _) => {
                Err(self.mismatch(value_type, value, place))
            }
            _ => self.scalar(value_type, value, place),
        }
    }

    fn scalar(&self, value_type: &ValueType, value: &mut Value, place: &ValuePath<'_>) -> Result<(), String> {
        if is_scalar_ok(value_type, value) {
            return Ok(());
        }
        match (value_type, &*value) {
            (ValueType::Bytes, Value::String(text)) => {
                base64::engine::general_purpose::STANDARD.decode(text).map(|_| ()).map_err(|error| {
                    format!("illegal base64 data at input byte {}", base64_offset(text, &error))
                })
            }
            (ValueType::Time | ValueType::MicroTime, Value::String(text)) => {
                *value = time(text, matches!(value_type, ValueType::MicroTime))?;
                Ok(())
            }
            (ValueType::Quantity, Value::String(_) | Value::Number(_)) => {
                let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
                let quantity = Quantity::parse(text.trim()).map_err(|error| error.to_string())?;
                *value = Value::String(quantity.to_string());
                Ok(())
            }
            (ValueType::IntOrString, Value::Number(number)) => Err(format!(
                "json: cannot unmarshal number {number} into Go struct field {}.{} of type int32",
                place.owner(),
                place.plain()
            )),
            (ValueType::IntOrString, _) => {
                Err(format!("json: cannot unmarshal {} into Go value of type int32", go::json_kind(value)))
            }
            _ => Err(self.mismatch(value_type, value, place)),
        }
    }

    fn mismatch(&self, value_type: &ValueType, value: &Value, place: &ValuePath<'_>) -> String {
        format!(
            "json: cannot unmarshal {} into Go struct field {}.{} of type {}",
            match value_type {
                ValueType::Int32 | ValueType::Int64 => go_number(value),
                _ => go::json_kind(value).to_owned(),
            },
            place.owner(),
            place.plain(),
            place.go_type_name().map_or_else(|| self.go_type(value_type), str::to_owned)
        )
    }

    fn go_type(&self, value_type: &ValueType) -> String {
        match value_type {
            ValueType::Any => "runtime.RawExtension".to_owned(),
            ValueType::Bool => "bool".to_owned(),
            ValueType::Int32 => "int32".to_owned(),
            ValueType::Int64 => "int64".to_owned(),
            ValueType::Number => "float64".to_owned(),
            ValueType::Text | ValueType::Time | ValueType::MicroTime => "string".to_owned(),
            ValueType::Bytes => "[]uint8".to_owned(),
            ValueType::IntOrString => "intstr.IntOrString".to_owned(),
            ValueType::Quantity => "resource.Quantity".to_owned(),
            ValueType::Object(id) | ValueType::Choice(id) => self.schemas.get(*id).go_type().to_owned(),
            ValueType::List(item) => format!("[]{}", self.go_type(item)),
            ValueType::Map(item) => format!("map[string]{}", self.go_type(item)),
        }
    }
}

/// Whether Go ignores the value: `items` of a schema that is neither a schema nor a list of schemas. Source:
/// `JSONSchemaPropsOrArray.UnmarshalJSON` of apiextensions.
fn is_ignored(property: &Property, value: &Value) -> bool {
    matches!(property.value_type, ValueType::Choice(_))
        && &*property.name == "items"
        && !(value.is_object() || value.is_array())
}

/// Whether the value has this scalar type and needs no other check. False for base64, times and quantities, which are
/// parsed, and for lists and objects.
fn is_scalar_ok(value_type: &ValueType, value: &Value) -> bool {
    match value_type {
        ValueType::Bool => value.is_boolean(),
        ValueType::Int32 => value.as_i64().is_some_and(|number| i32::try_from(number).is_ok()),
        ValueType::Int64 => value.is_i64(),
        ValueType::Number => value.is_number(),
        ValueType::Text => value.is_string(),
        ValueType::IntOrString => {
            value.is_string() || value.as_i64().is_some_and(|number| i32::try_from(number).is_ok())
        }
        _ => false,
    }
}

/// Replaces a null in a list or map by the zero value of its type. The zero value of a time is null.
fn fill_null(value_type: &ValueType, value: &mut Value) {
    if value.is_null() {
        *value = match value_type {
            ValueType::Any | ValueType::Time | ValueType::MicroTime => Value::Null,
            ValueType::Bool => Value::Bool(false),
            ValueType::Int32 | ValueType::Int64 | ValueType::Number | ValueType::IntOrString => 0.into(),
            ValueType::Text | ValueType::Bytes => Value::String(String::new()),
            ValueType::Quantity => Value::String("0".to_owned()),
            ValueType::Object(_) | ValueType::Choice(_) | ValueType::Map(_) => Value::Object(Map::new()),
            ValueType::List(_) => Value::Array(Vec::new()),
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

/// The position that Go reports. For an incomplete group of four letters, the position is the start of the group.
fn base64_offset(text: &str, error: &base64::DecodeError) -> usize {
    match error {
        base64::DecodeError::InvalidByte(at, _) | base64::DecodeError::InvalidLastSymbol(at, _) => *at,
        base64::DecodeError::InvalidLength(_) | base64::DecodeError::InvalidPadding => text.len() / 4 * 4,
    }
}

/// A value in Go's decoding errors: its JSON type, and for a number all its digits.
fn go_number(value: &Value) -> String {
    match value {
        Value::Number(number) => format!("number {number}"),
        _ => go::json_kind(value).to_owned(),
    }
}

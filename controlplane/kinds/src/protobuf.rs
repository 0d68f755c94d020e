//! Kubernetes' protobuf bodies as JSON trees, and JSON trees as protobuf, by a generated table of fields.
//!
//! The envelope is four magic bytes and an `Unknown` message with apiVersion, kind and the object's bytes. Go writes
//! scalars that are not pointers even if they are zero; [`crate::schema::decode`] removes zeros that mean absent.

pub mod encode;
mod table;
pub(crate) mod wire;

use base64::Engine;
use serde_json::{Map, Value};

use self::table::{Field, Message, Type, tables};
use self::wire::{Reader, WireError, WireValue};
use crate::kind;

/// Maximum depth of nested messages.
const MAX_DEPTH: u32 = 64;

/// The bytes are not a valid object.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum DecodeError {
    /// The four magic bytes are missing.
    #[error("provided data does not appear to be a protobuf message, expected prefix [107 56 115 0]")]
    Prefix,
    /// The bytes end within a value, or a value does not fit its type.
    #[error("malformed protobuf message: {0}")]
    Malformed(&'static str),
    /// The envelope has an unknown kind.
    #[error("no kind \"{kind}\" is registered for version \"{api_version}\"")]
    UnknownKind {
        /// apiVersion of the envelope.
        api_version: String,
        /// Kind of the envelope.
        kind: String,
    },
}

impl From<WireError> for DecodeError {
    fn from(WireError(what): WireError) -> DecodeError {
        DecodeError::Malformed(what)
    }
}

/// Decodes an object with its envelope. Sets `apiVersion` and `kind` from the envelope.
pub fn decode(bytes: &[u8]) -> Result<Value, DecodeError> {
    envelope(bytes, 0)
}

/// Decodes an envelope that may be embedded in a message at this depth.
fn envelope(bytes: &[u8], depth: u32) -> Result<Value, DecodeError> {
    let body = bytes.strip_prefix(b"k8s\0").ok_or(DecodeError::Prefix)?;
    let (mut api_version, mut kind, mut raw) = (String::new(), String::new(), &body[..0]);
    let mut reader = Reader::new(body);
    while let Some((number, value)) = reader.next()? {
        match (number, value) {
            (1, WireValue::Bytes(meta)) => (api_version, kind) = type_meta(meta)?,
            (2, WireValue::Bytes(object)) => raw = object,
            _ => {}
        }
    }
    let message = kind::schema_of(&api_version, &kind).and_then(|schema| tables().find(schema));
    let Some(message) = message else { return Err(DecodeError::UnknownKind { api_version, kind }) };
    let mut object = Map::new();
    read_message(message, raw, &mut object, depth)?;
    object.insert("apiVersion".to_owned(), Value::String(api_version));
    object.insert("kind".to_owned(), Value::String(kind));
    Ok(Value::Object(object))
}

fn type_meta(bytes: &[u8]) -> Result<(String, String), DecodeError> {
    let (mut api_version, mut kind) = (String::new(), String::new());
    let mut reader = Reader::new(bytes);
    while let Some((number, value)) = reader.next()? {
        match number {
            1 => api_version = text(value)?,
            2 => kind = text(value)?,
            _ => {}
        }
    }
    Ok((api_version, kind))
}

fn read_message(
    message: &Message,
    bytes: &[u8],
    into: &mut Map<String, Value>,
    depth: u32,
) -> Result<(), DecodeError> {
    if depth > MAX_DEPTH {
        return Err(DecodeError::Malformed("nested too deeply"));
    }
    let mut reader = Reader::new(bytes);
    while let Some((number, value)) = reader.next()? {
        let Some(field) = message.field(number) else { continue };
        if let (Type::Message(id), "") = (&field.r#type, &*field.name) {
            read_message(tables().get(*id), bytes_of(value)?, into, depth + 1)?;
        } else if field.map {
            read_entry(field, bytes_of(value)?, into, depth)?;
        } else if field.repeated {
            let list = into.entry(&*field.name).or_insert_with(|| Value::Array(Vec::new()));
            if let Value::Array(list) = list {
                read_element(field, value, list, depth)?;
            }
        } else if let Some(read) = read_value(&field.r#type, value, depth)? {
            insert(into, &field.name, read);
        }
    }
    Ok(())
}

/// Adds a field. If the field occurs again, a message is merged with the earlier message, and any other value replaces
/// the earlier value.
fn insert(into: &mut Map<String, Value>, name: &str, value: Value) {
    match (into.get_mut(name), value) {
        (Some(Value::Object(old)), Value::Object(new)) => old.extend(new),
        (_, value) => {
            into.insert(name.to_owned(), value);
        }
    }
}

fn read_element(
    field: &Field,
    value: WireValue<'_>,
    list: &mut Vec<Value>,
    depth: u32,
) -> Result<(), DecodeError> {
    if let (Type::Int | Type::Bool, WireValue::Bytes(packed)) = (&field.r#type, &value) {
        let mut reader = Reader::new(packed);
        while !reader.is_empty() {
            let number = WireValue::Varint(reader.varint()?);
            list.extend(read_value(&field.r#type, number, depth)?);
        }
        return Ok(());
    }
    list.extend(read_value(&field.r#type, value, depth)?);
    Ok(())
}

fn read_entry(
    field: &Field,
    bytes: &[u8],
    into: &mut Map<String, Value>,
    depth: u32,
) -> Result<(), DecodeError> {
    let mut name = String::new();
    let mut read = None;
    let mut reader = Reader::new(bytes);
    while let Some((number, value)) = reader.next()? {
        match number {
            1 => name = text(value)?,
            2 => read = read_value(&field.r#type, value, depth)?,
            _ => {}
        }
    }
    let map = into.entry(&*field.name).or_insert_with(|| Value::Object(Map::new()));
    if let Value::Object(map) = map {
        map.insert(name, read.unwrap_or_else(|| empty(&field.r#type)));
    }
    Ok(())
}

/// The JSON form of the value of a map entry if the entry has no value, or if its value means absent, such as an empty
/// time.
fn empty(shape: &Type) -> Value {
    match shape {
        Type::Text | Type::Bytes => Value::String(String::new()),
        Type::Int | Type::Double | Type::IntOrString => 0.into(),
        Type::Bool => Value::Bool(false),
        Type::Quantity => Value::String("0".to_owned()),
        Type::Time | Type::MicroTime | Type::Json | Type::Choice(_) => Value::Null,
        Type::Message(id) if tables().get(*id).is_wrapper() => Value::Array(Vec::new()),
        Type::Message(_) => Value::Object(Map::new()),
    }
}

/// The JSON form of one value. `None` if the value means absent.
fn read_value(shape: &Type, value: WireValue<'_>, depth: u32) -> Result<Option<Value>, DecodeError> {
    let read = match shape {
        Type::Text => Some(Value::String(text(value)?)),
        Type::Int => Some(value.int()?.into()),
        Type::Bool => Some(Value::Bool(value.int()? != 0)),
        Type::Double => double(value.double()?),
        Type::Bytes => {
            Some(Value::String(base64::engine::general_purpose::STANDARD.encode(bytes_of(value)?)))
        }
        Type::Time | Type::MicroTime => time(bytes_of(value)?, matches!(shape, Type::MicroTime))?,
        Type::Quantity => Some(Value::String(first_string(bytes_of(value)?)?)),
        Type::IntOrString => Some(int_or_string(bytes_of(value)?)?),
        Type::Json => embedded(bytes_of(value)?, depth)?,
        Type::Choice(id) => {
            let mut map = Map::new();
            read_message(tables().get(*id), bytes_of(value)?, &mut map, depth + 1)?;
            ["schema", "jSONSchemas", "property", "allows"].iter().find_map(|name| map.remove(*name))
        }
        Type::Message(id) => {
            let message = tables().get(*id);
            let mut map = Map::new();
            read_message(message, bytes_of(value)?, &mut map, depth + 1)?;
            // A message whose only field has no name represents that field's list.
            Some(if message.is_wrapper() { map.remove("").unwrap_or_default() } else { Value::Object(map) })
        }
    };
    Ok(read)
}

/// A whole number as an integer, as Go prints it.
fn double(value: f64) -> Option<Value> {
    #[expect(clippy::cast_possible_truncation, reason = "the number is whole and in range")]
    if value.fract() == 0.0 && value.abs() < 1e15 {
        return Some(Value::from(value as i64));
    }
    serde_json::Number::from_f64(value).map(Value::Number)
}

fn bytes_of(value: WireValue<'_>) -> Result<&[u8], DecodeError> {
    match value {
        WireValue::Bytes(bytes) => Ok(bytes),
        _ => Err(DecodeError::Malformed("a length-delimited value was expected")),
    }
}

fn text(value: WireValue<'_>) -> Result<String, DecodeError> {
    let bytes = bytes_of(value)?;
    String::from_utf8(bytes.to_vec()).map_err(|_error| DecodeError::Malformed("text is not UTF-8"))
}

fn time(bytes: &[u8], micro: bool) -> Result<Option<Value>, DecodeError> {
    let (mut seconds, mut nanos) = (0, 0);
    let mut reader = Reader::new(bytes);
    while let Some((number, value)) = reader.next()? {
        match number {
            1 => seconds = value.int()?,
            2 => nanos = value.int()?,
            _ => {}
        }
    }
    if seconds == 0 && nanos == 0 {
        return Ok(None);
    }
    let out_of_range = |_| DecodeError::Malformed("time out of range");
    let nanos = i32::try_from(nanos).map_err(|_error| DecodeError::Malformed("time out of range"))?;
    let at = jiff::Timestamp::new(seconds, nanos).map_err(out_of_range)?;
    let format = if micro { "%Y-%m-%dT%H:%M:%S.%6fZ" } else { "%Y-%m-%dT%H:%M:%SZ" };
    Ok(Some(Value::String(at.strftime(format).to_string())))
}

fn first_string(bytes: &[u8]) -> Result<String, DecodeError> {
    let mut reader = Reader::new(bytes);
    while let Some((number, value)) = reader.next()? {
        if number == 1 {
            return text(value);
        }
    }
    Ok("0".to_owned())
}

fn int_or_string(bytes: &[u8]) -> Result<Value, DecodeError> {
    let (mut is_text, mut number_value, mut text_value) = (false, 0, String::new());
    let mut reader = Reader::new(bytes);
    while let Some((number, value)) = reader.next()? {
        match number {
            1 => is_text = value.int()? == 1,
            2 => number_value = value.int()?,
            3 => text_value = text(value)?,
            _ => {}
        }
    }
    Ok(if is_text { Value::String(text_value) } else { number_value.into() })
}

fn embedded(bytes: &[u8], depth: u32) -> Result<Option<Value>, DecodeError> {
    let mut reader = Reader::new(bytes);
    while let Some((number, value)) = reader.next()? {
        if number == 1 {
            let raw = bytes_of(value)?;
            if raw.starts_with(b"k8s\0") {
                return envelope(raw, depth + 1).map(Some);
            }
            return serde_json::from_slice(raw)
                .map(Some)
                .map_err(|_error| DecodeError::Malformed("an embedded object is not JSON"));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests;

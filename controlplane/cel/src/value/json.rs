//! Values as JSON, within limits on size and depth.

use base64::Engine;
use serde_json::{Map, Value as Json};

use super::{Key, Value};
use crate::duration;

/// Maximum size of a result as JSON, in bytes of memory. Objects have at most three megabytes of text.
const MAX_JSON: usize = 64 << 20;

/// Memory of a JSON value without its text, in bytes.
const NODE_SIZE: usize = 32;

/// Maximum depth of a result as JSON. It is below the depth limit of the decoder for stored objects.
const MAX_JSON_DEPTH: usize = 100;

impl Value<'_> {
    /// The value as JSON. `None` if the JSON is larger or deeper than allowed. A value can refer to the same part many
    /// times; JSON has a copy for each reference.
    pub fn to_limited_json(&self) -> Option<Json> {
        self.weigh(&mut MAX_JSON.clone(), 0)?;
        Some(self.to_json())
    }

    /// Subtracts the size of the value as JSON from `left`. `None` if the value is too large or too deep.
    pub(crate) fn weigh(&self, left: &mut usize, depth: usize) -> Option<()> {
        *left = left.checked_sub(NODE_SIZE)?;
        if depth > MAX_JSON_DEPTH {
            return None;
        }
        let below = depth + 1;
        let size = match self {
            Value::String(text) => text.len(),
            Value::Bytes(bytes) => bytes.len().saturating_mul(2),
            Value::Optional(Some(inner)) => return inner.weigh(left, below),
            Value::List(list) => return list.iter().try_for_each(|item| item.weigh(left, below)),
            Value::Map(map) => {
                return map.iter().try_for_each(|(key, value)| {
                    let name = if let Key::String(text) = key { text.len() } else { 0 };
                    *left = left.checked_sub(name)?;
                    value.weigh(left, below)
                });
            }
            Value::Structure(structure) => return structure.weigh(left, below),
            Value::JsonList(list, ..) => {
                return list.iter().try_for_each(|item| weigh_json(item, left, below));
            }
            Value::JsonMap(map, _) | Value::JsonObject(map, _) => return weigh_map(map, left, below),
            _ => 0,
        };
        *left = left.checked_sub(size)?;
        Some(())
    }

    /// The value as JSON, without a limit.
    pub(crate) fn to_json(&self) -> Json {
        match self {
            Value::Bool(flag) => (*flag).into(),
            Value::Int(number) => (*number).into(),
            Value::Uint(number) => (*number).into(),
            Value::Double(number) => (*number).into(),
            Value::String(text) => text.as_ref().into(),
            Value::Bytes(bytes) => base64::engine::general_purpose::STANDARD.encode(bytes).into(),
            Value::Duration(nanoseconds) => duration::print(*nanoseconds).into(),
            Value::Timestamp(at) => at.to_string().into(),
            Value::Quantity(quantity) => quantity.to_string().into(),
            Value::Optional(Some(inner)) => inner.to_json(),
            Value::JsonList(list, ..) => Json::Array(list.to_vec()),
            Value::JsonMap(map, _) | Value::JsonObject(map, _) => Json::Object((*map).clone()),
            Value::Structure(structure) => structure.to_json(),
            Value::List(list) => list.iter().map(Value::to_json).collect(),
            Value::Map(map) => {
                Json::Object(map.iter().map(|(key, value)| (key.to_string(), value.to_json())).collect())
            }
            _ => Json::Null,
        }
    }
}

fn weigh_json(json: &Json, left: &mut usize, depth: usize) -> Option<()> {
    let size = if let Json::String(text) = json { text.len() } else { 0 };
    *left = left.checked_sub(NODE_SIZE + size)?;
    match json {
        _ if depth > MAX_JSON_DEPTH => None,
        Json::Array(list) => list.iter().try_for_each(|item| weigh_json(item, left, depth + 1)),
        Json::Object(map) => weigh_map(map, left, depth + 1),
        _ => Some(()),
    }
}

fn weigh_map(map: &Map<String, Json>, left: &mut usize, depth: usize) -> Option<()> {
    map.iter().try_for_each(|(name, value)| {
        *left = left.checked_sub(name.len())?;
        weigh_json(value, left, depth)
    })
}

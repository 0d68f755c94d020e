//! Equality of objects with fields that their type does not have. Such objects are compared as JSON, as upstream does.

use serde_json::{Map, Value as Json};

use crate::types::ObjectType;

/// Whether the object has a field that its type does not have.
pub(super) fn has_unknown(map: &Map<String, Json>, object: &ObjectType) -> bool {
    object.fields.values().filter(|field| map.contains_key(&*field.name)).count() < map.len()
}

/// Whether two objects in JSON are equal. `work` is the rest of the cost limit; `None` if the cost exceeds it.
pub(super) fn equal_maps(
    left: &Map<String, Json>,
    right: &Map<String, Json>,
    work: &mut u64,
) -> Option<bool> {
    if left.len() != right.len() {
        return Some(false);
    }
    for (name, value) in left {
        *work = work.checked_sub(text_cost(name))?;
        match right.get(name) {
            Some(other) if equal(value, other, work)? => {}
            _ => return Some(false),
        }
    }
    Some(true)
}

fn equal(left: &Json, right: &Json, work: &mut u64) -> Option<bool> {
    *work = work.checked_sub(1)?;
    match (left, right) {
        (Json::Object(left), Json::Object(right)) => equal_maps(left, right, work),
        (Json::Array(left), Json::Array(right)) => {
            if left.len() != right.len() {
                return Some(false);
            }
            for (left, right) in left.iter().zip(right) {
                if !equal(left, right, work)? {
                    return Some(false);
                }
            }
            Some(true)
        }
        (Json::String(left), Json::String(right)) => {
            *work = work.checked_sub(text_cost(left))?;
            Some(left == right)
        }
        (Json::Object(_) | Json::Array(_) | Json::String(_), _) => Some(false),
        _ => Some(left == right),
    }
}

fn text_cost(text: &str) -> u64 {
    u64::try_from(text.len() / 16).unwrap_or(u64::MAX)
}

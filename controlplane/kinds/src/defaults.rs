//! Fills absent fields as the API promises. Each function is idempotent: an object that has all keeps all.

mod container;
pub(crate) mod object;
pub(crate) mod pod;
pub(crate) mod rbac;
pub(crate) mod service;
mod volume;
pub(crate) mod workload;

use serde_json::{Map, Value};

use crate::Kind;

/// Fills absent fields of an object, idempotently.
pub fn apply(kind: &Kind, object: &mut Value) {
    (kind.rules.defaults)(object);
}

/// Fills absent fields of a TokenRequest.
pub fn token_request(request: &mut Value) {
    if let Some(spec) = child(request, "spec") {
        fill(spec, "expirationSeconds", 3600);
    }
}

/// Sets a field that is absent, null or, as Go sees it, empty text.
fn fill(map: &mut Map<String, Value>, name: &str, value: impl Into<Value>) {
    let absent = map.get(name).is_none_or(|old| old.is_null() || old == "");
    if absent {
        map.insert(name.to_owned(), value.into());
    }
}

/// The object at a field, made when absent; nothing when the field holds something else.
fn child<'a>(parent: &'a mut Value, name: &str) -> Option<&'a mut Map<String, Value>> {
    parent.as_object_mut().and_then(|map| child_of(map, name))
}

/// The same for a map.
fn child_of<'a>(parent: &'a mut Map<String, Value>, name: &str) -> Option<&'a mut Map<String, Value>> {
    let value = parent.entry(name).or_insert(Value::Null);
    if value.is_null() {
        *value = Value::Object(Map::new());
    }
    value.as_object_mut()
}

/// The object at a field that is already there.
fn present<'a>(parent: &'a mut Map<String, Value>, name: &str) -> Option<&'a mut Map<String, Value>> {
    parent.get_mut(name).and_then(Value::as_object_mut)
}

/// The objects in the list at a field.
fn each<'a>(
    parent: &'a mut Map<String, Value>,
    name: &str,
) -> impl Iterator<Item = &'a mut Map<String, Value>> {
    parent.get_mut(name).and_then(Value::as_array_mut).into_iter().flatten().filter_map(Value::as_object_mut)
}

#[cfg(test)]
mod tests;

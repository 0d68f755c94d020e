//! Defaults of pods and pod templates, and functions that set the defaults of any kind.

mod container;
pub mod pod;
pub mod volume;

use serde_json::{Map, Value};

/// Sets a field that is absent, null or an empty text: Go clients send empty texts for absent fields.
pub fn fill(map: &mut Map<String, Value>, name: &str, value: impl Into<Value>) {
    let absent = map.get(name).is_none_or(|old| old.is_null() || old == "");
    if absent {
        map.insert(name.to_owned(), value.into());
    }
}

/// Sets a field that is absent or null. Use it for fields that are pointers in Go: an empty text is a value of such a
/// field, and validation refuses it.
pub fn fill_absent(map: &mut Map<String, Value>, name: &str, value: impl Into<Value>) {
    if map.get(name).is_none_or(Value::is_null) {
        map.insert(name.to_owned(), value.into());
    }
}

/// The object in a field, created if absent. `None` if the field has another type.
pub fn child<'a>(parent: &'a mut Value, name: &str) -> Option<&'a mut Map<String, Value>> {
    parent.as_object_mut().and_then(|map| child_of(map, name))
}

/// The map in a field, created if absent. `None` if the field has another type.
pub fn child_of<'a>(parent: &'a mut Map<String, Value>, name: &str) -> Option<&'a mut Map<String, Value>> {
    let value = parent.entry(name).or_insert(Value::Null);
    if value.is_null() {
        *value = Value::Object(Map::new());
    }
    value.as_object_mut()
}

/// The object in a field. `None` if the field has no object.
pub fn present<'a>(parent: &'a mut Map<String, Value>, name: &str) -> Option<&'a mut Map<String, Value>> {
    parent.get_mut(name).and_then(Value::as_object_mut)
}

/// The objects in the list of a field.
pub fn each<'a>(
    parent: &'a mut Map<String, Value>,
    name: &str,
) -> impl Iterator<Item = &'a mut Map<String, Value>> {
    parent.get_mut(name).and_then(Value::as_array_mut).into_iter().flatten().filter_map(Value::as_object_mut)
}

#[cfg(test)]
mod tests;

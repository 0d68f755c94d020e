//! Strategic merge patch: lists with a patch merge key in their definition are merged by that key.
//!
//! Directives: `$patch: replace|delete` in a map or a list element, `$retainKeys`, `$setElementOrder/<list>`,
//! `$deleteFromPrimitiveList/<list>`, and null for "remove". Elements are identified by the one patch merge key
//! (`containerPort`, `name`), not by the keys that server-side apply uses.

mod order;

use std::{collections::HashSet, sync::LazyLock};

use coracle_values::CollectMap;
use serde_json::{Map, Value};

use self::order::{Places, in_order};
use super::PatchError;
use crate::schema::model::{
    Definition, OwnershipMarkers, PatchMarkers, Presence, Property, ValueType, schemas,
};

const DIRECTIVE: &str = "$patch";
const RETAIN_KEYS: &str = "$retainKeys";
const SET_ORDER: &str = "$setElementOrder/";
const DELETE_PRIMITIVES: &str = "$deleteFromPrimitiveList/";

/// The definition whose field `initializers` Kubernetes 1.16 has removed.
const METADATA: &str = "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta";

/// Pending initializers in `metadata.initializers` are merged by name. Without the plugin Initializers the field is
/// dropped.
static INITIALIZERS: LazyLock<Definition> = LazyLock::new(|| {
    let pending = Property {
        name: "pending".into(),
        value_type: ValueType::List(Box::new(ValueType::Any)),
        presence: Presence::NotZero,
        go: None,
        patch: PatchMarkers { merge: true, merge_key: Some("name".into()) },
        ownership: OwnershipMarkers::default(),
    };
    Definition::with_properties("io.k8s.apimachinery.pkg.apis.meta.v1.Initializers", vec![pending])
});

type Object = Map<String, Value>;

/// Applies a patch to an object of the named definition.
pub(super) fn apply(schema: &str, object: &Value, patch: &Value) -> Result<Value, PatchError> {
    let (Value::Object(object), Value::Object(patch)) = (object, patch) else {
        return Err(malformed("invalid JSON document"));
    };
    merge_map(object.clone(), patch.clone(), schemas().find(schema)).map(Value::Object)
}

fn malformed(text: &str) -> PatchError {
    PatchError::Malformed(text.to_owned())
}

/// The definition of one field. `None` for fields of free-form maps.
struct FieldInfo<'a> {
    markers: PatchMarkers,
    /// The definition of the object or, for lists and maps, of the elements.
    inner: Option<&'a Definition>,
}

fn field_info<'a>(definition: Option<&'a Definition>, name: &str) -> FieldInfo<'a> {
    if name == "initializers" && definition.is_some_and(|definition| &*definition.name == METADATA) {
        return FieldInfo { markers: PatchMarkers::default(), inner: Some(&INITIALIZERS) };
    }
    let property = definition.and_then(|definition| definition.property(name));
    let Some(property) = property else { return FieldInfo { markers: PatchMarkers::default(), inner: None } };
    let value_type = match &property.value_type {
        ValueType::List(item) => item,
        value_type => value_type,
    };
    let inner = match value_type {
        ValueType::Object(id) => Some(schemas().get(*id)),
        _ => None,
    };
    FieldInfo { markers: property.patch.clone(), inner }
}

fn merge_map(
    mut original: Object,
    mut patch: Object,
    definition: Option<&Definition>,
) -> Result<Object, PatchError> {
    if let Some(directive) = patch.remove(DIRECTIVE) {
        return match directive.as_str() {
            Some("replace") => Ok(patch),
            Some("delete") => Ok(Object::new()),
            _ => Err(malformed(&format!("unknown patch type '{}' in map", plain(&directive)))),
        };
    }
    retain_keys(&mut original, &mut patch)?;
    merge_ordered_lists(&mut original, &mut patch, definition)?;
    for (name, value) in patch {
        if let Some(list) = name.strip_prefix(DELETE_PRIMITIVES) {
            let Value::Array(gone) = value else {
                return Err(malformed("invalid patch format of primitive list"));
            };
            if let Some(Value::Array(items)) = original.get_mut(list) {
                let gone = Places::of(&gone, None);
                items.retain(|item| gone.position(item).is_none());
            }
            continue;
        }
        if value.is_null() {
            original.remove(&name);
            continue;
        }
        let merged = match (original.remove(&name), value) {
            (Some(Value::Object(old)), Value::Object(new)) => {
                let info = field_info(definition, &name);
                Value::Object(merge_map(old, new, info.inner)?)
            }
            (Some(Value::Array(old)), Value::Array(new)) => {
                Value::Array(merge_list(old, new, &field_info(definition, &name))?)
            }
            (_, new) => remove_directives(new),
        };
        original.insert(name, merged);
    }
    Ok(original)
}

/// Removes the keys that `$retainKeys` does not list.
fn retain_keys(original: &mut Object, patch: &mut Object) -> Result<(), PatchError> {
    let Some(directive) = patch.remove(RETAIN_KEYS) else { return Ok(()) };
    let Value::Array(kept) = directive else { return Err(malformed("invalid patch format of retainKeys")) };
    let kept: HashSet<&str> = kept.iter().filter_map(Value::as_str).collect();
    let keeps = |name: &str| kept.contains(name);
    if patch.iter().any(|(name, value)| !value.is_null() && !name.starts_with('$') && !keeps(name)) {
        return Err(malformed("invalid patch format of retainKeys"));
    }
    original.retain(|name, _| keeps(name));
    Ok(())
}

/// Merges the lists with a `$setElementOrder`, and puts them into that order.
fn merge_ordered_lists(
    original: &mut Object,
    patch: &mut Object,
    definition: Option<&Definition>,
) -> Result<(), PatchError> {
    let directives: Vec<String> = patch.keys().filter(|name| name.starts_with(SET_ORDER)).cloned().collect();
    for directive in directives {
        let name = directive[SET_ORDER.len()..].to_owned();
        let Some(Value::Array(order)) = patch.remove(&directive) else {
            return Err(malformed("invalid patch format of setElementOrder list"));
        };
        let info = field_info(definition, &name);
        let key = info.markers.merge_key.as_deref();
        if patch.get(&name).is_some_and(Value::is_null) {
            continue;
        }
        let old = match original.get(&name) {
            Some(Value::Array(old)) => Some(old.clone()),
            _ => None,
        };
        let merged = match (old.clone(), patch.remove(&name)) {
            (Some(old), Some(Value::Array(new))) => {
                check_order(&new, &order, key)?;
                merge_list(old, new, &info)?
            }
            (Some(old), _) => old,
            (None, Some(Value::Array(new))) => match remove_directives(Value::Array(new)) {
                Value::Array(new) => new,
                _ => Vec::new(),
            },
            (None, _) => continue,
        };
        let server = old.unwrap_or_default();
        original.insert(name, Value::Array(in_order(merged, &order, &server, key)));
    }
    Ok(())
}

/// Checks that the elements in a patch have the order of its `$setElementOrder`.
fn check_order(items: &[Value], order: &[Value], key: Option<&str>) -> Result<(), PatchError> {
    let mut last = 0;
    let places = Places::of(order, key);
    for item in items.iter().filter(|item| item.get(DIRECTIVE).is_none()) {
        match places.position(item) {
            Some(at) if at >= last => last = at,
            _ => {
                return Err(malformed(&format!(
                    "The order in patch list:\n{}\n doesn't match {SET_ORDER} list:\n{}\n",
                    Value::from(items.to_vec()),
                    Value::from(order.to_vec())
                )));
            }
        }
    }
    Ok(())
}

fn merge_list(old: Vec<Value>, new: Vec<Value>, info: &FieldInfo<'_>) -> Result<Vec<Value>, PatchError> {
    if !info.markers.merge {
        return Ok(match remove_directives(Value::Array(new)) {
            Value::Array(new) => new,
            _ => Vec::new(),
        });
    }
    let key = info.markers.merge_key.as_deref();
    let is_map = old.first().or(new.first()).is_some_and(Value::is_object);
    if !is_map {
        let mut merged = old.clone();
        let mut places = Places::of(&merged, None);
        for item in &new {
            if places.position(item).is_none() {
                places.push(item);
                merged.push(item.clone());
            }
        }
        return Ok(in_order(merged, &new, &old, None));
    }
    let Some(key) = key else { return Err(malformed("cannot merge lists without merge key")) };
    let server = old.clone();
    let ElementLists { old: mut merged, new } = apply_element_directives(old, new, key)?;
    let mut places = Places::of(&merged, Some(key));
    for item in &new {
        let Value::Object(element) = item else { return Err(malformed("list element is not an object")) };
        if !element.contains_key(key) {
            return Err(PatchError::Unprocessable(format!(
                "map: {item} does not contain declared merge key: {key}"
            )));
        }
        match places.position(item).and_then(|at| merged.get_mut(at)) {
            Some(Value::Object(old)) => *old = merge_map(std::mem::take(old), element.clone(), info.inner)?,
            Some(other) => *other = item.clone(),
            None => {
                places.push(item);
                merged.push(remove_directives(item.clone()));
            }
        }
    }
    Ok(in_order(merged, &new, &server, Some(key)))
}

/// The elements to merge.
struct ElementLists {
    /// Elements of the object.
    old: Vec<Value>,
    /// Elements of the patch.
    new: Vec<Value>,
}

/// Applies `$patch` directives of list elements.
fn apply_element_directives(
    mut old: Vec<Value>,
    new: Vec<Value>,
    key: &str,
) -> Result<ElementLists, PatchError> {
    let (mut rest, mut gone, mut replace) = (Vec::new(), Vec::new(), false);
    for item in new {
        match item.get(DIRECTIVE).map(plain).as_deref() {
            None => rest.push(item),
            Some("delete") => {
                if item.get(key).is_none() {
                    return Err(PatchError::Unprocessable(format!(
                        "map: {item} does not contain declared merge key: {key}"
                    )));
                }
                gone.push(item);
            }
            Some("replace") => replace = true,
            Some("merge") => return Err(malformed("merging lists cannot yet be specified in the patch")),
            Some(other) => return Err(malformed(&format!("unknown patch type '{other}' in map"))),
        }
    }
    if replace {
        let old = rest.into_iter().map(remove_directives).collect();
        return Ok(ElementLists { old, new: Vec::new() });
    }
    let gone = Places::of(&gone, Some(key));
    old.retain(|element| gone.position(element).is_none());
    Ok(ElementLists { old, new: rest })
}

/// Removes directives and nulls from a part of the patch that the object does not have.
fn remove_directives(value: Value) -> Value {
    match value {
        Value::Object(map) => {
            let kept = map.into_iter().filter(|(name, value)| !value.is_null() && !is_directive(name));
            Value::Object(kept.map(|(name, value)| (name, remove_directives(value))).collect_map())
        }
        Value::Array(list) => {
            let deletes = |item: &Value| item.get(DIRECTIVE).is_some_and(|word| word == "delete");
            Value::Array(list.into_iter().filter(|item| !deletes(item)).map(remove_directives).collect())
        }
        other => other,
    }
}

fn is_directive(name: &str) -> bool {
    name == DIRECTIVE
        || name == RETAIN_KEYS
        || name.starts_with(SET_ORDER)
        || name.starts_with(DELETE_PRIMITIVES)
}

fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

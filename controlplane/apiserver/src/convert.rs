//! Conversion of objects between the stored version and the version of a request.
//!
//! An object that is already in the requested version is not copied. Every other object is parsed and converted. The
//! copies of a list stay in memory until its response is sent, so all lists share a limit on the bytes of their copies.

use std::sync::Arc;

use coracle_kinds::{
    Resource,
    resource::{ConversionError, Convert},
};
use futures::FutureExt as _;
use serde_json::Value;

use crate::{
    cache::Object,
    error::{ApiError, Result},
    offload,
};

/// Bytes of JSON text that are converted at a time. The parsed tree takes about ten times the memory of its text.
const PART_BYTES: usize = 4 << 20;

/// Bytes of the objects that a list must copy, because they are in another version than `to`.
pub(crate) fn copied_bytes<'a>(to: &Resource, objects: impl IntoIterator<Item = &'a Arc<Object>>) -> usize {
    let copied = objects.into_iter().filter(|object| object.api_version() != to.api_version());
    copied.map(|object| object.json_len()).sum()
}

/// The object in the version of `to`.
pub(crate) async fn object(to: &Resource, object: Arc<Object>) -> Result<Arc<Object>> {
    if object.api_version() == to.api_version() {
        return Ok(object);
    }
    let value = value(to, object.value()).await?;
    Ok(Arc::new(Object::of(to, object.key.clone(), object.revision, &value)))
}

/// Converts the objects to the version of `to` and keeps their order. Converts about [`PART_BYTES`] of text at a time.
pub(crate) async fn objects(to: &Resource, mut objects: Vec<Arc<Object>>) -> Result<Vec<Arc<Object>>> {
    let mut next = 0;
    while next < objects.len() {
        let (part, end) = part(to.api_version(), &objects, next);
        next = end;
        let tree = |object: &Arc<Object>| offload::run(object.is_large(), || object.value());
        let old = part.iter().filter_map(|place| objects.get(*place)).map(tree).collect();
        for (place, value) in part.into_iter().zip(values(to, to.convert.as_deref(), old).await?) {
            let Some(slot) = objects.get_mut(place) else { continue };
            *slot = Arc::new(Object::of(to, slot.key.clone(), slot.revision, &value));
        }
    }
    Ok(objects)
}

/// Indexes of the next objects that need a conversion, and the start index of the next part.
fn part(api_version: &str, objects: &[Arc<Object>], begin: usize) -> (Vec<usize>, usize) {
    let (mut places, mut bytes) = (Vec::new(), 0);
    for (place, object) in objects.iter().enumerate().skip(begin) {
        if bytes >= PART_BYTES {
            return (places, place);
        }
        if object.api_version() != api_version {
            bytes += object.json_len();
            places.push(place);
        }
    }
    (places, objects.len())
}

/// The object in the version of `to`, as a tree.
pub(crate) async fn value(to: &Resource, value: Value) -> Result<Value> {
    if value["apiVersion"] == to.api_version() {
        return Ok(value);
    }
    convert_one(to, to.convert.as_deref(), value).await
}

/// Whether the conversion of an object to the version of `to` waits for a webhook.
pub(crate) fn waits(to: &Resource, object: &Object) -> bool {
    object.api_version() != to.api_version() && calls_webhook(to)
}

/// Converts like [`value`], but does not wait. It fails if the conversion [waits](waits).
pub(crate) fn value_at_once(to: &Resource, stored: Value) -> Result<Value> {
    let failed = || Err(ApiError::internal("the conversion of the object waits for a webhook"));
    value(to, stored).now_or_never().unwrap_or_else(failed)
}

/// Converts an object between two versions of a resource. For the stored version, the conversion of `from` takes
/// precedence: the stored version may have no conversion of its own.
pub(crate) async fn between(from: &Resource, to: &Resource, value: Value) -> Result<Value> {
    if value["apiVersion"] == to.api_version() {
        return Ok(value);
    }
    convert_one(to, conversion(from, to), value).await
}

/// Converts like [`between`], but does not wait. `None` if a webhook converts the objects, or if the conversion fails.
pub(crate) fn immediately(from: &Resource, to: &Resource, mut value: Value) -> Option<Value> {
    match conversion(from, to) {
        None => {
            value["apiVersion"] = to.api_version().into();
            Some(value)
        }
        Some(convert) if convert.is_immediate() => {
            convert.convert(vec![value], to).now_or_never()?.ok()?.pop()
        }
        Some(_webhook) => None,
    }
}

/// Whether a webhook converts the objects to this version.
pub(crate) fn calls_webhook(version: &Resource) -> bool {
    version.convert.as_deref().is_some_and(|convert| !convert.is_immediate())
}

fn conversion<'a>(from: &'a Resource, to: &'a Resource) -> Option<&'a dyn Convert> {
    let own = to.convert.as_deref();
    if to.is_storage_version() { from.convert.as_deref().or(own) } else { own }
}

async fn convert_one(to: &Resource, convert: Option<&dyn Convert>, value: Value) -> Result<Value> {
    let converted = values(to, convert, vec![value]).await?.pop();
    converted.ok_or_else(|| ApiError::internal("a conversion returned no object"))
}

async fn values(to: &Resource, convert: Option<&dyn Convert>, mut objects: Vec<Value>) -> Result<Vec<Value>> {
    let count = objects.len();
    if count == 0 {
        return Ok(objects);
    }
    let converted = match convert {
        Some(convert) => convert.convert(objects, to).await.map_err(failed)?,
        None => {
            for object in &mut objects {
                object["apiVersion"] = to.api_version().into();
            }
            objects
        }
    };
    if converted.len() != count {
        let why = format!("a conversion returned {} objects of {count}", converted.len());
        return Err(ApiError::internal(why));
    }
    Ok(converted)
}

fn failed(error: ConversionError) -> ApiError {
    ApiError::internal(error)
}

#[cfg(test)]
mod tests {
    use coracle_kinds::kind::by_resource;
    use serde_json::json;

    use super::*;

    #[test]
    fn a_large_list_is_converted_in_parts() {
        let kind = by_resource("", "v1", "configmaps").unwrap();
        let object = |number: usize| {
            let data = json!({"metadata": {"name": number.to_string()}, "data": {"a": "x".repeat(1 << 20)}});
            Arc::new(Object::of(kind, number.to_string().into(), 1, &data))
        };
        let all: Vec<_> = (0..10).map(object).collect();
        assert_eq!(part("v2", &all, 0), (vec![0, 1, 2, 3], 4));
        assert_eq!(part("v2", &all, 8), (vec![8, 9], 10));
        assert_eq!(part("v1", &all, 0), (Vec::new(), 10));
        assert_eq!(copied_bytes(kind, &all), 0, "no object is in another version");
    }
}

//! Conversion of objects between the stored version and the version of a request.
//!
//! An object of the requested version passes without a copy. Every other object is parsed and converted.

use std::sync::Arc;

use coracle_kinds::{
    Resource,
    resource::{ConversionError, Convert},
};
use serde_json::Value;

use crate::{
    cache::Object,
    error::{ApiError, Result},
};

/// The object in a version.
pub(crate) async fn object(to: &Resource, object: Arc<Object>) -> Result<Arc<Object>> {
    if object.api_version() == to.api_version() {
        return Ok(object);
    }
    let value = value(to, object.value()).await?;
    Ok(Arc::new(Object::of(to, object.key.clone(), object.revision, &value)))
}

/// The objects in a version, in the same order. All that need it are converted at once.
pub(crate) async fn objects(to: &Resource, mut objects: Vec<Arc<Object>>) -> Result<Vec<Arc<Object>>> {
    let mut places = Vec::new();
    let mut old = Vec::new();
    for (place, object) in objects.iter().enumerate() {
        if object.api_version() != to.api_version() {
            places.push(place);
            old.push(object.value());
        }
    }
    if places.is_empty() {
        return Ok(objects);
    }
    for (place, value) in places.into_iter().zip(values(to, to.convert.as_deref(), old).await?) {
        let Some(slot) = objects.get_mut(place) else { continue };
        *slot = Arc::new(Object::of(to, slot.key.clone(), slot.revision, &value));
    }
    Ok(objects)
}

/// The object in a version, as a tree.
pub(crate) async fn value(to: &Resource, value: Value) -> Result<Value> {
    if value["apiVersion"] == to.api_version() {
        return Ok(value);
    }
    one(to, to.convert.as_deref(), value).await
}

/// An object of one version of a resource in another version. The stored version itself may have no conversion.
pub(crate) async fn between(from: &Resource, to: &Resource, value: Value) -> Result<Value> {
    if value["apiVersion"] == to.api_version() {
        return Ok(value);
    }
    let own = to.convert.as_deref();
    let convert = if to.is_storage_version() { from.convert.as_deref().or(own) } else { own };
    one(to, convert, value).await
}

async fn one(to: &Resource, convert: Option<&dyn Convert>, value: Value) -> Result<Value> {
    let converted = values(to, convert, vec![value]).await?.pop();
    converted.ok_or_else(|| ApiError::internal("a conversion returned no object"))
}

async fn values(to: &Resource, convert: Option<&dyn Convert>, mut objects: Vec<Value>) -> Result<Vec<Value>> {
    let count = objects.len();
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

//! POST to a collection.

use serde_json::Value;

use crate::{
    call::Call,
    error::{ApiError, Result},
    field_manager::{self, Writer},
    reply::{self, Reply},
    write,
};

pub(crate) async fn run(call: &Call) -> Result<Reply> {
    field_manager::check_parameters(call, false)?;
    let (mut object, warnings) = call.object().await?;
    set_namespace(call, &mut object)?;
    let stored = write::create(call, object, Writer::Update).await?;
    let reply = reply::object(201, call.form()?, &call.kind, &stored);
    Ok(reply::warned(reply, &warnings))
}

/// Sets the namespace of the path in the object. Refuses an object with another namespace.
pub(crate) fn set_namespace(call: &Call, object: &mut Value) -> Result<()> {
    let namespace = call.namespace().to_owned();
    let metadata =
        write::metadata_mut(object).ok_or_else(|| ApiError::bad_request("metadata must be a map"))?;
    if !call.kind.namespaced {
        metadata.remove("namespace");
        return Ok(());
    }
    if namespace.is_empty() {
        return Err(ApiError::method_not_allowed());
    }
    match metadata.get("namespace").and_then(Value::as_str).unwrap_or_default() {
        "" => {
            metadata.insert("namespace".to_owned(), namespace.into());
            Ok(())
        }
        found if found == namespace => Ok(()),
        _ => Err(ApiError::bad_request(
            "the namespace of the provided object does not match the namespace sent on the request",
        )),
    }
}

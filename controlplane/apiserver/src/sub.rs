//! Subresources with logic of their own. Each has its own file.

pub(crate) mod binding;
pub(crate) mod eviction;
pub(crate) mod finalize;
pub(crate) mod kubelet;
mod log_options;
mod log_socket;
pub(crate) mod proxy;
pub(crate) mod scale;
pub(crate) mod stream;
pub(crate) mod token;

use serde_json::Value;

use crate::{
    body::Expected,
    call::Call,
    convert,
    error::{ApiError, Result},
    verb::create::set_namespace,
};

/// Decodes the body as the kind of the called subresource. Returns the object and warnings. As upstream, the object
/// gets the namespace of the path, and another namespace is refused, because admission policies read the namespace.
pub(crate) async fn body_of(call: &Call) -> Result<(Value, Vec<String>)> {
    let name = call.resource.subresource.as_str();
    let sub = call.kind.subresource(name).ok_or_else(ApiError::no_resource)?;
    let api_version = sub.api_version();
    let schema = coracle_kinds::kind::schema_of(&api_version, &sub.kind).ok_or_else(ApiError::no_resource)?;
    // As upstream, clients may send an Eviction of the older version `policy/v1beta1`.
    let alias = (sub.kind == "Eviction").then_some("policy/v1beta1");
    let expected = Expected::defined(&api_version, &sub.kind, schema).or_version(alias);
    let (mut object, warnings) = call.decode(&expected).await?;
    set_namespace(call, &mut object)?;
    Ok((object, warnings))
}

/// The object whose subresource is called.
pub(crate) async fn parent(call: &Call) -> Result<Value> {
    let object = call.current(&call.resource.name)?;
    convert::value(&call.kind, object.value()).await
}

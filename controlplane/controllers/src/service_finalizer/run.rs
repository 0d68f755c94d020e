//! Adds and removes the finalizer of LoadBalancer services.

use std::sync::Arc;

use super::plan;
use crate::context::Context;
use crate::error::{Error, is_not_found};
use crate::object::{ObjectExt, Service};
use crate::write::Part;

/// Adds the finalizer for a class, before the service gets an address. Returns the current service.
pub(crate) async fn hold(
    context: &Context,
    service: Arc<Service>,
    class: &str,
) -> Result<Arc<Service>, Error> {
    let Some(patch) = plan::hold(&service, class) else { return Ok(service) };
    context.writer(&context.caches.services).merge(&service.key(), Part::Main, patch).await
}

/// Removes the finalizer of a class if it is due. The caller has withdrawn the addresses before.
pub(crate) async fn release(
    context: &Context,
    service: &Service,
    class: &str,
    is_served: bool,
) -> Result<(), Error> {
    let Some(patch) = plan::release(service, class, is_served) else { return Ok(()) };
    match context.writer(&context.caches.services).merge(&service.key(), Part::Main, patch).await {
        Err(Error::Request { source, .. }) if is_not_found(&source) => Ok(()),
        other => other.map(drop),
    }
}

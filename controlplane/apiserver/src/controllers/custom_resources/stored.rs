//! Definitions as stored objects: their kind, and changes of them by this server.

use std::sync::Arc;

use coracle_kinds::Resource;
use coracle_kinds::kind::by_resource;
use serde_json::Value;

use crate::call::Call;
use crate::error::{ApiError, Result};
use crate::field_manager::Writer;
use crate::state::State;
use crate::write::{self, Part};

/// The kind of definitions.
pub(super) fn kind() -> Result<Arc<Resource>> {
    by_resource("apiextensions.k8s.io", "v1", "customresourcedefinitions")
        .cloned()
        .ok_or_else(ApiError::no_resource)
}

/// Changes a definition as this server.
pub(super) async fn edit(
    state: &Arc<State>,
    name: &str,
    change: impl Fn(&mut Value) + Send + Sync,
) -> Result<()> {
    let call = Call::internal(state, kind()?, &Value::Null);
    write::update(&call, name, (Part::Internal, Writer::Update), |old| {
        let mut new = old.clone();
        change(&mut new);
        Ok(new)
    })
    .await
    .map(|_| ())
}

//! Creates missing namespaces for admission through the write pipeline.

use std::sync::Weak;

use async_trait::async_trait;
use coracle_kinds::kind::by_resource;
use serde_json::json;

use crate::{
    admit::CreateNamespace,
    call::Call,
    error::{ApiError, Result},
    field_manager::Writer,
    state::State,
    write,
};

/// Creates namespaces as a component of this server.
pub(crate) struct NamespaceCreator(pub(crate) Weak<State>);

#[async_trait]
impl CreateNamespace for NamespaceCreator {
    async fn create(&self, name: &str) -> Result<()> {
        let Some(state) = self.0.upgrade() else { return Ok(()) };
        let kind = by_resource("", "v1", "namespaces").ok_or_else(ApiError::no_resource)?;
        let namespace = json!({
            "apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}, "spec": {}, "status": {},
        });
        let call = Call::internal(&state, kind.clone(), &namespace);
        match write::create(&call, namespace, Writer::Update).await {
            Err(error) if error.reason != "AlreadyExists" => Err(error),
            _ => Ok(()),
        }
    }
}

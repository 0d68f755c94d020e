//! NamespaceAutoProvision creates the missing namespace of a new object. NamespaceExists refuses requests in a missing
//! namespace.
//!
//! Source: `plugin/pkg/admission/namespace/{autoprovision,exists}`.

use std::sync::Arc;

use async_trait::async_trait;
use coracle_kinds::kind::by_resource;
use serde_json::{Value, json};

use crate::{
    admit::{Admit, Attributes, Operation},
    bootstrap,
    error::{ApiError, Result},
    field_manager::Writer,
    server::State,
    write,
};

/// Creates the namespace of a new object.
pub(in crate::admit) struct NamespaceAutoProvision;

/// Refuses requests in a namespace that does not exist.
pub(in crate::admit) struct NamespaceExists;

#[async_trait]
impl Admit for NamespaceAutoProvision {
    async fn mutate(&self, state: &State, attributes: &Attributes<'_>, _object: &mut Value) -> Result<()> {
        let creates = attributes.operation == Operation::Create && !attributes.dry_run;
        if !creates || exists(state, attributes) {
            return Ok(());
        }
        let Some(kind) = by_resource("", "v1", "namespaces") else { return Ok(()) };
        let namespace = json!({
            "apiVersion": "v1", "kind": "Namespace", "metadata": {"name": attributes.namespace}, "spec": {}, "status": {},
        });
        let Some(shared) = state.shared() else { return Ok(()) };
        let call = bootstrap::call(&shared, Arc::clone(kind), &namespace);
        match write::create(&call, namespace, Writer::Update).await {
            Ok(_) => Ok(()),
            Err(error) if error.reason == "AlreadyExists" => Ok(()),
            Err(error) => Err(error),
        }
    }
}

#[async_trait]
impl Admit for NamespaceExists {
    async fn validate(&self, state: &State, attributes: &Attributes<'_>, _object: &Value) -> Result<()> {
        if attributes.operation == Operation::Delete || exists(state, attributes) {
            return Ok(());
        }
        let kind = by_resource("", "v1", "namespaces").ok_or_else(ApiError::no_resource)?;
        Err(ApiError::not_found(kind, attributes.namespace))
    }
}

fn exists(state: &State, attributes: &Attributes<'_>) -> bool {
    let Some(kind) = by_resource("", "v1", "namespaces") else { return true };
    !attributes.kind.namespaced || state.cache.get(kind, "", attributes.namespace).is_some()
}

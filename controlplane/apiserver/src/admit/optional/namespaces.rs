//! NamespaceAutoProvision creates the missing namespace of a new object. NamespaceExists refuses requests in a missing
//! namespace.
//!
//! Source: `plugin/pkg/admission/namespace/{autoprovision,exists}`.

use async_trait::async_trait;
use coracle_kinds::kind::by_resource;
use serde_json::Value;

use crate::{
    admit::{Admission, Admit, Attributes, Operation},
    error::{ApiError, Result},
};

/// Creates the namespace of a new object.
pub(in crate::admit) struct NamespaceAutoProvision;

/// Refuses requests in a namespace that does not exist.
pub(in crate::admit) struct NamespaceExists;

#[async_trait]
impl Admit for NamespaceAutoProvision {
    async fn mutate(
        &self,
        admission: &Admission,
        attributes: &Attributes<'_>,
        _object: &mut Value,
    ) -> Result<()> {
        let creates = attributes.operation == Operation::Create && !attributes.dry_run;
        if !creates || exists(admission, attributes) {
            return Ok(());
        }
        admission.namespaces.create(attributes.namespace).await
    }
}

#[async_trait]
impl Admit for NamespaceExists {
    async fn validate(
        &self,
        admission: &Admission,
        attributes: &Attributes<'_>,
        _object: &Value,
    ) -> Result<()> {
        if attributes.operation == Operation::Delete || exists(admission, attributes) {
            return Ok(());
        }
        let kind = by_resource("", "v1", "namespaces").ok_or_else(ApiError::no_resource)?;
        Err(ApiError::not_found(kind, attributes.namespace))
    }
}

fn exists(admission: &Admission, attributes: &Attributes<'_>) -> bool {
    let Some(kind) = by_resource("", "v1", "namespaces") else { return true };
    !attributes.kind.namespaced || admission.cache.get(kind, "", attributes.namespace).is_some()
}

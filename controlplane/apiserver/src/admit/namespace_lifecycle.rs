//! Namespace lifecycle: objects can be created only in existing namespaces that are not being deleted. The namespaces
//! `default`, `kube-system` and `kube-public` cannot be deleted.

use async_trait::async_trait;
use coracle_kinds::kind::by_resource;
use serde_json::{Value, json};

use super::{Admission, Admit, Attributes, Operation};
use crate::error::{ApiError, Result};

const IMMORTAL: &[&str] = &["default", "kube-system", "kube-public"];

pub(super) struct NamespaceLifecycle;

#[async_trait]
impl Admit for NamespaceLifecycle {
    async fn validate(
        &self,
        admission: &Admission,
        attributes: &Attributes<'_>,
        _object: &Value,
    ) -> Result<()> {
        let Attributes { kind, name, namespace, .. } = *attributes;
        if attributes.is(Operation::Delete, "Namespace") && IMMORTAL.contains(&name) {
            return Err(ApiError::forbidden_object(kind, name, "this namespace may not be deleted"));
        }
        if attributes.operation != Operation::Create || !kind.namespaced {
            return Ok(());
        }
        let Some(namespaces) = by_resource("", "v1", "namespaces") else { return Ok(()) };
        let found = admission.cache.get(namespaces, "", namespace);
        let found = found.ok_or_else(|| ApiError::not_found(namespaces, namespace))?;
        let found = found.part(&[&["metadata", "deletionTimestamp"]]);
        if found["metadata"]["deletionTimestamp"].is_null() {
            return Ok(());
        }
        let why =
            format!("unable to create new content in namespace {namespace} because it is being terminated");
        let mut error = ApiError::forbidden_object(kind, name, &why);
        let message = format!("namespace {namespace} is being terminated");
        let cause =
            json!({"reason": "NamespaceTerminating", "message": message, "field": "metadata.namespace"});
        error.details["causes"] = json!([cause]);
        Err(error)
    }

    fn precedes_validation(&self) -> bool {
        true
    }

    /// Evictions, bindings and tokens are also refused in a namespace that is being deleted. `kubectl drain` expects
    /// this refusal with its cause, and waits for the deletion of the pod.
    fn handles_own_objects(&self) -> bool {
        true
    }
}

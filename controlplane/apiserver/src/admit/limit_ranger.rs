//! Limit ranges of a namespace: defaults for the containers of new and resized pods, and limits on pods and claims.

use async_trait::async_trait;
use coracle_kinds::{kind::by_resource, limit_range};
use serde_json::Value;

use super::{Admission, Admit, Attributes, Operation};
use crate::error::{ApiError, Result};

pub(super) struct LimitRanger;

#[async_trait]
impl Admit for LimitRanger {
    async fn mutate(
        &self,
        admission: &Admission,
        attributes: &Attributes<'_>,
        object: &mut Value,
    ) -> Result<()> {
        if is_checked_pod(attributes) && !is_being_deleted(attributes) {
            for range in ranges(admission, attributes.namespace)? {
                limit_range::complete(&range, object);
            }
        }
        Ok(())
    }

    async fn validate(
        &self,
        admission: &Admission,
        attributes: &Attributes<'_>,
        object: &Value,
    ) -> Result<()> {
        let claim = attributes.is(Operation::Create, "PersistentVolumeClaim")
            || attributes.is(Operation::Update, "PersistentVolumeClaim");
        if is_being_deleted(attributes) || !claim && !is_checked_pod(attributes) {
            return Ok(());
        }
        for range in ranges(admission, attributes.namespace)? {
            let problems = match claim {
                true => limit_range::check_claim(&range, object),
                false => limit_range::check_pod(&range, object),
            };
            let why = match problems.as_slice() {
                [] => continue,
                [one] => one.clone(),
                all => format!("[{}]", all.join(", ")),
            };
            return Err(ApiError::forbidden_object(attributes.kind, attributes.name, why));
        }
        Ok(())
    }
}

/// Whether the request creates a pod or changes a pod's resources.
fn is_checked_pod(attributes: &Attributes<'_>) -> bool {
    attributes.writes_new_pod() || attributes.is_resize()
}

/// Whether the object is being deleted. As upstream, no limit applies to such an object. Otherwise a limit that is
/// newer than the object would prevent the removal of its finalizers.
fn is_being_deleted(attributes: &Attributes<'_>) -> bool {
    attributes.old.is_some_and(|old| !old["metadata"]["deletionTimestamp"].is_null())
}

/// The LimitRanges of a namespace.
///
/// # Errors
/// `InternalError` if one of them cannot be decrypted and no former state is known.
fn ranges(admission: &Admission, namespace: &str) -> Result<Vec<Value>> {
    let Some(kind) = by_resource("", "v1", "limitranges") else { return Ok(Vec::new()) };
    admission.cache.check_complete(kind, namespace)?;
    Ok(admission.cache.list(kind, namespace).iter().map(|range| range.value()).collect())
}

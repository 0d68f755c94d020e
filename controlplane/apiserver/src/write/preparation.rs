//! Preparation of a written object: its defaults, and the strategy of the written part. Long defaulting waits for a
//! slot.

use coracle_kinds::{Resource, defaults, strategy};
use serde_json::Value;

use super::{Part, identity::keep, metadata_mut};
use crate::{error::Result, offload};

/// Sets the defaults of a new object.
pub(super) async fn set_defaults(kind: &Resource, object: &mut Value) -> Result<()> {
    let is_long = kind.strategy().has_long_defaults(object);
    offload::run_long(is_long, || defaults::apply(kind, object)).await
}

/// Prepares an updated object.
pub(super) async fn prepare(kind: &Resource, part: Part, old: &Value, new: &mut Value) -> Result<()> {
    let is_long = kind.strategy().has_long_defaults(new);
    offload::run_long(is_long, || apply(kind, part, old, new)).await
}

/// Prepares an updated object again, after admission has changed it. Admission may change only the part of the object
/// that the request may change.
pub(super) async fn repeat(kind: &Resource, part: Part, old: &Value, new: &mut Value) -> Result<()> {
    let managed_fields = new["metadata"]["managedFields"].clone();
    prepare(kind, part, old, new).await?;
    put_managed_fields(new, Some(managed_fields));
    Ok(())
}

/// Applies the defaults and the strategy of the updated part. All other parts stay as in the old object.
fn apply(kind: &Resource, part: Part, old: &Value, new: &mut Value) {
    match part {
        Part::Status => strategy::prepare_for_status_update(kind, new, old),
        Part::EphemeralContainers => {
            defaults::apply(kind, new);
            strategy::prepare_for_ephemeral_containers(kind, new, old);
        }
        Part::Resize => {
            defaults::apply(kind, new);
            strategy::prepare_for_resize(kind, new, old);
        }
        Part::Approval => strategy::prepare_for_approval(kind, new, old),
        Part::Main | Part::Internal => {
            defaults::apply(kind, new);
            strategy::prepare_for_update(kind, new, old);
        }
    }
    kind.strategy().canonical(new);
}

/// Sets `managedFields` to entries that are already computed. Null removes the field.
pub(super) fn put_managed_fields(object: &mut Value, entries: Option<Value>) {
    if let Some(metadata) = metadata_mut(object) {
        keep(metadata, "managedFields", &entries.unwrap_or_default());
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::{custom_resources::with_spec, request_owner};

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_long_preparation_after_admission_needs_a_slot() {
        let kind = with_spec(&json!({"type": "array", "items": {"type": "object", "properties": {
            "a": {"type": "string", "default": "b".repeat(1000)}}}}));
        let object = |items: usize| {
            json!({"apiVersion": "a.example/v1", "kind": "Cup", "spec": vec![json!({}); items],
                "metadata": {"name": "a", "managedFields": [{"manager": "m"}]}})
        };
        let repeat = async |items: usize| {
            let (old, mut new) = (object(0), object(items));
            let repeated = repeat(&kind, Part::Main, &old, &mut new);
            let done = request_owner::scope("again-eve".into(), repeated).await;
            done.map(|()| new)
        };
        let occupied = offload::occupy("again-eve").await;
        assert!(repeat(1).await.is_ok());
        assert_eq!(repeat(2000).await.unwrap_err().code, 429);
        drop(occupied);
        let repeated = repeat(2000).await.unwrap();
        assert!(repeated["spec"][0]["a"].is_string());
        assert_eq!(repeated["metadata"]["managedFields"], json!([{"manager": "m"}]));
    }
}

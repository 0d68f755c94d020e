//! Custom resources: creates resources from definitions.
//!
//! | part | module |
//! |---|---|
//! | creates the resources of a definition | `resource` |
//! | converts objects by a webhook | `conversion` |
//! | rules for objects | `strategy` |
//! | types for field ownership | `ownership` |
//!
//! `controllers/custom_resources.rs` watches the definitions.

mod conversion;
mod ownership;
mod resource;
mod strategy;

use coracle_custom_resources::conditions::{self, FINALIZER, condition};
use serde_json::Value;

use crate::object_meta::{metadata_mut, now};

pub(crate) use conversion::ConversionClient;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use conversion::fuzz as fuzz_conversion;
pub(crate) use resource::of_definition;
#[cfg(test)]
pub(crate) use resource::with_spec;

/// Prepares the deletion of a definition: the finalizer keeps it until its objects are deleted.
pub(crate) fn mark_terminating(definition: &mut Value) {
    if let Some(metadata) = metadata_mut(definition) {
        let finalizers = metadata.entry("finalizers").or_insert_with(|| Value::Array(Vec::new()));
        if let Some(list) = finalizers.as_array_mut()
            && !list.iter().any(|known| known == FINALIZER)
        {
            list.push(FINALIZER.into());
        }
    }
    let text = "CustomResource deletion is pending";
    let terminating = condition("Terminating", "True", "InstanceDeletionPending", text);
    conditions::set(definition, &terminating, &now());
}

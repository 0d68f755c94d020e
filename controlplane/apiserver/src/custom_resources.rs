//! Custom resources: definitions become resources of the registry.
//!
//! | part | module |
//! |---|---|
//! | follows the definitions: names, conditions, resources | `controller` |
//! | deletes the objects of a deleted definition | `cleanup` |
//! | makes resources of a definition | `resource` |
//! | converts objects by a webhook | `conversion` |
//! | rules for objects | `strategy` |
//! | types for field ownership | `ownership` |
//!
//! A definition is served before its condition `Established` is written, so a client that waits for the condition can use
//! the resource at once.

mod cleanup;
mod controller;
mod conversion;
mod ownership;
mod resource;
mod stored;
mod strategy;

use coracle_custom_resources::conditions::{self, FINALIZER, condition};
use serde_json::Value;

use crate::write;

pub(crate) use controller::start;

/// Prepares the deletion of a definition: the finalizer keeps it until its objects are deleted.
pub(crate) fn mark_terminating(definition: &mut Value) {
    if let Some(metadata) = write::metadata_mut(definition) {
        let finalizers = metadata.entry("finalizers").or_insert_with(|| Value::Array(Vec::new()));
        if let Some(list) = finalizers.as_array_mut()
            && !list.iter().any(|known| known == FINALIZER)
        {
            list.push(FINALIZER.into());
        }
    }
    let text = "CustomResource deletion is pending";
    let terminating = condition("Terminating", "True", "InstanceDeletionPending", text);
    conditions::set(definition, &terminating, &write::now());
}

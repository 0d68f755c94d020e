//! Validation of pods, and of the parts that pods share with other kinds. Each violation is one cause with its field
//! path and upstream's text.

pub mod claim_spec;
mod claims;
mod container;
mod env;
pub mod file_path;
pub mod format;
pub mod fully_qualified_name;
mod immutable;
pub mod initializers;
pub mod meta;
mod mount;
pub mod pod;
pub mod pod_annotations;
pub mod port;
mod probe;
mod resize;
pub mod resources;
pub mod restart;
pub mod scheduling;
mod security;
pub mod selector;
pub mod standard_resource;
pub mod value;
mod volume;
pub mod volume_source;
mod windows;

use serde_json::Value;

use self::meta::MetadataRules;
use self::value::{entries, items, text};
use crate::cause::{Cause, Causes, Path};

/// Validates a new pod, after defaulting.
pub fn create(pod: &Value) -> Vec<Cause> {
    let mut causes = Causes::default();
    meta::every_write(&mut causes, MetadataRules::OF_PODS, pod);
    pod::pod(&mut causes, pod, None);
    causes.into_list()
}

/// Validates an update of `/ephemeralcontainers`.
pub fn ephemeral_containers(new: &Value, old: &Value) -> Vec<Cause> {
    let mut causes = Causes::default();
    pod::ephemeral_update(&mut causes, new, old);
    causes.into_list()
}

/// Validates an update of `/resize` of a pod.
pub fn resize(new: &Value, old: &Value) -> Vec<Cause> {
    let mut causes = Causes::default();
    meta::every_write(&mut causes, MetadataRules::OF_PODS, new);
    meta::update(&mut causes, new, old);
    pod::new_problems(&mut causes, new, old, pod::of_pod);
    resize::pod(&mut causes, new, old);
    causes.into_list()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The causes that a check adds: field and message.
    pub(super) fn found(check: impl FnOnce(&mut Causes)) -> Vec<String> {
        let mut causes = Causes::default();
        check(&mut causes);
        causes.into_list().iter().map(|cause| format!("{}: {}", cause.field, cause.message)).collect()
    }
}

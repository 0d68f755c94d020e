//! Volumes, claims and storage classes.

use serde_json::Value;

use super::{child, child_of, fill, present};

/// Sets the defaults of a PersistentVolume.
pub(crate) fn volume(object: &mut Value) {
    let Some(spec) = child(object, "spec") else { return };
    fill(spec, "persistentVolumeReclaimPolicy", "Retain");
    fill(spec, "volumeMode", "Filesystem");
    if let Some(path) = present(spec, "hostPath") {
        path.entry("type").or_insert_with(|| "".into());
    }
    if let Some(status) = child(object, "status") {
        fill(status, "phase", "Pending");
    }
}

/// Sets the defaults of a PersistentVolumeClaim.
pub(crate) fn claim(object: &mut Value) {
    if let Some(object) = object.as_object_mut() {
        claim_of(object);
    }
}

/// Sets the defaults of a claim, also of one in a stateful set.
pub(super) fn claim_of(object: &mut serde_json::Map<String, Value>) {
    if let Some(spec) = child_of(object, "spec") {
        fill(spec, "volumeMode", "Filesystem");
    }
    if let Some(status) = child_of(object, "status") {
        fill(status, "phase", "Pending");
    }
}

/// Sets the defaults of a StorageClass.
pub(crate) fn class(object: &mut Value) {
    if let Some(object) = object.as_object_mut() {
        fill(object, "reclaimPolicy", "Delete");
        fill(object, "volumeBindingMode", "Immediate");
    }
}

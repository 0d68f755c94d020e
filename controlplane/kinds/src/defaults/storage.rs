//! Volumes, claims, storage classes and storage drivers.

use serde_json::{Value, json};

use super::{child, child_of, fill, fill_absent, volume::disk};

/// Sets the defaults of a PersistentVolume.
pub(crate) fn volume(object: &mut Value) {
    let Some(spec) = child(object, "spec") else { return };
    fill(spec, "persistentVolumeReclaimPolicy", "Retain");
    fill_absent(spec, "volumeMode", "Filesystem");
    disk(spec);
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

/// Sets the defaults of a claim, or of a claim template in a stateful set.
pub(super) fn claim_of(object: &mut serde_json::Map<String, Value>) {
    if let Some(spec) = child_of(object, "spec") {
        fill_absent(spec, "volumeMode", "Filesystem");
    }
    if let Some(status) = child_of(object, "status") {
        fill(status, "phase", "Pending");
    }
}

/// Sets the defaults of a StorageClass.
pub(crate) fn class(object: &mut Value) {
    if let Some(object) = object.as_object_mut() {
        fill_absent(object, "reclaimPolicy", "Delete");
        fill_absent(object, "volumeBindingMode", "Immediate");
    }
}

/// Sets the defaults of a CSIDriver.
pub(crate) fn csi_driver(object: &mut Value) {
    let Some(spec) = child(object, "spec") else { return };
    fill(spec, "attachRequired", true);
    fill(spec, "podInfoOnMount", false);
    fill(spec, "storageCapacity", false);
    fill_absent(spec, "fsGroupPolicy", "ReadWriteOnceWithFSType");
    fill(spec, "requiresRepublish", false);
    fill(spec, "seLinuxMount", false);
    let modes = spec.get("volumeLifecycleModes").and_then(Value::as_array);
    if modes.is_none_or(Vec::is_empty) {
        spec.insert("volumeLifecycleModes".to_owned(), json!(["Persistent"]));
    }
}

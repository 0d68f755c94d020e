//! Volumes: file modes, and emptyDir as the default source.

use serde_json::{Map, Value};

use super::{child_of, each, fill, fill_absent, present};

/// Default file mode: 0644.
const MODE: i64 = 0o644;

/// Sets the defaults of one volume of a pod.
pub(super) fn volume(volume: &mut Map<String, Value>) {
    if !volume.keys().any(|name| name != "name") {
        child_of(volume, "emptyDir");
    }
    for source in ["secret", "configMap", "downwardAPI", "projected"] {
        if let Some(source) = present(volume, source) {
            fill(source, "defaultMode", MODE);
        }
    }
    if let Some(api) = present(volume, "downwardAPI") {
        field_references(api);
    }
    if let Some(projected) = present(volume, "projected") {
        for source in each(projected, "sources") {
            if let Some(token) = present(source, "serviceAccountToken") {
                fill(token, "expirationSeconds", 3600);
            }
            if let Some(api) = present(source, "downwardAPI") {
                field_references(api);
            }
        }
    }
    if let Some(image) = present(volume, "image") {
        let policy =
            super::container::pull_policy(image.get("reference").and_then(Value::as_str).unwrap_or_default());
        fill(image, "pullPolicy", policy);
    }
    disk(volume);
    let claim = present(volume, "ephemeral").and_then(|ephemeral| present(ephemeral, "volumeClaimTemplate"));
    if let Some(spec) = claim.and_then(|claim| present(claim, "spec")) {
        fill_absent(spec, "volumeMode", "Filesystem");
    }
}

/// Sets the defaults of the sources that pods and PersistentVolumes have in common.
pub fn disk(sources: &mut Map<String, Value>) {
    if let Some(path) = present(sources, "hostPath") {
        fill_absent(path, "type", "");
    }
    if let Some(iscsi) = present(sources, "iscsi") {
        fill(iscsi, "iscsiInterface", "default");
    }
    if let Some(rbd) = present(sources, "rbd") {
        fill(rbd, "pool", "rbd");
        fill(rbd, "user", "admin");
        fill(rbd, "keyring", "/etc/ceph/keyring");
    }
    if let Some(azure) = present(sources, "azureDisk") {
        fill_absent(azure, "cachingMode", "ReadWrite");
        fill_absent(azure, "fsType", "ext4");
        fill_absent(azure, "readOnly", false);
        fill_absent(azure, "kind", "Shared");
    }
    if let Some(scale_io) = present(sources, "scaleIO") {
        fill(scale_io, "storageMode", "ThinProvisioned");
        fill(scale_io, "fsType", "xfs");
    }
}

fn field_references(api: &mut Map<String, Value>) {
    for item in each(api, "items") {
        if let Some(field) = present(item, "fieldRef") {
            fill(field, "apiVersion", "v1");
        }
    }
}

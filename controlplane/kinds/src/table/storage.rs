//! Volumes, claims, storage classes.

use jiff::Timestamp;
use serde_json::Value;

use super::{AGE, Column, NAME, created, items, name, string, wide};

/// The annotation that marks the default storage class.
const DEFAULT_CLASS: &str = "storageclass.kubernetes.io/is-default-class";

pub(crate) const VOLUME: &[Column] = &[
    NAME,
    string("Capacity", "Size of the volume."),
    string("Access Modes", "Ways in which the volume can be mounted."),
    string("Reclaim Policy", "What happens to the volume when its claim is deleted."),
    string("Status", "Phase of the volume."),
    string("Claim", "The claim that the volume is bound to."),
    string("StorageClass", "Storage class of the volume."),
    string("VolumeAttributesClass", "Class of the volume's attributes."),
    string("Reason", "Why the volume is in its phase."),
    AGE,
    wide(string("VolumeMode", "Whether the volume is a file system or a block device.")),
];

pub(crate) fn volume(object: &Value, now: Timestamp) -> Vec<Value> {
    let (spec, status) = (&object["spec"], &object["status"]);
    let part = |field: &str| spec["claimRef"][field].as_str().unwrap_or_default();
    let claim = if spec["claimRef"].is_null() {
        String::new()
    } else {
        format!("{}/{}", part("namespace"), part("name"))
    };
    vec![
        name(object),
        text(&spec["capacity"]["storage"]),
        modes(&spec["accessModes"]),
        text(&spec["persistentVolumeReclaimPolicy"]),
        phase(object),
        claim.into(),
        text(&spec["storageClassName"]),
        unset(&spec["volumeAttributesClassName"]),
        text(&status["reason"]),
        created(object, now),
        unset(&spec["volumeMode"]),
    ]
}

pub(crate) const CLAIM: &[Column] = &[
    NAME,
    string("Status", "Phase of the claim."),
    string("Volume", "The volume that the claim is bound to."),
    string("Capacity", "Size of the volume."),
    string("Access Modes", "Ways in which the volume can be mounted."),
    string("StorageClass", "Storage class of the claim."),
    string("VolumeAttributesClass", "Class of the volume's attributes."),
    AGE,
    wide(string("VolumeMode", "Whether the volume is a file system or a block device.")),
];

pub(crate) fn claim(object: &Value, now: Timestamp) -> Vec<Value> {
    let (spec, status) = (&object["spec"], &object["status"]);
    let bound = !spec["volumeName"].as_str().unwrap_or_default().is_empty();
    let when_bound = |value: Value| if bound { value } else { "".into() };
    vec![
        name(object),
        phase(object),
        text(&spec["volumeName"]),
        when_bound(text(&status["capacity"]["storage"])),
        when_bound(modes(&status["accessModes"])),
        text(&spec["storageClassName"]),
        unset(&spec["volumeAttributesClassName"]),
        created(object, now),
        unset(&spec["volumeMode"]),
    ]
}

pub(crate) const CLASS: &[Column] = &[
    NAME,
    string("Provisioner", "The program that makes volumes of the class."),
    string("ReclaimPolicy", "What happens to a volume when its claim is deleted."),
    string("VolumeBindingMode", "When a claim gets its volume."),
    string("AllowVolumeExpansion", "Whether claims can grow."),
    AGE,
];

pub(crate) fn class(object: &Value, now: Timestamp) -> Vec<Value> {
    let mut title = object["metadata"]["name"].as_str().unwrap_or_default().to_owned();
    if object["metadata"]["annotations"][DEFAULT_CLASS] == "true" {
        title.push_str(" (default)");
    }
    vec![
        title.into(),
        text(&object["provisioner"]),
        text(&object["reclaimPolicy"]),
        text(&object["volumeBindingMode"]),
        object["allowVolumeExpansion"].as_bool().unwrap_or(false).into(),
        created(object, now),
    ]
}

fn text(value: &Value) -> Value {
    value.as_str().unwrap_or_default().into()
}

fn unset(value: &Value) -> Value {
    value.as_str().unwrap_or("<unset>").into()
}

fn phase(object: &Value) -> Value {
    if object["metadata"]["deletionTimestamp"].is_string() {
        "Terminating".into()
    } else {
        text(&object["status"]["phase"])
    }
}

/// Access modes in their short form: `RWO,ROX`.
fn modes(list: &Value) -> Value {
    let known = [
        ("ReadWriteOnce", "RWO"),
        ("ReadOnlyMany", "ROX"),
        ("ReadWriteMany", "RWX"),
        ("ReadWriteOncePod", "RWOP"),
    ];
    let has = |mode: &str| items(list).any(|item| item == mode);
    let short: Vec<&str> = known.into_iter().filter(|(mode, _)| has(mode)).map(|(_, short)| short).collect();
    short.join(",").into()
}

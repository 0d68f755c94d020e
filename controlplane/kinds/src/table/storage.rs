//! Volumes, claims, and the kinds of `storage.k8s.io`.

use jiff::Timestamp;
use serde_json::Value;

use super::{AGE, Column, NAME, age_cell, boolean, items, name, string, wide};

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
        age_cell(object, now),
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
        age_cell(object, now),
        unset(&spec["volumeMode"]),
    ]
}

pub(crate) const CLASS: &[Column] = &[
    NAME,
    string("Provisioner", "The program that makes volumes of the class."),
    string("ReclaimPolicy", "What happens to a volume when its claim is deleted."),
    string("VolumeBindingMode", "When a claim gets its volume."),
    string("AllowVolumeExpansion", "Whether the size of claims can be increased."),
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
        age_cell(object, now),
    ]
}

pub(crate) const ATTACHMENT: &[Column] = &[
    NAME,
    Column { format: "name", ..string("Attacher", "The driver that attaches the volume.") },
    string("PV", "Name of the volume."),
    string("Node", "The node that the volume is attached to."),
    boolean("Attached", "Whether the volume is attached."),
    AGE,
];

pub(crate) fn attachment(object: &Value, now: Timestamp) -> Vec<Value> {
    let spec = &object["spec"];
    vec![
        name(object),
        text(&spec["attacher"]),
        text(&spec["source"]["persistentVolumeName"]),
        text(&spec["nodeName"]),
        flag(&object["status"]["attached"], false),
        age_cell(object, now),
    ]
}

pub(crate) const CSI_DRIVER: &[Column] = &[
    NAME,
    boolean("AttachRequired", "Whether volumes must be attached to the node first."),
    boolean("PodInfoOnMount", "Whether the driver gets information about the pod."),
    boolean("StorageCapacity", "Whether the driver reports its capacity."),
    string("TokenRequests", "Audiences of the tokens that the driver gets."),
    boolean("RequiresRepublish", "Whether the driver is called again for mounted volumes."),
    string("Modes", "Lifecycle modes of the driver's volumes."),
    AGE,
];

pub(crate) fn csi_driver(object: &Value, now: Timestamp) -> Vec<Value> {
    let spec = &object["spec"];
    let join = |list: Vec<&str>| list.join(",");
    let tokens = match &spec["tokenRequests"] {
        Value::Null => "<unset>".to_owned(),
        list => join(items(list).filter_map(|token| token["audience"].as_str()).collect()),
    };
    let modes = join(items(&spec["volumeLifecycleModes"]).filter_map(Value::as_str).collect());
    vec![
        name(object),
        flag(&spec["attachRequired"], true),
        flag(&spec["podInfoOnMount"], false),
        flag(&spec["storageCapacity"], false),
        tokens.into(),
        flag(&spec["requiresRepublish"], false),
        if modes.is_empty() { "<none>".into() } else { modes.into() },
        age_cell(object, now),
    ]
}

pub(crate) const ATTRIBUTES_CLASS: &[Column] =
    &[NAME, string("DriverName", "The driver that applies the attributes."), AGE];

pub(crate) fn attributes_class(object: &Value, now: Timestamp) -> Vec<Value> {
    vec![name(object), text(&object["driverName"]), age_cell(object, now)]
}

fn flag(value: &Value, default: bool) -> Value {
    value.as_bool().unwrap_or(default).into()
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

//! Checks of volumes.

use serde_json::Value;

use super::{Pod, SortedTexts, Violation, name, plural, quoted, violation};

/// Sources that the restricted level allows.
const ALLOWED: &[&str] = &[
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "image",
    "persistentVolumeClaim",
    "projected",
    "secret",
];

/// All other sources, as messages name them.
const FORBIDDEN: &[&str] = &[
    "hostPath",
    "gcePersistentDisk",
    "awsElasticBlockStore",
    "gitRepo",
    "nfs",
    "iscsi",
    "glusterfs",
    "rbd",
    "flexVolume",
    "cinder",
    "cephfs",
    "flocker",
    "fc",
    "azureFile",
    "vsphereVolume",
    "quobyte",
    "azureDisk",
    "photonPersistentDisk",
    "portworxVolume",
    "scaleIO",
    "storageos",
];

fn volumes<'a>(pod: &Pod<'a>) -> impl Iterator<Item = &'a Value> + use<'a> {
    pod.spec["volumes"].as_array().into_iter().flatten()
}

pub(super) fn host_path(pod: &Pod<'_>) -> Option<Violation> {
    let names: Vec<String> = volumes(pod).filter(|volume| volume["hostPath"].is_object()).map(name).collect();
    if names.is_empty() {
        return None;
    }
    let detail = format!("{} {}", plural(names.len(), "volume", "volumes"), quoted(&names));
    violation("hostPath volumes", detail)
}

pub(super) fn restricted(pod: &Pod<'_>) -> Option<Violation> {
    let mut types = SortedTexts::new();
    let mut names = Vec::new();
    for volume in volumes(pod) {
        let has = |source: &&&str| volume[**source].is_object();
        // A volume with a forbidden and an allowed source is invalid, but this check does not rely on the validation.
        let forbidden = FORBIDDEN.iter().find(has);
        if forbidden.is_none() && ALLOWED.iter().any(|source| has(&source)) {
            continue;
        }
        types.insert(forbidden.map_or("unknown", |source| *source).to_owned());
        names.push(name(volume));
    }
    if names.is_empty() {
        return None;
    }
    let detail = format!(
        "{} {} {} {} {}",
        plural(names.len(), "volume", "volumes"),
        quoted(&names),
        plural(names.len(), "uses", "use"),
        plural(types.len(), "restricted volume type", "restricted volume types"),
        quoted(&types)
    );
    violation("restricted volume types", detail)
}

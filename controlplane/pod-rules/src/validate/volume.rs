//! Volumes of pods: names, exactly one source, rules of each source.

use std::collections::{HashMap, HashSet};

use serde_json::Value;

use super::env::{field_reference, resource_reference};
use super::file_path::local;
use super::volume_source::{self, GivenSource, Owner, driver, is_long_target, need};
use super::{Causes, Path, claim_spec, entries, format, items, meta, text};
use coracle_values::Quantity;

/// The valid volumes by name, for mounts and block devices.
pub(super) type Volumes<'a> = HashMap<&'a str, &'a Value>;

const PULL_POLICIES: &[&str] = &["Always", "IfNotPresent", "Never"];
/// Sources of volumes, in upstream's order. If a volume has several sources, only the first source is checked, and the
/// other sources are refused.
#[rustfmt::skip]
const SOURCES: &[&str] = &[
    "emptyDir", "hostPath", "gitRepo", "gcePersistentDisk", "awsElasticBlockStore", "secret", "nfs", "iscsi", "glusterfs",
    "flocker", "persistentVolumeClaim", "rbd", "cinder", "cephfs", "quobyte", "downwardAPI", "fc", "flexVolume", "configMap",
    "azureFile", "vsphereVolume", "photonPersistentDisk", "portworxVolume", "azureDisk", "storageos", "projected", "scaleIO",
    "csi", "ephemeral", "image",
];
const VOLUME_FIELDS: &[&str] =
    &["metadata.annotations", "metadata.labels", "metadata.name", "metadata.namespace", "metadata.uid"];

/// Checks all volumes of a spec. Returns the valid volumes.
pub(super) fn volumes<'a>(causes: &mut Causes, path: &Path, volumes: &'a Value) -> Volumes<'a> {
    let mut valid = Volumes::new();
    for (index, volume) in items(volumes) {
        let here = path.index(index);
        let name = text(&volume["name"]);
        if name.is_empty() {
            causes.required(&here.field("name"), "");
        } else {
            causes.format(&here.field("name"), name, format::dns1123_label(name));
        }
        if valid.contains_key(name) {
            causes.duplicate(&here.field("name"), &volume["name"]);
        }
        // As upstream, a mount of an invalid volume is a further error, so only valid volumes are returned.
        let before = causes.count();
        one_source(causes, &here, volume);
        if causes.count() == before && !name.is_empty() {
            valid.insert(name, volume);
        }
    }
    valid
}

fn one_source(causes: &mut Causes, path: &Path, volume: &Value) {
    let Some(given) = volume_source::one(causes, path, volume, SOURCES) else { return };
    let GivenSource { kind, path: here, value: source } = given;
    let name = text(&volume["name"]);
    match kind {
        "emptyDir" => {
            let limit = source["sizeLimit"].as_str().and_then(|text| Quantity::parse(text).ok());
            if limit.is_some_and(|limit| limit.signum() < 0) {
                causes
                    .forbidden(&here.field("sizeLimit"), "SizeLimit field must be a valid resource quantity");
            }
        }
        "configMap" => {
            need(causes, &here, source, &["name"]);
            keys(causes, &here, source);
        }
        "secret" => {
            need(causes, &here, source, &["secretName"]);
            keys(causes, &here, source);
        }
        "downwardAPI" => downward(causes, &here, source),
        "projected" => projected(causes, &here, source),
        "persistentVolumeClaim" => need(causes, &here, source, &["claimName"]),
        "image" => causes.one_of(&here.field("pullPolicy"), &source["pullPolicy"], PULL_POLICIES),
        "csi" => csi(causes, &here, source),
        "ephemeral" => ephemeral(causes, &here, source),
        _ => volume_source::shared(causes, &here, kind, source, Owner { name, is_of_pod: true }),
    }
    let iscsi = &volume["iscsi"];
    if !iscsi["initiatorName"].is_null() && is_long_target(name, text(&iscsi["targetPortal"])) {
        causes.invalid(&path.field("name"), &name.into(), volume_source::TOO_LONG);
    }
}

/// Checks the volumes of a pod with this name by rules that pod templates do not have.
pub(super) fn of_pod(causes: &mut Causes, path: &Path, spec: &Value, pod: &str) {
    let volumes = || items(&spec["volumes"]);
    let claim = |volume: &Value| format!("{pod}-{}", text(&volume["name"]));
    let created: HashSet<String> = volumes()
        .filter(|(_, volume)| !pod.is_empty() && !volume["ephemeral"].is_null())
        .map(|(_, volume)| claim(volume))
        .collect();
    for (index, volume) in volumes() {
        let (here, name) = (path.index(index), text(&volume["name"]));
        if !volume["ephemeral"].is_null() && !pod.is_empty() && !name.is_empty() {
            let claim = claim(volume);
            for problem in format::dns1123_subdomain(&claim) {
                causes.invalid(&here.field("name"), &name.into(), &format!("PVC name {claim:?}: {problem}"));
            }
        }
        let used = &volume["persistentVolumeClaim"]["claimName"];
        if used.as_str().is_some_and(|used| created.contains(used)) {
            let detail = "must not reference a PVC that gets created for an ephemeral volume";
            causes.invalid(&here.field("persistentVolumeClaim").field("claimName"), used, detail);
        }
        if !volume["image"].is_null() {
            need(causes, &here.field("image"), &volume["image"], &["reference"]);
        }
        let sources = items(&volume["projected"]["sources"]);
        for (at, _) in sources.filter(|(_, source)| !source["serviceAccountToken"].is_null()) {
            if text(&spec["serviceAccountName"]).is_empty() {
                let here = here.field("projected").field("sources").index(at).field("serviceAccountToken");
                causes.forbidden(&here, "must not be specified when serviceAccountName is not set");
            }
        }
    }
}

fn csi(causes: &mut Causes, path: &Path, source: &Value) {
    driver(causes, &path.field("driver"), text(&source["driver"]));
    let secret = &source["nodePublishSecretRef"];
    match text(&secret["name"]) {
        _ if secret.is_null() => {}
        "" => causes.required(&path.field("nodePublishSecretRef").field("name"), ""),
        // As upstream, the error about the secret's name has the path of the source.
        name => causes.format(&path.field("name"), name, format::dns1123_subdomain(name)),
    }
}

fn ephemeral(causes: &mut Causes, path: &Path, source: &Value) {
    let (template, path) = (&source["volumeClaimTemplate"], path.field("volumeClaimTemplate"));
    if template.is_null() {
        return causes.required(&path, "");
    }
    let (here, metadata) = (path.field("metadata"), &template["metadata"]);
    meta::annotations(causes, &here.field("annotations"), &metadata["annotations"]);
    meta::labels(causes, &here.field("labels"), &metadata["labels"]);
    for (field, _) in entries(metadata).filter(|(_, value)| !value.is_null()) {
        if !matches!(field.as_str(), "annotations" | "labels") {
            causes.forbidden(&here.field(field), "cannot be set");
        }
    }
    claim_spec::of_template(causes, &path.field("spec"), &template["spec"]);
}

fn mode(causes: &mut Causes, path: &Path, mode: &Value) {
    if mode.as_i64().is_some_and(|mode| !(0..=0o777).contains(&mode)) {
        causes.invalid(path, mode, "must be a number between 0 and 0777 (octal), both inclusive");
    }
}

/// Checks `items` of a config map or secret, and the file modes.
fn keys(causes: &mut Causes, path: &Path, source: &Value) {
    mode(causes, &path.field("defaultMode"), &source["defaultMode"]);
    for (index, item) in items(&source["items"]) {
        key(causes, &path.field("items").index(index), item);
    }
}

fn key(causes: &mut Causes, path: &Path, item: &Value) {
    if text(&item["key"]).is_empty() {
        causes.required(&path.field("key"), "");
    }
    file(causes, path, item);
}

fn file(causes: &mut Causes, path: &Path, item: &Value) {
    let name = text(&item["path"]);
    if name.is_empty() {
        causes.required(&path.field("path"), "");
    }
    local(causes, &path.field("path"), name);
    mode(causes, &path.field("mode"), &item["mode"]);
}

fn downward(causes: &mut Causes, path: &Path, source: &Value) {
    mode(causes, &path.field("defaultMode"), &source["defaultMode"]);
    files(causes, path, source);
}

fn files(causes: &mut Causes, path: &Path, source: &Value) {
    for (_, item) in items(&source["items"]) {
        // As upstream, an error in an item has the path of the volume.
        file(causes, path, item);
        let (field, resource) = (&item["fieldRef"], &item["resourceFieldRef"]);
        match (field.is_null(), resource.is_null()) {
            (true, true) => causes.required(path, "one of fieldRef and resourceFieldRef is required"),
            (false, false) => {
                causes.invalid(
                    path,
                    &"resource".into(),
                    "fieldRef and resourceFieldRef can not be specified simultaneously",
                );
            }
            (false, true) => field_reference(causes, &path.field("fieldRef"), field, VOLUME_FIELDS),
            (true, false) => resource_reference(causes, &path.field("resourceFieldRef"), resource, true),
        }
    }
}

fn projected(causes: &mut Causes, path: &Path, source: &Value) {
    mode(causes, &path.field("defaultMode"), &source["defaultMode"]);
    let mut paths = HashSet::new();
    for (index, projection) in items(&source["sources"]) {
        let here = path.field("sources").index(index);
        let kinds: Vec<_> = entries(projection).filter(|(_, inner)| !inner.is_null()).collect();
        if kinds.len() > 1 {
            causes.forbidden(&here, "may not specify more than 1 volume type per source");
        }
        for (kind, inner) in kinds {
            let at = here.field(kind);
            for file in projected_paths(inner) {
                if !paths.insert(file) {
                    let detail = "conflicting duplicate paths";
                    causes.invalid(path, &inner.get("name").cloned().unwrap_or_else(|| file.into()), detail);
                }
            }
            match kind.as_str() {
                "secret" | "configMap" => {
                    if text(&inner["name"]).is_empty() {
                        causes.required(&at.field("name"), "");
                    }
                    for (index, item) in items(&inner["items"]) {
                        key(causes, &at.field("items").index(index), item);
                    }
                }
                "downwardAPI" => files(causes, &at, inner),
                "serviceAccountToken" => token(causes, path, &at, inner),
                _ => {}
            }
        }
    }
}

/// The paths of the items of a projected source.
fn projected_paths(source: &Value) -> impl Iterator<Item = &str> {
    items(&source["items"]).map(|(_, item)| text(&item["path"])).filter(|path| !path.is_empty())
}

/// Checks a projected token. As upstream, an error in the token's path has the path of the volume.
fn token(causes: &mut Causes, volume: &Path, path: &Path, token: &Value) {
    let seconds = &token["expirationSeconds"];
    let detail = match seconds.as_i64() {
        Some(..600) => Some("may not specify a duration less than 10 minutes"),
        Some(4_294_967_297..) => Some("may not specify a duration larger than 2^32 seconds"),
        Some(_) | None => None,
    };
    if let Some(detail) = detail {
        causes.invalid(&path.field("expirationSeconds"), seconds, detail);
    }
    match text(&token["path"]) {
        "" => causes.required(&volume.field("path"), ""),
        file => local(causes, &volume.field("path"), file),
    }
}

//! Volumes of pods: names, exactly one source, rules of each source.

use std::collections::HashSet;

use serde_json::Value;

use super::env::{field_reference, resource_reference};
use super::file_path::{host_path_type, relative};
use super::{Causes, Path, entries, format, items, storage, text};
use coracle_values::Quantity;

/// The names of volumes, for mounts.
pub(super) type Volumes<'a> = HashSet<&'a str>;

const PULL_POLICIES: &[&str] = &["Always", "IfNotPresent", "Never"];
/// Maximum size of the name of a storage driver, in bytes.
const MAX_DRIVER: usize = 63;
const VOLUME_FIELDS: &[&str] =
    &["metadata.annotations", "metadata.labels", "metadata.name", "metadata.namespace", "metadata.uid"];

/// Checks all volumes of a spec. Returns their names.
pub(super) fn volumes<'a>(causes: &mut Causes, path: &Path, volumes: &'a Value) -> Volumes<'a> {
    let mut names = HashSet::new();
    for (index, volume) in items(volumes) {
        let here = path.index(index);
        let name = text(&volume["name"]);
        if name.is_empty() {
            causes.required(&here.field("name"), "");
        } else {
            causes.format(&here.field("name"), name, format::dns1123_label(name));
        }
        if names.contains(name) {
            causes.duplicate(&here.field("name"), &volume["name"]);
        }
        // A mount of an invalid volume is an error of its own, as upstream.
        let before = causes.count();
        one_source(causes, &here, volume);
        if causes.count() == before && !name.is_empty() {
            names.insert(name);
        }
    }
    names
}

fn one_source(causes: &mut Causes, path: &Path, volume: &Value) {
    let mut count = 0;
    for (name, source) in entries(volume).filter(|(name, value)| *name != "name" && !value.is_null()) {
        count += 1;
        if count > 1 {
            causes.forbidden(&path.field(name), "may not specify more than 1 volume type");
        } else {
            self::source(causes, &path.field(name), name, source);
        }
    }
    if count == 0 {
        causes.required(path, "must specify a volume type");
    }
}

fn source(causes: &mut Causes, path: &Path, kind: &str, source: &Value) {
    let mut need = |field: &str| {
        if text(&source[field]).is_empty() {
            causes.required(&path.field(field), "");
        }
    };
    match kind {
        "hostPath" => {
            need("path");
            host_path(causes, path, source);
        }
        "emptyDir" => {
            let limit = source["sizeLimit"].as_str().and_then(|text| Quantity::parse(text).ok());
            if limit.is_some_and(|limit| limit.signum() < 0) {
                causes
                    .forbidden(&path.field("sizeLimit"), "SizeLimit field must be a valid resource quantity");
            }
        }
        "configMap" => {
            need("name");
            keys(causes, path, source);
        }
        "secret" => {
            need("secretName");
            keys(causes, path, source);
        }
        "downwardAPI" => downward(causes, path, source),
        "projected" => projected(causes, path, source),
        "persistentVolumeClaim" => need("claimName"),
        "image" => {
            need("reference");
            causes.one_of(&path.field("pullPolicy"), &source["pullPolicy"], PULL_POLICIES);
        }
        "csi" => provisioner_name(causes, &path.field("driver"), text(&source["driver"])),
        "ephemeral" => ephemeral(causes, path, source),
        "nfs" => {
            need("server");
            need("path");
            if !text(&source["path"]).starts_with('/') {
                causes.invalid(&path.field("path"), &source["path"], "must be an absolute path");
            }
        }
        _ => {}
    }
}

/// Checks the name of a storage driver.
pub(super) fn provisioner_name(causes: &mut Causes, path: &Path, name: &str) {
    if name.is_empty() {
        return causes.required(path, "");
    }
    if name.len() > MAX_DRIVER {
        causes.too_long(path, MAX_DRIVER);
    }
    causes.format(path, name, format::dns1123_subdomain(&name.to_lowercase()));
}

fn ephemeral(causes: &mut Causes, path: &Path, source: &Value) {
    let (template, path) = (&source["volumeClaimTemplate"], path.field("volumeClaimTemplate"));
    if template.is_null() {
        causes.required(&path, "");
    } else {
        storage::claim_spec(causes, &path.field("spec"), &template["spec"]);
    }
}

fn host_path(causes: &mut Causes, path: &Path, source: &Value) {
    if text(&source["path"]).split('/').any(|part| part == "..") {
        causes.invalid(&path.field("path"), &source["path"], "must not contain '..'");
    }
    host_path_type(causes, &path.field("type"), &source["type"]);
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
        let here = path.field("items").index(index);
        if text(&item["key"]).is_empty() {
            causes.required(&here.field("key"), "");
        }
        file(causes, &here, item);
    }
}

fn file(causes: &mut Causes, path: &Path, item: &Value) {
    let name = text(&item["path"]);
    if name.is_empty() {
        causes.required(&path.field("path"), "");
    }
    relative(causes, &path.field("path"), name);
    if name.starts_with("..") && !name.starts_with("../") && name != ".." {
        causes.invalid(&path.field("path"), &item["path"], "must not start with '..'");
    }
    mode(causes, &path.field("mode"), &item["mode"]);
}

fn downward(causes: &mut Causes, path: &Path, source: &Value) {
    mode(causes, &path.field("defaultMode"), &source["defaultMode"]);
    for (_, item) in items(&source["items"]) {
        // Upstream reports items at the volume.
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
                    keys(causes, &at, inner);
                }
                "downwardAPI" => downward(causes, &at, inner),
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

/// Checks a projected token. Upstream reports its path at the volume.
fn token(causes: &mut Causes, volume: &Path, path: &Path, token: &Value) {
    let seconds = &token["expirationSeconds"];
    if seconds.as_i64().is_some_and(|seconds| seconds < 600) {
        causes.invalid(
            &path.field("expirationSeconds"),
            seconds,
            "may not specify a duration less than 10 minutes",
        );
    }
    if text(&token["path"]).is_empty() {
        causes.required(&volume.field("path"), "");
    }
    relative(causes, &volume.field("path"), text(&token["path"]));
}

//! Volumes of pods: names, exactly one source, rules of each source.

use std::collections::HashSet;

use serde_json::Value;

use super::container::relative;
use super::env::{field_reference, resource_reference};
use super::{Causes, Path, entries, format, items, text};
use coracle_values::Quantity;

/// The names of volumes, for mounts.
pub(super) type Volumes<'a> = HashSet<&'a str>;

const HOST_PATH_TYPES: &[&str] =
    &["", "BlockDevice", "CharDevice", "Directory", "DirectoryOrCreate", "File", "FileOrCreate", "Socket"];
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
            if !names.insert(name) {
                causes.duplicate(&here.field("name"), &volume["name"]);
            }
        }
        one_source(causes, &here, volume);
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
        "image" => need("reference"),
        "csi" => need("driver"),
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

fn host_path(causes: &mut Causes, path: &Path, source: &Value) {
    if text(&source["path"]).split('/').any(|part| part == "..") {
        causes.invalid(&path.field("path"), &source["path"], "must not contain '..'");
    }
    if !HOST_PATH_TYPES.contains(&text(&source["type"])) {
        causes.unsupported(&path.field("type"), &source["type"], HOST_PATH_TYPES);
    }
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
    for (index, item) in items(&source["items"]) {
        let here = path.field("items").index(index);
        file(causes, &here, item);
        let (field, resource) = (&item["fieldRef"], &item["resourceFieldRef"]);
        match (field.is_null(), resource.is_null()) {
            (true, true) => {
                causes.required(&here.field("fieldRef"), "one of fieldRef and resourceFieldRef is required")
            }
            (false, false) => {
                causes.invalid(
                    &here,
                    &"resource".into(),
                    "fieldRef and resourceFieldRef can not be specified simultaneously",
                );
            }
            (false, true) => field_reference(causes, &here.field("fieldRef"), field, VOLUME_FIELDS),
            (true, false) => resource_reference(causes, &here.field("resourceFieldRef"), resource, true),
        }
    }
}

fn projected(causes: &mut Causes, path: &Path, source: &Value) {
    mode(causes, &path.field("defaultMode"), &source["defaultMode"]);
    for (index, projection) in items(&source["sources"]) {
        let here = path.field("sources").index(index);
        let mut count = 0;
        for (kind, inner) in entries(projection).filter(|(_, inner)| !inner.is_null()) {
            let at = here.field(kind);
            count += 1;
            if count > 1 {
                causes.forbidden(&at, "may not specify more than 1 volume type per source");
                continue;
            }
            match kind.as_str() {
                "secret" | "configMap" => {
                    if text(&inner["name"]).is_empty() {
                        causes.required(&at.field("name"), "");
                    }
                    keys(causes, &at, inner);
                }
                "downwardAPI" => downward(causes, &at, inner),
                "serviceAccountToken" => token(causes, &at, inner),
                _ => {}
            }
        }
        if count == 0 {
            causes.required(&here, "must specify at least one projected source");
        }
    }
}

fn token(causes: &mut Causes, path: &Path, token: &Value) {
    let seconds = &token["expirationSeconds"];
    if seconds.as_i64().is_some_and(|seconds| seconds < 600) {
        causes.invalid(
            &path.field("expirationSeconds"),
            seconds,
            "may not specify a duration less than 10 minutes",
        );
    }
    if text(&token["path"]).is_empty() {
        causes.required(&path.field("path"), "");
    }
    relative(causes, &path.field("path"), text(&token["path"]));
}

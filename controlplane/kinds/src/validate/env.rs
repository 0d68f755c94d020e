//! Environment variables and their sources.

use std::collections::HashMap;

use serde_json::Value;

use super::{Causes, Path, format, items, text};
use coracle_values::Quantity;

const SOURCES: &[&str] = &["fieldRef", "resourceFieldRef", "configMapKeyRef", "secretKeyRef", "fileKeyRef"];
const FIELDS: &[&str] = &[
    "metadata.name",
    "metadata.namespace",
    "metadata.uid",
    "spec.nodeName",
    "spec.serviceAccountName",
    "status.hostIP",
    "status.hostIPs",
    "status.podIP",
    "status.podIPs",
];
/// Fields that upstream's conversion supports. A reference to any other field gets a conversion error. Source:
/// `ConvertDownwardAPIFieldLabel`.
const KNOWN_FIELDS: &[&str] = &[
    "metadata.annotations",
    "metadata.labels",
    "metadata.name",
    "metadata.namespace",
    "metadata.uid",
    "spec.nodeName",
    "spec.restartPolicy",
    "spec.serviceAccountName",
    "spec.schedulerName",
    "status.phase",
    "status.hostIP",
    "status.hostIPs",
    "status.podIP",
    "status.podIPs",
    "spec.host",
];
const RESOURCES: &[&str] = &[
    "limits.cpu",
    "limits.ephemeral-storage",
    "limits.memory",
    "requests.cpu",
    "requests.ephemeral-storage",
    "requests.memory",
];

/// Checks `env` and `envFrom` of a container.
pub(super) fn all(causes: &mut Causes, path: &Path, container: &Value) {
    for (index, variable) in items(&container["env"]) {
        let here = path.field("env").index(index);
        let name = text(&variable["name"]);
        if name.is_empty() {
            causes.required(&here.field("name"), "");
        } else {
            causes.format(&here.field("name"), name, format::env_name(name));
        }
        if !variable["valueFrom"].is_null() {
            source(causes, &here.field("valueFrom"), variable);
        }
    }
    for (index, from) in items(&container["envFrom"]) {
        bulk(causes, (&path.field("envFrom"), index), from);
    }
}

fn source(causes: &mut Causes, path: &Path, variable: &Value) {
    let from = &variable["valueFrom"];
    let given: Vec<&&str> = SOURCES.iter().filter(|source| !from[**source].is_null()).collect();
    let names = "`fieldRef`, `resourceFieldRef`, `configMapKeyRef`, `secretKeyRef` or `fileKeyRef`";
    match given.len() {
        0 => causes.invalid(path, &"".into(), &format!("must specify one of: {names}")),
        1 => {}
        _ => causes.invalid(path, &"".into(), "may not have more than one field specified at a time"),
    }
    if !given.is_empty() && !text(&variable["value"]).is_empty() {
        causes.invalid(path, &"".into(), "may not be specified when `value` is not empty");
    }
    if !from["fieldRef"].is_null() {
        field_reference(causes, &path.field("fieldRef"), &from["fieldRef"], FIELDS);
    }
    if !from["resourceFieldRef"].is_null() {
        resource_reference(causes, &path.field("resourceFieldRef"), &from["resourceFieldRef"], false);
    }
    for name in ["configMapKeyRef", "secretKeyRef"] {
        let (here, reference) = (path.field(name), &from[name]);
        if reference.is_null() {
            continue;
        }
        let name = text(&reference["name"]);
        causes.format(&here.field("name"), name, format::dns1123_subdomain(name));
        match text(&reference["key"]) {
            "" => causes.required(&here.field("key"), ""),
            key => causes.format(&here.field("key"), key, format::config_key(key)),
        }
    }
    if !from["fileKeyRef"].is_null() {
        file_reference(causes, &path.field("fileKeyRef"), &from["fileKeyRef"]);
    }
}

/// Checks a fileKeyRef on its own. [`file_volumes`] checks its volume.
fn file_reference(causes: &mut Causes, path: &Path, reference: &Value) {
    let mut name = |field: &str, rule: fn(&str) -> Vec<String>| match text(&reference[field]) {
        "" => causes.required(&path.field(field), ""),
        value => causes.format(&path.field(field), value, rule(value)),
    };
    name("key", format::env_name);
    name("volumeName", format::dns1123_label);
    let (here, file) = (path.field("path"), text(&reference["path"]));
    if file.is_empty() {
        causes.required(&here, "");
    } else if file.split('/').any(|part| part == "..") {
        causes.invalid(&here, &file.into(), "must not contain '..'");
    }
}

/// Checks that the volumes of all fileKeyRefs are of type emptyDir. Source: `validateFileKeyRefVolumes` of
/// `pkg/apis/core/validation`.
pub(super) fn file_volumes(causes: &mut Causes, path: &Path, spec: &Value) {
    let volumes: HashMap<&str, &Value> =
        items(&spec["volumes"]).map(|(_, volume)| (text(&volume["name"]), volume)).collect();
    for list in ["initContainers", "containers", "ephemeralContainers"] {
        for (index, container) in items(&spec[list]) {
            for (at, variable) in items(&container["env"]) {
                let reference = &variable["valueFrom"]["fileKeyRef"];
                if reference.is_null() {
                    continue;
                }
                let here = path.field(list).index(index).field("env").index(at);
                let here = here.field("valueFrom").field("fileKeyRef").field("volumeName");
                let name = text(&reference["volumeName"]);
                match volumes.get(name) {
                    None => causes.not_found(&here, &name.into()),
                    Some(volume) if volume["emptyDir"].is_null() => {
                        causes.invalid(&here, &name.into(), "referenced volume must be of type emptyDir");
                    }
                    Some(_) => {}
                }
            }
        }
    }
}

/// Checks a fieldRef: one of the listed fields, or an entry of labels or annotations.
pub(super) fn field_reference(causes: &mut Causes, path: &Path, reference: &Value, supported: &[&str]) {
    match text(&reference["apiVersion"]) {
        "" => causes.required(&path.field("apiVersion"), ""),
        "v1" => {}
        _ => causes.invalid(
            &path.field("apiVersion"),
            &reference["apiVersion"],
            "pod field reference must use apiVersion v1",
        ),
    }
    let (here, field) = (path.field("fieldPath"), text(&reference["fieldPath"]));
    if field.is_empty() {
        return causes.required(&here, "");
    }
    let subscript = field.strip_suffix("']").and_then(|rest| rest.split_once("['"));
    match subscript {
        Some(("metadata.labels" | "metadata.annotations", key)) => {
            causes.format(&here, key, format::qualified_name(&key.to_lowercase()));
        }
        Some(_) => causes.invalid(
            &here,
            &reference["fieldPath"],
            "error converting fieldPath: field label does not support subscript",
        ),
        None if supported.contains(&field) => {}
        None if KNOWN_FIELDS.contains(&field) => {
            causes.unsupported(&here, &reference["fieldPath"], supported);
        }
        None => {
            let detail = format!("error converting fieldPath: field label not supported: {field}");
            causes.invalid(&here, &reference["fieldPath"], &detail);
        }
    }
}

/// Checks a resourceFieldRef. In a volume it must name the container.
pub(super) fn resource_reference(causes: &mut Causes, path: &Path, reference: &Value, named: bool) {
    if named && text(&reference["containerName"]).is_empty() {
        causes.required(&path.field("containerName"), "");
    }
    let resource = text(&reference["resource"]);
    let huge = ["limits.hugepages-", "requests.hugepages-"].iter().any(|prefix| resource.starts_with(prefix));
    match resource {
        "" => causes.required(&path.field("resource"), ""),
        _ if huge || RESOURCES.contains(&resource) => {}
        _ => causes.unsupported(&path.field("resource"), &reference["resource"], RESOURCES),
    }
    divisor(causes, &path.field("divisor"), resource, &reference["divisor"]);
}

fn divisor(causes: &mut Causes, path: &Path, resource: &str, divisor: &Value) {
    const BYTES: &[&str] =
        &["1", "1k", "1M", "1G", "1T", "1P", "1E", "1Ki", "1Mi", "1Gi", "1Ti", "1Pi", "1Ei"];
    let Ok(amount) = Quantity::parse(text(divisor)) else { return };
    let (known, what): (&[&str], _) = match resource.split_once('.').map(|(_, name)| name) {
        Some("cpu") => (&["1m", "1"], "cpu"),
        Some("memory") => (BYTES, "memory"),
        Some("ephemeral-storage") => (BYTES, "local ephemeral storage"),
        Some(name) if name.starts_with("hugepages-") => (BYTES, "hugepages"),
        _ => return,
    };
    if amount.signum() == 0
        || known.iter().any(|known| Quantity::parse(known).is_ok_and(|known| known == amount))
    {
        return;
    }
    let list = match what {
        "cpu" => "1m and 1".to_owned(),
        _ => BYTES.join(", "),
    };
    let detail = format!("only divisor's values {list} are supported with the {what} resource");
    causes.invalid(path, &resource.into(), &detail);
}

/// Checks one element of `envFrom`. Upstream reports some errors at the list.
fn bulk(causes: &mut Causes, (list, index): (&Path, usize), from: &Value) {
    let path = &list.index(index);
    let prefix = text(&from["prefix"]);
    if !prefix.is_empty() {
        causes.format(&path.field("prefix"), prefix, format::env_name(prefix));
    }
    let given: Vec<&str> =
        ["configMapRef", "secretRef"].into_iter().filter(|name| !from[*name].is_null()).collect();
    match given.as_slice() {
        [] => causes.invalid(list, &"".into(), "must specify one of: `configMapRef` or `secretRef`"),
        [name] => {
            let here = path.field(name).field("name");
            match text(&from[*name]["name"]) {
                "" => causes.required(&here, ""),
                name => causes.format(&here, name, format::dns1123_subdomain(name)),
            }
        }
        _ => causes.invalid(path, &"".into(), "may not have more than one field specified at a time"),
    }
}

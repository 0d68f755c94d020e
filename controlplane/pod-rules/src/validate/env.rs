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
        bulk(causes, &path.field("envFrom"), index, from);
    }
}

fn source(causes: &mut Causes, path: &Path, variable: &Value) {
    let from = &variable["valueFrom"];
    let given: Vec<&&str> = SOURCES.iter().filter(|source| !from[**source].is_null()).collect();
    let names = "`fieldRef`, `resourceFieldRef`, `configMapKeyRef`, `secretKeyRef` or `fileKeyRef`";
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
    let has_value = !text(&variable["value"]).is_empty();
    match given.len() {
        0 => causes.invalid(path, &"".into(), &format!("must specify one of: {names}")),
        _ if has_value => causes.invalid(path, &"".into(), "may not be specified when `value` is not empty"),
        1 => {}
        _ => causes.invalid(path, &"".into(), "may not have more than one field specified at a time"),
    }
}

/// Checks a fileKeyRef without its volume. [`file_volumes`] checks the volume.
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
    let version = text(&reference["apiVersion"]);
    if version.is_empty() {
        return causes.required(&path.field("apiVersion"), "");
    }
    let (here, field) = (path.field("fieldPath"), text(&reference["fieldPath"]));
    if field.is_empty() {
        return causes.required(&here, "");
    }
    if version != "v1" {
        let detail = format!("error converting fieldPath: unsupported pod version: {version}");
        return causes.invalid(&here, &reference["fieldPath"], &detail);
    }
    // As upstream, an error of a key has the path of the whole reference.
    match field.strip_suffix("']").and_then(|rest| rest.split_once("['")) {
        Some(("metadata.labels", key)) => causes.format(path, key, format::qualified_name(key)),
        Some(("metadata.annotations", key)) => {
            let key = key.to_lowercase();
            causes.format(path, &key, format::qualified_name(&key));
        }
        Some(_) => {
            let detail =
                format!("error converting fieldPath: field label does not support subscript: {field}");
            causes.invalid(&here, &reference["fieldPath"], &detail);
        }
        None if supported.contains(&current_name(field)) => {}
        None if KNOWN_FIELDS.contains(&field) => {
            causes.unsupported(&here, &current_name(field).into(), supported);
        }
        None => {
            let detail = format!("error converting fieldPath: field label not supported: {field}");
            causes.invalid(&here, &reference["fieldPath"], &detail);
        }
    }
}

/// The current name of a field. `field` can be its older name.
fn current_name(field: &str) -> &str {
    if field == "spec.host" { "spec.nodeName" } else { field }
}

/// Checks a resourceFieldRef. In a volume the reference must name the container.
pub(super) fn resource_reference(causes: &mut Causes, path: &Path, reference: &Value, named: bool) {
    let resource = text(&reference["resource"]);
    let huge = ["limits.hugepages-", "requests.hugepages-"].iter().any(|prefix| resource.starts_with(prefix));
    match resource {
        _ if named && text(&reference["containerName"]).is_empty() => {
            causes.required(&path.field("containerName"), "");
        }
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

/// Checks one element of `envFrom`. As upstream, some errors have the path of the list.
fn bulk(causes: &mut Causes, list: &Path, index: usize, from: &Value) {
    let path = &list.index(index);
    let prefix = text(&from["prefix"]);
    if !prefix.is_empty() {
        causes.format(&path.field("prefix"), prefix, format::env_name(prefix));
    }
    let given: Vec<&str> =
        ["configMapRef", "secretRef"].into_iter().filter(|name| !from[*name].is_null()).collect();
    for name in &given {
        let here = path.field(name).field("name");
        match text(&from[*name]["name"]) {
            "" => causes.required(&here, ""),
            // A dash at the end is valid, as upstream.
            name => causes.format(&here, name, format::dns1123_subdomain(&format::masked_prefix(name))),
        }
    }
    match given.len() {
        0 => causes.invalid(list, &"".into(), "must specify one of: `configMapRef` or `secretRef`"),
        1 => {}
        _ => causes.invalid(list, &"".into(), "may not have more than one field specified at a time"),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::validate::tests::found;

    fn said(container: Value) -> Vec<String> {
        found(|causes| all(causes, &Path::root("c"), &container))
    }

    #[test]
    fn a_variable_has_a_value_or_one_source() {
        let field = json!({"apiVersion": "v1", "fieldPath": "metadata.name"});
        let secret = json!({"name": "a", "key": "b"});
        let of = |value: &str, from: Value| {
            said(json!({"env": [{"name": "A", "value": value, "valueFrom": from}]}))
        };
        assert_eq!(of("", json!({"fieldRef": field})), Vec::<String>::new());
        let path = "c.env[0].valueFrom: Invalid value: \"\"";
        assert_eq!(
            of("", json!({"fieldRef": field, "secretKeyRef": secret})),
            [format!("{path}: may not have more than one field specified at a time")]
        );
        assert_eq!(
            of("x", json!({"fieldRef": field, "secretKeyRef": secret})),
            [format!("{path}: may not be specified when `value` is not empty")]
        );
        assert!(of("x", json!({}))[0].starts_with(&format!("{path}: must specify one of: `fieldRef`")));
    }

    #[test]
    fn field_references_name_fields_of_v1() {
        let of = |version: &str, field: &str| {
            let reference = json!({"apiVersion": version, "fieldPath": field});
            said(json!({"env": [{"name": "A", "valueFrom": {"fieldRef": reference}}]}))
        };
        let path = "c.env[0].valueFrom.fieldRef";
        assert_eq!(
            of("v1", "metadata.labels['A.b/C']"),
            [format!("{path}: Invalid value: \"A.b/C\": {}", format::qualified_name("A.b/C")[0])]
        );
        assert_eq!(of("v1", "metadata.annotations['A.b/C']"), Vec::<String>::new());
        assert_eq!(of("v1", "spec.host"), Vec::<String>::new(), "the older name of spec.nodeName");
        assert_eq!(of("", "x"), [format!("{path}.apiVersion: Required value")]);
        assert_eq!(of("v2", ""), [format!("{path}.fieldPath: Required value")]);
        let error = "error converting fieldPath";
        assert_eq!(
            of("v2", "metadata.name"),
            [format!(
                "{path}.fieldPath: Invalid value: \"metadata.name\": {error}: unsupported pod version: v2"
            )]
        );
        assert_eq!(
            of("v1", "spec['a']"),
            [format!(
                "{path}.fieldPath: Invalid value: \"spec['a']\": {error}: field label does not support subscript: spec['a']"
            )]
        );
    }

    #[test]
    fn each_bulk_source_is_one_map_or_secret() {
        let long = "a".repeat(253);
        for name in ["a-", "ab.-", &long, &format!("{long}-")] {
            let container = json!({"envFrom": [{"configMapRef": {"name": name}}]});
            assert_eq!(said(container), Vec::<String>::new(), "{name}");
        }
        let too_long = json!({"envFrom": [{"configMapRef": {"name": format!("{long}a-")}}]});
        assert_eq!(said(too_long).len(), 1);
        let both = json!({"configMapRef": {"name": "a"}, "secretRef": {}});
        assert_eq!(
            said(json!({"envFrom": [both]})),
            [
                "c.envFrom[0].secretRef.name: Required value",
                "c.envFrom: Invalid value: \"\": may not have more than one field specified at a time",
            ]
        );
    }
}

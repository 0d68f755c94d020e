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
    match (given.len(), text(&variable["value"])) {
        (0, _) => causes.invalid(path, &"".into(), &format!("must specify one of: {names}")),
        (1, "") => {}
        (_, "") => causes.invalid(path, &"".into(), "may not have more than one field specified at a time"),
        _ => causes.invalid(path, &"".into(), "may not be specified when `value` is not empty"),
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

/// Checks a fieldRef: one of the listed fields, or an entry of labels or annotations. Upstream reports the key of an entry
/// at the reference.
pub(super) fn field_reference(causes: &mut Causes, path: &Path, reference: &Value, supported: &[&str]) {
    let (here, field) = (path.field("fieldPath"), text(&reference["fieldPath"]));
    match text(&reference["apiVersion"]) {
        "" => return causes.required(&path.field("apiVersion"), ""),
        _ if field.is_empty() => return causes.required(&here, ""),
        "v1" => {}
        version => {
            let detail = format!("error converting fieldPath: unsupported pod version: {version}");
            return causes.invalid(&here, &reference["fieldPath"], &detail);
        }
    }
    let subscript = field.strip_suffix("']").and_then(|rest| rest.split_once("['"));
    match subscript {
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
    let mut count = 0;
    for source in ["configMapRef", "secretRef"].into_iter().filter(|name| !from[*name].is_null()) {
        count += 1;
        let here = path.field(source).field("name");
        match text(&from[source]["name"]) {
            "" => causes.required(&here, ""),
            // A dash at the end is valid, as upstream.
            name => causes.format(&here, name, format::dns1123_subdomain(&masked(name))),
        }
    }
    match count {
        0 => causes.invalid(list, &"".into(), "must specify one of: `configMapRef` or `secretRef`"),
        1 => {}
        _ => causes.invalid(list, &"".into(), "may not have more than one field specified at a time"),
    }
}

/// A name whose last dash, if any, is a letter. Source: `maskTrailingDash` of apimachinery.
fn masked(name: &str) -> String {
    match name.strip_suffix('-') {
        Some(rest) if !rest.is_empty() => format!("{rest}a"),
        _ => name.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn problems(container: Value) -> Vec<String> {
        let mut causes = Causes::default();
        all(&mut causes, &Path::root("c"), &container);
        causes.into_list().into_iter().map(|cause| format!("{}: {}", cause.field, cause.message)).collect()
    }

    #[test]
    fn a_variable_has_one_source() {
        let key = json!({"name": "n", "key": "k"});
        let with = |value: &str, from: Value| {
            problems(json!({"env": [{"name": "A", "value": value, "valueFrom": from}]}))
        };
        assert_eq!(with("", json!({"secretKeyRef": key})), Vec::<String>::new());
        let two = json!({"secretKeyRef": key, "configMapKeyRef": key});
        let one_error = |detail: &str| vec![format!("c.env[0].valueFrom: Invalid value: \"\": {detail}")];
        assert_eq!(with("", two.clone()), one_error("may not have more than one field specified at a time"));
        assert_eq!(with("x", two), one_error("may not be specified when `value` is not empty"));
        let maps = json!([{"configMapRef": {"name": "a-"}, "secretRef": {"name": "A"}}]);
        let found = problems(json!({"envFrom": maps}));
        assert!(found.len() == 2 && found[0].starts_with("c.envFrom[0].secretRef.name: "), "{found:?}");
        assert!(found[1].starts_with("c.envFrom: Invalid value: \"\": may not have more"), "{found:?}");
    }

    #[test]
    fn a_field_reference_has_a_known_field() {
        let of = |reference: Value| {
            let found = problems(json!({"env": [{"name": "A", "valueFrom": {"fieldRef": reference}}]}));
            found.concat().replace("c.env[0].valueFrom.fieldRef", "r")
        };
        let v1 = |path: &str| of(json!({"apiVersion": "v1", "fieldPath": path}));
        assert_eq!(v1("metadata.name"), "");
        assert_eq!(v1("metadata.annotations['A.com/b']"), "");
        assert!(v1("metadata.labels['a b']").starts_with("r: Invalid value: \"a b\""));
        let detail = "error converting fieldPath:";
        assert_eq!(
            v1("spec['x']"),
            format!(
                "r.fieldPath: Invalid value: \"spec['x']\": {detail} field label does not support subscript: spec['x']"
            )
        );
        assert_eq!(
            of(json!({"apiVersion": "v2", "fieldPath": "x"})),
            format!("r.fieldPath: Invalid value: \"x\": {detail} unsupported pod version: v2")
        );
        assert_eq!(of(json!({"apiVersion": "v1"})), "r.fieldPath: Required value");
        assert_eq!(of(json!({"fieldPath": "x"})), "r.apiVersion: Required value");
    }
}

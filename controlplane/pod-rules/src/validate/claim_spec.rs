//! Validation of the spec of persistent volume claims and claim templates. Persistent volumes have some of these
//! fields, too.

use coracle_values::Quantity;
use serde_json::{Value, json};

use super::selector::label_selector;
use super::{Causes, Path, format, items, text};

const ACCESS_MODES: &[&str] = &["ReadOnlyMany", "ReadWriteMany", "ReadWriteOnce", "ReadWriteOncePod"];
/// The modes of a volume.
pub const VOLUME_MODES: &[&str] = &["Block", "Filesystem"];

/// Checks the spec of a claim, or of a claim template in a stateful set.
pub fn of_template(causes: &mut Causes, path: &Path, spec: &Value) {
    check(causes, path, spec, true);
}

/// Checks the spec of a claim. The API groups of its data sources are checked only if `checks_groups`.
pub fn check(causes: &mut Causes, path: &Path, spec: &Value, checks_groups: bool) {
    access_modes(causes, path, spec, "at least 1 access mode is required");
    if !spec["selector"].is_null() {
        label_selector(causes, &path.field("selector"), &spec["selector"]);
    }
    let here = path.field("resources").key("storage");
    match &spec["resources"]["requests"]["storage"] {
        Value::Null => causes.required(&here, ""),
        size => positive(causes, &here, size),
    }
    class_name(causes, path, spec);
    causes.optional_word(&path.field("volumeMode"), &spec["volumeMode"], VOLUME_MODES);
    for field in ["dataSource", "dataSourceRef"] {
        data_source(causes, &path.field(field), &spec[field], checks_groups);
    }
    let namespace = text(&spec["dataSourceRef"]["namespace"]);
    if !namespace.is_empty() {
        let here = path.field("dataSourceRef").field("namespace");
        causes.format(&here, namespace, format::dns1123_label(namespace));
    }
    same_data_source(causes, path, spec);
    let attributes = text(&spec["volumeAttributesClassName"]);
    if !attributes.is_empty() {
        let here = path.field("volumeAttributesClassName");
        causes.format(&here, attributes, format::dns1123_subdomain(attributes));
    }
}

/// Checks that the two fields of the data source name the same object. A data source in another namespace is allowed
/// only in `dataSourceRef`.
fn same_data_source(causes: &mut Causes, path: &Path, spec: &Value) {
    let (source, reference) = (&spec["dataSource"], &spec["dataSourceRef"]);
    if source.is_null() || reference.is_null() {
        return;
    }
    // Upstream's error shows a field path in place of the value, which is an empty object in JSON.
    let value = json!({});
    let same = |field: &str| source[field] == reference[field];
    if !text(&reference["namespace"]).is_empty() {
        causes.invalid(path, &value, "may not be specified when dataSourceRef.namespace is specified");
    } else if !["apiGroup", "kind", "name"].into_iter().all(same) {
        causes.invalid(path, &value, "must match dataSourceRef");
    }
}

/// Checks the object from which a claim gets its data.
fn data_source(causes: &mut Causes, path: &Path, source: &Value, checks_group: bool) {
    if source.is_null() {
        return;
    }
    for field in ["name", "kind"] {
        if text(&source[field]).is_empty() {
            causes.required(&path.field(field), "");
        }
    }
    let group = text(&source["apiGroup"]);
    if group.is_empty() && source["kind"] != "PersistentVolumeClaim" {
        let detail = "must be 'PersistentVolumeClaim' when referencing the default apiGroup";
        causes.invalid(path, &source["kind"], detail);
    }
    if !group.is_empty() && checks_group {
        causes.format(&path.field("apiGroup"), group, format::dns1123_subdomain(group));
    }
}

/// Checks the access modes of a claim or a volume. `missing` is the message if there are no access modes.
pub fn access_modes(causes: &mut Causes, path: &Path, spec: &Value, missing: &str) {
    let here = path.field("accessModes");
    let modes: Vec<&Value> = items(&spec["accessModes"]).map(|(_, mode)| mode).collect();
    if modes.is_empty() {
        causes.required(&here, missing);
    }
    for mode in &modes {
        if !ACCESS_MODES.contains(&text(mode)) {
            causes.unsupported(&here, mode, ACCESS_MODES);
        }
    }
    if modes.iter().any(|mode| *mode == "ReadWriteOncePod")
        && modes.iter().any(|mode| *mode != "ReadWriteOncePod" && ACCESS_MODES.contains(&text(mode)))
    {
        causes.forbidden(&here, "may not use ReadWriteOncePod with other access modes");
    }
}

/// Checks that a size is above zero.
pub fn positive(causes: &mut Causes, path: &Path, size: &Value) {
    match Quantity::parse(text(size)) {
        Ok(quantity) if quantity.signum() > 0 => {}
        _ => causes.invalid(path, size, "must be greater than zero"),
    }
}

/// Checks the name of the storage class of a claim or a volume.
pub fn class_name(causes: &mut Causes, path: &Path, spec: &Value) {
    let name = text(&spec["storageClassName"]);
    if !name.is_empty() {
        causes.format(&path.field("storageClassName"), name, format::dns1123_subdomain(name));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_data_sources_of_a_claim_are_the_same_object() {
        let problems = |source: &str, reference: Value| {
            let spec = json!({"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1"}},
                "dataSource": {"kind": "PersistentVolumeClaim", "name": source}, "dataSourceRef": reference});
            let mut causes = Causes::default();
            of_template(&mut causes, &Path::root("spec"), &spec);
            causes.into_list().into_iter().map(|cause| cause.field).collect::<Vec<_>>()
        };
        let reference = |name: &str| json!({"kind": "PersistentVolumeClaim", "name": name});
        assert_eq!(problems("a", reference("a")), Vec::<String>::new());
        assert_eq!(problems("a", reference("b")), ["spec"]);
        let foreign = json!({"kind": "PersistentVolumeClaim", "name": "a", "namespace": "n"});
        assert_eq!(problems("a", foreign), ["spec"]);
    }
}

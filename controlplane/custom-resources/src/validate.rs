//! Validation of definitions (`apis/apiextensions/validation`).
//!
//! Upstream validates its internal version of a definition. If a field is the same in all versions, the internal
//! version has it in the definition itself: `spec.validation`, `spec.subresources`. The paths of violations are paths
//! in the internal version.

mod approval;
mod conversion;
mod version;

use serde_json::Value;

use crate::definition::{Definition, Names, Spec};
use crate::violation::{Path, Violations};
use coracle_values::names;

/// Validates a new definition. Checks that the name is `<plural>.<group>`. The caller checks the other metadata.
pub fn create(object: &Value, violations: &mut Violations) {
    let Some(definition) = read(object, violations) else { return };
    let name = format!("{}.{}", definition.spec.names.plural, definition.spec.group);
    if definition.metadata.name != name {
        let detail = "must be spec.names.plural+\".\"+spec.group";
        violations.invalid(
            &Path::root("metadata").field("name"),
            &definition.metadata.name.clone().into(),
            detail,
        );
    }
    validate_spec(&definition.spec, object, None, violations);
    validate_names(
        &definition.status.accepted_names,
        &Path::root("status").field("acceptedNames"),
        violations,
    );
    validate_stored_versions(&definition, violations);
    approval::validate(&definition, None, violations);
    validate_preserve_unknown(&definition, violations);
}

/// Validates an update of a definition.
pub fn update(object: &Value, old: &Value, violations: &mut Violations) {
    let (Some(definition), Ok(before)) = (read(object, violations), Definition::parse(old)) else { return };
    validate_spec(&definition.spec, object, Some(old), violations);
    let spec = Path::root("spec");
    if before.is_condition_true("Established") {
        immutable(&spec.field("scope"), &definition.spec.scope, &before.spec.scope, violations);
        let kind = spec.field("names").field("kind");
        immutable(&kind, &definition.spec.names.kind, &before.spec.names.kind, violations);
    }
    immutable(&spec.field("group"), &definition.spec.group, &before.spec.group, violations);
    let plural = spec.field("names").field("plural");
    immutable(&plural, &definition.spec.names.plural, &before.spec.names.plural, violations);
    validate_names(
        &definition.status.accepted_names,
        &Path::root("status").field("acceptedNames"),
        violations,
    );
    validate_stored_versions(&definition, violations);
    approval::validate(&definition, Some(&before), violations);
    if !before.spec.preserve_unknown_fields {
        validate_preserve_unknown(&definition, violations);
    }
}

/// Validates an update of `/status`.
pub fn update_status(object: &Value, violations: &mut Violations) {
    let Some(definition) = read(object, violations) else { return };
    validate_names(
        &definition.status.accepted_names,
        &Path::root("status").field("acceptedNames"),
        violations,
    );
}

/// The unsupported formats of all schemas, for warnings. Each is listed once.
pub fn unknown_formats(object: &Value) -> Vec<String> {
    let mut found = Vec::new();
    let Ok(definition) = Definition::parse(object) else { return found };
    for schema in definition.spec.versions.iter().filter_map(|version| version.schema()) {
        version::unknown_formats(schema, &mut found);
    }
    found
}

fn read(object: &Value, violations: &mut Violations) -> Option<Definition> {
    match Definition::parse(object) {
        Ok(definition) => Some(definition),
        Err(error) => {
            violations.invalid(&Path::root("spec"), &Value::Null, &error.to_string());
            None
        }
    }
}

fn immutable(path: &Path, new: &str, old: &str, violations: &mut Violations) {
    if new != old {
        violations.invalid(path, &new.into(), "field is immutable");
    }
}

fn validate_preserve_unknown(definition: &Definition, violations: &mut Violations) {
    if definition.spec.preserve_unknown_fields {
        let detail = "cannot set to true, set x-kubernetes-preserve-unknown-fields to true in spec.versions[*].schema \
                      instead";
        violations.invalid(&Path::root("spec").field("preserveUnknownFields"), &true.into(), detail);
    }
}

fn validate_spec(spec: &Spec, object: &Value, old: Option<&Value>, violations: &mut Violations) {
    let path = Path::root("spec");
    let group = path.field("group");
    if spec.group.is_empty() {
        violations.required(&group, "");
    } else {
        let problems = names::dns1123_subdomain(&spec.group);
        if !problems.is_empty() {
            violations.format(&group, &spec.group, &problems);
        } else if !spec.group.contains('.') {
            let detail = "should be a domain with at least one dot";
            violations.invalid(&group, &spec.group.clone().into(), detail);
        }
    }
    one_of(&path.field("scope"), &spec.scope, &["Cluster", "Namespaced"], violations);
    version::validate(spec, old, &path, violations);
    let versions = &object["spec"]["versions"];
    let mut seen = std::collections::HashSet::new();
    if !spec.versions.iter().all(|version| seen.insert(version.name.as_str())) {
        violations.invalid(&path.field("versions"), versions, "must contain unique version names");
    }
    if spec.versions.iter().filter(|version| version.storage).count() != 1 {
        let detail = "must have exactly one version marked as storage version";
        violations.invalid(&path.field("versions"), versions, detail);
    }
    let names_path = path.field("names");
    let required = [
        ("plural", &spec.names.plural),
        ("singular", &spec.names.singular),
        ("kind", &spec.names.kind),
        ("listKind", &spec.names.list_kind),
    ];
    for (field, value) in required {
        if value.is_empty() {
            violations.required(&names_path.field(field), "");
        }
    }
    validate_names(&spec.names, &names_path, violations);
    conversion::validate(spec, &path.field("conversion"), violations);
}

fn validate_names(names: &Names, path: &Path, violations: &mut Violations) {
    for (field, value) in [("plural", &names.plural), ("singular", &names.singular)] {
        if !value.is_empty() {
            violations.format(&path.field(field), value, &names::dns1035_label(value));
        }
    }
    for (field, value) in [("kind", &names.kind), ("listKind", &names.list_kind)] {
        let problems = names::dns1035_label(&value.to_lowercase());
        if !value.is_empty() && !problems.is_empty() {
            let detail = format!("may have mixed case, but should otherwise match: {}", problems.join(","));
            violations.invalid(&path.field(field), &value.clone().into(), &detail);
        }
    }
    for (field, list) in [("shortNames", &names.short_names), ("categories", &names.categories)] {
        for (index, name) in list.iter().enumerate() {
            violations.format(&path.field(field).index(index), name, &names::dns1035_label(name));
        }
    }
    if !names.kind.is_empty() && names.kind == names.list_kind {
        let detail = "kind and listKind may not be the same";
        violations.invalid(&path.field("listKind"), &names.list_kind.clone().into(), detail);
    }
}

fn validate_stored_versions(definition: &Definition, violations: &mut Violations) {
    let path = Path::root("status").field("storedVersions");
    let stored = &definition.status.stored_versions;
    if stored.is_empty() {
        violations.invalid(&path, &Value::Null, "must have at least one stored version");
        return;
    }
    if let Some(storage) = definition.storage_version()
        && !stored.contains(&storage.name)
    {
        let detail = format!("must have the storage version {}", storage.name);
        violations.invalid(&path, &stored.clone().into(), &detail);
    }
    for (index, name) in stored.iter().enumerate() {
        if definition.version(name).is_none() {
            let detail = format!(
                "missing from spec.versions; {name} was previously a storage version, and must remain in spec.versions \
                 until a storage migration ensures no data remains persisted in {name} and removes {name} from \
                 status.storedVersions"
            );
            violations.invalid(&path.index(index), &name.clone().into(), &detail);
        }
    }
}

fn one_of(path: &Path, value: &str, known: &[&str], violations: &mut Violations) {
    if value.is_empty() {
        violations.required(path, "");
    } else if !known.contains(&value) {
        let known: Vec<String> = known.iter().map(|word| (*word).to_owned()).collect();
        violations.unsupported(path, &value.into(), &known);
    }
}

#[cfg(test)]
mod tests;

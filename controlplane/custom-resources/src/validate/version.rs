//! Validation of the versions: schema, subresources, columns, selectable fields, deprecation.

use serde_json::Value;

use crate::definition::{Column, Scale, Spec, Version};
use crate::json_path::{JsonPath, MAX_DEPTH, MAX_LENGTH};
use crate::rules;
use crate::schema::Schema;
use crate::violation::{Path, Violations};
use crate::{default_rules, field_path, format, schema_rules, structural};
use coracle_values::names;

/// Maximum number of selectable fields of a version.
const MAX_SELECTABLE_FIELDS: usize = 8;

const ROOT_FIELDS: &[&str] = &[
    "description",
    "type",
    "format",
    "title",
    "maximum",
    "exclusiveMaximum",
    "minimum",
    "exclusiveMinimum",
    "maxLength",
    "minLength",
    "pattern",
    "maxItems",
    "minItems",
    "uniqueItems",
    "multipleOf",
    "required",
    "items",
    "properties",
    "externalDocs",
    "example",
    "x-kubernetes-preserve-unknown-fields",
    "x-kubernetes-validations",
];

/// The fields that have the same value in all versions. As upstream, violations in such a field are reported once, at
/// the path of the definition.
#[expect(clippy::struct_excessive_bools, reason = "each field is shared or not, independent of the others")]
struct Shared {
    schema: bool,
    subresources: bool,
    columns: bool,
    selectable: bool,
}

/// Validates all versions.
pub(super) fn validate(spec: &Spec, old: Option<&Value>, path: &Path, violations: &mut Violations) {
    let shared = shared(spec);
    first_name(spec, path, violations);
    for (index, version) in spec.versions.iter().enumerate() {
        let place = path.field("versions").index(index);
        if version.schema().is_none() {
            violations.required(&place.field("schema").field("openAPIV3Schema"), "");
        }
        violations.format(&place.field("name"), &version.name, &names::dns1035_label(&version.name));
        deprecation(version, &place, violations);
        let first = index == 0;
        let path_of = |is_shared: bool| if is_shared { path.clone() } else { place.clone() };
        let schema_path = if shared.schema { path.field("validation") } else { place.field("schema") };
        let parsed = match version.schema() {
            Some(raw) if first || !shared.schema => {
                let raw_old = old.and_then(|old| old_schema(old, &version.name));
                schema(raw, raw_old == Some(raw), version, &schema_path.field("openAPIV3Schema"), violations)
            }
            raw => raw.and_then(|raw| Schema::parse(raw).ok()),
        };
        if (first || !shared.subresources)
            && let Some(scale) = version.scale()
        {
            scale_paths(scale, &path_of(shared.subresources).field("subresources"), violations);
        }
        if first || !shared.columns {
            let place = path_of(shared.columns).field("additionalPrinterColumns");
            for (index, column) in version.additional_printer_columns.iter().enumerate() {
                printer_column(column, &place.index(index), violations);
            }
        }
        if first || !shared.selectable {
            let place = path_of(shared.selectable).field("selectableFields");
            match &parsed {
                Some(schema) => selectable_fields(version, schema, &place, violations),
                None if version.schema().is_none() && !version.selectable_fields.is_empty() => {
                    let detail = "may only be set when validations.schema is included";
                    violations.invalid(&place, &"".into(), detail);
                }
                None => {}
            }
        }
    }
}

/// Checks the name of the first version. As upstream, the path of the error is `spec.version`, a field of v1beta1.
fn first_name(spec: &Spec, path: &Path, violations: &mut Violations) {
    let name = spec.versions.first().map_or("", |version| version.name.as_str());
    let problems = names::dns1035_label(name);
    if !name.is_empty() && !problems.is_empty() {
        violations.invalid(&path.field("version"), &name.into(), &problems.join(","));
    }
}

/// Adds the unknown formats of a schema.
pub(super) fn unknown_formats(schema: &Value, found: &mut Vec<String>) {
    let Ok(schema) = Schema::parse(schema) else { return };
    formats(&schema, found);
}

fn formats(schema: &Schema, found: &mut Vec<String>) {
    let word = schema.format.to_string();
    if !word.is_empty() && !format::is_known(&schema.kind, &word) && !found.contains(&word) {
        found.push(word);
    }
    let below = schema.properties.values().chain(schema.item()).chain(schema.additional_schema());
    below.for_each(|inner| formats(inner, found));
}

fn shared(spec: &Spec) -> Shared {
    let same = |get: fn(&Version) -> String| {
        let mut values = spec.versions.iter().map(get);
        let first = values.next();
        values.all(|value| Some(value) == first)
    };
    Shared {
        schema: same(|version| version.schema().map_or_else(String::new, Value::to_string)),
        subresources: same(|version| format!("{:?}", version.subresources)),
        columns: same(|version| format!("{:?}", version.additional_printer_columns)),
        selectable: same(|version| format!("{:?}", version.selectable_fields)),
    }
}

fn old_schema<'a>(old: &'a Value, name: &str) -> Option<&'a Value> {
    let versions = old["spec"]["versions"].as_array()?;
    versions.iter().find(|version| version["name"] == name)?.get("schema")?.get("openAPIV3Schema")
}

/// Validates a schema. Does not compile the rules of an unchanged schema again.
fn schema(
    raw: &Value,
    unchanged: bool,
    version: &Version,
    path: &Path,
    violations: &mut Violations,
) -> Option<Schema> {
    let before = violations.len();
    let parsed = match Schema::parse(raw) {
        Ok(parsed) => parsed,
        Err(error) => {
            violations.invalid(path, &"".into(), &error.to_string());
            return None;
        }
    };
    if version.has_status() {
        root_fields(raw, &parsed, path, violations);
    }
    if parsed.nullable {
        violations.forbidden(&path.field("nullable"), "nullable cannot be true at the root");
    }
    let mut found = Violations::default();
    structural::validate(&parsed, path, &mut found);
    if found.is_empty() {
        default_rules::validate(&parsed, path, &mut found);
    }
    let structural = found.is_empty();
    violations.append(found);
    schema_rules::validate(&parsed, path, violations);
    if structural && violations.len() == before && !unchanged {
        rules::validate(&parsed, path, violations);
    }
    Some(parsed)
}

fn root_fields(raw: &Value, parsed: &Schema, path: &Path, violations: &mut Violations) {
    if !matches!(&*parsed.kind, "" | "object") {
        let detail = "only \"object\" is allowed as the type at the root of the schema if the status subresource is enabled";
        violations.invalid(&path.field("type"), &(&*parsed.kind).into(), detail);
        return;
    }
    let Value::Object(map) = raw else { return };
    if map.keys().any(|name| !ROOT_FIELDS.contains(&name.as_str())) {
        let names = "[Description Type Format Title Maximum ExclusiveMaximum Minimum ExclusiveMinimum MaxLength \
                     MinLength Pattern MaxItems MinItems UniqueItems MultipleOf Required Items Properties ExternalDocs \
                     Example XPreserveUnknownFields XValidations]";
        let detail = format!(
            "only {names} fields are allowed at the root of the schema if the status subresource is enabled"
        );
        violations.invalid(path, raw, &detail);
    }
}

fn deprecation(version: &Version, path: &Path, violations: &mut Violations) {
    let Some(text) = &version.deprecation_warning else { return };
    let place = path.field("deprecationWarning");
    let mut fail = |detail: &str| violations.invalid(&place, &text.clone().into(), detail);
    if !version.deprecated {
        fail("can only be set for deprecated versions");
        return;
    }
    if text.len() > 256 {
        fail("must be <= 256 characters long");
    }
    if text.is_empty() {
        fail("must not be an empty string");
    }
    if let Some((at, _)) = text.char_indices().find(|(_, c)| c.is_control()) {
        fail(&format!(
            "must only contain printable UTF-8 characters; non-printable character found at index {at}"
        ));
    }
}

fn scale_paths(scale: &Scale, path: &Path, violations: &mut Violations) {
    let paths = [
        ("scale.specReplicasPath", &scale.spec_replicas_path, ".spec."),
        ("scale.statusReplicasPath", &scale.status_replicas_path, ".status."),
    ];
    for (field, value, prefix) in paths {
        let place = path.field(field);
        if value.is_empty() {
            violations.required(&place, "");
        } else if is_simple(value, &place, violations) && !value.starts_with(prefix) {
            let detail = format!("should be a json path under {}", prefix.trim_end_matches('.'));
            violations.invalid(&place, &value.clone().into(), &detail);
        }
    }
    if let Some(value) = scale.label_selector_path.as_ref().filter(|value| !value.is_empty()) {
        let place = path.field("scale.labelSelectorPath");
        let below = value.starts_with(".spec.") || value.starts_with(".status.");
        if is_simple(value, &place, violations) && !below {
            let detail = "should be a json path under either .spec or .status";
            violations.invalid(&place, &value.clone().into(), detail);
        }
    }
}

fn is_simple(value: &str, path: &Path, violations: &mut Violations) -> bool {
    let simple = value.starts_with('.');
    if !simple {
        violations.invalid(path, &value.into(), "must be a simple json path starting with .");
    }
    simple
}

fn printer_column(column: &Column, path: &Path, violations: &mut Violations) {
    const TYPES: &[&str] = &["boolean", "date", "integer", "number", "string"];
    const FORMATS: &[&str] = &["byte", "date", "date-time", "double", "float", "int32", "int64", "password"];
    if column.name.is_empty() {
        violations.required(&path.field("name"), "");
    }
    let detail = format!("must be one of {}", TYPES.join(","));
    if column.kind.is_empty() {
        violations.required(&path.field("type"), &detail);
    } else if !TYPES.contains(&column.kind.as_str()) {
        violations.invalid(&path.field("type"), &column.kind.clone().into(), &detail);
    }
    if !column.format.is_empty() && !FORMATS.contains(&column.format.as_str()) {
        let detail = format!("must be one of {}", FORMATS.join(","));
        violations.invalid(&path.field("format"), &column.format.clone().into(), &detail);
    }
    let place = path.field("JSONPath");
    if column.json_path.is_empty() {
        violations.required(&place, "");
    } else {
        let value = &column.json_path;
        if is_simple(value, &place, violations) && JsonPath::exceeds_limits(value) {
            let detail = format!(
                "must be a json path of at most {MAX_LENGTH} bytes with at most {MAX_DEPTH} levels of filters"
            );
            violations.invalid(&place, &value.clone().into(), &detail);
        }
    }
}

fn selectable_fields(version: &Version, schema: &Schema, path: &Path, violations: &mut Violations) {
    let mut seen = std::collections::HashSet::new();
    for (index, field) in version.selectable_fields.iter().enumerate() {
        let place = path.index(index).field("jsonPath");
        let value = Value::from(field.json_path.clone());
        if field.json_path.is_empty() {
            violations.required(&place, "");
            continue;
        }
        let (found, target) = match field_path::resolve(&field.json_path, schema, false) {
            Ok(found) => found,
            Err(error) => {
                violations.invalid(&place, &value, &format!("is an invalid path: {error}"));
                continue;
            }
        };
        if found.as_str().split(['.', '[']).next() == Some("metadata") {
            violations.invalid(&place, &value, "must not point to fields in metadata");
        }
        if !matches!(&*target.kind, "string" | "boolean" | "integer") {
            let detail = "must point to a field of type string, boolean or integer. Enum string fields and strings \
                          with formats are allowed.";
            violations.invalid(&place, &value, detail);
        }
        if !seen.insert(found.to_string()) {
            violations.duplicate(&place, &value);
        }
    }
    if seen.len() > MAX_SELECTABLE_FIELDS {
        violations.too_many(path, seen.len(), 8);
    }
}

//! Metadata of embedded resources (`apiserver/schema/objectmeta`): types, unknown fields, required fields.

use serde_json::{Map, Value};

use crate::prune::MAX_PATHS;
use crate::schema::Schema;
use crate::violation::{Path, Violations};
use coracle_values::{go, names};

/// Checks and cleans the metadata of embedded resources: removes unknown fields. Returns at most [`MAX_PATHS`] of their
/// paths, sorted.
pub(crate) fn coerce(object: &mut Value, schema: &Schema, violations: &mut Violations) -> Vec<String> {
    let mut unknown = Vec::new();
    walk(object, schema, &Path::default(), &mut |map, path| {
        coerce_metadata(map, path, violations, &mut unknown)
    });
    unknown.sort();
    unknown
}

/// Validates embedded resources: `apiVersion` and `kind` are required, and names and labels must be valid.
pub(crate) fn validate(object: &Value, schema: &Schema, violations: &mut Violations) {
    validate_node(object, schema, &Path::default(), violations);
}

fn walk(
    value: &mut Value,
    schema: &Schema,
    path: &Path,
    visit: &mut dyn FnMut(&mut Map<String, Value>, &Path),
) {
    match value {
        Value::Object(map) => {
            if schema.embedded {
                visit(map, path);
            }
            for (name, inner) in map.iter_mut() {
                if let Some(property) = schema.properties.get(name.as_str()) {
                    walk(inner, property, &path.field(name), visit);
                } else if let Some(additional) = schema.additional_schema() {
                    walk(inner, additional, &path.key(name), visit);
                }
            }
        }
        Value::Array(list) => {
            if let Some(item) = schema.item() {
                for (index, inner) in list.iter_mut().enumerate() {
                    walk(inner, item, &path.index(index), visit);
                }
            }
        }
        _ => {}
    }
}

fn coerce_metadata(
    map: &mut Map<String, Value>,
    path: &Path,
    violations: &mut Violations,
    unknown: &mut Vec<String>,
) {
    for name in ["apiVersion", "kind"] {
        if let Some(value) = map.get(name)
            && !value.is_string()
        {
            violations.invalid(&path.field(name), value, "must be a string");
        }
    }
    let Some(metadata) = map.get_mut("metadata") else { return };
    let place = path.field("metadata");
    let Value::Object(fields) = metadata else {
        violations.invalid(&place, metadata, "must be an object");
        return;
    };
    let mut wrong = None;
    fields.retain(|name, value| {
        let Some(metadata_type) = metadata_type(name) else {
            if unknown.len() < MAX_PATHS {
                unknown.push(place.field(name).as_str().to_owned());
            }
            return false;
        };
        if !metadata_type.fits(value) {
            wrong = Some(format!(
                "json: cannot unmarshal {} into Go struct field ObjectMeta.{name} of type {}",
                go::json_kind(value),
                metadata_type.go_type()
            ));
        }
        !value.is_null()
    });
    if let Some(detail) = wrong {
        violations.invalid(&place, &Value::Object(fields.clone()), &detail);
    }
}

#[derive(Clone, Copy)]
enum MetadataType {
    Text,
    Integer,
    Time,
    Texts,
    TextMap,
    Objects,
}

fn metadata_type(field: &str) -> Option<MetadataType> {
    Some(match field {
        "name" | "generateName" | "namespace" | "selfLink" | "uid" | "resourceVersion" => MetadataType::Text,
        "generation" | "deletionGracePeriodSeconds" => MetadataType::Integer,
        "creationTimestamp" | "deletionTimestamp" => MetadataType::Time,
        "labels" | "annotations" => MetadataType::TextMap,
        "finalizers" => MetadataType::Texts,
        "ownerReferences" | "managedFields" => MetadataType::Objects,
        _ => return None,
    })
}

impl MetadataType {
    fn fits(self, value: &Value) -> bool {
        match (self, value) {
            (_, Value::Null) => true,
            (MetadataType::Text, _) => value.is_string(),
            (MetadataType::Integer, _) => value.is_i64(),
            (MetadataType::Time, Value::String(text)) => text.parse::<jiff::Timestamp>().is_ok(),
            (MetadataType::Texts, Value::Array(list)) => list.iter().all(Value::is_string),
            (MetadataType::Objects, Value::Array(list)) => list.iter().all(Value::is_object),
            (MetadataType::TextMap, Value::Object(map)) => map.values().all(Value::is_string),
            _ => false,
        }
    }

    fn go_type(self) -> &'static str {
        match self {
            MetadataType::Text => "string",
            MetadataType::Integer => "int64",
            MetadataType::Time => "v1.Time",
            MetadataType::Texts => "[]string",
            MetadataType::TextMap => "map[string]string",
            MetadataType::Objects => "[]v1.OwnerReference",
        }
    }
}

fn validate_node(value: &Value, schema: &Schema, path: &Path, violations: &mut Violations) {
    match value {
        Value::Object(map) => {
            if schema.embedded {
                validate_embedded(map, path, violations);
            }
            for (name, inner) in map {
                if let Some(property) = schema.properties.get(name.as_str()) {
                    validate_node(inner, property, &path.field(name), violations);
                } else if let Some(additional) = schema.additional_schema() {
                    validate_node(inner, additional, &path.key(name), violations);
                }
            }
        }
        Value::Array(list) => {
            if let Some(item) = schema.item() {
                for (index, inner) in list.iter().enumerate() {
                    validate_node(inner, item, &path.index(index), violations);
                }
            }
        }
        _ => {}
    }
}

fn validate_embedded(map: &Map<String, Value>, path: &Path, violations: &mut Violations) {
    match map.get("apiVersion").and_then(Value::as_str) {
        None | Some("") => violations.required(&path.field("apiVersion"), ""),
        Some(version) if version.matches('/').count() > 1 => {
            let detail = format!("unexpected GroupVersion string: {version}");
            violations.invalid(&path.field("apiVersion"), &version.into(), &detail);
        }
        Some(_) => {}
    }
    match map.get("kind").and_then(Value::as_str) {
        None | Some("") => violations.required(&path.field("kind"), ""),
        Some(kind) => {
            let problems = names::dns1035_label(&kind.to_lowercase());
            if !problems.is_empty() {
                let detail =
                    format!("may have mixed case, but should otherwise match: {}", problems.join(","));
                violations.invalid(&path.field("kind"), &kind.into(), &detail);
            }
        }
    }
    let Some(Value::Object(metadata)) = map.get("metadata") else { return };
    let place = path.field("metadata");
    let text = |name: &str| metadata.get(name).and_then(Value::as_str).unwrap_or_default();
    if !text("name").is_empty() {
        for problem in names::path_segment(text("name")) {
            violations.invalid(&place.field("name"), &text("name").into(), &problem);
        }
    }
    if let Some(Value::Object(labels)) = metadata.get("labels") {
        for (key, value) in labels {
            for problem in names::qualified_name(key) {
                violations.invalid(&place.field("labels"), &key.as_str().into(), &problem);
            }
            let value = value.as_str().unwrap_or_default();
            for problem in names::label_value(value) {
                violations.invalid(&place.field("labels"), &value.into(), &problem);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn metadata_of_an_embedded_resource_is_cleaned() {
        let schema = Schema::parse(&json!({"type": "object", "properties": {
            "template": {"type": "object", "x-kubernetes-embedded-resource": true,
                "x-kubernetes-preserve-unknown-fields": true}}}))
        .unwrap();
        let mut object = json!({"template": {"apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": "x", "odd": 1, "creationTimestamp": null}}});
        let mut violations = Violations::default();
        assert_eq!(coerce(&mut object, &schema, &mut violations), ["template.metadata.odd"]);
        assert!(violations.is_empty());
        assert_eq!(object["template"]["metadata"], json!({"name": "x"}));
        validate(&json!({"template": {"kind": "Pod"}}), &schema, &mut violations);
        let violation = &violations.as_slice()[0];
        assert_eq!(
            (violation.field.as_str(), violation.message.as_str()),
            ("template.apiVersion", "Required value")
        );
    }

    #[test]
    fn many_unknown_fields_below_a_long_key_have_few_paths() {
        let schema = Schema::parse(&json!({"type": "object", "additionalProperties": {
            "type": "object", "x-kubernetes-embedded-resource": true, "x-kubernetes-preserve-unknown-fields": true}}))
        .unwrap();
        let unknown: Map<String, Value> = (0..1000).map(|at| (format!("odd{at}"), 1.into())).collect();
        let key = "k".repeat(2000);
        let mut object = json!({key.as_str(): {"apiVersion": "v1", "kind": "Pod", "metadata": unknown}});
        let mut violations = Violations::default();
        assert_eq!(coerce(&mut object, &schema, &mut violations).len(), MAX_PATHS);
        assert!(violations.is_empty());
        assert_eq!(object[key.as_str()]["metadata"], json!({}));
    }
}

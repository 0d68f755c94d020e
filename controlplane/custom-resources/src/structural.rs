//! The rules that make a schema structural (`apiserver/schema/validation.go`).

use crate::schema::{Checks, Schema};
use crate::violation::{Path, Violations};

/// Position of a node.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Level {
    Root,
    Item,
    Field,
}

/// Checks that a schema is structural.
pub(crate) fn validate(schema: &Schema, path: &Path, violations: &mut Violations) {
    invariants(schema, Level::Root, path, violations);
    if let Some(checks) = &schema.checks {
        complete(checks, schema, path, path, violations);
    }
}

fn invariants(schema: &Schema, level: Level, path: &Path, violations: &mut Violations) {
    if &*schema.kind == "array" && schema.items.is_none() {
        violations.required(&path.field("items"), "must be specified");
    }
    if let Some(item) = schema.item() {
        invariants(item, Level::Item, &path.field("items"), violations);
    }
    for (name, property) in &schema.properties {
        invariants(property, Level::Field, &path.field("properties").key(name), violations);
    }
    if schema.additional.is_some() {
        let place = path.field("additionalProperties");
        if level == Level::Root {
            violations.forbidden(&place, "must not be used at the root");
        }
        if let Some(inner) = schema.additional_schema() {
            invariants(inner, Level::Field, &place, violations);
        }
    }
    extensions(schema, path, violations);
    if let Some(checks) = &schema.checks {
        let any_of = schema.int_or_string && is_int_or_string(&checks.any_of);
        let first_all_of = schema.int_or_string
            && checks
                .all_of
                .first()
                .and_then(|first| first.checks.as_ref())
                .is_some_and(|c| is_int_or_string(&c.any_of));
        nested_checks(checks, SkippedPatterns { any_of, first_all_of }, path, violations);
    }
    type_rules(schema, level, path, violations);
    metadata_rules(schema, level, path, violations);
}

fn extensions(schema: &Schema, path: &Path, violations: &mut Violations) {
    if !schema.int_or_string {
        return;
    }
    let detail = "must be false if x-kubernetes-int-or-string is true";
    if schema.preserve_unknown {
        violations.invalid(&path.field("x-kubernetes-preserve-unknown-fields"), &true.into(), detail);
    }
    if schema.embedded {
        violations.invalid(&path.field("x-kubernetes-embedded-resource"), &true.into(), detail);
    }
}

fn type_rules(schema: &Schema, level: Level, path: &Path, violations: &mut Violations) {
    let place = path.field("type");
    if schema.embedded && &*schema.kind != "object" {
        let detail = "must be object if x-kubernetes-embedded-resource is true";
        if schema.kind.is_empty() {
            violations.required(&place, detail);
        } else {
            violations.invalid(&place, &(&*schema.kind).into(), detail);
        }
    } else if schema.kind.is_empty() && !schema.int_or_string && !schema.preserve_unknown {
        let detail = match level {
            Level::Root => "must not be empty at the root",
            Level::Item => "must not be empty for specified array items",
            Level::Field => "must not be empty for specified object fields",
        };
        violations.required(&place, detail);
    }
    if schema.embedded && schema.additional.is_some() {
        let detail = "must not be used if x-kubernetes-embedded-resource is set";
        violations.forbidden(&path.field("additionalProperties"), detail);
    }
    if level == Level::Root && !schema.kind.is_empty() && &*schema.kind != "object" {
        violations.invalid(&place, &(&*schema.kind).into(), "must be object at the root");
    }
    if schema.embedded && !schema.preserve_unknown && schema.properties.is_empty() {
        let detail = "must not be empty if x-kubernetes-embedded-resource is true without \
                      x-kubernetes-preserve-unknown-fields";
        violations.required(&path.field("properties"), detail);
    }
}

fn metadata_rules(schema: &Schema, level: Level, path: &Path, violations: &mut Violations) {
    let resource = level == Level::Root || schema.embedded;
    for name in ["kind", "apiVersion"] {
        if let Some(property) = schema.properties.get(name)
            && resource
            && &*property.kind != "string"
        {
            let place = path.field("properties").key(name).field("type");
            violations.invalid(&place, &(&*property.kind).into(), "must be string");
        }
    }
    let Some(metadata) = schema.properties.get("metadata") else { return };
    let place = path.field("properties").key("metadata");
    if resource && &*metadata.kind != "object" {
        violations.invalid(&place.field("type"), &(&*metadata.kind).into(), "must be object");
    }
    if level == Level::Root && !is_plain_metadata(metadata) {
        let detail = "must not specify anything other than name and generateName, but metadata is implicitly specified";
        violations.forbidden(&place, detail);
    }
}

fn is_plain_metadata(metadata: &Schema) -> bool {
    metadata.properties.keys().all(|name| matches!(&**name, "name" | "generateName"))
        && metadata.additional.is_none()
        && metadata.items.is_none()
        && metadata.checks.is_none()
        && metadata.rules.is_empty()
        && !(metadata.nullable || metadata.preserve_unknown || metadata.embedded || metadata.int_or_string)
        && metadata.map_type.is_none()
        && metadata.list_type.is_none()
        && !(metadata.marks.title || metadata.marks.description)
}

/// Whether the list is exactly `- type: integer` and `- type: string`.
fn is_int_or_string(any_of: &[Schema]) -> bool {
    let plain = |schema: &Schema, kind: &str| {
        &*schema.kind == kind
            && schema.checks.is_none()
            && schema.properties.is_empty()
            && schema.items.is_none()
    };
    matches!(any_of, [first, second] if plain(first, "integer") && plain(second, "string"))
}

/// The patterns of a schema that are not checked, because integer-or-string fields may have them.
struct SkippedPatterns {
    any_of: bool,
    /// The first element of `allOf` may have the pattern in its `anyOf`.
    first_all_of: bool,
}

/// Checks the schemas in the junctors (`allOf`, `anyOf`, `oneOf`, `not`), and the pattern.
fn nested_checks(checks: &Checks, skipped: SkippedPatterns, path: &Path, violations: &mut Violations) {
    if !skipped.any_of {
        for (index, schema) in checks.any_of.iter().enumerate() {
            nested(schema, false, &path.field("anyOf").index(index), violations);
        }
    }
    for (index, schema) in checks.all_of.iter().enumerate() {
        nested(schema, skipped.first_all_of && index == 0, &path.field("allOf").index(index), violations);
    }
    for (index, schema) in checks.one_of.iter().enumerate() {
        nested(schema, false, &path.field("oneOf").index(index), violations);
    }
    if let Some(not) = &checks.not {
        nested(not, false, &path.field("not"), violations);
    }
    if let Some(pattern) = &checks.pattern
        && let Err(error) = &pattern.regex
    {
        let detail = format!("must be a valid regular expression, but isn't: {error}");
        violations.invalid(&path.field("pattern"), &(&*pattern.text).into(), &detail);
    }
}

fn nested(schema: &Schema, skip_any_of: bool, path: &Path, violations: &mut Violations) {
    if let Some(checks) = &schema.checks {
        let skipped = SkippedPatterns { any_of: skip_any_of, first_all_of: false };
        nested_checks(checks, skipped, path, violations);
    }
    if let Some(item) = schema.item() {
        nested(item, false, &path.field("items"), violations);
    }
    for (name, property) in &schema.properties {
        nested(property, false, &path.field("properties").key(name), violations);
    }
    let rules = [
        (!schema.kind.is_empty(), "type", "must be empty to be structural"),
        (schema.additional.is_some(), "additionalProperties", "must be undefined to be structural"),
        (schema.default.is_some(), "default", "must be undefined to be structural"),
        (schema.marks.title, "title", "must be empty to be structural"),
        (schema.marks.description, "description", "must be empty to be structural"),
        (schema.nullable, "nullable", "must be false to be structural"),
        (schema.preserve_unknown, "x-kubernetes-preserve-unknown-fields", "must be false to be structural"),
        (schema.embedded, "x-kubernetes-embedded-resource", "must be false to be structural"),
        (schema.int_or_string, "x-kubernetes-int-or-string", "must be false to be structural"),
        (!schema.list_keys.is_empty(), "x-kubernetes-list-map-keys", "must be empty to be structural"),
        (schema.list_type.is_some(), "x-kubernetes-list-type", "must be undefined to be structural"),
        (schema.map_type.is_some(), "x-kubernetes-map-type", "must be undefined to be structural"),
        (!schema.rules.is_empty(), "x-kubernetes-validations", "must be empty to be structural"),
    ];
    for (wrong, field, detail) in rules {
        if wrong {
            violations.forbidden(&path.field(field), detail);
        }
    }
    if schema.properties.contains_key("metadata") {
        let detail = "must not be specified in a nested context";
        violations.forbidden(&path.field("properties").key("metadata"), detail);
    }
}

/// Checks that each field that a junctor mentions is part of the structure.
fn complete(checks: &Checks, schema: &Schema, place: &Path, mentioned: &Path, violations: &mut Violations) {
    let lists = [("allOf", &checks.all_of), ("anyOf", &checks.any_of), ("oneOf", &checks.one_of)];
    if let Some(not) = &checks.not {
        complete_nested(not, schema, place, &mentioned.field("not"), violations);
    }
    for (name, list) in lists {
        for (index, inner) in list.iter().enumerate() {
            complete_nested(inner, schema, place, &mentioned.field(name).index(index), violations);
        }
    }
}

fn complete_nested(
    inner: &Schema,
    schema: &Schema,
    place: &Path,
    mentioned: &Path,
    violations: &mut Violations,
) {
    if let Some(checks) = &inner.checks {
        complete(checks, schema, place, mentioned, violations);
    }
    let missing = |violations: &mut Violations, place: &Path, mentioned: &Path| {
        violations.required(place, &format!("because it is defined in {mentioned}"));
    };
    if let Some(item) = inner.item() {
        let (place, mentioned) = (place.field("items"), mentioned.field("items"));
        match schema.item() {
            Some(known) => complete_nested(item, known, &place, &mentioned, violations),
            None => missing(violations, &place, &mentioned),
        }
    }
    for (name, property) in &inner.properties {
        let (place, mentioned) =
            (place.field("properties").key(name), mentioned.field("properties").key(name));
        match schema.properties.get(name) {
            Some(known) => complete_nested(property, known, &place, &mentioned, violations),
            None => missing(violations, &place, &mentioned),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn found(schema: &Value) -> Vec<String> {
        let mut violations = Violations::default();
        validate(&Schema::parse(schema).unwrap(), &Path::root("s"), &mut violations);
        violations.as_slice().iter().map(|cause| format!("{}: {}", cause.field, cause.message)).collect()
    }

    #[test]
    fn a_schema_that_is_not_structural_is_refused() {
        let empty: [&str; 0] = [];
        assert_eq!(
            found(&json!({"type": "object", "properties": {"a": {"x-kubernetes-int-or-string": true,
            "anyOf": [{"type": "integer"}, {"type": "string"}]}}})),
            empty
        );
        assert_eq!(
            found(&json!({"type": "object", "properties": {"a": {}}})),
            ["s.properties[a].type: Required value: must not be empty for specified object fields"]
        );
        assert_eq!(
            found(&json!({"type": "object", "properties": {"l": {"type": "array"}}})),
            ["s.properties[l].items: Required value: must be specified"]
        );
        assert_eq!(
            found(&json!({"type": "object", "anyOf": [{"properties": {"a": {"minLength": 1}}}]})),
            ["s.properties[a]: Required value: because it is defined in s.anyOf[0].properties[a]"]
        );
        assert_eq!(
            found(&json!({"type": "object", "oneOf": [{"type": "object"}]})),
            ["s.oneOf[0].type: Forbidden: must be empty to be structural"]
        );
        assert_eq!(
            found(&json!({"type": "object", "properties": {"metadata": {"type": "object",
            "properties": {"name": {"type": "string", "maxLength": 5}}}}})),
            empty
        );
        assert_eq!(
            found(&json!({"type": "object", "properties": {"metadata": {"type": "object",
            "properties": {"labels": {"type": "object"}}}}}))
            .len(),
            1
        );
        assert!(
            found(&json!({"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}}))[0]
                .starts_with(
                    "s.properties[a].pattern: Invalid value: \"(\": must be a valid regular expression"
                )
        );
    }
}

//! Rules for each node of a definition's schema (`ValidateCustomResourceDefinitionOpenAPISchema`).

use serde_json::Value;

use crate::field_path;
use crate::prune::is_meta;
use crate::schema::{Additional, RuleText, Schema};
use crate::violation::{Path, Violations};

const TYPES: &[&str] = &["array", "boolean", "integer", "number", "object", "string"];

/// Restrictions on a node that come from its ancestors.
#[derive(Clone, Default)]
struct Context {
    /// Reason why defaults are forbidden.
    no_defaults: Option<String>,
    inside_meta: bool,
}

/// Checks all nodes of a schema.
pub(crate) fn validate(schema: &Schema, path: &Path, violations: &mut Violations) {
    node(schema, path, &Context::default(), true, violations);
}

fn node(schema: &Schema, path: &Path, context: &Context, root: bool, violations: &mut Violations) {
    standard(schema, path, context, violations);
    if schema.checks.as_ref().is_some_and(|checks| checks.unique_items) {
        let detail = "uniqueItems cannot be set to true since the runtime complexity becomes quadratic";
        violations.forbidden(&path.field("uniqueItems"), detail);
    }
    children(schema, path, context, root, violations);
    if schema.marks.preserve_unknown_false {
        let place = path.field("x-kubernetes-preserve-unknown-fields");
        violations.invalid(&place, &false.into(), "must be true or undefined");
    }
    collection_types(schema, path, violations);
    list_map(schema, path, violations);
    list_items(schema, path, violations);
    for (index, rule) in schema.rules.iter().enumerate() {
        rule_text(rule, schema, &path.field("x-kubernetes-validations").index(index), violations);
    }
}

fn standard(schema: &Schema, path: &Path, context: &Context, violations: &mut Violations) {
    let place = path.field("type");
    if !schema.kind.is_empty() && !TYPES.contains(&&*schema.kind) {
        let known: Vec<String> = TYPES.iter().map(|kind| (*kind).to_owned()).collect();
        violations.unsupported(&place, &(&*schema.kind).into(), &known);
    }
    if let (Some(_), Some(reason)) = (&schema.default, &context.no_defaults) {
        violations.forbidden(&path.field("default"), &format!("must not be set {reason}"));
    }
    for field in &schema.marks.unsupported {
        violations.forbidden(&path.field(field), &format!("{field} is not supported"));
    }
    if &*schema.kind == "null" {
        violations.forbidden(&place, "type cannot be set to null, use nullable as an alternative");
    }
    if schema.marks.items_is_list {
        violations.forbidden(&path.field("items"), "items must be a schema object and not an array");
    }
    if context.inside_meta && schema.embedded {
        let detail = "must not be used inside of resource meta";
        violations.forbidden(&path.field("x-kubernetes-embedded-resource"), detail);
    }
}

fn children(schema: &Schema, path: &Path, context: &Context, root: bool, violations: &mut Violations) {
    if let Some(additional) = &schema.additional {
        let place = path.field("additionalProperties");
        if !schema.properties.is_empty() && !matches!(additional, Additional::Allowed(true)) {
            violations.forbidden(&place, "additionalProperties and properties are mutual exclusive");
        }
        let mut inner = context.clone();
        if context.inside_meta {
            inner.no_defaults = Some("inside additionalProperties applying to object metadata".to_owned());
        }
        if let Additional::Schema(additional) = additional {
            node(additional, &place, &inner, false, violations);
        }
    }
    for (name, property) in &schema.properties {
        let mut inner = context.clone();
        if (root || schema.embedded) && is_meta(name) {
            inner.inside_meta = true;
            if root {
                inner.no_defaults = Some(format!("in top-level {name}"));
            }
        }
        node(property, &path.field("properties").key(name), &inner, false, violations);
    }
    if let Some(checks) = &schema.checks {
        if let Some(not) = &checks.not {
            node(not, &path.field("not"), context, false, violations);
        }
        for (name, list) in [("allOf", &checks.all_of), ("oneOf", &checks.one_of), ("anyOf", &checks.any_of)]
        {
            for (index, inner) in list.iter().enumerate() {
                node(inner, &path.field(name).index(index), context, false, violations);
            }
        }
    }
    if let Some(item) = schema.item() {
        node(item, &path.field("items"), context, false, violations);
    }
}

fn collection_types(schema: &Schema, path: &Path, violations: &mut Violations) {
    let map = Extension {
        field: "x-kubernetes-map-type",
        value: schema.map_type.as_deref(),
        kind: "object",
        known: &["atomic", "granular"],
    };
    let list = Extension {
        field: "x-kubernetes-list-type",
        value: schema.list_type.as_deref(),
        kind: "array",
        known: &["atomic", "set", "map"],
    };
    collection_type(schema, map, path, violations);
    collection_type(schema, list, path, violations);
    set_items(schema, path, violations);
}

/// An extension of a schema that only one type may have.
struct Extension<'a> {
    field: &'a str,
    value: Option<&'a str>,
    /// The type.
    kind: &'a str,
    /// The values that the extension may have.
    known: &'a [&'a str],
}

fn collection_type(schema: &Schema, extension: Extension<'_>, path: &Path, violations: &mut Violations) {
    let Extension { field, value, kind, known } = extension;
    if let Some(value) = value {
        let detail = format!("must be {kind} if {field} is specified");
        if schema.kind.is_empty() {
            violations.required(&path.field("type"), &detail);
        } else if &*schema.kind != kind {
            violations.invalid(&path.field("type"), &(&*schema.kind).into(), &detail);
        }
        if !known.contains(&value) {
            let known: Vec<String> = known.iter().map(|word| (*word).to_owned()).collect();
            violations.unsupported(&path.field(field), &value.into(), &known);
        }
    }
}

/// Checks that the elements of a set are atomic.
fn set_items(schema: &Schema, path: &Path, violations: &mut Violations) {
    if schema.list_type.as_deref() != Some("set") || &*schema.kind != "array" {
        return;
    }
    let Some(item) = schema.item() else { return };
    let value = item.list_type.as_deref().map_or(Value::Null, Value::from);
    let detail = "must be atomic as item of a list with x-kubernetes-list-type=set";
    let wrong = match &*item.kind {
        "array" if item.list_type.as_deref().is_some_and(|kind| kind != "atomic") => "x-kubernetes-list-type",
        "object" if item.map_type.as_deref() != Some("atomic") => "x-kubernetes-map-type",
        _ => return,
    };
    violations.invalid(&path.field("items").field(wrong), &value, detail);
}

fn list_map(schema: &Schema, path: &Path, violations: &mut Violations) {
    let is_map = schema.list_type.as_deref() == Some("map");
    if !schema.list_keys.is_empty() && !is_map {
        let place = path.field("x-kubernetes-list-type");
        let detail = "must be map if x-kubernetes-list-map-keys is non-empty";
        match &schema.list_type {
            None => violations.required(&place, detail),
            Some(kind) => violations.invalid(&place, &(&**kind).into(), detail),
        }
    }
    if !is_map {
        return;
    }
    let place = path.field("x-kubernetes-list-map-keys");
    if schema.list_keys.is_empty() {
        violations.required(&place, "must not be empty if x-kubernetes-list-type is map");
    }
    let Some(item) = schema.item() else {
        if !schema.marks.items_is_list {
            violations.required(&path.field("items"), "must have a schema if x-kubernetes-list-type is map");
        }
        return;
    };
    if &*item.kind != "object" {
        let detail = "must be object if parent array's x-kubernetes-list-type is map";
        violations.invalid(&path.field("items").field("type"), &(&*item.kind).into(), detail);
        return;
    }
    let keys = || Value::Array(schema.list_keys.iter().map(|key| Value::from(&**key)).collect());
    let mut seen = std::collections::HashSet::new();
    for key in &schema.list_keys {
        match item.properties.get(key) {
            Some(property) if matches!(&*property.kind, "array" | "object") => {
                let place = path.field("items").field("properties").key(key).field("type");
                let detail = "must be a scalar type if parent array's x-kubernetes-list-type is map";
                violations.invalid(&place, &(&*item.kind).into(), detail);
            }
            Some(_) => {}
            None => violations.invalid(&place, &keys(), "entries must all be names of item properties"),
        }
        if !seen.insert(key) {
            violations.invalid(&place, &keys(), "must not contain duplicate entries");
        }
    }
}

/// Checks that the elements of sets and maps are not nullable, and that keys of maps are required or have a default.
fn list_items(schema: &Schema, path: &Path, violations: &mut Violations) {
    let (Some(item), Some(kind @ ("set" | "map"))) = (schema.item(), schema.list_type.as_deref()) else {
        return;
    };
    let items = path.field("items");
    if item.nullable {
        let detail = format!("cannot be nullable when x-kubernetes-list-type is {kind}");
        violations.forbidden(&items.field("nullable"), &detail);
    }
    if kind != "map" {
        return;
    }
    let required = item.checks.as_ref().map_or(&[][..], |checks| &checks.required);
    for key in &schema.list_keys {
        let Some(property) = item.properties.get(key) else { continue };
        let place = items.field("properties").key(key);
        if !required.contains(key) && property.default.is_none() {
            let detail = "this property is in x-kubernetes-list-map-keys, so it must have a default or be a required \
                          property";
            violations.required(&place.field("default"), detail);
        }
        if property.nullable {
            let detail = "this property is in x-kubernetes-list-map-keys, so it cannot be nullable";
            violations.forbidden(&place.field("nullable"), detail);
        }
    }
}

fn rule_text(rule: &RuleText, schema: &Schema, path: &Path, violations: &mut Violations) {
    const REASONS: &[&str] =
        &["FieldValueDuplicate", "FieldValueForbidden", "FieldValueInvalid", "FieldValueRequired"];
    let blank = |text: &str| !text.is_empty() && text.trim().is_empty();
    let broken = |text: &str| text.trim().contains(['\n', '\r']);
    if rule.rule.trim().is_empty() {
        violations.required(&path.field("rule"), "rule is not specified");
    } else if blank(&rule.message) {
        let value = rule.message.clone().into();
        violations.invalid(&path.field("message"), &value, "must be non-empty if specified");
    } else if broken(&rule.message) {
        let value = rule.message.clone().into();
        violations.invalid(&path.field("message"), &value, "must not contain line breaks");
    } else if broken(&rule.rule) && rule.message.is_empty() {
        violations.required(&path.field("message"), "message must be specified if rule contains line breaks");
    }
    if blank(&rule.message_expression) {
        let detail = "messageExpression must be non-empty if specified";
        violations.required(&path.field("messageExpression"), detail);
    }
    if let Some(reason) = &rule.reason
        && !REASONS.contains(&reason.as_str())
    {
        let known: Vec<String> = REASONS.iter().map(|word| (*word).to_owned()).collect();
        violations.unsupported(&path.field("reason"), &reason.clone().into(), &known);
    }
    let place = path.field("fieldPath");
    let value = Value::from(rule.field_path.clone());
    if blank(&rule.field_path) {
        violations.invalid(&place, &value, "must be non-empty if specified");
    }
    if rule.field_path.contains(['\n', '\r']) {
        violations.invalid(&place, &value, "must not contain line breaks");
    }
    if !rule.field_path.is_empty() && field_path::resolve(&rule.field_path, schema, true).is_err() {
        violations.invalid(&place, &value, "must be a valid path");
    }
}

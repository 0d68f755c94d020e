//! OpenAPI definitions of custom resources (`controller/openapi/builder`).

use serde_json::{Map, Value, json};

use crate::definition::{Definition, Version};

const OBJECT_META: &str = "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta";
const CONVENTIONS: &str =
    "https://git.k8s.io/community/contributors/devel/sig-architecture/api-conventions.md";

/// Prefix of references in OpenAPI v2.
const V2: &str = "#/definitions/";
/// Prefix of references in OpenAPI v3.
const V3: &str = "#/components/schemas/";

/// The name of a kind's OpenAPI definition: `com.example.v1.Foo`.
pub fn name(definition: &Definition, version: &str, kind: &str) -> String {
    let reversed: Vec<&str> = definition.spec.group.split('.').rev().collect();
    format!("{}.{version}.{kind}", reversed.join("."))
}

/// The OpenAPI v3 schema of a version.
pub fn v3(definition: &Definition, version: &Version) -> Value {
    let mut schema = match version.schema() {
        Some(Value::Object(map)) => {
            let mut schema = map.clone();
            describe_resource(&mut schema, V3);
            for_each_below(&mut schema, &mut |node| {
                describe_embedded(node, V3);
                unfold(node);
            });
            schema
        }
        _ => plain_object(),
    };
    mark(&mut schema, definition, version, &definition.spec.names.kind);
    Value::Object(schema)
}

/// Writes `x-kubernetes-int-or-string` as `anyOf`, which clients that do not know the extension understand. Source:
/// `Unfold` of structural schemas.
fn unfold(schema: &mut Map<String, Value>) {
    let types = json!([{"type": "integer"}, {"type": "string"}]);
    let first = schema.get("allOf").and_then(|list| list.get(0)).and_then(|one| one.get("anyOf"));
    let is_unfolded = schema.get("anyOf") == Some(&types) || first == Some(&types);
    if schema.get("x-kubernetes-int-or-string") != Some(&Value::Bool(true)) || is_unfolded {
        return;
    }
    if !schema.contains_key("anyOf") {
        schema.insert("anyOf".to_owned(), types);
        return;
    }
    let all = schema.entry("allOf").or_insert_with(|| json!([]));
    if let Some(list) = all.as_array_mut() {
        list.insert(0, json!({"anyOf": types}));
    }
}

/// The OpenAPI v2 schema of a version. It has no junctors (`allOf`, `anyOf`, `oneOf`, `not`). It has no nested schemas
/// where values may be null or unknown.
pub fn v2(definition: &Definition, version: &Version) -> Value {
    let mut schema = match version.schema() {
        Some(Value::Object(map)) if !preserves(map) => {
            let mut schema = map.clone();
            simplify(&mut schema);
            describe_resource(&mut schema, V2);
            for_each_below(&mut schema, &mut |node| {
                if !preserves(node) {
                    describe_embedded(node, V2);
                }
            });
            schema
        }
        _ => plain_object(),
    };
    mark(&mut schema, definition, version, &definition.spec.names.kind);
    Value::Object(schema)
}

fn plain_object() -> Map<String, Value> {
    Map::from_iter([("type".to_owned(), "object".into())])
}

fn preserves(schema: &Map<String, Value>) -> bool {
    schema.get("x-kubernetes-preserve-unknown-fields") == Some(&Value::Bool(true))
}

fn mark(schema: &mut Map<String, Value>, definition: &Definition, version: &Version, kind: &str) {
    schema.insert(
        "x-kubernetes-group-version-kind".to_owned(),
        json!([{"group": definition.spec.group, "version": version.name, "kind": kind}]),
    );
    if !version.selectable_fields.is_empty() {
        let fields = version.selectable_fields.iter();
        let paths: Vec<Value> =
            fields.map(|field| json!({"fieldPath": field.json_path.trim_start_matches('.')})).collect();
        schema.insert("x-kubernetes-selectable-fields".to_owned(), paths.into());
    }
}

fn properties(schema: &mut Map<String, Value>) -> Option<&mut Map<String, Value>> {
    schema.entry("properties").or_insert_with(|| json!({})).as_object_mut()
}

fn describe_type(schema: &mut Map<String, Value>) {
    let Some(properties) = properties(schema) else { return };
    properties.insert(
        "apiVersion".to_owned(),
        json!({"type": "string", "description": format!(
            "APIVersion defines the versioned schema of this representation of an object. Servers should convert \
             recognized schemas to the latest internal value, and may reject unrecognized values. More info: \
             {CONVENTIONS}#resources")}),
    );
    properties.insert(
        "kind".to_owned(),
        json!({"type": "string", "description": format!(
            "Kind is a string value representing the REST resource this object represents. Servers may infer this \
             from the endpoint the client submits requests to. Cannot be updated. In CamelCase. More info: \
             {CONVENTIONS}#types-kinds")}),
    );
}

fn metadata(prefix: &str) -> Value {
    let description = format!("Standard object's metadata. More info: {CONVENTIONS}#metadata");
    described(&description, prefix, OBJECT_META)
}

/// A reference with a description. In OpenAPI v3 a reference has no siblings, so `allOf` wraps it, as `WrapRefs` does
/// upstream. Clients show the description instead of the description of the referenced definition.
fn described(description: &str, prefix: &str, name: &str) -> Value {
    let reference = format!("{prefix}{name}");
    if prefix == V3 {
        return json!({"description": description, "allOf": [{"$ref": reference}]});
    }
    json!({"description": description, "$ref": reference})
}

fn describe_resource(schema: &mut Map<String, Value>, prefix: &str) {
    describe_type(schema);
    if let Some(properties) = properties(schema) {
        properties.insert("metadata".to_owned(), metadata(prefix));
    }
}

fn describe_embedded(schema: &mut Map<String, Value>, prefix: &str) {
    if schema.get("x-kubernetes-embedded-resource") != Some(&Value::Bool(true)) {
        return;
    }
    if let Some(properties) = properties(schema) {
        properties.insert(
            "apiVersion".to_owned(),
            json!({"type": "string", "description": format!(
                "apiVersion defines the versioned schema of this representation of an object. More info: \
                 {CONVENTIONS}#resources")}),
        );
        properties.insert(
            "kind".to_owned(),
            json!({"type": "string", "description": format!(
                "kind is a string value representing the type of this object. In CamelCase. More info: \
                 {CONVENTIONS}#types-kinds")}),
        );
        properties.insert("metadata".to_owned(), metadata(prefix));
    }
    let required = schema.entry("required").or_insert_with(|| json!([]));
    if let Some(list) = required.as_array_mut() {
        for name in ["kind", "apiVersion"] {
            if !list.iter().any(|known| known == name) {
                list.push(name.into());
            }
        }
    }
}

/// Visits the nodes of the structure: properties, items and additional properties, from the root down.
fn for_each_below(schema: &mut Map<String, Value>, visit: &mut dyn FnMut(&mut Map<String, Value>)) {
    for name in ["items", "additionalProperties"] {
        if let Some(Value::Object(inner)) = schema.get_mut(name) {
            visit(inner);
            for_each_below(inner, visit);
        }
    }
    if let Some(Value::Object(properties)) = schema.get_mut("properties") {
        for inner in properties.values_mut().filter_map(Value::as_object_mut) {
            visit(inner);
            for_each_below(inner, visit);
        }
    }
}

/// Removes parts that OpenAPI v2 and its clients cannot express (`ToStructuralOpenAPIV2`).
fn simplify(schema: &mut Map<String, Value>) {
    for junctor in ["allOf", "anyOf", "oneOf", "not"] {
        schema.remove(junctor);
    }
    drop_nullable_required(schema);
    let untyped = schema.remove("nullable") == Some(Value::Bool(true));
    if untyped || preserves(schema) {
        schema.remove("items");
        schema.remove("properties");
    }
    let kind = schema.get("type").and_then(Value::as_str).unwrap_or_default();
    let drop_type = untyped
        || (kind == "array" && !schema.contains_key("items"))
        || (kind == "object" && preserves(schema));
    if drop_type {
        schema.remove("type");
    }
    for name in ["items", "additionalProperties"] {
        if let Some(Value::Object(inner)) = schema.get_mut(name) {
            simplify(inner);
        }
    }
    if let Some(Value::Object(properties)) = schema.get_mut("properties") {
        properties.values_mut().filter_map(Value::as_object_mut).for_each(simplify);
    }
}

/// A field that may be null must not be required: clients would refuse its null.
fn drop_nullable_required(schema: &mut Map<String, Value>) {
    let nullable = |value: &Value| value.get("nullable") == Some(&Value::Bool(true));
    if schema.get("additionalProperties").is_some_and(nullable) {
        schema.remove("required");
        return;
    }
    let Some(Value::Object(properties)) = schema.get("properties") else { return };
    let names: Vec<String> =
        properties.iter().filter(|(_, value)| nullable(value)).map(|(name, _)| name.clone()).collect();
    if names.is_empty() {
        return;
    }
    if let Some(Value::Array(required)) = schema.get_mut("required") {
        required.retain(|name| !names.iter().any(|nullable| name == nullable.as_str()));
        if required.is_empty() {
            schema.remove("required");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_published_in_both_forms() {
        let definition = Definition::parse(&json!({"spec": {"group": "example.com",
            "names": {"kind": "Foo", "listKind": "FooList", "plural": "foos"},
            "versions": [{"name": "v1", "schema": {"openAPIV3Schema": {"type": "object", "required": ["n"], "properties": {
                "n": {"type": "string", "nullable": true},
                "any": {"type": "object", "x-kubernetes-preserve-unknown-fields": true, "properties": {"a": {"type": "string"}}},
                "port": {"x-kubernetes-int-or-string": true},
                "odd": {"x-kubernetes-int-or-string": true, "anyOf": [{"minLength": 1}]},
                "one": {"type": "string", "oneOf": [{"pattern": "a"}]}}}}}]}}))
        .unwrap();
        let version = &definition.spec.versions[0];
        assert_eq!(name(&definition, "v1", "Foo"), "com.example.v1.Foo");
        let (new, old) = (v3(&definition, version), v2(&definition, version));
        let metadata = |schema: &Value| schema["properties"]["metadata"].clone();
        assert_eq!(metadata(&new)["allOf"][0]["$ref"], format!("#/components/schemas/{OBJECT_META}"));
        assert_eq!(metadata(&new)["$ref"], Value::Null);
        assert_eq!(metadata(&old)["$ref"], format!("#/definitions/{OBJECT_META}"));
        assert_eq!(new["properties"]["one"]["oneOf"], json!([{"pattern": "a"}]));
        let types = json!([{"type": "integer"}, {"type": "string"}]);
        assert_eq!(new["properties"]["port"]["anyOf"], types);
        assert_eq!(new["properties"]["odd"]["allOf"], json!([{"anyOf": types}]));
        assert_eq!(old["properties"]["port"].get("anyOf"), None);
        assert_eq!(old["properties"]["n"], json!({}));
        assert_eq!(old["properties"]["any"], json!({"x-kubernetes-preserve-unknown-fields": true}));
        assert_eq!(old["properties"]["one"], json!({"type": "string"}));
        assert_eq!(old.get("required"), None);
        assert_eq!(old["x-kubernetes-group-version-kind"][0]["kind"], "Foo");
    }
}

//! Converts the part of an OpenAPI v2 document to a v3 document, for servers that publish only v2.
//!
//! Source: `ConvertV2ToV3` of `k8s.io/kube-openapi/pkg/openapiconv`. The server is not trusted: the size of the result
//! is limited to a small multiple of the part.

use std::cell::Cell;

use coracle_values::CollectMap;
use serde_json::{Map, Value, json};

/// Fields of a path item that contain operations.
const METHODS: [&str; 7] = ["get", "put", "post", "delete", "options", "head", "patch"];
/// Fields of a parameter that belong to its schema in v3.
const SCHEMA_FIELDS: [&str; 10] = [
    "type",
    "format",
    "items",
    "uniqueItems",
    "default",
    "enum",
    "minimum",
    "maximum",
    "pattern",
    "minLength",
];
/// Maximum number of media types of a body.
const MAX_MEDIA_TYPES: usize = 8;
/// Maximum bytes of a media type. All responses of an operation share one list of media types.
const MAX_MEDIA_TYPE: usize = 128;
/// Maximum number of bodies of a document that are repeated for a further media type.
const MAX_REPEATS: usize = 20_000;
/// Maximum bytes of a schema that is repeated for several media types or for each use of a parameter. Kubernetes
/// servers use short references to definitions.
const MAX_REPEATED: usize = 256;

/// The v3 document of a part with the paths of one group version.
pub(super) fn document(part: &Value, group: &str, version: &str) -> Value {
    let repeats = Cell::new(MAX_REPEATS);
    let paths: Map<String, Value> = entries(&part["paths"])
        .map(|(path, item)| (path.clone(), path_item(item, part, &repeats)))
        .collect_map();
    let schemas: Map<String, Value> =
        entries(&part["definitions"]).map(|(name, one)| (name.clone(), schema(one))).collect_map();
    let shared = entries(&part["parameters"]).filter(|(_, one)| one["in"] != "body");
    let parameters: Map<String, Value> =
        shared.map(|(name, one)| (name.clone(), own_parameter(one))).collect_map();
    let own = || json!({"title": format!("{group}/{version}"), "version": version});
    let info = part.get("info").filter(|info| info["title"].is_string() && info["version"].is_string());
    json!({
        "openapi": "3.0.0",
        "info": info.cloned().unwrap_or_else(own),
        "paths": paths,
        "components": {"schemas": schemas, "parameters": parameters},
    })
}

fn entries(value: &Value) -> impl Iterator<Item = (&String, &Value)> {
    value.as_object().into_iter().flatten()
}

fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

fn path_item(item: &Value, part: &Value, repeats: &Cell<usize>) -> Value {
    let fields = entries(item).map(|(name, value)| {
        let value = match name.as_str() {
            method if METHODS.contains(&method) => operation(value, part, repeats),
            "parameters" => list(value).filter_map(|one| parameter(one, part)).collect(),
            _ => value.clone(),
        };
        (name.clone(), value)
    });
    Value::Object(fields.collect_map())
}

fn operation(operation: &Value, part: &Value, repeats: &Cell<usize>) -> Value {
    let dropped = ["consumes", "produces", "schemes", "security", "parameters", "responses"];
    let kept = entries(operation).filter(|(name, _)| !dropped.contains(&name.as_str()));
    let mut new: Map<String, Value> = kept.map(|(name, value)| (name.clone(), value.clone())).collect_map();
    let parameters = || list(&operation["parameters"]);
    let mut found = parameters().filter_map(|one| Some((one, resolved(one, part)?)));
    let body = found.find(|(_, found)| found["in"] == "body");
    if let Some((one, body)) = body {
        let is_shared = one.get("$ref").is_some();
        let content = match is_shared && !is_short(&body["schema"]) {
            true => json!({}),
            false => content(&operation["consumes"], &body["schema"], repeats),
        };
        new.insert("requestBody".to_owned(), json!({"content": content}));
    }
    let others: Vec<Value> = parameters().filter_map(|one| parameter(one, part)).collect();
    if !others.is_empty() {
        new.insert("parameters".to_owned(), others.into());
    }
    let responses = entries(&operation["responses"]).map(|(code, response)| {
        let mut new = json!({"description": response["description"].as_str().unwrap_or_default()});
        if response["schema"].is_object() {
            new["content"] = content(&operation["produces"], &response["schema"], repeats);
        }
        (code.clone(), new)
    });
    new.insert("responses".to_owned(), Value::Object(responses.collect_map()));
    Value::Object(new)
}

/// A body for each of its media types. `repeats` is the number of bodies that may still be repeated.
fn content(types: &Value, body: &Value, repeats: &Cell<usize>) -> Value {
    let most = if is_short(body) { MAX_MEDIA_TYPES } else { 1 };
    let body = json!({"schema": schema(body)});
    let types = list(types).take(MAX_MEDIA_TYPES).filter_map(Value::as_str);
    let mut content = Map::new();
    for media in types.filter(|media| media.len() <= MAX_MEDIA_TYPE).take(most) {
        if !content.is_empty() {
            let Some(left) = repeats.get().checked_sub(1) else { break };
            repeats.set(left);
        }
        content.insert(media.to_owned(), body.clone());
    }
    Value::Object(content)
}

fn is_short(value: &Value) -> bool {
    left_of(MAX_REPEATED, value).is_some()
}

/// The approximate number of bytes that remain of `limit` after `value`. `None` if the value is larger than the limit.
/// Reads at most `limit` bytes of the value.
fn left_of(limit: usize, value: &Value) -> Option<usize> {
    let limit = limit.checked_sub(2)?;
    match value {
        Value::String(text) => limit.checked_sub(text.len()),
        Value::Array(list) => list.iter().try_fold(limit, left_of),
        Value::Object(map) => {
            map.iter().try_fold(limit, |left, (name, value)| left_of(left.checked_sub(name.len())?, value))
        }
        // A number has at most 24 bytes; 2 are subtracted above.
        Value::Number(_) => limit.checked_sub(22),
        Value::Null | Value::Bool(_) => Some(limit),
    }
}

/// The parameter, or the shared parameter that it refers to.
fn resolved<'a>(parameter: &'a Value, part: &'a Value) -> Option<&'a Value> {
    let Some(reference) = parameter["$ref"].as_str() else { return Some(parameter) };
    part["parameters"].get(reference.strip_prefix("#/parameters/")?)
}

/// A parameter, or a reference to a parameter. `None` for a body.
fn parameter(parameter: &Value, part: &Value) -> Option<Value> {
    let found = resolved(parameter, part).filter(|found| found["in"] != "body")?;
    match parameter["$ref"].as_str() {
        Some(reference) => Some(json!({"$ref": format!("#/components{}", reference.strip_prefix('#')?)})),
        None => Some(own_parameter(found)),
    }
}

/// Converts a parameter that is not a reference.
fn own_parameter(parameter: &Value) -> Value {
    let is_of_schema = |name: &str| SCHEMA_FIELDS.contains(&name);
    let kept = entries(parameter).filter(|(name, _)| !is_of_schema(name) && *name != "collectionFormat");
    let mut new: Map<String, Value> = kept.map(|(name, value)| (name.clone(), value.clone())).collect_map();
    let simple = entries(parameter).filter(|(name, _)| is_of_schema(name));
    let simple = Value::Object(simple.map(|(name, value)| (name.clone(), value.clone())).collect_map());
    let own = parameter.get("schema").filter(|own| own.is_object());
    new.insert("schema".to_owned(), schema(own.unwrap_or(&simple)));
    Value::Object(new)
}

/// Converts the references of a schema. A reference with sibling fields is wrapped in `allOf`, because v3 ignores
/// siblings.
fn schema(value: &Value) -> Value {
    match value {
        Value::Array(list) => list.iter().map(schema).collect(),
        Value::Object(map) => {
            let mut new: Map<String, Value> =
                map.iter().map(|(name, value)| (name.clone(), schema(value))).collect_map();
            let name =
                map.get("$ref").and_then(Value::as_str).and_then(|text| text.strip_prefix("#/definitions/"));
            if let Some(name) = name {
                let reference = json!({"$ref": format!("#/components/schemas/{name}")});
                if new.len() == 1 {
                    return reference;
                }
                new.remove("$ref");
                new.insert("allOf".to_owned(), json!([reference]));
            }
            Value::Object(new)
        }
        other => other.clone(),
    }
}

/// Fuzz target: a part in JSON.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn fuzz(data: &[u8]) {
    let Ok(part) = serde_json::from_slice::<Value>(data) else { return };
    let converted = document(&part, "far.io", "v1").to_string();
    // The worst case: short references to a shared body of control characters, which is repeated for eight media types.
    assert!(converted.len() <= 400 * (data.len() + 100), "{} bytes of {}", converted.len(), data.len());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bodies_parameters_and_references_get_their_places_in_v3() {
        let part = json!({
            "paths": {"/apis/far.io/v1/things": {
                "parameters": [{"$ref": "#/parameters/pretty"}, {"in": "query", "name": "n", "type": "integer"}],
                "post": {
                    "operationId": "create", "consumes": ["a/json", "a/yaml"], "produces": ["a/json"], "schemes": ["https"],
                    "parameters": [{"$ref": "#/parameters/thing"}, {"$ref": "#/parameters/none"}],
                    "responses": {"200": {"description": "OK", "schema": {"$ref": "#/definitions/Thing"}}, "401": {}},
                    "x-kubernetes-action": "post",
                },
            }},
            "parameters": {
                "pretty": {"in": "query", "name": "pretty", "type": "string", "uniqueItems": true},
                "thing": {"in": "body", "name": "body", "schema": {"$ref": "#/definitions/Thing"}},
            },
            "definitions": {"Thing": {"type": "object", "properties": {
                "spec": {"$ref": "#/definitions/Spec", "default": {}}, "items": {"items": {"$ref": "#/definitions/Spec"}}}}},
        });
        let new = document(&part, "far.io", "v1");
        let item = &new["paths"]["/apis/far.io/v1/things"];
        assert_eq!(
            item["parameters"],
            json!([
                {"$ref": "#/components/parameters/pretty"},
                {"in": "query", "name": "n", "schema": {"type": "integer"}},
            ])
        );
        let thing = json!({"schema": {"$ref": "#/components/schemas/Thing"}});
        assert_eq!(
            item["post"],
            json!({
                "operationId": "create", "x-kubernetes-action": "post",
                "requestBody": {"content": {"a/json": thing, "a/yaml": thing}},
                "responses": {"200": {"description": "OK", "content": {"a/json": thing}}, "401": {"description": ""}},
            })
        );
        assert_eq!(
            new["components"]["schemas"]["Thing"]["properties"],
            json!({
                "spec": {"allOf": [{"$ref": "#/components/schemas/Spec"}], "default": {}},
                "items": {"items": {"$ref": "#/components/schemas/Spec"}},
            })
        );
        let pretty =
            json!({"in": "query", "name": "pretty", "schema": {"type": "string", "uniqueItems": true}});
        assert_eq!(new["components"]["parameters"], json!({"pretty": pretty}));
        assert_eq!((&new["openapi"], &new["info"]["title"]), (&json!("3.0.0"), &json!("far.io/v1")));
        let info = json!({"title": "Things", "version": "2.1"});
        assert_eq!(document(&json!({"info": info}), "far.io", "v1")["info"], info);
    }

    #[test]
    fn the_size_of_a_value_is_about_that_of_its_text() {
        for (value, bytes) in
            [(json!({"a": "bcd", "e": [1.5, null]}), 37), (json!("text"), 6), (json!([]), 2)]
        {
            assert_eq!(left_of(1000, &value), Some(1000 - bytes), "{value}");
        }
        assert_eq!(left_of(100, &json!(["x".repeat(97)])), None);
        assert_eq!(left_of(100, &json!({"x".repeat(97): 1})), None);
        assert_eq!(left_of(100, &json!(vec![1; 5])), None);
    }

    #[test]
    fn a_hostile_document_is_not_multiplied() {
        let large = json!({"description": "x".repeat(100_000)});
        let types: Vec<String> = (0..10_000).map(|number| format!("a/{number}")).collect();
        let uses: Vec<Value> = (0..10_000).map(|_| json!({"$ref": "#/parameters/large"})).collect();
        let part = json!({
            "paths": {"/a": {"post": {"consumes": types, "produces": types, "responses": {"200": {"schema": large}},
                "parameters": [{"in": "body", "schema": large}]}, "parameters": uses}},
            "parameters": {"large": {"in": "query", "name": "l", "description": large["description"]}},
        });
        let new = document(&part, "far.io", "v1").to_string();
        assert!(new.len() < 2 * part.to_string().len(), "{}", new.len());
        let of = |types: Vec<String>| {
            let responses = (0..10_000).map(|code| (code.to_string(), json!({"schema": {}})));
            let get = json!({"produces": types, "responses": responses.collect::<Map<_, _>>()});
            let part = json!({"paths": {"/a": {"get": get}}});
            (part.to_string().len(), document(&part, "far.io", "v1").to_string())
        };
        let (size, new) = of((0..8).map(|number| format!("a/{number}{}", "x".repeat(1000))).collect());
        assert!(new.len() < 4 * size, "{}", new.len());
        let (_, new) = of((0..8).map(|number| format!("a/{number}")).collect());
        assert_eq!(new.matches("schema\"").count(), 10_000 + MAX_REPEATS);
        for nonsense in
            [json!(null), json!({"paths": 1, "definitions": []}), json!({"paths": {"/a": {"get": 1}}})]
        {
            assert!(document(&nonsense, "g", "v")["paths"].is_object());
        }
    }
}

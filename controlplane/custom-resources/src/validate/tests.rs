use serde_json::json;

use super::*;

fn definition() -> Value {
    json!({"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": "foos.example.com"},
        "spec": {"group": "example.com", "scope": "Namespaced", "conversion": {"strategy": "None"},
            "names": {"plural": "foos", "singular": "foo", "kind": "Foo", "listKind": "FooList"},
            "versions": [{"name": "v1", "served": true, "storage": true,
                "schema": {"openAPIV3Schema": {"type": "object", "properties": {"spec": {"type": "object",
                    "properties": {"a": {"type": "string"}}}}}}}]},
        "status": {"storedVersions": ["v1"]}})
}

fn found(object: &Value) -> Vec<String> {
    let mut violations = Violations::default();
    create(object, &mut violations);
    violations.as_slice().iter().map(|cause| format!("{}: {}", cause.field, cause.message)).collect()
}

fn with(pointer: &str, value: Value) -> Value {
    let mut object = definition();
    let (parent, name) = pointer.rsplit_once('/').unwrap();
    object.pointer_mut(parent).unwrap()[name] = value;
    object
}

#[test]
fn a_good_definition_is_accepted() {
    assert_eq!(found(&definition()), [""; 0]);
}

#[test]
fn messages_equal_upstreams_messages() {
    let schema = "/spec/versions/0/schema/openAPIV3Schema/properties/spec";
    for (object, expected) in [
        (
            with("/metadata/name", json!("bars.example.com")),
            "metadata.name: Invalid value: \"bars.example.com\": must be spec.names.plural+\".\"+spec.group",
        ),
        (with("/spec/versions/0/storage", json!(false)), "spec.versions: Invalid value: "),
        (
            with("/spec/scope", json!("World")),
            "spec.scope: Unsupported value: \"World\": supported values: \"Cluster\", \"Namespaced\"",
        ),
        (
            with(schema, json!({})),
            "spec.validation.openAPIV3Schema.properties[spec].type: Required value: must not be empty for specified object fields",
        ),
        (
            with(schema, json!({"type": "string", "default": 1})),
            "spec.validation.openAPIV3Schema.properties[spec].default: Invalid value: \"integer\":  in body must be of type string: \"integer\"",
        ),
        (
            with(schema, json!({"type": "string", "$ref": "#/x"})),
            "spec.validation.openAPIV3Schema.properties[spec].$ref: Forbidden: $ref is not supported",
        ),
        (
            with(
                "/spec/versions/0/additionalPrinterColumns",
                json!([{"name": "A", "type": "text", "jsonPath": ".a"}]),
            ),
            "spec.additionalPrinterColumns[0].type: Invalid value: \"text\": must be one of boolean,date,integer,number,string",
        ),
        (
            with("/spec/versions/0/selectableFields", json!([{"jsonPath": ".spec.b"}])),
            "spec.selectableFields[0].jsonPath: Invalid value: \".spec.b\": is an invalid path: does not refer to a valid field",
        ),
        (
            with("/spec/versions/0/schema", Value::Null),
            "spec.versions[0].schema.openAPIV3Schema: Required value",
        ),
        (
            with("/spec/versions/0/name", json!("A b")),
            "spec.version: Invalid value: \"A b\": a DNS-1035 label must consist of",
        ),
        (
            with("/status/storedVersions", json!(["v0", "v1"])),
            "status.storedVersions[0]: Invalid value: \"v0\": missing from spec.versions;",
        ),
        (
            with("/spec/conversion", json!({"strategy": "Webhook"})),
            "spec.conversion.webhookClientConfig: Required value: required when strategy is set to Webhook",
        ),
    ] {
        let found = found(&object);
        assert!(found.first().is_some_and(|first| first.starts_with(expected)), "{found:?}\n{expected}");
    }
}

#[test]
fn selectable_fields_need_a_schema() {
    let mut object = with("/spec/versions/0/selectableFields", json!([{"jsonPath": ".spec.a"}]));
    object["spec"]["versions"][0]["schema"] = Value::Null;
    let message =
        "spec.selectableFields: Invalid value: \"\": may only be set when validations.schema is included";
    let found = found(&object);
    assert!(found.iter().any(|text| text == message), "{found:?}");
}

#[test]
fn the_root_of_a_schema_with_a_status_is_an_object_or_has_no_type() {
    let with_type = |kind: Value| {
        let mut object = with("/spec/versions/0/subresources", json!({"status": {}}));
        object["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["type"] = kind;
        let place = "spec.validation.openAPIV3Schema.type: Invalid value";
        found(&object).iter().filter(|text| text.starts_with(place) && text.contains("subresource")).count()
    };
    assert_eq!((with_type(json!("object")), with_type(json!("array"))), (0, 1));
    assert_eq!((with_type(json!("")), with_type(Value::Null)), (0, 0));
}

#[test]
fn names_and_scope_of_an_established_definition_are_immutable() {
    let mut old = definition();
    old["status"]["conditions"] = json!([{"type": "Established", "status": "True"}]);
    let mut new = old.clone();
    new["spec"]["scope"] = json!("Cluster");
    new["spec"]["names"]["kind"] = json!("Other");
    let mut violations = Violations::default();
    update(&new, &old, &mut violations);
    let fields: Vec<&str> = violations.as_slice().iter().map(|cause| cause.field.as_str()).collect();
    assert_eq!(fields, ["spec.scope", "spec.names.kind"]);
}

#[test]
fn a_rule_with_an_unknown_field_is_refused() {
    let schema = "/spec/versions/0/schema/openAPIV3Schema/properties/spec";
    let rule = |rule: &str| {
        with(
            schema,
            json!({"type": "object", "properties": {"a": {"type": "string"}},
            "x-kubernetes-validations": [{"rule": rule}]}),
        )
    };
    assert_eq!(found(&rule("self.a.size() > 1")), [""; 0]);
    let place =
        "spec.validation.openAPIV3Schema.properties[spec].x-kubernetes-validations[0].rule: Invalid value";
    for (bad, message) in [
        ("self.b == 'x'", "undefined field 'b'"),
        ("self.a", "must evaluate to a bool"),
        ("self.a ==", "Syntax error"),
    ] {
        let found = found(&rule(bad));
        assert!(found[0].starts_with(place) && found[0].contains(message), "{found:?}");
    }
}

/// The violations of a definition whose specification has this schema.
fn found_in(schema: Value) -> Vec<String> {
    found(&with("/spec/versions/0/schema/openAPIV3Schema/properties/spec", schema))
}

#[test]
fn a_rule_with_an_estimated_cost_above_the_limit_is_refused() {
    let rule = json!([{"rule": "self.all(s, s == 'string constant')"}]);
    let list = json!({"type": "array", "items": {"type": "string"}, "x-kubernetes-validations": rule});
    let schema = json!({"type": "object", "properties": {"x": {"type": "array", "items": list}}});
    let root = "spec.validation.openAPIV3Schema";
    let place = format!("{root}.properties[spec].properties[x].items.x-kubernetes-validations[0].rule");
    let hint = "(try simplifying the rule, or adding maxItems, maxProperties, and maxLength where arrays, maps, and \
                strings are declared)";
    let total = "x-kubernetes-validations estimated rule cost total for entire OpenAPIv3 schema";
    assert_eq!(
        found_in(schema),
        [
            format!(
                "{place}: Forbidden: estimated rule cost exceeds budget by factor of more than 100x {hint}"
            ),
            format!(
                "{place}: Forbidden: contributed to estimated rule cost total exceeding cost limit for entire \
                 OpenAPIv3 schema"
            ),
            format!("{root}: Forbidden: {total} exceeds budget by factor of more than 100x {hint}"),
        ]
    );
}

#[test]
fn the_estimated_cost_grows_with_the_number_of_values() {
    let schema = |max: Option<i64>| {
        // The rule costs six units for each of 100 elements, and two more.
        let mut list = json!({"type": "array", "items": {"type": "string"}, "maxItems": 100,
            "x-kubernetes-validations": [{"rule": "self.all(s, s == 'string constant')"}]});
        list["items"]["maxLength"] = 100.into();
        let mut lists = json!({"type": "array", "items": list});
        if let Some(max) = max {
            lists["maxItems"] = max.into();
        }
        json!({"type": "object", "properties": {"x": lists}})
    };
    let factor = |max: Option<i64>| {
        let found = found_in(schema(max));
        let factor = found.first().map(|text| text.split_once("factor of ").unwrap().1.to_owned());
        factor.map(|text| text.split(' ').next().unwrap().to_owned())
    };
    assert_eq!(factor(Some(16_611)), None);
    assert_eq!(factor(Some(16_612)).as_deref(), Some("1.000042x"));
    // Without a maximum, an object of 3 MiB can have lists of three bytes each.
    assert_eq!(factor(None).as_deref(), Some("63.1x"));
}

#[test]
fn rules_with_an_acceptable_estimated_cost_are_accepted() {
    let list = |max: i64| json!({"type": "array", "maxItems": max, "items": {"type": "integer"}});
    let sums = "self.firstArray.isSorted() && self.secondArray.isSorted() && \
                ((self.firstArray.sum() + self.secondArray.sum()) % 2 == 0)";
    let schema = json!({"type": "object",
        "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}, "firstArray": list(1000),
            "secondArray": list(1000), "largeArray": list(725)},
        "x-kubernetes-validations": [{"rule": "self.x + self.y > 0"}, {"rule": sums},
            {"rule": "self.largeArray.all(x, self.largeArray.all(y, y == x))"}]});
    assert_eq!(found_in(schema), [""; 0]);
}

#[test]
fn an_expensive_message_of_a_cheap_rule_is_refused() {
    let rule =
        json!({"rule": "self.size() < 3", "messageExpression": "self.map(x, x).join('').replace('a', 'b')"});
    let schema = json!({"type": "array", "items": {"type": "string"}, "x-kubernetes-validations": [rule]});
    let found = found_in(schema);
    let place =
        "spec.validation.openAPIV3Schema.properties[spec].x-kubernetes-validations[0].messageExpression";
    let expected =
        format!("{place}: Forbidden: estimated messageExpression cost exceeds budget by factor of");
    assert!(found[0].starts_with(&expected), "{found:?}");
}

#[test]
fn an_expensive_rule_of_an_unchanged_schema_is_accepted() {
    let schema = json!({"type": "array", "items": {"type": "string"},
        "x-kubernetes-validations": [{"rule": "self.all(x, self.all(y, x == y))"}]});
    let old = with("/spec/versions/0/schema/openAPIV3Schema/properties/spec", schema);
    let mut new = old.clone();
    new["spec"]["names"]["shortNames"] = json!(["f"]);
    let mut violations = Violations::default();
    update(&new, &old, &mut violations);
    assert!(violations.is_empty(), "{violations:?}");
    new["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["a"] = json!({"type": "string"});
    update(&new, &old, &mut violations);
    assert!(!violations.is_empty());
}

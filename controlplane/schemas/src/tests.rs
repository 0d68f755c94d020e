//! Cases for decoding.

use serde_json::json;

use super::*;

const POD: &str = "io.k8s.api.core.v1.Pod";
const DEPLOYMENT: &str = "io.k8s.api.apps.v1.Deployment";

fn check(schema: &str, input: &str, validation: FieldValidation, expect: &str) {
    let result = parse_json(input.as_bytes()).and_then(|parsed| decode(schema, parsed, validation));
    let actual = match result {
        Ok((value, warnings)) if warnings.is_empty() => value.to_string(),
        Ok((value, warnings)) => format!("{value} {}", warnings.join("; ")),
        Err(error) => error.to_string(),
    };
    assert_eq!(actual, expect, "for {input}");
}

#[test]
fn wrong_types_name_the_field_as_go_does() {
    let head = r#"Deployment in version "v1" cannot be handled as a Deployment: json: cannot unmarshal "#;
    let cases = [
        (
            r#""spec":{"replicas":"3"}"#,
            "string into Go struct field DeploymentSpec.spec.replicas of type int32",
        ),
        (
            r#""spec":{"replicas":99999999999}"#,
            "number 99999999999 into Go struct field DeploymentSpec.spec.replicas of type int32",
        ),
        (
            r#""spec":{"template":{"spec":{"containers":[{"name":1}]}}}"#,
            "number into Go struct field Container.spec.template.spec.containers.name of type string",
        ),
        (
            r#""spec":{"template":{"spec":{"containers":{}}}}"#,
            "object into Go struct field PodSpec.spec.template.spec.containers of type []v1.Container",
        ),
        (
            r#""metadata":{"labels":{"a":1}}"#,
            "number into Go struct field ObjectMeta.metadata.labels of type string",
        ),
        (r#""spec":"x""#, "string into Go struct field Deployment.spec of type v1.DeploymentSpec"),
        (
            r#""spec":{"strategy":{"type":7}}"#,
            "number into Go struct field DeploymentStrategy.spec.strategy.type of type v1.DeploymentStrategyType",
        ),
        (
            r#""spec":{"strategy":{"rollingUpdate":{"maxSurge":2147483648}}}"#,
            "number 2147483648 into Go struct field RollingUpdateDeployment.spec.strategy.rollingUpdate.maxSurge of type int32",
        ),
        (
            r#""spec":{"template":{"spec":{"volumes":[{"configMap":{"items":[{"key":7}]}}]}}}"#,
            "number into Go struct field KeyToPath.spec.template.spec.volumes.VolumeSource.configMap.items.key of type string",
        ),
        (
            r#""spec":{"template":{"spec":{"containers":[{"resources":{"limits":"x"}}]}}}"#,
            "string into Go struct field ResourceRequirements.spec.template.spec.containers.resources.limits of type v1.ResourceList",
        ),
        (
            r#""spec":{"template":{"spec":{"containers":[{"securityContext":{"capabilities":{"add":[7]}}}]}}}"#,
            "number into Go struct field Capabilities.spec.template.spec.containers.securityContext.capabilities.add of type v1.Capability",
        ),
    ];
    for (fields, expect) in cases {
        let input = format!(r#"{{"apiVersion":"apps/v1","kind":"Deployment",{fields}}}"#);
        check(DEPLOYMENT, &input, FieldValidation::Ignore, &format!("{head}{expect}"));
    }
}

#[test]
fn items_that_are_no_schema_are_ignored_as_in_go() {
    const SCHEMA: &str = "io.k8s.apiextensions-apiserver.pkg.apis.apiextensions.v1.JSONSchemaProps";
    let read = |input: &str| {
        decode(SCHEMA, parse_json(input.as_bytes()).unwrap(), FieldValidation::Strict).unwrap().0
    };
    let without = read(r#"{"type":"array"}"#);
    for items in ["\"x\"", "7", "true"] {
        assert_eq!(read(&format!(r#"{{"type":"array","items":{items}}}"#)), without, "{items}");
    }
    assert!(read(r#"{"type":"array","items":{"type":"string"}}"#)["items"].is_object());
}

#[test]
fn an_error_about_a_list_of_any_values_names_the_type_of_schemas() {
    const SCHEMA: &str = "io.k8s.apiextensions-apiserver.pkg.apis.apiextensions.v1.JSONSchemaProps";
    let parsed = parse_json(br#"{"enum":"x"}"#).unwrap();
    let error = decode(SCHEMA, parsed, FieldValidation::Ignore).unwrap_err().to_string();
    assert!(error.ends_with("of type []v1.JSON"), "{error}");
}

#[test]
fn unknown_and_duplicate_fields_follow_field_validation() {
    let input = r#"{"apiVersion":"v1","kind":"Pod","spec":{"foo":1,"nodeName":"a","nodeName":"b","containers":[{"name":"c","bar":2}]}}"#;
    let pruned = r#"{"apiVersion":"v1","kind":"Pod","metadata":{},"spec":{"containers":[{"name":"c","resources":{}}],"nodeName":"b"},"status":{}}"#;
    check(POD, input, FieldValidation::Ignore, pruned);
    let notes = [
        r#"unknown field "spec.foo""#,
        r#"duplicate field "spec.nodeName""#,
        r#"unknown field "spec.containers[0].bar""#,
    ];
    check(POD, input, FieldValidation::Warn, &format!("{pruned} {}", notes.join("; ")));
    check(
        POD,
        input,
        FieldValidation::Strict,
        &format!(
            r#"Pod in version "v1" cannot be handled as a Pod: strict decoding error: {}"#,
            notes.join(", ")
        ),
    );
}

#[test]
fn values_become_canonical() {
    let whole =
        |metadata: &str, spec: &str| format!(r#"{{"metadata":{metadata},"spec":{spec},"status":{{}}}}"#);
    let cases = [
        (r#"{"metadata":{"creationTimestamp":null,"labels":{},"annotations":null}}"#, whole("{}", "{}")),
        (
            r#"{"metadata":{"creationTimestamp":"2024-01-02T05:04:05.7+02:00"}}"#,
            whole(r#"{"creationTimestamp":"2024-01-02T03:04:05Z"}"#, "{}"),
        ),
        (
            r#"{"spec":{"containers":[],"overhead":{"cpu":0.5,"memory":"1024Mi"}}}"#,
            whole("{}", r#"{"containers":[],"overhead":{"cpu":"500m","memory":"1Gi"}}"#),
        ),
        (
            r#"{"spec":{"volumes":[{"name":"a","emptyDir":{"medium":""}}],"containers":[]}}"#,
            whole("{}", r#"{"containers":[],"volumes":[{"emptyDir":{},"name":"a"}]}"#),
        ),
    ];
    for (input, expect) in cases {
        check(POD, input, FieldValidation::Strict, &expect);
    }
}

#[test]
fn bad_texts_are_refused() {
    let head = r#"Pod in version "v1" cannot be handled as a Pod: "#;
    let cases = [
        (
            r#""spec":{"overhead":{"cpu":"x"}}"#,
            "quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'",
        ),
        (
            r#""metadata":{"creationTimestamp":"yesterday"}"#,
            r#"parsing time "yesterday" as "2006-01-02T15:04:05Z07:00": cannot parse "yesterday" as "2006""#,
        ),
    ];
    for (fields, expect) in cases {
        let input = format!(r#"{{"apiVersion":"v1","kind":"Pod",{fields}}}"#);
        check(POD, &input, FieldValidation::Ignore, &format!("{head}{expect}"));
    }
}

#[test]
fn go_omits_zeros_that_are_not_pointers_and_writes_some_absent_fields() {
    let cases = [
        (
            DEPLOYMENT,
            json!({"spec": {"replicas": 0, "minReadySeconds": 0, "paused": false}}),
            json!({
            "metadata": {}, "status": {}, "spec": {"replicas": 0, "strategy": {}, "template": {
                "metadata": {}, "spec": {}}}}),
        ),
        ("io.k8s.api.rbac.v1.ClusterRole", json!({}), json!({"metadata": {}})),
        (
            "io.k8s.api.core.v1.Service",
            json!({"spec": {"ports": [{"name": "", "nodePort": 0}]}}),
            json!({
            "metadata": {}, "spec": {"ports": [{"port": 0, "targetPort": 0}]}, "status": {"loadBalancer": {}}}),
        ),
    ];
    for (schema, object, expect) in cases {
        let mut value = object;
        canonical(schema, &mut value);
        assert_eq!(value, expect);
        canonical(schema, &mut value);
        assert_eq!(value, expect, "making it canonical twice changes nothing");
    }
}

#[test]
fn fields_that_the_definition_does_not_have_are_removed_from_stored_objects() {
    let mut known = json!({"metadata": {"name": "p", "initializers": {"pending": [{"name": "i"}]},
        "managedFields": [{"fieldsV1": {"f:spec": {"f:later": {}}}, "manager": "m"}]},
        "spec": {"containers": [{"name": "c", "image": "x"}]}});
    canonical(POD, &mut known);
    assert!(!canonical_stored(POD, &mut known.clone()));
    let mut stored = known.clone();
    stored["spec"]["later"] = json!({"a": 1});
    stored["spec"]["containers"][0]["later"] = 1.into();
    assert!(canonical_stored(POD, &mut stored));
    assert_eq!(stored, known);
    let mut kept = json!({"spec": {"later": 1}});
    canonical(POD, &mut kept);
    assert_eq!(kept["spec"]["later"], 1);
}

#[test]
fn a_null_in_a_map_is_the_zero_value_of_its_type() {
    let text = r#"{"apiVersion":"policy/v1","kind":"PodDisruptionBudget","metadata":{"labels":{"a":null}},
        "status":{"disruptedPods":{"p":null}}}"#;
    let parsed = parse_json(text.as_bytes()).unwrap();
    let definition = "io.k8s.api.policy.v1.PodDisruptionBudget";
    let (object, _) = decode(definition, parsed, FieldValidation::Strict).unwrap();
    assert_eq!(object["metadata"]["labels"], json!({"a": ""}));
    assert_eq!(object["status"]["disruptedPods"], json!({"p": null}));
}

#[test]
fn a_configuration_keeps_its_zeros() {
    let parsed = parse_json(br#"{"spec":{"minReadySeconds":0,"selector":null}}"#).unwrap();
    let (config, _) = decode_config(DEPLOYMENT, parsed, FieldValidation::Strict).unwrap();
    assert_eq!(config, json!({"spec": {"minReadySeconds": 0}}));
}

#[test]
fn wrong_base64_is_reported_at_the_byte_that_go_names() {
    for (text, at) in [("1", 0), ("a.b", 1), ("*", 0), ("YWJjYQ", 4)] {
        let input = format!(r#"{{"apiVersion":"v1","kind":"Secret","data":{{"a":"{text}"}}}}"#);
        let expect = format!(
            "Secret in version \"v1\" cannot be handled as a Secret: illegal base64 data at input byte {at}"
        );
        check("io.k8s.api.core.v1.Secret", &input, FieldValidation::Ignore, &expect);
    }
}

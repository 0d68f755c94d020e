//! Cases for the reader: messages built by hand, and broken messages.

use serde_json::json;

use super::*;
use crate::schema::{FieldValidation, Parsed};

/// A length-delimited field.
fn field(number: u8, bytes: &[u8]) -> Vec<u8> {
    let mut out = vec![number << 3 | 2, u8::try_from(bytes.len()).unwrap()];
    out.extend_from_slice(bytes);
    out
}

/// A varint field below 128.
fn number(number: u8, value: u8) -> Vec<u8> {
    vec![number << 3, value]
}

fn envelope(api_version: &str, kind: &str, raw: &[u8]) -> Vec<u8> {
    let meta = [field(1, api_version.as_bytes()), field(2, kind.as_bytes())].concat();
    [b"k8s\0".to_vec(), field(1, &meta), field(2, raw), field(3, b""), field(4, b"")].concat()
}

fn check(api_version: &str, kind: &str, raw: &[u8], expect: Value) {
    let mut expect = expect;
    expect["apiVersion"] = api_version.into();
    expect["kind"] = kind.into();
    assert_eq!(decode(&envelope(api_version, kind, raw)), Ok(expect));
}

#[test]
fn zero_counts_only_where_go_has_a_pointer() {
    let spec = [number(1, 0), field(3, &field(3, b"")), number(5, 0), number(7, 0)].concat();
    let value = decode(&envelope("apps/v1", "Deployment", &field(2, &spec))).unwrap();
    let parsed = Parsed { value, duplicates: Vec::new(), keys: Vec::new() };
    let definition = "io.k8s.api.apps.v1.Deployment";
    let (object, _) = crate::schema::decode(definition, parsed, FieldValidation::Strict).unwrap();
    let spec = &object["spec"];
    assert_eq!((&spec["replicas"], spec.get("minReadySeconds"), spec.get("paused")), (&json!(0), None, None));
}

#[test]
fn fields_of_inlined_messages_are_in_the_outer_object() {
    let empty_dir = field(2, &field(2, b""));
    let volume = [field(1, b"v"), empty_dir].concat();
    check(
        "v1",
        "Pod",
        &field(2, &field(1, &volume)),
        json!({"spec": {"volumes": [{"name": "v", "emptyDir": {}}]}}),
    );
}

#[test]
fn maps_bytes_and_times_have_their_json_form() {
    let data = [field(1, b"k"), field(2, b"hi")].concat();
    let created = field(8, &number(1, 60));
    check(
        "v1",
        "Secret",
        &[field(1, &[field(1, b"s"), created].concat()), field(2, &data)].concat(),
        json!({"metadata": {"name": "s", "creationTimestamp": "1970-01-01T00:01:00Z"}, "data": {"k": "aGk="}}),
    );
}

#[test]
fn an_entry_without_a_value_has_the_empty_value_of_its_type() {
    let entry = field(1, b"k");
    check("v1", "ConfigMap", &field(2, &entry), json!({"data": {"k": ""}}));
    check("v1", "ResourceQuota", &field(2, &field(1, &entry)), json!({"spec": {"hard": {"k": "0"}}}));
    let empty_time = [entry, field(2, b"")].concat();
    check(
        "policy/v1",
        "PodDisruptionBudget",
        &field(3, &field(2, &empty_time)),
        json!({"status": {"disruptedPods": {"k": null}}}),
    );
}

#[test]
fn policies_that_are_newer_than_the_source_of_field_numbers_are_decoded() {
    let patch = [field(2, b"JSONPatch"), field(4, &field(1, b"[]"))].concat();
    let spec =
        [field(1, &[field(1, b"v1"), field(2, b"ConfigMap")].concat()), field(4, &patch), field(7, b"Never")];
    check(
        "admissionregistration.k8s.io/v1",
        "MutatingAdmissionPolicy",
        &[field(1, &field(1, b"p")), field(2, &spec.concat())].concat(),
        json!({"metadata": {"name": "p"}, "spec": {
            "paramKind": {"apiVersion": "v1", "kind": "ConfigMap"},
            "mutations": [{"patchType": "JSONPatch", "jsonPatch": {"expression": "[]"}}],
            "reinvocationPolicy": "Never"}}),
    );
    let spec = [field(1, b"p"), field(2, &field(1, b"x"))].concat();
    check(
        "admissionregistration.k8s.io/v1",
        "MutatingAdmissionPolicyBinding",
        &field(2, &spec),
        json!({"spec": {"policyName": "p", "paramRef": {"name": "x"}}}),
    );
}

#[test]
fn lists_of_device_attributes_are_decoded() {
    let attribute = [number(6, 1), number(6, 2), number(7, 1), field(8, b"a"), field(9, b"1.0.0")].concat();
    let attributes = field(2, &[field(1, b"k"), field(2, &attribute)].concat());
    let mappings = field(13, &[field(1, b"cpu"), field(2, &field(1, b"example.com/cores"))].concat());
    let device = [field(1, b"d"), attributes, mappings].concat();
    check(
        "resource.k8s.io/v1",
        "ResourceSlice",
        &field(2, &field(6, &device)),
        json!({"spec": {"devices": [{
            "name": "d",
            "attributes": {"k": {"ints": [1, 2], "bools": [true], "strings": ["a"], "versions": ["1.0.0"]}},
            "nodeAllocatableResourceMappings": {"cpu": {"capacityKey": "example.com/cores"}},
        }]}}),
    );
}

#[test]
fn int_or_string_follows_its_type() {
    let text = field(4, &[number(1, 1), number(2, 0), field(3, b"http")].concat());
    let whole = field(4, &[number(1, 0), number(2, 80), field(3, b"")].concat());
    for (target, expect) in [(text, json!("http")), (whole, json!(80))] {
        check(
            "v1",
            "Service",
            &field(2, &field(1, &target)),
            json!({"spec": {"ports": [{"targetPort": expect}]}}),
        );
    }
}

#[test]
fn delete_options_are_decoded_in_every_group() {
    let raw = [number(1, 5), field(4, b"Background")].concat();
    for version in ["v1", "apps/v1", "meta.k8s.io/v1"] {
        check(
            version,
            "DeleteOptions",
            &raw,
            json!({"gracePeriodSeconds": 5, "propagationPolicy": "Background"}),
        );
    }
}

#[test]
fn broken_bytes_are_errors() {
    assert_eq!(decode(b"{}"), Err(DecodeError::Prefix));
    let good = envelope("v1", "Pod", &field(1, &field(1, b"name")));
    for length in 4..good.len() {
        // A cut envelope either misses the object or is an error; it never panics.
        let _ = decode(&good[..length]);
    }
    assert_eq!(decode(&envelope("v1", "Pod", &[0x0a, 0x7f])), Err(DecodeError::Malformed("unexpected end")));
    assert_eq!(decode(&envelope("v1", "Pod", &[0x0b])), Err(DecodeError::Malformed("unknown wire type")));
    let unknown = DecodeError::UnknownKind { api_version: "x/v1".into(), kind: "Y".into() };
    assert_eq!(decode(&envelope("x/v1", "Y", b"")), Err(unknown));
}

/// A length-delimited field of any length.
fn long_field(number: u8, bytes: &[u8]) -> Vec<u8> {
    let (mut out, mut length) = (vec![number << 3 | 2], bytes.len());
    while length >= 0x80 {
        out.push(u8::try_from(length & 0x7f).unwrap() | 0x80);
        length >>= 7;
    }
    out.push(u8::try_from(length).unwrap());
    [out, bytes.to_vec()].concat()
}

#[test]
fn embedded_envelopes_cannot_nest_without_end() {
    let meta = [field(1, b"apps/v1"), field(2, b"ControllerRevision")].concat();
    let mut nested = Vec::new();
    for _ in 0..2_000 {
        // ControllerRevision's second field is a RawExtension, whose first field is the embedded object.
        let raw = if nested.is_empty() { Vec::new() } else { long_field(2, &long_field(1, &nested)) };
        nested = [b"k8s\0".to_vec(), field(1, &meta), long_field(2, &raw)].concat();
    }
    assert_eq!(decode(&nested), Err(DecodeError::Malformed("nested too deeply")));
}

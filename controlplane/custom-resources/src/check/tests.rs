use serde_json::json;

use super::*;

fn found(schema: &Value, object: &Value, old: Option<&Value>) -> Vec<String> {
    let schema = Schema::parse(schema).unwrap();
    let mut violations = Violations::default();
    check(object, old, &schema, "", &mut violations);
    violations.as_slice().iter().map(|cause| format!("{}: {}", cause.field, cause.message)).collect()
}

#[test]
fn messages_equal_upstreams_messages() {
    let schema = json!({"type": "object", "required": ["spec"], "properties": {"spec": {"type": "object",
    "required": ["name"], "properties": {
        "name": {"type": "string", "pattern": "^[a-z]+$", "maxLength": 3, "minLength": 2},
        "count": {"type": "integer", "minimum": 1, "maximum": 5},
        "size": {"type": "string", "enum": ["S", "M"]},
        "list": {"type": "array", "maxItems": 1, "items": {"type": "integer", "multipleOf": 2}},
        "either": {"x-kubernetes-int-or-string": true},
        "at": {"type": "string", "format": "date-time"},
    }}}});
    let cases = [
        (json!({}), "spec: Required value"),
        (json!({"spec": {}}), "spec.name: Required value"),
        (
            json!({"spec": 1}),
            r#"spec: Invalid value: "integer": spec in body must be of type object: "integer""#,
        ),
        (
            json!({"spec": {"name": null}}),
            r#"spec.name: Invalid value: "null": spec.name in body must be of type string: "null""#,
        ),
        (
            json!({"spec": {"name": "A1"}}),
            r#"spec.name: Invalid value: "A1": spec.name in body should match '^[a-z]+$'"#,
        ),
        (json!({"spec": {"name": "abcd"}}), "spec.name: Too long: may not be more than 3 bytes"),
        (
            json!({"spec": {"name": "a"}}),
            r#"spec.name: Invalid value: "a": spec.name in body should be at least 2 chars long"#,
        ),
        (
            json!({"spec": {"name": "ab", "count": 9}}),
            "spec.count: Invalid value: 9: spec.count in body should be less than or equal to 5",
        ),
        (
            json!({"spec": {"name": "ab", "size": "L"}}),
            r#"spec.size: Unsupported value: "L": supported values: "S", "M""#,
        ),
        (json!({"spec": {"name": "ab", "list": [2, 4]}}), "spec.list: Too many: 2: must have at most 1 item"),
        (
            json!({"spec": {"name": "ab", "list": [3]}}),
            "spec.list[0]: Invalid value: 3: spec.list[0] in body should be a multiple of 2",
        ),
        (
            json!({"spec": {"name": "ab", "either": true}}),
            r#"spec.either: Invalid value: "boolean": spec.either in body must be of type integer,string: "boolean""#,
        ),
        (
            json!({"spec": {"name": "ab", "at": "now"}}),
            r#"spec.at: Invalid value: "now": spec.at in body must be of type date-time: "now""#,
        ),
    ];
    for (object, expected) in cases {
        assert_eq!(found(&schema, &object, None), [expected], "{object}");
    }
    assert!(found(&schema, &json!({"spec": {"name": "ab", "count": 2.0, "either": "50%"}}), None).is_empty());
}

#[test]
fn junctors_name_the_whole_object() {
    let schema = json!({"type": "object", "properties": {"spec": {"type": "object",
        "properties": {"a": {"type": "string"}, "b": {"type": "string"}},
        "oneOf": [{"required": ["a"]}, {"required": ["b"]}]}}});
    assert!(found(&schema, &json!({"spec": {"a": "1"}}), None).is_empty());
    assert_eq!(
        found(&schema, &json!({"spec": {"a": "1", "b": "2"}}), None),
        [
            r#"<nil>: Invalid value: "": "spec" must validate one and only one schema (oneOf). Found 2 valid alternatives"#
        ]
    );
}

#[test]
fn an_unchanged_invalid_value_is_accepted_on_update() {
    let schema = json!({"type": "object", "properties": {"spec": {"type": "object", "properties": {
        "a": {"type": "string", "maxLength": 1}, "b": {"type": "string"}}}}});
    let old = json!({"spec": {"a": "long", "b": "1"}});
    assert!(found(&schema, &json!({"spec": {"a": "long", "b": "2"}}), Some(&old)).is_empty());
    assert_eq!(found(&schema, &json!({"spec": {"a": "longer", "b": "1"}}), Some(&old)).len(), 1);
}

#[test]
fn elements_of_a_keyed_list_are_compared_by_key() {
    let schema = json!({"type": "object", "properties": {"list": {"type": "array", "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": ["k"], "items": {"type": "object", "properties": {
            "k": {"type": "string"}, "v": {"type": "integer", "maximum": 1}}}}}});
    let old = json!({"list": [{"k": "a", "v": 5}]});
    assert!(
        found(&schema, &json!({"list": [{"k": "b", "v": 0}, {"k": "a", "v": 5}]}), Some(&old)).is_empty()
    );
    assert_eq!(found(&schema, &json!({"list": [{"k": "b", "v": 5}]}), Some(&old)).len(), 1);
}

#[test]
fn the_key_of_a_megabyte_above_many_elements_is_not_copied_for_each() {
    let schema =
        json!({"type": "object", "additionalProperties": {"type": "array", "items": {"type": "string"}}});
    let long = "k".repeat(1 << 20);
    let list: Vec<Value> = (0..100_000).map(Value::from).collect();
    let found = found(&schema, &json!({ long: list }), None);
    assert_eq!(found.len(), 200);
    assert!(found.iter().all(|text| text.len() < 8192 && text.contains("...")));
}

#[test]
fn many_allowed_values_are_cut_in_messages() {
    let many: Vec<String> = (0..100_000).map(|index| format!("value-{index}")).collect();
    let schema = json!({"type": "string", "enum": many});
    let found = found(&schema, &json!("x"), None);
    assert!(found[0].contains(r#"supported values: "value-0", "value-1""#) && found[0].ends_with(", ..."));
    assert!(found[0].len() < 16384);
}

#[test]
fn a_schema_that_searches_a_long_text_many_times_is_stopped() {
    let checks = |count: usize| vec![json!({"pattern": "[ab]"}); count];
    let text = json!("b".repeat(1 << 20));
    assert!(found(&json!({"type": "string", "allOf": checks(10)}), &text, None).is_empty());
    let many = found(&json!({"type": "string", "allOf": checks(1000)}), &text, None);
    assert_eq!(many, ["<nil>: Forbidden: the schema needs too many checks of this object"]);
    let large = json!({"type": "string", "pattern": "^([ab]{100}){100}c"});
    assert_eq!(found(&large, &text, None), many);
}

/// The remaining work after the check of a list.
fn left(item_schema: &Value, item: &Value, count: usize) -> u64 {
    let schema = Schema::parse(&json!({"type": "array", "items": item_schema})).unwrap();
    let mut checker = Checker { prefix: "", left: 10_000_000 };
    let _outcome = checker.node(&json!(vec![item; count]), None, &schema, "");
    checker.left
}

#[test]
fn required_fields_and_allowed_values_count_for_each_item() {
    let names: Vec<String> = (0..20_000).map(|number| format!("n{number}")).collect();
    let required = json!({"type": "object", "required": names});
    assert!(left(&required, &json!({}), 1) > 0);
    assert_eq!(left(&required, &json!({}), 100), 0);
    // The values differ in their last element.
    let value = |last: usize| json!([vec![0; 1000], last]);
    let allowed = json!({"enum": (0..1000).map(value).collect::<Vec<_>>()});
    assert!(left(&allowed, &value(999), 1) > 0);
    assert_eq!(left(&allowed, &value(999), 10), 0);
}

#[test]
fn one_value_has_a_limited_number_of_violations() {
    let names: Vec<String> = (0..20_000).map(|number| format!("n{number}")).collect();
    let schema = Schema::parse(&json!({"type": "object", "required": names})).unwrap();
    let mut checker = Checker { prefix: "", left: MAX_WORK };
    assert_eq!(checker.node(&json!({}), None, &schema, "").errors.len(), MAX_ERRORS);
}

#[test]
fn violations_with_long_texts_count_for_each_item() {
    let pattern = json!({"type": "string", "pattern": format!("^[{}]$", "ab".repeat(10_000))});
    assert!(left(&pattern, &json!(""), 1) > 0);
    assert_eq!(left(&pattern, &json!(""), 1000), 0);
    let long = "x".repeat(1 << 20);
    for allowed in [json!(long), json!({ "a": long })] {
        let schema = json!({"enum": [allowed]});
        assert!(left(&schema, &json!("a"), 1) > 0);
        assert_eq!(left(&schema, &json!("a"), 1000), 0);
    }
    let not = json!({"not": {}});
    assert!(left(&not, &json!("a"), 100) > 0);
    assert_eq!(left(&not, &json!("a"), 20_000), 0, "violations above the maximum count, too");
}

#[test]
fn an_allowed_value_is_cut_before_it_is_formatted() {
    let cut = |value: &Value| beginning(value, &mut [0; 10]);
    assert_eq!(cut(&json!("é".repeat(100))), "é".repeat(5));
    assert_eq!(cut(&json!({"a": "x".repeat(100)})), r#"{"a":"xxxx"#);
    assert_eq!(cut(&json!({"a": 1})), r#"{"a":1}"#);
    assert_eq!(cut(&json!(null)), "null");
}

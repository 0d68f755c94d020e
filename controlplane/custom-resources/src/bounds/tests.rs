use coracle_cel::{Environment, Limits, Program};
use serde_json::{Value, json};

use super::*;
use crate::types;

/// A schema with a limit, if one is given, on its length or its number of elements.
type Shape = Box<dyn Fn(Option<i64>) -> Value>;

/// The estimated cost of a rule on the values of a schema.
fn cost(schema: &Value, rule: &str) -> u64 {
    let schema = Schema::parse(schema).unwrap();
    let (kind, bounds) = (types::of_schema(&schema, false).unwrap(), of_schema(&schema, false).unwrap());
    let environment = Environment::default().variable("self", kind.clone()).variable("oldSelf", kind);
    let limits = Limits { variable: None, bounds: &bounds };
    Program::compile_with_cost(rule, &environment, limits).unwrap().1.unwrap()
}

fn limited(mut schema: Value, field: &str, max: Option<i64>) -> Value {
    if let Some(max) = max {
        schema[field] = max.into();
    }
    schema
}

fn value(kind: &str) -> Value {
    match kind {
        "int-or-string" => json!({"x-kubernetes-int-or-string": true}),
        "bytes" => json!({"type": "string", "format": "byte"}),
        "duration" | "date" | "date-time" => json!({"type": "string", "format": kind}),
        kind => json!({"type": kind}),
    }
}

fn object() -> Value {
    json!({"type": "object", "required": ["required"],
        "properties": {"required": {"type": "string"}, "optional": {"type": "string"}}})
}

fn list_of(item: Value) -> Value {
    json!({"type": "array", "items": item})
}

fn map_of(value: Value) -> Value {
    json!({"type": "object", "additionalProperties": value})
}

fn text(kind: &'static str) -> Shape {
    Box::new(move |max| limited(value(kind), "maxLength", max))
}

fn list(item: Value) -> Shape {
    Box::new(move |max| limited(list_of(item.clone()), "maxItems", max))
}

fn map(item: Value) -> Shape {
    Box::new(move |max| limited(map_of(item.clone()), "maxProperties", max))
}

/// A list of texts; the limit holds for both.
fn texts() -> Shape {
    Box::new(|max| limited(list_of(limited(value("string"), "maxLength", max)), "maxItems", max))
}

/// A map of texts; the limit holds for both.
fn named_texts() -> Shape {
    Box::new(|max| limited(map_of(limited(value("string"), "maxLength", max)), "maxProperties", max))
}

/// An object with a text that has the limit, and two short ones.
fn fields(short: Option<i64>) -> Shape {
    Box::new(move |max| {
        let text = |max| limited(value("string"), "maxLength", max);
        json!({"type": "object", "properties": {"str": text(max), "before": text(short.and(Some(2))),
            "after": text(short), "separator": text(max)}})
    })
}

fn check(shape: &Shape, rule: &str, (unlimited, max, limited): (u64, i64, u64)) {
    assert_eq!(cost(&shape(None), rule), unlimited, "{rule} without limits: {}", shape(None));
    assert_eq!(cost(&shape(Some(max)), rule), limited, "{rule} with limits: {}", shape(Some(max)));
}

// The costs in these tests are those of upstream's `TestCostEstimation`.

#[test]
fn loops_cost_as_many_rounds_as_a_request_has_elements() {
    let all = "self.all(x, true)";
    for (item, costs) in [
        (value("number"), (4_718_591, 10, 32)),
        (value("string"), (3_145_727, 20, 62)),
        (value("boolean"), (1_887_437, 5, 17)),
        (list_of(value("number")), (3_145_727, 100, 302)),
        (object(), (555_128, 50, 152)),
        (value("int-or-string"), (4_718_591, 10, 32)),
        (value("duration"), (2_359_295, 5, 17)),
        (value("date"), (725_936, 15, 47)),
        (value("date-time"), (428_963, 25, 77)),
    ] {
        check(&list(item), all, costs);
    }
    for (item, costs) in [
        (value("number"), (1_348_169, 10, 32)),
        (value("string"), (1_179_647, 3, 11)),
        (value("boolean"), (943_718, 100, 302)),
        (value("int-or-string"), (1_348_169, 15, 47)),
        (object(), (428_963, 20, 62)),
        (map_of(value("number")), (1_179_647, 10, 32)),
        (list_of(value("number")), (1_179_647, 25, 77)),
        (value("duration"), (1_048_577, 5, 17)),
        (value("date"), (524_288, 10, 32)),
        (value("date-time"), (349_526, 25, 77)),
    ] {
        check(&map(item), all, costs);
    }
    check(&list(value("number")), "self.all(x, x == 0.0)", (6_291_454, 6_291_456, 25_165_826));
    let maps = list(map_of(value("number")));
    check(&maps, "self.all(x, x.y == 25.2)", (6_291_452, 12, 74));
    check(&maps, "self[0].x > 2.0", (4, 3000, 4));
    check(&named_texts(), "self.all(x, x.contains(self[x]))", (2_752_507, 10, 72));
    let nested = list(map_of(object()));
    check(&nested, r#"self.all(x, x["y"].required == "z")"#, (7_340_027, 10, 72));
    for (rule, limited) in
        [("self.all(x, self.all(y, true))", 352), ("self.all(x, self.all(y, self.all(z, true)))", 3552)]
    {
        let shape = list(value("number"));
        assert!(cost(&shape(None), rule) > 10_000_000);
        assert_eq!(cost(&shape(Some(10)), rule), limited);
    }
}

#[test]
fn elements_and_texts_cost_their_size() {
    for (item, rule, costs) in [
        ("number", "self[1] == 0.0", (2, 5000, 2)),
        ("string", "self[1] == self[1]", (314_577, 8, 314_577)),
        ("number", "self[3] == 0.0", (2, 0, 2)),
        ("int-or-string", "self[0] == 5", (3, 10, 3)),
        ("boolean", "self[0] == false", (2, 25, 2)),
        ("duration", "self[0].getHours() == 2", (4, 525, 4)),
        ("date", "self[2].getDayOfMonth() == 13", (4, 42, 4)),
        ("date-time", "self[2].getMinutes() == 45", (4, 99, 4)),
    ] {
        check(&list(value(item)), rule, costs);
    }
    check(&list(object()), "self[0] == null", (2, 422, 2));
    check(&list(list_of(value("number"))), "self[0][0] == -1.0", (3, 51, 3));
    check(&map(value("number")), r#"self["x"] == 0.0"#, (2, 0, 2));
    check(&map(value("integer")), "oldSelf.size() == self.size()", (5, 10, 5));
    check(&map(value("date-time")), r#"self["a"] == self["b"]"#, (8, 7, 8));
    check(&map(value("duration")), r#"self["c"] == self["d"]"#, (8, 42, 8));
    for (rule, costs) in [
        ("self.contains('test')", (314_574, 10, 5)),
        ("self.startsWith('test')", (2, 15, 2)),
        ("self.endsWith('test')", (2, 30, 2)),
        (r#"size(self + "hello") > size("hello")"#, (314_578, 4, 7)),
        (r#"self.matches("x")"#, (314_574, 50, 22)),
        (r#""".matches("(((((((((())))))))))[0-9]")"#, (7, 10, 7)),
        (r#"self.matches("")"#, (1, 100, 1)),
        (r#"self == "x""#, (2, 0, 1)),
    ] {
        check(&text("string"), rule, costs);
    }
    check(&text("bytes"), r#"self == b"x""#, (2, 0, 1));
    let one_of: Shape = Box::new(|max| {
        limited(json!({"type": "string", "enum": ["A", "B", "C", "LongValue"]}), "maxLength", max)
    });
    check(&one_of, "self.contains('A')", (2, 1000, 401));
}

#[test]
fn functions_of_libraries_cost_their_work() {
    check(&text("string"), "self.find('[0-9]+') == ''", (629_147, 10, 11));
    check(&text("string"), "self.lowerAscii() == 'lower!'", (314_575, 10, 6));
    check(&text("int-or-string"), "isQuantity(self)", (314_574, 20, 9));
    check(&texts(), "self.join(' ') == 'aa bb'", (329_853_068_905, 10, 43));
    check(&texts(), "self.isSorted() == true", (329_854_432_052, 10, 52));
    let rule = "self.str.replace(self.before, self.after) == 'does not matter'";
    check(&fields(Some(4)), rule, (629_154, 4, 12));
    check(&fields(None), "self.str.split(self.separator) == []", (629_160, 10, 22));
}

#[test]
fn resources_have_type_and_metadata() {
    let schema = json!({"type": "object", "required": ["metadata", "spec", "a b"], "properties": {
        "spec": {"type": "object", "required": ["n"], "properties": {"n": {"type": "integer"}}},
        "a b": {"type": "boolean"}}});
    let schema = Schema::parse(&schema).unwrap();
    let (plain, resource) = (of_schema(&schema, false).unwrap(), of_schema(&schema, true).unwrap());
    let spec = 2 + (1 + 1 + 4);
    assert_eq!(plain.fields["spec"].min_length, spec);
    assert_eq!(plain.min_length, 2 + (4 + spec + 4) + (3 + 4 + 4));
    assert_eq!(resource.min_length, plain.min_length + 8 + 2 + 4);
    assert_eq!(resource.fields["metadata"].fields["name"].size, 3 * 1024 * 1024 - 2);
    assert!(!plain.fields.contains_key("metadata"));
}

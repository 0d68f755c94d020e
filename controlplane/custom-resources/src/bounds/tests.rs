use coracle_cel::{Environment, Limits, Program};
use serde_json::{Value, json};

use super::*;
use crate::types;

/// Creates a schema. The argument is the limit on the length or the number of elements. `None` means no limit.
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

/// A list of texts. The limit applies to the list and to each text.
fn texts() -> Shape {
    Box::new(|max| limited(list_of(limited(value("string"), "maxLength", max)), "maxItems", max))
}

/// A map of texts. The limit applies to the map and to each text.
fn named_texts() -> Shape {
    Box::new(|max| limited(map_of(limited(value("string"), "maxLength", max)), "maxProperties", max))
}

/// An object with a text that has the limit, and two short texts.
fn fields(short: Option<i64>) -> Shape {
    Box::new(move |max| {
        let text = |max| limited(value("string"), "maxLength", max);
        json!({"type": "object", "properties": {"str": text(max), "before": text(short.and(Some(2))),
            "after": text(short), "separator": text(max)}})
    })
}

/// Checks the cost without limits, and the cost with the limit `max`.
fn check(shape: &Shape, rule: &str, unlimited: u64, max: i64, limited: u64) {
    assert_eq!(cost(&shape(None), rule), unlimited, "{rule} without limits: {}", shape(None));
    assert_eq!(cost(&shape(Some(max)), rule), limited, "{rule} with limits: {}", shape(Some(max)));
}

// The costs in these tests are from upstream's `TestCostEstimation` and `TestCelEstimatedCostStability`.

#[test]
fn loops_cost_one_round_for_each_element_that_fits_into_a_request() {
    let all = "self.all(x, true)";
    for (item, (unlimited, max, limited)) in [
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
        check(&list(item), all, unlimited, max, limited);
    }
    for (item, (unlimited, max, limited)) in [
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
        check(&map(item), all, unlimited, max, limited);
    }
    check(&list(value("number")), "self.all(x, x == 0.0)", 6_291_454, 6_291_456, 25_165_826);
    let maps = list(map_of(value("number")));
    check(&maps, "self.all(x, x.y == 25.2)", 6_291_452, 12, 74);
    check(&maps, "self[0].x > 2.0", 4, 3000, 4);
    check(&named_texts(), "self.all(x, x.contains(self[x]))", 2_752_507, 10, 72);
    let nested = list(map_of(object()));
    check(&nested, r#"self.all(x, x["y"].required == "z")"#, 7_340_027, 10, 72);
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
    for (item, rule, (unlimited, max, limited)) in [
        ("number", "self[1] == 0.0", (2, 5000, 2)),
        ("string", "self[1] == self[1]", (314_577, 8, 314_577)),
        ("number", "self[3] == 0.0", (2, 0, 2)),
        ("int-or-string", "self[0] == 5", (3, 10, 3)),
        ("boolean", "self[0] == false", (2, 25, 2)),
        ("duration", "self[0].getHours() == 2", (4, 525, 4)),
        ("date", "self[2].getDayOfMonth() == 13", (4, 42, 4)),
        ("date-time", "self[2].getMinutes() == 45", (4, 99, 4)),
    ] {
        check(&list(value(item)), rule, unlimited, max, limited);
    }
    check(&list(object()), "self[0] == null", 2, 422, 2);
    check(&list(list_of(value("number"))), "self[0][0] == -1.0", 3, 51, 3);
    check(&map(value("number")), r#"self["x"] == 0.0"#, 2, 0, 2);
    check(&map(value("integer")), "oldSelf.size() == self.size()", 5, 10, 5);
    check(&map(value("date-time")), r#"self["a"] == self["b"]"#, 8, 7, 8);
    check(&map(value("duration")), r#"self["c"] == self["d"]"#, 8, 42, 8);
    for (rule, (unlimited, max, limited)) in [
        ("self.contains('test')", (314_574, 10, 5)),
        ("self.startsWith('test')", (2, 15, 2)),
        ("self.endsWith('test')", (2, 30, 2)),
        (r#"size(self + "hello") > size("hello")"#, (314_578, 4, 7)),
        (r#"self.matches("x")"#, (314_574, 50, 22)),
        (r#""".matches("(((((((((())))))))))[0-9]")"#, (7, 10, 7)),
        (r#"self.matches("")"#, (1, 100, 1)),
        (r#"self == "x""#, (2, 0, 1)),
    ] {
        check(&text("string"), rule, unlimited, max, limited);
    }
    check(&text("bytes"), r#"self == b"x""#, 2, 0, 1);
    let one_of: Shape = Box::new(|max| {
        limited(json!({"type": "string", "enum": ["A", "B", "C", "LongValue"]}), "maxLength", max)
    });
    check(&one_of, "self.contains('A')", 2, 1000, 401);
}

#[test]
fn functions_of_libraries_cost_their_work() {
    check(&text("string"), "self.find('[0-9]+') == ''", 629_147, 10, 11);
    check(&text("string"), "self.lowerAscii() == 'lower!'", 314_575, 10, 6);
    check(&text("int-or-string"), "isQuantity(self)", 314_574, 20, 9);
    check(&texts(), "self.join(' ') == 'aa bb'", 329_853_068_905, 10, 43);
    check(&texts(), "self.isSorted() == true", 329_854_432_052, 10, 52);
    let rule = "self.str.replace(self.before, self.after) == 'does not matter'";
    check(&fields(Some(4)), rule, 629_154, 4, 12);
    check(&fields(None), "self.str.split(self.separator) == []", 629_160, 10, 22);
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

/// The schema of an object with properties of many types.
fn all_types() -> Value {
    let pair = || json!({"type": "object", "properties": {"k": value("string"), "v": value("string")}});
    let ten = |schema: Value, field: &str| limited(schema, field, Some(10));
    let properties = [
        ("s", value("string")),
        ("s2", value("string")),
        ("i", value("integer")),
        ("n", value("number")),
        ("bytes", value("bytes")),
        ("bytes2", value("bytes")),
        ("duration", value("duration")),
        ("time", value("date-time")),
        ("any", value("int-or-string")),
        ("ints", list_of(value("integer"))),
        ("ints2", list_of(value("integer"))),
        ("set", list_of(value("string"))),
        ("set2", list_of(value("string"))),
        ("map", map_of(value("string"))),
        ("map2", map_of(value("string"))),
        ("numbers", map_of(value("integer"))),
        ("objs", list_of(pair())),
        ("lists", list_of(list_of(pair()))),
        ("obj", json!({"type": "object", "properties": {"f": value("string")}})),
        ("mapOfMap", ten(map_of(ten(map_of(value("string")), "maxProperties")), "maxProperties")),
        ("mapOfList", ten(map_of(ten(list_of(pair()), "maxItems")), "maxProperties")),
        ("listOfMap", ten(list_of(ten(map_of(value("string")), "maxProperties")), "maxItems")),
    ];
    let properties = properties.map(|(name, schema)| (name.to_owned(), schema));
    json!({"type": "object", "properties": serde_json::Map::from_iter(properties)})
}

fn check_all(costs: &[(&str, u64)]) {
    let schema = all_types();
    for (rule, expected) in costs {
        assert_eq!(cost(&schema, rule), *expected, "{rule}");
    }
}

#[test]
fn scalars_and_texts_of_an_object_have_the_costs_of_upstream() {
    check_all(&[
        ("type(self.i) == int", 4),
        ("double(self.i) < self.n", 6),
        ("self.s.startsWith('Rook')", 3),
        ("!self.s.startsWith('knight')", 4),
        ("self.s.matches('^[^0-9]*$')", 943_721),
        ("!self.s.matches('^[0-9]*$')", 629_149),
        ("size(self.s) == 12", 4),
        ("self.s.charAt(3) == 'k'", 4),
        ("self.s.indexOf('o', 2) == 2", 314_576),
        ("self.s.replace(' ', 'x', 1) == 'Rookxtakes!!'", 629_150),
        ("self.s.split(' ') == ['Rook', 'takes', 'x']", 629_159),
        ("self.s.substring(4, 10).trim() == 'takes'", 629_149),
        ("self.s.lowerAscii() == self.s.lowerAscii()", 943_723),
        ("self.bytes == self.bytes2", 314_577),
        ("self.bytes == b'AB'", 3),
        ("self.duration == duration('1h2m') + duration('3s4ms')", 6),
        ("bytes(self.s) == self.bytes", 629_150),
        ("string(self.i) == self.s", 314_578),
        ("string(self.bytes) == self.s", 629_150),
        ("duration(self.s) == self.duration", 6),
        ("timestamp(self.s) == self.time", 6),
        ("string(self.time) == self.s", 314_578),
        ("type(self.any) == int ? self.any == 1 : self.any == '25%'", 7),
        ("type(self.any) == string && self.any == '25%'", 7),
        ("self.any != ['anything']", 13),
        (r"type(self.any) == string && self.any.matches(r'(\d+(\.\d+)?%)')", 1_258_298),
        (
            "type(self.any) == int ? self.i <= self.any : \
             double(self.i) / double(self.i) >= double(self.any.replace('%', '')) / 100.0",
            629_162,
        ),
        ("type(self) == type(self)", 1_844_674_407_370_955_268),
        (r#"quantity("200M") == quantity("0.2G") && quantity("0.2G") == quantity("200M")"#, 6),
        ("quantity(self.s).isLessThan(quantity(self.s2))", 629_151),
        (r#"quantity("50k").add(quantity("20")) == quantity("50.02k")"#, 5),
    ]);
}

#[test]
fn lists_and_maps_of_an_object_have_the_costs_of_upstream() {
    check_all(&[
        ("1 in self.ints", 1_572_865),
        ("self.ints2[0] in self.ints", 1_572_868),
        ("self.ints + self.ints2 == [1, 2, 3, 1, 2, 3]", 16),
        ("self.ints + [4, 5] == [1, 2, 3, 4, 5]", 24),
        ("self.ints.all(k, size(self.ints) > 0)", 11_010_044),
        ("self.ints.exists_one(k, self.ints == [2])", 23_592_949),
        ("size(self.ints.filter(k, size(self.ints) > 1)) == 1", 26_738_686),
        ("self.ints.map(e, e * 20).filter(e, e > 50).exists(e, e == 60)", 53_477_367),
        ("self.ints.map(e, e * 20).filter(e, e > 50).exists_one(e, e == 60)", 50_331_642),
        ("self.set == self.set2", 104_862),
        ("self.set + ['c', 'd'] == ['a', 'b', 'c', 'd']", 24),
        ("self.map == self.map2", 39_326),
        ("self.map == {'k1': 'a', 'k2': 'b'}", 33),
        ("has(self.map) && has(self.map2)", 2),
        ("self.map.all(k, size(self.map) > 0)", 2_752_508),
        ("self.numbers.all(k, self.numbers[k] > 0)", 3_595_115),
        ("size(self.numbers.filter(k, self.numbers[k] > 1)) == 1", 8_089_017),
        ("self.objs[0] == self.objs[1]", 6),
        ("self.objs.exists(m, m.k == 'a1' && m.v == 'b1')", 10_485_753),
        ("self.objs.map(m, m.v).exists(v, v == 'b1')", 19_922_939),
        ("self.objs.map(m, has(m.v) && m.v == 'z', m.v).size() == 1", 18_874_365),
        ("self.lists[0] == [self.lists[0][0], self.lists[0][1]]", 22),
        ("self.lists[2] + [self.lists[0][0], self.lists[0][1]] == self.lists[0]", 104_883),
        ("self.mapOfMap['x']['y'] == 'b'", 5),
        ("self.mapOfList['o'].exists(e, e.k == '1' && e.v == 'd')", 104),
        ("self.mapOfMap.map(k, k).map(k, k).size() == 1", 286),
        ("self.mapOfMap.map(k, self.mapOfMap[k].map(m, m)).size() == 1", 1585),
        ("self.listOfMap.map(e, e.map(m, m)).size() == 1", 1555),
        ("optional.of('a') != optional.of('b')", 1_844_674_407_370_955_266),
        ("optional.of('a').or(optional.of('a')).hasValue()", 4),
        ("optional.of('a').optMap(v, v == 'value').hasValue()", 18),
        ("self.obj.?f.orValue('v') == 'a'", 5),
        ("self.map[?'k'] == optional.of('v')", 1_844_674_407_370_955_268),
        ("optional.of([1, 2, 3, 4, 5]).optMap(v, v.size()).hasValue()", 38),
        ("self.set[?0].optMap(v, v == 'a').hasValue()", 22),
    ]);
}

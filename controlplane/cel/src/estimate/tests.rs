use std::sync::Arc;

use super::*;
use crate::{Environment, Field, ObjectType, Program};

/// An object with a text of 40 characters, a list and a map of ten such texts each, and a number.
fn limits() -> (Type, Bounds) {
    let text = || Some(Box::new(Bounds::leaf(40, 2)));
    let list = Bounds { items: text(), ..Bounds::leaf(10, 2) };
    let map = Bounds { items: text(), keys: Some(Box::new(Bounds::leaf(0, 2))), ..Bounds::leaf(10, 2) };
    let parts = [
        ("text", Type::String, Bounds::leaf(40, 2)),
        ("list", Type::list(Type::String), list),
        ("map", Type::Map(Arc::new(Type::String)), map),
        ("number", Type::Int, Bounds::leaf(0, 1)),
        ("any", Type::Dyn, Bounds::leaf(40, 1)),
    ];
    let (mut fields, mut bounds) = (std::collections::BTreeMap::new(), Bounds::leaf(0, 2));
    for (name, kind, part) in parts {
        fields.insert(Box::<str>::from(name), Field { name: name.into(), kind });
        bounds.fields.insert(name.into(), part);
    }
    (Type::Object(Arc::new(ObjectType::new("object", fields))), bounds)
}

fn cost(source: &str) -> Option<u64> {
    let (kind, bounds) = limits();
    let environment = Environment::default().variable("self", kind.clone()).variable("oldSelf", kind);
    let limits = Limits { variable: None, bounds: &bounds };
    Program::compile_with_cost(source, &environment, limits).unwrap().1
}

#[test]
fn operators_and_functions_have_the_costs_of_upstream() {
    let bound = NEW_LIST;
    for (source, expected) in [
        ("true", 0),
        ("self.number", 2),
        ("self.number + 1 == 2", 4),
        ("self.text == 'abc'", 3),
        ("self.text == self.text", 8),
        ("self.text < 'abc' || self.number > 2", 3 + 3),
        ("self.number > 0 ? self.text.size() : 1", 3 + 3),
        ("self.text + 'abcdef'", 2 + 5),
        ("'a' in self.list", 2 + 10),
        ("'a' in self.map", 2 + 1),
        ("self.list[0] == 'abc'", 3 + 1),
        ("has(self.map.a) && self.map.a == 'b'", 2 + 4),
        ("self.text.contains('abc')", 2 + 4),
        ("self.text.startsWith('abc')", 2 + 1),
        ("self.text.matches('abc')", 2 + 5),
        ("self.text.lowerAscii() == 'abc'", 2 + 4 + 1),
        ("self.text.split(',').size() > 1", 2 + 8 + 2),
        ("self.text.replace('ab', 'c').size() > 1", 2 + 8 + 2),
        ("self.list.isSorted()", 2 + 50),
        ("self.list.join(',') == ''", 2 + 41),
        ("self.text.find('a') == ''", 2 + 5),
        ("isQuantity(self.text)", 2 + 4),
        ("quantity(self.text) == quantity('1')", 2 + 4 + 1 + 1),
        ("ip.isCanonical(self.text)", 2 + 8),
        ("cidr('10.0.0.0/8').containsIP(self.text)", 1 + 4 + 2 + 4),
        ("sets.contains(self.list, ['a', 'b'])", 2 + 10 + 20 + 1),
        ("sets.equivalent(self.list, ['a', 'b'])", 2 + 10 + 40 + 1),
        ("self.list.distinct().size() > 0", 2 + 200 + 11 + 2),
        ("self.list.slice(1, 3).size() > 0", 2 + 2 + 11 + 2),
        ("lists.range(5).size() > 0", 5 + 11 + 2),
        ("[1, 2].all(x, x > 0)", 10 + 1 + 2 * (2 + 3)),
        ("self.list.all(x, x == self.text)", 2 + 1 + 10 * (2 + 1 + 1 + 2 + 4)),
        ("self.list.exists_one(x, x == 'a')", 2 + 2 + 10 * (1 + 1 + 2)),
        ("self.list.map(x, x).size() > 0", 2 + 10 + 1 + 10 * (1 + 10 + 1 + 1) + 2),
        ("self.list.all(i, x, i > 0 && x != '')", 2 + 1 + 10 * (2 + 1 + 2 + 1)),
        ("cel.bind(x, self.text, x == 'abc')", bound + 2 + 2),
        ("dyn(self.text) == 'abc'", 1 + 2 + 1),
        ("type(self.any) == int", 2 + 1 + 1),
    ] {
        assert_eq!(cost(source), Some(expected), "{source}");
    }
}

#[test]
fn optional_values_have_the_costs_of_their_expansion() {
    let environment = Environment::default();
    let bounds = Bounds::default();
    let limits = Limits { variable: None, bounds: &bounds };
    for (source, expected) in [
        // `optional.of(1)`, then `hasValue`, then `optional.of` around a new list, the value and the body.
        ("optional.of(1).optMap(x, x + 1).hasValue()", (1 + 1) + (1 + NEW_LIST + (1 + 1) + 2) + 1),
        ("optional.of(1).optFlatMap(x, optional.of(x)).hasValue()", (1 + 1) + (NEW_LIST + (1 + 1) + 2) + 1),
    ] {
        let (_, cost) = Program::compile_with_cost(source, &environment, limits).unwrap();
        assert_eq!(cost, Some(expected), "{source}");
    }
}

#[test]
fn sizes_of_unknown_texts_are_the_largest_but_those_of_unknown_types_are_not_estimated() {
    assert!(cost("self.text.charAt(1) == self.text.charAt(2)").is_some_and(|cost| cost > UNBOUNDED));
    let bounds = Bounds::default();
    let limits = Limits { variable: Some("other"), bounds: &bounds };
    let environment = Environment::default().variable("any", Type::Dyn).variable("text", Type::String);
    let cost = |source: &str| Program::compile_with_cost(source, &environment, limits).unwrap().1;
    assert!(cost("text == text").is_some_and(|cost| cost > UNBOUNDED));
    assert_eq!(cost("any == any"), None);
    assert_eq!(cost("any == 1"), Some(2));
}

#[test]
fn an_estimate_of_nested_loops_saturates() {
    let bounds = Bounds::default();
    let limits = Limits { variable: Some("other"), bounds: &bounds };
    let environment = Environment::default().variable("list", Type::list(Type::Int));
    let source = "list.all(x, list.all(y, x != y))";
    let (_, cost) = Program::compile_with_cost(source, &environment, limits).unwrap();
    assert_eq!(cost, Some(u64::MAX));
}

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::json;

use super::*;
use crate::eval_error::EvalError;
use crate::evaluate::PER_CALL_LIMIT;
use crate::session::{Session, Shared};
use crate::types::{Field, ObjectType, UnorderedList};
use crate::value::Value;

fn evaluate(source: &str) -> Result<serde_json::Value, String> {
    let program = Program::compile(source, &Environment::default()).map_err(|error| error.to_string())?;
    let (result, _) = program.evaluate(&[]);
    result.map(|value| value.to_json()).map_err(|error| error.to_string())
}

#[test]
fn expressions_have_their_values() {
    for (source, expected) in [
        ("1 + 2 * 3", json!(7)),
        ("7 / 2 == 3 && 7 % 2 == 1", json!(true)),
        ("'a' + 'b'", json!("ab")),
        ("[1, 2, 3].filter(x, x > 1).map(x, x * 2)", json!([4, 6])),
        ("[1, 2].all(x, x > 0) && [1, 2].exists(x, x == 2) && [1, 2].exists_one(x, x == 2)", json!(true)),
        ("{'a': 1, 'b': 2}.map(k, k)", json!(["a", "b"])),
        ("{'a': 1}['a'] + {'a': 1}.a", json!(2)),
        ("has({'a': 1}.a) && !has({'a': 1}.b)", json!(true)),
        ("'b' in ['a', 'b'] && 'a' in {'a': 1}", json!(true)),
        ("true ? 1 : 2", json!(1)),
        ("1.5 > 1 && 2u > 1 && dyn(1) == 1.0", json!(true)),
        ("size('añb') == 3 && 'abc'.size() == 3", json!(true)),
        ("'hello'.matches('^h.*o$') && 'a1b22'.findAll('[0-9]+') == ['1', '22']", json!(true)),
        ("'a,b'.split(',').join('-')", json!("a-b")),
        ("'hello'.replace('l', 'L', 1)", json!("heLlo")),
        ("'tacocat'.substring(4) + string('tacocat'.indexOf('c'))", json!("cat2")),
        ("'%s is %d and %.2f'.format(['x', 3, 1.5])", json!("x is 3 and 1.50")),
        ("[3, 1, 2].max() + [3, 1, 2].min() + [1, 2].sum()", json!(7)),
        ("[1, 2].isSorted() && ['a', 'b'].indexOf('b') == 1", json!(true)),
        (
            "sets.contains([1, 2, 3], [1]) && sets.intersects([1], [1, 2]) && sets.equivalent([1, 1], [1])",
            json!(true),
        ),
        ("url('https://a.b:8080/c?d=e').getHost()", json!("a.b:8080")),
        ("url('/path').getEscapedPath()", json!("/path")),
        ("quantity('1Gi').isGreaterThan(quantity('500Mi'))", json!(true)),
        ("quantity('2').sub(quantity('500m')) == quantity('1500m')", json!(true)),
        ("cidr('10.0.0.0/8').containsIP('10.1.2.3') && !isIP('x')", json!(true)),
        (
            "['10.0.0.0/255.0.0.0', '10.0.0.0/08', '::ffff:10.0.0.0/120', '10.0.0.0'].exists(c, isCIDR(c))",
            json!(false),
        ),
        ("['10.0.0.1/0', 'fd00::/10'].all(c, isCIDR(c))", json!(true)),
        ("ip('127.0.0.1').isLoopback() && cidr('10.0.0.0/8').prefixLength() == 8", json!(true)),
        ("semver('1.2.3').isLessThan(semver('1.10.0')) && !isSemver('1')", json!(true)),
        ("!format.dns1123Label().validate('my-name').hasValue()", json!(true)),
        ("format.dns1123Label().validate('A').hasValue()", json!(true)),
        (
            "duration('1h') > duration('59m') && timestamp('2024-01-02T00:00:00Z').getDayOfMonth() == 1",
            json!(true),
        ),
        ("optional.of(1).orValue(2) + optional.none().orValue(2)", json!(3)),
        ("{'a': {'b': 1}}.?a.?b.orValue(0) + {'a': 1}[?'z'].orValue(5)", json!(6)),
        ("cel.bind(x, 2, x * x)", json!(4)),
        ("optional.of(2).optMap(x, x * x).value()", json!(4)),
        ("type(1) == int && type('a') == string", json!(true)),
        ("duration('61.5s').getSeconds() + duration('-1.5s').getMilliseconds()", json!(-1439)),
        ("false && (1 / 0 == 1) || true", json!(true)),
        ("[0, 1].exists(x, 1 / x == 1)", json!(true)),
    ] {
        assert_eq!(evaluate(source), Ok(expected), "{source}");
    }
}

#[test]
fn addresses_quantities_types_and_times_have_the_results_of_upstream() {
    for (source, expected) in [
        ("string(ip('::1')) + string(cidr('10.0.0.1/8'))", json!("::110.0.0.1/8")),
        ("sign(quantity('-1')) + quantity('2k').sign()", json!(0)),
        (
            "quantity('1n').asApproximateFloat() == 1e-9 && quantity('10E').asApproximateFloat() == 1e19",
            json!(true),
        ),
        ("!quantity('10E').isInteger() && quantity('-1k').asInteger() == -1000", json!(true)),
        (
            "type(ip('::1')) == net.IP && type(cidr('::1/8')) != net.IP && type(cidr('::1/8')) == net.CIDR",
            json!(true),
        ),
        (
            "type(duration('1s')) == google.protobuf.Duration && type(optional.none()) == optional_type",
            json!(true),
        ),
        ("{'IP': 1}.exists(net, true) && cel.bind(net, {'IP': 2}, net.IP == 2)", json!(true)),
        (
            "string(timestamp('2011-08-18T19:03:37.010+01:00') + duration('1h'))",
            json!("2011-08-18T20:03:37.01+01:00"),
        ),
        (
            "timestamp('2011-08-18T19:03:37+01:00') == timestamp('2011-08-18T18:03:37Z')
                && timestamp('2011-08-18T19:03:37+01:00').getHours() == 18",
            json!(true),
        ),
        ("optional.ofNonZeroValue(timestamp('0001-01-01T00:00:00Z')).hasValue()", json!(false)),
    ] {
        assert_eq!(evaluate(source), Ok(expected), "{source}");
    }
}

#[test]
fn texts_and_lists_have_the_results_of_upstream() {
    for (source, expected) in [
        ("bool('T') && !bool('F') && string(1000000.0) == '1e+06'", json!(true)),
        ("url('https://A.b:443').getPort() + url('https://A.b').getEscapedPath()", json!("443")),
        ("url('http://[::1]:80/?a=1&a=2').getQuery()['a'].join('-')", json!("1-2")),
        ("!isURL('a b') && isURL('mailto:a')", json!(true)),
        ("semver('v01.2', true) == semver('1.2.0') && !isSemver('1.2-rc', true)", json!(true)),
        ("format.uuid().validate('1-2').hasValue()", json!(true)),
        ("!format.dns1123SubdomainPrefix().validate('a.b.-').hasValue()", json!(true)),
        ("format.uri().validate('a').value()[0]", json!("parse \"a\": invalid URI for request")),
        ("'tacocat'.indexOf('c', 20) + 'tacocat'.lastIndexOf('c', 20) + 'a'.indexOf('', 5)", json!(3)),
        ("'tacocat'.lastIndexOf('c', 5) + 'tacocat'.lastIndexOf('at', 6)", json!(9)),
        ("['bb', 'a', 'ccc'].sortBy(x, x.size())", json!(["a", "bb", "ccc"])),
        ("[3, 1, 2].sortBy(x, -x).map(x, [x, 0].sortBy(y, y)[0])", json!([0, 0, 0])),
        ("[].sortBy(x, x)", json!([])),
        ("'%s %s'.format([['a', 1.5], {'k': true}])", json!("[\"a\", 1.500000] {\"k\":true}")),
        ("optional.unwrap([optional.of(1), optional.none()]) + [optional.of(2)].unwrapOpt()", json!([1, 2])),
        ("timestamp('2024-07-01T12:00:00Z').getHours('America/New_York')", json!(8)),
        ("timestamp('2024-07-01T12:00:00Z').getHours('-08:30')", json!(3)),
    ] {
        assert_eq!(evaluate(source), Ok(expected), "{source}");
    }
}

#[test]
fn errors_equal_the_errors_of_cel_go() {
    for (source, expected) in [
        ("1 / 0", "division by zero"),
        ("{'a': 1}['b']", "no such key: b"),
        ("[1][3]", "index out of bounds: 3"),
        ("9223372036854775807 + 1", "integer overflow"),
        ("dyn('a') + dyn(1)", "no such overload"),
        ("quantity('10E').asInteger()", "cannot convert value to integer"),
        ("uint('+5')", "type conversion error from 'string' to 'uint'"),
        ("double('1e' + '999')", "type conversion error from 'string' to 'double'"),
        (
            "timestamp('2024-01' + '-02')",
            "type conversion error from 'string' to 'google.protobuf.Timestamp'",
        ),
        ("timestamp('2024-07-01T12:00:00Z').getHours('No/Where')", "unknown time zone No/Where"),
        ("[1].slice(-1, 1)", "cannot slice(-1, 1), negative indexes not supported"),
        ("[1].slice(1, 0)", "cannot slice(1, 0), start index must be less than or equal to end index"),
        ("[1].slice(0, 2)", "cannot slice(0, 2), list is length 1"),
        ("timestamp(253402300799 + 1)", "timestamp overflow"),
        ("'a'.indexOf('b', -1)", "index out of range: -1"),
        // The order of numbers of different types is not total.
        ("[dyn(1), dyn(1.5)].sort()", "no such overload"),
        ("[1.0, double('NaN')].sortBy(x, x)", "no such overload"),
    ] {
        assert_eq!(evaluate(source), Err(expected.to_owned()), "{source}");
    }
}

fn object() -> Type {
    let field = |name: &str, kind: Type| (name.into(), Field { name: name.into(), kind });
    let fields =
        BTreeMap::from([field("a", Type::String), field("n", Type::Int), field("l", Type::list(Type::Int))]);
    Type::Object(Arc::new(ObjectType::new("selfType", fields)))
}

#[test]
fn names_and_types_are_checked() {
    let environment = Environment::default().variable("self", object());
    for (source, expected) in [
        ("self.b == 1", "ERROR: <input>:1:5: undefined field 'b'\n | self.b == 1\n | ....^"),
        ("other == 1", "undeclared reference to 'other' (in container '')"),
        ("self.a == 1", "found no matching overload for '_==_' applied to '(string, int)'"),
        ("self.n.startsWith('a')", "found no matching overload for 'startsWith' applied to 'int.(string)'"),
        ("self.a.unknown()", "undeclared reference to 'unknown'"),
        ("self.a ==", "Syntax error"),
        ("self['a'] == 'x'", "found no matching overload for '_[_]' applied to '(selfType, string)'"),
        ("self.a.find(')') == ''", "invalid find argument"),
    ] {
        let error =
            Program::compile(source, &environment).err().map(|error| error.to_string()).unwrap_or_default();
        assert!(error.contains(expected), "{source}: {error}");
    }
    for (source, kind) in
        [("self.a", Type::String), ("self.l.all(x, x > 0)", Type::Bool), ("self.l[0]", Type::Int)]
    {
        assert_eq!(Program::compile(source, &environment).unwrap().kind(), &kind, "{source}");
    }
}

#[test]
fn literals_are_checked() {
    let error = |source: &str| match Program::compile(source, &Environment::default()) {
        Ok(_) => String::new(),
        Err(error) => error.to_string(),
    };
    for (source, expected) in [
        ("duration('1x') > duration('1s')", "<input>:1:10: invalid duration argument"),
        ("timestamp('2024-01-02') == timestamp('x')", "invalid timestamp argument"),
        ("timestamp(253402300800) == timestamp(0)", "<input>:1:11: invalid timestamp argument"),
        ("'a'.matches('(')", "<input>:1:13: invalid matches argument"),
        ("[1, 'a'].size() == 2", "expected type 'int' but found 'string'"),
        ("{'a': 1, 'b': 'c'}.size() == 2", "expected type 'int' but found 'string'"),
        ("{'a': 1, 2: 1}.size() == 2", "expected type 'string' but found 'int'"),
        ("['a', 'b'].sum() == 'ab'", "found no matching overload for 'sum' applied to 'list(string).()'"),
        ("[[1], [2]].sort() == []", "found no matching overload for 'sort'"),
        ("'%s %.2f %%'.format(['a']) == ''", "index 1 out of range"),
        ("'%s%%'.format(['a', 1]) == ''", "too many arguments supplied to string.format (expected 1, got 2)"),
        ("'%q'.format([1]) == ''", "unrecognized formatting clause \"q\""),
        ("'%.2'.format([1]) == ''", "unexpected end of string"),
        ("[1].sortBy(x.y, 1) == [1]", "argument of sortBy() must be a simple name"),
    ] {
        assert!(error(source).contains(expected), "{source}: {}", error(source));
    }
    for source in [
        "[1, dyn('a')].size() == 2",
        "'%s'.format([[1, 'a']]) == ''",
        "[duration('1h'), duration('1m')] == []",
    ] {
        assert_eq!(error(source), "", "{source}");
    }
}

#[test]
fn fields_of_json_are_read() {
    let kind = object();
    let environment = Environment::default().variable("self", kind.clone()).variable("oldSelf", kind.clone());
    let program =
        Program::compile("self.n > oldSelf.n && has(self.a) && self.l.exists(x, x == 2)", &environment)
            .unwrap();
    assert!(program.uses("oldSelf") && !program.uses("other"));
    let (new, old) = (json!({"a": "x", "n": 2, "l": [1, 2]}), json!({"n": 1}));
    let variables = [("self", Value::from_json(&new, &kind)), ("oldSelf", Value::from_json(&old, &kind))];
    assert_eq!(program.evaluate(&variables).0, Ok(Value::Bool(true)));
    // Null is the same as absent.
    let null = json!({"a": null, "n": 1});
    for (source, expected) in
        [("has(self.a)", Ok(Value::Bool(false))), ("self == self", Ok(Value::Bool(true)))]
    {
        let program = Program::compile(source, &environment).unwrap();
        let result = program.evaluate(&[("self", Value::from_json(&null, &kind))]).0;
        assert_eq!(result, expected, "{source}");
    }
    // Fields that the type does not have are compared.
    let kinds = Type::list(kind);
    let environment = Environment::default().variable("self", kinds.clone());
    let list = json!([{"n": 1, "x": "a"}, {"n": 1, "x": "b"}, {"n": 1, "x": "b"}]);
    let program = Program::compile("self[0] != self[1] && self[1] == self[2]", &environment).unwrap();
    let result = program.evaluate(&[("self", Value::from_json(&list, &kinds))]).0;
    assert_eq!(result, Ok(Value::Bool(true)));
}

#[test]
fn a_field_with_null_is_absent() {
    let kind = object();
    let environment = Environment::default().variable("self", kind.clone());
    let null = json!({"a": null, "n": 1});
    let program = Program::compile("self.a == 'x'", &environment).unwrap();
    let result = program.evaluate(&[("self", Value::from_json(&null, &kind))]).0;
    assert_eq!(result, Err(EvalError::Failed("no such key: a".to_owned())));
}

#[test]
fn an_object_with_null_does_not_equal_one_with_another_field() {
    let kinds = Type::list(object());
    let environment = Environment::default().variable("self", kinds.clone());
    let list = json!([{"a": null, "n": 1}, {"n": 1, "l": [1]}, {"n": 1, "x": 2}]);
    for source in [
        "self[0] == self[1]",
        "self[1] == self[0]",
        "self[0] == self[2]",
        "self[2] == self[0]",
        "dyn(self[0]) == {'n': 1, 'x': 2}",
        "dyn(self[2]) == {'n': 1, 'y': 2}",
    ] {
        let program = Program::compile(source, &environment).unwrap();
        let result = program.evaluate(&[("self", Value::from_json(&list, &kinds))]).0;
        assert_eq!(result, Ok(Value::Bool(false)), "{source}");
    }
}

/// The rules of upstream's tests for lists that are sets and maps.
#[test]
fn sets_and_maps_have_no_order() {
    let field = |name: &str, kind: Type| (name.into(), Field { name: name.into(), kind });
    let item = BTreeMap::from([field("k", Type::String), field("v", Type::String)]);
    let item = Type::Object(Arc::new(ObjectType::new("item", item)));
    let list = |item: Type, keys: &[&str]| {
        let keys = keys.iter().map(|key| Box::from(*key)).collect();
        Type::Unordered(Arc::new(UnorderedList { item, keys }))
    };
    let fields = BTreeMap::from([
        field("set", list(Type::String, &[])),
        field("other", list(Type::String, &[])),
        field("atoms", list(Type::list(Type::Int), &[])),
        field("none", Type::list(Type::Duration)),
        field("objs", Type::list(list(item, &["k"]))),
    ]);
    let kind = Type::Object(Arc::new(ObjectType::new("self", fields)));
    let environment = Environment::default().variable("self", kind.clone());
    let element = |key: &str, value: &str| json!({"k": key, "v": value});
    let json = json!({"set": ["a", "b", "c"], "other": ["a", "c", "b"], "atoms": [[1], [2]], "none": [], "objs": [
        [element("a", "1"), element("b", "2")], [element("b", "2"), element("a", "1")],
        [element("b", "3"), element("a", "1")], [element("c", "4")]]});
    for (source, expected) in [
        ("self.set == ['c', 'b', 'a'] && self.set == self.other", true),
        ("self.set == ['c', 'b', 'x'] || self.set == ['a', 'a', 'b']", false),
        ("self.none.sum() == duration('0')", true),
        // Lists of elements that are not scalars are compared in order.
        ("self.atoms == [[1], [2]] && self.atoms + [[1]] == [[1], [2], [1]]", true),
        ("self.atoms == [[2], [1]]", false),
        ("self.set + self.other == ['a', 'b', 'c']", true),
        ("self.set + ['c', 'd'] == ['a', 'b', 'c', 'd'] && 'a' in self.set", true),
        ("self.objs[0] == self.objs[1] && self.objs[0] != self.objs[2]", true),
        ("self.objs[0] + self.objs[2] == self.objs[2] && self.objs[2] + self.objs[0] == self.objs[0]", true),
        ("self.objs[0] == [self.objs[0][1], self.objs[0][0]]", true),
        ("size(self.objs[0] + [self.objs[3][0]]) == 3 && self.objs[0].all(x, x.k != 'c')", true),
    ] {
        let program = Program::compile(source, &environment).unwrap_or_else(|error| panic!("{error}"));
        let (result, _) = program.evaluate(&[("self", Value::from_json(&json, &kind))]);
        assert_eq!(result, Ok(Value::Bool(expected)), "{source}");
    }
}

#[test]
fn hostile_expressions_end() {
    let list = "[0,1,2,3,4,5,6,7,8,9]";
    let deep = format!(
        "{list}.all(a, {list}.all(b, {list}.all(c, {list}.all(d, {list}.all(e, {list}.all(f, true))))))"
    );
    assert_eq!(evaluate(&deep), Err("operation cancelled: actual cost limit exceeded".to_owned()));
    let mut doubling = "'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa'".to_owned();
    for index in 0..30 {
        doubling = format!("cel.bind(v{index}, {doubling}, v{index} + v{index})");
    }
    assert_eq!(evaluate(&doubling), Err("operation cancelled: actual cost limit exceeded".to_owned()));
    let chain = vec!["1"; 7000].join("+");
    assert!(evaluate(&chain).unwrap_err().contains("nested more than"));
    assert!(evaluate(&"(".repeat(5000)).is_err());
    assert!(evaluate(&"-".repeat(5000)).is_err());
    assert!(evaluate(&"a".repeat(20_000)).unwrap_err().contains("longer than"));
}

#[test]
fn map_keys_of_other_types_are_refused() {
    let refused = |source: &str| Program::compile(source, &Environment::default()).is_err();
    assert!(refused("{{1: 2}: 3} == {}") && refused("{[1]: 2} == {}"));
    assert!(!refused("{'a': 1} == {}") && !refused("{1: 1} == {}"));
}

#[test]
fn copies_of_texts_cost_their_length() {
    let source = "cel.bind(t, 'x' + 'y'.replace('y', '0123456789'), [t, t])";
    let long = source.replace("0123456789", &"0123456789".repeat(100));
    let cost = |source: &str| Program::compile(source, &Environment::default()).unwrap().evaluate(&[]).1;
    assert!(cost(&long) >= cost(source) + 2 * 99);
}

#[test]
fn loops_have_two_variables() {
    for (source, expected) in [
        ("[5, 6].all(i, v, v == i + 5) && {'a': 1}.exists(k, v, k == 'a' && v == 1)", json!(true)),
        ("[5, 6].existsOne(i, v, i == 1)", json!(true)),
        ("[5, 6, 7].transformList(i, v, i > 0, v * 2)", json!([12, 14])),
        ("{'a': 1, 'b': 2}.transformMap(k, v, v > 1, v * 2)", json!({"b": 4})),
        ("['x', 'y'].transformMapEntry(i, v, {v: i})", json!({"x": 0, "y": 1})),
    ] {
        assert_eq!(evaluate(source), Ok(expected), "{source}");
    }
    assert!(evaluate("['x', 'x'].transformMapEntry(i, v, {v: i})").unwrap_err().contains("already exists"));
    assert!(evaluate("[1].all(i, i, true)").is_err());
}

#[test]
fn shared_values_are_evaluated_once_and_only_if_used() {
    let mut environment = Environment::default().variable("x", Type::Int);
    let mut shared = Shared::default();
    for (name, source) in
        [("a", "[1, 2, 3].map(i, i * x)"), ("bad", "1 / 0"), ("b", "variables.a.size() + x")]
    {
        let program = Program::compile(source, &environment).unwrap();
        environment.shared(name, &program);
        shared.add(name, program);
    }
    assert!(Program::compile("variables.c", &environment).is_err());
    let session = Session::new(vec![("x", Value::Int(2))], &shared);
    let program =
        Program::compile("[0].all(x, variables.b == 5 && x == 0) || variables.bad == 1", &environment)
            .unwrap();
    let (first, cost) = session.evaluate(&program, PER_CALL_LIMIT);
    assert_eq!(first, Ok(Value::Bool(true)));
    let (second, less) = session.evaluate(&program, PER_CALL_LIMIT);
    assert_eq!(second, Ok(Value::Bool(true)));
    assert!(less < cost, "{less} {cost}");
    let bad = Program::compile("variables.bad == 1", &environment).unwrap();
    assert_eq!(
        session.evaluate(&bad, PER_CALL_LIMIT).0,
        Err(EvalError::Failed("division by zero".to_owned()))
    );
}

#[test]
fn an_unknown_shared_value_is_an_undefined_field() {
    let error = |environment: &Environment| {
        let result = Program::compile("variables.v < 5", environment);
        result.err().map(|error| error.to_string()).unwrap_or_default()
    };
    assert!(error(&Environment::default()).contains("undeclared reference to 'variables'"));
    let mut environment = Environment::default().with_shared();
    assert_eq!(
        error(&environment),
        "ERROR: <input>:1:10: undefined field 'v'\n | variables.v < 5\n | .........^"
    );
    environment.shared_of_any_type("v");
    assert_eq!(error(&environment), "");
}

#[test]
fn one_evaluation_has_a_limit_that_does_not_depend_on_the_budget() {
    let source = "lists.range(1100).all(i, lists.range(1100).all(j, i + j >= 0))";
    let program = Program::compile(source, &Environment::default()).unwrap();
    let shared = Shared::default();
    let session = Session::new(Vec::new(), &shared);
    for (result, cost) in [program.evaluate(&[]), session.evaluate(&program, u64::MAX)] {
        assert_eq!(result, Err(EvalError::CostLimit));
        assert!((PER_CALL_LIMIT..PER_CALL_LIMIT + 10_000).contains(&cost), "{cost}");
    }
}

#[test]
fn chains_of_shared_values_are_limited() {
    let mut environment = Environment::default();
    let program = Program::compile("[[1]]", &environment).unwrap();
    environment.shared("v0", &program);
    let failure = (1..400).find_map(|index| {
        match Program::compile(&format!("[variables.v{}]", index - 1), &environment) {
            Ok(program) => {
                environment.shared(&format!("v{index}"), &program);
                None
            }
            Err(error) => Some(error.to_string()),
        }
    });
    assert_eq!(failure.as_deref(), Some("variables are nested more than 256 levels deep"));
}

#[test]
fn objects_are_made_only_where_they_are_declared() {
    let source = "Object{spec: Object.spec{replicas: 3, ?none: optional.none(), __namespace__: 'x'}}";
    let environment = Environment::default().with_structures();
    let program = Program::compile(source, &environment).unwrap();
    let value = program.evaluate(&[]).0.unwrap();
    assert_eq!(value.to_json(), json!({"spec": {"replicas": 3, "namespace": "x"}}));
    let Value::Structure(made) = value else { panic!() };
    assert_eq!(made.check_names(), Ok(()));
    assert!(evaluate(source).unwrap_err().contains("undeclared reference to 'Object'"));
    let patch = "[JSONPatch{op: 'add', path: '/a', value: [1]}]";
    let program = Program::compile(patch, &environment).unwrap();
    assert_eq!(
        program.evaluate(&[]).0.unwrap().to_json(),
        json!([{"op": "add", "path": "/a", "value": [1]}])
    );
    assert!(Program::compile("JSONPatch{op: 1}", &environment).is_err());
    assert!(Program::compile("JSONPatch{x: 1}", &environment).is_err());
    let wrong = Program::compile("Object{spec: Object.status{}}", &environment).unwrap();
    let Ok(Value::Structure(made)) = wrong.evaluate(&[]).0 else { panic!() };
    assert!(made.check_names().unwrap_err().contains("expected \"Object.spec\""));
}

struct Allow(&'static str);

impl crate::access::Authorize for Allow {
    fn authorize(&self, attributes: &crate::access::CheckAttributes) -> crate::access::AccessDecision {
        crate::access::AccessDecision {
            allowed: format!("{attributes:?}").contains(self.0),
            ..Default::default()
        }
    }
}

#[test]
fn permission_checks_call_the_host() {
    let environment = Environment::default().variable("authorizer", crate::access::AUTHORIZER);
    let host = Allow("deployments");
    let attributes =
        crate::access::CheckAttributes { resource: "deployments".to_owned(), ..Default::default() };
    let access = crate::access::Access::new(&host, attributes);
    for (source, expected) in [
        (
            "authorizer.group('apps').resource('deployments').namespace('x').name('y').check('get').allowed()",
            true,
        ),
        ("authorizer.group('').resource('pods').check('get').allowed()", false),
        ("authorizer.path('/healthz').check('get').allowed()", false),
        ("authorizer.requestResource.check('create').allowed()", true),
        (
            "authorizer.serviceAccount('ns', 'deployments').group('').resource('pods').check('get').allowed()",
            true,
        ),
    ] {
        let program = Program::compile(source, &environment).unwrap();
        let (result, cost) = program.evaluate(&[("authorizer", Value::Access(access.clone()))]);
        assert_eq!(result, Ok(Value::Bool(expected)), "{source}");
        assert!(cost > 350_000, "{cost}");
    }
    for (source, expected) in [
        ("authorizer.path(' ')", "path must not be empty"),
        ("authorizer.group('').resource('')", "resource must not be empty"),
        ("authorizer.serviceAccount('a', 'b:c')", "Invalid service account name"),
        ("authorizer.serviceAccount('a.b', 'c')", "Invalid service account namespace"),
    ] {
        let program = Program::compile(source, &environment).unwrap();
        let (result, _) = program.evaluate(&[("authorizer", Value::Access(access.clone()))]);
        assert_eq!(result, Err(EvalError::Failed(expected.to_owned())), "{source}");
    }
    assert!(Program::compile("authorizer.check('get')", &environment).is_err());
    // A check keeps a copy of its arguments.
    let program =
        Program::compile("[authorizer.path(s)] != []", &environment.variable("s", Type::String)).unwrap();
    let text = json!("/".repeat(200_000));
    let variables =
        [("authorizer", Value::Access(access.clone())), ("s", Value::from_json(&text, &Type::String))];
    assert!(program.evaluate(&variables).1 >= 20_000);
}

#[test]
fn copies_cost_their_size() {
    let environment =
        Environment::default().variable("list", Type::list(Type::Int)).variable("text", Type::String);
    let json = serde_json::Value::Array(vec![json!(1); 50_000]);
    let kind = Type::list(Type::Int);
    for source in ["(list + list).size() > 0", "text.split('').size() > 0", "list.reverse().size() > 0"] {
        let program = Program::compile(source, &environment).unwrap();
        let variables = [("list", Value::from_json(&json, &kind)), ("text", Value::text("x".repeat(50_000)))];
        let (result, cost) = program.evaluate(&variables);
        assert_eq!(result, Ok(Value::Bool(true)), "{source}");
        assert!(cost >= 50_000, "{source}: {cost}");
    }
}

/// Work that has no part in the result: errors that a loop ignores, variables that nothing uses, long arguments.
#[test]
fn hidden_work_costs() {
    let text = json!("x".repeat(200_000));
    let environment = Environment::default().variable("s", Type::String);
    for source in [
        "'%s'.format([lists.range(1000).map(x, lists.range(1000))]) == ''",
        "cidr('10.0.0.0/8').containsIP(s)",
        "'a'.indexOf(s) == 0",
        "s in {'a': 1}",
        "{'a': 1}[?s].hasValue()",
        "[s + 'a'].all(x, true) && [s + 'a'].all(x, true)",
        "{s + 'a': 1}.all(x, true)",
        "[s, s].isSorted()",
        "[s + 'a', 'b'].first().hasValue()",
        "'a'.matches('((a{50}){50}){50}')",
        "timestamp(0).getHours(s) == 1",
    ] {
        let program = Program::compile(source, &environment).unwrap();
        let variables = [("s", Value::from_json(&text, &Type::String))];
        let (_, cost) = program.evaluate(&variables);
        assert!(cost >= 20_000, "{source}: {cost}");
    }
}

#[test]
fn a_comparison_of_objects_costs_the_fields_of_their_type() {
    let field = |index: i32| {
        (format!("f{index}").into(), Field { name: format!("f{index}").into(), kind: Type::Int })
    };
    let kind = Type::Object(Arc::new(ObjectType::new("large", (0..10_000).map(field).collect())));
    let environment = Environment::default().variable("self", kind.clone());
    let json = json!({"f1": 1});
    let program = Program::compile("self == self", &environment).unwrap();
    let (result, cost) = program.evaluate(&[("self", Value::from_json(&json, &kind))]);
    assert!(result == Ok(Value::Bool(true)) && cost >= 1_000, "{cost}");
}

#[test]
fn a_comparison_of_lists_without_order_costs_the_texts_of_their_keys() {
    let field = |name: &str| (name.into(), Field { name: name.into(), kind: Type::String });
    let item = Type::Object(Arc::new(ObjectType::new("item", BTreeMap::from([field("k")]))));
    let keys: [Box<str>; 1] = [Box::from("k")];
    let kind = Type::Unordered(Arc::new(UnorderedList { item, keys: keys.into() }));
    let environment = Environment::default().variable("self", kind.clone()).variable("other", kind.clone());
    let list = |letter: &str| json!([{"k": letter.repeat(200_000)}]);
    let (json, other) = (list("a"), list("b"));
    for source in ["self == other", "self + other == []"] {
        let program = Program::compile(source, &environment).unwrap();
        let variables =
            [("self", Value::from_json(&json, &kind)), ("other", Value::from_json(&other, &kind))];
        let (result, cost) = program.evaluate(&variables);
        assert!(result == Ok(Value::Bool(false)) && cost >= 40_000, "{source}: {cost}");
    }
}

#[test]
fn the_query_of_a_url_costs_its_parameters() {
    let environment = Environment::default().variable("s", Type::String);
    let program = Program::compile("url(s).getQuery().size() == 1", &environment).unwrap();
    let text = json!(format!("/?a{}", "&a".repeat(8_999)));
    let (result, cost) = program.evaluate(&[("s", Value::from_json(&text, &Type::String))]);
    assert!(result == Ok(Value::Bool(true)) && cost >= 9_000, "{cost}");
}

#[test]
fn a_comparison_of_large_values_costs_their_size() {
    let environment = Environment::default().variable("s", Type::String);
    let cost = |text: &serde_json::Value, source: &str| {
        let program = Program::compile(source, &environment).unwrap();
        let (result, cost) = program.evaluate(&[("s", Value::from_json(text, &Type::String))]);
        assert_eq!(result, Ok(Value::Bool(true)), "{source}");
        cost
    };
    let long = "a".repeat(200_000);
    let (path, version) = (json!(format!("/{long}")), json!(format!("1.0.0-{long}")));
    for (text, made, compared) in [
        (&path, "url(s)", "v == v"),
        (&path, "bytes(s)", "v == v"),
        (&version, "semver(s)", "v == v"),
        (&version, "semver(s)", "!v.isLessThan(v)"),
    ] {
        let [with, without] =
            [compared, "true"].map(|body| cost(text, &format!("cel.bind(v, {made}, {body})")));
        assert!(with >= without + 12_000, "{made} {compared}: {with} {without}");
    }
}

#[test]
fn small_expressions_stay_cheap() {
    for source in
        ["'host-1'.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?$')", "'a' in ['a', 'b'] && 'a' in {'a': 1}"]
    {
        let (_, cost) = Program::compile(source, &Environment::default()).unwrap().evaluate(&[]);
        assert!(cost < 150, "{source}: {cost}");
    }
}

#[test]
fn a_result_that_is_too_deep_or_large_is_not_converted_to_json() {
    let value = |source: &str| {
        let program = Program::compile(source, &Environment::default()).unwrap();
        program.evaluate(&[]).0.unwrap().to_limited_json()
    };
    assert_eq!(value("{'a': [1, dyn('b')]}"), Some(json!({"a": [1, "b"]})));
    assert_eq!(value("cel.bind(a, lists.range(1000), a.map(x, a)).map(y, [y, y, y])"), None);
    let mut deep = Value::Int(1);
    for _ in 0..110 {
        deep = Value::list(vec![deep]);
    }
    assert_eq!(deep.to_limited_json(), None);
}

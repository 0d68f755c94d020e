use coracle_cel::access::{Access, AccessDecision, Authorize, CheckAttributes};
use serde_json::json;

use super::*;
use crate::{MutatingPolicy, Patch, REQUEST_BUDGET, RequestCost};

struct Deny;

impl Authorize for Deny {
    fn authorize(&self, _attributes: &CheckAttributes) -> AccessDecision {
        AccessDecision::default()
    }
}

fn with_input<T>(object: &Value, params: &Value, act: impl FnOnce(&Input<'_>) -> T) -> T {
    let request =
        json!({"operation": "CREATE", "name": "x", "userInfo": {"username": "ann", "groups": ["g"]}});
    let namespace = json!({"metadata": {"name": "ns", "labels": {"env": "prod"}}});
    let host = Deny;
    act(&Input {
        request: &request,
        object,
        old: &Value::Null,
        namespace: &namespace,
        params,
        authorizer: Access::new(&host, CheckAttributes::default()),
        cost: &RequestCost::default(),
    })
}

fn evaluate(spec: Value, object: Value) -> Outcome {
    let policy = ValidatingPolicy::read(&spec);
    with_input(&object, &json!({"max": 3}), |input| policy.evaluate(input))
}

fn messages(spec: Value, object: Value) -> Vec<String> {
    evaluate(spec, object).denials.into_iter().map(|denial| denial.message).collect()
}

#[test]
fn a_false_validation_denies_with_its_message() {
    let spec = json!({
        "paramKind": {}, "variables": [{"name": "n", "expression": "object.spec.replicas"}],
        "validations": [
            {"expression": "variables.n <= params.max", "messageExpression": "'too many: ' + string(variables.n)"},
            {"expression": "object.spec.replicas > 1", "message": " m ", "reason": "Forbidden"},
            {"expression": "namespaceObject.metadata.labels['env'] == 'test'"},
            {"expression": "request.userInfo.username == 'ann' && oldObject == null"},
            {"expression": "authorizer.group('').resource('pods').check('get').allowed() == false"},
        ],
    });
    assert_eq!(
        messages(spec.clone(), json!({"spec": {"replicas": 5}})),
        ["too many: 5", "failed expression: namespaceObject.metadata.labels['env'] == 'test'"]
    );
    let denials = evaluate(spec, json!({"spec": {"replicas": 1}})).denials;
    assert_eq!(
        (denials[0].message.as_str(), denials[0].reason.as_str(), denials[0].index),
        ("m", "Forbidden", 1)
    );
}

#[test]
fn an_error_denies_unless_it_is_ignored() {
    let spec = |failure: &str| {
        json!({"failurePolicy": failure, "validations": [{"expression": "object.none == 1"}],
            "auditAnnotations": [{"key": "k", "valueExpression": "object.none"}]})
    };
    let outcome = evaluate(spec("Fail"), json!({}));
    assert_eq!(
        outcome.denials[0].message,
        "expression 'object.none == 1' resulted in error: no such key: none"
    );
    assert_eq!(outcome.broken_annotations.len(), 1);
    assert_eq!(evaluate(spec("Ignore"), json!({})), Outcome::default());
    // A variable that does not compile is an error of the policy.
    let broken = json!({"variables": [{"name": "a", "expression": "x"}], "validations": []});
    assert!(messages(broken, json!({}))[0].contains("undeclared reference to 'x'"));
}

#[test]
fn conditions_select_requests() {
    let spec = json!({"validations": [{"expression": "false"}], "matchConditions": [
        {"name": "a", "expression": "object.none == 1"}, {"name": "b", "expression": "request.operation == 'DELETE'"}]});
    assert!(messages(spec, json!({})).is_empty());
    let failing = json!({"validations": [{"expression": "true"}], "matchConditions": [
        {"name": "a", "expression": "object.none == 1"}]});
    assert_eq!(messages(failing, json!({})).len(), 1);
}

#[test]
fn a_budget_limits_all_validations() {
    let one = json!({"expression": "[1].all(x, 'a'.matches('a')) && object.l.all(a, object.l.all(b, a != b || true))"});
    let spec = json!({"validations": vec![one; 100]});
    let list: Vec<i32> = (0..300).collect();
    let found = messages(spec, json!({"l": list}));
    assert!(found.last().unwrap().contains("running out of cost budget"), "{found:?}");
}

#[test]
fn one_expression_has_a_limit_below_the_budget() {
    let expression = "object.l.all(a, object.l.all(b, a == b))";
    let policy = ValidatingPolicy::read(&json!({"validations": [{"expression": expression}]}));
    with_input(&json!({"l": vec![1; 1200]}), &Value::Null, |input| {
        let denials = policy.evaluate(input).denials;
        assert!(denials[0].message.contains("running out of cost budget"), "{}", denials[0].message);
        assert!(input.cost.spent() < 2_000_000, "{}", input.cost.spent());
        assert!(!input.cost.is_exhausted(), "the limit of the request is not reached");
    });
}

#[test]
fn a_budget_limits_all_policies_of_a_request() {
    let policy = ValidatingPolicy::read(&json!({"validations": [{"expression": "object.l.all(a, a > 0)"}]}));
    with_input(&json!({"l": vec![1; 300]}), &Value::Null, |input| {
        assert!(policy.evaluate(input).denials.is_empty());
        let cost = input.cost.spent();
        assert!(cost >= 300, "{cost}");
        input.cost.add(REQUEST_BUDGET - 2 * cost - 1);
        assert!(policy.evaluate(input).denials.is_empty());
        let denials = policy.evaluate(input).denials;
        assert!(denials[0].message.contains("running out of cost budget"), "{}", denials[0].message);
        assert!(input.cost.is_exhausted());
    });
}

#[test]
fn an_attempt_that_costs_too_much_has_no_result_and_exhausts_nothing() {
    let policy = ValidatingPolicy::read(&json!({"validations": [{"expression": "object.l.all(a, a > 0)"}]}));
    with_input(&json!({"l": vec![1; 300]}), &Value::Null, |input| {
        assert_eq!(input.cost.attempt(100, || policy.evaluate(input)), None);
        assert_eq!(input.cost.attempt(100_000, || policy.evaluate(input)), Some(Outcome::default()));
        assert_eq!(policy.evaluate(input), Outcome::default());
        assert!(!input.cost.is_exhausted());
    });
}

#[test]
fn mutations_make_patches() {
    let policy = MutatingPolicy::read(&json!({
        "variables": [{"name": "label", "expression": "'l' + object.metadata.name"}],
        "mutations": [
            {"patchType": "ApplyConfiguration", "applyConfiguration": {"expression":
                "Object{metadata: Object.metadata{labels: Object.metadata.labels{x: variables.label}}}"}},
            {"patchType": "JSONPatch", "jsonPatch": {"expression":
                "[JSONPatch{op: 'add', path: '/metadata/labels/' + jsonpatch.escapeKey('a/b'), value: 'c'}]"}},
            {"patchType": "ApplyConfiguration", "applyConfiguration": {"expression": "Object{a: Object.b{}}"}},
        ],
    }));
    let object = json!({"metadata": {"name": "n"}});
    with_input(&object, &Value::Null, |input| {
        assert_eq!(policy.matches(input), Ok(true));
        let first = json!({"metadata": {"labels": {"x": "ln"}}});
        assert_eq!(policy.patch(0, input), Ok(Patch::Apply(first)));
        let second = json!([{"op": "add", "path": "/metadata/labels/a~1b", "value": "c"}]);
        assert_eq!(policy.patch(1, input), Ok(Patch::Json(second)));
        assert!(policy.patch(2, input).unwrap_err().contains("unexpected type name"));
        assert_eq!(policy.len(), 3);
    });
}

#[test]
fn a_patch_that_contains_one_list_many_times_is_refused_before_it_is_built() {
    let patch = |shared: &str| {
        let spec = json!({
            "variables": [
                {"name": "a", "expression": shared},
                {"name": "b", "expression": "[0, 1, 2, 3, 4, 5, 6, 7, 8, 9].map(x, variables.a)"},
                {"name": "c", "expression": "[0, 1, 2, 3, 4, 5, 6, 7, 8, 9].map(x, variables.b)"},
            ],
            "mutations": [
                {"patchType": "JSONPatch", "jsonPatch": {
                    "expression": "[JSONPatch{op: 'add', path: '/spec', value: variables.c}]"}},
                {"patchType": "ApplyConfiguration", "applyConfiguration": {
                    "expression": "Object{spec: Object.spec{list: variables.c}}"}},
            ],
        });
        let policy = MutatingPolicy::read(&spec);
        [0, 1].map(|at| with_input(&json!({}), &json!({}), |input| policy.patch(at, input)))
    };
    assert!(patch("[1]").iter().all(Result::is_ok));
    for found in patch("lists.range(50000)") {
        assert!(found.unwrap_err().ends_with("resulted in a too large or too deep patch"));
    }
}

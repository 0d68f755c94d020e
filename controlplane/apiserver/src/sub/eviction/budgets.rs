//! The disruption budgets that select a pod.
//!
//! A tenant can store tens of megabytes of budgets, and each eviction compares its pod with all budgets of the
//! namespace. So the stored text is read without copies and outside of the async workers, and few budgets are kept in
//! memory.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

use coracle_kinds::{Resource, selector::LabelSelector};
use serde::Deserialize;
use serde_json::Value;

use crate::{
    cache::{Object, prefix_of},
    call::Call,
    error::Result,
    offload::{self, MIN_OFFLOADED_BYTES},
};

/// Maximum number of budgets that are returned. With more than one an eviction fails.
const MAX_BUDGETS: usize = 2;

/// The spec of a stored budget.
#[derive(Deserialize)]
struct Spec<'a> {
    #[serde(borrow, default)]
    selector: Option<Selector<'a>>,
}

/// A selector that borrows from the stored text.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Selector<'a> {
    #[serde(borrow, default)]
    match_labels: Option<BTreeMap<Text<'a>, Text<'a>>>,
    #[serde(borrow, default)]
    match_expressions: Option<Vec<Expression<'a>>>,
}

/// A requirement of a selector.
#[derive(Deserialize)]
struct Expression<'a> {
    #[serde(borrow)]
    key: Text<'a>,
    #[serde(borrow)]
    operator: Text<'a>,
    #[serde(borrow, default)]
    values: Option<Vec<Text<'a>>>,
}

/// A string of the stored text. It is copied only if it has escapes.
#[derive(Deserialize, PartialEq, Eq, PartialOrd, Ord)]
struct Text<'a>(#[serde(borrow)] Cow<'a, str>);

/// The disruption budgets of the call's namespace that select this pod, at most [`MAX_BUDGETS`].
pub(super) fn budgets_of(call: &Call, kind: &Resource, pod: &Value) -> Result<Vec<Value>> {
    let prefix = prefix_of(kind, call.namespace());
    let all: Vec<_> = call.state.cache.of(kind)?.lock().under(&prefix).cloned().collect();
    let bytes: usize = all.iter().map(|budget| budget.stored_bytes()).sum();
    Ok(offload::run(bytes > MIN_OFFLOADED_BYTES, || selecting(&all, pod)))
}

fn selecting(all: &[Arc<Object>], pod: &Value) -> Vec<Value> {
    let found = all.iter().filter(|budget| selects(budget, pod)).take(MAX_BUDGETS);
    found.map(|budget| budget.value()).collect()
}

/// Whether a stored budget selects the pod.
fn selects(budget: &Object, pod: &Value) -> bool {
    match serde_json::from_str::<Spec<'_>>(budget.spec()) {
        Ok(spec) => spec.selector.is_some_and(|selector| selector.matches(pod)),
        Err(_) => covers(&budget.value(), pod),
    }
}

/// Whether a budget selects the pod. A budget without a selector selects no pods. A budget with an empty selector
/// selects all pods.
fn covers(budget: &Value, pod: &Value) -> bool {
    let selector = &budget["spec"]["selector"];
    !selector.is_null()
        && LabelSelector::from_object(selector).is_ok_and(|selector| selector.matches_object(pod))
}

// === impl Selector ===

impl Selector<'_> {
    /// Whether the labels of a pod meet all requirements. A selector with an unknown operator matches no pod.
    fn matches(&self, pod: &Value) -> bool {
        let labels = &pod["metadata"]["labels"];
        let label = |key: &Text<'_>| labels.get(&*key.0).and_then(Value::as_str);
        let mut equal = self.match_labels.iter().flatten();
        let mut expressions = self.match_expressions.iter().flatten();
        equal.all(|(key, value)| label(key) == Some(&*value.0))
            && expressions.all(|one| one.is_met(label(&one.key)))
    }
}

// === impl Expression ===

impl Expression<'_> {
    fn is_met(&self, label: Option<&str>) -> bool {
        let is_value = |label: &str| self.values.iter().flatten().any(|value| value.0 == label);
        match &*self.operator.0 {
            "In" => label.is_some_and(is_value),
            "NotIn" => label.is_none_or(|label| !is_value(label)),
            "Exists" => label.is_some(),
            "DoesNotExist" => label.is_none(),
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use coracle_kinds::kind::by_resource;
    use serde_json::json;

    use super::*;
    use crate::cache::{key_of, parses};

    fn stored(name: &str, spec: Value) -> Arc<Object> {
        let kind = by_resource("policy", "v1", "poddisruptionbudgets").unwrap();
        let budget = json!({"metadata": {"name": name, "namespace": "n"}, "spec": spec, "status": {}});
        Arc::new(Object::of(kind, key_of(kind, "n", name).into(), 7, &budget))
    }

    #[test]
    fn a_stored_budget_selects_as_its_tree() {
        let pod = json!({"metadata": {"labels": {"app": "a", "example.com/x": ""}}});
        let bare = json!({"metadata": {}});
        let expression = |key: &str, operator: &str, values: Value| json!({"selector": {"matchExpressions": [{"key": key, "operator": operator, "values": values}]}});
        for (spec, expect, of_bare) in [
            (json!({}), false, false),
            (json!({"selector": null}), false, false),
            (json!({"minAvailable": 1, "selector": {}}), true, true),
            (json!({"selector": {"matchLabels": null, "matchExpressions": null}}), true, true),
            (json!({"selector": {"matchLabels": {"app": "a"}}}), true, false),
            (json!({"selector": {"matchLabels": {"app": "b"}}}), false, false),
            (json!({"selector": {"matchLabels": {"example.com/x": ""}}}), true, false),
            (json!({"selector": {"matchLabels": {"app": "\"\\\n"}}}), false, false),
            (expression("app", "In", json!(["b", "a"])), true, false),
            (expression("app", "In", json!(["b"])), false, false),
            (expression("app", "NotIn", json!(["b"])), true, true),
            (expression("app", "NotIn", json!(["a"])), false, true),
            (expression("app", "Exists", json!(null)), true, false),
            (expression("app", "DoesNotExist", json!([])), false, true),
            (expression("app", "Is", json!([])), false, false),
        ] {
            let budget = stored("b", spec.clone());
            assert_eq!(selects(&budget, &pod), expect, "{spec}");
            assert_eq!(selects(&budget, &bare), of_bare, "{spec}");
            assert_eq!(covers(&budget.value(), &pod), expect, "{spec}");
        }
    }

    #[test]
    fn of_many_budgets_few_are_parsed_and_none_that_does_not_select_the_pod() {
        let pod = json!({"metadata": {"labels": {"app": "a"}}});
        let other =
            |number: usize| stored(&format!("o{number}"), json!({"selector": {"matchLabels": {"app": "b"}}}));
        let own =
            |number: usize| stored(&format!("s{number}"), json!({"selector": {"matchLabels": {"app": "a"}}}));
        let all: Vec<_> = (0..50).map(other).chain((0..50).map(own)).collect();
        let before = parses::so_far();
        let found = selecting(&all, &pod);
        assert_eq!((found.len(), parses::so_far() - before), (2, 2));
        assert_eq!(
            (&found[0]["metadata"]["name"], &found[0]["metadata"]["resourceVersion"]),
            (&json!("s0"), &json!("7"))
        );
    }
}

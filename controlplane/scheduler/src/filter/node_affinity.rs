//! A pod's node selector and required node affinity.

use k8s_openapi::api::core::v1::{NodeSelectorRequirement, NodeSelectorTerm};

use super::Refusal;
use crate::object::Pod;
use crate::snapshot::{Candidate, Facts};

pub(crate) fn refuse(pod: &Pod, node: Candidate<'_>) -> Vec<Refusal> {
    let mut selector = pod.spec.node_selector.iter().flatten();
    let selected = selector.all(|(name, value)| node.facts.labels.get(name) == Some(value));
    let affinity = pod.spec.affinity.as_ref().and_then(|affinity| affinity.node_affinity.as_ref());
    let required =
        affinity.and_then(|node| node.required_during_scheduling_ignored_during_execution.as_ref());
    let required = required.is_none_or(|required| {
        required.node_selector_terms.iter().any(|term| term_matches(term, node.facts))
    });
    if selected && required {
        return Vec::new();
    }
    vec!["node(s) didn't match Pod's node affinity/selector".to_owned()]
}

/// Whether the node meets every requirement of the term. An empty term matches nothing.
pub(crate) fn term_matches(term: &NodeSelectorTerm, node: &Facts) -> bool {
    let expressions = term.match_expressions.as_deref().unwrap_or_default();
    let fields = term.match_fields.as_deref().unwrap_or_default();
    let name =
        |requirement: &NodeSelectorRequirement| (requirement.key == "metadata.name").then_some(&node.name);
    !(expressions.is_empty() && fields.is_empty())
        && expressions.iter().all(|requirement| meets(requirement, node.labels.get(&requirement.key)))
        && fields.iter().all(|requirement| meets(requirement, name(requirement)))
}

fn meets(requirement: &NodeSelectorRequirement, value: Option<&String>) -> bool {
    let values = requirement.values.as_deref().unwrap_or_default();
    let numbers = || Some((value?.parse::<i64>().ok()?, values.first()?.parse::<i64>().ok()?));
    match requirement.operator.as_str() {
        "In" => value.is_some_and(|value| values.contains(value)),
        "NotIn" => value.is_none_or(|value| !values.contains(value)),
        "Exists" => value.is_some(),
        "DoesNotExist" => value.is_none(),
        "Gt" => numbers().is_some_and(|(own, bound)| own > bound),
        "Lt" => numbers().is_some_and(|(own, bound)| own < bound),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture;
    use serde_json::{Value, json};

    fn taken(spec: Value) -> bool {
        let labels = json!({"disk": "ssd", "cores": "8"});
        let snapshot = fixture::snapshot(&[fixture::node("a", json!({"/metadata/labels": labels}))]);
        refuse(&fixture::pod("p", spec), snapshot.candidates().next().unwrap()).is_empty()
    }

    fn requires(terms: Value) -> Value {
        json!({"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution":
            {"nodeSelectorTerms": terms}}}})
    }

    fn expression(key: &str, operator: &str, values: &[&str]) -> Value {
        json!({"key": key, "operator": operator, "values": values})
    }

    #[test]
    fn the_selector_must_match_every_label() {
        assert!(taken(json!({"nodeSelector": {"disk": "ssd"}})));
        assert!(!taken(json!({"nodeSelector": {"disk": "ssd", "zone": "x"}})));
    }

    #[test]
    fn one_term_must_match_whole_and_each_operator_means_what_it_says() {
        let cases = [
            (expression("disk", "In", &["hdd", "ssd"]), true),
            (expression("disk", "NotIn", &["ssd"]), false),
            (expression("zone", "NotIn", &["x"]), true),
            (expression("disk", "Exists", &[]), true),
            (expression("disk", "DoesNotExist", &[]), false),
            (expression("cores", "Gt", &["4"]), true),
            (expression("cores", "Lt", &["4"]), false),
        ];
        for (expression, expected) in cases {
            let spec = requires(json!([{"matchExpressions": [expression]}]));
            assert_eq!(taken(spec), expected, "{expression}");
        }
        let (good, bad) = (expression("disk", "Exists", &[]), expression("zone", "Exists", &[]));
        assert!(!taken(requires(json!([{"matchExpressions": [good, bad]}]))));
        assert!(taken(requires(json!([{"matchExpressions": [bad]}, {"matchExpressions": [good]}]))));
        assert!(!taken(requires(json!([{}]))));
        let by_name =
            |name: &str| requires(json!([{"matchFields": [expression("metadata.name", "In", &[name])]}]));
        assert!(taken(by_name("a")));
        assert!(!taken(by_name("b")));
    }
}

//! Node affinity: the labels and the name of a node against the terms of a pod.

use k8s_openapi::api::core::v1::{NodeSelectorRequirement, NodeSelectorTerm};

use crate::label_selector::Labels;

/// Whether a node meets every requirement of the term. An empty term matches no node.
///
/// The only supported field is `metadata.name`, as upstream.
pub fn term_matches(term: &NodeSelectorTerm, labels: &Labels, name: &str) -> bool {
    let expressions = term.match_expressions.as_deref().unwrap_or_default();
    let fields = term.match_fields.as_deref().unwrap_or_default();
    let field = |key: &str| (key == "metadata.name").then_some(name);
    !(expressions.is_empty() && fields.is_empty())
        && expressions.iter().all(|one| meets(one, labels.get(&one.key).map(String::as_str)))
        && fields.iter().all(|one| meets(one, field(&one.key)))
}

/// Whether the value (absent when the node does not have the label) meets the requirement.
fn meets(requirement: &NodeSelectorRequirement, value: Option<&str>) -> bool {
    let values = requirement.values.as_deref().unwrap_or_default();
    let has = |value: &str| values.iter().any(|one| one == value);
    let integers = || Some((value?.parse::<i64>().ok()?, values.first()?.parse::<i64>().ok()?));
    match requirement.operator.as_str() {
        "In" => value.is_some_and(has),
        "NotIn" => !value.is_some_and(has),
        "Exists" => value.is_some(),
        "DoesNotExist" => value.is_none(),
        "Gt" => integers().is_some_and(|(own, bound)| own > bound),
        "Lt" => integers().is_some_and(|(own, bound)| own < bound),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn labels() -> Labels {
        [("disk", "ssd"), ("cores", "8")].map(|(key, value)| (key.to_owned(), value.to_owned())).into()
    }

    fn matches(term: Value) -> bool {
        term_matches(&serde_json::from_value(term).unwrap(), &labels(), "a")
    }

    #[test]
    fn each_operator_compares_as_documented() {
        let cases = [
            ("disk", "In", vec!["hdd", "ssd"], true),
            ("zone", "In", vec!["x"], false),
            ("disk", "NotIn", vec!["ssd"], false),
            ("zone", "NotIn", vec!["x"], true),
            ("disk", "Exists", vec![], true),
            ("disk", "DoesNotExist", vec![], false),
            ("cores", "Gt", vec!["4"], true),
            ("cores", "Lt", vec!["4"], false),
            ("disk", "Gt", vec!["4"], false),
            ("disk", "Is", vec!["ssd"], false),
        ];
        for (key, operator, values, expected) in cases {
            let expression = json!({"key": key, "operator": operator, "values": values});
            assert_eq!(matches(json!({"matchExpressions": [expression]})), expected, "for {expression}");
        }
    }

    #[test]
    fn a_term_needs_all_of_its_requirements_and_at_least_one() {
        let one = |key: &str| json!({"key": key, "operator": "Exists"});
        assert!(!matches(json!({"matchExpressions": [one("disk"), one("zone")]})));
        assert!(!matches(json!({})));
        let named = |name: &str| json!({"matchFields": [{"key": "metadata.name", "operator": "In", "values": [name]}]});
        assert!(matches(named("a")) && !matches(named("b")));
    }
}

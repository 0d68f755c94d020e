//! Filter NodeAffinity: node selector and required node affinity.

use std::collections::BTreeSet;

use coracle_values::label_selector::has_all;
use coracle_values::node_selector::term_matches;
use k8s_openapi::api::core::v1::NodeAffinity;

use super::Refusal;
use crate::config::Profile;
use crate::object::Pod;
use crate::snapshot::Candidate;

pub(crate) fn refuse(pod: &Pod, node: Candidate<'_>) -> Vec<Refusal> {
    let selected = has_all(Some(&node.properties.labels), pod.spec.node_selector.as_ref());
    let affinity = pod.spec.affinity.as_ref().and_then(|affinity| affinity.node_affinity.as_ref());
    if selected && meets(affinity, node) {
        return Vec::new();
    }
    vec!["node(s) didn't match Pod's node affinity/selector".to_owned()]
}

/// The nodes that the required terms name by `metadata.name`, as in upstream's pre-filter. `None` if there are no
/// required terms, or if a term names no node. Then all nodes must be checked.
pub(crate) fn named(pod: &Pod) -> Option<BTreeSet<&str>> {
    let affinity = pod.spec.affinity.as_ref()?.node_affinity.as_ref()?;
    let terms = &affinity.required_during_scheduling_ignored_during_execution.as_ref()?.node_selector_terms;
    let mut all = BTreeSet::new();
    for term in terms {
        let fields = term.match_fields.iter().flatten();
        let names = fields.filter(|field| field.key == "metadata.name" && field.operator == "In");
        let sets = names
            .map(|field| -> BTreeSet<&str> { field.values.iter().flatten().map(String::as_str).collect() });
        all.extend(sets.reduce(|one, other| &one & &other)?);
    }
    (!terms.is_empty()).then_some(all)
}

/// Refuses nodes that the affinity of the scheduler's profile does not select.
pub(crate) fn refuse_by_profile(profile: &Profile, node: Candidate<'_>) -> Vec<Refusal> {
    if meets(profile.added_affinity.as_ref(), node) {
        return Vec::new();
    }
    vec!["node(s) didn't match scheduler-enforced node affinity".to_owned()]
}

/// Whether a node meets one of the required terms, if there are any.
fn meets(affinity: Option<&NodeAffinity>, node: Candidate<'_>) -> bool {
    let required =
        affinity.and_then(|node| node.required_during_scheduling_ignored_during_execution.as_ref());
    required.is_none_or(|required| {
        let mut terms = required.node_selector_terms.iter();
        terms.any(|term| term_matches(term, &node.properties.labels, &node.properties.name))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture;
    use crate::request::PodRequirements;
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
    fn the_affinity_of_the_profile_applies_to_every_pod() {
        let added = |disk: &str| {
            let term = json!({"matchExpressions": [expression("disk", "In", &[disk])]});
            let terms = json!({"nodeSelectorTerms": [term]});
            serde_json::from_value(json!({"requiredDuringSchedulingIgnoredDuringExecution": terms})).unwrap()
        };
        let node = fixture::node("a", json!({"/metadata/labels": {"disk": "ssd"}}));
        let snapshot = fixture::snapshot(&[node]);
        let pod = fixture::pod("p", json!({"nodeSelector": {"disk": "ssd"}}));
        for (disk, expected) in [("ssd", None), ("hdd", Some("scheduler-enforced node affinity"))] {
            let profile = Profile { added_affinity: Some(added(disk)), ..Profile::default() };
            let node = snapshot.candidates().next().unwrap();
            let refused = crate::filter::refuse(&pod, &PodRequirements::of(&pod), &profile, node);
            let reason = refused.map(|refused| refused.reasons.concat());
            let expected = expected.map(|what| format!("node(s) didn't match {what}"));
            assert_eq!(reason, expected, "{disk}");
        }
    }

    #[test]
    fn the_selector_must_match_every_label() {
        assert!(taken(json!({"nodeSelector": {"disk": "ssd"}})));
        assert!(!taken(json!({"nodeSelector": {"disk": "ssd", "zone": "x"}})));
    }

    #[test]
    fn one_term_must_match_with_all_of_its_expressions() {
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

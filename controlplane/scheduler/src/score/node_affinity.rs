//! Score NodeAffinity: nodes that match preferred terms of more weight get higher scores.

use coracle_values::node_selector::term_matches;
use k8s_openapi::api::core::v1::{NodeAffinity, PreferredSchedulingTerm};

use crate::object::Pod;
use crate::snapshot::Candidate;

/// The sum of the weights of the terms that match the node.
pub(super) fn weight(pod: &Pod, added: Option<&NodeAffinity>, node: Candidate<'_>) -> i64 {
    let affinity = pod.spec.affinity.as_ref().and_then(|affinity| affinity.node_affinity.as_ref());
    let preferred = added.into_iter().chain(affinity);
    let terms =
        preferred.flat_map(|one| one.preferred_during_scheduling_ignored_during_execution.iter().flatten());
    let matches = |term: &&PreferredSchedulingTerm| {
        term_matches(&term.preference, &node.properties.labels, &node.properties.name)
    };
    terms.filter(matches).map(|term| i64::from(term.weight)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture;
    use crate::node_score::normalize;
    use serde_json::json;

    #[test]
    fn preferred_terms_add_up_by_weight() {
        let prefers = |key: &str, weight: i32| json!({"weight": weight, "preference": {"matchExpressions": [{"key": key, "operator": "Exists"}]}});
        let pod = fixture::pod(
            "p",
            json!({"affinity": {"nodeAffinity": {
            "preferredDuringSchedulingIgnoredDuringExecution": [prefers("ssd", 30), prefers("gpu", 10)]}}}),
        );
        let labelled = |name: &str, labels| fixture::node(name, json!({"/metadata/labels": labels}));
        let snapshot = fixture::snapshot(&[
            labelled("a", json!({"ssd": "", "gpu": ""})),
            labelled("b", json!({"gpu": ""})),
            labelled("c", json!({})),
        ]);
        let nodes: Vec<_> = snapshot.candidates().collect();
        let weights = nodes.iter().map(|node| weight(&pod, None, *node)).collect();
        assert_eq!(normalize(weights, false), [100, 25, 0]);
        let added = json!({"preferredDuringSchedulingIgnoredDuringExecution": [prefers("gpu", 5)]});
        let added: NodeAffinity = serde_json::from_value(added).unwrap();
        let weights: Vec<i64> = nodes.iter().map(|node| weight(&pod, Some(&added), *node)).collect();
        assert_eq!(weights, [45, 15, 0], "the affinity of the profile adds up");
    }
}

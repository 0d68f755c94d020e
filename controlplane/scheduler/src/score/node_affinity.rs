//! Score NodeAffinity: nodes that match more of the preferred terms are better.

use coracle_values::node_selector::term_matches;
use k8s_openapi::api::core::v1::{NodeAffinity, PreferredSchedulingTerm};

use crate::node_score::normalize;
use crate::object::Pod;
use crate::snapshot::Candidate;

pub(crate) fn score(pod: &Pod, added: Option<&NodeAffinity>, nodes: &[Candidate<'_>]) -> Vec<i64> {
    let affinity = pod.spec.affinity.as_ref().and_then(|affinity| affinity.node_affinity.as_ref());
    let preferred = |node: &NodeAffinity| {
        node.preferred_during_scheduling_ignored_during_execution.clone().unwrap_or_default()
    };
    let terms: Vec<PreferredSchedulingTerm> = added.into_iter().chain(affinity).flat_map(preferred).collect();
    let weight = |node: &Candidate<'_>| {
        let matches = |term: &&PreferredSchedulingTerm| {
            term_matches(&term.preference, &node.properties.labels, &node.properties.name)
        };
        let met = terms.iter().filter(matches);
        met.map(|term| i64::from(term.weight)).sum()
    };
    normalize(nodes.iter().map(weight).collect(), false)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture;
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
        assert_eq!(score(&pod, None, &nodes), [100, 25, 0]);
    }
}

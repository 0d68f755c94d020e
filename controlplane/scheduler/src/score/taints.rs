//! Score TaintToleration: nodes with fewer untolerated PreferNoSchedule taints get higher scores.

use coracle_values::toleration::is_tolerated;

use crate::object::Pod;
use crate::snapshot::Candidate;

/// Number of taints that lower the score.
pub(super) fn count(pod: &Pod, node: Candidate<'_>) -> i64 {
    let soft = node.properties.taints.iter().filter(|taint| taint.effect == "PreferNoSchedule");
    i64::try_from(soft.filter(|taint| !is_tolerated(taint, pod.tolerations())).count()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture;
    use crate::node_score::normalize;
    use serde_json::json;

    fn score(pod: &Pod, nodes: &[Candidate<'_>]) -> Vec<i64> {
        normalize(nodes.iter().map(|node| count(pod, *node)).collect(), true)
    }

    #[test]
    fn an_untolerated_prefer_no_schedule_taint_lowers_the_score() {
        let taints = json!([{"key": "k", "effect": "PreferNoSchedule"}]);
        let nodes = [fixture::node("a", json!({})), fixture::node("b", json!({"/spec/taints": taints}))];
        let snapshot = fixture::snapshot(&nodes);
        let nodes: Vec<_> = snapshot.candidates().collect();
        assert_eq!(score(&fixture::pod("p", json!({})), &nodes), [100, 0]);
        let tolerant = fixture::pod("p", json!({"tolerations": [{"operator": "Exists"}]}));
        assert_eq!(score(&tolerant, &nodes), [100, 100]);
    }
}

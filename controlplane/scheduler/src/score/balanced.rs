//! Score NodeResourcesBalancedAllocation: nodes get higher scores if the pod makes the use of CPU and memory more
//! similar.
//!
//! Source: upstream's plugin of that name, which compares the node with the pod and without it.

use crate::node_score::MAX_NODE_SCORE;
use crate::request::{PodRequirements, amount};
use crate::snapshot::Candidate;

/// The score of a node. `resources` has the names of the compared resources.
pub(super) fn score(needs: &PodRequirements, resources: &[String], node: Candidate<'_>) -> i64 {
    let own = &needs.requests;
    // Extended resources count only if the pod requests them.
    let counts = |name: &str| matches!(name, "cpu" | "memory" | "ephemeral-storage") || amount(own, name) > 0;
    let names: Vec<&str> = resources.iter().map(String::as_str).filter(|name| counts(name)).collect();
    if names.iter().all(|name| amount(own, name) == 0) {
        return 0;
    }
    let (has, given) = (&node.properties.allocatable, &node.info.requested);
    let balance = |added: &dyn Fn(&str) -> i128| {
        let used = names.iter().map(|name| (amount(given, name) + added(name), amount(has, name)));
        balance(used.filter(|(_, has)| *has != 0))
    };
    MAX_NODE_SCORE / 2 + (MAX_NODE_SCORE / 2 + balance(&|name| amount(own, name)) - balance(&|_| 0)) / 2
}

/// 100 minus the standard deviation of the used fractions in percent.
#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    reason = "upstream computes it in the same way"
)]
fn balance(used: impl Iterator<Item = (i128, i128)>) -> i64 {
    let parts: Vec<f64> = used.map(|(used, has)| (used as f64 / has as f64).min(1.0)).collect();
    let deviation = match parts.as_slice() {
        [] | [_] => 0.0,
        // The deviation of two values from their mean is half their distance.
        [one, other] => ((one - other) / 2.0).abs(),
        parts => {
            let mean = parts.iter().sum::<f64>() / parts.len() as f64;
            (parts.iter().map(|part| (part - mean) * (part - mean)).sum::<f64>() / parts.len() as f64).sqrt()
        }
    };
    ((1.0 - deviation) * MAX_NODE_SCORE as f64) as i64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture;
    use serde_json::json;

    #[test]
    fn a_node_with_unequal_use_of_its_resources_is_worse() {
        let pod = |name: &str, cpu: &str, memory: &str| {
            let requests = json!({"cpu": cpu, "memory": memory});
            fixture::pod(name, json!({"containers": [{"resources": {"requests": requests}}]}))
        };
        let mut snapshot = fixture::snapshot(&[fixture::node("a", json!({})), fixture::node("b", json!({}))]);
        snapshot.place(&pod("one", "2", "0"), "a");
        let nodes: Vec<_> = snapshot.candidates().collect();
        let needs = PodRequirements::of(&pod("p", "0", "4Gi"));
        let resources = ["cpu".to_owned(), "memory".to_owned()];
        let scores: Vec<i64> = nodes.iter().map(|node| score(&needs, &resources, *node)).collect();
        assert_eq!(scores, [87, 62]);
    }
}

//! Scores: how well each remaining node fits a pod, from 0 to 100. One file per score.

mod balanced;
mod fit;
mod images;
mod node_affinity;
mod spread;
mod taints;

use crate::config::Profile;
use crate::object::Pod;
use crate::snapshot::{Candidate, Images};
use crate::topology::Topology;

/// The best score.
pub(crate) const BEST: i64 = 100;

/// The index of the best node. Of equal nodes the one with the fewest pods wins, then the first.
pub(crate) fn best(
    pod: &Pod,
    profile: &Profile,
    (topology, images): (&Topology, &Images),
    nodes: &[Candidate<'_>],
) -> Option<usize> {
    let mut totals = vec![0_i64; nodes.len()];
    if nodes.len() > 1 {
        let weights = &profile.weights;
        let mut add = |weight: i64, score: &dyn Fn() -> Vec<i64>| {
            if weight == 0 {
                return;
            }
            for (total, mark) in totals.iter_mut().zip(score()) {
                *total = total.saturating_add(mark.saturating_mul(weight));
            }
        };
        add(weights.taints, &|| taints::score(pod, nodes));
        add(weights.node_affinity, &|| node_affinity::score(pod, profile.added_affinity.as_ref(), nodes));
        // Upstream's plugin has default constraints, which spread pods of one owner.
        add(weights.spread, &|| spread::score(pod, nodes));
        add(weights.spread, &|| topology.spread_scores(nodes));
        add(weights.pod_affinity, &|| topology.affinity_scores(nodes));
        add(weights.fit, &|| fit::score(pod, profile, nodes));
        add(weights.balanced, &|| balanced::score(pod, nodes));
        add(weights.images, &|| images::score(pod, images, nodes));
    }
    (0..nodes.len())
        .min_by_key(|place| (std::cmp::Reverse(totals[*place]), nodes[*place].info.requested.pods))
}

/// `part` of `whole` on the scale from 0 to [`BEST`], rounded down; `whole` is above 0.
fn share(part: i128, whole: i128) -> i64 {
    i64::try_from(part * i128::from(BEST) / whole).unwrap_or(i64::MAX)
}

/// Scores in proportion to the largest value. With `reverse` the largest value gets the lowest score.
fn normalize(mut values: Vec<i64>, reverse: bool) -> Vec<i64> {
    let largest = values.iter().copied().max().unwrap_or_default();
    for value in &mut values {
        let mark = if largest == 0 { 0 } else { *value * BEST / largest };
        *value = if reverse { BEST - mark } else { mark };
    }
    values
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture;
    use serde_json::json;

    #[test]
    fn equal_nodes_take_turns() {
        let mut snapshot = fixture::snapshot(&[fixture::node("a", json!({})), fixture::node("b", json!({}))]);
        let mut places = String::new();
        for number in 0..4 {
            let pod = fixture::owned(&format!("p{number}"), "set");
            let name = {
                let nodes: Vec<_> = snapshot.candidates().collect();
                nodes[best(&pod, &Profile::default(), (&Topology::default(), &snapshot.images), &nodes)
                    .unwrap()]
                .facts
                .name
                .clone()
            };
            snapshot.place(&pod, &name);
            places.push_str(&name);
        }
        assert_eq!(places, "abab");
        assert_eq!(
            best(
                &fixture::pod("p", json!({})),
                &Profile::default(),
                (&Topology::default(), &Images::default()),
                &[],
            ),
            None
        );
    }
}

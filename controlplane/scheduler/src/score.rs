//! Scores: how well each remaining node fits a pod, from 0 to 100. One file per score.

mod balanced;
mod least_allocated;
mod node_affinity;
mod spread;
mod taints;

use crate::object::Pod;
use crate::snapshot::Candidate;
use crate::topology::Topology;

/// The best score.
pub(crate) const BEST: i64 = 100;

type Score = fn(&Pod, &[Candidate<'_>]) -> Vec<i64>;

/// The scores and their weights.
const SCORES: [(Score, i64); 5] = [
    (taints::score, 3),
    (node_affinity::score, 2),
    (spread::score, 2),
    (least_allocated::score, 1),
    (balanced::score, 1),
];

/// The index of the best node. Of equal nodes the one with the fewest pods wins, then the first.
pub(crate) fn best(pod: &Pod, topology: &Topology, nodes: &[Candidate<'_>]) -> Option<usize> {
    let mut totals = vec![0; nodes.len()];
    if nodes.len() > 1 {
        for (score, weight) in SCORES {
            for (total, mark) in totals.iter_mut().zip(score(pod, nodes)) {
                *total += mark * weight;
            }
        }
    }
    if nodes.len() > 1 {
        for (total, mark) in totals.iter_mut().zip(topology.scores(nodes)) {
            *total += mark;
        }
    }
    (0..nodes.len()).min_by_key(|place| (-totals[*place], nodes[*place].info.requested.pods))
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
                nodes[best(&pod, &Topology::default(), &nodes).unwrap()].facts.name.clone()
            };
            snapshot.place(&pod, &name);
            places.push_str(&name);
        }
        assert_eq!(places, "abab");
        assert_eq!(best(&fixture::pod("p", json!({})), &Topology::default(), &[]), None);
    }
}

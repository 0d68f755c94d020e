//! Scores: how suitable each remaining node is for a pod, from 0 to 100. One file per score.

mod balanced;
mod fit;
mod images;
mod node_affinity;
mod taints;

use crate::config::Profile;
use crate::node_score::{NodeScores, normalize};
use crate::object::Pod;
use crate::request::PodRequirements;
use crate::snapshot::{Candidate, Snapshot};
use crate::topology::Topology;

/// The nodes that can run a pod, with the other inputs of their scores.
#[derive(Clone, Copy)]
pub(crate) struct Inputs<'a> {
    pub(crate) topology: &'a Topology,
    pub(crate) snapshot: &'a Snapshot,
    pub(crate) nodes: &'a [Candidate<'a>],
    /// Scores of each node that do not depend on other nodes.
    pub(crate) own: &'a [NodeScores],
}

/// The weighted scores of one plugin, one for each node.
pub(crate) type Scores = (&'static str, Vec<i64>);

/// The scores of a node for a pod, except scores that depend on other nodes. `needs` has the requirements of the pod.
pub(crate) fn of_node(
    pod: &Pod,
    profile: &Profile,
    needs: &PodRequirements,
    node: Candidate<'_>,
) -> NodeScores {
    NodeScores {
        taints: taints::count(pod, node),
        node_affinity: node_affinity::weight(pod, profile.added_affinity.as_ref(), node),
        fit: fit::score(needs, &profile.fit, node),
        balanced: balanced::score(needs, &profile.balanced, node),
        devices: 0,
    }
}

/// The weighted scores of the nodes by each plugin of the profile.
pub(crate) fn scores(pod: &Pod, profile: &Profile, inputs: Inputs<'_>) -> Vec<Scores> {
    let Inputs { topology, snapshot, nodes, own } = inputs;
    let weights = &profile.weights;
    let each = |score: fn(&NodeScores) -> i64| -> Vec<i64> { own.iter().map(score).collect() };
    let mut found: Vec<Scores> = Vec::new();
    let mut add = |plugin: &'static str, weight: i64, score: &dyn Fn() -> Vec<i64>| {
        if weight > 0 {
            found.push((plugin, score().into_iter().map(|score| score.saturating_mul(weight)).collect()));
        }
    };
    add("TaintToleration", weights.taints, &|| normalize(each(|own| own.taints), true));
    add("NodeAffinity", weights.node_affinity, &|| normalize(each(|own| own.node_affinity), false));
    add("NodeResourcesFit", weights.fit, &|| each(|own| own.fit));
    add("PodTopologySpread", weights.spread, &|| topology.spread_scores(pod, nodes, snapshot));
    add("InterPodAffinity", weights.pod_affinity, &|| topology.affinity_scores(nodes));
    add("NodeResourcesBalancedAllocation", weights.balanced, &|| each(|own| own.balanced));
    add("ImageLocality", weights.images, &|| images::score(pod, &snapshot.images, nodes));
    if own.iter().any(|own| own.devices != 0) {
        add("DynamicResources", weights.devices, &|| normalize(each(|own| own.devices), false));
    }
    found
}

/// The index of the best node. Among nodes with equal scores, the node with the fewest pods is best, then the first
/// node.
pub(crate) fn best(pod: &Pod, profile: &Profile, inputs: Inputs<'_>) -> Option<usize> {
    let nodes = inputs.nodes;
    if nodes.len() < 2 {
        return nodes.len().checked_sub(1);
    }
    let totals = totals(pod, profile, inputs);
    (0..nodes.len())
        .min_by_key(|place| (std::cmp::Reverse(totals[*place]), nodes[*place].info.requested.pods))
}

/// The sum of the weighted scores of each node.
pub(crate) fn totals(pod: &Pod, profile: &Profile, inputs: Inputs<'_>) -> Vec<i64> {
    let mut totals = vec![0_i64; inputs.nodes.len()];
    for (_, scores) in scores(pod, profile, inputs) {
        for (total, score) in totals.iter_mut().zip(scores) {
            *total = total.saturating_add(score);
        }
    }
    totals
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture;
    use serde_json::json;

    #[test]
    fn equal_nodes_are_chosen_alternately() {
        let mut snapshot = fixture::snapshot(&[fixture::node("a", json!({})), fixture::node("b", json!({}))]);
        let mut places = String::new();
        for number in 0..4 {
            let (pod, profile) = (fixture::owned(&format!("p{number}"), "set"), Profile::default());
            let name = {
                let nodes: Vec<_> = snapshot.candidates().collect();
                let needs = PodRequirements::of(&pod);
                let own = nodes.iter().map(|node| of_node(&pod, &profile, &needs, *node));
                let own: Vec<_> = own.collect();
                let topology = &Topology::default();
                let inputs = Inputs { topology, snapshot: &snapshot, nodes: &nodes, own: &own };
                let place = best(&pod, &profile, inputs);
                nodes[place.unwrap()].properties.name.clone()
            };
            snapshot.place(&pod, &name);
            places.push_str(&name);
        }
        assert_eq!(places, "abab");
        let (topology, snapshot) = (&Topology::default(), &Snapshot::default());
        let nothing = Inputs { topology, snapshot, nodes: &[], own: &[] };
        assert_eq!(best(&fixture::pod("p", json!({})), &Profile::default(), nothing), None);
    }
}

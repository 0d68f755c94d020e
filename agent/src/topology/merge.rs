//! Merge of hints into one NUMA affinity, as the policies of the topology manager do. Pure.
//!
//! Source: `pkg/kubelet/cm/topologymanager/policy*.go` and `numa_info.go`. Upstream visits each combination of the
//! hints of all resources. The number of combinations is the product of the numbers of hints. On a machine with eight
//! NUMA nodes, a pod with several sizes of huge pages can make this product too large. Here the resources are merged
//! one after the other, and equal intermediate results are kept once. The result is the same, because it depends only
//! on the intersection of a combination's masks and on whether the combination is preferred.

use std::collections::{BTreeMap, BTreeSet};

use super::numa_mask::NumaMask;

/// NUMA nodes that can satisfy a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Hint {
    /// None means any nodes.
    pub(crate) nodes: Option<NumaMask>,
    /// Whether no smaller number of nodes can satisfy the request.
    pub(crate) preferred: bool,
}

/// Hints by the name of the resource. A resource without an entry has no preference. An empty list means that no nodes
/// can satisfy the request.
pub(crate) type Hints = BTreeMap<String, Vec<Hint>>;

/// The policy for the alignment of resources to NUMA nodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TopologyPolicy {
    /// Hints are not used.
    #[default]
    None,
    /// Pods are admitted in any case.
    BestEffort,
    /// Pods are admitted only if the result is preferred.
    Restricted,
    /// Pods are admitted only if one NUMA node suffices.
    SingleNumaNode,
}

/// The properties of a combination of hints that decide about the result of the merge.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Combination {
    /// The intersection of all masks.
    nodes: NumaMask,
    /// The mask that all hints have. A combination can be preferred only if all masks are equal. None for a combination
    /// that is not preferred, so that equal intersections are kept once.
    first: Option<NumaMask>,
    preferred: bool,
}

/// The NUMA nodes of the machine, and their distances if the nearest nodes are preferred.
#[derive(Clone, Debug, Default)]
pub(crate) struct NumaNodes {
    pub(crate) all: NumaMask,
    /// Distances by node and other node. None if distances do not matter. Then fewer nodes, and nodes with lower
    /// numbers, are preferred.
    pub(crate) distances: Option<BTreeMap<u32, BTreeMap<u32, u64>>>,
}

// === impl TopologyPolicy ===

impl TopologyPolicy {
    /// Name in the kubelet's configuration.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::BestEffort => "best-effort",
            Self::Restricted => "restricted",
            Self::SingleNumaNode => "single-numa-node",
        }
    }

    /// Merges hints. Returns None if the policy does not admit the result.
    pub(crate) fn merge<'a>(
        self,
        numa: &NumaNodes,
        hints: impl IntoIterator<Item = &'a Vec<Hint>>,
    ) -> Option<Hint> {
        let hints: Vec<Vec<Hint>> = hints.into_iter().map(|hints| self.filter(hints)).collect();
        let mut best = best(numa, &hints, self == Self::SingleNumaNode);
        if self == Self::SingleNumaNode && best.nodes == Some(numa.all) {
            best.nodes = None;
        }
        (best.preferred || matches!(self, Self::None | Self::BestEffort)).then_some(best)
    }

    /// The hints that the policy considers.
    fn filter(self, hints: &[Hint]) -> Vec<Hint> {
        if hints.is_empty() {
            return self.filter(&[Hint { nodes: None, preferred: false }]);
        }
        let is_single = |hint: &&Hint| hint.preferred && hint.nodes.is_none_or(|nodes| nodes.count() == 1);
        match self {
            Self::SingleNumaNode => hints.iter().filter(is_single).copied().collect(),
            Self::None | Self::BestEffort | Self::Restricted => hints.to_vec(),
        }
    }
}

/// The best merged hint. All nodes, not preferred, if no combination has common nodes.
fn best(numa: &NumaNodes, hints: &[Vec<Hint>], ignores_distances: bool) -> Hint {
    let combinations = combinations(numa.all, hints);
    let narrowest = hints.iter().filter_map(|hints| narrowest_count(hints)).max().unwrap_or(0);
    let merge = Merge { numa, ignores_distances, narrowest };
    let merged = combinations.into_iter().filter(|found| !found.nodes.is_empty());
    match merged.reduce(|best, next| merge.better(best, next)) {
        Some(best) => Hint { nodes: Some(best.nodes), preferred: best.preferred },
        None => Hint { nodes: Some(numa.all), preferred: false },
    }
}

/// The combinations of one hint of each resource: at most two for each set of nodes.
fn combinations(all: NumaMask, hints: &[Vec<Hint>]) -> BTreeSet<Combination> {
    let mut combinations = BTreeSet::from([Combination { nodes: all, first: None, preferred: true }]);
    for hints in hints {
        let mut merged = BTreeSet::new();
        for combination in combinations {
            merged.extend(hints.iter().map(|hint| combination.with(*hint)));
        }
        combinations = merged;
    }
    combinations
}

/// Number of nodes of the narrowest hint. None if no hint has nodes.
fn narrowest_count(hints: &[Hint]) -> Option<usize> {
    hints.iter().filter_map(|hint| hint.nodes).map(NumaMask::count).min()
}

// === impl Combination ===

impl Combination {
    fn with(self, hint: Hint) -> Self {
        let Some(nodes) = hint.nodes else {
            let preferred = self.preferred && hint.preferred;
            return Self { preferred, first: self.first.filter(|_| preferred), ..self };
        };
        let is_equal = self.first.is_none_or(|first| nodes == first);
        let preferred = self.preferred && hint.preferred && is_equal;
        let first = preferred.then_some(nodes);
        Self { nodes: self.nodes.intersection(nodes), first, preferred }
    }
}

/// Comparison of two merged hints.
struct Merge<'a> {
    numa: &'a NumaNodes,
    ignores_distances: bool,
    /// Each resource needs a minimum number of nodes. The value is the largest of these minimums, and the best size of
    /// a result that is not preferred.
    narrowest: usize,
}

impl Merge<'_> {
    fn better(&self, best: Combination, next: Combination) -> Combination {
        let takes_next = match (best.preferred, next.preferred) {
            (true, false) => false,
            (false, true) => true,
            (true, true) => self.is_narrower_or_closer(next.nodes, best.nodes),
            (false, false) => self.is_nearer(next.nodes, best.nodes),
        };
        if takes_next { next } else { best }
    }

    /// Whether `next` is better than `best`, if neither is preferred. The best number of nodes is [`Self::narrowest`],
    /// then the largest number below it, then the smallest number above it.
    fn is_nearer(&self, next: NumaMask, best: NumaMask) -> bool {
        use std::cmp::Ordering::{Equal, Greater, Less};
        let (count, goal) = (next.count(), self.narrowest);
        match best.count().cmp(&goal) {
            Greater => self.is_narrower_or_closer(next, best),
            Equal => count == goal && self.is_narrower_or_closer(next, best),
            Less if count > goal => false,
            Less => match count.cmp(&best.count()) {
                Greater => true,
                Less => false,
                Equal => self.is_narrower_or_closer(next, best),
            },
        }
    }

    /// Whether `next` is narrower than `best`. Masks of the same size are compared by their distances, if these are
    /// known and used, and then by the numbers of their nodes.
    fn is_narrower_or_closer(&self, next: NumaMask, best: NumaMask) -> bool {
        let distances = self.numa.distances.as_ref().filter(|_| !self.ignores_distances);
        let (Some(distances), true) = (distances, next.count() == best.count()) else {
            return next.is_narrower_than(best);
        };
        // The masks have the same number of pairs, so the sums compare like the averages.
        (distance(distances, next), next) < (distance(distances, best), best)
    }
}

/// The sum of the distances of all pairs of nodes.
fn distance(distances: &BTreeMap<u32, BTreeMap<u32, u64>>, mask: NumaMask) -> u64 {
    let pairs = mask.nodes().flat_map(|from| mask.nodes().map(move |to| (from, to)));
    pairs.map(|(from, to)| distances.get(&from).and_then(|of| of.get(&to)).copied().unwrap_or(0)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hint(nodes: &[u32], preferred: bool) -> Hint {
        Hint { nodes: (!nodes.is_empty()).then(|| NumaMask::of(nodes.iter().copied())), preferred }
    }

    fn machine(nodes: u32) -> NumaNodes {
        NumaNodes { all: NumaMask::of(0..nodes), distances: None }
    }

    fn merged(policy: TopologyPolicy, nodes: u32, hints: &[Vec<Hint>]) -> Option<Hint> {
        policy.merge(&machine(nodes), hints)
    }

    /// Cases of `commonPolicyMergeTestCases` and `TestPolicyBestEffortMerge` in upstream's `policy_test.go`.
    #[test]
    fn hints_of_two_nodes_are_merged_as_upstream() {
        let (a, b, both) = (hint(&[0], true), hint(&[1], true), hint(&[0, 1], false));
        for (hints, expected) in [
            (vec![], hint(&[0, 1], true)),
            (vec![vec![a]], a),
            (vec![vec![b, both], vec![b, both]], b),
            (vec![vec![a], vec![a]], a),
            (vec![vec![a, b, both], vec![a, b, both]], a),
            (vec![vec![a, both], vec![a, b, both]], a),
            (vec![vec![b, both], vec![a, b, both]], b),
            // No common nodes.
            (vec![vec![a], vec![b]], hint(&[0, 1], false)),
            // A resource without possible nodes.
            (vec![vec![]], hint(&[0, 1], false)),
            (vec![vec![], vec![hint(&[0], false), hint(&[1], false)]], hint(&[0], false)),
            // Preferred hints of different width do not make a preferred result.
            (vec![vec![a], vec![hint(&[0, 1], true)]], hint(&[0], false)),
            (vec![vec![hint(&[0, 1], true)], vec![hint(&[0, 1], true)]], hint(&[0, 1], true)),
        ] {
            let found = merged(TopologyPolicy::BestEffort, 2, &hints);
            assert_eq!(found, Some(expected), "{hints:?}");
            let admitted = merged(TopologyPolicy::Restricted, 2, &hints);
            assert_eq!(admitted, Some(expected).filter(|hint| hint.preferred), "{hints:?}");
        }
    }

    #[test]
    fn a_result_that_is_not_preferred_has_the_nodes_of_the_widest_need() {
        // The rule of the cases "bestNonPreferredAffinityCount" in upstream's policy_test.go, on four nodes.
        let of = |nodes: &[u32]| hint(nodes, false);
        let wide = vec![of(&[0, 1]), of(&[1, 2]), of(&[0, 1, 2, 3])];
        let narrow = vec![of(&[0]), of(&[1]), of(&[0, 1]), of(&[1, 2]), of(&[0, 1, 2, 3])];
        let found = merged(TopologyPolicy::BestEffort, 4, &[wide, narrow]);
        assert_eq!(found, Some(of(&[0, 1])));
        assert_eq!(
            merged(TopologyPolicy::BestEffort, 4, &[vec![of(&[0, 1, 2]), of(&[1, 2])]]),
            Some(of(&[1, 2]))
        );
    }

    #[test]
    fn a_single_node_is_required_or_any() {
        let single = TopologyPolicy::SingleNumaNode;
        assert_eq!(merged(single, 2, &[]), Some(hint(&[], true)));
        assert_eq!(
            merged(single, 2, &[vec![hint(&[1], true), hint(&[0, 1], false)]]),
            Some(hint(&[1], true))
        );
        assert_eq!(merged(single, 2, &[vec![hint(&[0, 1], true)]]), None);
        assert_eq!(merged(single, 2, &[vec![hint(&[0], false)]]), None);
        assert_eq!(merged(single, 2, &[vec![]]), None);
        assert_eq!(merged(single, 2, &[vec![hint(&[0], true)], vec![hint(&[1], true)]]), None);
        // On a machine with one node, its mask is the mask of the whole machine, so the affinity is any node.
        assert_eq!(merged(single, 1, &[vec![hint(&[0], true)]]), Some(hint(&[], true)));
    }

    #[test]
    fn the_nearest_nodes_are_preferred_if_distances_count() {
        // Nodes 0 and 3 are close to each other, as are nodes 1 and 2.
        let distance = |a: u32, b: u32| {
            if a == b {
                10
            } else if a + b == 3 {
                11
            } else {
                20
            }
        };
        let distances = (0..4).map(|a| (a, (0..4).map(|b| (b, distance(a, b))).collect())).collect();
        let numa = NumaNodes { distances: Some(distances), ..machine(4) };
        let hints = [vec![hint(&[0, 1], true), hint(&[0, 3], true), hint(&[1, 2], true)]];
        assert_eq!(TopologyPolicy::Restricted.merge(&numa, &hints), Some(hint(&[1, 2], true)));
        assert_eq!(TopologyPolicy::Restricted.merge(&machine(4), &hints), Some(hint(&[0, 1], true)));
    }

    #[test]
    fn many_resources_on_many_nodes_are_merged_quickly() {
        let mut all = Vec::new();
        crate::topology::numa_mask::for_each_mask(&[0, 1, 2, 3, 4, 5, 6, 7], |mask| {
            all.push(Hint { nodes: Some(mask), preferred: mask.count() == 1 });
        });
        // Upstream would visit 255 to the power of 6 combinations.
        let hints = vec![all; 6];
        assert_eq!(merged(TopologyPolicy::BestEffort, 8, &hints), Some(hint(&[0], true)));
        let count = combinations(NumaMask::of(0..8), &hints).len();
        assert!(count <= 2 * 256, "each resource costs 255 times {count} steps");
    }
}

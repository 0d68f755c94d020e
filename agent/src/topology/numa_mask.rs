//! A set of NUMA nodes as a bit mask.

use serde::{Deserialize, Serialize};

/// NUMA nodes from 0 to 63, one bit each. In JSON it is a list of numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(from = "Vec<u32>", into = "Vec<u32>")]
pub(crate) struct NumaMask(u64);

/// Highest number of a NUMA node that a mask can contain.
pub(crate) const MAX_NODE: u32 = 63;

// === impl NumaMask ===

impl NumaMask {
    /// The mask of these nodes. Numbers above [`MAX_NODE`] are left out.
    pub(crate) fn of(nodes: impl IntoIterator<Item = u32>) -> Self {
        let bits = nodes.into_iter().filter(|node| *node <= MAX_NODE).map(|node| 1_u64 << node);
        Self(bits.fold(0, |mask, bit| mask | bit))
    }

    pub(crate) fn contains(self, node: u32) -> bool {
        node <= MAX_NODE && self.0 & (1 << node) != 0
    }

    /// Number of nodes.
    pub(crate) fn count(self) -> usize {
        self.0.count_ones() as usize
    }

    pub(crate) fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// The nodes in ascending order. Only the bits that are set are visited, because the memory manager reads the nodes
    /// of each combination of nodes.
    pub(crate) fn nodes(self) -> impl Iterator<Item = u32> + Clone {
        let next = |left: u64| (left != 0).then_some(left);
        let masks = std::iter::successors(next(self.0), move |left| next(left & (left - 1)));
        masks.map(u64::trailing_zeros)
    }

    pub(crate) fn intersection(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    pub(crate) fn is_subset(self, other: Self) -> bool {
        self.0 & other.0 == self.0
    }

    /// Whether this mask has fewer nodes, or as many nodes with lower numbers.
    pub(crate) fn is_narrower_than(self, other: Self) -> bool {
        (self.count(), self) < (other.count(), other)
    }
}

impl From<Vec<u32>> for NumaMask {
    fn from(nodes: Vec<u32>) -> Self {
        Self::of(nodes)
    }
}

impl From<NumaMask> for Vec<u32> {
    fn from(mask: NumaMask) -> Self {
        mask.nodes().collect()
    }
}

/// Calls a function with each mask of some of these nodes: first the masks of one node, then the masks of two nodes,
/// and so on.
pub(crate) fn for_each_mask(nodes: &[u32], mut each: impl FnMut(NumaMask)) {
    for size in 1..=nodes.len() {
        combine(nodes, size, NumaMask::default(), &mut each);
    }
}

fn combine(nodes: &[u32], size: usize, chosen: NumaMask, each: &mut dyn FnMut(NumaMask)) {
    if size == 0 {
        each(chosen);
        return;
    }
    for (at, node) in nodes.iter().enumerate() {
        let rest = nodes.get(at + 1..).unwrap_or_default();
        if rest.len() + 1 < size {
            return;
        }
        combine(rest, size - 1, NumaMask(chosen.0 | NumaMask::of([*node]).0), each);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mask_is_narrower_with_fewer_or_lower_nodes() {
        let mask = |nodes: &[u32]| NumaMask::of(nodes.iter().copied());
        assert!(mask(&[3]).is_narrower_than(mask(&[0, 1])));
        assert!(mask(&[0, 2]).is_narrower_than(mask(&[1, 2])));
        assert!(!mask(&[1]).is_narrower_than(mask(&[1])));
        assert_eq!(mask(&[0, 63, 64]).nodes().collect::<Vec<_>>(), [0, 63]);
        assert_eq!((mask(&[0, 5, 63]).count(), mask(&[]).count(), mask(&[]).nodes().next()), (3, 0, None));
        assert!(mask(&[1]).is_subset(mask(&[0, 1])) && !mask(&[2]).is_subset(mask(&[0, 1])));
    }

    #[test]
    fn masks_are_visited_by_their_size() {
        let mut seen = Vec::new();
        for_each_mask(&[0, 1, 4], |mask| seen.push(mask.nodes().collect::<Vec<_>>()));
        assert_eq!(seen, [vec![0], vec![1], vec![4], vec![0, 1], vec![0, 4], vec![1, 4], vec![0, 1, 4]]);
    }
}

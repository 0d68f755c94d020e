//! The time to live that the number of nodes requires. No I/O.

use crate::object::Node;

/// Annotation of nodes: the time to live in seconds.
pub(crate) const TTL: &str = "node.alpha.kubernetes.io/ttl";

/// A time to live, with the numbers of nodes for which it is valid.
struct Step {
    min: usize,
    max: usize,
    seconds: u32,
}

/// The steps overlap, so that a cluster whose size varies around a limit keeps its time to live.
const STEPS: [Step; 5] = [
    Step { min: 0, max: 100, seconds: 0 },
    Step { min: 90, max: 500, seconds: 15 },
    Step { min: 450, max: 1000, seconds: 30 },
    Step { min: 900, max: 2000, seconds: 60 },
    Step { min: 1800, max: usize::MAX, seconds: 300 },
];

/// The number of nodes, and the current step. The step depends on the number and on the step before.
#[derive(Debug, Default)]
pub(crate) struct ClusterSize {
    nodes: usize,
    step: usize,
}

// === impl ClusterSize ===

impl ClusterSize {
    /// Counts a new node. Returns whether the time to live has changed.
    pub(crate) fn add(&mut self) -> bool {
        self.nodes += 1;
        let is_above = STEPS.get(self.step).is_some_and(|step| self.nodes > step.max);
        self.step += usize::from(is_above);
        is_above
    }

    /// Counts a deleted node. Returns whether the time to live has changed.
    pub(crate) fn remove(&mut self) -> bool {
        self.nodes = self.nodes.saturating_sub(1);
        let is_below = STEPS.get(self.step).is_some_and(|step| self.nodes < step.min);
        self.step -= usize::from(is_below);
        is_below
    }

    /// The time to live in seconds.
    pub(crate) fn seconds(&self) -> u32 {
        STEPS.get(self.step).map_or(0, |step| step.seconds)
    }
}

/// Whether a node does not have this time to live yet.
pub(crate) fn needs(node: &Node, seconds: u32) -> bool {
    let annotations = node.metadata.annotations.as_ref();
    annotations.and_then(|all| all.get(TTL)).is_none_or(|text| *text != seconds.to_string())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_time_grows_with_the_cluster_and_shrinks_later() {
        let mut size = ClusterSize::default();
        let mut grown = Vec::new();
        for nodes in 1..=2001 {
            if size.add() {
                grown.push((nodes, size.seconds()));
            }
        }
        assert_eq!(grown, [(101, 15), (501, 30), (1001, 60), (2001, 300)]);
        let mut shrunk = Vec::new();
        for nodes in (0..=2000).rev() {
            if size.remove() {
                shrunk.push((nodes, size.seconds()));
            }
        }
        assert_eq!(shrunk, [(1799, 60), (899, 30), (449, 15), (89, 0)]);
        assert!(!size.remove(), "there is no node left");
    }

    #[test]
    fn a_node_with_another_time_needs_a_write() {
        let node = |annotations: serde_json::Value| -> Node {
            serde_json::from_value(json!({"metadata": {"name": "n", "annotations": annotations}})).unwrap()
        };
        assert!(needs(&node(json!({})), 0) && needs(&node(json!({TTL: "15"})), 0));
        assert!(!needs(&node(json!({TTL: "15"})), 15));
    }
}

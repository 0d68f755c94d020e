//! The scores of a node, and their scale from 0 to [`MAX_NODE_SCORE`].

/// The best score. Source: `MaxNodeScore` of upstream's framework.
pub(crate) const MAX_NODE_SCORE: i64 = 100;

/// The scores of a node that depend on the pod and the node only, without weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct NodeScores {
    /// Number of taints, not normalized.
    pub(crate) taints: i64,
    /// Sum of the weights of terms, not normalized.
    pub(crate) node_affinity: i64,
    pub(crate) fit: i64,
    pub(crate) balanced: i64,
    /// Sum of the ranks of the chosen alternatives of device requests, not normalized. 0 for pods without such
    /// requests.
    pub(crate) devices: i64,
}

/// `part` of `whole` on the scale from 0 to [`MAX_NODE_SCORE`], rounded down; `whole` is above 0.
pub(crate) fn share(part: i128, whole: i128) -> i64 {
    i64::try_from(part * i128::from(MAX_NODE_SCORE) / whole).unwrap_or(i64::MAX)
}

/// Scores in proportion to the largest value. If `reverse`, the largest value gets the lowest score.
pub(crate) fn normalize(mut values: Vec<i64>, reverse: bool) -> Vec<i64> {
    let largest = values.iter().copied().max().unwrap_or_default();
    for value in &mut values {
        let score = if largest == 0 { 0 } else { *value * MAX_NODE_SCORE / largest };
        *value = if reverse { MAX_NODE_SCORE - score } else { score };
    }
    values
}

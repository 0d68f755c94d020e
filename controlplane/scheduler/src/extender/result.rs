//! The combined responses of the extenders.

use std::collections::{BTreeMap, HashMap};

use crate::refusal::Refused;

/// The responses of all extenders about the nodes for a pod.
#[derive(Debug, Default)]
pub(crate) struct ExtenderResult {
    /// The nodes that all extenders accept, with the weighted sum of their scores.
    pub(crate) scores: HashMap<String, i64>,
    pub(crate) refused: BTreeMap<String, Refused>,
}

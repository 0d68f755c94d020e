//! Constraints between pods: affinity, anti-affinity and topology spread.
//!
//! These need the pods of all nodes. What a pod needs of them is computed once, before its nodes are filtered. A pod
//! without such constraints costs only a look at the pods that have required anti-affinity.

mod affinity;
mod spread;
mod term;

use crate::filter::Refusal;
use crate::object::Pod;
use crate::snapshot::{Candidate, Snapshot};

pub(crate) use term::{Labels, Term, anti_affinity};

/// What the constraints of a pod need of the other pods.
#[derive(Debug, Default)]
pub(crate) struct Topology {
    affinity: affinity::Affinity,
    spread: spread::Spread,
}

impl Topology {
    /// Reads the pods of all nodes.
    pub(crate) fn of(pod: &Pod, snapshot: &Snapshot) -> Self {
        Self { affinity: affinity::Affinity::of(pod, snapshot), spread: spread::Spread::of(pod, snapshot) }
    }

    /// Why the node cannot run the pod. Empty if it can.
    pub(crate) fn refusals(&self, node: Candidate<'_>) -> Vec<Refusal> {
        let refusal = self.spread.refuse(node).or_else(|| self.affinity.refuse(node));
        refusal.map(str::to_owned).into_iter().collect()
    }

    /// Scores of nodes by preferred affinity.
    pub(crate) fn affinity_scores(&self, nodes: &[Candidate<'_>]) -> Vec<i64> {
        self.affinity.scores(nodes)
    }

    /// Scores of nodes by preferred spread.
    pub(crate) fn spread_scores(&self, nodes: &[Candidate<'_>]) -> Vec<i64> {
        self.spread.scores(nodes)
    }
}

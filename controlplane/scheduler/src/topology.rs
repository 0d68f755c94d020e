//! Constraints between pods: affinity, anti-affinity and topology spread.
//!
//! The constraints depend on the pods of all nodes. The counts for a pod are computed once, before its nodes are
//! filtered. For a pod without such constraints only the terms of pods with affinity or anti-affinity are read.

mod affinity;
mod spread;

use crate::config::Profile;
use crate::hint::Changes;
use crate::object::Pod;
use crate::placed::Placed;
use crate::refusal::Refused;
use crate::snapshot::{Candidate, Snapshot};

/// Counts of other pods by topology domain, for the spread constraints and the affinity of one pod.
#[derive(Debug, Default)]
pub(crate) struct Topology {
    affinity: affinity::Affinity,
    spread: spread::Spread,
}

/// A pod that is added to a node or removed from it.
#[derive(Clone, Copy)]
pub(crate) struct PodChange<'a> {
    pub(crate) node: Candidate<'a>,
    pub(crate) other: &'a Placed,
    pub(crate) is_added: bool,
}

// === impl Topology ===

impl Topology {
    /// Reads the pods of all nodes.
    pub(crate) fn of(pod: &Pod, profile: &Profile, snapshot: &Snapshot) -> Self {
        Self {
            affinity: affinity::Affinity::of(pod, &profile.affinity, snapshot),
            spread: spread::Spread::of(pod, &profile.spread, snapshot),
        }
    }

    /// Counts another pod that is added or removed, for the filter of `pod`. The pods of other nodes are not read.
    pub(crate) fn update(&mut self, pod: &Pod, change: PodChange<'_>, snapshot: &Snapshot) {
        let PodChange { node, other, is_added } = change;
        self.affinity.update(node, other, snapshot, if is_added { 1 } else { -1 });
        self.spread.update(pod, node, other, if is_added { 1 } else { -1 });
    }

    /// Whether the filters accept every node, independently of the pods on it.
    pub(crate) fn accepts_all(&self) -> bool {
        self.affinity.is_skipped() && self.spread.has_no_filter()
    }

    /// Whether upstream skips the affinity filter for the pod.
    pub(crate) fn skips_affinity(&self) -> bool {
        self.affinity.is_skipped()
    }

    /// Whether upstream skips the spread filter for the pod.
    pub(crate) fn skips_spread(&self) -> bool {
        self.spread.has_no_filter()
    }

    /// Whether the spread constraints prefer some nodes.
    pub(crate) fn prefers_spread(&self) -> bool {
        self.spread.has_score()
    }

    /// Whether affinity terms prefer some domains.
    pub(crate) fn prefers_domains(&self) -> bool {
        self.affinity.has_score()
    }

    /// Makes the affinity filter accept every node. The caller uses this if upstream skipped the filter before pods
    /// were added.
    pub(crate) fn skip_affinity(&mut self) {
        self.affinity.skip();
    }

    /// Whether the filters have the same input as with `other`.
    #[cfg(test)]
    pub(crate) fn filters_as(&self, other: &Self) -> bool {
        self.affinity.filters_as(&other.affinity) && self.spread.filters_as(&other.spread)
    }

    /// The reason why the node cannot run the pod. `None` if the node can run it.
    pub(crate) fn refuse(&self, profile: &Profile, node: Candidate<'_>) -> Option<Refused> {
        let by = |plugin: &'static str| profile.filters_by(plugin).then_some(plugin);
        let refusal = by("PodTopologySpread").and_then(|plugin| Some((plugin, self.spread.refuse(node)?)));
        let refusal = refusal.or_else(|| {
            let plugin = by("InterPodAffinity")?;
            Some((plugin, self.affinity.refuse(node)?))
        });
        refusal.map(|(plugin, (reason, resolvable))| Refused {
            plugin,
            reasons: vec![reason.to_owned()],
            resolvable,
            helped_by: Changes::ALL,
        })
    }

    /// Scores of nodes by preferred affinity.
    pub(crate) fn affinity_scores(&self, nodes: &[Candidate<'_>]) -> Vec<i64> {
        self.affinity.scores(nodes)
    }

    /// Scores of nodes by preferred spread.
    pub(crate) fn spread_scores(&self, pod: &Pod, nodes: &[Candidate<'_>], snapshot: &Snapshot) -> Vec<i64> {
        self.spread.scores(pod, nodes, snapshot)
    }

    #[cfg(test)]
    fn refusals(&self, node: Candidate<'_>) -> Vec<String> {
        self.refuse(&Profile::default(), node).map(|refused| refused.reasons).unwrap_or_default()
    }
}

//! The search for the nodes that pass the filters.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use super::evaluations::Computed;
use super::{Prepared, Unschedulable, filter_failed, node_outcome, refuse_by_others};
use crate::config::{MIN_FEASIBLE_NODES, Profile};
use crate::hint::Changes;
use crate::memo::{NodeOutcome, Table};
use crate::node_score::NodeScores;
use crate::object::Pod;
use crate::refusal::Refused;
use crate::snapshot::{Candidate, Snapshot};

/// Reason for nodes that are not named in the pod's node affinity.
const NOT_NAMED: &str = "node(s) didn't satisfy plugin(s) [NodeAffinity]";

/// The nodes that cannot run a pod. Each node is in the list once. The refusals are shared with the results for equal
/// pods and not copied. Most pods find a node, so most refusals are never read.
pub(super) type RefusedNodes<'a> = Vec<(&'a str, Arc<Refused>)>;

/// A search for nodes that can run a pod.
pub(super) struct Search<'s, 'a> {
    pub(super) pod: &'s Pod,
    pub(super) profile: &'s Profile,
    pub(super) snapshot: &'a Snapshot,
    pub(super) prepared: &'s Prepared,
    /// Whether filters and scores read more than the node itself.
    pub(super) reads_others: bool,
    /// Results for equal pods.
    pub(super) outcomes: &'s mut Table<NodeOutcome>,
    /// Nodes that are already refused.
    pub(super) refused_by_nominated: HashMap<String, Refused>,
    /// The pod's nominated node, after it was checked.
    pub(super) checked: Option<&'a str>,
    pub(super) fitting: Vec<Candidate<'a>>,
    pub(super) scores: Vec<NodeScores>,
    pub(super) refused: RefusedNodes<'a>,
    pub(super) computed: Computed,
}

/// The number of fitting nodes at which the search ends.
pub(super) fn wanted_nodes(percentage: u8, total: usize) -> usize {
    let percentage = match percentage {
        0 => 50_usize.saturating_sub(total / 125).max(5),
        percentage => percentage.into(),
    };
    (total * percentage / 100).max(MIN_FEASIBLE_NODES)
}

/// Adds the refusals of the nodes that the pod's node affinity does not name. Only messages need these refusals. A
/// nominated node already has the refusal of a filter.
pub(super) fn refuse_unnamed<'a>(
    named: &BTreeSet<&str>,
    snapshot: &'a Snapshot,
    refused: &mut RefusedNodes<'a>,
) {
    let names = snapshot.candidates().map(|node| node.properties.name.as_str());
    let reasons = vec![NOT_NAMED.to_owned()];
    let plugin = "NodeAffinity";
    let refusal = Arc::new(Refused { plugin, reasons, resolvable: false, helped_by: Changes::NODE });
    let known: BTreeSet<&str> = refused.iter().map(|(name, _)| *name).collect();
    let others = names.filter(|name| !named.contains(name) && !known.contains(name));
    refused.extend(others.map(|name| (name, refusal.clone())));
}

// === impl Search ===

impl<'a> Search<'_, 'a> {
    /// Checks the pod's nominated node. If this node fits, no other node is checked: pods may have been evicted there
    /// for the pod. Source: `evaluateNominatedNode` of upstream.
    pub(super) fn check_nominated(&mut self) {
        let snapshot = self.snapshot;
        let name = self.pod.status.nominated_node_name.as_deref();
        let Some(node) = name.and_then(|name| snapshot.candidate(name)) else { return };
        // As upstream, an error does not end the search here. The search of all nodes reports it.
        if self.check(node).is_ok() {
            self.checked = Some(node.properties.name.as_str());
        }
    }

    /// Checks nodes until `wanted` of them can run the pod. The next search continues where this one ends, so that no
    /// node is preferred.
    pub(super) fn check_all(&mut self, wanted: usize) -> Result<(), Unschedulable> {
        let snapshot = self.snapshot;
        if wanted >= snapshot.node_count() {
            return snapshot.candidates().try_for_each(|node| self.check(node));
        }
        let start = snapshot.search_start.borrow().clone();
        let mut next = None;
        for node in snapshot.candidates_from(&start) {
            if self.fitting.len() >= wanted {
                next = Some(node.properties.name.clone());
                break;
            }
            self.check(node)?;
        }
        *snapshot.search_start.borrow_mut() = next.unwrap_or(start);
        Ok(())
    }

    /// Checks only these nodes.
    pub(super) fn check_named(&mut self, named: &BTreeSet<&str>, wanted: usize) -> Result<(), Unschedulable> {
        let snapshot = self.snapshot;
        for node in named.iter().filter_map(|name| snapshot.candidate(name)) {
            if self.fitting.len() >= wanted {
                break;
            }
            self.check(node)?;
        }
        Ok(())
    }

    fn check(&mut self, node: Candidate<'a>) -> Result<(), Unschedulable> {
        let (pod, profile, prepared) = (self.pod, self.profile, self.prepared);
        let name = node.properties.name.as_str();
        if self.checked == Some(name) {
            return Ok(());
        }
        // Skip the look-up in an empty map, because it would compute the hash of the name.
        let is_known = !self.refused_by_nominated.is_empty();
        let known = if is_known { self.refused_by_nominated.remove(name) } else { None };
        let mut outcome = match known {
            Some(refusal) => Err(Arc::new(refusal)),
            None => {
                let mut is_new = false;
                let compute = || {
                    is_new = true;
                    node_outcome(pod, profile, &prepared.needs, node)
                };
                let outcome = self.outcomes.get(node.info.version(), compute).clone();
                if is_new {
                    self.computed.add_of_node(&outcome);
                }
                outcome
            }
        };
        if outcome.is_ok() && self.reads_others {
            let refusal = refuse_by_others(profile, prepared, node, self.snapshot)
                .map_err(|why| filter_failed(&why))?;
            self.computed.add_of_others(refusal.as_ref());
            outcome = refusal.map_or(outcome, |refusal| Err(Arc::new(refusal)));
        }
        match outcome {
            Ok(found) => {
                self.fitting.push(node);
                let devices = &self.snapshot.devices;
                let devices =
                    if self.reads_others { devices.score(&prepared.devices, node.properties) } else { 0 };
                self.scores.push(NodeScores { devices, ..found });
            }
            Err(refusal) => self.refused.push((name, refusal)),
        }
        Ok(())
    }
}

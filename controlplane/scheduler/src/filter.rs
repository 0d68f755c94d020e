//! Filters: whether a node can run a pod. One file per filter.

mod host_ports;
pub(crate) mod node_affinity;
mod node_name;
pub(crate) mod resources;
mod taints;
mod unschedulable;

use crate::config::Profile;
use crate::hint::Changes;
use crate::object::Pod;
use crate::snapshot::Candidate;

/// Why a node cannot run a pod, with upstream's text.
pub(crate) type Refusal = String;

type Filter = fn(&Pod, Candidate<'_>) -> Vec<Refusal>;

/// The filters whose refusals other pods have no part in.
const FIXED: [Filter; 4] = [unschedulable::refuse, node_name::refuse, taints::refuse, node_affinity::refuse];

/// The filters that depend on the pods of the node.
const BY_PODS: [Filter; 2] = [host_ports::refuse, resources::refuse];

/// Whether the node refuses the pod at most for reasons that the removal of other pods can change.
pub(crate) fn resolvable_refusals(pod: &Pod, profile: &Profile, node: Candidate<'_>) -> bool {
    node_affinity::refuse_by_profile(profile, node).is_empty()
        && FIXED.iter().all(|filter| filter(pod, node).is_empty())
}

/// The reasons of the first filter that refuses the pod, with the changes that may help. Empty if the node can run it.
pub(crate) fn refusals(pod: &Pod, profile: &Profile, node: Candidate<'_>) -> (Vec<Refusal>, Changes) {
    let first = |filters: &[Filter]| {
        filters.iter().map(|filter| filter(pod, node)).find(|reasons| !reasons.is_empty())
    };
    // Cheap filters that exclude many nodes come first.
    if let Some(reasons) = first(&FIXED) {
        return (reasons, Changes::NODE);
    }
    let enforced = node_affinity::refuse_by_profile(profile, node);
    if !enforced.is_empty() {
        return (enforced, Changes::NODE);
    }
    (first(&BY_PODS).unwrap_or_default(), Changes::NODE | Changes::POD_GONE)
}

//! Filters: whether a node can run a pod. One file per filter.

mod host_ports;
pub(crate) mod node_affinity;
mod node_name;
pub(crate) mod resources;
mod taints;
mod unschedulable;

use crate::object::Pod;
use crate::snapshot::Candidate;

/// Why a node cannot run a pod, with upstream's text.
pub(crate) type Refusal = String;

/// The filters. Cheap ones that exclude many nodes come first.
const FILTERS: [fn(&Pod, Candidate<'_>) -> Vec<Refusal>; 6] = [
    unschedulable::refuse,
    node_name::refuse,
    taints::refuse,
    node_affinity::refuse,
    host_ports::refuse,
    resources::refuse,
];

/// The filters whose refusals other pods have no part in.
const FIXED: [fn(&Pod, Candidate<'_>) -> Vec<Refusal>; 4] =
    [unschedulable::refuse, node_name::refuse, taints::refuse, node_affinity::refuse];

/// Whether the node refuses the pod at most for reasons that the removal of other pods can change.
pub(crate) fn resolvable_refusals(pod: &Pod, node: Candidate<'_>) -> bool {
    FIXED.iter().all(|filter| filter(pod, node).is_empty())
}

/// The reasons of the first filter that refuses the pod. Empty if the node can run it.
pub(crate) fn refusals(pod: &Pod, node: Candidate<'_>) -> Vec<Refusal> {
    FILTERS.iter().map(|filter| filter(pod, node)).find(|reasons| !reasons.is_empty()).unwrap_or_default()
}

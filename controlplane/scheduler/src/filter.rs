//! Whether a node can take a pod: one reason to refuse a file.

mod host_ports;
mod node_affinity;
mod node_name;
mod resources;
mod taints;
mod unschedulable;

use crate::object::Pod;
use crate::snapshot::Candidate;

/// Why a node does not take a pod, in the words of upstream.
pub(crate) type Refusal = String;

/// The filters, the cheap and decisive first.
const FILTERS: [fn(&Pod, Candidate<'_>) -> Vec<Refusal>; 6] = [
    unschedulable::refuse,
    node_name::refuse,
    taints::refuse,
    node_affinity::refuse,
    host_ports::refuse,
    resources::refuse,
];

/// The reasons of the first filter that refuses; none: the node can take the pod.
pub(crate) fn refusals(pod: &Pod, node: Candidate<'_>) -> Vec<Refusal> {
    FILTERS.iter().map(|filter| filter(pod, node)).find(|reasons| !reasons.is_empty()).unwrap_or_default()
}

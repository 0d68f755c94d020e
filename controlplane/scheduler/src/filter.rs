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

/// A refusal of a pod by a filter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Refused {
    pub(crate) reasons: Vec<Refusal>,
    /// Whether the removal of other pods can change the refusal. Upstream calls other refusals unresolvable.
    pub(crate) resolvable: bool,
    /// The changes that may help.
    pub(crate) helped_by: Changes,
}

type Filter = fn(&Pod, Candidate<'_>) -> Vec<Refusal>;

/// The filters that do not depend on other pods, in upstream's order.
const FIXED: [(&str, Filter); 3] = [
    ("NodeUnschedulable", unschedulable::refuse),
    ("NodeName", node_name::refuse),
    ("TaintToleration", taints::refuse),
];

/// The refusal of the first of these filters that refuses the pod. `None` if none refuses it.
pub(crate) fn refuse(pod: &Pod, profile: &Profile, node: Candidate<'_>) -> Option<Refused> {
    let fixed = FIXED.iter().filter(|(plugin, _)| profile.filters_by(plugin));
    let mut fixed = fixed.map(|(_, filter)| filter(pod, node)).find(|reasons| !reasons.is_empty());
    if fixed.is_none() && profile.filters_by("NodeAffinity") {
        let enforced = node_affinity::refuse_by_profile(profile, node);
        fixed = Some(if enforced.is_empty() { node_affinity::refuse(pod, node) } else { enforced });
    }
    if let Some(reasons) = fixed.filter(|reasons| !reasons.is_empty()) {
        return Some(Refused { reasons, resolvable: false, helped_by: Changes::NODE });
    }
    let helped_by = Changes::NODE | Changes::POD_GONE;
    if profile.filters_by("NodePorts") {
        let reasons = host_ports::refuse(pod, node);
        if !reasons.is_empty() {
            return Some(Refused { reasons, resolvable: true, helped_by });
        }
    }
    if !profile.filters_by("NodeResourcesFit") {
        return None;
    }
    let (reasons, resolvable) = resources::refuse(pod, &profile.fit, node);
    (!reasons.is_empty()).then_some(Refused { reasons, resolvable, helped_by })
}

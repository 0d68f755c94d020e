//! Filters decide whether a node can run a pod. One file per filter.

pub(crate) mod declared_features;
mod host_ports;
pub(crate) mod node_affinity;
mod node_name;
pub(crate) mod resources;
mod taints;
mod unschedulable;

use crate::config::Profile;
use crate::devices::is_extended;
use crate::hint::Changes;
use crate::object::Pod;
use crate::refusal::{Refusal, Refused};
use crate::request::PodRequirements;
use crate::snapshot::Candidate;

type Filter = fn(&Pod, Candidate<'_>) -> Vec<Refusal>;

/// The first filters in upstream's order. They read neither other pods nor the profile. NodeAffinity follows them in
/// [`refuse`]; NodeDeclaredFeatures has a later place in the order.
const FIXED: [(&str, Filter); 3] = [
    ("NodeUnschedulable", unschedulable::refuse),
    ("NodeName", node_name::refuse),
    ("TaintToleration", taints::refuse),
];

/// The refusal of the first filter that refuses the pod. `None` if no filter refuses it. `needs` has the requirements
/// of the pod.
pub(crate) fn refuse(
    pod: &Pod,
    needs: &PodRequirements,
    profile: &Profile,
    node: Candidate<'_>,
) -> Option<Refused> {
    let fixed = FIXED.iter().filter(|(plugin, _)| profile.filters_by(plugin));
    let mut fixed =
        fixed.map(|(plugin, filter)| (*plugin, filter(pod, node))).find(|(_, reasons)| !reasons.is_empty());
    if fixed.is_none() && profile.filters_by("NodeAffinity") {
        let enforced = node_affinity::refuse_by_profile(profile, node);
        let reasons = if enforced.is_empty() { node_affinity::refuse(pod, node) } else { enforced };
        fixed = Some(("NodeAffinity", reasons));
    }
    if let Some((plugin, reasons)) = fixed.filter(|(_, reasons)| !reasons.is_empty()) {
        return Some(Refused { plugin, reasons, resolvable: false, helped_by: Changes::NODE });
    }
    let helped_by = Changes::NODE | Changes::POD_GONE;
    if profile.filters_by("NodePorts") {
        let reasons = host_ports::refuse(&needs.ports, node);
        if !reasons.is_empty() {
            return Some(Refused { plugin: "NodePorts", reasons, resolvable: true, helped_by });
        }
    }
    if !profile.filters_by("NodeResourcesFit") {
        return None;
    }
    let (reasons, resolvable) = resources::refuse(needs, &profile.fit, node);
    // Retry the pod after changes of device classes: a new class may provide an extended resource.
    let has_extended = needs.requests.others.keys().any(|name| is_extended(name));
    let helped_by = if has_extended { helped_by | Changes::DEVICES } else { helped_by };
    let plugin = "NodeResourcesFit";
    (!reasons.is_empty()).then_some(Refused { plugin, reasons, resolvable, helped_by })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture;
    use serde_json::json;

    #[test]
    fn requests_and_ports_are_read_once_for_all_nodes() {
        let pod = |cpu: &str| {
            let resources = json!({"requests": {"cpu": cpu}});
            fixture::pod(
                "p",
                json!({"containers": [{"resources": resources, "ports": [{"containerPort": 80, "hostPort": 80}]}]}),
            )
        };
        let mut snapshot = fixture::snapshot(&[fixture::node("a", json!({}))]);
        snapshot.place(
            &fixture::pod(
                "other",
                json!({"containers": [{"ports": [{"containerPort": 80, "hostPort": 80}]}]}),
            ),
            "a",
        );
        let node = snapshot.candidates().next().unwrap();
        let refused = |needs: &PodRequirements| refuse(&pod("64"), needs, &Profile::default(), node);
        assert_eq!(refused(&PodRequirements::default()), None, "the filters read the needs, not the pod");
        let ports =
            PodRequirements { ports: PodRequirements::of(&pod("1")).ports, ..PodRequirements::default() };
        assert!(refused(&ports).unwrap().reasons[0].contains("free ports"));
        let requests = PodRequirements {
            requests: PodRequirements::of(&pod("64")).requests,
            ..PodRequirements::default()
        };
        assert_eq!(refused(&requests).unwrap().reasons, ["Insufficient cpu"]);
    }
}

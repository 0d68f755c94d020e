//! Filter NodeResourcesFit: requests may not exceed what the node has free.

use super::Refusal;
use crate::object::Pod;
use crate::request::of_pod;
use crate::snapshot::{Candidate, Facts};
use coracle_values::pod_resources::Resources;

pub(crate) fn refuse(pod: &Pod, node: Candidate<'_>) -> Vec<Refusal> {
    insufficient(pod, node.facts, &node.info.requested)
}

/// The resources that a node lacks for the pod when so much of them is requested.
pub(crate) fn insufficient(pod: &Pod, facts: &Facts, given: &Resources) -> Vec<Refusal> {
    let wanted = of_pod(pod);
    let has = &facts.allocatable;
    let mut reasons = Vec::new();
    if given.pods + 1 > has.pods {
        reasons.push("Too many pods".to_owned());
    }
    let named = [
        ("cpu", wanted.cpu_millis, has.cpu_millis - given.cpu_millis),
        ("memory", wanted.memory, has.memory - given.memory),
        ("ephemeral-storage", wanted.ephemeral_storage, has.ephemeral_storage - given.ephemeral_storage),
    ];
    let others = wanted.others.iter().map(|(name, amount)| {
        let of = |map: &std::collections::BTreeMap<String, i128>| map.get(name).copied().unwrap_or_default();
        (name.as_str(), *amount, of(&has.others) - of(&given.others))
    });
    for (name, amount, free) in named.into_iter().chain(others) {
        if amount > 0 && amount > free {
            reasons.push(format!("Insufficient {name}"));
        }
    }
    reasons
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture;
    use serde_json::{Value, json};

    fn pod(name: &str, requests: Value) -> Pod {
        fixture::pod(name, json!({"containers": [{"resources": {"requests": requests}}]}))
    }

    #[test]
    fn every_insufficient_resource_is_named() {
        let mut snapshot = fixture::snapshot(&[fixture::node("a", json!({"/status/allocatable/pods": "2"}))]);
        snapshot.place(&pod("first", json!({"cpu": "3"})), "a");
        let reasons = |pod: &Pod, snapshot: &crate::snapshot::Snapshot| {
            refuse(pod, snapshot.candidates().next().unwrap()).join(", ")
        };
        assert_eq!(reasons(&pod("p", json!({"cpu": "1", "memory": "8Gi"})), &snapshot), "");
        let greedy = pod("p", json!({"cpu": "1001m", "memory": "9Gi", "x.io/gpu": "1"}));
        assert_eq!(
            reasons(&greedy, &snapshot),
            "Insufficient cpu, Insufficient memory, Insufficient x.io/gpu"
        );
        snapshot.place(&pod("second", json!({})), "a");
        assert_eq!(reasons(&pod("p", json!({})), &snapshot), "Too many pods");
    }
}

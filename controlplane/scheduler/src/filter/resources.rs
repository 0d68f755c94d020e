//! Filter NodeResourcesFit: requests may not exceed the free resources of the node.

use coracle_values::pod_resources::Resources;

use super::Refusal;
use crate::config::Fit;
use crate::snapshot::Candidate;

/// The resources that the node lacks, and whether it would have enough of them without other pods.
pub(crate) fn refuse(wanted: &Resources, fit: &Fit, node: Candidate<'_>) -> (Vec<Refusal>, bool) {
    let (has, given) = (&node.properties.allocatable, &node.info.requested);
    let (mut reasons, mut resolvable) = (Vec::new(), true);
    if given.pods + 1 > has.pods {
        reasons.push("Too many pods".to_owned());
    }
    let named = [
        ("cpu", wanted.cpu_millis, has.cpu_millis, given.cpu_millis),
        ("memory", wanted.memory, has.memory, given.memory),
        ("ephemeral-storage", wanted.ephemeral_storage, has.ephemeral_storage, given.ephemeral_storage),
    ];
    let others = wanted.others.iter().filter(|(name, _)| !fit.ignores(name)).map(|(name, amount)| {
        let of = |map: &std::collections::BTreeMap<String, i128>| map.get(name).copied().unwrap_or_default();
        (name.as_str(), *amount, of(&has.others), of(&given.others))
    });
    for (name, amount, has, given) in named.into_iter().chain(others) {
        if amount > 0 && amount > has - given {
            reasons.push(format!("Insufficient {name}"));
            resolvable &= amount <= has;
        }
    }
    (reasons, resolvable)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture;
    use crate::object::Pod;
    use crate::request::of_pod;
    use serde_json::{Value, json};

    fn pod(name: &str, requests: Value) -> Pod {
        fixture::pod(name, json!({"containers": [{"resources": {"requests": requests}}]}))
    }

    #[test]
    fn every_insufficient_resource_is_named() {
        let mut snapshot = fixture::snapshot(&[fixture::node("a", json!({"/status/allocatable/pods": "2"}))]);
        snapshot.place(&pod("first", json!({"cpu": "3"})), "a");
        let reasons = |pod: &Pod, snapshot: &crate::snapshot::Snapshot| {
            let node = snapshot.candidates().next().unwrap();
            refuse(&of_pod(pod), &Fit::default(), node).0.join(", ")
        };
        assert_eq!(reasons(&pod("p", json!({"cpu": "1", "memory": "8Gi"})), &snapshot), "");
        let greedy = pod("p", json!({"cpu": "1001m", "memory": "9Gi", "x.io/gpu": "1"}));
        assert_eq!(
            reasons(&greedy, &snapshot),
            "Insufficient cpu, Insufficient memory, Insufficient x.io/gpu"
        );
        let node = snapshot.candidates().next().unwrap();
        assert!(!refuse(&of_pod(&greedy), &Fit::default(), node).1, "the node never has 9 GiB");
        assert!(refuse(&of_pod(&pod("p", json!({"cpu": "2"}))), &Fit::default(), node).1);
        snapshot.place(&pod("second", json!({})), "a");
        assert_eq!(reasons(&pod("p", json!({})), &snapshot), "Too many pods");
    }
}

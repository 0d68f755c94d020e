//! Filter NodeResourcesFit: requests must not exceed the free resources of the node.

use super::Refusal;
use crate::config::Fit;
use crate::request::PodRequirements;
use crate::snapshot::Candidate;

/// Maximum number of reasons of a refusal. A pod can request tens of thousands of resources, and the scheduler stores
/// the refusals of all nodes.
const MAX_REASONS: usize = 20;

/// A reason for each resource that the node lacks, up to [`MAX_REASONS`]. The flag is true if the node would have
/// enough resources without its pods.
pub(crate) fn refuse(needs: &PodRequirements, fit: &Fit, node: Candidate<'_>) -> (Vec<Refusal>, bool) {
    let wanted = &needs.requests;
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
    // The filter of devices decides about resources that the node provides by devices.
    let by_devices = |name: &String| {
        needs.of_classes.contains(name) && has.others.get(name).is_none_or(|amount| *amount == 0)
    };
    let others = wanted.others.iter().filter(|(name, _)| !fit.ignores(name) && !by_devices(name));
    let others = others.map(|(name, amount)| {
        let of = |map: &std::collections::BTreeMap<String, i128>| map.get(name).copied().unwrap_or_default();
        (name.as_str(), *amount, of(&has.others), of(&given.others))
    });
    for (name, amount, has, given) in named.into_iter().chain(others) {
        if amount > 0 && amount > has - given {
            if reasons.len() < MAX_REASONS {
                reasons.push(format!("Insufficient {name}"));
            }
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
    use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
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
            refuse(&PodRequirements::of(pod), &Fit::default(), node).0.join(", ")
        };
        assert_eq!(reasons(&pod("p", json!({"cpu": "1", "memory": "8Gi"})), &snapshot), "");
        let greedy = pod("p", json!({"cpu": "1001m", "memory": "9Gi", "x.io/gpu": "1"}));
        assert_eq!(
            reasons(&greedy, &snapshot),
            "Insufficient cpu, Insufficient memory, Insufficient x.io/gpu"
        );
        let node = snapshot.candidates().next().unwrap();
        assert!(!refuse(&PodRequirements::of(&greedy), &Fit::default(), node).1, "the node never has 9 GiB");
        let other = PodRequirements::of(&pod("p", json!({"cpu": "2"})));
        assert!(refuse(&other, &Fit::default(), node).1);
        snapshot.place(&pod("second", json!({})), "a");
        assert_eq!(reasons(&pod("p", json!({})), &snapshot), "Too many pods");
    }

    #[test]
    fn a_refusal_has_a_limited_number_of_reasons() {
        let mut node = fixture::node("a", json!({}));
        let allocatable = node.status.allocatable.get_or_insert_default();
        let name = |number: usize| format!("x.io/r{number:05}");
        allocatable.extend((0..50_000).map(|number| (name(number), Quantity("2".to_owned()))));
        let mut snapshot = fixture::snapshot(&[node]);
        let of = |amount: &str| -> Value {
            (0..50_000).map(|number| (name(number), Value::from(amount))).collect()
        };
        snapshot.place(&pod("first", of("1")), "a");
        let candidate = snapshot.candidates().next().unwrap();
        let (reasons, resolvable) =
            refuse(&PodRequirements::of(&pod("p", of("2"))), &Fit::default(), candidate);
        assert_eq!((reasons.len(), reasons[0].as_str()), (MAX_REASONS, "Insufficient x.io/r00000"));
        assert!(resolvable);
        // The flag depends on all resources, also on those above the maximum.
        let mut wanted = of("2");
        wanted[name(49_999)] = "3".into();
        let needs = PodRequirements::of(&pod("p", wanted));
        assert!(!refuse(&needs, &Fit::default(), candidate).1);
    }

    #[test]
    fn resources_of_device_classes_are_left_to_devices_on_nodes_without_a_device_plugin() {
        let allocatable = |gpus: &str| json!({"/status/allocatable": {"pods": "10", "x.io/gpu": gpus}});
        let snapshot = fixture::snapshot(&[
            fixture::node("none", json!({})),
            fixture::node("one", allocatable("1")),
            fixture::node("zero", allocatable("0")),
        ]);
        let mut needs = PodRequirements::of(&pod("p", json!({"x.io/gpu": "2"})));
        let fitting = |needs: &PodRequirements| -> Vec<String> {
            let fits = |node: &Candidate<'_>| refuse(needs, &Fit::default(), *node).0.is_empty();
            snapshot.candidates().filter(fits).map(|node| node.properties.name.clone()).collect()
        };
        assert!(fitting(&needs).is_empty());
        needs.of_classes.insert("x.io/gpu".to_owned());
        assert_eq!(fitting(&needs), ["none", "zero"]);
    }
}

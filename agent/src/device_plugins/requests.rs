//! Devices that the containers of a pod request. Pure.

use std::collections::BTreeMap;

use coracle_values::CollectMap;
use coracle_values::names::is_extended_resource;
use coracle_values::quantity::value_of;
use k8s_openapi::api::core::v1::{Container, Pod};

/// Numbers of devices by resource.
pub(super) type Numbers = BTreeMap<String, usize>;

/// The devices of a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) container: String,
    pub(super) numbers: Numbers,
    /// Whether the container ends before the next one starts. Then the next container can get its devices.
    pub(super) ends_first: bool,
}

/// The requests of a pod in the order in which the kubelet allocates: init containers first. Containers without devices
/// are left out.
pub(super) fn of_pod(pod: &Pod) -> Vec<Request> {
    let Some(spec) = &pod.spec else { return Vec::new() };
    let is_sidecar = |init: &Container| init.restart_policy.as_deref() == Some("Always");
    let inits = spec.init_containers.iter().flatten().map(|init| (init, !is_sidecar(init)));
    let all = inits.chain(spec.containers.iter().map(|container| (container, false)));
    let requests = all.map(|(container, ends_first)| Request {
        container: container.name.clone(),
        numbers: of_container(pod, container),
        ends_first,
    });
    requests.filter(|request| !request.numbers.is_empty()).collect()
}

/// The largest numbers of devices that a pod needs at the same time. While a container runs, sidecars and other
/// containers before it keep their devices.
pub(super) fn at_once(requests: &[Request]) -> Numbers {
    let (mut kept, mut most) = (Numbers::new(), Numbers::new());
    for request in requests {
        for (resource, number) in &request.numbers {
            let before = kept.get(resource).copied().unwrap_or_default();
            let now = before.saturating_add(*number);
            if !request.ends_first {
                kept.insert(resource.clone(), now);
            }
            let most = most.entry(resource.clone()).or_default();
            *most = now.max(*most);
        }
    }
    most
}

/// The extended resources of a container, without those for which the scheduler has allocated devices of a
/// ResourceClaim. Extended resources cannot be overcommitted, so their limits equal their requests.
pub(super) fn of_container(pod: &Pod, container: &Container) -> Numbers {
    let claim = pod.status.as_ref().and_then(|status| status.extended_resource_claim_status.as_ref());
    let is_claimed = |resource: &str| {
        let mut mappings = claim.into_iter().flat_map(|claim| &claim.request_mappings);
        mappings.any(|one| one.container_name == container.name && one.resource_name == resource)
    };
    let limits = container.resources.iter().flat_map(|resources| resources.limits.iter().flatten());
    let extended = limits.filter(|(name, _)| is_extended_resource(name) && !is_claimed(name));
    let numbers =
        extended.map(|(name, amount)| (name.clone(), usize::try_from(value_of(amount)).unwrap_or(0)));
    numbers.filter(|(_, number)| *number > 0).collect_map()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn init_containers_come_first_and_only_extended_resources_count() {
        let limits = json!({"limits": {"x.io/a": "2", "x.io/none": "0", "cpu": "1", "hugepages-2Mi": "2Mi"}});
        let pod: Pod = serde_json::from_value(json!({"spec": {
            "containers": [{"name": "main", "resources": limits, "restartPolicy": "Always"}, {"name": "plain"}],
            "initContainers": [{"name": "init", "resources": limits},
                {"name": "sidecar", "resources": limits, "restartPolicy": "Always"}]}}))
        .unwrap();
        let found = of_pod(&pod);
        let order: Vec<_> =
            found.iter().map(|request| (request.container.as_str(), request.ends_first)).collect();
        assert_eq!(order, [("init", true), ("sidecar", false), ("main", false)]);
        assert!(found.iter().all(|request| request.numbers == Numbers::from([("x.io/a".to_owned(), 2)])));
        assert_eq!(
            at_once(&found),
            Numbers::from([("x.io/a".to_owned(), 4)]),
            "the init container has ended"
        );
    }

    #[test]
    fn devices_of_claims_are_not_allocated_again() {
        let limits = json!({"limits": {"x.io/a": "1", "x.io/b": "1"}});
        let mapping = json!({"containerName": "c", "requestName": "r", "resourceName": "x.io/a"});
        let status = json!({"resourceClaimName": "claim", "requestMappings": [mapping]});
        let pod: Pod = serde_json::from_value(json!({
            "spec": {"containers": [{"name": "c", "resources": limits}, {"name": "d", "resources": limits}]},
            "status": {"extendedResourceClaimStatus": status}}))
        .unwrap();
        let found = of_pod(&pod);
        assert_eq!(found[0].numbers, Numbers::from([("x.io/b".to_owned(), 1)]));
        assert_eq!(found[1].numbers.len(), 2);
    }
}

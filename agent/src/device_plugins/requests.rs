//! Devices that the containers of a pod request. Pure.

use std::collections::BTreeMap;

use coracle_values::quantity::value_of;
use k8s_openapi::api::core::v1::{Container, Pod};

use crate::node::is_extended;

/// Numbers of devices by resource.
pub(super) type Numbers = BTreeMap<String, usize>;

/// The devices of a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) container: String,
    pub(super) numbers: Numbers,
    /// Whether the container ends before the next one starts, which can have its devices then.
    pub(super) ends_first: bool,
}

/// The requests of a pod in the order in which the kubelet allocates: init containers first. Containers without devices are
/// left out.
pub(super) fn of_pod(pod: &Pod) -> Vec<Request> {
    let Some(spec) = &pod.spec else { return Vec::new() };
    let is_sidecar = |init: &Container| init.restart_policy.as_deref() == Some("Always");
    let inits = spec.init_containers.iter().flatten().map(|init| (init, !is_sidecar(init)));
    let all = inits.chain(spec.containers.iter().map(|container| (container, false)));
    let requests = all.map(|(container, ends_first)| Request {
        container: container.name.clone(),
        numbers: of_container(container),
        ends_first,
    });
    requests.filter(|request| !request.numbers.is_empty()).collect()
}

/// The extended resources of a container. They cannot be overcommitted, so the limits are the requests.
pub(super) fn of_container(container: &Container) -> Numbers {
    let limits = container.resources.iter().flat_map(|resources| resources.limits.iter().flatten());
    let extended = limits.filter(|(name, _)| is_extended(name));
    let numbers =
        extended.map(|(name, amount)| (name.clone(), usize::try_from(value_of(amount)).unwrap_or(0)));
    numbers.filter(|(_, number)| *number > 0).collect()
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
    }
}

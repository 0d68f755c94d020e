//! Limit of the containers of a pod.

use k8s_openapi::api::core::v1::{Pod, PodSpec};

use super::facts::refuse;
use crate::pod::state::Verdict;

/// Maximum containers of a pod. The API server limits the bytes of a pod only: some 40,000 containers, of which each takes
/// memory in the node while the pod exists.
const MAX_CONTAINERS: usize = 500;

/// Rejects a pod with too many containers.
pub(super) fn check(pod: &Pod) -> Result<(), Verdict> {
    let count = pod
        .spec
        .as_ref()
        .map_or(0, |spec| spec.containers.len() + spec.init_containers.as_ref().map_or(0, Vec::len));
    if count <= MAX_CONTAINERS {
        return Ok(());
    }
    let limit = format!("this node runs at most {MAX_CONTAINERS} in a pod");
    Err(refuse("TooManyContainers", format!("Pod was rejected: it has {count} containers, and {limit}")))
}

/// Rejects an ephemeral container above the limit of them. The pod continues without it.
pub(crate) fn check_added(spec: &PodSpec, name: &str) -> Result<(), String> {
    let mut all = spec.ephemeral_containers.iter().flatten();
    match all.position(|container| container.name == name) {
        Some(place) if place >= MAX_CONTAINERS => {
            Err(format!("this node runs at most {MAX_CONTAINERS} ephemeral containers in a pod"))
        }
        Some(_) | None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test panics")]

    use super::*;
    use serde_json::json;

    #[test]
    fn a_pod_has_a_limited_number_of_containers() {
        let list =
            |count: usize| -> Vec<_> { (0..count).map(|n| json!({"name": format!("c{n}")})).collect() };
        let pod = |init: usize, main: usize| -> Pod {
            let spec = json!({"initContainers": list(init), "containers": list(main)});
            serde_json::from_value(json!({"metadata": {"name": "p"}, "spec": spec})).unwrap()
        };
        assert!(check(&pod(100, 400)).is_ok());
        assert_eq!(check(&pod(100, 401)).unwrap_err().reason, "TooManyContainers");
        let spec = json!({"containers": [], "ephemeralContainers": list(501)});
        let spec: PodSpec = serde_json::from_value(spec).unwrap();
        assert!(check_added(&spec, "c499").is_ok() && check_added(&spec, "c500").is_err());
    }
}

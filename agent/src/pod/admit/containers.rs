//! Limits of the containers, volumes and sub paths of a pod.

use k8s_openapi::api::core::v1::{Pod, PodSpec};

use super::input::refuse;
use crate::pod::state::Verdict;

/// Maximum containers of a pod. The API server limits only the bytes of a pod, which allows about 40,000 containers.
/// Each container takes memory of the node while the pod exists.
const MAX_CONTAINERS: usize = 500;

/// Maximum volumes of a pod, and mounts with a sub path. Each can be a mount of the node, whose mount namespace has at
/// most 100,000 mounts (`fs.mount-max`) for all pods.
const MAX_VOLUMES: usize = 500;

/// Rejects a pod with too many containers, volumes or mounts with a sub path.
pub(super) fn check(pod: &Pod) -> Result<(), Verdict> {
    let Some(spec) = &pod.spec else { return Ok(()) };
    let inits = spec.init_containers.iter().flatten();
    let containers = spec.containers.len() + inits.clone().count();
    let mounts = inits.chain(&spec.containers).flat_map(|container| container.volume_mounts.iter().flatten());
    let is_set = |path: &Option<String>| path.as_ref().is_some_and(|path| !path.is_empty());
    let sub_paths = mounts.filter(|mount| is_set(&mount.sub_path) || is_set(&mount.sub_path_expr)).count();
    let volumes = spec.volumes.as_ref().map_or(0, Vec::len);
    for (count, most, reason, what) in [
        (containers, MAX_CONTAINERS, "TooManyContainers", "containers"),
        (volumes, MAX_VOLUMES, "TooManyVolumes", "volumes"),
        (sub_paths, MAX_VOLUMES, "TooManySubPaths", "mounts with a sub path"),
    ] {
        if count > most {
            let limit = format!("this node accepts at most {most} in a pod");
            return Err(refuse(reason, format!("Pod was rejected: it has {count} {what}, and {limit}")));
        }
    }
    Ok(())
}

/// Rejects an ephemeral container beyond the maximum number. The pod continues without the container.
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
    fn containers_volumes_and_sub_paths_of_a_pod_are_limited() {
        let list =
            |count: usize| -> Vec<_> { (0..count).map(|n| json!({"name": format!("c{n}")})).collect() };
        let pod = |init: usize, main: usize| -> Pod {
            let spec = json!({"initContainers": list(init), "containers": list(main)});
            serde_json::from_value(json!({"metadata": {"name": "p"}, "spec": spec})).unwrap()
        };
        assert!(check(&pod(100, 400)).is_ok());
        assert_eq!(check(&pod(100, 401)).unwrap_err().reason, "TooManyContainers");
        let volumes = |count: usize, sub_path: &str| {
            let list: Vec<_> = (0..count).map(|n| json!({"name": format!("v{n}")})).collect();
            let mount = json!({"name": "v0", "mountPath": "/v", "subPath": sub_path});
            let container = json!({"name": "c", "volumeMounts": vec![mount; 501]});
            let spec = json!({"containers": [container], "volumes": list});
            check(&serde_json::from_value(json!({"spec": spec})).unwrap()).map_err(|refused| refused.reason)
        };
        assert_eq!(volumes(500, ""), Ok(()));
        assert_eq!(volumes(501, ""), Err("TooManyVolumes".into()));
        assert_eq!(volumes(500, "s"), Err("TooManySubPaths".into()));
        let spec = json!({"containers": [], "ephemeralContainers": list(501)});
        let spec: PodSpec = serde_json::from_value(spec).unwrap();
        assert!(check_added(&spec, "c499").is_ok() && check_added(&spec, "c500").is_err());
    }
}

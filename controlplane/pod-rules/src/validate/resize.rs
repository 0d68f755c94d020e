//! Updates of `/resize` of a pod, and resize policies of containers.
//!
//! Source: `ValidatePodResize` and `validateResizePolicy` of `pkg/apis/core/validation/validation.go`.

use std::collections::HashSet;

use serde_json::{Map, Value};

use super::{Causes, Path, entries, items, text};
use crate::qos::qos_class;

/// The annotation of mirror pods.
pub(super) const MIRROR: &str = "kubernetes.io/config.mirror";
const ONLY: &str = "only cpu and memory resources are mutable";
/// The field of a pod or container that a resize changes.
const RESOURCES: &str = "resources";

/// Checks the change from the old pod to the new pod.
pub(super) fn pod(causes: &mut Causes, new: &Value, old: &Value) {
    let (whole, spec) = (Path::whole(), Path::root("spec"));
    if old["metadata"]["annotations"].get(MIRROR).is_some() {
        return causes.forbidden(&whole, "static pods cannot be resized");
    }
    if old["spec"]["os"]["name"] == "windows" {
        return causes.forbidden(&whole, "windows pods cannot be resized");
    }
    let class = match text(&old["status"]["qosClass"]) {
        "" => qos_class(&old["spec"]).as_str(),
        class => class,
    };
    if class != qos_class(&new["spec"]).as_str() {
        let detail = "Pod QOS Class may not change as a result of resizing";
        causes.invalid(&spec, &class.into(), detail);
    }
    if !is_supported(old) {
        causes.forbidden(&spec, "Pod running on node without support for resize");
    }
    pod_level(causes, &spec, &new["spec"], &old["spec"]);
    if !is_in_order(causes, &spec, &new["spec"], &old["spec"]) {
        return;
    }
    for list in ["initContainers", "containers"] {
        for (index, before) in items(&old["spec"][list]) {
            let is_init = list == "initContainers";
            let here = spec.field(list).index(index);
            container(causes, &here, &new["spec"][list][index], before, is_init);
        }
    }
    let others = |pod: &Value| {
        let mut spec = pod["spec"].as_object().cloned().unwrap_or_default();
        spec.retain(|name, _| !matches!(name.as_str(), "containers" | "initContainers" | RESOURCES));
        spec
    };
    if causes.is_empty() && others(new) != others(old) {
        causes.forbidden(&spec, ONLY);
    }
}

/// Whether the pod's node can resize: it reports the resources of running containers.
fn is_supported(pod: &Value) -> bool {
    let running = items(&pod["status"]["containerStatuses"]).find(|(_, c)| c["state"]["running"].is_object());
    running.is_none_or(|(_, container)| container[RESOURCES].is_object())
}

fn pod_level(causes: &mut Causes, spec: &Path, new: &Value, old: &Value) {
    let path = spec.field(RESOURCES);
    let (new, old) = (&new[RESOURCES], &old[RESOURCES]);
    if new.is_null() && !old.is_null() {
        return causes.forbidden(&path, "pod-level resources cannot be removed");
    }
    for list in ["requests", "limits"] {
        if is_removed(&new[list], &old[list]) {
            causes.forbidden(&path.field(list), &format!("pod-level resource {list} cannot be removed"));
        }
    }
    if fixed(new) != fixed(old) {
        causes.forbidden(spec, "only cpu and memory resources are mutable at pod-level");
    }
}

fn is_in_order(causes: &mut Causes, spec: &Path, new: &Value, old: &Value) -> bool {
    let mut is_in_order = true;
    for list in ["containers", "initContainers"] {
        let path = spec.field(list);
        if items(&new[list]).count() != items(&old[list]).count() {
            causes.forbidden(&path, &format!("{list} may not be added or removed on resize"));
            is_in_order = false;
            continue;
        }
        for (index, before) in items(&old[list]) {
            if new[list][index]["name"] != before["name"] {
                let detail = format!("{list} may not be renamed or reordered on resize");
                causes.forbidden(&path.index(index).field("name"), &detail);
                is_in_order = false;
            }
        }
    }
    is_in_order
}

fn container(causes: &mut Causes, path: &Path, new: &Value, old: &Value, is_init: bool) {
    for list in ["requests", "limits"] {
        if is_removed(&new[RESOURCES][list], &old[RESOURCES][list]) {
            let path = path.field(RESOURCES).field(list);
            causes.forbidden(&path, &format!("resource {list} cannot be removed"));
        }
    }
    let others = |container: &Value| {
        let mut container = container.as_object().cloned().unwrap_or_default();
        container.remove(RESOURCES);
        container
    };
    if fixed(&new[RESOURCES]) != fixed(&old[RESOURCES]) || others(new) != others(old) {
        if is_init {
            let detail = "only cpu and memory resources for init or sidecar containers are mutable";
            causes.forbidden(path, detail);
        } else {
            causes.forbidden(&Path::root("spec"), ONLY);
        }
    }
    let restarts =
        items(&new["resizePolicy"]).any(|(_, policy)| policy["restartPolicy"] == "RestartContainer");
    if is_init && new != old && old["restartPolicy"] != "Always" && restarts {
        let detail = "non-sidecar init containers with a resize policy of RestartContainer cannot be resized";
        causes.forbidden(path, detail);
    }
}

/// Whether an entry of the old list is missing in the new list.
fn is_removed(new: &Value, old: &Value) -> bool {
    entries(old).any(|(name, _)| new.get(name).is_none())
}

/// The parts of `resources` that no resize changes.
fn fixed(resources: &Value) -> Map<String, Value> {
    let mut fixed = resources.as_object().cloned().unwrap_or_default();
    for list in ["requests", "limits"] {
        if let Some(amounts) = fixed.get_mut(list).and_then(Value::as_object_mut) {
            amounts.retain(|name, _| !matches!(name.as_str(), "cpu" | "memory"));
        }
    }
    fixed.retain(|_, part| part.as_object().is_none_or(|part| !part.is_empty()));
    fixed
}

/// Checks `resizePolicy` of the containers of a spec.
pub(super) fn policies(causes: &mut Causes, path: &Path, spec: &Value) {
    for list in ["containers", "initContainers"] {
        for (index, container) in items(&spec[list]) {
            let here = path.field(list).index(index).field("resizePolicy");
            policy(causes, &here, &container["resizePolicy"], spec["restartPolicy"] == "Never");
        }
    }
}

fn policy(causes: &mut Causes, path: &Path, policies: &Value, never_restarts: bool) {
    let mut names = HashSet::new();
    for (index, policy) in items(policies) {
        let (name, restart) = (&policy["resourceName"], &policy["restartPolicy"]);
        if !names.insert(text(name)) {
            causes.duplicate(&path.index(index), name);
        }
        causes.one_of(path, name, &["cpu", "memory"]);
        causes.one_of(path, restart, &["NotRequired", "RestartContainer"]);
        if never_restarts && restart != "NotRequired" {
            let detail = "must be 'NotRequired' when pod `restartPolicy` is 'Never'";
            causes.invalid(path, restart, detail);
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::validate;

    fn container(name: &str, requests: Value, limits: Value) -> Value {
        json!({"name": name, "image": "i", "imagePullPolicy": "Always", "terminationMessagePolicy": "File",
            "resources": {"requests": requests, "limits": limits}})
    }

    fn pod(containers: Value) -> Value {
        json!({"metadata": {"name": "p", "namespace": "n"}, "spec": {"containers": containers, "restartPolicy": "Always",
            "dnsPolicy": "Default", "schedulerName": "s"}, "status": {}})
    }

    fn problems(old: &Value, new: &Value) -> Vec<String> {
        let mut list = Vec::new();
        for cause in validate::resize(new, old) {
            list.push(format!("{}: {}", cause.field, cause.message));
        }
        list
    }

    #[test]
    fn only_cpu_and_memory_may_change_and_none_may_be_removed() {
        let one = |requests, limits| pod(json!([container("c", requests, limits)]));
        let old = one(json!({"cpu": "20m"}), json!({"memory": "40Mi"}));
        let grown = one(json!({"cpu": "30m", "memory": "1Mi"}), json!({"cpu": "1", "memory": "50Mi"}));
        assert_eq!(problems(&old, &grown), [] as [String; 0]);
        let removed = one(json!({"memory": "1Mi"}), json!({"cpu": "1"}));
        assert_eq!(
            problems(&old, &removed),
            [
                "spec.containers[0].resources.requests: Forbidden: resource requests cannot be removed",
                "spec.containers[0].resources.limits: Forbidden: resource limits cannot be removed",
            ]
        );
        let storage = one(json!({"cpu": "20m", "ephemeral-storage": "1"}), json!({"memory": "40Mi"}));
        assert_eq!(problems(&old, &storage), ["spec: Forbidden: only cpu and memory resources are mutable"]);
        let mut policy = old.clone();
        policy["spec"]["containers"][0]["resizePolicy"] =
            json!([{"resourceName": "cpu", "restartPolicy": "NotRequired"}]);
        assert_eq!(problems(&old, &policy), ["spec: Forbidden: only cpu and memory resources are mutable"]);
        let above = one(json!({"cpu": "2", "memory": "60Mi"}), json!({"memory": "50Mi"}));
        assert_eq!(
            problems(&old, &above),
            [
                "spec.containers[0].resources.requests: Invalid value: \"60Mi\": must be less than or equal to memory limit of 50Mi"
            ]
        );
    }

    #[test]
    fn the_class_stays() {
        let one = |requests| pod(json!([container("c", requests, json!({}))]));
        let mut old = one(json!({}));
        old["status"]["qosClass"] = "BestEffort".into();
        assert_eq!(
            problems(&old, &one(json!({"cpu": "1"}))),
            ["spec: Invalid value: \"BestEffort\": Pod QOS Class may not change as a result of resizing"]
        );
    }

    #[test]
    fn containers_keep_their_order() {
        let c = |name: &str| container(name, json!({"cpu": "1"}), json!({}));
        let swapped = problems(&pod(json!([c("a"), c("b")])), &pod(json!([c("b"), c("a")])));
        assert_eq!(
            swapped.join(", "),
            "spec.containers[0].name: Forbidden: containers may not be renamed or reordered on resize, \
             spec.containers[1].name: Forbidden: containers may not be renamed or reordered on resize"
        );
        let added = problems(&pod(json!([c("a")])), &pod(json!([c("a"), c("b")])));
        assert_eq!(added, ["spec.containers: Forbidden: containers may not be added or removed on resize"]);
    }

    #[test]
    fn static_pods_and_nodes_without_support_are_refused() {
        let mut old = pod(json!([container("c", json!({"cpu": "1"}), json!({}))]));
        let new = pod(json!([container("c", json!({"cpu": "2"}), json!({}))]));
        old["status"]["containerStatuses"] = json!([{"state": {"running": {}}}]);
        assert_eq!(problems(&old, &new), ["spec: Forbidden: Pod running on node without support for resize"]);
        old["metadata"]["annotations"] = json!({MIRROR: "x"});
        assert_eq!(problems(&old, &new), ["[]: Forbidden: static pods cannot be resized"]);
    }

    #[test]
    fn init_containers_change_without_a_restart_only() {
        let with = |cpu: &str, policy: &str| {
            let mut init = container("i", json!({"cpu": cpu}), json!({}));
            init["resizePolicy"] = json!([{"resourceName": "cpu", "restartPolicy": policy}]);
            let mut pod = pod(json!([container("c", json!({"cpu": "1"}), json!({}))]));
            pod["spec"]["initContainers"] = json!([init]);
            pod
        };
        assert_eq!(problems(&with("1", "NotRequired"), &with("2", "NotRequired")), [] as [String; 0]);
        assert_eq!(
            problems(&with("1", "RestartContainer"), &with("2", "RestartContainer")),
            [
                "spec.initContainers[0]: Forbidden: non-sidecar init containers with a resize policy of RestartContainer cannot be resized"
            ]
        );
    }

    #[test]
    fn resize_policies_are_checked() {
        let list = |policies: Value, restart: &str| {
            let spec = json!({"restartPolicy": restart, "containers": [{"resizePolicy": policies}]});
            let mut causes = Causes::default();
            super::policies(&mut causes, &Path::root("spec"), &spec);
            causes.into_list().into_iter().map(|cause| cause.message).collect::<Vec<_>>()
        };
        let policy = |name: &str, restart: &str| json!({"resourceName": name, "restartPolicy": restart});
        let cpu = policy("cpu", "RestartContainer");
        assert_eq!(list(json!([cpu]), "Always"), [] as [String; 0]);
        assert_eq!(list(json!([cpu, cpu]), "Always"), ["Duplicate value: \"cpu\""]);
        assert_eq!(list(json!([cpu]), "Never").len(), 1);
        assert_eq!(list(json!([policy("disk", "Sometimes")]), "Always").len(), 2);
    }
}

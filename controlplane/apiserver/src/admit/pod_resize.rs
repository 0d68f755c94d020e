//! Resizes of pods: the requests must fit into the node's allocatable resources.
//!
//! Source: `plugin/pkg/admission/podresize/admission.go`.

use async_trait::async_trait;
use coracle_kinds::kind::by_resource;
use coracle_values::Quantity;
use coracle_values::pod_resources;
use serde_json::{Value, json};

use super::{Admission, Admit, Attributes};
use crate::error::{ApiError, Result};

const OS_LABEL: &str = "kubernetes.io/os";

pub(super) struct PodResize;

#[async_trait]
impl Admit for PodResize {
    async fn validate(
        &self,
        admission: &Admission,
        attributes: &Attributes<'_>,
        object: &Value,
    ) -> Result<()> {
        let name = object["spec"]["nodeName"].as_str().unwrap_or_default();
        let is_changed = attributes.old.is_some_and(|old| old["spec"] != object["spec"]);
        if !attributes.is_resize() || !is_changed || name.is_empty() {
            return Ok(());
        }
        let forbidden = |why: String| ApiError::forbidden_object(attributes.kind, attributes.name, why);
        let kind = by_resource("", "v1", "nodes").ok_or_else(ApiError::no_resource)?;
        let node = admission.cache.get(kind, "", name).map(|node| node.value());
        let node = node.ok_or_else(|| forbidden(format!("node {name:?} not found")))?;
        let Err((cause, why)) = check(object, &node) else { return Ok(()) };
        let mut error = forbidden(why);
        error.details["causes"] = json!([{"reason": cause}]);
        Err(error)
    }
}

/// Checks that the node can run the resized pod. The error has the reason of the Status's cause, and the message.
fn check(pod: &Value, node: &Value) -> std::result::Result<(), (&'static str, String)> {
    let os = node["metadata"]["labels"][OS_LABEL].as_str().unwrap_or("linux");
    if os != "linux" {
        let why = format!(
            "pod resize is only supported on linux nodes, node {} is {os:?}",
            node["metadata"]["name"]
        );
        return Err(("UnsupportedPlatform", why));
    }
    let Some(resources) = pod_resources::of_json(&pod["spec"]) else { return Ok(()) };
    let requests = resources.requests;
    let quantity = |name: &str| {
        let text = node["status"]["allocatable"][name].as_str().unwrap_or_default();
        Quantity::parse(text).unwrap_or_default()
    };
    let amounts = [
        ("cpu", requests.cpu_millis, quantity("cpu").millis()),
        ("memory", requests.memory, quantity("memory").value()),
    ];
    let over: Vec<String> = amounts
        .iter()
        .filter(|(_, requested, allocatable)| *requested > i128::from(*allocatable))
        .map(|(name, requested, allocatable)| {
            format!("{name}, requested: {requested}, allocatable: {allocatable}")
        })
        .collect();
    if over.is_empty() {
        return Ok(());
    }
    let why = format!("node didn't have enough allocatable resources: {}", over.join("; "));
    Err(("NodeCapacity", why))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_must_fit_the_node() {
        let node =
            json!({"metadata": {"name": "n"}, "status": {"allocatable": {"cpu": "2", "memory": "1Gi"}}});
        let pod = |cpu: &str, memory: &str| {
            json!({"spec": {"containers": [
                {"name": "c", "resources": {"requests": {"cpu": cpu, "memory": memory}}}]}})
        };
        assert_eq!(check(&pod("2", "1Gi"), &node), Ok(()));
        let (cause, why) = check(&pod("2001m", "1Gi"), &node).unwrap_err();
        assert_eq!(cause, "NodeCapacity");
        let expect = "node didn't have enough allocatable resources: cpu, requested: 2001, allocatable: 2000";
        assert_eq!(why, expect);
        let windows = json!({"metadata": {"name": "n", "labels": {OS_LABEL: "windows"}}});
        assert_eq!(check(&pod("1", "1"), &windows).unwrap_err().0, "UnsupportedPlatform");
    }
}

//! Content of downward API files: fields of the pod's metadata, and resources of its containers. Pure.

use std::collections::BTreeMap;

use coracle_values::go::quoted;
use coracle_values::pod_resources::Side;
use coracle_values::quantity::{millis_of, value_of};
use k8s_openapi::api::core::v1::{Container, DownwardAPIVolumeFile, Pod, ResourceFieldSelector};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

/// The reason why a downward API item has no content.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum FieldError {
    /// The field is not available in files.
    #[error("unsupported fieldPath: {0}")]
    Path(String),
    /// The resource is not available in files.
    #[error("unsupported container resource: {0}")]
    Resource(String),
    /// The pod has no such container.
    #[error("container {0} not found")]
    Container(String),
    /// The item names neither a field nor a resource.
    #[error("neither fieldRef nor resourceFieldRef is set for {0:?}")]
    Nothing(String),
}

/// The content of one file.
pub(super) fn content(
    pod: &Pod,
    node: &BTreeMap<String, Quantity>,
    file: &DownwardAPIVolumeFile,
) -> Result<String, FieldError> {
    if let Some(field) = &file.field_ref {
        return self::field(pod, &field.field_path).ok_or_else(|| FieldError::Path(field.field_path.clone()));
    }
    match &file.resource_field_ref {
        Some(resource) => self::resource(pod, node, resource),
        None => Err(FieldError::Nothing(file.path.clone())),
    }
}

fn field(pod: &Pod, path: &str) -> Option<String> {
    let meta = &pod.metadata;
    let text = |value: &Option<String>| Some(value.clone().unwrap_or_default());
    match path {
        "metadata.name" => text(&meta.name),
        "metadata.namespace" => text(&meta.namespace),
        "metadata.uid" => text(&meta.uid),
        "metadata.labels" => Some(lines(meta.labels.as_ref())),
        "metadata.annotations" => Some(lines(meta.annotations.as_ref())),
        _ => {
            let (map, key) = path.strip_suffix("']")?.split_once("['")?;
            let map = match map {
                "metadata.labels" => meta.labels.as_ref(),
                "metadata.annotations" => meta.annotations.as_ref(),
                _ => return None,
            };
            Some(map.and_then(|map| map.get(key)).cloned().unwrap_or_default())
        }
    }
}

/// One line `key="value"` for each entry, in the order of the keys, with Go's escapes.
fn lines(map: Option<&BTreeMap<String, String>>) -> String {
    let lines: Vec<String> =
        map.into_iter().flatten().map(|(key, value)| format!("{key}={}", quoted(value))).collect();
    lines.join("\n")
}

fn resource(
    pod: &Pod,
    node: &BTreeMap<String, Quantity>,
    selector: &ResourceFieldSelector,
) -> Result<String, FieldError> {
    let name = selector.container_name.as_deref().unwrap_or_default();
    let spec = pod.spec.as_ref().ok_or_else(|| FieldError::Container(name.to_owned()))?;
    let mut containers = spec.containers.iter().chain(spec.init_containers.iter().flatten());
    let container =
        containers.find(|c| c.name == name).ok_or_else(|| FieldError::Container(name.to_owned()))?;
    container_resource(pod, container, node, selector)
        .ok_or_else(|| FieldError::Resource(selector.resource.clone()))
}

/// A resource of a container in units of its divisor, rounded up. The pod's limit or the node's allocatable amount
/// replaces a missing limit, except of huge pages, which are never overcommitted. None if the resource is not
/// available.
pub(crate) fn container_resource(
    pod: &Pod,
    container: &Container,
    node: &BTreeMap<String, Quantity>,
    selector: &ResourceFieldSelector,
) -> Option<String> {
    let (side, name) = selector.resource.split_once('.')?;
    let is_overcommitted = matches!(name, "cpu" | "memory" | "ephemeral-storage");
    if !is_overcommitted && !name.starts_with("hugepages-") {
        return None;
    }
    // Only CPU has divisors below one.
    let amount = if name == "cpu" { millis_of } else { value_of };
    let whole = if name == "cpu" { 1000 } else { 1 };
    let own = |side: Side| side.get(container.resources.as_ref(), name).map_or(0, amount);
    let of_pod = || {
        // A pod as a whole has no limit of ephemeral storage.
        let resources = pod.spec.as_ref().and_then(|spec| spec.resources.as_ref());
        Side::Limits.get(resources.filter(|_| name != "ephemeral-storage"), name).map(amount)
    };
    let value = match side {
        "limits" => match own(Side::Limits) {
            0 if is_overcommitted => {
                let limit = of_pod().filter(|limit| *limit > 0);
                limit.unwrap_or_else(|| node.get(name).map_or(0, amount))
            }
            limit => limit,
        },
        // The API server sets a missing request to the limit. A pod of a manifest has no such default.
        "requests" => match Side::Requests.get(container.resources.as_ref(), name) {
            Some(request) => amount(request),
            None => own(Side::Limits),
        },
        _ => return None,
    };
    let divisor = selector.divisor.as_ref().map_or(0, amount);
    let divisor = if divisor > 0 { divisor } else { whole };
    Some((value / divisor + i64::from(value % divisor != 0)).to_string())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn shown(file: serde_json::Value) -> Result<String, FieldError> {
        let pod = json!({
            "metadata": {"name": "p", "namespace": "ns", "uid": "u", "labels": {"b": "2", "a": "x\"y\n"}, "annotations": {"k": "v"}},
            "spec": {"containers": [{"name": "c", "resources": {"limits": {"cpu": "250m"}, "requests": {"memory": "3Mi"}}}]}});
        let node = BTreeMap::from([("memory".to_owned(), Quantity("1Gi".to_owned()))]);
        content(
            &serde_json::from_value(pod).expect("pod"),
            &node,
            &serde_json::from_value(file).expect("file"),
        )
    }

    #[test]
    fn fields_and_resources_have_upstreams_form() {
        let field = |path: &str| shown(json!({"path": "f", "fieldRef": {"fieldPath": path}}));
        assert_eq!(field("metadata.name").as_deref(), Ok("p"));
        assert_eq!(field("metadata.labels").as_deref(), Ok("a=\"x\\\"y\\n\"\nb=\"2\""));
        assert_eq!(field("metadata.annotations['k']").as_deref(), Ok("v"));
        assert_eq!(field("metadata.labels['none']").as_deref(), Ok(""));
        assert_eq!(field("status.podIP"), Err(FieldError::Path("status.podIP".to_owned())));
        let resource = |name: &str, divisor: &str| {
            shown(
                json!({"path": "f", "resourceFieldRef": {"containerName": "c", "resource": name, "divisor": divisor}}),
            )
        };
        assert_eq!(resource("limits.cpu", "0").as_deref(), Ok("1"));
        assert_eq!(resource("limits.cpu", "1m").as_deref(), Ok("250"));
        assert_eq!(resource("requests.memory", "2Mi").as_deref(), Ok("2"));
        assert_eq!(resource("limits.memory", "1Mi").as_deref(), Ok("1024"));
        assert_eq!(resource("requests.cpu", "1m").as_deref(), Ok("250"), "the limit is the default");
        assert_eq!(resource("requests.ephemeral-storage", "1").as_deref(), Ok("0"));
        assert_eq!(resource("limits.gpu", "1"), Err(FieldError::Resource("limits.gpu".to_owned())));
    }

    #[test]
    fn a_missing_limit_is_that_of_the_pod_or_of_the_node() {
        let pod: Pod = serde_json::from_value(json!({"spec": {
            "resources": {"limits": {"cpu": "3", "hugepages-2Mi": "8Mi"}},
            "containers": [{"name": "c", "resources": {"limits": {"memory": "0"}}}]}}))
        .unwrap();
        let node = ["cpu", "memory", "ephemeral-storage", "hugepages-2Mi"];
        let node = node.into_iter().zip(["4", "1Gi", "5Gi", "6Mi"]);
        let node = node.map(|(name, amount)| (name.to_owned(), Quantity(amount.to_owned()))).collect();
        let shown = |resource: &str| {
            let selector = ResourceFieldSelector { resource: resource.to_owned(), ..Default::default() };
            container_resource(&pod, &pod.spec.as_ref().unwrap().containers[0], &node, &selector)
        };
        for (resource, expected) in [
            ("limits.cpu", Some("3")),
            ("limits.memory", Some("1073741824")),
            ("limits.ephemeral-storage", Some("5368709120")),
            ("limits.hugepages-2Mi", Some("0")),
            ("requests.ephemeral-storage", Some("0")),
            ("limits.pods", None),
            ("limits", None),
            ("other.cpu", None),
        ] {
            assert_eq!(shown(resource).as_deref(), expected, "{resource}");
        }
    }
}

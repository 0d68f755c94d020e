//! Values of `fieldRef` and `resourceFieldRef`.

use coracle_values::quantity::{millis_of, value_of};
use k8s_openapi::api::core::v1::{Container, Pod, ResourceFieldSelector};

use crate::cgroup::resources::Amount;

/// Addresses for the downward API.
#[derive(Clone, Debug, Default)]
pub(crate) struct Addresses {
    pub(crate) pod_ips: Vec<String>,
    pub(crate) host_ips: Vec<String>,
}

/// The value of a field path. None if it is not supported.
pub(crate) fn field(pod: &Pod, addresses: &Addresses, path: &str) -> Option<String> {
    let (meta, spec) = (&pod.metadata, pod.spec.as_ref());
    if let Some((map, key)) = subscript(path) {
        let map = match map {
            "metadata.labels" => meta.labels.as_ref(),
            "metadata.annotations" => meta.annotations.as_ref(),
            _ => return None,
        };
        return Some(map.and_then(|m| m.get(key)).cloned().unwrap_or_default());
    }
    let value = match path {
        "metadata.name" => meta.name.clone(),
        "metadata.namespace" => meta.namespace.clone(),
        "metadata.uid" => meta.uid.clone(),
        "spec.nodeName" => spec.and_then(|s| s.node_name.clone()),
        "spec.serviceAccountName" => spec.and_then(|s| s.service_account_name.clone()),
        "status.podIP" => addresses.pod_ips.first().cloned(),
        "status.podIPs" => Some(addresses.pod_ips.join(",")),
        "status.hostIP" => addresses.host_ips.first().cloned(),
        "status.hostIPs" => Some(addresses.host_ips.join(",")),
        _ => return None,
    };
    Some(value.unwrap_or_default())
}

fn subscript(path: &str) -> Option<(&str, &str)> {
    let (map, rest) = path.split_once('[')?;
    Some((map, rest.strip_suffix(']')?.trim_matches('\'')))
}

/// A container's request or limit, divided and rounded up. The node's allocatable amount replaces a missing limit.
pub(super) fn resource(
    pod: &Pod,
    container: &Container,
    selector: &ResourceFieldSelector,
    node: Amount,
) -> Option<String> {
    let container = match selector.container_name.as_deref() {
        None | Some("") => container,
        Some(name) => crate::pod::state::Shape::of(pod.spec.as_ref()?).container(name)?,
    };
    let (list, name) = selector.resource.split_once('.')?;
    let resources = container.resources.as_ref();
    let limit = resources.and_then(|r| r.limits.as_ref()).and_then(|l| l.get(name));
    let request = resources.and_then(|r| r.requests.as_ref()).and_then(|l| l.get(name));
    let (given, fallback_to_node) = match list {
        "limits" => (limit, true),
        "requests" => (request.or(limit), false),
        _ => return None,
    };
    let in_millis = name == "cpu";
    let amount = match (given, in_millis) {
        (Some(q), true) => millis_of(q),
        (Some(q), false) => value_of(q),
        (None, true) => i64::from(fallback_to_node) * node.cpu_millis,
        (None, false) if name == "memory" => i64::from(fallback_to_node) * node.memory,
        (None, false) => 0,
    };
    let divisor = match selector.divisor.as_ref() {
        Some(q) if in_millis => millis_of(q),
        Some(q) => value_of(q),
        None => 0,
    };
    let divisor = if divisor > 0 {
        divisor
    } else if in_millis {
        1000
    } else {
        1
    };
    Some((amount / divisor + i64::from(amount % divisor != 0)).to_string())
}

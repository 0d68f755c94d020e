//! Values of `fieldRef` and `resourceFieldRef`.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Container, Pod, ResourceFieldSelector};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use crate::pod::state::Shape;
use crate::volume::downward::container_resource;

/// Addresses for the downward API.
#[derive(Clone, Debug, Default)]
pub(crate) struct Addresses {
    pub(crate) pod_ips: Vec<String>,
    pub(crate) host_ips: Vec<String>,
}

/// The value of a field path. None if the path is not supported.
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
        // `spec.host` is the older name of the field. Source: `ConvertDownwardAPIFieldLabel`.
        "spec.nodeName" | "spec.host" => spec.and_then(|s| s.node_name.clone()),
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

/// A container's request or limit, divided by the divisor of the selector and rounded up. The node's allocatable amount
/// replaces a missing limit.
pub(super) fn resource(
    pod: &Pod,
    container: &Container,
    selector: &ResourceFieldSelector,
    node: &BTreeMap<String, Quantity>,
) -> Option<String> {
    let container = match selector.container_name.as_deref() {
        None | Some("") => container,
        Some(name) => Shape::of(pod.spec.as_ref()?).container(name)?,
    };
    container_resource(pod, container, node, selector)
}

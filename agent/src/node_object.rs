//! Fields of Node objects.

use ipnetwork::IpNetwork;
use k8s_openapi::api::core::v1::Node;

/// Whether the node runs an agent of this project.
pub(crate) fn is_ours(node: &Node) -> bool {
    let info = node.status.as_ref().and_then(|status| status.node_info.as_ref());
    info.is_some_and(|info| info.kubelet_version.contains("+coracle."))
}

/// The pod ranges of a node.
pub(crate) fn pod_cidrs(node: &Node) -> Vec<IpNetwork> {
    let Some(spec) = &node.spec else { return Vec::new() };
    let many = spec.pod_cidrs.iter().flatten();
    let all: Vec<&String> =
        if many.clone().next().is_some() { many.collect() } else { spec.pod_cidr.iter().collect() };
    all.into_iter()
        .filter_map(|text| {
            text.parse()
                .inspect_err(|error| tracing::warn!(%error, text, "ignoring an invalid pod CIDR"))
                .ok()
        })
        .collect()
}

//! The Node object with a cloud controller manager (`--cloud-provider=external`). Pure.
//!
//! Source: `initialNode` of upstream's `pkg/kubelet`, and `NodeAddress` of `pkg/kubelet/nodestatus`.

use k8s_openapi::api::core::v1::{NodeAddress, NodeStatus, Taint};

use super::config::NodeConfig;

/// The annotation with the addresses of `--node-ip`, for the cloud controller manager.
pub(super) const NODE_IPS: &str = "alpha.kubernetes.io/provided-node-ip";
/// Maximum addresses in the annotation: one of each family.
const NODE_IPS_MAX: usize = 2;

/// The taint that the cloud controller manager removes after it has completed the Node object. `None` if the node does
/// not have it, or if it is one of the configured taints: the API server refuses two taints with one key and effect.
pub(super) fn taint(config: &NodeConfig) -> Option<Taint> {
    let taint = Taint {
        key: "node.cloudprovider.kubernetes.io/uninitialized".to_owned(),
        value: Some("true".to_owned()),
        effect: "NoSchedule".to_owned(),
        time_added: None,
    };
    let is_configured =
        config.taints.iter().any(|other| other.key == taint.key && other.effect == taint.effect);
    (config.has_external_cloud && !is_configured).then_some(taint)
}

/// The value of the annotation [`NODE_IPS`]. `None` if the node does not have it.
pub(super) fn node_ips(config: &NodeConfig) -> Option<String> {
    let ips: Vec<String> = config.ips.iter().take(NODE_IPS_MAX).map(ToString::to_string).collect();
    (config.has_external_cloud && !ips.is_empty()).then(|| ips.join(","))
}

/// Whether the cloud controller manager sets the IP addresses of the node. This is so without configured addresses.
pub(super) fn sets_addresses(config: &NodeConfig) -> bool {
    config.has_external_cloud && config.ips.is_empty()
}

/// The addresses in the status, if the node keeps them. The cloud controller manager may have set them. `None` if the
/// node sets its addresses.
pub(super) fn kept_addresses(config: &NodeConfig, held: &NodeStatus) -> Option<Vec<NodeAddress>> {
    held.addresses.clone().filter(|addresses| config.has_external_cloud && !addresses.is_empty())
}

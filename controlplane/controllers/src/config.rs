//! What the controllers are told about the cluster.

use ipnetwork::IpNetwork;

/// Settings of the controllers.
#[derive(Clone, Debug)]
pub struct ControllersConfig {
    /// Ranges that pod CIDRs are carved from, at most one of each address family. Empty: nodes get none.
    pub cluster_cidrs: Vec<IpNetwork>,
    /// Prefix length of a node's IPv4 pod CIDR.
    pub node_mask_v4: u8,
    /// Prefix length of a node's IPv6 pod CIDR.
    pub node_mask_v6: u8,
    /// PEM of the cluster CA, published as ConfigMap `kube-root-ca.crt` in every namespace. None: not published.
    pub root_ca_pem: Option<String>,
}

impl Default for ControllersConfig {
    fn default() -> Self {
        Self { cluster_cidrs: Vec::new(), node_mask_v4: 24, node_mask_v6: 64, root_ca_pem: None }
    }
}

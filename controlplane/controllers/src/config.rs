//! What the controllers are told about the cluster.

use std::net::IpAddr;
use std::time::Duration;

use ipnetwork::IpNetwork;

use crate::account_token::signer::AccountTokenSigner;
use crate::csr_signing::Signer;

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
    /// Signs the tokens of Secrets of service accounts. None: they get none.
    pub account_tokens: Option<AccountTokenSigner>,
    /// The API's URL for machines that join, published with the CA as ConfigMap `kube-public/cluster-info`. None: not
    /// published.
    pub server: Option<String>,
    /// The API server's names, which no node may have.
    pub server_names: Vec<String>,
    /// Its addresses.
    pub server_addresses: Vec<IpAddr>,
    /// The node on its machine, which may have those of the machine.
    pub own_node: Option<String>,
    /// Addresses of pods and of services, which no node may have either.
    pub reserved_ranges: Vec<IpNetwork>,
    /// Signs approved certificate signing requests. None: they are left to others.
    pub signer: Option<Signer>,
    /// A node that is silent for so long is said to be Unknown.
    pub node_monitor_grace: Duration,
    /// The same for a node that has never written its status.
    pub node_startup_grace: Duration,
    /// In each zone one node is given up at a time, with this between them.
    pub eviction_interval: Duration,
    /// With so many of a zone's nodes lost, in percent, and more than two, they are given up ten times more slowly.
    pub unhealthy_percent: usize,
    /// In a zone of not more nodes than this, none is then.
    pub large_zone: usize,
}

impl Default for ControllersConfig {
    fn default() -> Self {
        Self {
            cluster_cidrs: Vec::new(),
            node_mask_v4: 24,
            node_mask_v6: 64,
            root_ca_pem: None,
            account_tokens: None,
            server: None,
            server_names: Vec::new(),
            server_addresses: Vec::new(),
            own_node: None,
            reserved_ranges: Vec::new(),
            signer: None,
            node_monitor_grace: Duration::from_secs(50),
            node_startup_grace: Duration::from_secs(60),
            eviction_interval: Duration::from_secs(10),
            unhealthy_percent: 55,
            large_zone: 50,
        }
    }
}

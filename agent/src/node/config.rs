//! Configuration of the Node object, and errors of its start.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;

use coracle_cni::{OverlayConfig, OverlayError};
use k8s_openapi::api::core::v1::Taint;
use tokio_util::sync::CancellationToken;

use super::eviction::EvictionThresholds;

/// Configuration of the Node object.
#[derive(Clone, Debug)]
pub struct NodeConfig {
    /// Name in the API.
    pub name: String,
    /// Addresses, the primary one first. If empty, the routes determine them.
    pub ips: Vec<IpAddr>,
    /// Labels in addition to those that every node has.
    pub labels: BTreeMap<String, String>,
    /// Taints at creation.
    pub taints: Vec<Taint>,
    /// The machine's id at its cloud provider, at creation.
    pub provider_id: Option<String>,
    /// Whether a cloud controller manager completes the Node object.
    pub has_external_cloud: bool,
    /// Whether to create the Node object if it does not exist.
    pub register: bool,
    /// Port of the kubelet API.
    pub kubelet_port: u16,
    /// Maximum pods.
    pub max_pods: u32,
    /// Lease duration in seconds.
    pub lease_seconds: u16,
    /// Thresholds of available resources, below which the node is under pressure.
    pub eviction: EvictionThresholds,
    /// Resources reserved for the system and for the node's own processes, by resource name.
    pub reserved: [BTreeMap<String, String>; 2],
    /// The directory whose file system's size is the ephemeral storage.
    pub state_dir: PathBuf,
    /// Name and version of the runtime: `coracle://0.1.0`.
    pub runtime_version: String,
    /// Configuration of the overlay. None means no overlay.
    pub overlay: Option<OverlayConfig>,
    /// Directory of local volumes.
    pub local_volume_dir: PathBuf,
    /// Cancelled when the machine shuts down. The node is then not ready.
    pub machine_shutdown: CancellationToken,
}

// === impl NodeConfig ===

#[cfg(test)]
impl NodeConfig {
    /// The node `n1` with its state in `dir`.
    pub(crate) fn for_test(dir: &std::path::Path) -> Self {
        Self {
            name: "n1".to_owned(),
            ips: Vec::new(),
            labels: BTreeMap::new(),
            taints: Vec::new(),
            provider_id: None,
            has_external_cloud: false,
            register: true,
            kubelet_port: 10250,
            max_pods: 110,
            lease_seconds: 40,
            eviction: EvictionThresholds::default(),
            reserved: Default::default(),
            state_dir: dir.to_owned(),
            runtime_version: "coracle://0".to_owned(),
            overlay: None,
            local_volume_dir: dir.join("local-volumes"),
            machine_shutdown: CancellationToken::new(),
        }
    }
}

/// Errors at the start of the node.
#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    /// A kernel file cannot be read.
    #[error("cannot read {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Cause.
        #[source]
        source: std::io::Error,
    },
    /// A reserved amount is not a quantity.
    #[error("the reserved {name} {value:?} is not a quantity")]
    Reserved {
        /// Resource name.
        name: String,
        /// The configured value.
        value: String,
    },
    /// The overlay needs a pod network of this process.
    #[error("the overlay needs the built-in container runtime: its pods are attached by this process")]
    OverlayOfRuntime,
    /// The overlay cannot be used.
    #[error("cannot open the overlay between nodes")]
    Overlay(#[source] OverlayError),
}

//! Wires the agent's parts together and waits for the end.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Taint;
use tokio_util::sync::CancellationToken;

use crate::runtime::Runtime;

/// Everything that can be set about one node's agent.
#[derive(Clone, Debug)]
pub struct AgentConfig {
    /// The node's name in the API.
    pub node_name: String,
    /// What outlives a boot: pod directories under `pods/`, remembered pods under `agent/`, `pki/`.
    pub state_dir: PathBuf,
    /// What goes with a boot.
    pub run_dir: PathBuf,
    /// Where container logs lie, a directory per pod.
    pub pod_log_dir: PathBuf,
    /// The cgroup under which `kubepods` is made; `/` is the host's root.
    pub cgroup_root: String,
    /// Where the kubelet API listens.
    pub kubelet_listen: SocketAddr,
    /// The addresses that the node reports; the first is the primary one. Empty: found from the routes.
    pub node_ips: Vec<IpAddr>,
    /// The host's resolver configuration, for pods with dnsPolicy Default.
    pub resolv_conf: PathBuf,
    /// How many pods the node takes.
    pub max_pods: u32,
    /// Addresses of the cluster's DNS service; empty while there is none.
    pub cluster_dns: Vec<IpAddr>,
    /// The cluster's DNS domain.
    pub cluster_domain: String,
    /// Whether to create the Node object if it is not there.
    pub register_node: bool,
    /// Labels to register the node with.
    pub node_labels: BTreeMap<String, String>,
    /// Taints to register the node with.
    pub node_taints: Vec<Taint>,
    /// Resources kept back from pods, by resource name (`cpu`, `memory`, `ephemeral-storage`).
    pub reserved: BTreeMap<String, String>,
    /// Certificate and key of the kubelet API.
    pub serving_cert: PathBuf,
    /// The key of `serving_cert`.
    pub serving_key: PathBuf,
    /// The CA whose client certificates may call the kubelet API.
    pub client_ca: PathBuf,
}

/// Why the agent could not start or had to stop.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A directory that the agent needs could not be made.
    #[error("cannot create {path}")]
    Directory {
        /// Which one.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
}

/// Runs the agent until `shutdown`; pods go on running after it.
///
/// # Errors
/// When a part cannot start; nothing is left half-started then.
pub async fn run(
    config: AgentConfig,
    client: kube::Client,
    runtime: Arc<dyn Runtime>,
    network: coracle_cni::Network,
    shutdown: CancellationToken,
) -> Result<(), Error> {
    let _ = (config, client, runtime, network);
    shutdown.cancelled().await;
    Ok(())
}

//! The checked settings of a node.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use coracle_agent::{
    EvictionThresholds, NodeReports, PodPolicy, ResourceManagerConfig, ServiceProxyConfig, ShutdownPeriods,
    StaticPodSources,
};
use coracle_cri::{CgroupDriver, NriSettings};
use k8s_openapi::api::core::v1::Taint;

use super::super::cni::Cni;
use super::super::{Dirs, Serving};
use super::dns::NodeDns;
use super::images::NodeImages;

/// Checked settings of a node.
#[derive(Clone, Debug)]
pub(crate) struct Node {
    pub(crate) dirs: Dirs,
    pub(crate) local_volume_dir: PathBuf,
    pub(crate) plugin_registry_dir: PathBuf,
    pub(crate) pod_log_dir: PathBuf,
    pub(crate) static_pods: StaticPodSources,
    pub(crate) cgroup_root: String,
    pub(crate) cgroup_driver: CgroupDriver,
    pub(crate) name: String,
    pub(crate) ips: Vec<IpAddr>,
    pub(crate) register: bool,
    pub(crate) labels: BTreeMap<String, String>,
    pub(crate) taints: Vec<Taint>,
    pub(crate) provider_id: Option<String>,
    pub(crate) reports: NodeReports,
    pub(crate) kubelet_listen: SocketAddr,
    /// Port of the API server in this process. It is known after the start of the API server.
    pub(crate) api_server_port: Option<u16>,
    /// Address and port of the node's health check. None if it is disabled.
    pub(crate) healthz: Option<SocketAddr>,
    pub(crate) dns: NodeDns,
    pub(super) explicit: Explicit,
    pub(crate) service_proxy: Option<ServiceProxyConfig>,
    /// Name of the nftables table of NetworkPolicies. `None`: the node does not enforce them.
    pub(crate) network_policy_table: Option<String>,
    pub(crate) cni: Cni,
    pub(crate) bridge: String,
    pub(crate) nft_table: String,
    pub(crate) mtu: Option<u32>,
    pub(crate) overlay: Option<coracle_cni::OverlayConfig>,
    pub(crate) max_pods: u32,
    pub(crate) pods_per_core: u32,
    pub(crate) pod_pids_limit: Option<i64>,
    pub(crate) pod_policy: PodPolicy,
    pub(crate) system_reserved: BTreeMap<String, String>,
    pub(crate) kube_reserved: BTreeMap<String, String>,
    pub(crate) resource_managers: ResourceManagerConfig,
    pub(crate) eviction: EvictionThresholds,
    pub(crate) shutdown_periods: ShutdownPeriods,
    pub(crate) lease_seconds: u16,
    pub(crate) images: NodeImages,
    pub(crate) nri: NriSettings,
    pub(crate) cdi_spec_dirs: Vec<PathBuf>,
    pub(crate) log_max_size: u64,
    pub(crate) log_max_files: u32,
    pub(crate) stream_idle_limit: Option<Duration>,
    pub(crate) serving: Serving,
    pub(crate) shown: ShownSettings,
}

/// Whether these settings are set explicitly.
#[derive(Clone, Copy, Debug)]
pub(super) struct Explicit {
    pub(super) serve_dns: bool,
    pub(super) service_proxy: bool,
    pub(super) network_policy: bool,
}

/// Settings in the forms in which the kubelet API shows them.
#[derive(Clone, Debug, Default)]
pub(crate) struct ShownSettings {
    /// The settings in effect as texts, by the names of their flags.
    pub(crate) flags: BTreeMap<String, String>,
    /// The metric of the feature gates, in the text format of Prometheus.
    pub(crate) feature_metrics: Arc<str>,
}

// === impl Node ===

impl Node {
    /// Disables DNS, the service proxy and network policies unless they are set explicitly. In a cluster with another
    /// control plane, other programs run them. The role system:node may not read EndpointSlices and NetworkPolicies
    /// there, and the service range is unknown.
    pub(crate) fn disable_cluster_services(&mut self) {
        let Explicit { serve_dns, service_proxy, network_policy } = self.explicit;
        if !network_policy {
            self.network_policy_table = None;
        }
        if !service_proxy {
            self.service_proxy = None;
        }
        if !serve_dns {
            self.dns.disable();
        }
    }
}

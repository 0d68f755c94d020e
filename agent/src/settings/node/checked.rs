//! The checked settings of a node.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use coracle_agent::{
    CredentialProviderPaths, EvictionThresholds, ImageGcPolicy, ImageVerification, NodeReports, PodPolicy,
    ResourceManagerConfig, ServiceProxyConfig, ShutdownPeriods, StaticPodSources, StubDomain,
};
use coracle_cri::{CgroupDriver, NriSettings};
use coracle_images::PinPattern;
use ipnetwork::IpNetwork;
use k8s_openapi::api::core::v1::Taint;

use super::super::cni::Cni;
use super::super::{Dirs, Serving};

/// Offset of the cluster DNS address in the service range.
const DNS_NUMBER: u32 = 10;

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
    /// Address and port of the node's health check. None if it is disabled.
    pub(crate) healthz: Option<SocketAddr>,
    pub(crate) cluster_dns: Vec<IpAddr>,
    /// Whether the node serves DNS at `cluster_dns`.
    pub(crate) serve_dns: bool,
    /// Domains whose names are resolved by their own servers instead of the host's.
    pub(crate) dns_stub_domains: Vec<StubDomain>,
    /// Whether `serve_dns`, `service_proxy` and `network_policy` are set explicitly.
    pub(super) explicit: [bool; 3],
    /// Whether `cluster_dns` is derived from the local service range.
    pub(super) derived_dns: bool,
    pub(crate) service_proxy: Option<ServiceProxyConfig>,
    /// Name of the nftables table of NetworkPolicies. `None`: the node does not enforce them.
    pub(crate) network_policy_table: Option<String>,
    pub(crate) cluster_domain: String,
    pub(crate) resolv_conf: Option<PathBuf>,
    pub(crate) cni: Cni,
    pub(crate) bridge: String,
    pub(crate) nft_table: String,
    pub(crate) mtu: Option<u32>,
    pub(crate) overlay: Option<coracle_cni::OverlayConfig>,
    pub(crate) max_pods: u32,
    pub(crate) pod_pids_limit: Option<i64>,
    pub(crate) pod_policy: PodPolicy,
    pub(crate) system_reserved: BTreeMap<String, String>,
    pub(crate) kube_reserved: BTreeMap<String, String>,
    pub(crate) resource_managers: ResourceManagerConfig,
    pub(crate) eviction: EvictionThresholds,
    pub(crate) shutdown_periods: ShutdownPeriods,
    pub(crate) lease_seconds: u16,
    pub(crate) image_gc: ImageGcPolicy,
    pub(crate) image_verification: ImageVerification,
    pub(crate) pinned_images: Vec<PinPattern>,
    pub(crate) registry_config_dir: Option<PathBuf>,
    pub(crate) credential_providers: Option<CredentialProviderPaths>,
    pub(crate) nri: NriSettings,
    pub(crate) log_max_size: u64,
    pub(crate) log_max_files: u32,
    pub(crate) stream_idle_limit: Option<Duration>,
    pub(crate) serving: Serving,
    pub(crate) shown: ShownSettings,
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
    /// Addresses that the node serves itself.
    pub(crate) fn served_here(&self) -> Vec<IpAddr> {
        if self.serve_dns { self.cluster_dns.clone() } else { Vec::new() }
    }

    /// Whether the node serves DNS at an address that is not configured, but derived from the local service range.
    pub(crate) fn derives_dns(&self) -> bool {
        self.serve_dns && self.derived_dns
    }

    /// Does not serve DNS, because pods of the cluster do, unless `serve_dns` is set explicitly.
    pub(crate) fn leave_dns_to_pods(&mut self) {
        self.serve_dns &= self.explicit[0];
    }

    /// Sets the address of the DNS server that the node runs, unless one is configured.
    pub(in crate::settings) fn serve_dns_in(&mut self, services: IpNetwork) {
        if !self.serve_dns || !self.cluster_dns.is_empty() {
            return;
        }
        let address = match services {
            IpNetwork::V4(network) => network.nth(DNS_NUMBER).map(IpAddr::V4),
            IpNetwork::V6(network) => network.nth(DNS_NUMBER.into()).map(IpAddr::V6),
        };
        self.cluster_dns.extend(address);
        self.serve_dns = address.is_some();
        self.derived_dns = true;
    }

    /// Disables DNS, the service proxy and network policies unless they are set explicitly. In a cluster with another
    /// control plane, other programs run them. The role system:node may not read EndpointSlices and NetworkPolicies
    /// there, and the service range is unknown.
    pub(crate) fn disable_cluster_services(&mut self) {
        let [dns, proxy, policies] = self.explicit;
        if !policies {
            self.network_policy_table = None;
        }
        if !proxy {
            self.service_proxy = None;
        }
        if !dns {
            self.serve_dns = false;
            if self.derived_dns {
                self.cluster_dns.clear();
            }
        }
    }
}

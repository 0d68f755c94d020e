//! Configuration of a node's agent: plain data, passed by value.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;

use coracle_cni::OverlayConfig;
use coracle_cri::CgroupDriver;
use coracle_dns::StubDomain;
use ipnetwork::IpNetwork;
use k8s_openapi::api::core::v1::Taint;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::api_handlers::ApiHandlers;
use crate::certificate_files::CertificateFiles;
use crate::image_gc_policy::ImageGcPolicy;
use crate::image_verification::ImageVerification;
use crate::join::{Membership, Renewal, RequestedServing};
use crate::node::EvictionThresholds;
use crate::node_reports::NodeReports;
use crate::pod_policy::PodPolicy;
use crate::pull_activity::PullActivity;
use crate::resource_managers::ResourceManagerConfig;
use crate::shutdown_policy::ShutdownPeriods;
use crate::source::StaticPodSources;
use crate::tls_options::TlsOptions;

/// Configuration of a node's agent.
#[derive(Clone, Debug)]
pub struct AgentConfig {
    /// Name of the node.
    pub node_name: String,
    /// State directory, kept across boots: pod directories under `pods/`, stored objects under `agent/`,
    /// `sealing.key`, `pki/`.
    pub state_dir: PathBuf,
    /// Run directory, for files that a reboot makes invalid: sockets, locks and records of kernel objects.
    pub run_dir: PathBuf,
    /// Directory of local volumes that are provisioned for claims.
    pub local_volume_dir: PathBuf,
    /// Directory with the registration sockets of drivers.
    pub plugin_registry_dir: PathBuf,
    /// Directory of the container logs, with a subdirectory for each pod.
    pub pod_log_dir: PathBuf,
    /// The manifests of static pods.
    pub static_pods: StaticPodSources,
    /// The cgroup that contains `kubepods`; `/` is the host's root.
    pub cgroup_root: String,
    /// The cgroup driver.
    pub cgroup_driver: CgroupDriver,
    /// Address and port of the kubelet API.
    pub kubelet_listen: SocketAddr,
    /// Port of the API server in this process. None if there is none.
    pub api_server_port: Option<u16>,
    /// Address and port of the node's health check. None if it is not served.
    pub healthz: Option<SocketAddr>,
    /// Addresses of the node, the primary one first. If empty, the routes determine them.
    pub node_ips: Vec<IpAddr>,
    /// The host's resolver configuration, for pods with dnsPolicy Default.
    pub resolv_conf: PathBuf,
    /// Maximum number of pods of the node, including the limit by `pods_per_core`.
    pub max_pods: u32,
    /// Maximum number of pods for each CPU. 0 means no such limit. `max_pods` already includes this limit.
    pub pods_per_core: u32,
    /// Maximum number of processes of a pod. None means no limit.
    pub pod_pids_limit: Option<i64>,
    /// Settings that apply to all pods.
    pub pod_policy: PodPolicy,
    /// Addresses of the cluster's DNS service; empty without one.
    pub cluster_dns: Vec<IpAddr>,
    /// The service proxy's settings. None if another program proxies Services.
    pub service_proxy: Option<ServiceProxyConfig>,
    /// Names of the nftables tables of Services and of NetworkPolicies, even if other programs provide these features.
    pub tables: TableNames,
    /// Name of the nftables table of NetworkPolicies. None if another program enforces them.
    pub network_policy_table: Option<String>,
    /// Name of the bridge of the built-in network.
    pub bridge: String,
    /// Settings of the node's DNS server. None if the node serves no DNS.
    pub dns: Option<DnsConfig>,
    /// The cluster's DNS domain.
    pub cluster_domain: String,
    /// Whether to create the Node object if it does not exist.
    pub register_node: bool,
    /// Labels of the Node object.
    pub node_labels: BTreeMap<String, String>,
    /// Taints of the Node object at its creation.
    pub node_taints: Vec<Taint>,
    /// The machine's id at its cloud provider, for the Node object at its creation.
    pub provider_id: Option<String>,
    /// Settings of the node's reports to the API server.
    pub reports: NodeReports,
    /// Lease duration in seconds. The agent renews the lease every quarter of that time.
    pub lease_seconds: u16,
    /// The agent sends on this channel at the beginning of each heartbeat, while it can renew the lease.
    pub heartbeats: watch::Sender<()>,
    /// The running pulls, imports and exports of images. No pod is evicted early because of their space.
    pub pulls: PullActivity,
    /// Thresholds of available resources, below which the node is under pressure.
    pub eviction: EvictionThresholds,
    /// Periods in which pods end when the machine shuts down.
    pub shutdown_periods: ShutdownPeriods,
    /// Cancelled when the machine shuts down and the pods must end. The agent stops after their end.
    pub machine_shutdown: CancellationToken,
    /// Resources reserved for the system, by name (`cpu`, `memory`, `ephemeral-storage`, `pid`).
    pub system_reserved: BTreeMap<String, String>,
    /// Resources reserved for the node's own processes, by name.
    pub kube_reserved: BTreeMap<String, String>,
    /// Settings of the managers of CPUs, memory and topology.
    pub resource_managers: ResourceManagerConfig,
    /// Certificates of the node.
    pub identity: Identity,
    /// The CA of client certificates for the kubelet API. None if no client certificate is accepted.
    pub client_ca: Option<PathBuf>,
    /// TLS versions and cipher suites of the kubelet API.
    pub tls: TlsOptions,
    /// Enabled handlers of the kubelet API.
    pub handlers: ApiHandlers,
    /// Configuration of the overlay. None means no overlay.
    pub overlay: Option<OverlayConfig>,
    /// Settings of image garbage collection.
    pub image_gc: ImageGcPolicy,
    /// The images of the store that need a verification of the pod's pull secrets.
    pub image_verification: ImageVerification,
    /// The settings in effect, by the names of their flags, for `/flagz`. They contain no secrets.
    pub flags: BTreeMap<String, String>,
    /// The metric of the feature gates, in the text format of Prometheus.
    pub feature_metrics: Arc<str>,
    /// Credential providers for images. None without a configuration.
    pub credential_providers: Option<CredentialProviderPaths>,
}

/// Names of a node's nftables tables.
#[derive(Clone, Debug)]
pub struct TableNames {
    /// The table of Services.
    pub services: String,
    /// The table of NetworkPolicies.
    pub policies: String,
}

/// Settings of the service proxy.
#[derive(Clone, Debug)]
pub struct ServiceProxyConfig {
    /// Name of its nftables table.
    pub table: String,
    /// Ranges of addresses that Services may take by `externalIPs`.
    pub external_ips: Vec<IpNetwork>,
    /// Ranges of addresses that Services may take by `status.loadBalancer`. If empty, all addresses are permitted.
    pub load_balancer_ips: Vec<IpNetwork>,
    /// Ranges of the node's addresses that have node ports. If an address family has no range, all addresses of the
    /// family have node ports.
    pub node_port_addresses: Vec<IpNetwork>,
    /// Address of its health checks. None means no server.
    pub healthz: Option<SocketAddr>,
    /// Address of the server for its mode and its metrics. None means no server.
    pub status: Option<SocketAddr>,
}

/// Settings of the DNS server.
#[derive(Clone, Debug)]
pub struct DnsConfig {
    /// Addresses of the server. These are the addresses of `cluster_dns`, unless pods serve DNS there, and the
    /// addresses that running pods use.
    pub addresses: Vec<IpAddr>,
    /// The host's resolver configuration: names outside the cluster are resolved by its servers.
    pub resolv_conf: PathBuf,
    /// Domains whose names are resolved by their own servers instead of the host's.
    pub stub_domains: Vec<StubDomain>,
}

/// Paths of the kubelet's credential providers for images.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CredentialProviderPaths {
    /// File with the kubelet's `CredentialProviderConfig`.
    pub config: PathBuf,
    /// Directory of the programs that the configuration names.
    pub bin_dir: PathBuf,
}

/// Source of the node's certificates.
#[derive(Clone, Debug)]
pub enum Identity {
    /// Files that are not renewed.
    Files(CertificateFiles),
    /// Certificates of a joined node, which the agent renews.
    Joined(Arc<Membership>),
    /// A serving certificate that is requested from the cluster with the credentials of a kubeconfig, and renewed.
    Requested(Arc<RequestedServing>),
}

// === impl Identity ===

impl Identity {
    /// The client certificate and the serving certificate. None for a certificate that the agent does not renew.
    pub(crate) fn renewals(&self) -> [Option<Renewal>; 2] {
        match self {
            Self::Files(_) => [None, None],
            Self::Joined(membership) => membership.renewals().map(Some),
            Self::Requested(serving) => [None, Some(serving.renewal())],
        }
    }
}

//! Configuration of the controllers.

use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::time::Duration;

use ipnetwork::IpNetwork;

use crate::account_token_signer::AccountTokenSigner;
use crate::autoscaler_metrics::AutoscalerMetrics;
use crate::certificate_signer::Signer;
use crate::endpoint_slice_metrics::EndpointSliceMetrics;
use crate::job_metrics::JobMetrics;
use crate::queue::QueueMetrics;
use crate::running_controllers::RunningControllers;
use crate::selection::ControllerSelection;
use crate::stateful_set_metrics::StatefulSetMetrics;
use crate::zone_metrics::ZoneMetrics;

/// Settings of the controllers.
#[derive(Clone, Debug)]
pub struct ControllersConfig {
    /// The controllers that run.
    pub selection: ControllerSelection,
    /// Ranges from which nodes get pod CIDRs, at most one of each address family. Without ranges, nodes get no pod
    /// CIDRs.
    pub cluster_cidrs: Vec<IpNetwork>,
    /// Prefix length of a node's IPv4 pod CIDR.
    pub node_mask_v4: u8,
    /// Prefix length of a node's IPv6 pod CIDR.
    pub node_mask_v6: u8,
    /// The cluster CA in PEM, published as ConfigMap `kube-root-ca.crt` in every namespace. `None` if it is not
    /// published.
    pub root_ca_pem: Option<String>,
    /// Signer of the tokens in service account Secrets. `None` if Secrets get no tokens.
    pub account_tokens: Option<AccountTokenSigner>,
    /// Time after which an unused legacy token of a service account becomes invalid, and after which an invalid token
    /// is deleted.
    pub token_clean_up_period: Duration,
    /// The API server's URL for machines that join, published with the CA as ConfigMap `kube-public/cluster-info`. If
    /// it is `None`, the controller does not publish the ConfigMap, but signs an existing ConfigMap.
    pub server: Option<String>,
    /// The API server's DNS names. No node gets a certificate for them.
    pub server_names: Vec<String>,
    /// The API server's addresses. Only the node on the API server's machine gets a certificate for them.
    pub server_addresses: Vec<IpAddr>,
    /// The node on the API server's machine. It may have the addresses of that machine.
    pub own_node: Option<String>,
    /// Address ranges of pods and services. No node gets a certificate for these addresses.
    pub reserved_ranges: Vec<IpNetwork>,
    /// Signer of approved certificate signing requests. `None` if another program signs them.
    pub signer: Option<Signer>,
    /// Whether nodes serve LoadBalancer services at the nodes' addresses.
    pub node_balancers: bool,
    /// Range of the node ports of services. Load balancers do not use these ports.
    pub node_ports: RangeInclusive<u16>,
    /// Ranges from which LoadBalancer services of the class `coracle.dev/address-pool` get addresses.
    pub load_balancer_pool: Vec<IpNetwork>,
    /// Number of finished pods of the cluster that are kept; 0 keeps all.
    pub max_finished_pods: usize,
    /// Time without a heartbeat after which a node's conditions become Unknown.
    pub node_monitor_grace: Duration,
    /// Grace period of a node that has never written its status.
    pub node_startup_grace: Duration,
    /// Minimum time between two NoExecute taints in one zone.
    pub eviction_interval: Duration,
    /// If at least this percentage of the nodes in a zone are not ready, NoExecute taints come ten times more slowly.
    /// At least three nodes must be not ready.
    pub unhealthy_percent: usize,
    /// A zone with at most this number of nodes gets no NoExecute taints while at least
    /// [`unhealthy_percent`](Self::unhealthy_percent) of its nodes are not ready.
    pub large_zone: usize,
    /// Options of horizontal pod autoscalers.
    pub autoscaler: AutoscalerOptions,
    /// Receives the metrics of the controllers' queues.
    pub queue_metrics: QueueMetrics,
    /// Receives the metrics of jobs.
    pub job_metrics: JobMetrics,
    /// Receives the metrics of EndpointSlices.
    pub endpoint_slice_metrics: EndpointSliceMetrics,
    /// Receives the metrics of stateful sets.
    pub stateful_set_metrics: StatefulSetMetrics,
    /// Receives the metrics of zones of nodes.
    pub zone_metrics: ZoneMetrics,
    /// Receives the metrics of autoscalers.
    pub autoscaler_metrics: AutoscalerMetrics,
    /// Receives whether controllers run.
    pub running_controllers: RunningControllers,
}

/// Options of horizontal pod autoscalers, with the defaults of kube-controller-manager.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AutoscalerOptions {
    /// Time between two reconciles of one autoscaler.
    pub sync_period: Duration,
    /// Tolerance of the usage, as a fraction of the target. An autoscaler's behavior takes precedence.
    pub tolerance: f64,
    /// Stabilization window of a decrease. An autoscaler's behavior takes precedence.
    pub downscale_stabilization: Duration,
    /// Time after a pod's start during which its CPU usage counts only if the pod is ready.
    pub cpu_initialization: Duration,
    /// Time after a pod's start. A pod that is not ready counts as never ready if its condition Ready last changed
    /// within this time.
    pub initial_readiness: Duration,
}

impl Default for AutoscalerOptions {
    fn default() -> Self {
        Self {
            sync_period: Duration::from_secs(15),
            tolerance: 0.1,
            downscale_stabilization: Duration::from_secs(300),
            cpu_initialization: Duration::from_secs(300),
            initial_readiness: Duration::from_secs(30),
        }
    }
}

impl ControllersConfig {
    /// A function that reads all metrics of the controllers, in the text format of Prometheus.
    pub fn metrics(&self) -> impl Fn() -> String + Send + Sync + use<> {
        let (queues, running) = (self.queue_metrics.clone(), self.running_controllers.clone());
        let (jobs, sets) = (self.job_metrics.clone(), self.stateful_set_metrics.clone());
        let (slices, zones) = (self.endpoint_slice_metrics.clone(), self.zone_metrics.clone());
        let autoscalers = self.autoscaler_metrics.clone();
        move || {
            let workloads = [jobs.text(), sets.text(), autoscalers.text()].concat();
            [running.text(), queues.text(), workloads, slices.text(), zones.text()].concat()
        }
    }
}

impl Default for ControllersConfig {
    fn default() -> Self {
        Self {
            selection: ControllerSelection::default(),
            cluster_cidrs: Vec::new(),
            node_mask_v4: 24,
            node_mask_v6: 64,
            root_ca_pem: None,
            account_tokens: None,
            token_clean_up_period: Duration::from_secs(365 * 24 * 3600),
            server: None,
            server_names: Vec::new(),
            server_addresses: Vec::new(),
            own_node: None,
            reserved_ranges: Vec::new(),
            signer: None,
            node_balancers: true,
            node_ports: 30000..=32767,
            load_balancer_pool: Vec::new(),
            max_finished_pods: 12_500,
            node_monitor_grace: Duration::from_secs(50),
            node_startup_grace: Duration::from_secs(60),
            eviction_interval: Duration::from_secs(10),
            unhealthy_percent: 55,
            large_zone: 50,
            autoscaler: AutoscalerOptions::default(),
            queue_metrics: QueueMetrics::default(),
            job_metrics: JobMetrics::default(),
            endpoint_slice_metrics: EndpointSliceMetrics::default(),
            stateful_set_metrics: StatefulSetMetrics::default(),
            zone_metrics: ZoneMetrics::default(),
            autoscaler_metrics: AutoscalerMetrics::default(),
            running_controllers: RunningControllers::default(),
        }
    }
}

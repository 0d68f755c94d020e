//! Configuration of the control plane.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use coracle_apiserver::{
    AuditConfig, AuthorizationConfig, InitialResourcesOptions, OidcConfig, PluginSelection,
    RequestHeaderConfig, RuntimeConfig, ServerFeatures, ServerOptions, TokenWebhookConfig,
};
use coracle_controllers::{AutoscalerOptions, ControllerSelection};
use coracle_scheduler::SchedulerConfig;
use ipnetwork::{IpNetwork, Ipv4Network};

use crate::leader::LeaderElection;
use crate::serving::{CertificateFiles, ServingOptions};

/// Connection to etcd.
#[derive(Clone, Debug)]
pub struct EtcdConfig {
    /// URLs of etcd's members.
    pub servers: Vec<String>,
    /// Prefix of all keys. Clusters that share one etcd have different prefixes.
    pub prefix: String,
    /// Authorities of etcd's certificates.
    pub ca_file: Option<PathBuf>,
    /// The client certificate and its key.
    pub identity: Option<CertificateFiles>,
    /// Interval of compactions of etcd's history; `None` if another program compacts it.
    pub compaction: Option<Duration>,
    /// Maximum age of the sizes of etcd's databases in the metrics; `None` if the metrics have no sizes.
    pub size_max_age: Option<Duration>,
}

/// Configuration of the control plane.
#[derive(Clone, Debug)]
pub struct ControlPlaneConfig {
    /// State directory, which survives reboots: `store/`, `pki/`, `admin.kubeconfig`.
    pub state_dir: PathBuf,
    /// The address on which the API server listens.
    pub listen: SocketAddr,
    /// The address by which nodes and pods reach the API server; `None` uses the machine's own address.
    pub advertise: Option<IpAddr>,
    /// Additional names and addresses by which clients reach the API server.
    pub serving_names: Vec<String>,
    /// Certificates and TLS of the API server.
    pub serving_tls: ServingOptions,
    /// The node that joins from this machine, if any. The controllers approve the API server's names and addresses in
    /// the certificate of this node.
    pub own_node: Option<String>,
    /// Address ranges of pods, at most one of each family. Each node gets a part of each range.
    pub cluster_cidrs: Vec<IpNetwork>,
    /// Prefix lengths of the parts that each node gets, for IPv4 and IPv6.
    pub node_masks: [u8; 2],
    /// Address range of services. The family of this range is the default family of services.
    pub service_cidr: IpNetwork,
    /// Address range of services in the other family.
    pub secondary_service_cidr: Option<IpNetwork>,
    /// File of static tokens: lines of `token,user,uid[,"group,…"]`.
    pub token_file: Option<PathBuf>,
    /// File of passwords for basic authentication: CSV records of `password,user,uid[,"group,…"]`.
    pub password_file: Option<PathBuf>,
    /// External signer of service account tokens: the path of a unix socket. An abstract address begins with `@`.
    pub token_signer: Option<String>,
    /// Issuers of tokens and the rule for anonymous requests: a file of upstream's `AuthenticationConfiguration`.
    pub authentication_file: Option<PathBuf>,
    /// Issuer of OpenID Connect tokens. Cannot be combined with the authentication file.
    pub oidc: Option<OidcConfig>,
    /// Webhook that authenticates bearer tokens.
    pub token_webhook: Option<TokenWebhookConfig>,
    /// Proxy that sends the user's name in request headers.
    pub request_header: Option<RequestHeaderConfig>,
    /// Whether requests without credentials are accepted. The authentication file takes precedence.
    pub anonymous_auth: bool,
    /// The authorizers and their order.
    pub authorization: AuthorizationConfig,
    /// Encryption of any resources: a file of upstream's `EncryptionConfiguration`.
    pub encryption_config: Option<EncryptionFile>,
    /// Key file for the encryption of Secrets; `None` is `sealing.key` in the state directory, created at the first
    /// start.
    pub encryption_key_file: Option<PathBuf>,
    /// The etcd that has the cluster's objects; `None` uses the embedded store.
    pub etcd: Option<EtcdConfig>,
    /// Leader election of controllers and scheduler, which takes place if the store is on etcd.
    pub election: LeaderElection,
    /// Configuration of the admission plugins: a file of upstream's `AdmissionConfiguration`.
    pub admission_file: Option<PathBuf>,
    /// The admission plugins that run.
    pub admission_plugins: PluginSelection,
    /// Options of the admission plugin InitialResources.
    pub initial_resources: InitialResourcesOptions,
    /// The built-in versions that are served.
    pub runtime_config: RuntimeConfig,
    /// Behaviour of the API server that depends on feature gates.
    pub features: ServerFeatures,
    /// Options of kube-apiserver, with the same defaults.
    pub options: ServerOptions,
    /// Audit policy and backends; `None` disables auditing.
    pub audit: Option<AuditConfig>,
    /// The controllers that run.
    pub controllers: ControllerSelection,
    /// Whether the scheduler runs.
    pub run_scheduler: bool,
    /// Configuration of the scheduler.
    pub scheduler: SchedulerConfig,
    /// Maximum validity of certificates that are signed on request.
    pub signing_duration: Duration,
    /// Time after which an unused legacy token of a service account becomes invalid. An invalid token is deleted after
    /// the same time.
    pub token_clean_up_period: Duration,
    /// Time without a heartbeat after which a node's conditions become Unknown and its pods are evicted.
    pub node_monitor_grace: Duration,
    /// Number of finished pods of the cluster that are kept; 0 keeps all.
    pub max_finished_pods: usize,
    /// Options of horizontal pod autoscalers.
    pub autoscaler: AutoscalerOptions,
    /// Whether nodes serve LoadBalancer services at the nodes' addresses.
    pub node_balancers: bool,
    /// Ranges from which LoadBalancer services of the class `coracle.dev/address-pool` get addresses.
    pub load_balancer_pool: Vec<IpNetwork>,
    /// Maximum duration of a request that is not long-running.
    pub request_timeout: Duration,
    /// Maximum read-only and mutating requests in flight.
    pub max_in_flight: [usize; 2],
    /// Time for which the server still accepts requests after a shutdown begins. `/readyz` fails during this time.
    pub shutdown_delay: Duration,
    /// The settings in effect, by the names of their flags, for `/flagz`. They contain no secrets.
    pub flags: BTreeMap<String, String>,
    /// The metric of the feature gates, in the text format of Prometheus, for `/metrics` of the API server.
    pub feature_metrics: Arc<str>,
}

/// An EncryptionConfiguration.
#[derive(Clone, Debug)]
pub struct EncryptionFile {
    /// The file.
    pub path: PathBuf,
    /// Whether the file is read again when it changes.
    pub reload: bool,
}

// === impl ControlPlaneConfig ===

impl ControlPlaneConfig {
    /// The configuration of `coracle up`, with this state directory.
    #[must_use]
    pub fn new(state_dir: &Path) -> Self {
        // A prefix of 16 bits is always valid; the error cannot happen.
        let network = |a, b| {
            Ipv4Network::new(Ipv4Addr::new(a, b, 0, 0), 16).unwrap_or_else(|_| Ipv4Addr::UNSPECIFIED.into())
        };
        Self {
            state_dir: state_dir.to_owned(),
            listen: SocketAddr::from((Ipv4Addr::UNSPECIFIED, 6443)),
            advertise: None,
            serving_names: Vec::new(),
            serving_tls: ServingOptions::default(),
            own_node: None,
            cluster_cidrs: vec![IpNetwork::V4(network(10, 42))],
            node_masks: [24, 64],
            service_cidr: IpNetwork::V4(network(10, 43)),
            secondary_service_cidr: None,
            token_file: None,
            password_file: None,
            token_signer: None,
            authentication_file: None,
            oidc: None,
            token_webhook: None,
            request_header: None,
            anonymous_auth: true,
            authorization: AuthorizationConfig::default(),
            encryption_config: None,
            encryption_key_file: None,
            etcd: None,
            election: LeaderElection::default(),
            admission_file: None,
            admission_plugins: PluginSelection::default(),
            initial_resources: InitialResourcesOptions::default(),
            runtime_config: RuntimeConfig::default(),
            features: ServerFeatures::default(),
            options: ServerOptions::default(),
            audit: None,
            controllers: ControllerSelection::default(),
            run_scheduler: true,
            scheduler: SchedulerConfig::default(),
            signing_duration: Duration::from_secs(365 * 24 * 3600),
            token_clean_up_period: Duration::from_secs(365 * 24 * 3600),
            node_monitor_grace: Duration::from_secs(50),
            max_finished_pods: 12_500,
            autoscaler: AutoscalerOptions::default(),
            node_balancers: true,
            load_balancer_pool: Vec::new(),
            request_timeout: coracle_apiserver::REQUEST_TIMEOUT,
            max_in_flight: coracle_apiserver::MAX_IN_FLIGHT,
            shutdown_delay: Duration::ZERO,
            flags: BTreeMap::new(),
            feature_metrics: Arc::default(),
        }
    }
}

//! Settings of the control plane, as they are declared. `control_plane/checked.rs` checks them.
#![cfg_attr(
    not(feature = "controlplane"),
    allow(dead_code, reason = "a node alone accepts the settings of the control plane in its file")
)]

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::num::NonZero;
use std::path::PathBuf;

use ipnetwork::IpNetwork;

use super::audit_mode::AuditMode;
use super::ranges::{self, Ranges};
use super::sources::Sources;
use super::table::settings;
use super::value::{ByteSize, Fraction, GoDuration, Percent, PortRange, SniCertKey};

#[cfg(feature = "controlplane")]
mod audit;
#[cfg(feature = "controlplane")]
mod authentication;
#[cfg(feature = "controlplane")]
mod checked;
#[cfg(feature = "controlplane")]
mod etcd;
#[cfg(feature = "controlplane")]
mod serving;

#[cfg(feature = "controlplane")]
pub(crate) use checked::ControlPlane;

settings! {
    /// Settings of the control plane.
    pub(crate) struct ControlPlaneSettings = "control-plane";

    /// Address and port of the API server.
    listen: Option<SocketAddr> = unset "port 6443 of all addresses", "ADDRESS";
    /// Address at which clients reach the API server.
    advertise_address: Option<IpAddr> = unset "found from the routes", "IP";
    /// Ranges of pod addresses, at most one of each family. Each node gets a part of each range.
    cluster_cidr: Vec<IpNetwork> = default "10.42.0.0/16", "CIDR";
    /// Ranges of service addresses, at most one of each family. The first one has the default family.
    service_cidr: Vec<IpNetwork>
        = unset "10.43.0.0/16, or fd43::/112 if pods have IPv6 only", "CIDR", also "service-cluster-ip-range";
    /// Range of ports for node ports of services. Load balancers at the addresses of nodes cannot use these ports.
    service_node_port_range: PortRange = default "30000-32767", "PORT-PORT";
    /// Prefix length of a node's IPv4 range.
    node_cidr_mask_size_ipv4: u8 = default "24", "LENGTH";
    /// Prefix length of a node's IPv6 range.
    node_cidr_mask_size_ipv6: u8 = default "64", "LENGTH";
    /// File of static tokens: lines of token,user,uid,"group,group".
    token_auth_file: Option<PathBuf> = unset "", "FILE";
    /// File of passwords for basic authentication: lines of password,user,uid,"group,group". Kubernetes has no such file since
    /// v1.19; tokens and certificates are safer.
    basic_auth_file: Option<PathBuf> = unset "", "FILE";
    /// Token issuers (OpenID Connect) and the rule for anonymous requests: an AuthenticationConfiguration, as for
    /// kube-apiserver.
    authentication_config: Option<PathBuf> = unset "", "FILE";
    /// URL of an issuer of OpenID Connect tokens. Needs oidc-client-id; excludes authentication-config, which can have several
    /// issuers.
    oidc_issuer_url: Option<String> = unset "", "URL";
    /// Client ID at the issuer: tokens must be for it.
    oidc_client_id: Option<String> = unset "", "ID";
    /// Authorities of the issuer's certificate.
    oidc_ca_file: Option<PathBuf> = unset "those of the machine", "FILE";
    /// Claim with the name of the user.
    oidc_username_claim: Option<String> = unset "sub", "CLAIM";
    /// Prefix of user names; - stands for no prefix.
    oidc_username_prefix: Option<String> = unset "the issuer's URL and #, or none for the claim email", "PREFIX";
    /// Claim with the groups of the user.
    oidc_groups_claim: Option<String> = unset "", "CLAIM";
    /// Prefix of groups.
    oidc_groups_prefix: Option<String> = unset "", "PREFIX";
    /// Claims of a token that must have these values. Values with a comma are only possible in the configuration
    /// file.
    oidc_required_claim: BTreeMap<String, String> = default "", "CLAIM=VALUE";
    /// Signing algorithms that tokens may have: RS256, RS384, RS512, ES256, ES384, ES512, PS256, PS384, PS512.
    oidc_signing_algs: Vec<String> = unset "RS256", "ALGORITHM";
    /// Accept requests without credentials, as the user system:anonymous. Needs another mode than AlwaysAllow.
    anonymous_auth: bool = default "true", "BOOL";
    /// Kubeconfig file of the webhook that authenticates bearer tokens by TokenReviews.
    authentication_token_webhook_config_file: Option<PathBuf> = unset "", "FILE";
    /// Time to live of the webhook's cached answers about tokens.
    authentication_token_webhook_cache_ttl: GoDuration = default "2m", "DURATION";
    /// Version of the TokenReviews: v1 or v1beta1.
    authentication_token_webhook_version: String = default "v1", "VERSION";
    /// Certificate authorities of an authenticating proxy, which sends the user's name in request headers.
    requestheader_client_ca_file: Option<PathBuf> = unset "", "FILE";
    /// Common names that the proxy's certificate may have. Empty: all certificates of its authority are accepted.
    requestheader_allowed_names: Vec<String> = default "", "NAME";
    /// Headers with the user's name.
    requestheader_username_headers: Vec<String> = default "X-Remote-User", "HEADER";
    /// Headers with the user's uid.
    requestheader_uid_headers: Vec<String> = default "X-Remote-Uid", "HEADER";
    /// Headers with the user's groups.
    requestheader_group_headers: Vec<String> = default "X-Remote-Group", "HEADER";
    /// Prefixes of the headers with extra values of the user.
    requestheader_extra_headers_prefix: Vec<String> = default "X-Remote-Extra-", "PREFIX";
    /// Authorizers in their order: Node, RBAC, ABAC, Webhook, AlwaysAllow, AlwaysDeny. The first decision applies.
    authorization_mode: Vec<String> = default "Node,RBAC", "MODE";
    /// File with the policies of the mode ABAC: one JSON object per line.
    authorization_policy_file: Option<PathBuf> = unset "", "FILE";
    /// Kubeconfig file of the mode Webhook.
    authorization_webhook_config_file: Option<PathBuf> = unset "", "FILE";
    /// Time to live of cached decisions of the webhook that allow a request.
    authorization_webhook_cache_authorized_ttl: GoDuration = default "5m", "DURATION";
    /// Time to live of cached decisions of the webhook that do not allow a request.
    authorization_webhook_cache_unauthorized_ttl: GoDuration = default "30s", "DURATION";
    /// Version of the SubjectAccessReviews: v1 or v1beta1.
    authorization_webhook_version: String = default "v1", "VERSION";
    /// Authorizers, several webhooks and their conditions: an AuthorizationConfiguration, as for kube-apiserver, instead of
    /// authorization-mode. It is read again when it changes.
    authorization_config: Option<PathBuf> = unset "", "FILE";
    /// Unix socket of an external signer of service account tokens (externaljwt v1), instead of the key in the state
    /// directory. A name in the abstract namespace begins with @.
    service_account_signing_endpoint: Option<String> = unset "", "SOCKET";
    /// Issuers of service account tokens. The first one issues tokens; tokens of the others are accepted too.
    service_account_issuer: Vec<String> = unset "https://kubernetes.default.svc.cluster.local", "ISSUER";
    /// URL of the keys of service account tokens in the discovery document of the issuer.
    service_account_jwks_uri: Option<String> = unset "at the address of the API server", "URL";
    /// Maximum validity of service account tokens. A request for a longer validity gets this one.
    service_account_max_token_expiration: Option<GoDuration> = unset "", "DURATION";
    /// Extend tokens of pods with the default validity (about an hour) to one year, for programs that do not read the
    /// renewed token file. Uses after the default validity are recorded in audit events and metrics.
    service_account_extend_token_expiration: bool = default "true", "BOOL";
    /// Audiences of the API server: tokens of service accounts must be for one of them.
    api_audiences: Vec<String> = unset "the issuers", "AUDIENCE";
    /// File of keys that encrypt Secrets in the store: lines of an id and 32 bytes in base64. The first key encrypts, all
    /// of them decrypt.
    encryption_key_file: Option<PathBuf> = unset "sealing.key in the state directory, made at the first start", "FILE";
    /// Encryption of any resources in the store: an EncryptionConfiguration, as for kube-apiserver. Secrets that it does not
    /// name are encrypted with encryption-key-file.
    encryption_provider_config: Option<PathBuf> = unset "", "FILE";
    /// Read encryption-provider-config again when it changes.
    encryption_provider_config_automatic_reload: bool = default "false", "BOOL";
    /// URLs of the etcd members that have the cluster's objects. Several control planes can share them.
    etcd_servers: Vec<String> = unset "the embedded store", "URL";
    /// Other etcds for some resources. Refused, because the server compares revisions of all resources, and the revisions of
    /// several etcds cannot be compared.
    etcd_servers_overrides: Vec<String> = default "", "GROUP/RESOURCE#URLS";
    /// Authorities of etcd's certificates, for https URLs.
    etcd_cafile: Option<PathBuf> = unset "", "FILE";
    /// Client certificate for etcd.
    etcd_certfile: Option<PathBuf> = unset "", "FILE";
    /// Key of the client certificate for etcd.
    etcd_keyfile: Option<PathBuf> = unset "", "FILE";
    /// Prefix of the keys in etcd. Clusters that share an etcd have different prefixes.
    etcd_prefix: String = default "/coracle", "PREFIX";
    /// Interval of compactions of etcd's history, which one of the control planes makes. 0 if another program compacts it.
    etcd_compaction_interval: GoDuration = default "5m", "DURATION";
    /// Timeout of the health check etcd, which reads from etcd. 0 is the default.
    etcd_healthcheck_timeout: GoDuration = default "2s", "DURATION";
    /// Timeout of the readiness check etcd-readiness, which reads from etcd. 0 is the default.
    etcd_readycheck_timeout: GoDuration = default "2s", "DURATION";
    /// Maximum age of the sizes of etcd's databases in the metrics. They are requested when the metrics are read. With 0 the
    /// metrics have no sizes.
    etcd_db_metric_poll_interval: GoDuration = default "30s", "DURATION";
    /// With 0 the metrics have no numbers of objects. Other values have no effect: the numbers are always current, and etcd is
    /// not asked for them.
    etcd_count_metric_poll_period: GoDuration = default "1m", "DURATION";
    /// Time after which another control plane on the same etcd takes over controllers and scheduler; whole seconds.
    leader_elect_lease_duration: GoDuration = default "15s", "DURATION";
    /// Time after which controllers and scheduler stop if their lease cannot be renewed.
    leader_elect_renew_deadline: GoDuration = default "10s", "DURATION";
    /// Interval between attempts to take or to renew the lease.
    leader_elect_retry_period: GoDuration = default "2s", "DURATION";
    /// Configurations of admission plugins: an AdmissionConfiguration, as for kube-apiserver.
    admission_control_config_file: Option<PathBuf> = unset "", "FILE";
    /// Admission plugins that run besides the default ones, by upstream's names.
    enable_admission_plugins: Vec<String> = default "", "NAME";
    /// Default admission plugins that do not run.
    disable_admission_plugins: Vec<String> = default "", "NAME";
    /// Percentile of the usage that the admission plugin InitialResources takes as the request of a container.
    ir_percentile: Percent = default "90", "PERCENT";
    /// Let InitialResources use only the usage in the namespace of the pod.
    ir_namespace_only: bool = default "false", "BOOL";
    /// Built-in APIs that are served: entries KEY=true or KEY=false. KEY is api/all, api/ga, api/beta, api/alpha,
    /// GROUP/VERSION or GROUP/VERSION/RESOURCE; v1 is the core group. Versions with alpha or beta are off by default.
    runtime_config: Vec<String> = default "", "KEY=BOOL";
    /// Audit policy: a Policy of audit.k8s.io/v1. Needs audit-log-path or audit-webhook-config-file.
    audit_policy_file: Option<PathBuf> = unset "", "FILE";
    /// File of the audit log; - is the standard output. Needs audit-policy-file.
    audit_log_path: Option<PathBuf> = unset "", "FILE";
    /// When requests get their responses: blocking, after the event is written; batch, after the event is queued;
    /// blocking-strict, as blocking, and a request whose first event cannot be written fails.
    audit_log_mode: AuditMode = default "blocking", "MODE";
    /// Maximum number of queued events of the audit log; further events are dropped. For the mode batch.
    audit_log_batch_buffer_size: NonZero<u32> = default "10000", "COUNT";
    /// Number of events after which a batch is written to the audit log. For the mode batch.
    audit_log_batch_max_size: NonZero<u32> = default "1", "COUNT";
    /// Maximum time that an event of the audit log waits until its batch is full. For the mode batch.
    audit_log_batch_max_wait: GoDuration = default "0", "DURATION";
    /// Limit the rate of batches of the audit log. For the mode batch.
    audit_log_batch_throttle_enable: bool = default "false", "BOOL";
    /// Maximum average number of batches of the audit log per second; more than 0 if the rate is limited.
    audit_log_batch_throttle_qps: Fraction = default "0", "NUMBER";
    /// Maximum number of batches of the audit log at once, after a time with fewer batches than the average; more than 0 if the
    /// rate is limited.
    audit_log_batch_throttle_burst: u32 = default "0", "COUNT";
    /// Megabytes after which a new file of the audit log is started.
    audit_log_maxsize: NonZero<u32> = default "100", "MEGABYTES";
    /// Old files of the audit log that are kept; 0 keeps all.
    audit_log_maxbackup: u32 = default "10", "COUNT";
    /// Days for which old files of the audit log are kept; 0 keeps all.
    audit_log_maxage: u32 = default "0", "DAYS";
    /// Shorten events of the audit log above audit-log-truncate-max-event-size: request and response objects are removed,
    /// then long texts are cut. An event that is still larger is dropped.
    audit_log_truncate_enabled: bool = default "false", "BOOL";
    /// Maximum size of a batch of events; at least audit-log-truncate-max-event-size. Has no other effect, because each event
    /// is written alone.
    audit_log_truncate_max_batch_size: NonZero<u32> = default "10485760", "BYTES";
    /// Maximum size of an event of the audit log.
    audit_log_truncate_max_event_size: NonZero<u32> = default "102400", "BYTES";
    /// Controllers to run, by upstream's names: * enables all, -* none, -NAME disables one.
    controllers: Vec<String> = default "*", "NAME";
    /// Run the scheduler. Disable it if another program schedules the pods of the cluster.
    scheduler: bool = default "true", "BOOL";
    /// Kubeconfig file of a server that receives the audit events. Needs audit-policy-file.
    audit_webhook_config_file: Option<PathBuf> = unset "", "FILE";
    /// When the server gets audit events: batch, in batches from a queue; blocking, before the client gets the response;
    /// blocking-strict, as blocking, and a request whose first event the server does not accept fails.
    audit_webhook_mode: AuditMode = default "batch", "MODE";
    /// Maximum number of queued audit events for the server; further events are dropped. For the mode batch.
    audit_webhook_batch_buffer_size: NonZero<u32> = default "10000", "COUNT";
    /// Maximum number of audit events in one request to the server. For the mode batch.
    audit_webhook_batch_max_size: NonZero<u32> = default "400", "COUNT";
    /// Maximum time that an audit event waits until its batch is full. For the mode batch.
    audit_webhook_batch_max_wait: GoDuration = default "30s", "DURATION";
    /// Limit the rate of requests to the server. For the mode batch.
    audit_webhook_batch_throttle_enable: bool = default "true", "BOOL";
    /// Maximum average number of requests to the server per second; more than 0.
    audit_webhook_batch_throttle_qps: Fraction = default "10", "NUMBER";
    /// Maximum number of requests to the server at once, after a time with fewer requests than the average.
    audit_webhook_batch_throttle_burst: NonZero<u32> = default "15", "COUNT";
    /// Time before a failed request to the server is repeated. Each of four repetitions waits one and a half times as
    /// long as the one before. All attempts together take at most 30s.
    audit_webhook_initial_backoff: Option<GoDuration> = unset "500ms, and three repetitions", "DURATION";
    /// Shorten events for the server above audit-webhook-truncate-max-event-size: request and response objects are removed,
    /// then long texts are cut. An event that is still larger is dropped.
    audit_webhook_truncate_enabled: bool = default "false", "BOOL";
    /// Maximum size of the events in one request to the server; at least audit-webhook-truncate-max-event-size.
    audit_webhook_truncate_max_batch_size: NonZero<u32> = default "10485760", "BYTES";
    /// Maximum size of an event for the server.
    audit_webhook_truncate_max_event_size: NonZero<u32> = default "102400", "BYTES";
    /// Configuration of the scheduler: a file of kind KubeSchedulerConfiguration, as for kube-scheduler.
    scheduler_config: Option<PathBuf> = unset "", "FILE";
    /// Further names or addresses of the API server for its certificate.
    tls_san: Vec<String> = default "", "NAME";
    /// Certificate of the API server with its intermediate certificates, instead of a certificate that the cluster's
    /// authority signs. Nodes and pods trust only the cluster's authority: for other authorities, use tls-sni-cert-key.
    apiserver_cert_file: Option<PathBuf>
        = unset "a certificate of the cluster's authority", "FILE", also "tls-cert-file";
    /// Private key of apiserver-cert-file.
    apiserver_key_file: Option<PathBuf> = unset "", "FILE", also "tls-private-key-file";
    /// Certificates for clients that send one of the server names: entries CERT,KEY:NAME,NAME. Without names, the
    /// names in the certificate are used. A name may begin with a wildcard (*.). Entries are separated by
    /// semicolons, or given by several flags.
    tls_sni_cert_key: Vec<SniCertKey> = default "", "CERT,KEY[:NAMES]";
    /// Minimum version of TLS: VersionTLS12 or VersionTLS13.
    tls_min_version: String = default "VersionTLS12", "VERSION";
    /// Cipher suites for TLS 1.2, by their names in Go. Those of TLS 1.3 are always in use.
    tls_cipher_suites: Vec<String> = unset "all supported ones", "SUITE";
    /// Time without use after which the token in an automatically created Secret of a service account (Kubernetes
    /// before 1.24) becomes invalid. After the same time again, the Secret is deleted.
    legacy_service_account_token_clean_up_period: GoDuration = default "8760h", "DURATION";
    /// Name of the node that joins from this machine. Its certificate may contain addresses of the API server.
    own_node: Option<String> = unset "", "NAME";
    /// Validity of certificates that nodes request, in seconds.
    cluster_signing_seconds: NonZero<u32> = default "31536000", "SECONDS";
    /// Seconds without a lease renewal after which a node is Unknown and its pods are evicted.
    node_monitor_grace_seconds: NonZero<u32> = default "50", "SECONDS";
    /// Maximum number of finished pods in the cluster; 0: no limit. Above it, the oldest finished pods are deleted.
    terminated_pod_gc_threshold: u32 = default "12500", "COUNT";
    /// Time between two reconciles of a HorizontalPodAutoscaler; at least 1s.
    horizontal_pod_autoscaler_sync_period: GoDuration = default "15s", "DURATION";
    /// Deviation of a metric from its target, as a fraction of the target, below which a HorizontalPodAutoscaler keeps the
    /// number of pods. A tolerance in its behavior takes precedence.
    horizontal_pod_autoscaler_tolerance: Fraction = default "0.1", "FRACTION";
    /// Time for which a HorizontalPodAutoscaler keeps the highest number of pods that its metrics have proposed. A
    /// stabilization window in its behavior takes precedence.
    horizontal_pod_autoscaler_downscale_stabilization: GoDuration = default "5m", "DURATION";
    /// Time after a pod's start during which its CPU usage counts only if the pod is ready.
    horizontal_pod_autoscaler_cpu_initialization_period: GoDuration = default "5m", "DURATION";
    /// Time after a pod's start. A pod that is not ready, and whose condition Ready has not changed after this time, counts as
    /// starting: its CPU usage is ignored.
    horizontal_pod_autoscaler_initial_readiness_delay: GoDuration = default "30s", "DURATION";
    /// Nodes serve LoadBalancer services at their own addresses: services without a class, and services of the class
    /// coracle.dev/node-addresses. Disable it if another program serves them.
    node_balancers: bool = default "true", "BOOL";
    /// Addresses for LoadBalancer services of the class coracle.dev/address-pool. Nodes announce them in their network, so
    /// no other machine may use them.
    load_balancer_pool: Vec<IpNetwork> = default "", "CIDR";
    /// Seconds for which a pod without its own toleration of the taint not-ready stays on a node that is not ready.
    default_not_ready_toleration_seconds: i64 = default "300", "SECONDS";
    /// Seconds for which a pod without its own toleration of the taint unreachable stays on an unreachable node.
    default_unreachable_toleration_seconds: i64 = default "300", "SECONDS";
    /// Time after which an event is deleted; at least 1s.
    event_ttl: GoDuration = default "1h", "DURATION";
    /// Maximum duration of an API request that is not a watch, a log or a stream; at least 1s.
    request_timeout: GoDuration = default "60s", "DURATION";
    /// Minimum duration in seconds of a watch whose request has no timeout. Such a watch ends at a random time between
    /// once and twice this duration; 0: no limit.
    min_request_timeout: u32 = default "1800", "SECONDS";
    /// Share the requests in flight by FlowSchemas and PriorityLevelConfigurations. Without it, only max-requests-inflight and
    /// max-mutating-requests-inflight limit them.
    enable_priority_and_fairness: bool = default "true", "BOOL";
    /// Probability that a request asks its HTTP/2 client to connect again, so that clients spread over several API servers
    /// behind a load balancer; at most 0.02. Do not set it for a single server.
    goaway_chance: Fraction = default "0", "FRACTION";
    /// Directives of the header Strict-Transport-Security, which browsers read: max-age=SECONDS, includeSubDomains, preload.
    strict_transport_security_directives: Vec<String> = default "", "DIRECTIVE";
    /// Regular expressions of the origins whose web pages may read responses (CORS). Each must contain ^ or // before the
    /// host, and $ or : after it.
    cors_allowed_origins: Vec<String> = default "", "REGEX";
    /// Maximum read-only API requests in flight. The priority levels share the sum of this number and
    /// max-mutating-requests-inflight.
    max_requests_inflight: NonZero<u32> = default "400", "COUNT";
    /// Maximum mutating API requests in flight. One user gets at most half of this number, and half of
    /// max-requests-inflight.
    max_mutating_requests_inflight: NonZero<u32> = default "200", "COUNT";
    /// Maximum bytes of all objects in one namespace, as they are stored; 0: no limit. In a full namespace, writes that
    /// make an object longer are refused.
    max_namespace_bytes: Option<ByteSize>
        = unset "1/32 of the machine's memory, at least 32Mi and at most 1Gi", "BYTES";
    /// Maximum bytes of all objects in namespaces that are not of the system (kube-system, kube-public,
    /// kube-node-lease), as they are stored; 0: no limit. Above it, writes that make such an object longer are refused,
    /// unless its namespace has at most 1Mi.
    max_all_namespaces_bytes: Option<ByteSize>
        = unset "an eighth of the machine's memory, at least 128Mi", "BYTES";
    /// Time for which the API server still accepts requests during its shutdown, while /readyz fails.
    shutdown_delay_duration: GoDuration = default "0s", "DURATION";
    /// Refuse new requests with 429 and Retry-After after shutdown-delay-duration, until the requests in flight have ended.
    /// Without it, the API server then accepts no more connections.
    shutdown_send_retry_after: bool = default "false", "BOOL";
    /// Time over which the API server ends its watches at its shutdown. Each watch ends at a random time in it, so that
    /// clients do not all connect to other servers at once. 0s ends all watches at the same time.
    shutdown_watch_termination_grace_period: GoDuration = default "0s", "DURATION";
}

// === impl ControlPlaneSettings ===

impl ControlPlaneSettings {
    /// The address ranges of pods and Services. A node needs them for its DNS server.
    pub(super) fn ranges(&self, sources: &mut Sources) -> Option<Ranges> {
        let masks = [self.node_cidr_mask_size_ipv4, self.node_cidr_mask_size_ipv6];
        sources.take(ranges::decide(self.cluster_cidr.clone(), self.service_cidr.clone(), masks))
    }
}

#[cfg(feature = "controlplane")]
fn count(number: NonZero<u32>) -> usize {
    usize::try_from(number.get()).unwrap_or(usize::MAX)
}

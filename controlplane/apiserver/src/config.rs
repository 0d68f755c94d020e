//! Configuration of the API server, and the errors of its startup.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use coracle_kinds::kind::RuntimeConfig;
use ipnetwork::IpNetwork;
use nix::unistd::{SysconfVar, sysconf};

use crate::admit::{PluginSelection, TolerationSeconds};
use crate::aggregation::FrontProxy;
use crate::audit::{AuditBatch, AuditTruncateConfig, AuditWebhookConfig, Auditor, LogBackend};
use crate::authn::{AuthenticationConfig, OidcConfig, RequestHeaderConfig, TokenWebhookConfig};
use crate::authz::AuthorizationConfig;
use crate::bounded_file;
use crate::cache::ByteLimits;
use crate::error::ApiError;
use crate::metrics::ComponentMetrics;
use crate::service_range::ServiceRanges;
use crate::usage_history::InitialResourcesOptions;

/// Maximum bytes of the authentication configuration file.
const MAX_AUTHENTICATION: u64 = 1 << 20;
/// Maximum bytes of the audit policy.
const MAX_AUDIT_POLICY: u64 = 1 << 20;
/// Minimum and maximum of the default byte limit of a namespace.
const NAMESPACE_BYTES: [usize; 2] = [32 << 20, 1 << 30];

/// Configuration of the API server.
pub struct ApiserverConfig {
    /// The address at which pods and nodes reach this server.
    pub advertise: SocketAddr,
    /// Address ranges of services. The first address of the default range is this server's own.
    pub service_ranges: ServiceRanges,
    /// Key that signs service-account tokens: PKCS#8, P-256.
    pub service_account_key: Vec<u8>,
    /// External signer of service-account tokens, in place of the key.
    pub token_signer: Option<Arc<coracle_token_signer::TokenSigner>>,
    /// Issuer of service account tokens: a URL.
    pub issuer: String,
    /// File with passwords for basic authentication.
    pub password_file: Option<PathBuf>,
    /// File with static tokens.
    pub token_file: Option<PathBuf>,
    /// Authentication configuration file: token issuers and the rule for anonymous requests, in upstream's format
    /// `AuthenticationConfiguration`.
    pub authentication_file: Option<PathBuf>,
    /// Issuer of OpenID Connect tokens. Cannot be combined with the authentication file.
    pub oidc: Option<OidcConfig>,
    /// Webhook that authenticates bearer tokens.
    pub token_webhook: Option<TokenWebhookConfig>,
    /// Proxy that authenticates users and sends their names in request headers.
    pub request_header: Option<RequestHeaderConfig>,
    /// Whether requests without credentials are accepted. The authentication file takes precedence.
    pub anonymous_auth: bool,
    /// The authorizers and their order.
    pub authorization: AuthorizationConfig,
    /// TLS for requests to kubelets.
    pub kubelet: KubeletTls,
    /// Admission configuration file, in upstream's format `AdmissionConfiguration`.
    pub admission_file: Option<PathBuf>,
    /// The admission plugins that run.
    pub admission_plugins: PluginSelection,
    /// Options of the admission plugin InitialResources, which is off by default.
    pub initial_resources: InitialResourcesOptions,
    /// The built-in API versions that are served.
    pub runtime_config: RuntimeConfig,
    /// Behaviour that feature gates control.
    pub features: ServerFeatures,
    /// Options of kube-apiserver, with the same defaults.
    pub options: ServerOptions,
    /// Audit policy and backends. `None` disables auditing.
    pub audit: Option<AuditConfig>,
    /// The client certificate of this server for requests to aggregated servers.
    pub front_proxy: FrontProxy,
    /// Maximum duration of a request that is not long-running, and of the sending of its response.
    pub request_timeout: Duration,
    /// Maximum read-only and mutating requests in flight. Their sum is the number of seats of all priority levels. One
    /// user gets at most half of each maximum.
    pub max_in_flight: [usize; 2],
    /// The settings in effect, by the names of their flags, for `/flagz`. They contain no secrets.
    pub flags: BTreeMap<String, String>,
    /// Metrics of other components in this process.
    pub component_metrics: Option<ComponentMetrics>,
    /// The state of the key management services that encrypt the store. `None` without such services.
    pub encryption_health: Option<EncryptionHealth>,
    /// The components (`controller-manager`, `scheduler`) that run in this process, for the component statuses.
    pub own_components: Vec<&'static str>,
    /// Time for which the server still accepts requests after a shutdown begins. Load balancers switch to another
    /// server during this time.
    pub shutdown_delay: Duration,
}

/// Returns the failure of a key management service, without waiting for it.
#[derive(Clone)]
pub struct EncryptionHealth(pub Arc<dyn Fn() -> Result<(), String> + Send + Sync>);

/// Behaviour that feature gates of Kubernetes control.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "each feature gate is independent of the others")]
pub struct ServerFeatures {
    /// Whether large responses are compressed for clients that accept it. Gate `APIResponseCompression`.
    pub response_compression: bool,
    /// Whether a watch can begin with all objects (`sendInitialEvents`). Gate `WatchList`.
    pub watch_list: bool,
    /// Whether the verbs `impersonate:MODE` permit impersonation. Gate `ConstrainedImpersonation`.
    pub constrained_impersonation: bool,
    /// Whether clients can delete objects that cannot be decrypted. Gate `AllowUnsafeMalformedObjectDeletion`.
    pub unsafe_deletion: bool,
}

impl Default for ServerFeatures {
    fn default() -> Self {
        Self {
            response_compression: true,
            watch_list: true,
            constrained_impersonation: true,
            unsafe_deletion: false,
        }
    }
}

/// Options of kube-apiserver, with its defaults.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// Port range for node ports of services.
    pub node_ports: RangeInclusive<u16>,
    /// Default tolerations of pods.
    pub toleration_seconds: TolerationSeconds,
    /// Time after which an event is deleted.
    pub event_lifetime: Duration,
    /// Maximum encoded bytes of the objects in one namespace; 0: no limit. `None`: 1/32 of the machine's memory, at
    /// least 32 MiB and at most 1 GiB.
    pub max_namespace_bytes: Option<usize>,
    /// Maximum encoded bytes of the objects in all namespaces except the system namespaces; 0: no limit. `None`: an
    /// eighth of the machine's memory, at least 128 MiB.
    pub max_all_namespaces_bytes: Option<usize>,
    /// Issuers of service account tokens. The first issuer issues new tokens. Tokens of all issuers are accepted. If
    /// the list is empty, [`ApiserverConfig::issuer`] is the issuer.
    pub token_issuers: Vec<String>,
    /// Audiences of this server. If the list is empty, the issuers are the audiences.
    pub audiences: Vec<String>,
    /// Maximum validity of service account tokens in seconds. `None` for no maximum. Tokens that `extend_tokens`
    /// extends are valid for longer.
    pub max_token_seconds: Option<i64>,
    /// URL of the token keys in the discovery document. `None` uses this server's address.
    pub keys_url: Option<String>,
    /// Whether tokens of pods with the default validity are accepted for a year.
    pub extend_tokens: bool,
    /// Minimum duration of a watch whose request has no timeout. Such a watch ends at a random time between once and
    /// twice this duration; 0: no limit.
    pub min_watch: Duration,
    /// Whether priority levels share the requests in flight. Otherwise only [`ApiserverConfig::max_in_flight`] limits
    /// them.
    pub priority_and_fairness: bool,
    /// Value of the header `Strict-Transport-Security`; empty for none.
    pub strict_transport_security: String,
    /// Regular expressions of the origins whose web pages may read responses; empty for none.
    pub allowed_origins: Vec<String>,
    /// Probability that a request asks its HTTP/2 client to connect again, so that clients spread over several servers;
    /// 0 for never.
    pub goaway_chance: f64,
    /// Whether the server refuses new requests with 429 and `Retry-After` at its shutdown until the requests in flight
    /// have ended. Otherwise the server accepts no more connections.
    pub send_retry_after: bool,
    /// Time over which the ends of watches are spread at the shutdown.
    pub watch_grace: Duration,
    /// The ranges of external IPs that nodes permit. The server warns about Services with other external IPs. `None` if
    /// the server does not know the ranges.
    pub external_ips: Option<Vec<IpNetwork>>,
    /// Health checks and metrics of the store.
    pub store: StoreOptions,
}

/// Health checks and metrics of the store, with the defaults of kube-apiserver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoreOptions {
    /// Timeout of the check `etcd`.
    pub health_timeout: Duration,
    /// Timeout of the check `etcd-readiness`.
    pub ready_timeout: Duration,
    /// Whether the metrics have the number of objects of each resource.
    pub has_object_counts: bool,
}

impl Default for StoreOptions {
    fn default() -> Self {
        let timeout = Duration::from_secs(2);
        Self { health_timeout: timeout, ready_timeout: timeout, has_object_counts: true }
    }
}

impl Default for ServerOptions {
    fn default() -> Self {
        Self {
            node_ports: 30000..=32767,
            toleration_seconds: TolerationSeconds { not_ready: 300, unreachable: 300 },
            event_lifetime: Duration::from_secs(3600),
            max_namespace_bytes: None,
            max_all_namespaces_bytes: None,
            token_issuers: Vec::new(),
            audiences: Vec::new(),
            max_token_seconds: None,
            keys_url: None,
            extend_tokens: true,
            min_watch: Duration::from_secs(1800),
            priority_and_fairness: true,
            strict_transport_security: String::new(),
            allowed_origins: Vec::new(),
            goaway_chance: 0.0,
            send_retry_after: false,
            watch_grace: Duration::ZERO,
            external_ips: None,
            store: StoreOptions::default(),
        }
    }
}

impl ServerOptions {
    /// The maximum encoded bytes of the objects in namespaces.
    pub(crate) fn byte_limits(&self) -> ByteLimits {
        let default = default_byte_limits(machine_memory());
        let limit = |set: Option<usize>, default| match set.unwrap_or(default) {
            0 => usize::MAX,
            limit => limit,
        };
        let namespace = limit(self.max_namespace_bytes, default.namespace);
        ByteLimits::new(namespace, limit(self.max_all_namespaces_bytes, default.all))
    }
}

/// The default byte limits of namespaces for a machine with `memory` bytes of memory. Objects take up to four times as
/// much memory as their encoding. The limit of one namespace is at most a quarter of the limit of all namespaces.
fn default_byte_limits(memory: usize) -> ByteLimits {
    let [min, max] = NAMESPACE_BYTES;
    ByteLimits::new((memory / 32).clamp(min, max), (memory / 8).max(4 * min))
}

/// The machine's memory in bytes. 0 if the kernel does not report it.
fn machine_memory() -> usize {
    let value = |variable| {
        let found = sysconf(variable).ok().flatten();
        found.and_then(|value| usize::try_from(value).ok()).unwrap_or(0)
    };
    value(SysconfVar::_PHYS_PAGES).saturating_mul(value(SysconfVar::PAGE_SIZE))
}

/// Configuration of auditing.
#[derive(Clone, Debug)]
pub struct AuditConfig {
    /// File of the policy: a `Policy` of `audit.k8s.io/v1`.
    pub policy_file: PathBuf,
    /// Options of the log file. `None` for no log.
    pub log: Option<coracle_audit::LogOptions>,
    /// Mode of the log: whether requests wait for it.
    pub log_mode: coracle_audit::Mode,
    /// Settings of the batch mode of the log.
    pub log_batch: AuditBatch,
    /// Limits on the size of events in the log. `None` for no limits.
    pub log_truncate: Option<AuditTruncateConfig>,
    /// The webhook that receives the audit events.
    pub webhook: Option<AuditWebhookConfig>,
}

/// TLS for requests to kubelets: the client certificate, and the CA of the kubelets' certificates.
#[derive(Clone)]
pub struct KubeletTls(pub Arc<rustls::ClientConfig>);

/// Reason why the API server cannot start.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The store failed.
    #[error("cannot load the cluster's objects")]
    Store(#[source] coracle_store::Error),
    /// The signing key is not a P-256 key.
    #[error("cannot use the service-account signing key: it is not a P-256 key in PKCS#8 form")]
    SigningKey,
    /// An authenticator cannot be created.
    #[error("cannot set up authentication: {0}")]
    Authentication(String),
    /// The authentication configuration is invalid.
    #[error("cannot use the authentication configuration {path}: {reason}")]
    AuthenticationFile {
        /// Path of the file.
        path: PathBuf,
        /// The invalid field, or the read error.
        reason: String,
    },
    /// The authorization configuration is invalid.
    #[error("cannot use the authorization configuration: {0}")]
    Authorization(String),
    /// The admission configuration is invalid.
    #[error("cannot use the admission configuration {path}: {reason}")]
    AdmissionFile {
        /// Path of the file.
        path: PathBuf,
        /// The invalid field, or the read error.
        reason: String,
    },
    /// The selection of admission plugins, or the configuration of a plugin, is invalid.
    #[error("cannot set up the admission plugins: {0}")]
    AdmissionPlugins(String),
    /// The header `Strict-Transport-Security` has invalid bytes.
    #[error("cannot use the directives of Strict-Transport-Security")]
    TransportSecurity(#[source] http::header::InvalidHeaderValue),
    /// A regular expression of an allowed origin is invalid.
    #[error("cannot use the allowed origins (cors-allowed-origins)")]
    AllowedOrigins(#[source] regex::Error),
    /// The audit policy cannot be read.
    #[error("cannot read the audit policy {path}: {reason}")]
    AuditPolicyFile {
        /// Path of the file.
        path: PathBuf,
        /// The cause.
        reason: String,
    },
    /// The audit policy is invalid.
    #[error("cannot use the audit policy {path}")]
    AuditPolicy {
        /// Path of the file.
        path: PathBuf,
        /// The invalid field.
        #[source]
        source: coracle_audit::PolicyError,
    },
    /// The audit log cannot be opened.
    #[error("cannot open the audit log {path}")]
    AuditLog {
        /// Path of the log.
        path: PathBuf,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// The audit webhook cannot be used.
    #[error("cannot use the audit webhook: {0}")]
    AuditWebhook(String),
    /// The default objects cannot be created.
    #[error("cannot create the default objects of the cluster")]
    Bootstrap(#[source] ApiError),
}

/// Reads the authentication configuration. Returns the configuration and the text of the file. Without a file there are
/// no issuers.
pub(crate) fn read_authentication(path: Option<&Path>) -> Result<(AuthenticationConfig, String), OpenError> {
    let Some(path) = path else { return Ok((AuthenticationConfig::default(), String::new())) };
    let failed = |reason: String| OpenError::AuthenticationFile { path: path.to_owned(), reason };
    let text = bounded_file::read_text(path, MAX_AUTHENTICATION).map_err(failed)?;
    let config = AuthenticationConfig::parse(&text).map_err(failed)?;
    Ok((config, text))
}

/// Reads the audit policy and opens the backends.
pub(crate) fn open_audit(config: AuditConfig) -> Result<Arc<Auditor>, OpenError> {
    let policy = read_audit_policy(&config.policy_file)?;
    let open = |options: coracle_audit::LogOptions| {
        let path = options.path.clone();
        coracle_audit::Log::open(options).map_err(|source| OpenError::AuditLog { path, source })
    };
    let log = config.log.map(open).transpose()?;
    let (mode, batch, truncate) = (config.log_mode, config.log_batch, config.log_truncate);
    let log = log.map(|log| LogBackend::start(log, mode, batch, truncate));
    Auditor::new(policy, log, config.webhook).map_err(OpenError::AuditWebhook)
}

/// Reads and checks the audit policy.
fn read_audit_policy(path: &Path) -> Result<coracle_audit::Policy, OpenError> {
    let text = bounded_file::read_text(path, MAX_AUDIT_POLICY)
        .map_err(|reason| OpenError::AuditPolicyFile { path: path.to_owned(), reason })?;
    coracle_audit::Policy::parse(&text)
        .map_err(|source| OpenError::AuditPolicy { path: path.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_large_audit_policy_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("policy.yaml");
        let policy = "apiVersion: audit.k8s.io/v1\nkind: Policy\nrules: [{level: Metadata}]\n";
        std::fs::write(&path, policy).unwrap();
        assert!(read_audit_policy(&path).is_ok());
        std::fs::write(&path, format!("{policy}#{}", "x".repeat(1 << 20))).unwrap();
        let error = read_audit_policy(&path).err().unwrap().to_string();
        assert!(error.ends_with("it is larger than 1048576 bytes"), "{error}");
    }

    #[test]
    fn a_namespace_may_have_a_quarter_of_the_bytes_of_all() {
        for (memory, namespace, all) in
            [(0, 32 << 20, 128 << 20), (4 << 30, 128 << 20, 512 << 20), (64 << 30, 1 << 30, 8 << 30)]
        {
            assert_eq!(default_byte_limits(memory), ByteLimits::new(namespace, all), "{memory}");
            assert!(namespace <= all / 4, "{memory}");
        }
        let limits = |max_namespace_bytes, max_all_namespaces_bytes| {
            let options =
                ServerOptions { max_namespace_bytes, max_all_namespaces_bytes, ..ServerOptions::default() };
            options.byte_limits()
        };
        assert_eq!(limits(Some(0), Some(7)), ByteLimits::new(usize::MAX, 7));
        assert_eq!(limits(Some(7), Some(0)), ByteLimits::new(7, usize::MAX));
        let default = limits(None, None);
        assert!(default.namespace >= 32 << 20 && default.all >= 128 << 20);
    }
}

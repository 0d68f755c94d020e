//! Settings of the control plane.

use std::net::{IpAddr, SocketAddr};
use std::num::NonZero;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;
use coracle_controlplane::{
    AuditConfig, AuditLogOptions, AuditWebhookConfig, AuthorizationConfig, ControllerSelection,
    PluginSelection, RequestHeaderConfig, TokenWebhookConfig,
};
use ipnetwork::IpNetwork;

use super::ranges::{self, Ranges};
use super::sources::Sources;
use super::table::settings;
use super::value::Age;
use super::{Dirs, address_or_port};

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
    service_cidr: Vec<IpNetwork> = unset "10.43.0.0/16, or fd43::/112 if pods have IPv6 only", "CIDR";
    /// Prefix length of a node's IPv4 range.
    node_cidr_mask_size_ipv4: u8 = default "24", "LENGTH";
    /// Prefix length of a node's IPv6 range.
    node_cidr_mask_size_ipv6: u8 = default "64", "LENGTH";
    /// File of static tokens: lines of token,user,uid,"group,group".
    token_auth_file: Option<PathBuf> = unset "", "FILE";
    /// Token issuers (OpenID Connect) and the rule for anonymous requests: an AuthenticationConfiguration, as for
    /// kube-apiserver.
    authentication_config: Option<PathBuf> = unset "", "FILE";
    /// Accept requests without credentials, as the user system:anonymous. Needs another mode than AlwaysAllow.
    anonymous_auth: bool = default "true", "BOOL";
    /// Kubeconfig file of a webhook that knows bearer tokens, by TokenReviews.
    authentication_token_webhook_config_file: Option<PathBuf> = unset "", "FILE";
    /// Time to live of the webhook's cached answers about tokens.
    authentication_token_webhook_cache_ttl: Age = default "2m", "DURATION";
    /// Version of the TokenReviews: v1 or v1beta1.
    authentication_token_webhook_version: String = default "v1", "VERSION";
    /// Authorities of an authenticating proxy, which names users in request headers.
    requestheader_client_ca_file: Option<PathBuf> = unset "", "FILE";
    /// Common names of the proxy's certificate. Without any, all certificates of its authority are accepted.
    requestheader_allowed_names: Vec<String> = default "", "NAME";
    /// Headers with the user's name.
    requestheader_username_headers: Vec<String> = default "X-Remote-User", "HEADER";
    /// Headers with the user's uid.
    requestheader_uid_headers: Vec<String> = default "X-Remote-Uid", "HEADER";
    /// Headers with the user's groups.
    requestheader_group_headers: Vec<String> = default "X-Remote-Group", "HEADER";
    /// Prefixes of the headers with further values of the user.
    requestheader_extra_headers_prefix: Vec<String> = default "X-Remote-Extra-", "PREFIX";
    /// Authorizers in their order: Node, RBAC, ABAC, Webhook, AlwaysAllow, AlwaysDeny. The first decision applies.
    authorization_mode: Vec<String> = default "Node,RBAC", "MODE";
    /// Policies of the mode ABAC: a file with one JSON object a line.
    authorization_policy_file: Option<PathBuf> = unset "", "FILE";
    /// Kubeconfig file of the mode Webhook.
    authorization_webhook_config_file: Option<PathBuf> = unset "", "FILE";
    /// Time to live of cached permissions of the webhook.
    authorization_webhook_cache_authorized_ttl: Age = default "5m", "DURATION";
    /// Time to live of cached refusals of the webhook.
    authorization_webhook_cache_unauthorized_ttl: Age = default "30s", "DURATION";
    /// Version of the SubjectAccessReviews: v1 or v1beta1.
    authorization_webhook_version: String = default "v1", "VERSION";
    /// Authorizers, several webhooks and their conditions: an AuthorizationConfiguration, as for kube-apiserver, instead of
    /// authorization-mode. It is read again when it changes.
    authorization_config: Option<PathBuf> = unset "", "FILE";
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
    /// Authorities of etcd's certificates, for https URLs.
    etcd_cafile: Option<PathBuf> = unset "", "FILE";
    /// Client certificate for etcd.
    etcd_certfile: Option<PathBuf> = unset "", "FILE";
    /// Key of the client certificate for etcd.
    etcd_keyfile: Option<PathBuf> = unset "", "FILE";
    /// Prefix of the keys in etcd. Clusters that share an etcd have different prefixes.
    etcd_prefix: String = default "/coracle", "PREFIX";
    /// Time after which another control plane on the same etcd takes over controllers and scheduler; whole seconds.
    leader_elect_lease_duration: Age = default "15s", "DURATION";
    /// Time after which controllers and scheduler stop if their lease cannot be renewed.
    leader_elect_renew_deadline: Age = default "10s", "DURATION";
    /// Pause between attempts to take or to renew the lease.
    leader_elect_retry_period: Age = default "2s", "DURATION";
    /// Configuration of the PodSecurity admission plugin: defaults and exemptions, as for kube-apiserver.
    admission_control_config_file: Option<PathBuf> = unset "", "FILE";
    /// Admission plugins that run besides the default ones, by upstream's names.
    enable_admission_plugins: Vec<String> = default "", "NAME";
    /// Default admission plugins that do not run.
    disable_admission_plugins: Vec<String> = default "", "NAME";
    /// Audit policy: a Policy of audit.k8s.io/v1. Needs audit-log-path or audit-webhook-config-file.
    audit_policy_file: Option<PathBuf> = unset "", "FILE";
    /// File of the audit log; - is the standard output. Needs audit-policy-file.
    audit_log_path: Option<PathBuf> = unset "", "FILE";
    /// Megabytes after which a new file of the audit log is started.
    audit_log_maxsize: NonZero<u32> = default "100", "MEGABYTES";
    /// Old files of the audit log that are kept; 0 keeps all.
    audit_log_maxbackup: u32 = default "10", "COUNT";
    /// Days for which old files of the audit log are kept; 0 keeps all.
    audit_log_maxage: u32 = default "0", "DAYS";
    /// Controllers that run, by upstream's names: * is all, -* none, -NAME all but this one.
    controllers: Vec<String> = default "*", "NAME";
    /// The scheduler runs. Disable it if another program schedules the pods of the cluster.
    scheduler: bool = default "true", "BOOL";
    /// Kubeconfig file of a server that receives the audit events. Needs audit-policy-file.
    audit_webhook_config_file: Option<PathBuf> = unset "", "FILE";
    /// Maximum number of queued audit events; further events are lost.
    audit_webhook_batch_buffer_size: NonZero<u32> = default "10000", "COUNT";
    /// Maximum number of audit events in one request to the server.
    audit_webhook_batch_max_size: NonZero<u32> = default "400", "COUNT";
    /// Maximum time that an audit event waits for others of its batch.
    audit_webhook_batch_max_wait: Age = default "30s", "DURATION";
    /// Configuration of the scheduler: a file of kind KubeSchedulerConfiguration, as for kube-scheduler.
    scheduler_config: Option<PathBuf> = unset "", "FILE";
    /// Further names or addresses of the API server for its certificate.
    tls_san: Vec<String> = default "", "NAME";
    /// Name of the node that joins from this machine. Its certificate may contain addresses of the API server.
    own_node: Option<String> = unset "", "NAME";
    /// Validity of certificates that nodes request, in seconds.
    cluster_signing_seconds: NonZero<u32> = default "31536000", "SECONDS";
    /// Seconds without a lease renewal after which a node is Unknown and its pods are evicted.
    node_monitor_grace_seconds: NonZero<u32> = default "50", "SECONDS";
    /// Nodes serve LoadBalancer services at their own addresses: services without a class, and services of the class
    /// coracle.dev/node-addresses. Disable it if another program serves them.
    node_balancers: bool = default "true", "BOOL";
    /// Addresses for LoadBalancer services of the class coracle.dev/address-pool. Nodes announce them in their network, so
    /// no other machine may use them.
    load_balancer_pool: Vec<IpNetwork> = default "", "CIDR";
    /// Maximum duration of an API request that is not a watch, a log or a stream; at least 1s.
    request_timeout: Age = default "60s", "DURATION";
    /// Maximum read-only API requests in flight. The priority levels share the sum of this and the next number.
    max_requests_inflight: NonZero<u32> = default "400", "COUNT";
    /// Maximum mutating API requests in flight. One user gets at most half of each number.
    max_mutating_requests_inflight: NonZero<u32> = default "200", "COUNT";
    /// Time for which the API server still accepts requests during its shutdown, while /readyz fails.
    shutdown_delay_duration: Age = default "0s", "DURATION";
}

/// Checked settings of the control plane.
#[derive(Clone, Debug)]
pub(crate) struct ControlPlane {
    pub(crate) dirs: Dirs,
    pub(crate) listen: SocketAddr,
    pub(crate) advertise_address: Option<IpAddr>,
    pub(crate) ranges: Ranges,
    pub(crate) token_auth_file: Option<PathBuf>,
    pub(crate) authentication_config: Option<PathBuf>,
    pub(crate) anonymous_auth: bool,
    pub(crate) token_webhook: Option<TokenWebhookConfig>,
    pub(crate) request_header: Option<RequestHeaderConfig>,
    pub(crate) authorization: AuthorizationConfig,
    /// The configuration of encryption, and whether it is read again when it changes.
    pub(crate) encryption: Option<(PathBuf, bool)>,
    pub(crate) encryption_key_file: Option<PathBuf>,
    pub(crate) etcd: Option<Etcd>,
    /// Duration, renewal deadline and retry period of leases.
    pub(crate) election: [Duration; 3],
    pub(crate) admission_control_config_file: Option<PathBuf>,
    pub(crate) admission_plugins: PluginSelection,
    pub(crate) audit: Option<AuditConfig>,
    pub(crate) controllers: ControllerSelection,
    pub(crate) scheduler: bool,
    pub(crate) scheduler_config: Option<PathBuf>,
    pub(crate) tls_sans: Vec<String>,
    pub(crate) own_node: Option<String>,
    pub(crate) signing_duration: Duration,
    pub(crate) node_monitor_grace: Duration,
    pub(crate) node_balancers: bool,
    pub(crate) load_balancer_pool: Vec<IpNetwork>,
    pub(crate) request_timeout: Duration,
    pub(crate) max_in_flight: [usize; 2],
    pub(crate) shutdown_delay: Duration,
}

/// Connection to etcd.
#[derive(Clone, Debug)]
pub(crate) struct Etcd {
    pub(crate) servers: Vec<String>,
    pub(crate) prefix: String,
    pub(crate) ca_file: Option<PathBuf>,
    /// Certificate and key.
    pub(crate) identity: Option<(PathBuf, PathBuf)>,
}

impl ControlPlaneSettings {
    /// Checks settings that depend on each other. All problems are collected in `sources`.
    pub(super) fn decide(self, dirs: &Dirs, sources: &mut Sources) -> Option<ControlPlane> {
        let audit = sources.take(self.audit())?;
        let token_webhook = sources.take(self.token_webhook())?;
        let authorization = sources.take(self.authorization())?;
        let request_header = self.request_header();
        let masks = [self.node_cidr_mask_size_ipv4, self.node_cidr_mask_size_ipv6];
        let ranges = sources.take(ranges::decide(self.cluster_cidr, self.service_cidr, masks))?;
        let load_balancer_pool = sources.take(ranges.check_pool(self.load_balancer_pool))?;
        let files = (self.etcd_cafile, self.etcd_certfile, self.etcd_keyfile);
        let etcd = sources.take(etcd(self.etcd_servers, self.etcd_prefix, files))?;
        let election = [
            self.leader_elect_lease_duration,
            self.leader_elect_renew_deadline,
            self.leader_elect_retry_period,
        ];
        let election = sources.take(election_times(election.map(|Age(time)| time)))?;
        let controllers = ControllerSelection::parse(self.controllers).context("controllers");
        let controllers = sources.take(controllers)?;
        let request_timeout = sources.take(at_least_a_second(self.request_timeout))?;
        let reload = self.encryption_provider_config_automatic_reload;
        let max = [self.max_requests_inflight, self.max_mutating_requests_inflight];
        Some(ControlPlane {
            dirs: dirs.clone(),
            listen: address_or_port(self.listen, 6443),
            advertise_address: self.advertise_address,
            ranges,
            token_auth_file: self.token_auth_file,
            authentication_config: self.authentication_config,
            anonymous_auth: self.anonymous_auth,
            token_webhook,
            request_header,
            authorization,
            encryption: self.encryption_provider_config.map(|path| (path, reload)),
            encryption_key_file: self.encryption_key_file,
            etcd,
            election,
            admission_control_config_file: self.admission_control_config_file,
            admission_plugins: PluginSelection {
                enabled: self.enable_admission_plugins,
                disabled: self.disable_admission_plugins,
            },
            audit,
            controllers,
            scheduler: self.scheduler,
            scheduler_config: self.scheduler_config,
            tls_sans: self.tls_san,
            own_node: self.own_node,
            signing_duration: seconds(self.cluster_signing_seconds),
            node_balancers: self.node_balancers,
            load_balancer_pool,
            node_monitor_grace: seconds(self.node_monitor_grace_seconds),
            request_timeout,
            max_in_flight: max.map(|count| usize::try_from(count.get()).unwrap_or(usize::MAX)),
            shutdown_delay: self.shutdown_delay_duration.0,
        })
    }

    /// The audit, if there are a policy and a backend.
    fn audit(&self) -> anyhow::Result<Option<AuditConfig>> {
        let log = self.audit_log_path.clone().map(|path| AuditLogOptions {
            path,
            max_bytes: u64::from(self.audit_log_maxsize.get()) << 20,
            max_backups: usize::try_from(self.audit_log_maxbackup).unwrap_or(usize::MAX),
            max_age: Duration::from_secs(u64::from(self.audit_log_maxage) * 24 * 3600),
        });
        let count = |count: NonZero<u32>| usize::try_from(count.get()).unwrap_or(usize::MAX);
        let webhook = self.audit_webhook_config_file.clone().map(|file| AuditWebhookConfig {
            file,
            buffer: count(self.audit_webhook_batch_buffer_size),
            batch: count(self.audit_webhook_batch_max_size),
            wait: self.audit_webhook_batch_max_wait.0,
        });
        audit(self.audit_policy_file.clone(), log, webhook)
    }

    /// The webhook for tokens, if there is one.
    fn token_webhook(&self) -> anyhow::Result<Option<TokenWebhookConfig>> {
        let version = self.authentication_token_webhook_version.clone();
        let is_known = matches!(version.as_str(), "v1" | "v1beta1");
        anyhow::ensure!(is_known, "authentication-token-webhook-version {version:?} must be v1 or v1beta1");
        let file = self.authentication_token_webhook_config_file.clone();
        let cache = self.authentication_token_webhook_cache_ttl.0;
        Ok(file.map(|file| TokenWebhookConfig { file, cache, version }))
    }

    /// The proxies that name the user in headers, if there are any.
    fn request_header(&self) -> Option<RequestHeaderConfig> {
        self.requestheader_client_ca_file.clone().map(|client_ca_file| RequestHeaderConfig {
            client_ca_file,
            allowed_names: self.requestheader_allowed_names.clone(),
            username_headers: self.requestheader_username_headers.clone(),
            uid_headers: self.requestheader_uid_headers.clone(),
            group_headers: self.requestheader_group_headers.clone(),
            extra_prefixes: self.requestheader_extra_headers_prefix.clone(),
        })
    }

    /// Authorization by modes or by a file, not by both.
    fn authorization(&self) -> anyhow::Result<AuthorizationConfig> {
        let config = AuthorizationConfig {
            modes: self.authorization_mode.clone(),
            policy_file: self.authorization_policy_file.clone(),
            webhook_file: self.authorization_webhook_config_file.clone(),
            webhook_authorized: self.authorization_webhook_cache_authorized_ttl.0,
            webhook_unauthorized: self.authorization_webhook_cache_unauthorized_ttl.0,
            webhook_version: self.authorization_webhook_version.clone(),
            file: self.authorization_config.clone(),
        };
        let version = &config.webhook_version;
        let is_known = matches!(version.as_str(), "v1" | "v1beta1");
        anyhow::ensure!(is_known, "authorization-webhook-version {version:?} must be v1 or v1beta1");
        let has_files = config.policy_file.is_some() || config.webhook_file.is_some();
        let is_single = config.file.is_none() || !has_files;
        anyhow::ensure!(
            is_single,
            "authorization-config cannot be used with authorization-policy-file or authorization-webhook-config-file"
        );
        Ok(config)
    }
}

fn seconds(count: NonZero<u32>) -> Duration {
    Duration::from_secs(count.get().into())
}

/// The audit, if there are a policy and a backend.
fn audit(
    policy: Option<PathBuf>,
    log: Option<AuditLogOptions>,
    webhook: Option<AuditWebhookConfig>,
) -> anyhow::Result<Option<AuditConfig>> {
    match (policy, log.is_some(), webhook.is_some()) {
        (Some(_), false, false) => {
            anyhow::bail!("audit-policy-file needs audit-log-path or audit-webhook-config-file")
        }
        (Some(policy_file), ..) => Ok(Some(AuditConfig { policy_file, log, webhook })),
        (None, false, false) => Ok(None),
        (None, true, _) => anyhow::bail!("audit-log-path needs audit-policy-file"),
        (None, false, true) => anyhow::bail!("audit-webhook-config-file needs audit-policy-file"),
    }
}

/// The connection to etcd, if there are servers.
fn etcd(
    servers: Vec<String>,
    prefix: String,
    (ca_file, certificate, key): (Option<PathBuf>, Option<PathBuf>, Option<PathBuf>),
) -> anyhow::Result<Option<Etcd>> {
    let has_files = ca_file.is_some() || certificate.is_some() || key.is_some();
    if servers.is_empty() {
        anyhow::ensure!(!has_files, "etcd-cafile, etcd-certfile and etcd-keyfile need etcd-servers");
        return Ok(None);
    }
    for server in &servers {
        let is_url = ["http://", "https://"].iter().any(|scheme| server.starts_with(scheme));
        anyhow::ensure!(is_url, "etcd-servers {server:?} must begin with http:// or https://");
        let is_secured = !server.starts_with("https://") || ca_file.is_some();
        anyhow::ensure!(is_secured, "etcd-servers {server:?} needs etcd-cafile");
    }
    let is_prefix = !prefix.trim_matches('/').is_empty();
    anyhow::ensure!(is_prefix, "etcd-prefix {prefix:?} must have a name, as in /coracle");
    let identity = match (certificate, key) {
        (Some(certificate), Some(key)) => Some((certificate, key)),
        (None, None) => None,
        _ => anyhow::bail!("etcd-certfile and etcd-keyfile must be given together"),
    };
    Ok(Some(Etcd { servers, prefix, ca_file, identity }))
}

fn election_times(times: [Duration; 3]) -> anyhow::Result<[Duration; 3]> {
    let [lease, deadline, retry] = times;
    let is_whole = lease.subsec_nanos() == 0 && lease.as_secs() <= 3600;
    anyhow::ensure!(is_whole, "leader-elect-lease-duration {lease:?} must be whole seconds, at most 1h");
    let descends = lease > deadline && deadline > retry && retry >= Duration::from_millis(100);
    anyhow::ensure!(
        descends,
        "leader-elect-lease-duration {lease:?} must exceed leader-elect-renew-deadline {deadline:?}, which must exceed \
         leader-elect-retry-period {retry:?} of at least 100ms"
    );
    Ok(times)
}

fn at_least_a_second(Age(timeout): Age) -> anyhow::Result<Duration> {
    anyhow::ensure!(timeout >= Duration::from_secs(1), "request-timeout {timeout:?} must be at least 1s");
    Ok(timeout)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn etcd_files_fit_the_servers() {
        let file = || Some(PathBuf::from("/f"));
        let of = |server: &str, files| {
            let servers = server.split(',').filter(|one| !one.is_empty()).map(str::to_owned).collect();
            etcd(servers, "/p".to_owned(), files)
        };
        assert_eq!(of("", (None, None, None)).unwrap().map(|etcd| etcd.prefix), None);
        assert!(of("http://a:1,https://b:2", (file(), file(), file())).unwrap().is_some());
        assert!(of("http://a:1", (None, None, None)).unwrap().is_some());
        for (server, files) in [
            ("", (file(), None, None)),
            ("a:1", (None, None, None)),
            ("https://a:1", (None, None, None)),
            ("https://a:1", (file(), file(), None)),
        ] {
            assert!(of(server, files).is_err(), "{server}");
        }
    }

    #[test]
    fn a_request_has_at_least_a_second() {
        assert!(at_least_a_second(Age(Duration::ZERO)).is_err());
        assert_eq!(at_least_a_second(Age(Duration::from_secs(90))).unwrap(), Duration::from_secs(90));
    }
}

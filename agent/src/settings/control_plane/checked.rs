//! The checked settings of the control plane.

use std::net::{IpAddr, SocketAddr};
use std::num::NonZero;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;
use coracle_controlplane::{
    AuditConfig, AuthorizationConfig, AutoscalerOptions, CertificateFiles, ControllerSelection,
    EncryptionFile, EtcdConfig, InitialResourcesOptions, LeaderElection, NamedCertificate, OidcConfig,
    PluginSelection, RequestHeaderConfig, RuntimeConfig, ServerOptions, ServingOptions, StoreOptions,
    TokenWebhookConfig,
};
use ipnetwork::IpNetwork;

use super::super::ranges::Ranges;
use super::super::sources::Sources;
use super::super::value::{ByteSize, Fraction, GoDuration};
use super::super::{Dirs, address_or_port};
use super::{ControlPlaneSettings, count};

/// Checked settings of the control plane.
#[derive(Clone, Debug)]
pub(crate) struct ControlPlane {
    pub(crate) dirs: Dirs,
    pub(crate) listen: SocketAddr,
    pub(crate) advertise_address: Option<IpAddr>,
    pub(crate) ranges: Ranges,
    pub(crate) token_auth_file: Option<PathBuf>,
    pub(crate) basic_auth_file: Option<PathBuf>,
    pub(crate) authentication_config: Option<PathBuf>,
    pub(crate) oidc: Option<OidcConfig>,
    pub(crate) anonymous_auth: bool,
    pub(crate) token_webhook: Option<TokenWebhookConfig>,
    pub(crate) request_header: Option<RequestHeaderConfig>,
    pub(crate) authorization: AuthorizationConfig,
    pub(crate) token_signer: Option<String>,
    pub(crate) encryption: Option<EncryptionFile>,
    pub(crate) encryption_key_file: Option<PathBuf>,
    pub(crate) etcd: Option<EtcdConfig>,
    pub(crate) election: LeaderElection,
    pub(crate) admission_control_config_file: Option<PathBuf>,
    pub(crate) admission_plugins: PluginSelection,
    pub(crate) initial_resources: InitialResourcesOptions,
    pub(crate) runtime_config: RuntimeConfig,
    pub(crate) options: ServerOptions,
    pub(crate) audit: Option<AuditConfig>,
    pub(crate) controllers: ControllerSelection,
    pub(crate) scheduler: bool,
    pub(crate) scheduler_config: Option<PathBuf>,
    pub(crate) tls_sans: Vec<String>,
    pub(crate) serving_tls: ServingOptions,
    pub(crate) own_node: Option<String>,
    pub(crate) signing_duration: Duration,
    pub(crate) token_clean_up_period: Duration,
    pub(crate) node_monitor_grace: Duration,
    pub(crate) max_finished_pods: usize,
    pub(crate) autoscaler: AutoscalerOptions,
    pub(crate) node_balancers: bool,
    pub(crate) load_balancer_pool: Vec<IpNetwork>,
    pub(crate) request_timeout: Duration,
    pub(crate) max_in_flight: [usize; 2],
    pub(crate) shutdown_delay: Duration,
}

impl ControlPlane {
    /// Maximum time for which the API server serves or refuses requests during its shutdown.
    pub(crate) fn drain_limit(&self) -> Duration {
        let in_flight = if self.options.send_retry_after { self.request_timeout } else { Duration::ZERO };
        self.shutdown_delay.saturating_add(in_flight)
    }
}

impl ControlPlaneSettings {
    /// Checks settings that depend on each other. All problems are collected in `sources`.
    pub(in crate::settings) fn decide(
        self,
        dirs: &Dirs,
        ranges: Ranges,
        sources: &mut Sources,
    ) -> Option<ControlPlane> {
        let audit = sources.take(self.audit())?;
        let oidc = sources.take(self.oidc())?;
        let token_webhook = sources.take(self.token_webhook())?;
        let authorization = sources.take(self.authorization())?;
        let election = sources.take(self.election())?;
        let runtime_config = sources.take(runtime_config(&self.runtime_config).context("runtime-config"))?;
        let options = sources.take(self.options())?;
        let serving_tls = sources.take(self.serving_tls())?;
        let autoscaler = sources.take(self.autoscaler())?;
        let etcd = sources.take(self.etcd())?;
        let request_header = self.request_header();
        let (admission_plugins, initial_resources) = (self.admission_plugins(), self.initial_resources());
        let load_balancer_pool = sources.take(ranges.check_pool(self.load_balancer_pool))?;
        let controllers = sources.take(selected(self.controllers))?;
        let request_timeout = sources.take(checked_request_timeout(self.request_timeout))?;
        let token_clean_up_period =
            sources.take(clean_up_period(self.legacy_service_account_token_clean_up_period))?;
        let reload = self.encryption_provider_config_automatic_reload;
        Some(ControlPlane {
            dirs: dirs.clone(),
            listen: address_or_port(self.listen, 6443),
            advertise_address: self.advertise_address,
            ranges,
            token_auth_file: self.token_auth_file,
            basic_auth_file: self.basic_auth_file,
            authentication_config: self.authentication_config,
            oidc,
            anonymous_auth: self.anonymous_auth,
            token_webhook,
            request_header,
            authorization,
            token_signer: self.service_account_signing_endpoint,
            encryption: self.encryption_provider_config.map(|path| EncryptionFile { path, reload }),
            encryption_key_file: self.encryption_key_file,
            etcd,
            election,
            admission_control_config_file: self.admission_control_config_file,
            admission_plugins,
            initial_resources,
            runtime_config,
            options,
            audit,
            controllers,
            scheduler: self.scheduler,
            scheduler_config: self.scheduler_config,
            tls_sans: self.tls_san,
            serving_tls,
            own_node: self.own_node,
            signing_duration: seconds(self.cluster_signing_seconds),
            token_clean_up_period,
            max_finished_pods: usize::try_from(self.terminated_pod_gc_threshold).unwrap_or(usize::MAX),
            autoscaler,
            node_balancers: self.node_balancers,
            load_balancer_pool,
            node_monitor_grace: seconds(self.node_monitor_grace_seconds),
            request_timeout,
            max_in_flight: [self.max_requests_inflight, self.max_mutating_requests_inflight].map(count),
            shutdown_delay: self.shutdown_delay_duration.0,
        })
    }

    fn autoscaler(&self) -> anyhow::Result<AutoscalerOptions> {
        let GoDuration(sync_period) = self.horizontal_pod_autoscaler_sync_period;
        anyhow::ensure!(
            sync_period >= Duration::from_secs(1),
            "horizontal-pod-autoscaler-sync-period {sync_period:?} must be at least 1s"
        );
        Ok(AutoscalerOptions {
            sync_period,
            tolerance: self.horizontal_pod_autoscaler_tolerance.0,
            downscale_stabilization: self.horizontal_pod_autoscaler_downscale_stabilization.0,
            cpu_initialization: self.horizontal_pod_autoscaler_cpu_initialization_period.0,
            initial_readiness: self.horizontal_pod_autoscaler_initial_readiness_delay.0,
        })
    }

    fn election(&self) -> anyhow::Result<LeaderElection> {
        let election = LeaderElection {
            lease: self.leader_elect_lease_duration.0,
            deadline: self.leader_elect_renew_deadline.0,
            retry: self.leader_elect_retry_period.0,
        };
        check_election(&election)?;
        Ok(election)
    }

    /// The connection to etcd, if there are servers.
    fn etcd(&self) -> anyhow::Result<Option<EtcdConfig>> {
        anyhow::ensure!(
            self.etcd_servers_overrides.is_empty(),
            "etcd-servers-overrides is not supported: all resources must be in one etcd, because the revisions of several \
             etcds cannot be compared"
        );
        let compaction = compaction_interval(self.etcd_compaction_interval.0)?;
        let GoDuration(interval) = self.etcd_db_metric_poll_interval;
        let size_max_age = Some(interval).filter(|interval| !interval.is_zero());
        let (servers, prefix) = (self.etcd_servers.clone(), self.etcd_prefix.clone());
        let (ca_file, certificate) = (self.etcd_cafile.clone(), self.etcd_certfile.clone());
        let checked = etcd(servers, prefix, ca_file, certificate, self.etcd_keyfile.clone())?;
        Ok(checked.map(|etcd| EtcdConfig { compaction, size_max_age, ..etcd }))
    }

    /// Health checks and metrics of the store. As upstream, a timeout of 0 is the default timeout.
    fn store(&self) -> StoreOptions {
        let default = StoreOptions::default();
        let timeout = |GoDuration(set), default: Duration| if set.is_zero() { default } else { set };
        StoreOptions {
            health_timeout: timeout(self.etcd_healthcheck_timeout, default.health_timeout),
            ready_timeout: timeout(self.etcd_readycheck_timeout, default.ready_timeout),
            has_object_counts: !self.etcd_count_metric_poll_period.0.is_zero(),
        }
    }

    /// The issuer of the oidc settings, if any of them is given.
    fn oidc(&self) -> anyhow::Result<Option<OidcConfig>> {
        let set = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
        let config = OidcConfig {
            issuer_url: self.oidc_issuer_url.clone().unwrap_or_default(),
            client_id: self.oidc_client_id.clone().unwrap_or_default(),
            ca_file: self.oidc_ca_file.clone(),
            username_claim: set(&self.oidc_username_claim).unwrap_or_default(),
            username_prefix: set(&self.oidc_username_prefix),
            groups_claim: set(&self.oidc_groups_claim),
            groups_prefix: self.oidc_groups_prefix.clone().unwrap_or_default(),
            required_claims: self.oidc_required_claim.clone(),
            signing_algs: self.oidc_signing_algs.clone(),
        };
        oidc(config, self.authentication_config.is_some())
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

    /// The admission plugins that run.
    fn admission_plugins(&self) -> PluginSelection {
        PluginSelection {
            enabled: self.enable_admission_plugins.clone(),
            disabled: self.disable_admission_plugins.clone(),
        }
    }

    /// The options of the admission plugin `InitialResources`.
    fn initial_resources(&self) -> InitialResourcesOptions {
        InitialResourcesOptions { percentile: self.ir_percentile.0, namespace_only: self.ir_namespace_only }
    }

    /// The options that kube-apiserver has with the same defaults.
    fn options(&self) -> anyhow::Result<ServerOptions> {
        let GoDuration(event_lifetime) = self.event_ttl;
        anyhow::ensure!(
            event_lifetime >= Duration::from_secs(1),
            "event-ttl {event_lifetime:?} must be at least 1s"
        );
        for issuer in &self.service_account_issuer {
            anyhow::ensure!(!issuer.is_empty(), "service-account-issuer must not have an empty name");
        }
        let keys_url = self.service_account_jwks_uri.clone();
        if let Some(url) = keys_url.as_deref().filter(|url| !url.starts_with("https://")) {
            anyhow::bail!("service-account-jwks-uri {url:?} must begin with https://");
        }
        let max_token_seconds = self.service_account_max_token_expiration.map(|limit| limit.0.as_secs());
        if let Some(seconds) = max_token_seconds {
            let is_allowed = (3600..=1 << 32).contains(&seconds);
            anyhow::ensure!(
                is_allowed,
                "service-account-max-token-expiration must be between 1h and 2^32 seconds"
            );
        }
        let bytes = |size: ByteSize| usize::try_from(size.0).unwrap_or(usize::MAX);
        Ok(ServerOptions {
            max_token_seconds: max_token_seconds.and_then(|seconds| i64::try_from(seconds).ok()),
            node_ports: self.service_node_port_range.0.clone(),
            toleration_seconds: [
                self.default_not_ready_toleration_seconds,
                self.default_unreachable_toleration_seconds,
            ],
            event_lifetime,
            max_namespace_bytes: self.max_namespace_bytes.map(bytes),
            max_all_namespaces_bytes: self.max_all_namespaces_bytes.map(bytes),
            token_issuers: self.service_account_issuer.clone(),
            audiences: self.api_audiences.clone(),
            keys_url,
            extend_tokens: self.service_account_extend_token_expiration,
            min_watch: Duration::from_secs(self.min_request_timeout.into()),
            priority_and_fairness: self.enable_priority_and_fairness,
            strict_transport_security: transport_security(&self.strict_transport_security_directives)?,
            allowed_origins: allowed_origins(&self.cors_allowed_origins)?,
            goaway_chance: goaway_chance(self.goaway_chance)?,
            send_retry_after: self.shutdown_send_retry_after,
            // A setting of the node, see `Settings::external_ips`.
            external_ips: None,
            store: self.store(),
        })
    }

    /// Certificates and TLS of the API server.
    fn serving_tls(&self) -> anyhow::Result<ServingOptions> {
        let certificate = match (self.apiserver_cert_file.clone(), self.apiserver_key_file.clone()) {
            (Some(certificate), Some(key)) => Some(CertificateFiles { certificate, key }),
            (None, None) => None,
            _ => anyhow::bail!("apiserver-cert-file and apiserver-key-file must be given together"),
        };
        let by_name = self.tls_sni_cert_key.iter().map(|entry| NamedCertificate {
            files: CertificateFiles { certificate: entry.certificate.clone(), key: entry.key.clone() },
            names: entry.names.clone(),
        });
        let options = ServingOptions {
            certificate,
            by_name: by_name.collect(),
            min_version: self.tls_min_version.clone(),
            cipher_suites: self.tls_cipher_suites.clone(),
        };
        options.check().map_err(anyhow::Error::msg).context("tls-min-version, tls-cipher-suites")?;
        Ok(options)
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

/// As upstream, each of the oidc settings needs an issuer and a client ID, and excludes the configuration file.
fn oidc(config: OidcConfig, has_file: bool) -> anyhow::Result<Option<OidcConfig>> {
    if config == OidcConfig::default() {
        return Ok(None);
    }
    anyhow::ensure!(!has_file, "authentication-config and the oidc settings are mutually exclusive");
    let is_complete = !config.issuer_url.is_empty() && !config.client_id.is_empty();
    anyhow::ensure!(
        is_complete,
        "oidc-issuer-url and oidc-client-id must be given together with any oidc setting"
    );
    let claim = Some(config.username_claim).filter(|claim| !claim.is_empty());
    Ok(Some(OidcConfig { username_claim: claim.unwrap_or_else(|| "sub".to_owned()), ..config }))
}

fn selected(controllers: Vec<String>) -> anyhow::Result<ControllerSelection> {
    ControllerSelection::parse(controllers).context("controllers")
}

fn seconds(count: NonZero<u32>) -> Duration {
    Duration::from_secs(count.get().into())
}

/// The connection to etcd, if there are servers.
fn etcd(
    servers: Vec<String>,
    prefix: String,
    ca_file: Option<PathBuf>,
    certificate: Option<PathBuf>,
    key: Option<PathBuf>,
) -> anyhow::Result<Option<EtcdConfig>> {
    let has_files = ca_file.is_some() || certificate.is_some() || key.is_some();
    if servers.is_empty() {
        anyhow::ensure!(!has_files, "etcd-cafile, etcd-certfile and etcd-keyfile need etcd-servers");
        return Ok(None);
    }
    // The message does not contain the URL of the server, because the URL may have a password.
    let has_credentials = servers.iter().any(|server| server.contains('@'));
    anyhow::ensure!(
        !has_credentials,
        "etcd-servers must not contain a user: use etcd-certfile and etcd-keyfile"
    );
    for server in &servers {
        let is_url = ["http://", "https://"].iter().any(|scheme| server.starts_with(scheme));
        anyhow::ensure!(is_url, "etcd-servers {server:?} must begin with http:// or https://");
        let is_secured = !server.starts_with("https://") || ca_file.is_some();
        anyhow::ensure!(is_secured, "etcd-servers {server:?} needs etcd-cafile");
    }
    let is_prefix = !prefix.trim_matches('/').is_empty();
    anyhow::ensure!(is_prefix, "etcd-prefix {prefix:?} must have a name, as in /coracle");
    let identity = match (certificate, key) {
        (Some(certificate), Some(key)) => Some(CertificateFiles { certificate, key }),
        (None, None) => None,
        _ => anyhow::bail!("etcd-certfile and etcd-keyfile must be given together"),
    };
    Ok(Some(EtcdConfig { servers, prefix, ca_file, identity, compaction: None, size_max_age: None }))
}

/// The interval of compactions; `None` for 0. With a shorter interval, a server that loses etcd for a moment would list
/// everything again.
fn compaction_interval(interval: Duration) -> anyhow::Result<Option<Duration>> {
    let is_long = interval.is_zero() || interval >= Duration::from_secs(10);
    anyhow::ensure!(is_long, "etcd-compaction-interval {interval:?} must be 0 or at least 10s");
    Ok(Some(interval).filter(|interval| !interval.is_zero()))
}

fn check_election(election: &LeaderElection) -> anyhow::Result<()> {
    let LeaderElection { lease, deadline, retry } = *election;
    let is_whole = lease.subsec_nanos() == 0 && lease.as_secs() <= 3600;
    anyhow::ensure!(is_whole, "leader-elect-lease-duration {lease:?} must be whole seconds, at most 1h");
    let descends = lease > deadline && deadline > retry && retry >= Duration::from_millis(100);
    anyhow::ensure!(
        descends,
        "leader-elect-lease-duration {lease:?} must exceed leader-elect-renew-deadline {deadline:?}, which must exceed \
         leader-elect-retry-period {retry:?} of at least 100ms"
    );
    Ok(())
}

/// Refuses a configuration that disables resources which nodes, controllers or the scheduler need. Without these
/// resources, they would wait forever, or consider the objects as deleted.
fn runtime_config(entries: &[String]) -> anyhow::Result<RuntimeConfig> {
    let config = RuntimeConfig::parse(entries)?;
    let missing = config.missing();
    anyhow::ensure!(missing.is_empty(), "nodes and controllers need {}", missing.join(", "));
    Ok(config)
}

/// The value of the header Strict-Transport-Security (RFC 6797, section 6.1); empty for none.
fn transport_security(directives: &[String]) -> anyhow::Result<String> {
    for directive in directives {
        let is_age = directive.strip_prefix("max-age=").is_some_and(|age| age.parse::<u32>().is_ok());
        anyhow::ensure!(
            is_age || matches!(directive.as_str(), "includeSubDomains" | "preload"),
            "strict-transport-security-directives {directive:?} must be max-age=SECONDS, includeSubDomains or preload"
        );
    }
    Ok(directives.join("; "))
}

/// As upstream, each expression must have a mark of the start and of the end of the host (CVE-2022-1996).
fn allowed_origins(expressions: &[String]) -> anyhow::Result<Vec<String>> {
    for expression in expressions {
        let has = |marks: [&str; 2]| marks.iter().any(|mark| expression.contains(*mark));
        anyhow::ensure!(
            has(["^", "//"]) && has(["$", ":"]),
            "cors-allowed-origins {expression:?} must contain ^ or // before the host, and $ or : after it"
        );
    }
    Ok(expressions.to_vec())
}

/// Checks the probability of GOAWAY. As upstream, it is at most 0.02.
fn goaway_chance(Fraction(chance): Fraction) -> anyhow::Result<f64> {
    anyhow::ensure!(chance <= 0.02, "goaway-chance {chance} must be at most 0.02");
    Ok(chance)
}

/// Checks the request timeout.
fn checked_request_timeout(GoDuration(timeout): GoDuration) -> anyhow::Result<Duration> {
    anyhow::ensure!(timeout >= Duration::from_secs(1), "request-timeout {timeout:?} must be at least 1s");
    Ok(timeout)
}

/// Checks the clean-up period. As upstream, it must not be 0. The controller compares dates, so fractions of a second are
/// useless.
fn clean_up_period(GoDuration(period): GoDuration) -> anyhow::Result<Duration> {
    anyhow::ensure!(
        period >= Duration::from_secs(1),
        "legacy-service-account-token-clean-up-period {period:?} must be at least 1s"
    );
    Ok(period)
}

#[cfg(test)]
mod tests {
    use clap::{Args as _, FromArgMatches as _};

    use super::super::super::table::Flags;
    use super::*;

    fn settings(words: &[&str]) -> ControlPlaneSettings {
        let command = Flags::<ControlPlaneSettings>::augment_args(clap::Command::new("x"));
        let matches = command.try_get_matches_from([&["x"][..], words].concat()).unwrap();
        let flags = Flags::<ControlPlaneSettings>::from_arg_matches(&matches).unwrap();
        flags.resolve(&mut Sources::default()).unwrap()
    }

    #[test]
    fn health_checks_and_metrics_of_etcd_have_upstreams_defaults() {
        let of = |words: &[&str]| {
            let settings = settings(&[&["--etcd-servers", "http://a:1"][..], words].concat());
            (settings.store(), settings.etcd().unwrap().unwrap().size_max_age)
        };
        let seconds = Duration::from_secs;
        assert_eq!(of(&[]), (StoreOptions::default(), Some(seconds(30))));
        let set = ["--etcd-healthcheck-timeout", "3s", "--etcd-readycheck-timeout", "4s"];
        let options =
            StoreOptions { health_timeout: seconds(3), ready_timeout: seconds(4), ..StoreOptions::default() };
        assert_eq!(of(&set).0, options);
        assert_eq!(of(&["--etcd-healthcheck-timeout", "0"]).0, StoreOptions::default());
        let (options, size_max_age) =
            of(&["--etcd-count-metric-poll-period", "0", "--etcd-db-metric-poll-interval", "0"]);
        assert_eq!((options.has_object_counts, size_max_age), (false, None));
    }

    #[test]
    fn resources_in_another_etcd_are_refused() {
        let refused = settings(&["--etcd-servers-overrides", "/events#http://a:1;http://b:1"]).etcd();
        let error = refused.unwrap_err().to_string();
        assert!(error.contains("all resources must be in one etcd"), "{error}");
    }

    #[test]
    fn etcd_files_fit_the_servers() {
        let file = || Some(PathBuf::from("/f"));
        let of = |server: &str, (ca_file, certificate, key)| {
            let servers = server.split(',').filter(|one| !one.is_empty()).map(str::to_owned).collect();
            etcd(servers, "/p".to_owned(), ca_file, certificate, key)
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
        let error = of("http://a:1,http://root:secret@b:1", (None, None, None)).unwrap_err().to_string();
        assert!(error.contains("must not contain a user") && !error.contains("secret"), "{error}");
    }

    #[test]
    fn an_interval_of_compactions_is_zero_or_ten_seconds() {
        let of = |seconds| compaction_interval(Duration::from_secs(seconds)).ok();
        assert_eq!(of(0), Some(None));
        assert_eq!((of(9), of(10)), (None, Some(Some(Duration::from_secs(10)))));
    }

    #[test]
    fn an_issuer_needs_url_and_client_and_excludes_the_file() {
        let of = |url: &str, client: &str, claim: &str| OidcConfig {
            issuer_url: url.to_owned(),
            client_id: client.to_owned(),
            username_claim: claim.to_owned(),
            ..OidcConfig::default()
        };
        assert_eq!(oidc(OidcConfig::default(), true).unwrap(), None);
        let found = oidc(of("https://a", "b", ""), false).unwrap().unwrap();
        assert_eq!(found, of("https://a", "b", "sub"));
        let found = oidc(of("https://a", "b", "email"), false).unwrap().unwrap();
        assert_eq!(found.username_claim, "email");
        for (config, has_file) in [
            (of("https://a", "", ""), false),
            (of("", "b", ""), false),
            (of("", "", "email"), false),
            (of("https://a", "b", ""), true),
        ] {
            assert!(oidc(config.clone(), has_file).is_err(), "{config:?}");
        }
    }

    #[test]
    fn resources_that_the_node_needs_cannot_be_turned_off() {
        let of = |entry: &str| runtime_config(&[entry.to_owned()]).map_err(|error| error.to_string());
        assert!(of("policy/v1=false").is_ok());
        assert_eq!(of("v1/pods=false"), Err("nodes and controllers need v1/pods".to_owned()));
    }

    #[test]
    fn tokens_are_not_cleaned_up_at_once() {
        assert!(clean_up_period(GoDuration(Duration::ZERO)).is_err());
        assert_eq!(clean_up_period(GoDuration(Duration::from_secs(90))).unwrap(), Duration::from_secs(90));
    }

    #[test]
    fn directives_of_transport_security_are_known() {
        let of =
            |all: &[&str]| transport_security(&all.iter().map(|&one| one.to_owned()).collect::<Vec<_>>());
        assert_eq!(of(&[]).unwrap(), "");
        assert_eq!(
            of(&["max-age=9", "includeSubDomains", "preload"]).unwrap(),
            "max-age=9; includeSubDomains; preload"
        );
        for invalid in ["", "max-age", "max-age=x", "max-age=9\r\nx: y", "preload=1"] {
            assert!(of(&[invalid]).is_err(), "{invalid}");
        }
    }

    #[test]
    fn expressions_of_origins_have_a_start_and_an_end() {
        let of = |expression: &str| allowed_origins(&[expression.to_owned()]);
        assert_eq!(of("//a.example(:|$)").unwrap(), ["//a.example(:|$)"]);
        assert!(of("^https://a.example$").is_ok());
        for open in ["", "a.example", "^a.example", "a.example$"] {
            assert!(of(open).is_err(), "{open}");
        }
    }

    #[test]
    fn few_requests_ask_their_client_to_connect_again() {
        assert!(goaway_chance(Fraction(0.02)).is_ok());
        assert!(goaway_chance(Fraction(0.03)).is_err());
    }

    #[test]
    fn a_request_has_checked_request_timeout() {
        assert!(checked_request_timeout(GoDuration(Duration::ZERO)).is_err());
        assert_eq!(
            checked_request_timeout(GoDuration(Duration::from_secs(90))).unwrap(),
            Duration::from_secs(90)
        );
    }
}

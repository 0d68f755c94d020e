//! The checked settings of the control plane.

use std::net::{IpAddr, SocketAddr};
use std::num::NonZero;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;
use coracle_controlplane::{
    AuditConfig, AuthorizationConfig, AutoscalerOptions, ControllerSelection, EncryptionFile, EtcdConfig,
    InitialResourcesOptions, LeaderElection, PluginSelection, RuntimeConfig, ServerOptions, ServingOptions,
};
use ipnetwork::IpNetwork;

use super::super::ranges::Ranges;
use super::super::sources::Sources;
use super::super::value::GoDuration;
use super::super::{Dirs, address_or_port};
use super::authentication::Authentication;
use super::{ControlPlaneSettings, count};

/// Checked settings of the control plane.
#[derive(Clone, Debug)]
pub(crate) struct ControlPlane {
    pub(crate) dirs: Dirs,
    pub(crate) listen: SocketAddr,
    pub(crate) advertise_address: Option<IpAddr>,
    pub(crate) ranges: Ranges,
    pub(crate) authentication: Authentication,
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
        self.shutdown_delay.saturating_add(in_flight).saturating_add(self.options.watch_grace)
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
        let authentication = self.authentication(sources)?;
        let authorization = sources.take(self.authorization())?;
        let election = sources.take(self.election())?;
        let runtime_config = sources.take(runtime_config(&self.runtime_config).context("runtime-config"))?;
        let options = sources.take(self.options())?;
        let serving_tls = sources.take(self.serving_tls())?;
        let autoscaler = sources.take(self.autoscaler())?;
        let etcd = sources.take(self.etcd())?;
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
            authentication,
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
}

fn selected(controllers: Vec<String>) -> anyhow::Result<ControllerSelection> {
    ControllerSelection::parse(controllers).context("controllers")
}

fn seconds(count: NonZero<u32>) -> Duration {
    Duration::from_secs(count.get().into())
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
    use super::*;

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
    fn a_request_has_checked_request_timeout() {
        assert!(checked_request_timeout(GoDuration(Duration::ZERO)).is_err());
        assert_eq!(
            checked_request_timeout(GoDuration(Duration::from_secs(90))).unwrap(),
            Duration::from_secs(90)
        );
    }
}

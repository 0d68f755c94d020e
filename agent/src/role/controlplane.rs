//! `coracle controlplane`: the control plane alone.

use std::num::NonZero;
use std::path::PathBuf;

use anyhow::Context as _;
use clap::Args;
use coracle_agent::component_server;
use coracle_controlplane::{
    ControlPlane, ControlPlaneConfig, ControllerSelection, ExternalClients, ExternalServer, SchedulerConfig,
};
use tokio_util::sync::CancellationToken;

use crate::directories;
use crate::settings::Settings;

/// Flags to run only controllers and scheduler, for the API server of another program such as kube-apiserver.
#[derive(Args)]
pub(crate) struct External {
    /// Run only controllers and scheduler, for the API server of this kubeconfig
    #[arg(long, value_name = "FILE", conflicts_with = "issue_node")]
    pub(crate) kubeconfig: Option<PathBuf>,
    /// Directory with ca.crt, ca.key and sa.key (PKCS#8) of that API server, to sign certificates and publish the
    /// authority
    #[arg(long, value_name = "DIR", requires = "kubeconfig")]
    pki_dir: Option<PathBuf>,
    /// Serve /metrics and /healthz of controllers and scheduler at this port of 127.0.0.1, without authentication
    #[arg(long, value_name = "PORT", requires = "kubeconfig")]
    metrics_port: Option<NonZero<u16>>,
}

/// Runs until SIGINT or SIGTERM.
pub(crate) async fn run(settings: Settings, issue_node: Option<String>) -> anyhow::Result<()> {
    super::raise_open_files();
    directories::prepare(&settings.dirs().state, &[directories::PLANE_STATE])?;
    let signals = super::signals::of_plane(settings.control_plane().drain_limit())?;
    let shutdown = signals.stop;
    let Some(plane) = until(&shutdown, start(&settings, shutdown.clone())).await? else { return Ok(()) };
    let (beats, heartbeats) = tokio::sync::watch::channel(());
    coracle_threads::spawn(super::program_pages::heartbeat_after_changes(plane.revisions(), beats));
    coracle_threads::spawn(super::program_pages::release_when_idle(plane.revisions(), heartbeats));
    if let Some(name) = issue_node {
        let identity = plane.node_identity(&name, &[plane.address().ip()])?;
        super::print(&format!(
            "coracle agent --node-name {name} --kubeconfig {} --tls-cert-file {} --tls-private-key-file {} \
             --client-ca-file {} --serve-dns=true --service-proxy=true\n",
            identity.kubeconfig.display(),
            identity.serving_cert.display(),
            identity.serving_key.display(),
            identity.client_ca.display(),
        ))?;
    }
    shutdown.cancelled().await;
    // A second signal ends the wait for requests in flight.
    let _stopped = signals.now.run_until_cancelled(plane.stopped()).await;
    Ok(())
}

/// Runs controllers and scheduler for another API server, until SIGINT or SIGTERM.
pub(crate) async fn run_for(settings: Settings, external: External) -> anyhow::Result<()> {
    super::raise_open_files();
    let External { kubeconfig, pki_dir, metrics_port } = external;
    let kubeconfig = kubeconfig.context("--kubeconfig is missing")?;
    let (requests, changes) = tokio::sync::watch::channel(());
    let client = super::agent::component_client(&kubeconfig, requests).await?;
    let server = ExternalServer { client, pki_dir };
    let shutdown = super::until_signalled()?;
    let (beats, heartbeats) = tokio::sync::watch::channel(());
    tokio::spawn(super::program_pages::heartbeat_after_changes(changes.clone(), beats));
    tokio::spawn(super::program_pages::release_when_idle(changes, heartbeats));
    tracing::info!(kubeconfig = %kubeconfig.display(), "controllers and scheduler run for another API server");
    let clients = ExternalClients::new(config(&settings)?, server)?;
    let metrics = clients.metrics();
    let served = async move {
        match metrics_port {
            Some(port) => component_server::serve(port.get(), metrics).await,
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        () = clients.run(shutdown) => {}
        // The server never ends.
        () = served => {}
    }
    Ok(())
}

/// The result of a start. `None` if a signal to end the process arrives first. The start may wait a minute, for example
/// for etcd. Its unfinished work ends with the process.
pub(super) async fn until<T>(
    signalled: &CancellationToken,
    start: impl Future<Output = anyhow::Result<T>>,
) -> anyhow::Result<Option<T>> {
    signalled.run_until_cancelled(start).await.transpose()
}

/// Starts the control plane. When this returns, the API server accepts requests.
pub(crate) async fn start(settings: &Settings, shutdown: CancellationToken) -> anyhow::Result<ControlPlane> {
    log_without_effect(&settings.control_plane().controllers);
    let plane = coracle_controlplane::start(config(settings)?, shutdown).await?;
    tracing::info!(address = %plane.address(), kubeconfig = %plane.kubeconfig().display(), "the API server is ready");
    Ok(plane)
}

fn config(settings: &Settings) -> anyhow::Result<ControlPlaneConfig> {
    let (features, feature_metrics) = (settings.server_features(), settings.feature_metrics());
    let (flags, external_ips) = (settings.control_plane_flags(), settings.external_ips());
    let settings = settings.control_plane();
    let mut config = ControlPlaneConfig::new(&settings.dirs.state);
    (config.features, config.feature_metrics, config.flags) = (features, feature_metrics, flags);
    config.listen = settings.listen;
    config.advertise = settings.advertise_address;
    config.cluster_cidrs = settings.ranges.cluster;
    config.service_cidr = settings.ranges.service;
    config.secondary_service_cidr = settings.ranges.secondary_service;
    config.node_masks = settings.ranges.node_masks;
    config.token_file = settings.authentication.token_file;
    config.password_file = settings.authentication.password_file;
    config.authentication_file = settings.authentication.config_file;
    config.oidc = settings.authentication.oidc;
    config.anonymous_auth = settings.authentication.allows_anonymous;
    config.token_webhook = settings.authentication.token_webhook;
    config.request_header = settings.authentication.request_header;
    config.authorization = settings.authorization;
    config.token_signer = settings.token_signer;
    config.encryption_config = settings.encryption;
    config.encryption_key_file = settings.encryption_key_file;
    config.etcd = settings.etcd;
    config.election = settings.election;
    config.admission_file = settings.admission_control_config_file;
    config.admission_plugins = settings.admission_plugins;
    config.initial_resources = settings.initial_resources;
    config.runtime_config = settings.runtime_config;
    config.options = settings.options;
    config.options.external_ips = external_ips;
    config.controllers = settings.controllers;
    config.run_scheduler = settings.scheduler;
    config.audit = settings.audit;
    if let Some(path) = &settings.scheduler_config {
        config.scheduler = SchedulerConfig::read(path)?;
    }
    config.serving_names = settings.tls_sans;
    config.serving_tls = settings.serving_tls;
    config.own_node = settings.own_node;
    config.signing_duration = settings.signing_duration;
    config.token_clean_up_period = settings.token_clean_up_period;
    config.node_monitor_grace = settings.node_monitor_grace;
    config.max_finished_pods = settings.max_finished_pods;
    config.autoscaler = settings.autoscaler;
    config.node_balancers = settings.node_balancers;
    config.load_balancer_pool = settings.load_balancer_pool;
    config.request_timeout = settings.request_timeout;
    config.max_in_flight = settings.max_in_flight;
    config.shutdown_delay = settings.shutdown_delay;
    Ok(config)
}

/// Logs the entries of `controllers` that have no effect.
fn log_without_effect(controllers: &ControllerSelection) {
    for warning in controllers.warnings() {
        tracing::warn!(warning, "an entry of controllers has no effect");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_signal_ends_a_start_that_waits() {
        let signalled = CancellationToken::new();
        let started = until(&signalled, async { Ok(1) }).await;
        assert_eq!(started.unwrap(), Some(1));
        signalled.cancel();
        let waiting = std::future::pending::<anyhow::Result<()>>();
        assert_eq!(until(&signalled, waiting).await.unwrap(), None);
    }
}

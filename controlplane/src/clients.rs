//! Controllers and scheduler, as clients of the API server in this process or of another API server.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use coracle_apiserver::ComponentMetrics;
use coracle_controllers::{AccountTokenSigner, ControllersConfig, Signer};
use coracle_scheduler::SchedulerConfig;
use futures::FutureExt as _;
use kube::{Client, client::Body};
use tokio::sync::Semaphore;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    config::ControlPlaneConfig,
    error::Error,
    host_name::host_name,
    leader::{Candidate, LeaderElection},
    pki::Pki,
    restart,
};

/// Maximum concurrent requests of the controllers to an API server of another program. Each request has a connection of
/// its own. A burst of deletions would otherwise open a connection for each pod, with a TLS handshake. A request counts
/// until its response begins, so a running watch does not count.
const MAX_REQUESTS: usize = 32;

/// An API server of another program, such as kube-apiserver.
pub struct ExternalServer {
    /// A client with the permissions of controllers and scheduler.
    pub client: Client,
    /// Directory with `ca.crt` and `ca.key`, and with `sa.key` for tokens in Secrets. If it is `None`, certificate
    /// signing requests are not signed, and the certificate of the authority is not published.
    pub pki_dir: Option<PathBuf>,
}

/// Controllers and scheduler of an API server.
pub(crate) struct Clients {
    /// The controllers with their client. `None` if no controller runs.
    pub(crate) controllers: Option<(Client, ControllersConfig)>,
    /// The scheduler with its client. `None` if the scheduler does not run.
    pub(crate) scheduler: Option<(Client, SchedulerConfig)>,
    /// The client that takes leases.
    pub(crate) leases: Client,
}

/// Controllers and scheduler for the API server of another program.
pub struct ExternalClients {
    clients: Clients,
    election: LeaderElection,
    metrics: ComponentMetrics,
}

/// The metrics of the controllers, and of the scheduler if it runs in this process.
pub(crate) fn component_metrics(
    controllers: &ControllersConfig,
    config: &ControlPlaneConfig,
) -> ComponentMetrics {
    let (controllers, features) = (controllers.metrics(), config.feature_metrics.clone());
    let scheduler = config.run_scheduler.then(|| config.scheduler.metrics.clone());
    ComponentMetrics(Arc::new(move || {
        let scheduler = scheduler.as_ref().map(coracle_scheduler::SchedulerMetrics::text);
        let scheduler = scheduler.unwrap_or_default();
        [controllers(), scheduler, features.to_string()].concat()
    }))
}

/// Reads the keys and the certificate of an external API server into the configuration of the controllers.
fn read_keys(
    dir: &Path,
    config: &ControlPlaneConfig,
    controllers: &mut ControllersConfig,
) -> Result<(), Error> {
    let pki = Pki::existing(dir).map_err(Error::Pki)?;
    let key = pki.authority_key().map_err(Error::Pki)?;
    let signer = Signer::new(pki.authority_pem(), &key, config.signing_duration).map_err(Error::Signer)?;
    controllers.signer = Some(signer);
    controllers.root_ca_pem = Some(pki.authority_pem().to_owned());
    if dir.join("sa.key").exists() {
        let key = pki.service_account_key().map_err(Error::Pki)?;
        controllers.account_tokens = AccountTokenSigner::new(&key);
        if controllers.account_tokens.is_none() {
            tracing::warn!("sa.key is not a P-256 key: Secrets of service accounts get no tokens");
        }
    }
    Ok(())
}

/// A client with at most [`MAX_REQUESTS`] concurrent requests. Must be called within a tokio runtime.
fn limited(client: Client) -> Client {
    let permits = Arc::new(Semaphore::new(MAX_REQUESTS));
    let namespace = client.default_namespace().to_owned();
    let service = tower::service_fn(move |request: http::Request<Body>| {
        let (client, permits) = (client.clone(), permits.clone());
        async move {
            // The semaphore is never closed.
            let _permit = permits.acquire_owned().await;
            client.send(request).await
        }
    });
    Client::new(service, namespace)
}

// === impl ExternalClients ===

impl ExternalClients {
    /// Prepares controllers and scheduler.
    ///
    /// # Errors
    /// Keys or certificates cannot be used.
    pub fn new(config: ControlPlaneConfig, external: ExternalServer) -> Result<Self, Error> {
        let mut controllers = ControllersConfig {
            cluster_cidrs: config.cluster_cidrs.clone(),
            node_mask_v4: config.node_masks[0],
            node_mask_v6: config.node_masks[1],
            reserved_ranges: [&config.cluster_cidrs[..], &[config.service_cidr]].concat(),
            own_node: config.own_node.clone(),
            node_balancers: config.node_balancers,
            node_ports: config.options.node_ports.clone(),
            max_finished_pods: config.max_finished_pods,
            token_clean_up_period: config.token_clean_up_period,
            node_monitor_grace: config.node_monitor_grace,
            autoscaler: config.autoscaler,
            // kube-apiserver itself writes the IPAddress objects of services.
            selection: config.controllers.clone().without("ip-address-controller"),
            ..ControllersConfig::default()
        };
        if let Some(dir) = &external.pki_dir {
            read_keys(dir, &config, &mut controllers)?;
        }
        let metrics = component_metrics(&controllers, &config);
        let client = external.client;
        let clients = Clients {
            controllers: (!controllers.selection.is_none()).then(|| (limited(client.clone()), controllers)),
            scheduler: config.run_scheduler.then(|| (client.clone(), config.scheduler)),
            leases: client,
        };
        Ok(Self { clients, election: config.election, metrics })
    }

    /// A function that returns the metrics of controllers and scheduler in the text format of Prometheus.
    #[must_use]
    pub fn metrics(&self) -> Arc<dyn Fn() -> String + Send + Sync> {
        self.metrics.0.clone()
    }

    /// Runs until `shutdown` is cancelled. Leader election makes one of several such processes active.
    pub async fn run(self, shutdown: CancellationToken) {
        let tasks = TaskTracker::new();
        self.clients.start(Some(self.election), &tasks, &shutdown);
        tasks.close();
        tasks.wait().await;
    }
}

// === impl Clients ===

impl Clients {
    /// Starts controllers and scheduler: at once or, with leader election, whenever this process is elected. A part
    /// that ends by itself is started again.
    pub(crate) fn start(
        self,
        election: Option<LeaderElection>,
        tasks: &TaskTracker,
        shutdown: &CancellationToken,
    ) {
        let identity = format!("{}_{}", host_name().unwrap_or_default(), uuid::Uuid::new_v4());
        let candidate = |name, times| Candidate::new(self.leases.clone(), name, identity.clone(), times);
        if let Some((client, config)) = self.controllers {
            let work = move |token| coracle_controllers::run(client.clone(), config.clone(), token);
            match election {
                Some(times) => {
                    tasks.spawn(
                        candidate("kube-controller-manager", times).run(shutdown.clone(), work).boxed(),
                    );
                }
                None => {
                    tasks.spawn(restart::until_shutdown("controllers", shutdown.clone(), work).boxed());
                }
            }
        }
        if let Some((client, config)) = self.scheduler {
            let work = move |token| coracle_scheduler::run(client.clone(), config.clone(), token);
            match election {
                Some(times) => {
                    tasks.spawn(candidate("kube-scheduler", times).run(shutdown.clone(), work).boxed());
                }
                None => {
                    tasks.spawn(restart::until_shutdown("scheduler", shutdown.clone(), work).boxed());
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;

    #[tokio::test]
    async fn concurrent_requests_to_another_api_server_are_limited() {
        let (arrived, mut requests) = tokio::sync::mpsc::unbounded_channel();
        let service = tower::service_fn(move |_: http::Request<Body>| {
            let (release, released) = tokio::sync::oneshot::channel::<()>();
            arrived.send(release).unwrap();
            async move {
                released.await.unwrap();
                Ok::<_, Infallible>(http::Response::new(Body::empty()))
            }
        });
        let client = limited(Client::new(service, "default"));
        let mut running = tokio::task::JoinSet::new();
        for _ in 0..=MAX_REQUESTS {
            let client = client.clone();
            running.spawn(async move { client.send(http::Request::new(Body::empty())).await.is_ok() });
        }
        let mut releases = Vec::new();
        while releases.len() < MAX_REQUESTS {
            releases.push(requests.recv().await.unwrap());
        }
        // All tasks have run: the runtime of the test has one thread, and this task is queued after them.
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        assert!(requests.try_recv().is_err(), "too many requests");
        releases.pop().unwrap().send(()).unwrap();
        releases.push(requests.recv().await.unwrap());
        for release in releases {
            release.send(()).unwrap();
        }
        while let Some(succeeded) = running.join_next().await {
            assert!(succeeded.unwrap());
        }
    }

    #[tokio::test]
    async fn the_metrics_for_another_api_server_have_the_scheduler_and_the_feature_gates() {
        let service = tower::service_fn(|_: http::Request<kube::client::Body>| {
            std::future::pending::<Result<http::Response<kube::client::Body>, Infallible>>()
        });
        for run_scheduler in [true, false] {
            let directory = tempfile::tempdir().unwrap();
            let mut config = ControlPlaneConfig::new(directory.path());
            config.feature_metrics = "feature 1\n".into();
            config.run_scheduler = run_scheduler;
            let external = ExternalServer { client: Client::new(service, "default"), pki_dir: None };
            let text = ExternalClients::new(config, external).unwrap().metrics()();
            assert!(text.contains("feature 1\n"), "{text}");
            assert_eq!(text.contains("scheduler_pending_pods"), run_scheduler, "{text}");
        }
    }
}

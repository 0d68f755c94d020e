//! Starts the tasks of the agent and waits for its end.

mod backend;
mod configs;
mod context;
mod devices;
mod error;
mod pods;
mod services;

use std::net::IpAddr;
use std::sync::Arc;

use coracle_proto::cri::{VersionRequest, VersionResponse};
use futures::FutureExt as _;
use futures::future::{BoxFuture, LocalBoxFuture};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::checkpoint::Checkpoint;
use crate::config::{AgentConfig, Identity};
use crate::event_recorder;
use crate::kubelet_metrics::KubeletMetrics;
use crate::network_policy;
use crate::node::{NodeAgent, PodNetwork, keep_images};
use crate::pod::{self, NodeContext, Pods};
use crate::policy_gate::{GateEnd, PolicyGate, gate};
use crate::request_rate::RequestRate;
use crate::runtime::{Measured, NodeRuntime, Runtime};
use crate::server::Server;

use backend::backend;
use configs::{node_config, server_config};
use context::ContextParts;
use devices::open_devices;
use pods::{PodSignals, spawn_pod_tasks};
use services::{spawn_network_policies, spawn_service_tasks};

pub use error::Error;

/// Runs the agent until `shutdown`. Pods continue to run after the end of the agent. When `machine_shutdown` of the
/// configuration is cancelled, the agent ends the pods and stops.
///
/// The future is boxed. Otherwise the crate of the caller would compile the agent's tasks.
///
/// # Errors
/// When a part cannot start. No task runs then.
pub fn run(
    config: AgentConfig,
    client: kube::Client,
    runtime: NodeRuntime,
    network: PodNetwork,
    shutdown: CancellationToken,
) -> LocalBoxFuture<'static, Result<(), Error>> {
    Box::pin(run_agent(config, client, runtime, network, shutdown))
}

async fn run_agent(
    config: AgentConfig,
    client: kube::Client,
    runtime: NodeRuntime,
    network: PodNetwork,
    shutdown: CancellationToken,
) -> Result<(), Error> {
    let (recorder, events) = event_recorder::channel(client.clone(), &config.node_name);
    let version = runtime.calls.version(VersionRequest::default()).await.map_err(Error::Runtime)?;
    let agent = node_agent(&config, &version, &client, &recorder, &network).await?;
    let server = Server::bind(&server_config(&config)).await.map_err(Error::Server)?;
    let checkpoint = open_checkpoint(&config).await?;
    let pods = Pods::default();
    let metrics = node_metrics(&config, &agent);
    let shared: Arc<dyn Runtime> = Arc::new(Measured::new(runtime.calls, Arc::clone(&metrics)));
    let (evictions, evicted) = pod::Evictions::new();
    let (devices, device_changes) = open_devices(&config, &agent, Arc::clone(&metrics));
    let (policies, requests) = policy_gate(&config);
    let runtime_name = version.runtime_name;
    let parts = ContextParts {
        config,
        client,
        checkpoint,
        runtime: shared,
        runtime_name,
        recorder,
        pods,
        devices,
        evictions,
        metrics,
    };
    let node = Arc::new(parts.assemble(&agent, policies)?);
    let backend = backend(&node, &agent, runtime.streams, network);
    tracing::info!(node = node.config.node_name, "agent started");
    let mut tasks = JoinSet::new();
    let event_rate = node.config.reports.event_rate.map(RequestRate::of_bucket);
    tasks.spawn(events.with_rate(event_rate).run().boxed());
    spawn_certificate_renewal(&mut tasks, &node.config.identity, agent.ips());
    spawn_service_tasks(&mut tasks, &node, &agent, backend.dns.clone().unwrap_or_default());
    spawn_network_policies(&mut tasks, &node, requests);
    spawn_pod_tasks(&mut tasks, &node, &agent, PodSignals { evicted, device_changes });
    let machine = pod::MachineShutdown::new(Arc::clone(&node), agent.node());
    tasks.spawn(image_reports(&node, &agent, runtime.image_changes));
    tasks.spawn(agent.run(shutdown.clone()).boxed());
    tasks.spawn(server.run(backend, shutdown.clone()).boxed());
    end_tasks(tasks, &node, stopped(machine, &shutdown)).await;
    Ok(())
}

/// The kubelet's metrics, with those of the feature gates and of the node's startup.
fn node_metrics(config: &AgentConfig, agent: &NodeAgent) -> Arc<KubeletMetrics> {
    let metrics = Arc::<KubeletMetrics>::default();
    metrics.show_features(Arc::clone(&config.feature_metrics));
    agent.startup_metrics().into_iter().for_each(|metric| metrics.show(metric));
    metrics
}

/// Creates the [`NodeAgent`], and reserves the overlay's device for it.
async fn node_agent(
    config: &AgentConfig,
    version: &VersionResponse,
    client: &kube::Client,
    recorder: &event_recorder::Recorder,
    network: &PodNetwork,
) -> Result<NodeAgent, Error> {
    let agent =
        NodeAgent::new(node_config(config, version), client.clone(), recorder.clone(), network.clone());
    let mut agent = agent.map_err(Error::Node)?.with_heartbeats(config.heartbeats.clone());
    agent.claim_overlay().await.map_err(Error::Node)?;
    Ok(agent)
}

/// The task that reports the images of the store in the status of the Node object.
fn image_reports(
    node: &NodeContext,
    agent: &NodeAgent,
    changes: Option<watch::Receiver<()>>,
) -> BoxFuture<'static, ()> {
    let max = node.config.reports.max_images;
    keep_images(Arc::clone(&node.runtime), changes, agent.images(), max).boxed()
}

/// Waits for the shutdown of the agent, or for the end of the pods after the shutdown of the machine has begun.
async fn stopped(machine: pod::MachineShutdown, shutdown: &CancellationToken) {
    let _ended = shutdown.run_until_cancelled(machine.run()).await;
}

/// Waits for `stopped` or for a panic of a task. Then ends all tasks and writes the checkpoint.
async fn end_tasks(mut tasks: JoinSet<()>, node: &NodeContext, stopped: impl Future<Output = ()>) {
    // Both arms are cancel-safe: the agent ends after either, and a task that panicked has been logged.
    tokio::select! {
        () = stopped => {}
        () = wait_for_panic(&mut tasks) => {}
    }
    // The next start continues the work of the ended tasks.
    tasks.shutdown().await;
    let (checkpoint, services) = (node.configs.checkpoint().clone(), node.services.clone());
    let write = move || {
        services.store_changed_slices();
        checkpoint.flush()
    };
    let _unwritten = coracle_threads::spawn_blocking(write).await;
}

/// Renews the node's certificates, unless they are files of the user.
fn spawn_certificate_renewal(
    tasks: &mut JoinSet<()>,
    identity: &Identity,
    addresses: watch::Receiver<Vec<IpAddr>>,
) {
    match identity.clone() {
        Identity::Files(_) => {}
        Identity::Joined(membership) => {
            drop(tasks.spawn(async move { membership.keep(addresses).await }.boxed()))
        }
        Identity::Requested(serving) => {
            drop(tasks.spawn(async move { serving.keep(addresses).await }.boxed()))
        }
    }
}

/// Returns only after a panic of a task: the agent must not continue without one of its parts.
async fn wait_for_panic(tasks: &mut JoinSet<()>) {
    while let Some(ended) = tasks.join_next().await {
        if let Err(error) = ended {
            tracing::error!(%error, "a task of the agent panicked");
            return;
        }
    }
    std::future::pending().await
}

/// The gate that holds pods until their network policies are in force. The task that enforces the policies gets the
/// [`GateEnd`].
fn policy_gate(config: &AgentConfig) -> (PolicyGate, Option<GateEnd>) {
    let record = config.network_policy_table.is_some().then(|| network_policy::record(&config.state_dir));
    gate(&config.node_name, record.as_deref())
}

async fn open_checkpoint(config: &AgentConfig) -> Result<Checkpoint, Error> {
    let (dir, key) = (config.state_dir.join("agent"), config.state_dir.join("sealing.key"));
    let opened = coracle_threads::spawn_blocking(move || Checkpoint::open(&dir, &key)).await;
    match opened {
        Ok(opened) => opened.map_err(Error::Checkpoint),
        Err(panic) => std::panic::resume_unwind(panic.into_panic()),
    }
}

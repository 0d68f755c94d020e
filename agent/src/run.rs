//! Wires the agent's parts together and waits for the end.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;

use coracle_cni::OverlayConfig;
use coracle_cri::CgroupDriver;
use coracle_proto::cri::VersionRequest;
use k8s_openapi::api::core::v1::Taint;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::api_health::ApiHealth;
use crate::cgroup::{CgroupConfig, CgroupError, Cgroups, Machine};
use crate::checkpoint::{Checkpoint, CheckpointError};
use crate::config_cache::ConfigCache;
use crate::configuration;
use crate::image_gc::{ImageGc, ImageGcPolicy, Occasion};
use crate::join::{Membership, RequestedServing};
use crate::node::{EvictionThresholds, NodeAgent, NodeConfig, NodeError, NodeFacts, keep_images};
use crate::pod;
use crate::pod::sync::{Inputs, Pods};
use crate::runtime::{ImageNews, Runtime};
use crate::server::{Access, Backend, Certificate, Server, ServerConfig, ServerError, Streams};
use crate::service_cache::ServiceCache;
use crate::source;
use crate::source::checkpoint::PodCheckpoint;
use crate::volume::{VolumeConfig, VolumeContext, VolumeError};
use coracle_values::quantity::millis_of;

/// Everything that can be set about one node's agent.
#[derive(Clone, Debug)]
pub struct AgentConfig {
    /// The node's name in the API.
    pub node_name: String,
    /// What outlives a boot: pod directories under `pods/`, stored objects under `agent/`, `sealing.key`, `pki/`.
    pub state_dir: PathBuf,
    /// What goes with a boot.
    pub run_dir: PathBuf,
    /// Where container logs lie, a directory per pod.
    pub pod_log_dir: PathBuf,
    /// The cgroup under which `kubepods` is made; `/` is the host's root.
    pub cgroup_root: String,
    /// Who makes cgroups.
    pub cgroup_driver: CgroupDriver,
    /// Where the kubelet API listens.
    pub kubelet_listen: SocketAddr,
    /// The addresses that the node reports; the first is the primary one. Empty: found from the routes.
    pub node_ips: Vec<IpAddr>,
    /// The host's resolver configuration, for pods with dnsPolicy Default.
    pub resolv_conf: PathBuf,
    /// How many pods the node takes.
    pub max_pods: u32,
    /// Maximum number of processes of a pod.
    pub pod_pids_limit: Option<i64>,
    /// Addresses of the cluster's DNS service; empty while there is none.
    pub cluster_dns: Vec<IpAddr>,
    /// The cluster's DNS domain.
    pub cluster_domain: String,
    /// Whether to create the Node object if it is not there.
    pub register_node: bool,
    /// Labels to register the node with.
    pub node_labels: BTreeMap<String, String>,
    /// Taints to register the node with.
    pub node_taints: Vec<Taint>,
    /// The node is given up when its lease is not renewed for so many seconds; it is renewed four times as often.
    pub lease_seconds: u16,
    /// Thresholds below which the node is under pressure.
    pub eviction: EvictionThresholds,
    /// Resources reserved for the system, by name (`cpu`, `memory`, `ephemeral-storage`).
    pub system_reserved: BTreeMap<String, String>,
    /// Resources reserved for the node's own processes, by name.
    pub kube_reserved: BTreeMap<String, String>,
    /// What the kubelet API shows itself by.
    pub identity: Identity,
    /// The CA whose client certificates may call the kubelet API; without it certificates are not accepted.
    pub client_ca: Option<PathBuf>,
    /// How pods of other nodes are reached; none: not by us.
    pub overlay: Option<OverlayConfig>,
    /// When unused images are removed.
    pub image_gc: ImageGcPolicy,
    /// The kubelet's `CredentialProviderConfig`, and the directory of the programs that it names.
    pub credential_providers: Option<(PathBuf, PathBuf)>,
}

/// Whose certificates the node lives with.
#[derive(Clone, Debug)]
pub enum Identity {
    /// Certificate and key that somebody else made.
    Files(PathBuf, PathBuf),
    /// Its own, renewed while the agent runs.
    Joined(Arc<Membership>),
    /// A serving certificate that is requested from the cluster with the credentials of a kubeconfig, and renewed.
    Requested(Arc<RequestedServing>),
}

/// Why the agent could not start or had to stop.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The node could not be described.
    #[error("cannot describe the node")]
    Node(#[source] NodeError),
    /// The cgroup tree for pods could not be made.
    #[error("cannot prepare the cgroups of pods")]
    Cgroups(#[source] CgroupError),
    /// The directories for volumes could not be prepared.
    #[error("cannot prepare the volumes of pods")]
    Volumes(#[source] VolumeError),
    /// What pods need without the API server cannot be stored.
    #[error(transparent)]
    Checkpoint(CheckpointError),
    /// The credential providers cannot be used.
    #[error("cannot use the image credential providers")]
    CredentialProviders(#[source] pod::ProviderError),
    /// The kubelet API cannot be served.
    #[error(transparent)]
    Server(ServerError),
    /// The runtime did not answer.
    #[error("the container runtime does not answer: {0}")]
    Runtime(String),
}

/// Runs the agent until `shutdown`; pods go on running after it.
///
/// # Errors
/// When a part cannot start; nothing is left half-started then.
pub async fn run<R: Runtime + Streams + ImageNews>(
    config: AgentConfig,
    client: kube::Client,
    runtime: Arc<R>,
    network: coracle_cni::Network,
    shutdown: CancellationToken,
) -> Result<(), Error> {
    let (recorder, events) = pod::events(client.clone(), &config.node_name);
    let recording = (client.clone(), recorder.clone());
    let mut agent =
        NodeAgent::new(node_config(&config, &*runtime).await?, recording, network).map_err(Error::Node)?;
    agent.lock_names().await.map_err(Error::Node)?;
    let facts = agent.facts();
    let node_object = agent.node();
    let server = Server::bind(&server_config(&config)).await.map_err(Error::Server)?;
    let identity = config.identity.clone();
    let shared: Arc<dyn Runtime> = Arc::<R>::clone(&runtime);
    let checkpoint = open_checkpoint(&config).await?;
    let pods = Pods::default();
    let images = (Arc::clone(&shared), runtime.image_news());
    let collected = (Arc::clone(&shared), pods.clone(), recorder.clone());
    let (evictions, evicted) = pod::Evictions::new();
    let configs = ConfigCache::new(client.clone(), checkpoint.clone(), ApiHealth::default());
    let node = Arc::new(assemble(
        config,
        configs,
        (Arc::clone(&shared), &facts, agent.ips()),
        (recorder, pods.clone(), evictions),
    )?);
    let image_gc = ImageGc::new(node.config.image_gc, collected, node.image_gc.clone());
    let access = Arc::new(Access::new(client.clone(), &node.config.node_name));
    let configuration = Arc::new(configuration::shown(&node.config));
    let backend =
        Backend { pods: Arc::new(pods.clone()), runtime: shared, streams: runtime, access, configuration };
    let (changes, received) = mpsc::channel(256);
    let inputs = Inputs { changes: received, node_object, pods, evicted };
    let statuses = node.statuses.clone();
    let name = node.config.node_name.clone();
    tracing::info!(node = name, "agent started");
    let mut parts = JoinSet::new();
    let addresses = agent.ips();
    match identity {
        Identity::Files(..) => {}
        Identity::Joined(membership) => drop(parts.spawn(async move { membership.keep(addresses).await })),
        Identity::Requested(serving) => drop(parts.spawn(async move { serving.keep(addresses).await })),
    }
    parts.spawn(keep_images(images.0, images.1, agent.images()));
    parts.spawn(pod::Eviction::new(Arc::clone(&node), agent.pulse()).run());
    parts.spawn(agent.run(shutdown.clone()));
    parts.spawn(server.run(backend, shutdown.clone()));
    parts.spawn(async move { statuses.run().await });
    parts.spawn(events.run());
    parts.spawn(image_gc.run());
    parts.spawn(pod::sync::run(Arc::clone(&node), inputs));
    parts.spawn(node.services.clone().run());
    parts.spawn(checkpoint.clone().run());
    let health = node.configs.health().clone();
    parts.spawn(async move { source::apiserver::watch((client, health), &name, changes).await });
    // Both may be dropped: the token stays cancelled, a part that ended badly has been logged.
    tokio::select! {
        () = shutdown.cancelled() => {}
        () = watch_over(&mut parts) => {}
    }
    // Whatever a part was doing is taken up by the next start; the pods do not notice.
    parts.shutdown().await;
    let _unwritten = tokio::task::spawn_blocking(move || checkpoint.flush()).await;
    Ok(())
}

/// Ends only if a part panicked, for without it the agent would be half alive.
async fn watch_over(parts: &mut JoinSet<()>) {
    while let Some(ended) = parts.join_next().await {
        if let Err(error) = ended {
            tracing::error!(%error, "a part of the agent ended badly");
            return;
        }
    }
    std::future::pending().await
}

fn assemble(
    config: AgentConfig,
    configs: ConfigCache,
    (runtime, facts, ips): (Arc<dyn Runtime>, &Arc<NodeFacts>, watch::Receiver<Vec<IpAddr>>),
    (recorder, pods, evictions): (pod::Recorder, Pods, pod::Evictions),
) -> Result<pod::Node, Error> {
    let (client, checkpoint) = (configs.client().clone(), configs.checkpoint().clone());
    let cgroups = CgroupConfig {
        root: config.cgroup_root.clone(),
        driver: config.cgroup_driver,
        cpu_millis: facts.cpu_millis(),
        pod_pids_limit: config.pod_pids_limit,
    };
    let cgroups = Cgroups::open(cgroups).map_err(Error::Cgroups)?;
    let volumes =
        VolumeConfig { pods_dir: config.state_dir.join("pods"), memory_dir: config.run_dir.join("volumes") };
    let volumes = VolumeContext::open(volumes, configs.clone(), recorder.clone(), Arc::clone(facts));
    let machine =
        Machine { memory: facts.memory(), cgroup_v2: cgroups.is_v2(), limits_swap: cgroups.limits_swap() };
    let providers = match &config.credential_providers {
        Some((file, programs)) => pod::Providers::load(file, programs).map_err(Error::CredentialProviders)?,
        None => pod::Providers::default(),
    };
    Ok(pod::Node {
        runtime,
        providers,
        recorder,
        pods,
        services: ServiceCache::new(client.clone(), checkpoint.clone(), configs.health().clone()),
        statuses: pod::StatusWriter::new(client),
        configs,
        machine,
        allocatable: (facts.allocatable.get("cpu").map_or(0, millis_of), facts.memory_allocatable()),
        ips,
        user_ids: pod::UserIds::open(&config.state_dir.join("pods")),
        image_gc: Occasion::default(),
        evictions,
        checkpoint: PodCheckpoint::new(checkpoint),
        volumes: volumes.map_err(Error::Volumes)?,
        cgroups,
        config,
    })
}

async fn open_checkpoint(config: &AgentConfig) -> Result<Checkpoint, Error> {
    let (dir, key) = (config.state_dir.join("agent"), config.state_dir.join("sealing.key"));
    let opened = tokio::task::spawn_blocking(move || Checkpoint::open(&dir, &key)).await;
    match opened {
        Ok(opened) => opened.map_err(Error::Checkpoint),
        Err(panic) => std::panic::resume_unwind(panic.into_panic()),
    }
}

fn server_config(config: &AgentConfig) -> ServerConfig {
    ServerConfig {
        listen: config.kubelet_listen,
        certificate: match &config.identity {
            Identity::Files(certificate, key) => Certificate::Files(certificate.clone(), key.clone()),
            Identity::Joined(membership) => Certificate::Current(membership.serving()),
            Identity::Requested(serving) => Certificate::Current(serving.serving()),
        },
        client_ca: config.client_ca.clone(),
    }
}

async fn node_config(config: &AgentConfig, runtime: &dyn Runtime) -> Result<NodeConfig, Error> {
    let version = runtime.version(VersionRequest::default()).await;
    let version = version.map_err(|status| Error::Runtime(status.message().to_owned()))?;
    Ok(NodeConfig {
        name: config.node_name.clone(),
        ips: config.node_ips.clone(),
        labels: config.node_labels.clone(),
        taints: config.node_taints.clone(),
        register: config.register_node,
        kubelet_port: config.kubelet_listen.port(),
        max_pods: config.max_pods,
        lease_seconds: config.lease_seconds,
        eviction: config.eviction,
        reserved: [config.system_reserved.clone(), config.kube_reserved.clone()],
        state_dir: config.state_dir.clone(),
        runtime_version: format!("{}://{}", version.runtime_name, version.runtime_version),
        overlay: config.overlay.clone(),
    })
}

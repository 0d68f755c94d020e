//! Starts the tasks of the agent and waits for its end.

mod configs;
mod error;

use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;

use coracle_proto::cri::{VersionRequest, VersionResponse};
use futures::FutureExt as _;
use futures::future::{BoxFuture, LocalBoxFuture};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::address_announcer::AddressAnnouncer;
use crate::api_health::ApiHealth;
use crate::cgroup::resources::Amount;
use crate::cgroup::{Cgroups, Machine};
use crate::checkpoint::Checkpoint;
use crate::cluster_dns::ClusterDns;
use crate::config::{AgentConfig, Identity};
use crate::config_cache::ConfigCache;
use crate::configuration;
use crate::device_plugins::{DevicePluginConfig, DevicePlugins, sockets};
use crate::dra::Dra;
use crate::event_recorder;
use crate::image_gc::{Collected, ImageGc};
use crate::image_gc_trigger::Trigger;
use crate::kubelet_metrics::KubeletMetrics;
use crate::network_policy::{self, NetworkPolicies};
use crate::node::{MachineProperties, NodeAgent, PodNetwork, keep_images};
use crate::node_balancer::NodeBalancer;
use crate::node_health;
use crate::overlay_guard;
use crate::pod;
use crate::pod::Pods;
use crate::pod::sync::Inputs;
use crate::pod_resources::PodResources;
use crate::policy_gate::{GateEnd, PolicyGate, gate};
use crate::proxy_health;
use crate::request_rate::RequestRate;
use crate::resource_managers::{ManagerInputs, ResourceManagers};
use crate::runtime::{Measured, NodeRuntime, Runtime};
use crate::server::{Access, Backend, ComponentPages, LogWatches, Server};
use crate::service_cache::ServiceCache;
use crate::service_health::ServiceHealth;
use crate::service_proxy::{NodeProperties, ServiceProxy};
use crate::source::checkpoint::PodCheckpoint;
use crate::source::{self, Sources};
use crate::system_oom;
use crate::volume::{ClaimUsage, VolumeConfig, VolumeContext, local_cleanup};
use coracle_values::quantity::millis_of;

use configs::{cgroup_config, dra_config, node_config, server_config};

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
    let backend = Backend {
        pods: Arc::new(pods.clone()),
        runtime: Arc::clone(&shared),
        streams: runtime.streams,
        access: Arc::new(Access::new(client.clone(), &config.node_name)),
        configuration: Arc::new(configuration::shown(&config)),
        pages: Arc::new(ComponentPages::new(config.flags.clone())),
        logs: LogWatches::open(),
        ends: Arc::default(),
        metrics: Arc::clone(&metrics),
        claims: ClaimUsage::new(config.state_dir.join("pods")),
        identity: config.identity.clone(),
        network: Some(network),
        properties: agent.properties(),
        state_dir: config.state_dir.clone(),
        log_dir: config.pod_log_dir.clone(),
        disk_usages: None,
        cgroups: None,
        dns: config.dns.is_some().then(Arc::default),
    };
    let (policies, requests) = policy_gate(&config);
    let runtime_name = version.runtime_name;
    let services = NodeServices {
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
    let node = Arc::new(services.assemble(&agent, policies)?);
    tracing::info!(node = node.config.node_name, "agent started");
    let mut tasks = JoinSet::new();
    let event_rate = node.config.reports.event_rate.map(RequestRate::of_bucket);
    tasks.spawn(events.with_rate(event_rate).run().boxed());
    spawn_certificate_renewal(&mut tasks, &node.config.identity, agent.ips());
    spawn_service_tasks(&mut tasks, &node, &agent, backend.dns.clone().unwrap_or_default());
    spawn_network_policies(&mut tasks, &node, requests);
    spawn_pod_tasks(&mut tasks, &node, &agent, [evicted, device_changes]);
    let machine = pod::MachineShutdown::new(Arc::clone(&node), agent.node());
    tasks.spawn(image_reports(&node, &agent, runtime.image_changes));
    tasks.spawn(agent.run(shutdown.clone()).boxed());
    tasks.spawn(server.run(completed(backend, &node), shutdown.clone()).boxed());
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
    node: &pod::NodeContext,
    agent: &NodeAgent,
    changes: Option<watch::Receiver<()>>,
) -> BoxFuture<'static, ()> {
    let max = node.config.reports.max_images;
    keep_images(Arc::clone(&node.runtime), changes, agent.images(), max).boxed()
}

/// The backend with the parts that need the shared state of the pods.
fn completed(backend: Backend, node: &Arc<pod::NodeContext>) -> Backend {
    let usages = pod::DiskUsages::new(Arc::clone(node));
    Backend { cgroups: Some(node.cgroups.clone()), disk_usages: Some(Arc::new(usages)), ..backend }
}

/// Waits for the shutdown of the agent, or for the end of the pods after the shutdown of the machine has begun.
async fn stopped(machine: pod::MachineShutdown, shutdown: &CancellationToken) {
    let _ended = shutdown.run_until_cancelled(machine.run()).await;
}

/// Waits for `stopped` or for a panic of a task. Then ends all tasks and writes the checkpoint.
async fn end_tasks(mut tasks: JoinSet<()>, node: &pod::NodeContext, stopped: impl Future<Output = ()>) {
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

/// Enforces network policies. If the settings disable the enforcement, removes the table and the record of an earlier
/// run.
fn spawn_network_policies(tasks: &mut JoinSet<()>, node: &Arc<pod::NodeContext>, requests: Option<GateEnd>) {
    match (&node.config.network_policy_table, requests) {
        (Some(table), Some(requests)) => {
            tasks.spawn(NetworkPolicies::new(node, table, requests).run().boxed());
        }
        _ => {
            let (table, record) =
                (node.config.tables.policies.clone(), network_policy::record(&node.config.state_dir));
            tasks.spawn(network_policy::remove(table, record).boxed());
        }
    }
}

/// Starts the tasks that proxy Services, answer DNS queries of pods and answer health checks of the node. The settings
/// can disable each task.
fn spawn_service_tasks(
    tasks: &mut JoinSet<()>,
    node: &Arc<pod::NodeContext>,
    agent: &NodeAgent,
    dns_metrics: Arc<coracle_dns::Metrics>,
) {
    let config = &node.config;
    let served_here = config.dns.as_ref().map_or(&[][..], |_| &config.cluster_dns);
    let overlay = pod::admit::in_use::overlay_port(config);
    if config.service_proxy.is_none() {
        tasks.spawn(overlay_guard::run(config.tables.services.clone(), overlay, agent.node()).boxed());
    }
    if let Some(settings) = &config.service_proxy {
        let balancer = Arc::new(NodeBalancer::new(Arc::clone(node)));
        tasks.spawn(Arc::clone(&balancer).publish(agent.node()).boxed());
        let proxy = ServiceProxy::new(settings.clone(), &config.node_name, served_here, overlay, balancer);
        let state = proxy.state();
        node.metrics.show_proxy(state.metrics());
        let ranges = settings.node_port_addresses.clone().into();
        let health = ServiceHealth::new(&config.node_name, node.services.clone(), state.clone(), ranges);
        tasks.spawn(health.run().boxed());
        tasks.spawn(proxy_health::serve(settings.healthz, settings.status, state, agent.node()).boxed());
        let properties =
            NodeProperties { object: agent.node(), pod_ranges: agent.ranges(), addresses: agent.ips() };
        tasks.spawn(proxy.run(node.services.clone(), properties).boxed());
        let ranges = &settings.load_balancer_ips;
        let announcer = AddressAnnouncer::new(&config.node_name, ranges, node.services.clone());
        tasks.spawn(announcer.run(agent.node(), agent.renewals()).boxed());
    }
    if let Some(settings) = &config.dns {
        node.services.measure_dns(Arc::clone(&dns_metrics));
        tasks.spawn(node.services.clone().watch_namespaces().boxed());
        let dns = ClusterDns::new(settings.clone(), served_here, &config.cluster_domain, &config.run_dir)
            .with_metrics(dns_metrics);
        tasks.spawn(dns.run(node.services.clone(), agent.node()).boxed());
    }
    if let Some(address) = config.healthz {
        tasks.spawn(node_health::serve(address).boxed());
    }
}

/// Watches the node's pods and runs them, with the caches, status writes and garbage collection that they need.
fn spawn_pod_tasks(
    tasks: &mut JoinSet<()>,
    node: &Arc<pod::NodeContext>,
    agent: &NodeAgent,
    [evicted, device_changes]: [mpsc::UnboundedReceiver<String>; 2],
) {
    let (changes, received) = mpsc::channel(256);
    let (node_object, pods) = (agent.node(), node.pods.clone());
    let inputs = Inputs { changes: received, node_object, pods, evicted, device_changes };
    let collected = Collected {
        runtime: Arc::clone(&node.runtime),
        pods: node.pods.clone(),
        recorder: node.recorder.clone(),
        pull_records: Arc::clone(&node.pull_records),
        metrics: Arc::clone(&node.metrics),
    };
    let image_gc = ImageGc::new(node.config.image_gc, collected, node.image_gc.clone());
    let statuses = node.statuses.clone();
    let (client, name) = (node.configs.client().clone(), node.config.node_name.clone());
    let directories = local_cleanup::Directories {
        volumes: node.config.local_volume_dir.clone(),
        pods: node.volumes.pods_dir().to_owned(),
    };
    spawn_device_tasks(tasks, node);
    if let Some(task) = node.managers.task(Arc::clone(&node.runtime)) {
        tasks.spawn(task.boxed());
    }
    tasks.spawn(pod::Eviction::new(Arc::clone(node), agent.heartbeats()).run().boxed());
    tasks.spawn(pod::LimitEviction::new(Arc::clone(node)).run().boxed());
    tasks.spawn(system_oom::run(node.recorder.clone()).boxed());
    tasks.spawn(local_cleanup::run(client, name, directories).boxed());
    tasks.spawn(async move { statuses.run().await }.boxed());
    tasks.spawn(image_gc.run().boxed());
    tasks.spawn(pod::sync::run(Arc::clone(node), inputs).boxed());
    let with_slices = node.config.service_proxy.is_some() || node.config.dns.is_some();
    tasks.spawn(node.services.clone().run(with_slices).boxed());
    tasks.spawn(node.configs.checkpoint().clone().run(node.recorder.many_starts()).boxed());
    tasks.spawn(source::run(sources(node, agent), changes).boxed());
}

/// Inputs of the sources of pods.
fn sources(node: &pod::NodeContext, agent: &NodeAgent) -> Sources {
    Sources {
        client: node.configs.client().clone(),
        health: node.configs.health().clone(),
        node_name: node.config.node_name.clone(),
        node: agent.node(),
        manifests: node.config.static_pods.clone(),
        mirrors: node.statuses.mirrors().clone(),
    }
}

/// Starts the tasks that serve drivers, device plugins and the pod resources API.
fn spawn_device_tasks(tasks: &mut JoinSet<()>, node: &Arc<pod::NodeContext>) {
    tasks.spawn(node.dra.clone().run(Arc::new(node.devices.clone())).boxed());
    tasks.spawn(node.devices.clone().run().boxed());
    let (pods, devices, dra) = (node.pods.clone(), node.devices.clone(), node.dra.clone());
    let (managers, metrics) = (node.managers.clone(), Arc::clone(&node.metrics));
    let resources = PodResources { pods, devices, dra, managers, metrics };
    tasks.spawn(resources.serve(plugin_root(&node.config).join(sockets::POD_RESOURCES)).boxed());
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

/// Parts of [`pod::NodeContext`] that exist before it.
struct NodeServices {
    config: AgentConfig,
    client: kube::Client,
    checkpoint: Checkpoint,
    runtime: Arc<dyn Runtime>,
    runtime_name: String,
    recorder: event_recorder::Recorder,
    pods: Pods,
    devices: DevicePlugins,
    evictions: pod::Evictions,
    metrics: Arc<KubeletMetrics>,
}

impl NodeServices {
    fn assemble(self, agent: &NodeAgent, policies: PolicyGate) -> Result<pod::NodeContext, Error> {
        let (devices, metrics) = (self.devices, self.metrics);
        let Self { config, client, checkpoint, runtime, runtime_name, recorder, pods, evictions, .. } = self;
        let properties = agent.properties();
        let configs = ConfigCache::new(client.clone(), checkpoint.clone(), ApiHealth::default());
        let cgroups = Cgroups::open(cgroup_config(&config, &properties)).map_err(Error::Cgroups)?;
        metrics.show(cgroups.operations().collector());
        let volumes = VolumeConfig {
            pods_dir: config.state_dir.join("pods"),
            memory_dir: config.run_dir.join("volumes"),
            local_dir: config.local_volume_dir.clone(),
        };
        let volumes =
            VolumeContext::open(volumes, configs.clone(), recorder.clone(), Arc::clone(&properties));
        let volumes = volumes.map_err(Error::Volumes)?;
        metrics.show(volumes.operations().collector());
        let managers = resource_managers(&config, &properties, &devices, &metrics)?;
        Ok(pod::NodeContext {
            dra: Dra::open(
                dra_config(&config),
                client.clone(),
                configs.health().clone(),
                &properties.info.boot_id,
            ),
            devices,
            managers,
            runtime,
            runtime_name,
            providers: providers(&config)?,
            recorder,
            pods,
            policies: policies.with_health(configs.health().clone()),
            services: ServiceCache::new(client.clone(), checkpoint.clone(), configs.health().clone()),
            statuses: pod::StatusWriter::new(client, Arc::clone(&metrics)),
            configs,
            machine: machine(&config, &properties, &cgroups),
            allocatable: Amount {
                cpu_millis: properties.allocatable.get("cpu").map_or(0, millis_of),
                memory: properties.memory_allocatable(),
            },
            ips: agent.ips(),
            pull_records: Arc::new(pull_records(&config)),
            user_ids: pod::UserIds::open(&config.state_dir.join("pods")).without_subordinate_ids(),
            image_gc: Trigger::default(),
            pulls: config.pulls.clone(),
            evictions,
            pressure: agent.pressure(),
            metrics,
            resizes: pod::Resizes::default(),
            checkpoint: PodCheckpoint::new(checkpoint),
            volumes,
            cgroups,
            config,
        })
    }
}

/// The gate that holds pods until their network policies are in force. The task that enforces the policies gets the
/// [`GateEnd`].
fn policy_gate(config: &AgentConfig) -> (PolicyGate, Option<GateEnd>) {
    let record = config.network_policy_table.is_some().then(|| network_policy::record(&config.state_dir));
    gate(&config.node_name, record.as_deref())
}

fn machine(config: &AgentConfig, properties: &MachineProperties, cgroups: &Cgroups) -> Machine {
    Machine {
        memory: properties.memory(),
        cgroup_v2: cgroups.is_v2(),
        limits_swap: cgroups.limits_swap(),
        has_cpu_quota: config.pod_policy.cpu_quota,
    }
}

fn providers(config: &AgentConfig) -> Result<pod::Providers, Error> {
    match &config.credential_providers {
        Some(paths) => {
            pod::Providers::load(&paths.config, &paths.bin_dir).map_err(Error::CredentialProviders)
        }
        None => Ok(pod::Providers::default()),
    }
}

fn pull_records(config: &AgentConfig) -> pod::PullRecords {
    pod::PullRecords::open(config.image_verification.clone(), config.state_dir.join("agent/image-pulls"))
}

fn resource_managers(
    config: &AgentConfig,
    properties: &MachineProperties,
    devices: &DevicePlugins,
    metrics: &Arc<KubeletMetrics>,
) -> Result<ResourceManagers, Error> {
    let inputs = ManagerInputs {
        settings: &config.resource_managers,
        reserved: [&config.system_reserved, &config.kube_reserved],
        state_dir: &config.state_dir,
        properties,
        devices,
    };
    ResourceManagers::open(&inputs, metrics).map_err(Error::ResourceManagers)
}

/// Reads the records of devices. Also returns a receiver, which gets the uid of a pod when the health of one of its
/// devices changes.
fn open_devices(
    config: &AgentConfig,
    agent: &NodeAgent,
    metrics: Arc<KubeletMetrics>,
) -> (DevicePlugins, mpsc::UnboundedReceiver<String>) {
    let devices = DevicePluginConfig {
        sockets: plugin_root(config).join(sockets::DEVICE_PLUGINS),
        records: config.state_dir.join("agent/devices"),
    };
    DevicePlugins::open(devices, &agent.properties().info.boot_id, agent.devices(), metrics)
}

/// The directory that plugins use as the kubelet's root directory.
fn plugin_root(config: &AgentConfig) -> &Path {
    config.plugin_registry_dir.parent().unwrap_or(&config.state_dir)
}

async fn open_checkpoint(config: &AgentConfig) -> Result<Checkpoint, Error> {
    let (dir, key) = (config.state_dir.join("agent"), config.state_dir.join("sealing.key"));
    let opened = coracle_threads::spawn_blocking(move || Checkpoint::open(&dir, &key)).await;
    match opened {
        Ok(opened) => opened.map_err(Error::Checkpoint),
        Err(panic) => std::panic::resume_unwind(panic.into_panic()),
    }
}

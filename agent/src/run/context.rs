//! The shared state of the pods, assembled from the parts of the agent.

use std::sync::Arc;

use coracle_values::quantity::millis_of;

use super::configs::{cgroup_config, dra_config};
use super::error::Error;
use crate::api_health::ApiHealth;
use crate::cgroup::resources::Amount;
use crate::cgroup::{Cgroups, Machine};
use crate::checkpoint::Checkpoint;
use crate::config::AgentConfig;
use crate::config_cache::ConfigCache;
use crate::device_plugins::DevicePlugins;
use crate::dra::Dra;
use crate::event_recorder;
use crate::image_gc_trigger::Trigger;
use crate::kubelet_metrics::KubeletMetrics;
use crate::node::{MachineProperties, NodeAgent};
use crate::pod::{self, NodeContext, Pods};
use crate::policy_gate::PolicyGate;
use crate::resource_managers::{ManagerInputs, ResourceManagers};
use crate::runtime::Runtime;
use crate::service_cache::ServiceCache;
use crate::source::checkpoint::PodCheckpoint;
use crate::volume::{VolumeConfig, VolumeContext};

/// Inputs of [`NodeContext`].
pub(super) struct ContextParts {
    pub(super) config: AgentConfig,
    pub(super) client: kube::Client,
    pub(super) checkpoint: Checkpoint,
    pub(super) runtime: Arc<dyn Runtime>,
    pub(super) runtime_name: String,
    pub(super) recorder: event_recorder::Recorder,
    pub(super) pods: Pods,
    pub(super) devices: DevicePlugins,
    pub(super) evictions: pod::Evictions,
    pub(super) metrics: Arc<KubeletMetrics>,
}

// === impl ContextParts ===

impl ContextParts {
    pub(super) fn assemble(self, agent: &NodeAgent, policies: PolicyGate) -> Result<NodeContext, Error> {
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
            eviction: config.eviction,
        };
        let volumes =
            VolumeContext::open(volumes, configs.clone(), recorder.clone(), Arc::clone(&properties));
        let volumes = volumes.map_err(Error::Volumes)?;
        metrics.show(volumes.operations().collector());
        let managers = resource_managers(&config, &properties, &devices, &metrics)?;
        Ok(NodeContext {
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

//! State that all pods of the node share.

use std::net::IpAddr;
use std::sync::Arc;

use tokio::sync::watch;

use super::eviction::Evictions;
use super::pods::Pods;
use super::pull::Providers;
use super::pull::records::PullRecords;
use super::resize::Resizes;
use super::security::SeccompRules;
use super::status::write::StatusWriter;
use super::user_ids::UserIds;
use crate::cgroup::resources::Amount;
use crate::cgroup::{Cgroups, Machine};
use crate::config::AgentConfig;
use crate::config_cache::ConfigCache;
use crate::device_plugins::DevicePlugins;
use crate::dra::Dra;
use crate::event_recorder::Recorder;
use crate::image_gc_trigger::Trigger;
use crate::kubelet_metrics::KubeletMetrics;
use crate::node::PressureConditions;
use crate::policy_gate::PolicyGate;
use crate::pull_activity::PullActivity;
use crate::resource_managers::ResourceManagers;
use crate::runtime::Runtime;
use crate::service_cache::ServiceCache;
use crate::source::checkpoint::PodCheckpoint;
use crate::volume::VolumeContext;

/// State that all pods of the node share.
pub(crate) struct NodeContext {
    pub(crate) config: AgentConfig,
    pub(crate) runtime: Arc<dyn Runtime>,
    pub(crate) runtime_name: String,
    pub(crate) configs: ConfigCache,
    pub(crate) services: ServiceCache,
    pub(crate) policies: PolicyGate,
    pub(crate) recorder: Recorder,
    pub(crate) pods: Pods,
    pub(crate) statuses: StatusWriter,
    pub(crate) cgroups: Cgroups,
    pub(crate) volumes: VolumeContext,
    pub(crate) dra: Dra,
    pub(crate) devices: DevicePlugins,
    pub(crate) managers: ResourceManagers,
    pub(crate) machine: Machine,
    /// Resources that pods may use.
    pub(crate) allocatable: Amount,
    /// The node's addresses, the primary one first.
    pub(crate) ips: watch::Receiver<Vec<IpAddr>>,
    pub(crate) checkpoint: PodCheckpoint,
    /// Credential provider plugins.
    pub(crate) providers: Providers,
    /// Records of the images that this node has pulled, and of the pods that may use them.
    pub(crate) pull_records: Arc<PullRecords>,
    pub(crate) user_ids: UserIds,
    /// Triggers image garbage collection.
    pub(crate) image_gc: Trigger,
    /// Whether images are being pulled.
    pub(crate) pulls: PullActivity,
    pub(crate) evictions: Evictions,
    /// The node's conditions of pressure.
    pub(crate) pressure: PressureConditions,
    /// Counters and durations for `/metrics`.
    pub(crate) metrics: Arc<KubeletMetrics>,
    pub(crate) resizes: Resizes,
}

impl NodeContext {
    pub(super) fn host_ips(&self) -> Vec<String> {
        self.ips.borrow().iter().map(ToString::to_string).collect()
    }

    /// The cgroups of pods, without CPU quota if this pod has exclusive CPUs or the node has no quotas.
    pub(super) fn cgroups_of(&self, uid: &str) -> Cgroups {
        let has_quota = self.machine.has_cpu_quota && !self.managers.has_exclusive_cpus(uid);
        self.cgroups.clone().with_quota(has_quota)
    }

    pub(super) fn seccomp(&self) -> SeccompRules {
        let (dir, is_default) =
            (self.config.state_dir.join("seccomp"), self.config.pod_policy.seccomp_default);
        SeccompRules { dir, is_default }
    }
}

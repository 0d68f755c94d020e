//! Pods on this node: one task each, level-triggered, newest wish wins.
//!
//! [`sync`] turns the source's changes into wishes and gives each pod its [`worker`]; a worker looks
//! ([`observe`]), decides ([`plan`], pure), does ([`apply`]) and tells ([`status`], pure).

mod admit;
mod apply;
mod backoff;
mod config;
mod env;
mod events;
mod eviction;
mod hook;
mod observe;
mod plan;
mod probe;
mod pull;
mod security;
mod state;
mod status;
pub(crate) mod sync;
mod user_ids;
mod worker;

use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;

use tokio::sync::watch;

use crate::cgroup::{Cgroups, Machine};
use crate::config_cache::ConfigCache;
use crate::image_gc::Occasion;
use crate::run::AgentConfig;
use crate::runtime::Runtime;
use crate::service_cache::ServiceCache;
use crate::source::checkpoint::PodCheckpoint;
use crate::volume::VolumeContext;

pub(crate) use events::{Level, Recorder, channel as events};
pub(crate) use eviction::{Eviction, Evictions};
pub use pull::ProviderError;
pub(crate) use pull::Providers;
pub(crate) use status::write::StatusWriter;
pub(crate) use user_ids::UserIds;

/// What all pods of the node share.
pub(crate) struct Node {
    pub(crate) config: AgentConfig,
    pub(crate) runtime: Arc<dyn Runtime>,
    pub(crate) configs: ConfigCache,
    pub(crate) services: ServiceCache,
    pub(crate) recorder: Recorder,
    pub(crate) pods: sync::Pods,
    pub(crate) statuses: StatusWriter,
    pub(crate) cgroups: Cgroups,
    pub(crate) volumes: VolumeContext,
    pub(crate) machine: Machine,
    /// Cores in thousandths, and bytes of memory, that pods may use.
    pub(crate) allocatable: (i64, i64),
    /// The node's addresses, the primary one first.
    pub(crate) ips: watch::Receiver<Vec<IpAddr>>,
    pub(crate) checkpoint: PodCheckpoint,
    /// Programs that know registries' credentials.
    pub(crate) providers: Providers,
    pub(crate) user_ids: UserIds,
    /// What may let an image go, or need one to.
    pub(crate) image_gc: Occasion,
    pub(crate) evictions: Evictions,
}

impl Node {
    fn host_ips(&self) -> Vec<String> {
        self.ips.borrow().iter().map(ToString::to_string).collect()
    }

    fn seccomp_dir(&self) -> PathBuf {
        self.config.state_dir.join("seccomp")
    }
}

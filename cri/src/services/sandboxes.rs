//! The sandbox service: run, stop, update, remove, list.

mod check;
mod first_process;
mod remove;
mod run;
mod status;
mod stop;
mod update;

use std::sync::Arc;

use coracle_cni::Network;

#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use self::check::check;
use crate::config::RuntimeConfig;
use crate::services::containers::ContainerService;
use crate::services::shared::{Machine, Objects, Transitions};
use crate::shim_monitor::ShimMonitor;
use crate::shim_program::ShimProgram;
use crate::undo::UndoContext;

/// Runs and removes pod sandboxes.
#[derive(Clone)]
pub(crate) struct SandboxService {
    pub(crate) config: Arc<RuntimeConfig>,
    pub(crate) network: Network,
    pub(crate) shim_program: Arc<ShimProgram>,
    pub(crate) monitor: ShimMonitor,
    pub(crate) containers: ContainerService,
    pub(crate) objects: Objects,
    pub(crate) machine: Machine,
    pub(crate) transitions: Transitions,
    pub(crate) undo: Arc<UndoContext>,
}

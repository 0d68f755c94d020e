//! The sandbox service: run, stop, update, remove, list.

mod first_process;
mod remove;
mod run;
mod status;
mod stop;
mod update;

use std::sync::Arc;

use coracle_cni::Network;

#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use self::run::check;
use crate::cgroup::Cgroups;
use crate::cgroup::driver::Layout;
use crate::config::RuntimeConfig;
use crate::event_outbox::EventOutbox;
use crate::exit_recorder::ExitRecorder;
use crate::host::Host;
use crate::names::Names;
use crate::nri::PluginHooks;
use crate::profiles::SecurityProfiles;
use crate::records::Records;
use crate::selinux::Selinux;
use crate::services::containers::ContainerService;
use crate::shim_monitor::ShimMonitor;
use crate::shim_program::ShimProgram;
use crate::tables::Tables;
use crate::undo::UndoContext;

/// Runs and removes pod sandboxes.
#[derive(Clone)]
pub(crate) struct SandboxService {
    pub(crate) config: Arc<RuntimeConfig>,
    pub(crate) network: Network,
    pub(crate) shim_program: Arc<ShimProgram>,
    pub(crate) records: Arc<Records>,
    pub(crate) tables: Arc<Tables>,
    pub(crate) names: Names,
    pub(crate) host: Arc<Host>,
    pub(crate) cgroups: Arc<Cgroups>,
    pub(crate) layout: Arc<Layout>,
    pub(crate) selinux: Arc<Selinux>,
    pub(crate) profiles: Arc<SecurityProfiles>,
    pub(crate) outbox: EventOutbox,
    pub(crate) hooks: PluginHooks,
    pub(crate) exits: ExitRecorder,
    pub(crate) monitor: ShimMonitor,
    pub(crate) containers: ContainerService,
    pub(crate) undo: Arc<UndoContext>,
}

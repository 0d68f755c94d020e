//! The container service: create, start, stop, update, remove, list.

mod bundle;
pub(crate) mod check;
mod create;
mod log;
mod pid_namespace;
mod remove;
mod restore;
mod spec;
mod start;
mod status;
mod stop;
mod update;
mod volumes;

use std::sync::Arc;

use coracle_images::Images;

pub(crate) use self::bundle::{PROCESS_FILE, read_process};
pub(crate) use self::create::{ContainerRequest, Origin};
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
use crate::tables::Tables;
use crate::undo::UndoContext;

/// Creates, runs and removes containers.
#[derive(Clone)]
pub(crate) struct ContainerService {
    pub(crate) config: Arc<RuntimeConfig>,
    pub(crate) images: Images,
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
    pub(crate) undo: Arc<UndoContext>,
    /// Writable layers are removed one at a time.
    pub(crate) layer_removal: Arc<tokio::sync::Mutex<()>>,
}

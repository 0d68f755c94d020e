//! State that several services share.

use std::sync::Arc;

use crate::cgroup::Cgroups;
use crate::cgroup::driver::Layout;
use crate::event_outbox::EventOutbox;
use crate::exit_recorder::ExitRecorder;
use crate::host::Host;
use crate::names::Names;
use crate::nri::PluginHooks;
use crate::profiles::SecurityProfiles;
use crate::records::Records;
use crate::selinux::Selinux;
use crate::tables::Tables;

/// All sandboxes and containers: records on disk, tables in memory, names in use.
#[derive(Clone)]
pub(crate) struct Objects {
    pub(crate) records: Arc<Records>,
    pub(crate) tables: Arc<Tables>,
    pub(crate) names: Names,
}

/// Features of the machine: kernel, cgroups, confinement.
#[derive(Clone)]
pub(crate) struct Machine {
    pub(crate) host: Arc<Host>,
    pub(crate) cgroups: Arc<Cgroups>,
    pub(crate) layout: Arc<Layout>,
    pub(crate) selinux: Arc<Selinux>,
    pub(crate) profiles: Arc<SecurityProfiles>,
}

/// Receivers of state changes: event subscribers, NRI plugins, records of exits.
#[derive(Clone)]
pub(crate) struct Transitions {
    pub(crate) outbox: EventOutbox,
    pub(crate) hooks: PluginHooks,
    pub(crate) exits: ExitRecorder,
}

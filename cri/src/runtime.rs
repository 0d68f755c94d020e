//! The runtime: the composition of its services.

use std::path::Path;
use std::sync::Arc;

use coracle_cni::Network;
use coracle_images::Images;
use coracle_nri::Nri;
use http::{Request, Response};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use crate::cgroup::Cgroups;
use crate::cgroup::driver::Layout;
use crate::config::RuntimeConfig;
use crate::container::mount_points;
use crate::error::Error;
use crate::event_outbox::EventOutbox;
use crate::events::Events;
use crate::exec_killer::ExecKiller;
use crate::exit_recorder::ExitRecorder;
use crate::host::Host;
use crate::names::Names;
use crate::nri::PluginHooks;
use crate::plugin_host::PluginHost;
use crate::profiles::SecurityProfiles;
use crate::records::{Records, SANDBOXES};
use crate::recover::Recovery;
use crate::root_limits;
use crate::selinux::Selinux;
use crate::services::checkpoints::CheckpointService;
use crate::services::containers::ContainerService;
use crate::services::execs::{ExecService, OutputMemory};
use crate::services::images::ImageService;
use crate::services::sandboxes::SandboxService;
use crate::services::shared::{Machine, Objects, Transitions};
use crate::services::status::StatusService;
use crate::shim_client::Shim;
use crate::shim_monitor::{self, ShimMonitor};
use crate::shim_program::ShimProgram;
use crate::stats::StatsService;
use crate::stream::{self, BoxBody, Forwarder, StreamService, Tokens};
use crate::tables::Tables;
use crate::undo::UndoContext;

/// The container runtime. Clones share one state.
#[derive(Clone)]
pub struct Runtime {
    pub(crate) sandboxes: SandboxService,
    pub(crate) containers: ContainerService,
    pub(crate) images: ImageService,
    pub(crate) execs: ExecService,
    pub(crate) streams: StreamService,
    pub(crate) stats: StatsService,
    pub(crate) checkpoints: CheckpointService,
    pub(crate) status: StatusService,
    pub(crate) outbox: EventOutbox,
    pub(crate) nri: Nri,
    /// Keeps the plugin host alive, because NRI has only a weak reference.
    plugin_host: Arc<PluginHost>,
}

/// Components that several services share.
struct Components {
    config: Arc<RuntimeConfig>,
    images: Images,
    network: Network,
    host: Arc<Host>,
    cgroups: Arc<Cgroups>,
    layout: Arc<Layout>,
    selinux: Arc<Selinux>,
    profiles: Arc<SecurityProfiles>,
    records: Arc<Records>,
    tables: Arc<Tables>,
    names: Names,
    events: Arc<Events>,
    shim_program: Arc<ShimProgram>,
    nri: Nri,
}

// === impl Runtime ===

impl Runtime {
    /// Opens the runtime: reads the records, reconnects to live shims, undoes incomplete objects, and releases network
    /// resources without an owner.
    ///
    /// # Errors
    /// If a directory cannot be created, or the cgroups cannot be found or do not fit the configuration. Also if a
    /// record is of a later version of this program, the kernel refuses to read a record, or a live shim is
    /// incompatible. No pod is changed then. An object with any other unreadable record is undone, with a warning.
    pub async fn open(config: RuntimeConfig, images: Images, network: Network) -> Result<Self, Error> {
        let parts = Components::open(config, images, network)?;
        let (runtime, recovery) = parts.compose();
        recovery.run().await?;
        parts.profiles.replace_earlier_apparmor().await;
        runtime.start_plugins().await;
        Ok(runtime)
    }

    /// Whether pods of a runtime with this state directory run. Reads the command lines of all processes, so it may
    /// block.
    #[must_use]
    pub fn has_pods(state: &Path) -> bool {
        Shim::runs_in(&state.join(SANDBOXES))
    }

    /// Starts the configured NRI plugins. A failure is logged: pods run without plugins.
    async fn start_plugins(&self) {
        let host: Arc<dyn coracle_nri::Host> = Arc::<PluginHost>::clone(&self.plugin_host);
        if let Err(error) = self.nri.start(Arc::downgrade(&host)).await {
            let socket = self.nri.socket();
            warn!(?socket, %error, "cannot listen for NRI plugins; pods run without plugins");
        }
    }

    /// Notifies of changes of images and their names. Several changes can be one notification.
    #[must_use]
    pub fn image_changes(&self) -> watch::Receiver<()> {
        self.images.changes()
    }

    /// Notifies of changes of pods and containers. Several changes can be one notification.
    #[must_use]
    pub fn changes(&self) -> watch::Receiver<()> {
        self.outbox.changes.subscribe()
    }

    /// Answers a request for a stream URL, and serves the stream on the upgraded connection.
    pub async fn stream<B: Send>(&self, request: Request<B>) -> Response<BoxBody> {
        self.streams.stream(request).await
    }
}

/// Serves streams over HTTP until `shutdown`, for clients of the gRPC service.
pub async fn serve_streams(runtime: Runtime, listener: TcpListener, shutdown: CancellationToken) {
    stream::serve(runtime.streams, listener, shutdown).await;
}

// === impl Components ===

impl Components {
    fn open(config: RuntimeConfig, images: Images, network: Network) -> Result<Self, Error> {
        let cgroups = Cgroups::open()?;
        let layout = Layout::new(config.cgroup_driver, &config.cgroup_root)
            .map_err(|why| Error::invalid("cgroup_root", why))?;
        Cgroups::check_driver(config.cgroup_driver)?;
        root_limits::raise();
        let host = Host::detect(&cgroups)?;
        let records = Records::open(&config)?;
        let events = Events::open(records.delivered_file())?;
        mount_points::make(&config.root)?;
        let selinux = Selinux::detect();
        selinux.label_layers(&config.root);
        let shim_program = ShimProgram::open(&config.shim_binary)
            .map_err(Error::file("make a read-only mount of", &config.shim_binary))?;
        Ok(Self {
            images,
            network,
            host: Arc::new(host),
            cgroups: Arc::new(cgroups),
            layout: Arc::new(layout),
            selinux: Arc::new(selinux),
            profiles: Arc::default(),
            records: Arc::new(records),
            tables: Arc::default(),
            names: Names::default(),
            events: Arc::new(events),
            shim_program: Arc::new(shim_program),
            nri: Nri::new(config.nri.clone()),
            config: Arc::new(config),
        })
    }

    /// Creates the services, each with the components and other services that it uses.
    fn compose(&self) -> (Runtime, Recovery) {
        let outbox = self.outbox();
        let hooks = self.hooks();
        let exits = self.exits(&outbox, &hooks);
        let exec_killer = self.exec_killer();
        let execs = self.execs(&exec_killer);
        let stats = self.stats();
        let undo = self.undo();
        let monitor = self.monitor(&hooks, &exits, &exec_killer);
        let transitions = Transitions { outbox: outbox.clone(), hooks, exits: exits.clone() };
        let containers = self.containers(&transitions, &undo);
        let sandboxes = SandboxService {
            config: self.config.clone(),
            network: self.network.clone(),
            shim_program: self.shim_program.clone(),
            objects: self.objects(),
            machine: self.machine(),
            transitions: transitions.clone(),
            monitor: monitor.clone(),
            containers: containers.clone(),
            undo,
        };
        let recovery = Recovery {
            config: self.config.clone(),
            images: self.images.clone(),
            network: self.network.clone(),
            tables: self.tables.clone(),
            records: self.records.clone(),
            cgroups: self.cgroups.clone(),
            layout: self.layout.clone(),
            names: self.names.clone(),
            selinux: self.selinux.clone(),
            outbox: outbox.clone(),
            exits,
            exec_killer,
            monitor,
            containers: containers.clone(),
            sandboxes: sandboxes.clone(),
        };
        let runtime = Runtime {
            streams: self.streams(&execs),
            images: self.images(&stats),
            checkpoints: self.checkpoints(&containers, &sandboxes),
            status: self.status(),
            nri: self.nri.clone(),
            plugin_host: self.plugin_host(&containers),
            sandboxes,
            containers,
            execs,
            stats,
            outbox,
        };
        (runtime, recovery)
    }

    fn outbox(&self) -> EventOutbox {
        EventOutbox {
            events: self.events.clone(),
            changes: watch::Sender::new(()),
            records: self.records.clone(),
            tables: self.tables.clone(),
        }
    }

    fn hooks(&self) -> PluginHooks {
        PluginHooks {
            nri: self.nri.clone(),
            tables: self.tables.clone(),
            records: self.records.clone(),
            host: self.host.clone(),
            cgroup_driver: self.layout.driver(),
            cdi_dirs: self.config.cdi_dirs.clone().into(),
        }
    }

    fn exits(&self, outbox: &EventOutbox, hooks: &PluginHooks) -> ExitRecorder {
        ExitRecorder {
            tables: self.tables.clone(),
            records: self.records.clone(),
            cgroups: self.cgroups.clone(),
            outbox: outbox.clone(),
            hooks: hooks.clone(),
        }
    }

    fn exec_killer(&self) -> ExecKiller {
        ExecKiller { tables: self.tables.clone(), cgroups: self.cgroups.clone() }
    }

    fn execs(&self, killer: &ExecKiller) -> ExecService {
        ExecService {
            tables: self.tables.clone(),
            records: self.records.clone(),
            killer: killer.clone(),
            output_memory: OutputMemory::default(),
        }
    }

    fn images(&self, stats: &StatsService) -> ImageService {
        ImageService { images: self.images.clone(), records: self.records.clone(), stats: stats.clone() }
    }

    fn stats(&self) -> StatsService {
        StatsService {
            tables: self.tables.clone(),
            records: self.records.clone(),
            cgroups: self.cgroups.clone(),
            layout: self.layout.clone(),
        }
    }

    fn undo(&self) -> Arc<UndoContext> {
        Arc::new(UndoContext {
            selinux: self.selinux.clone(),
            records: self.records.clone(),
            network: self.network.clone(),
            tables: self.tables.clone(),
            cgroups: self.cgroups.clone(),
            nri: self.nri.clone(),
        })
    }

    fn monitor(&self, hooks: &PluginHooks, exits: &ExitRecorder, exec_killer: &ExecKiller) -> ShimMonitor {
        ShimMonitor::new(shim_monitor::State {
            tables: self.tables.clone(),
            records: self.records.clone(),
            network: self.network.clone(),
            hooks: hooks.clone(),
            exits: exits.clone(),
            exec_killer: exec_killer.clone(),
        })
    }

    fn objects(&self) -> Objects {
        Objects { records: self.records.clone(), tables: self.tables.clone(), names: self.names.clone() }
    }

    fn machine(&self) -> Machine {
        Machine {
            host: self.host.clone(),
            cgroups: self.cgroups.clone(),
            layout: self.layout.clone(),
            selinux: self.selinux.clone(),
            profiles: self.profiles.clone(),
        }
    }

    fn containers(&self, transitions: &Transitions, undo: &Arc<UndoContext>) -> ContainerService {
        ContainerService {
            config: self.config.clone(),
            images: self.images.clone(),
            objects: self.objects(),
            machine: self.machine(),
            transitions: transitions.clone(),
            undo: undo.clone(),
            image_files: Arc::default(),
            layer_removal: Arc::default(),
        }
    }

    fn checkpoints(&self, containers: &ContainerService, sandboxes: &SandboxService) -> CheckpointService {
        CheckpointService {
            tables: self.tables.clone(),
            records: self.records.clone(),
            cgroups: self.cgroups.clone(),
            images: self.images.clone(),
            names: self.names.clone(),
            containers: containers.clone(),
            sandboxes: sandboxes.clone(),
        }
    }

    fn streams(&self, execs: &ExecService) -> StreamService {
        StreamService {
            tables: self.tables.clone(),
            execs: execs.clone(),
            forwarder: Forwarder::new(self.tables.clone()),
            tokens: Arc::new(Tokens::default()),
            url: self.config.stream_url.as_str().into(),
            idle_limit: self.config.stream_idle_limit,
        }
    }

    fn status(&self) -> StatusService {
        StatusService {
            config: self.config.clone(),
            host: self.host.clone(),
            network: self.network.clone(),
            layout: self.layout.clone(),
            selinux: self.selinux.clone(),
        }
    }

    fn plugin_host(&self, containers: &ContainerService) -> Arc<PluginHost> {
        Arc::new(PluginHost {
            tables: self.tables.clone(),
            records: self.records.clone(),
            containers: containers.clone(),
        })
    }
}

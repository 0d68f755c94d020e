//! The runtime: its configuration, its state and how it opens.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use coracle_cni::Network;
use coracle_images::Images;
use coracle_nri::{Nri, Settings};
use tokio::sync::watch;

use crate::cgroup::Cgroups;
use crate::cgroup::driver::{CgroupDriver, Layout};
use crate::container::apparmor::DefaultProfile;
use crate::container::filter::Filters;
use crate::container::{Container, mount_points};
use crate::error::Error;
use crate::events::Events;
use crate::host::Host;
use crate::names::Names;
use crate::records::Records;
use crate::sandbox::Sandbox;
use crate::selinux::Selinux;
use crate::shim_client::Times;
use crate::shim_program::{self, ShimProgram};
use crate::stream::Tokens;
use crate::table::Table;

/// Where and how the runtime works. Every path is a setting, so that several live side by side.
#[derive(Clone, Debug)]
pub struct RuntimeConfig {
    /// What outlives a boot: the containers' writable layers. `/var/lib/coracle`.
    pub root: PathBuf,
    /// What does not: records, sockets, mount points. `/run/coracle`.
    pub state: PathBuf,
    /// The cgroup below which all of ours are, `/`; where systemd makes them, `/` or a slice.
    pub cgroup_root: String,
    /// Who makes cgroups.
    pub cgroup_driver: CgroupDriver,
    /// A container's log file is rotated when it would grow past this; 0 = never.
    pub log_max_size: u64,
    /// Log files kept for a container, the current one included.
    pub log_max_files: u32,
    /// The binary that has the `shim` subcommand: usually our own.
    pub shim_binary: PathBuf,
    /// How long a pod's shim is waited for.
    pub shim_times: Times,
    /// What the URLs that Exec, Attach and PortForward return begin with, without a slash at the end.
    pub stream_url: String,
    /// How long nothing may move on a stream before it is given up, its client being gone; none = for ever.
    pub stream_idle_limit: Option<Duration>,
    /// Where NRI plugins are found; nowhere by default.
    pub nri: Settings,
    /// Where vendors describe their devices (CDI); what lies in a later one counts more.
    pub cdi_dirs: Vec<PathBuf>,
}

/// The container runtime. Clones share one state.
#[derive(Clone)]
pub struct Runtime {
    pub(crate) inner: Arc<Inner>,
}

pub(crate) struct Inner {
    pub(crate) config: RuntimeConfig,
    pub(crate) images: Images,
    pub(crate) network: Network,
    pub(crate) shim_program: ShimProgram,
    pub(crate) host: Host,
    pub(crate) cgroups: Cgroups,
    /// What cgroups are called.
    pub(crate) layout: Layout,
    pub(crate) default_profile: DefaultProfile,
    pub(crate) selinux: Selinux,
    pub(crate) records: Records,
    pub(crate) sandboxes: Table<Sandbox>,
    pub(crate) containers: Table<Container>,
    pub(crate) names: Names,
    /// Held by whoever removes a layer that is nobody's any more.
    pub(crate) discarding: tokio::sync::Mutex<()>,
    pub(crate) events: Events,
    /// Told with every event, listeners or not.
    pub(crate) changes: watch::Sender<()>,
    pub(crate) tokens: Tokens,
    pub(crate) nri: Nri,
    /// Compiled seccomp profiles.
    pub(crate) filters: Filters,
}

// === impl RuntimeConfig ===

impl Default for RuntimeConfig {
    fn default() -> Self {
        Self {
            root: PathBuf::from("/var/lib/coracle"),
            state: PathBuf::from("/run/coracle"),
            cgroup_root: "/".to_owned(),
            cgroup_driver: CgroupDriver::default(),
            log_max_size: 10 << 20,
            log_max_files: 5,
            shim_binary: PathBuf::from(shim_program::OWN),
            shim_times: Times::default(),
            stream_url: "http://127.0.0.1".to_owned(),
            // As the kubelet's --streaming-connection-idle-timeout, and containerd's.
            stream_idle_limit: Some(Duration::from_secs(4 * 3600)),
            nri: Settings::default(),
            cdi_dirs: ["/etc/cdi", "/var/run/cdi"].map(PathBuf::from).into(),
        }
    }
}

// === impl Runtime ===

impl Runtime {
    /// Opens the runtime: reads the records, reconnects to the shims that live, undoes what was half
    /// made, and gives the network back what nobody owns any more.
    ///
    /// # Errors
    /// When a directory cannot be made, the kernel's cgroups cannot be found, or not be made as configured. When a record
    /// is of a later version of this program, or a shim lives that cannot be worked with: then nothing is done to any pod.
    /// A record that cannot be read otherwise is set aside with a warning, never an error.
    pub async fn open(config: RuntimeConfig, images: Images, network: Network) -> Result<Self, Error> {
        let cgroups = Cgroups::open()?;
        let layout = Layout::new(config.cgroup_driver, &config.cgroup_root)
            .map_err(|why| Error::invalid("cgroup_root", why))?;
        Cgroups::check_driver(config.cgroup_driver)?;
        let host = Host::look(&cgroups)?;
        let records = Records::open(&config)?;
        let events = Events::open(records.told_file())?;
        mount_points::make(&config.root)?;
        let selinux = Selinux::look();
        selinux.label_layers(&config.root);
        let nri = Nri::new(config.nri.clone());
        let shim_program = ShimProgram::open(&config.shim_binary)
            .map_err(Error::file("make a read-only mount of", &config.shim_binary))?;
        let inner = Inner {
            config,
            images,
            network,
            shim_program,
            host,
            cgroups,
            layout,
            default_profile: DefaultProfile::default(),
            selinux,
            records,
            sandboxes: Table::default(),
            containers: Table::default(),
            names: Names::default(),
            discarding: tokio::sync::Mutex::default(),
            events,
            changes: watch::Sender::new(()),
            tokens: Tokens::default(),
            nri,
            filters: Filters::default(),
        };
        let runtime = Self { inner: Arc::new(inner) };
        runtime.recover().await?;
        runtime.start_plugins().await;
        Ok(runtime)
    }

    /// Changes whenever an image or a name of one comes or goes; several changes at once may be seen as one.
    #[must_use]
    pub fn image_changes(&self) -> watch::Receiver<()> {
        self.inner.images.changes()
    }

    /// Changes whenever something becomes of a pod or a container; several changes at once may be seen as one.
    #[must_use]
    pub fn changes(&self) -> watch::Receiver<()> {
        self.inner.changes.subscribe()
    }
}

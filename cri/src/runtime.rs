//! The runtime: its configuration, its state and how it opens.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use coracle_cni::Network;
use coracle_images::Images;

use crate::cgroup::Cgroups;
use crate::container::Container;
use crate::error::Error;
use crate::events::Events;
use crate::host::Host;
use crate::records::Records;
use crate::sandbox::Sandbox;
use crate::stream::Tokens;
use crate::table::Table;

/// Where and how the runtime works. Every path is a setting, so that several live side by side.
#[derive(Clone, Debug)]
pub struct RuntimeConfig {
    /// What outlives a boot: the containers' writable layers. `/var/lib/coracle`.
    pub root: PathBuf,
    /// What does not: records, sockets, mount points. `/run/coracle`.
    pub state: PathBuf,
    /// The cgroup below which all of ours are, `/`.
    pub cgroup_root: String,
    /// A container's log file is rotated when it would grow past this; 0 = never.
    pub log_max_size: u64,
    /// Log files kept for a container, the current one included.
    pub log_max_files: u32,
    /// The binary that has the `shim` subcommand: usually our own.
    pub shim_binary: PathBuf,
    /// What the URLs that Exec, Attach and PortForward return begin with, without a slash at the end.
    pub stream_url: String,
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
    pub(crate) host: Host,
    pub(crate) cgroups: Cgroups,
    pub(crate) records: Records,
    pub(crate) sandboxes: Table<Sandbox>,
    pub(crate) containers: Table<Container>,
    pub(crate) names: Mutex<HashMap<String, String>>,
    pub(crate) events: Events,
    pub(crate) tokens: Tokens,
}

// === impl RuntimeConfig ===

impl Default for RuntimeConfig {
    fn default() -> Self {
        Self {
            root: PathBuf::from("/var/lib/coracle"),
            state: PathBuf::from("/run/coracle"),
            cgroup_root: "/".to_owned(),
            log_max_size: 10 << 20,
            log_max_files: 5,
            shim_binary: PathBuf::from("/proc/self/exe"),
            stream_url: "http://127.0.0.1".to_owned(),
        }
    }
}

// === impl Runtime ===

impl Runtime {
    /// Opens the runtime: reads the records, reconnects to the shims that live, undoes what was half
    /// made, and gives the network back what nobody owns any more.
    ///
    /// # Errors
    /// When a directory cannot be made or the kernel's cgroups cannot be found. A record that cannot
    /// be read is set aside with a warning, never an error.
    pub async fn open(config: RuntimeConfig, images: Images, network: Network) -> Result<Self, Error> {
        let cgroups = Cgroups::open()?;
        let host = Host::look(&cgroups)?;
        let records = Records::open(&config)?;
        let inner = Inner {
            config,
            images,
            network,
            host,
            cgroups,
            records,
            sandboxes: Table::default(),
            containers: Table::default(),
            names: Mutex::default(),
            events: Events::default(),
            tokens: Tokens::default(),
        };
        let runtime = Self { inner: Arc::new(inner) };
        runtime.recover().await?;
        Ok(runtime)
    }
}

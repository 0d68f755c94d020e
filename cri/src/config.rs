//! Configuration of the runtime.

use std::path::PathBuf;
use std::time::Duration;

use coracle_nri::Settings;

use crate::cgroup::driver::CgroupDriver;
use crate::shim_client::Timeouts;
use crate::shim_program;

/// Configuration of the runtime. Every path is configurable, so that several runtimes can run on one machine.
#[derive(Clone, Debug)]
pub struct RuntimeConfig {
    /// Directory for data that survives a reboot: the containers' writable layers. Default: `/var/lib/coracle`.
    pub root: PathBuf,
    /// Directory for data of the current boot: records, sockets, mount points. Default: `/run/coracle`.
    pub state: PathBuf,
    /// Parent of all cgroups of the runtime. Default: `/`. With the systemd driver, `/` or a slice.
    pub cgroup_root: String,
    /// The component that creates cgroups: the runtime itself, or systemd.
    pub cgroup_driver: CgroupDriver,
    /// Maximum size of a container's log file in bytes; a larger file is rotated. 0 disables rotation.
    pub log_max_size: u64,
    /// Maximum number of log files per container, including the current one.
    pub log_max_files: u32,
    /// Executable with the `shim` subcommand. Default: the running executable.
    pub shim_binary: PathBuf,
    /// Timeouts of calls to shims. Only tests change them: the defaults exceed the time limits of the shim itself.
    pub shim_timeouts: Timeouts,
    /// Base URL in the responses of Exec, Attach and PortForward, without a trailing slash.
    pub stream_url: String,
    /// Time without traffic after which a stream is closed. `None` disables the limit.
    pub stream_idle_limit: Option<Duration>,
    /// Directories and socket of NRI plugins. Default: none.
    pub nri: Settings,
    /// Directories with CDI device descriptions. A later directory has precedence over an earlier one.
    pub cdi_dirs: Vec<PathBuf>,
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
            shim_binary: PathBuf::from(shim_program::OWN_EXECUTABLE),
            shim_timeouts: Timeouts::default(),
            stream_url: "http://127.0.0.1".to_owned(),
            // The default of the kubelet's --streaming-connection-idle-timeout and of containerd.
            stream_idle_limit: Some(Duration::from_secs(4 * 3600)),
            nri: Settings::default(),
            cdi_dirs: ["/etc/cdi", "/var/run/cdi"].map(PathBuf::from).into(),
        }
    }
}

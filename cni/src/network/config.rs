//! Configuration of the pod network.

use std::net::IpAddr;
use std::path::PathBuf;

/// Names and directories of the network.
#[derive(Debug, Clone)]
pub struct NetworkConfig {
    /// Directory of CNI configuration lists (`/etc/cni/net.d`). `None` means only the default network.
    pub conf_dir: Option<PathBuf>,
    /// Directories of plugins that are not our own (`/opt/cni/bin`), in search order.
    pub bin_dirs: Vec<PathBuf>,
    /// Directory of records and addresses, for example `/run/coracle/cni`.
    pub state_dir: PathBuf,
    /// Directory of records that must survive a boot, because executables may keep addresses on disk; for example
    /// `/var/lib/coracle/cni`.
    pub root_dir: PathBuf,
    /// Name of the default network's bridge, for example `coracle0`.
    pub bridge: String,
    /// Name of the nftables table, for example `coracle`. No other program may use this table.
    pub table: String,
    /// MTU of the default network's bridge and pods. `None` means the kernel's default.
    pub mtu: Option<u32>,
    /// Addresses that the node serves itself, such as cluster DNS. Host ports do not apply to them.
    pub served: Vec<IpAddr>,
    /// Whether pods of the default network may send from their own addresses only.
    pub check_sources: bool,
}

// === impl NetworkConfig ===

impl NetworkConfig {
    /// The configuration of the default network alone: no configuration lists, only our own plugins, the kernel's MTU.
    /// Pods may send from their own addresses only.
    #[must_use]
    pub fn of_default_network(state_dir: PathBuf, root_dir: PathBuf, bridge: &str, table: &str) -> Self {
        Self {
            conf_dir: None,
            bin_dirs: Vec::new(),
            state_dir,
            root_dir,
            bridge: bridge.to_owned(),
            table: table.to_owned(),
            mtu: None,
            served: Vec::new(),
            check_sources: true,
        }
    }
}

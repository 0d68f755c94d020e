//! Directories of network configurations and plugins (CNI), as settings.

use std::path::PathBuf;

use super::value::PathOrOff;

/// Directories of CNI.
#[derive(Clone, Debug)]
pub(crate) struct Cni {
    /// Directory of network configurations. `None`: only the built-in network.
    pub(crate) conf_dir: Option<PathBuf>,
    pub(crate) bin_dirs: Vec<PathBuf>,
    /// Whether pods of the built-in network may send from their own addresses only.
    pub(crate) check_sources: bool,
    /// Maximum connections of a pod of the built-in network; 0: no limit. `None`: a quarter of the connections that the
    /// kernel can track.
    pub(crate) max_connections: Option<u32>,
}

pub(super) fn decide(
    conf_dir: PathOrOff,
    bin_dirs: Vec<PathBuf>,
    check_sources: bool,
    max_connections: Option<u32>,
) -> Cni {
    Cni { conf_dir: conf_dir.0, bin_dirs, check_sources, max_connections }
}

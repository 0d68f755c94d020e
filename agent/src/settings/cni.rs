//! Directories of network configurations and plugins (CNI), as settings.

use std::path::PathBuf;

use super::value::PathOrOff;

/// Directories of CNI.
#[derive(Clone, Debug)]
pub(crate) struct Cni {
    /// Directory of network configurations. `None`: only the built-in network.
    pub(crate) conf_dir: Option<PathBuf>,
    pub(crate) bin_dirs: Vec<PathBuf>,
}

pub(super) fn decide(conf_dir: PathOrOff, bin_dirs: Vec<PathBuf>) -> Cni {
    Cni { conf_dir: conf_dir.0, bin_dirs }
}

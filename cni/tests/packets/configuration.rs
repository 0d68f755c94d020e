//! The configuration of a network in tests.

use std::path::Path;

use coracle_cni::NetworkConfig;

/// The configuration of a network without lists and plugins of others, with its directories below `dir`.
pub(crate) fn network_config(dir: &Path, bridge: &str) -> NetworkConfig {
    NetworkConfig {
        conf_dir: None,
        bin_dirs: Vec::new(),
        state_dir: dir.to_owned(),
        root_dir: dir.join("root"),
        bridge: bridge.to_owned(),
        table: "coracle".to_owned(),
        mtu: None,
        served: Vec::new(),
        check_sources: true,
    }
}

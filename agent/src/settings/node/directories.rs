//! The directories of a node.

use std::path::{Path, PathBuf};

use super::super::sources::Sources;
use super::super::{DEFAULT_STATE_DIR, absolute};
use super::NodeSettings;

/// Checked directories of a node.
pub(super) struct Directories {
    /// Directory of the container logs.
    pub(super) pod_logs: PathBuf,
    pub(super) local_volumes: PathBuf,
    /// Directory of the registrations of drivers.
    pub(super) plugin_registry: PathBuf,
}

// === impl NodeSettings ===

impl NodeSettings {
    /// Checks the directories. All errors are collected in `sources`. `None` after an error.
    pub(super) fn directories(&self, state: &Path, sources: &mut Sources) -> Option<Directories> {
        let pod_logs = sources.take(absolute(&self.pod_log_dir));
        let local_volumes = sources.take(local_volumes(self, state));
        let plugin_registry = sources.take(plugin_registry(self, state));
        Some(Directories {
            pod_logs: pod_logs?,
            local_volumes: local_volumes?,
            plugin_registry: plugin_registry?,
        })
    }
}

/// The directory in which drivers register. A node with the default state directory uses the kubelet's directory,
/// because the Helm charts of drivers mount it. A node with another state directory has its own directory.
fn plugin_registry(settings: &NodeSettings, state: &Path) -> anyhow::Result<PathBuf> {
    let is_default = state == Path::new(DEFAULT_STATE_DIR);
    let root = if is_default { Path::new("/var/lib/kubelet") } else { state };
    let set = settings.plugin_registry_dir.as_deref();
    set.map_or_else(|| Ok(root.join("plugins_registry")), absolute)
}

fn local_volumes(settings: &NodeSettings, state: &Path) -> anyhow::Result<PathBuf> {
    let set = settings.local_volume_dir.as_deref();
    set.map_or_else(|| absolute(&state.join("local-volumes")), absolute)
}

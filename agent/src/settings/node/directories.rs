//! The directories of a node.

use std::path::{Path, PathBuf};

use super::super::sources::Sources;
use super::super::{DEFAULT_STATE_DIR, absolute};
use super::NodeSettings;

impl NodeSettings {
    /// The directories of logs, of local volumes, and of the registrations of drivers.
    pub(super) fn directories(&self, state: &Path, sources: &mut Sources) -> [Option<PathBuf>; 3] {
        let all = [absolute(&self.pod_log_dir), local_volumes(self, state), plugin_registry(self, state)];
        all.map(|directory| sources.take(directory))
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

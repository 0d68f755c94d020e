//! Settings of the image store, which a node and a runtime alone have.

use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::time::Duration;

use coracle_images::{ImagesConfig, PinPattern};

/// Minimum of `image-pull-progress-timeout`.
const PROGRESS_TIMEOUT_MIN: Duration = Duration::from_secs(1);

/// Settings of the image store.
#[derive(Clone, Debug)]
pub(crate) struct ImageStore {
    pub(crate) registry_config_dir: Option<PathBuf>,
    pub(crate) pinned: Vec<PinPattern>,
    /// Time without progress after which a pull fails.
    pub(crate) progress_timeout: Duration,
    /// Maximum number of layers that one pull fetches at the same time.
    pub(crate) max_concurrent_downloads: NonZero<u16>,
    /// Maximum bytes of one unpacked layer.
    pub(crate) max_layer_bytes: u64,
    /// Maximum number of entries of one layer.
    pub(crate) max_layer_entries: NonZero<u32>,
}

// === impl ImageStore ===

impl ImageStore {
    /// Refuses values with which no image can be pulled.
    pub(super) fn checked(self) -> anyhow::Result<Self> {
        anyhow::ensure!(
            self.progress_timeout >= PROGRESS_TIMEOUT_MIN,
            "image-pull-progress-timeout must be at least 1s"
        );
        anyhow::ensure!(self.max_layer_bytes > 0, "max-layer-size must be more than 0");
        Ok(self)
    }

    /// The configuration of the store in a state directory.
    pub(crate) fn config(&self, state_dir: &Path) -> ImagesConfig {
        let mut config = ImagesConfig::new(state_dir);
        config.registry_config_dir.clone_from(&self.registry_config_dir);
        config.pinned.clone_from(&self.pinned);
        config.progress_timeout = self.progress_timeout;
        config.parallel_layers = self.max_concurrent_downloads.get().into();
        config.limits.layer_bytes = self.max_layer_bytes;
        config.limits.layer_entries = self.max_layer_entries.get().into();
        config
    }
}

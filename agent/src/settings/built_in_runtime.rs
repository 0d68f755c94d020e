//! Settings of the built-in runtime that the tables of a node and of `coracle runtime` have in common.

/// Gives a table of settings the methods `image_store` and `nri`. The table must have the settings of both.
macro_rules! built_in_runtime {
    ($table:ty) => {
        impl $table {
            /// The settings of the image store, unchecked.
            fn image_store(&self) -> $crate::settings::image_store::ImageStore {
                $crate::settings::image_store::ImageStore {
                    registry_config_dir: self.registry_config_dir.clone(),
                    pinned: self.pinned_image.clone(),
                    progress_timeout: self.image_pull_progress_timeout.0,
                    max_concurrent_downloads: self.max_concurrent_downloads,
                    max_layer_bytes: self.max_layer_size.0,
                    max_layer_entries: self.max_layer_entries,
                }
            }

            /// The checked settings of NRI for a runtime with this run directory.
            fn nri(&self, run_dir: &std::path::Path) -> anyhow::Result<coracle_cri::NriSettings> {
                let plugins = $crate::settings::nri::Plugins {
                    socket: self.nri_socket.clone(),
                    dir: self.nri_plugin_dir.clone(),
                    config_dir: self.nri_plugin_config_dir.clone(),
                    registration_timeout: self.nri_plugin_registration_timeout.0,
                    request_timeout: self.nri_plugin_request_timeout.0,
                };
                plugins.decide(run_dir)
            }
        }
    };
}
pub(crate) use built_in_runtime;

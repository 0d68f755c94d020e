//! Settings of the images of a node.

use coracle_agent::{CredentialProviderPaths, ImageGcPolicy, ImageVerification};

use super::super::image_store::ImageStore;
use super::super::sources::Sources;
use super::super::{image_gc, image_pull};
use super::NodeSettings;

/// Checked settings of the images of a node: their store, their removal, and the access to them.
#[derive(Clone, Debug)]
pub(crate) struct NodeImages {
    pub(crate) gc: ImageGcPolicy,
    pub(crate) verification: ImageVerification,
    pub(crate) store: ImageStore,
    pub(crate) credential_providers: Option<CredentialProviderPaths>,
}

impl NodeSettings {
    /// Checks the settings of images. All errors are collected in `sources`. `None` after an error.
    pub(super) fn images(&self, sources: &mut Sources) -> Option<NodeImages> {
        let gc = sources.take(image_gc::decide(self));
        let verification = sources.take(image_pull::decide(self));
        let store = sources.take(self.image_store().checked());
        let credential_providers = sources.take(image_pull::credential_providers(self));
        Some(NodeImages {
            gc: gc?,
            verification: verification?,
            store: store?,
            credential_providers: credential_providers?,
        })
    }

    fn image_store(&self) -> ImageStore {
        ImageStore {
            registry_config_dir: self.registry_config_dir.clone(),
            pinned: self.pinned_image.clone(),
            progress_timeout: self.image_pull_progress_timeout.0,
            max_concurrent_downloads: self.max_concurrent_downloads,
            max_layer_bytes: self.max_layer_size.0,
            max_layer_entries: self.max_layer_entries,
        }
    }
}

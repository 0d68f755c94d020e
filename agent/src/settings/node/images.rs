//! Settings of the images of a node.

use std::path::PathBuf;

use coracle_agent::{CredentialProviderPaths, ImageGcPolicy, ImageVerification};
use coracle_images::PinPattern;

use super::super::sources::Sources;
use super::super::{image_gc, image_pull};
use super::NodeSettings;

/// Checked settings of the images of a node: their store, their removal, and the access to them.
#[derive(Clone, Debug)]
pub(crate) struct NodeImages {
    pub(crate) gc: ImageGcPolicy,
    pub(crate) verification: ImageVerification,
    pub(crate) pinned: Vec<PinPattern>,
    pub(crate) registry_config_dir: Option<PathBuf>,
    pub(crate) credential_providers: Option<CredentialProviderPaths>,
}

impl NodeSettings {
    /// Checks the settings of images. All errors are collected in `sources`. `None` after an error.
    pub(super) fn images(&self, sources: &mut Sources) -> Option<NodeImages> {
        let gc = sources.take(image_gc::decide(self));
        let verification = sources.take(image_pull::decide(self));
        let credential_providers = sources.take(image_pull::credential_providers(self));
        Some(NodeImages {
            gc: gc?,
            verification: verification?,
            pinned: self.pinned_image.clone(),
            registry_config_dir: self.registry_config_dir.clone(),
            credential_providers: credential_providers?,
        })
    }
}

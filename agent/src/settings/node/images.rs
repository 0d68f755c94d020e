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
}

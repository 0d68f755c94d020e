//! Announcements to NRI plugins of an object that is being created. They are revoked if the creation fails.

use coracle_nri::{Nri, PodAndContainer};
use coracle_proto::nri::PodSandbox;

/// An object that was announced to plugins.
pub(crate) enum Announcement {
    /// A pod.
    Pod(Box<PodSandbox>),
    /// A container.
    Container(Box<PodAndContainer>),
}

impl std::fmt::Debug for Announcement {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Pod(pod) => write!(f, "pod {}", pod.id),
            Self::Container(about) => write!(f, "container {}", about.1.id),
        }
    }
}

// === impl Announcement ===

impl Announcement {
    /// Notifies plugins that the object is removed.
    pub(crate) async fn revoke(&self, nri: &Nri) {
        match self {
            Self::Pod(pod) => nri.remove_pod(&pod.id, || pod.as_ref().clone()).await,
            Self::Container(about) => nri.undo_create(&about.1.id, || about.as_ref().clone()).await,
        }
    }
}

//! What is wanted on this node: the API server's pods with `spec.nodeName` of this node, or, while there is
//! no API server, the stored ones. Merged into one closed [`PodChange`].

pub(crate) mod apiserver;
pub(crate) mod checkpoint;
pub(crate) mod record;

use std::collections::HashSet;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;

/// One change of what is wanted.
#[derive(Clone, Debug)]
pub(crate) enum PodChange {
    /// Stored by an earlier life of the agent; the API server has not answered yet.
    Stored(Arc<Pod>),
    /// New or changed in the API.
    Applied(Arc<Pod>),
    /// Gone from the API.
    Deleted(Arc<Pod>),
    /// The API server has told everything once (again): whatever has none of these uids is not wanted.
    Complete(HashSet<String>),
}

//! Sources of desired pods: the API server's pods with this `spec.nodeName`, and the checkpoint while the API server
//! does not answer. Both become [`PodChange`].

pub(crate) mod apiserver;
pub(crate) mod checkpoint;

use std::collections::HashSet;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;

/// A change of the desired pods.
#[derive(Clone, Debug)]
pub(crate) enum PodChange {
    /// Stored by an earlier agent. The API server has not answered yet.
    Stored(Arc<Pod>),
    /// Created or changed in the API.
    Applied(Arc<Pod>),
    /// Deleted from the API.
    Deleted(Arc<Pod>),
    /// The API server has listed all pods. A pod whose uid is not among these does not exist.
    Complete(HashSet<String>),
}

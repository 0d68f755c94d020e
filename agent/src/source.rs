//! Sources of desired pods: the API server's pods with this `spec.nodeName`, the manifests of static pods, and the
//! checkpoint while the API server does not answer. All become [`PodChange`].

pub(crate) mod apiserver;
pub(crate) mod checkpoint;
mod files;
mod manifest;
pub(crate) mod mirror;

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Node, Pod};
use kube::Client;
use tokio::sync::{mpsc, watch};

use crate::api_health::ApiHealth;
use files::StaticPods;
use mirror::MirrorPods;

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
    /// The uids of all static pods at the start, before the pods themselves and before all other changes. A static pod
    /// of an earlier agent whose uid is not among these must end.
    StaticComplete(HashSet<String>),
    /// All static pods at the start were sent.
    StaticSent,
    /// The manifest of a static pod was found.
    Static(Arc<Pod>),
    /// The manifest of the static pod with this uid was removed or changed.
    StaticRemoved(String),
}

/// Inputs of [`run`].
pub(crate) struct Sources {
    pub(crate) client: Client,
    pub(crate) health: ApiHealth,
    pub(crate) node_name: String,
    /// The Node object.
    pub(crate) node: watch::Receiver<Option<Arc<Node>>>,
    /// Directory or file with the manifests of static pods. None if the node has no static pods.
    pub(crate) manifests: Option<PathBuf>,
    pub(crate) mirrors: MirrorPods,
}

/// Sends the changes of all sources and maintains the mirror pods, until the receiver is dropped.
pub(crate) async fn run(sources: Sources, changes: mpsc::Sender<PodChange>) {
    let Sources { client, health, node_name, node, manifests, mirrors } = sources;
    let mut files = StaticPods::new(manifests, &node_name);
    // The static pods come first. Otherwise the list of the API server's pods would end those of an earlier agent.
    if !files.update(&changes).await {
        return;
    }
    tokio::join!(
        files.follow(changes.clone()),
        mirrors.run(&client, &health, node),
        apiserver::watch(client.clone(), health.clone(), &node_name, &mirrors, changes),
    );
}

/// Whether a pod with this uid is a static pod. The uid of a static pod is a hash of 32 hexadecimal digits. An API
/// server sets the uid of every pod itself, and its UUIDs have hyphens. So no user of the API can create such a pod, in
/// contrast to the annotations of static pods.
pub(crate) fn is_static(uid: &str) -> bool {
    uid.len() == 32 && uid.bytes().all(|byte| byte.is_ascii_hexdigit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_uid_of_a_pod_in_the_api_is_not_that_of_a_static_pod() {
        assert!(is_static("0123456789abcdef0123456789abcdef"));
        for uid in ["", "u", "01234567-89ab-cdef-0123-456789abcdef", "0123456789abcdef0123456789abcdeg"] {
            assert!(!is_static(uid), "{uid}");
        }
    }
}

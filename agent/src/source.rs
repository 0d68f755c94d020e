//! Sources of desired pods: the API server's pods with the node's name in `spec.nodeName`, the manifests of static pods
//! in files and at a URL, and the checkpoint while the API server does not answer. All sources send [`PodChange`]s.

pub(crate) mod apiserver;
pub(crate) mod checkpoint;
mod files;
mod manifest;
mod manifest_url;
pub(crate) mod mirror;

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Node, Pod};
use kube::Client;
use tokio::sync::{Notify, mpsc, watch};

use crate::api_health::ApiHealth;
use files::StaticPods;
use mirror::MirrorPods;

pub use manifest_url::{ManifestUrl, ManifestUrlError};

/// A change of the desired pods.
#[derive(Clone, Debug)]
pub(crate) enum PodChange {
    /// The pod was stored by an earlier agent. The API server has not answered yet.
    Stored(Arc<Pod>),
    /// The pod was created or changed in the API.
    Applied(Arc<Pod>),
    /// The pod was deleted from the API.
    Deleted(Arc<Pod>),
    /// The API server has listed all pods. A pod whose uid is not among these does not exist.
    Complete(HashSet<String>),
    /// The uids of all static pods at the start, before the pods themselves. A static pod of an earlier agent whose uid
    /// is not among these must end.
    StaticComplete(HashSet<String>),
    /// All static pods at the start were sent.
    StaticSent,
    /// The manifest of a static pod was found.
    Static(Arc<Pod>),
    /// The manifest of the static pod with this uid was removed or changed.
    StaticRemoved(String),
}

/// The manifests of static pods. Without a path and a URL the node has no static pods.
#[derive(Clone, Debug, Default)]
pub struct StaticPodSources {
    /// Directory or file of manifests.
    pub path: Option<PathBuf>,
    /// URL of further manifests.
    pub url: Option<ManifestUrl>,
}

/// Maximum time for which the pods of the API server wait for the first read of the manifests.
const FIRST_READ: Duration = Duration::from_secs(5);

/// Inputs of [`run`].
pub(crate) struct Sources {
    pub(crate) client: Client,
    pub(crate) health: ApiHealth,
    pub(crate) node_name: String,
    /// The Node object.
    pub(crate) node: watch::Receiver<Option<Arc<Node>>>,
    pub(crate) manifests: StaticPodSources,
    pub(crate) mirrors: MirrorPods,
}

/// Sends the changes of all sources and maintains the mirror pods, until the receiver is dropped.
pub(crate) async fn run(sources: Sources, changes: mpsc::Sender<PodChange>) {
    let Sources { client, health, node_name, node, manifests, mirrors } = sources;
    let StaticPodSources { path, url } = manifests;
    let (sender, fetched) = watch::channel(None);
    let fetched = url.is_some().then_some(fetched);
    let mut files = StaticPods::new(path, fetched, &node_name);
    let is_read = Notify::new();
    let url_pods = async {
        if let Some(url) = url {
            url.follow(&node_name, sender).await;
        }
    };
    let static_pods = async {
        if files.update(&changes).await {
            is_read.notify_one();
            files.follow(changes.clone()).await;
        }
    };
    let api_pods = async {
        // The static pods come first, so that they are admitted before pods of the API server.
        if !first_read(&is_read).await {
            tracing::warn!("the manifests of static pods cannot be read; other pods start without them");
        }
        apiserver::watch(client.clone(), health.clone(), &node_name, &mirrors, changes.clone()).await;
    };
    tokio::join!(static_pods, url_pods, mirrors.run(&client, &health, node), api_pods);
}

/// Waits for the first read of the manifests. Returns false after [`FIRST_READ`]: a network file system may not
/// respond.
async fn first_read(is_read: &Notify) -> bool {
    tokio::time::timeout(FIRST_READ, is_read.notified()).await.is_ok()
}

/// Whether a pod with this uid is a static pod. The uid of a static pod is a hash of 32 hexadecimal digits. An API
/// server sets the uid of every pod itself, and its UUIDs have hyphens. So no user of the API can create such a pod, in
/// contrast to the annotations of static pods.
pub(crate) fn is_static(uid: &str) -> bool {
    uid.len() == 32 && uid.bytes().all(|byte| byte.is_ascii_hexdigit())
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn manifests_that_cannot_be_read_delay_other_pods_for_a_limited_time() {
        let (begin, is_read) = (Instant::now(), Notify::new());
        assert!(!first_read(&is_read).await);
        assert!(begin.elapsed() >= FIRST_READ);
        is_read.notify_one();
        assert!(first_read(&is_read).await);
    }

    #[test]
    fn the_uid_of_a_pod_in_the_api_is_not_that_of_a_static_pod() {
        assert!(is_static("0123456789abcdef0123456789abcdef"));
        for uid in ["", "u", "01234567-89ab-cdef-0123-456789abcdef", "0123456789abcdef0123456789abcdeg"] {
            assert!(!is_static(uid), "{uid}");
        }
    }
}

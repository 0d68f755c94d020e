//! Status writes. The newest status of each pod is sent as a patch against the last acknowledged status. At most
//! [`MAX_WRITES`] writes run at the same time. If the pod has been removed from the node, the last write deletes its
//! object.
//!
//! A starting pod has three statuses before it runs: accepted, with a sandbox, and with created containers. Each write
//! costs a commit and an event in every watch of pods. So these statuses wait for two seconds, and most of them are
//! replaced by the status of the running pod.

mod retries;
mod waiting;

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use coracle_values::merge_patch;
use futures::FutureExt as _;
use k8s_openapi::api::core::v1::{Pod, PodStatus};
use kube::api::{DeleteParams, Patch, PatchParams, Preconditions, Request};
use kube::{Client, Resource as _};
use serde_json::{Value, json};
use tokio::sync::{Notify, Semaphore};
use tokio::time::Instant;

use crate::deadline::until;
use crate::kubelet_metrics::KubeletMetrics;
use crate::source::is_static;
use crate::source::mirror::MirrorPods;
use retries::{Failure, Retries};
use waiting::Waiting;

/// Maximum concurrent requests.
const MAX_WRITES: usize = 8;

/// A queue with one entry per pod.
#[derive(Clone)]
pub(crate) struct StatusWriter {
    shared: Arc<Shared>,
}

struct Shared {
    client: Client,
    pending: Mutex<Waiting>,
    wake: Notify,
    permits: Semaphore,
    /// Writes the statuses of static pods.
    mirrors: MirrorPods,
    metrics: Arc<KubeletMetrics>,
}

/// A status to write.
#[derive(Clone, Debug)]
pub(crate) struct Update {
    pub(crate) uid: String,
    pub(crate) namespace: String,
    pub(crate) name: String,
    /// The status that the API is known to have.
    pub(crate) known: PodStatus,
    pub(crate) status: PodStatus,
    /// Whether to delete the object, because the pod has been removed from the node.
    pub(crate) delete: bool,
    /// Time at which the status first differed from the status in the API.
    pub(crate) since: Instant,
}

impl StatusWriter {
    pub(crate) fn new(client: Client, metrics: Arc<KubeletMetrics>) -> Self {
        let shared = Shared {
            client,
            pending: Mutex::default(),
            wake: Notify::new(),
            permits: Semaphore::new(MAX_WRITES),
            mirrors: MirrorPods::default(),
            metrics,
        };
        Self { shared: Arc::new(shared) }
    }

    /// The mirror pods, which have the statuses of static pods.
    pub(crate) fn mirrors(&self) -> &MirrorPods {
        &self.shared.mirrors
    }

    /// Queues a status, in place of the pod's waiting status.
    pub(crate) fn send(&self, update: Update) {
        if is_static(&update.uid) {
            return self.shared.mirrors.report(&update.uid, update.status);
        }
        self.shared.pending().put(update, Instant::now());
        self.shared.wake.notify_one();
    }

    /// Sends the queued statuses until dropped.
    pub(crate) async fn run(&self) {
        let mut busy = tokio::task::JoinSet::new();
        let mut in_flight: HashSet<String> = HashSet::new();
        loop {
            let (updates, due) = {
                let mut pending = self.shared.pending();
                (pending.take_due(&in_flight, Instant::now()), pending.next_due())
            };
            for update in updates {
                in_flight.insert(update.uid.clone());
                let shared = Arc::clone(&self.shared);
                busy.spawn(async move { deliver(&shared, update).await }.boxed());
            }
            // All arms are cancel-safe: a notification is kept, and a finished task is joined later.
            tokio::select! {
                () = self.shared.wake.notified() => {}
                () = until(due) => {}
                Some(done) = busy.join_next() => match done {
                    Ok(uid) => {
                        in_flight.remove(&uid);
                        self.shared.pending().write_ended(&uid);
                    }
                    Err(error) => tracing::error!(%error, "a status writer panicked"),
                },
            }
        }
    }
}

impl Shared {
    fn pending(&self) -> MutexGuard<'_, Waiting> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Sends one status until it is accepted, rejected for good, or replaced by a newer status.
async fn deliver(shared: &Shared, mut update: Update) -> String {
    let mut retries = Retries::default();
    loop {
        let tried = {
            let Ok(_permit) = shared.permits.acquire().await else { break };
            update = newest(shared, update);
            attempt(&shared.client, &update).await
        };
        let Err(error) = tried else {
            shared.metrics.pods.status_written(update.since.elapsed());
            break;
        };
        let failure = failure(&error);
        let Some(delay) = retries.after(failure) else {
            if failure != Failure::Gone {
                tracing::warn!(%error, "the API server rejected a pod status");
            }
            break;
        };
        tracing::debug!(error = &error as &dyn std::error::Error, "cannot write a pod status, retrying");
        tokio::time::sleep(delay).await;
    }
    update.uid
}

/// The newest pending status of the pod, or the given status, which was not sent. The result has `known` and `since` of
/// the given update, because the API still has the former status.
fn newest(shared: &Shared, update: Update) -> Update {
    match shared.pending().remove(&update.uid) {
        Some(newer) => Update { known: update.known, since: update.since, ..newer },
        None => update,
    }
}

async fn attempt(client: &Client, update: &Update) -> Result<(), kube::Error> {
    let pods = Request::new(Pod::url_path(&(), Some(&update.namespace)));
    // Responses are not decoded. Each contains the whole pod, which the watch delivers too.
    if let Some(status) = difference(&update.known, &update.status) {
        let patch = Patch::Merge(json!({"metadata": {"uid": update.uid}, "status": status}));
        let request = pods.patch_subresource("status", &update.name, &PatchParams::default(), &patch);
        client.request_text(request.map_err(kube::Error::BuildRequest)?).await?;
    }
    if update.delete {
        let preconditions = Preconditions { uid: Some(update.uid.clone()), resource_version: None };
        let params = DeleteParams {
            grace_period_seconds: Some(0),
            preconditions: Some(preconditions),
            ..DeleteParams::default()
        };
        let request = pods.delete(&update.name, &params).map_err(kube::Error::BuildRequest)?;
        client.request_text(request).await?;
    }
    Ok(())
}

fn failure(error: &kube::Error) -> Failure {
    match error {
        kube::Error::Api(status) => Failure::of_code(status.code),
        _ => Failure::Temporary,
    }
}

/// The merge patch between two statuses. None if they are equal.
pub(crate) fn difference(from: &PodStatus, to: &PodStatus) -> Option<Value> {
    let from = serde_json::to_value(from).unwrap_or_default();
    let to = serde_json::to_value(to).unwrap_or_default();
    merge_patch::difference(&from, &to)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_statuses_need_no_request() {
        let status = PodStatus { phase: Some("Running".into()), ..PodStatus::default() };
        assert_eq!(difference(&status, &status.clone()), None);
    }

    /// The responses of this API server cannot be decoded as pods.
    #[tokio::test]
    async fn responses_to_writes_are_not_decoded() {
        let (sender, mut requests) = tokio::sync::mpsc::unbounded_channel();
        let service = tower::service_fn(move |request: http::Request<kube::client::Body>| {
            sender.send(format!("{} {}", request.method(), request.uri().path())).unwrap();
            async {
                let body = kube::client::Body::from(b"{\"spec\": {\"containers\": 0}}".to_vec());
                Ok::<_, std::convert::Infallible>(http::Response::new(body))
            }
        });
        let update = Update {
            uid: "u".to_owned(),
            namespace: "n".to_owned(),
            name: "p".to_owned(),
            known: PodStatus::default(),
            status: PodStatus { phase: Some("Failed".to_owned()), ..PodStatus::default() },
            delete: true,
            since: Instant::now(),
        };
        attempt(&Client::new(service, "default"), &update).await.unwrap();
        let path = "/api/v1/namespaces/n/pods/p";
        let sent = [requests.recv().await.unwrap(), requests.recv().await.unwrap()];
        assert_eq!(sent, [format!("PATCH {path}/status"), format!("DELETE {path}")]);
    }
}

//! Mirror pods: they show the static pods of the node in the API. The agent creates a mirror pod for each admitted
//! static pod, writes its status, and deletes all other mirror pods of the node. Source:
//! `pkg/kubelet/pod/mirror_client.go`.
//!
//! A mirror pod never becomes a desired pod. Every user who may create pods can set the annotation of mirror pods. Such
//! a pod is not run: it is deleted unless it equals the expected mirror pod in hash, name and owner.

mod plan;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use coracle_backoff::Backoff;
use k8s_openapi::api::core::v1::{Node, Pod, PodStatus};
use kube::api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions, Request};
use kube::{Api, Client, Resource as _};
use serde_json::json;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use crate::api_health::ApiHealth;
use crate::deadline::until;
use plan::{Action, Mirror, Owner, State};

/// Annotation of mirror pods: the hash of the static pod.
pub(crate) const MIRROR: &str = "kubernetes.io/config.mirror";
/// First back-off of a request that has failed, and of a mirror pod that is created again and again. It doubles up to
/// [`MAX_BACKOFF`].
const FIRST_BACKOFF: Duration = Duration::from_secs(1);
const MAX_BACKOFF: Duration = Duration::from_secs(60);
/// Maximum deletions before the other requests are planned again.
const DELETIONS_MAX: usize = 16;

/// The static pods that run, and the mirror pods in the API. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub(crate) struct MirrorPods {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Notify,
}

/// Back-offs of actions, by the keys of the actions.
#[derive(Debug, Default)]
struct ActionBackoffs(HashMap<String, ActionBackoff>);

#[derive(Debug)]
struct ActionBackoff {
    delay_end: Instant,
    backoff: Backoff,
}

/// Whether the pod is a mirror pod.
pub(super) fn is_mirror(pod: &Pod) -> bool {
    pod.metadata.annotations.as_ref().is_some_and(|annotations| annotations.contains_key(MIRROR))
}

// === impl MirrorPods ===

impl MirrorPods {
    /// Adds a static pod. Its mirror pod is created after [`admit`](Self::admit).
    pub(crate) fn add_static_pod(&self, pod: &Arc<Pod>) {
        self.change(|state| state.add_static_pod(pod));
    }

    /// Called when the node has admitted a static pod. As upstream, a rejected static pod has no mirror pod, unless an
    /// earlier agent has created it.
    pub(crate) fn admit(&self, uid: &str) {
        self.change(|state| state.admit(uid));
    }

    /// Removes a static pod that has ended.
    pub(crate) fn remove_static_pod(&self, uid: &str) {
        self.change(|state| state.remove_static_pod(uid));
    }

    /// Sets the status of a static pod.
    pub(crate) fn report(&self, uid: &str, status: PodStatus) {
        self.change(|state| state.report(uid, status));
    }

    /// Whether the API has the final status of a static pod, or will have no mirror pod for it.
    pub(crate) fn is_end_reported(&self, uid: &str) -> bool {
        self.lock().is_end_reported(uid)
    }

    /// Called when all static pods and all mirror pods are known. Before this call nothing is written.
    pub(crate) fn complete(&self) {
        self.change(|state| state.is_complete = true);
    }

    /// Replaces all mirror pods.
    pub(super) fn replace(&self, pods: &[Pod]) {
        self.change(|state| state.replace(pods.iter().filter_map(Mirror::of)));
    }

    /// Adds or replaces a mirror pod.
    pub(super) fn observe(&self, pod: &Pod) {
        if let Some(mirror) = Mirror::of(pod) {
            self.change(|state| state.observe(mirror));
        }
    }

    /// Removes a mirror pod.
    pub(super) fn remove(&self, uid: &str) {
        self.change(|state| state.remove(uid));
    }

    /// Writes the planned changes until `node` is closed. `node` receives the Node object, which owns the mirror pods.
    pub(super) async fn run(
        &self,
        client: &Client,
        health: &ApiHealth,
        mut node: watch::Receiver<Option<Arc<Node>>>,
    ) {
        let mut backoffs = ActionBackoffs::default();
        loop {
            let owner = node.borrow_and_update().as_deref().and_then(Owner::of);
            let actions = owner.map_or_else(Vec::new, |owner| self.lock().plan(&owner));
            backoffs.forget_old(Instant::now());
            let (mut due, mut deletions): (Option<Instant>, usize) = (None, 0);
            for action in actions {
                if let Some(end) = backoffs.delay_end(&action.key(), Instant::now()) {
                    due = Some(due.map_or(end, |due| due.min(end)));
                    continue;
                }
                if matches!(action, Action::Delete { .. }) {
                    if deletions == DELETIONS_MAX {
                        due = Some(Instant::now());
                        break;
                    }
                    deletions += 1;
                }
                match self.apply(client, health, &action).await {
                    Ok(()) => backoffs.succeeded(&action, Instant::now()),
                    Err(error) => {
                        let (pod, error) = (action.name(), &error as &dyn std::error::Error);
                        tracing::warn!(pod, error, "cannot write a mirror pod");
                        let end = backoffs.delay(action.key(), Instant::now());
                        due = Some(due.map_or(end, |due| due.min(end)));
                    }
                }
            }
            // All arms are cancel-safe: a notification is kept, and the receiver keeps the newest value.
            tokio::select! {
                () = self.shared.changed.notified() => {}
                changed = node.changed() => if changed.is_err() { return },
                () = until(due) => {}
            }
        }
    }

    async fn apply(&self, client: &Client, health: &ApiHealth, action: &Action) -> Result<(), kube::Error> {
        match action {
            Action::Create { pod, .. } => {
                let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
                let api: Api<Pod> = Api::namespaced(client.clone(), namespace);
                let created = health.request(false, api.create(&PostParams::default(), pod)).await?;
                self.observe(&created);
            }
            Action::Delete { uid, key } => {
                let params = DeleteParams {
                    grace_period_seconds: Some(0),
                    preconditions: Some(Preconditions { uid: Some(uid.clone()), resource_version: None }),
                    ..DeleteParams::default()
                };
                let pods = Request::new(Pod::url_path(&(), Some(&key.namespace)));
                let request = pods.delete(&key.name, &params).map_err(kube::Error::BuildRequest)?;
                if_present(health.request(false, client.request_text(request)).await)?;
                self.remove(uid);
            }
            Action::Report { uid, mirror, key, status, patch } => {
                let patch = Patch::Merge(json!({"metadata": {"uid": mirror}, "status": patch}));
                let pods = Request::new(Pod::url_path(&(), Some(&key.namespace)));
                let request = pods.patch_subresource("status", &key.name, &PatchParams::default(), &patch);
                let request = request.map_err(kube::Error::BuildRequest)?;
                let written = health.request(false, client.request_text(request)).await;
                if matches!(&written, Err(kube::Error::Api(status)) if status.code == 404) {
                    // The mirror pod was deleted before the response to its creation was processed: the watch does not
                    // report the deletion again.
                    self.remove(mirror);
                    return written.map(drop);
                }
                if_present(written)?;
                // No notification is needed: the watch delivers the new status.
                self.lock().reported(uid, mirror, status);
            }
        }
        Ok(())
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.lock());
        self.shared.changed.notify_one();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Accepts a response that says that the mirror pod does not exist, or that its name belongs to another pod now.
fn if_present(response: Result<String, kube::Error>) -> Result<(), kube::Error> {
    match response {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(()),
        Err(error) => Err(error),
    }
}

// === impl ActionBackoffs ===

impl ActionBackoffs {
    /// The end of the action's delay. None if the delay is over.
    fn delay_end(&self, key: &str, now: Instant) -> Option<Instant> {
        self.0.get(key).map(|action| action.delay_end).filter(|end| *end > now)
    }

    /// Delays an action, twice as long as the last time. Returns the end of the delay.
    fn delay(&mut self, key: String, now: Instant) -> Instant {
        let backoff = Backoff::new(FIRST_BACKOFF, MAX_BACKOFF);
        let action = self.0.entry(key).or_insert(ActionBackoff { delay_end: now, backoff });
        action.delay_end = now + action.backoff.next_delay();
        action.delay_end
    }

    /// Forgets back-offs whose delay ended long ago, for example of pods that do not exist any more.
    fn forget_old(&mut self, now: Instant) {
        self.0.retain(|_, action| now < action.delay_end + MAX_BACKOFF);
    }

    /// Resets the back-off of an action that has succeeded. A creation has succeeded when the mirror pod has a status.
    /// Before that, for example if an admission webhook changes each mirror pod, the next creation waits.
    fn succeeded(&mut self, action: &Action, now: Instant) {
        match action {
            Action::Create { .. } => {
                self.delay(action.key(), now);
            }
            Action::Delete { .. } => drop(self.0.remove(&action.key())),
            Action::Report { uid, .. } => {
                self.0.remove(&action.key());
                self.0.remove(&Action::creation_key(uid));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    const UID: &str = "0123456789abcdef0123456789abcdef";

    fn pod(value: Value) -> Pod {
        serde_json::from_value(value).unwrap()
    }

    /// An API server that records the requests and returns created pods with the uids `m1`, `m2` and so on.
    fn server(requests: tokio::sync::mpsc::UnboundedSender<String>) -> Client {
        let mut number = 0;
        let service = tower::service_fn(move |request: http::Request<kube::client::Body>| {
            number += usize::from(request.method() == http::Method::POST);
            requests.send(format!("{} {}", request.method(), request.uri().path())).unwrap();
            async move {
                let created = json!({"metadata": {"namespace": "n", "name": "web-n1", "uid": format!("m{number}"),
                    "annotations": {MIRROR: UID}, "ownerReferences": [{"apiVersion": "v1", "kind": "Node",
                    "name": "n1", "uid": "node-uid", "controller": true}]}});
                let body = kube::client::Body::from(created.to_string().into_bytes());
                Ok::<_, std::convert::Infallible>(http::Response::new(body))
            }
        });
        Client::new(service, "default")
    }

    #[tokio::test(start_paused = true)]
    async fn a_mirror_pod_is_created_reported_and_deleted() {
        let (sender, mut requests) = tokio::sync::mpsc::unbounded_channel();
        let (client, health, mirrors) = (server(sender), ApiHealth::default(), MirrorPods::default());
        let node: Node =
            serde_json::from_value(json!({"metadata": {"name": "n1", "uid": "node-uid"}})).unwrap();
        let (_node, receiver) = watch::channel(Some(Arc::new(node)));
        let running = {
            let mirrors = mirrors.clone();
            tokio::spawn(async move { mirrors.run(&client, &health, receiver).await })
        };
        let static_pod = pod(json!({"metadata": {"namespace": "n", "name": "web-n1", "uid": UID}}));
        mirrors.add_static_pod(&Arc::new(static_pod));
        mirrors.admit(UID);
        mirrors.report(UID, PodStatus { phase: Some("Running".to_owned()), ..PodStatus::default() });
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert!(requests.try_recv().is_err(), "the mirror pods of the API are not known");
        mirrors.complete();
        let path = "/api/v1/namespaces/n/pods";
        assert_eq!(requests.recv().await.unwrap(), format!("POST {path}"));
        assert_eq!(requests.recv().await.unwrap(), format!("PATCH {path}/web-n1/status"));
        // A user deletes the mirror pod.
        mirrors.remove("m1");
        assert_eq!(requests.recv().await.unwrap(), format!("POST {path}"));
        assert_eq!(requests.recv().await.unwrap(), format!("PATCH {path}/web-n1/status"));
        mirrors.remove_static_pod(UID);
        assert_eq!(requests.recv().await.unwrap(), format!("DELETE {path}/web-n1"));
        tokio::time::sleep(Duration::from_secs(600)).await;
        assert!(requests.try_recv().is_err());
        running.abort();
    }

    #[test]
    fn repeated_creations_have_growing_delays_until_a_status_is_written() {
        let (mut backoffs, now) = (ActionBackoffs::default(), Instant::now());
        let create = Action::Create { uid: UID.to_owned(), pod: Box::default() };
        for seconds in [1, 2, 4, 8, 16, 32, 60, 60] {
            backoffs.succeeded(&create, now);
            assert_eq!(backoffs.delay_end(&create.key(), now), Some(now + Duration::from_secs(seconds)));
        }
        let key = coracle_values::object::Key::new("n", "web-n1");
        let (uid, mirror) = (UID.to_owned(), "m".to_owned());
        let report = Action::Report { uid, mirror, key, status: Box::default(), patch: json!({}) };
        backoffs.succeeded(&report, now);
        assert_eq!(backoffs.delay_end(&create.key(), now), None);
        let end = backoffs.delay(create.key(), now);
        backoffs.forget_old(end);
        assert_eq!(backoffs.0.len(), 1, "the next delay is longer");
        backoffs.forget_old(end + MAX_BACKOFF);
        assert!(backoffs.0.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn the_deletion_of_many_forged_mirror_pods_does_not_delay_statuses() {
        let (sender, mut requests) = tokio::sync::mpsc::unbounded_channel();
        let (mirrors, health) = (MirrorPods::default(), ApiHealth::default());
        let of_server = mirrors.clone();
        let service = tower::service_fn(move |request: http::Request<kube::client::Body>| {
            sender.send(request.method().to_string()).unwrap();
            // The static pod starts while forged pods are deleted.
            let running = PodStatus { phase: Some("Running".to_owned()), ..PodStatus::default() };
            of_server.report(UID, running);
            async {
                Ok::<_, std::convert::Infallible>(http::Response::new(kube::client::Body::from(
                    b"{}".to_vec(),
                )))
            }
        });
        let client = Client::new(service, "default");
        let own = json!([{"apiVersion": "v1", "kind": "Node", "name": "n1", "uid": "node-uid", "controller": true}]);
        let mirror = |name: &str, uid: &str| {
            pod(json!({"metadata": {"namespace": "n", "name": name, "uid": uid, "annotations": {MIRROR: UID},
                "ownerReferences": own}}))
        };
        mirrors.add_static_pod(&Arc::new(pod(
            json!({"metadata": {"namespace": "n", "name": "web-n1", "uid": UID}}),
        )));
        mirrors.admit(UID);
        mirrors.observe(&mirror("web-n1", "m"));
        (0..40)
            .for_each(|number| mirrors.observe(&mirror(&format!("forged-{number}"), &format!("f{number}"))));
        mirrors.complete();
        let node: Node =
            serde_json::from_value(json!({"metadata": {"name": "n1", "uid": "node-uid"}})).unwrap();
        let (_node, receiver) = watch::channel(Some(Arc::new(node)));
        let running = tokio::spawn(async move { mirrors.run(&client, &health, receiver).await });
        let mut sent = Vec::new();
        for _request in 0..41 {
            sent.push(requests.recv().await.unwrap());
        }
        running.abort();
        assert_eq!(sent.iter().position(|method| method == "PATCH"), Some(DELETIONS_MAX), "{sent:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_mirror_pod_that_does_not_exist_any_more_is_created_again() {
        let (sender, mut requests) = tokio::sync::mpsc::unbounded_channel();
        let service = tower::service_fn(move |request: http::Request<kube::client::Body>| {
            sender.send(request.method().to_string()).unwrap();
            async {
                let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 404,
                    "reason": "NotFound", "message": "not found", "metadata": {}});
                let body = kube::client::Body::from(status.to_string().into_bytes());
                let response = http::Response::builder().status(404).body(body).unwrap();
                Ok::<_, std::convert::Infallible>(response)
            }
        });
        let (client, health) = (Client::new(service, "default"), ApiHealth::default());
        let mirrors = MirrorPods::default();
        mirrors.add_static_pod(&Arc::new(pod(
            json!({"metadata": {"namespace": "n", "name": "web-n1", "uid": UID}}),
        )));
        mirrors.admit(UID);
        mirrors.report(UID, PodStatus { phase: Some("Running".to_owned()), ..PodStatus::default() });
        mirrors.observe(&pod(json!({"metadata": {"namespace": "n", "name": "web-n1", "uid": "m",
            "annotations": {MIRROR: UID}, "ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": "n1",
            "uid": "node-uid", "controller": true}]}})));
        mirrors.complete();
        let node: Node =
            serde_json::from_value(json!({"metadata": {"name": "n1", "uid": "node-uid"}})).unwrap();
        let (_node, receiver) = watch::channel(Some(Arc::new(node)));
        let running = tokio::spawn(async move { mirrors.run(&client, &health, receiver).await });
        assert_eq!([requests.recv().await.unwrap(), requests.recv().await.unwrap()], ["PATCH", "POST"]);
        running.abort();
    }
}

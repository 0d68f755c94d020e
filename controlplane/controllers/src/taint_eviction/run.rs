//! Evicts pods that do not, or no longer, tolerate a NoExecute taint of their node.

use std::sync::Arc;

use jiff::Timestamp;
use kube::Api;
use kube::api::{DeleteParams, Patch, PatchParams};
use serde_json::json;

use super::plan::{self, Due};
use crate::context::Context;
use crate::error::{Error, is_not_found};
use crate::object::{Key, Node, ObjectExt, Pod};
use crate::pod_control::disruption_target;
use crate::queue::{Next, Queue, until};
use coracle_events::Event;
use coracle_values::toleration::evicts;

const COMPONENT: &str = "taint-eviction-controller";

/// Queues nodes with changed NoExecute taints, and nodes with such taints when a pod on them is added or changed.
pub(crate) fn listen(context: &Context, queue: &Arc<Queue<Key>>) {
    let own = queue.clone();
    context.caches.nodes.on_change(move |change| {
        let Some(node) = change.new else { return };
        let taints = |node: &Arc<Node>| {
            node.taints().iter().filter(|taint| evicts(taint)).cloned().collect::<Vec<_>>()
        };
        if taints(node) != change.old.map(taints).unwrap_or_default() {
            own.add(node.key());
        }
    });
    let (own, nodes) = (queue.clone(), context.caches.nodes.clone());
    context.caches.pods.on_change(move |change| {
        let node = change.new.and_then(|pod| pod.spec.node_name.as_deref());
        let node = node.and_then(|node| nodes.get(&Key::new("", node)));
        if let Some(node) = node.filter(|node| node.taints().iter().any(evicts)) {
            own.add(node.key());
        }
    });
}

/// Evicts the pods of one node whose toleration has expired. Returns the time of the next expiry.
pub(crate) async fn reconcile(context: &Context, key: Key) -> Result<Next, Error> {
    let Some(node) = context.caches.nodes.get(&key) else { return Ok(Next::Wait) };
    if !node.taints().iter().any(evicts) {
        return Ok(Next::Wait);
    }
    let pods = context.caches.pods.all().into_iter();
    let pods =
        pods.filter(|pod| pod.spec.node_name.as_deref() == Some(node.name()) && !pod.is_being_deleted());
    let (mut next, mut failed) = (None, None);
    for pod in pods {
        let now = Timestamp::now();
        let Due::At(end) = plan::due(node.taints(), &pod.spec.tolerations, pod.bound_since(), now) else {
            continue;
        };
        match until(end, now) {
            Some(wait) => next = Some(next.map_or(wait, |next: std::time::Duration| next.min(wait))),
            // A failed eviction does not prevent the others.
            None => {
                let message = format!("Marking for deletion Pod {}", pod.key());
                let eviction = Eviction {
                    component: COMPONENT,
                    event: Event::normal("TaintManagerEviction", message),
                    reason: "DeletionByTaintManager",
                    message: "Taint manager: deleting due to NoExecute taint",
                };
                failed = evict(context, &pod, eviction).await.err().or(failed);
            }
        }
    }
    match failed {
        Some(error) => Err(error),
        None => Ok(next.map_or(Next::Wait, Next::After)),
    }
}

/// What an evicted pod is marked with.
pub(crate) struct Eviction {
    /// The component that records the event.
    pub(crate) component: &'static str,
    pub(crate) event: Event,
    /// Reason of the condition `DisruptionTarget`.
    pub(crate) reason: &'static str,
    /// Message of the condition.
    pub(crate) message: &'static str,
}

/// Deletes a pod, with an event and the condition `DisruptionTarget`.
pub(crate) async fn evict(context: &Context, pod: &Pod, eviction: Eviction) -> Result<(), Error> {
    let Eviction { component, event, reason, message } = eviction;
    let failed = |verb| {
        let object = format!("Pod {}", pod.key());
        move |source| Error::Request { verb, object, source }
    };
    context.record(pod, component, event);
    let condition = disruption_target(pod, (reason, message), Timestamp::now());
    let patch = json!({"metadata": {"uid": pod.uid()}, "status": {"conditions": [condition]}});
    let pods: Api<Pod> = Api::namespaced(context.client.clone(), pod.namespace());
    match pods.patch_status(pod.name(), &PatchParams::default(), &Patch::Strategic(patch)).await {
        Err(error) if !is_not_found(&error) => return Err(failed("patch")(error)),
        Ok(_) | Err(_) => {}
    }
    context.pods().delete(pod, DeleteParams::default()).await.map_err(failed("delete"))
}

//! Removes the pods of nodes that are gone.

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use kube::Api;
use kube::api::{DeleteParams, Patch, PatchParams};
use serde_json::json;

use super::plan;
use crate::context::Context;
use crate::error::Error;
use crate::events::seconds;
use crate::object::{Key, Node, Object, Pod};
use crate::queue::{Next, Queue};

/// A node that is gone may come back: its pods are left alone for so long.
const QUARANTINE: Duration = Duration::from_secs(40);

/// Has the queue told of nodes that pods are bound to and that are not there.
pub(crate) fn listen(context: &Context, queue: &Arc<Queue<Key>>) {
    let own = queue.clone();
    context.caches.nodes.on_change(move |change| {
        if let (Some(node), None) = (change.old, change.new) {
            own.add_after(node.key(), QUARANTINE);
        }
    });
    let (own, nodes) = (queue.clone(), context.caches.nodes.clone());
    context.caches.pods.on_change(move |change| {
        let node = change.new.and_then(|pod| pod.spec.node_name.as_deref()).filter(|node| !node.is_empty());
        if let Some(node) = node.map(|node| Key::new("", node))
            && nodes.get(&node).is_none()
        {
            own.add_after(node, QUARANTINE);
        }
    });
}

/// One look at one node.
pub(crate) async fn reconcile(context: &Context, key: Key) -> Result<Next, Error> {
    if context.caches.nodes.get(&key).is_some() {
        return Ok(Next::Wait);
    }
    let nodes: Api<Node> = Api::all(context.client.clone());
    let failed = |source| Error::Request { verb: "get", object: format!("Node {key}"), source };
    if nodes.get_opt(&key.name).await.map_err(failed)?.is_some() {
        return Ok(Next::Wait);
    }
    for pod in plan::stranded(&key.name, context.caches.pods.all()) {
        remove(context, &pod).await?;
    }
    Ok(Next::Wait)
}

async fn remove(context: &Context, pod: &Pod) -> Result<(), Error> {
    let failed = |verb| {
        let object = format!("Pod {}", pod.key());
        move |source| Error::Request { verb, object, source }
    };
    if !pod.finished() {
        let condition = json!({
            "type": "DisruptionTarget",
            "status": "True",
            "reason": "DeletionByPodGC",
            "message": "PodGC: node no longer exists",
            "lastTransitionTime": seconds(Timestamp::now()),
        });
        let patch = json!({
            "metadata": {"uid": pod.uid()},
            "status": {"phase": "Failed", "conditions": [condition]},
        });
        let pods: Api<Pod> = Api::namespaced(context.client.clone(), pod.namespace());
        let patched = pods.patch_status(pod.name(), &PatchParams::default(), &Patch::Strategic(patch)).await;
        match patched {
            Err(error) if !crate::error::is_not_found(&error) => return Err(failed("patch")(error)),
            Ok(_) | Err(_) => {}
        }
    }
    let params = DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() };
    context.pods().delete(pod, params).await.map_err(failed("delete"))
}

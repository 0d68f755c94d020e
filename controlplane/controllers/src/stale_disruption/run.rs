//! Resets stale DisruptionTarget conditions.

use std::sync::Arc;

use jiff::Timestamp;
use kube::Api;
use kube::api::{Patch, PatchParams};
use serde_json::json;

use super::plan;
use crate::context::Context;
use crate::error::{Error, is_not_found};
use crate::object::{Key, ObjectExt, Pod};
use crate::queue::{Next, Queue, until};
use crate::timestamp::whole_seconds;

/// Queues pods with the condition DisruptionTarget.
pub(crate) fn listen(context: &Context, queue: &Arc<Queue<Key>>) {
    let own = queue.clone();
    context.caches.pods.on_change(move |change| {
        if let Some(pod) = change.new.filter(|pod| plan::stale_at(pod).is_some()) {
            own.add(pod.key());
        }
    });
}

/// Reconciles one pod.
pub(crate) async fn reconcile(context: &Context, key: Key) -> Result<Next, Error> {
    let Some(pod) = context.caches.pods.get(&key) else { return Ok(Next::Wait) };
    let Some(end) = plan::stale_at(&pod) else { return Ok(Next::Wait) };
    let now = Timestamp::now();
    if let Some(wait) = until(end, now) {
        return Ok(Next::After(wait));
    }
    tracing::info!(pod = %key, "resetting the condition DisruptionTarget of a pod that was not deleted");
    let condition = json!({
        "type": "DisruptionTarget", "status": "False", "reason": null, "message": null,
        "observedGeneration": pod.metadata.generation,
        "lastTransitionTime": whole_seconds(now),
    });
    let patch = json!({
        "metadata": {"uid": pod.uid(), "resourceVersion": pod.metadata.resource_version},
        "status": {"conditions": [condition]},
    });
    let pods: Api<Pod> = Api::namespaced(context.client.clone(), &key.namespace);
    match pods.patch_status(&key.name, &PatchParams::default(), &Patch::Strategic(patch)).await {
        Err(source) if !is_not_found(&source) => {
            Err(Error::Request { verb: "patch", object: format!("Pod {key}"), source })
        }
        Ok(_) | Err(_) => Ok(Next::Wait),
    }
}

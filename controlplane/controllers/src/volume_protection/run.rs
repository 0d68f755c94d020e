//! Adds and removes the finalizers of claims and volumes.

use std::sync::Arc;

use serde_json::json;

use super::plan;
use crate::context::Context;
use crate::error::{Error, is_not_found};
use crate::live;
use crate::object::{Key, Object, ObjectExt, Pod};
use crate::queue::{Next, Queue};
use crate::queueing::queue_stored;
use crate::write::{Part, Writer};

/// Queues changed claims and volumes, and the claims of pods that are gone or shut down. The key of a volume has no
/// namespace.
pub(crate) fn listen(context: &Context, queue: &Arc<Queue<Key>>) {
    queue_stored(&context.caches.claims, queue);
    queue_stored(&context.caches.volumes, queue);
    let own = queue.clone();
    context.caches.pods.on_change(move |change| {
        let new = change.new.map(|new| &**new);
        if let Some(pod) = change.old.filter(|old| plan::frees_claims(old, new)) {
            for volume in pod.spec.volumes.iter() {
                own.add(Key::new(pod.namespace(), &volume.claim_name(pod.name())));
            }
        }
    });
}

/// Reconciles one claim or one volume.
pub(crate) async fn reconcile(context: &Context, key: Key) -> Result<Next, Error> {
    let caches = &context.caches;
    if key.namespace.is_empty() {
        if let Some(volume) = caches.volumes.get(&key) {
            let wanted = plan::finalizers(&volume.metadata, plan::VOLUME, || plan::is_bound(&volume));
            set(context.writer(&caches.volumes), &*volume, wanted).await?;
        }
        return Ok(Next::Wait);
    }
    let Some(claim) = caches.claims.get(&key) else { return Ok(Next::Wait) };
    let in_use = || caches.pods.in_namespace(&key.namespace).iter().any(|pod| plan::uses(pod, &key.name));
    let wanted = plan::finalizers(&claim.metadata, plan::CLAIM, in_use);
    // A pod that was just bound may not be in the cache yet.
    if wanted.is_some() && claim.is_being_deleted() && is_used_now(context, &key).await? {
        return Ok(Next::After(std::time::Duration::from_secs(1)));
    }
    set(context.writer(&caches.claims), &*claim, wanted).await?;
    Ok(Next::Wait)
}

/// Whether a pod uses the claim, according to the API server.
async fn is_used_now(context: &Context, claim: &Key) -> Result<bool, Error> {
    live::any(&context.client, &claim.namespace, |pod: &Pod| plan::uses(pod, &claim.name)).await
}

/// Writes the finalizers of an object. `None` means that nothing is written.
pub(crate) async fn set<K: Object>(
    writer: Writer<'_, K>,
    object: &K,
    wanted: Option<Vec<String>>,
) -> Result<(), Error> {
    let Some(finalizers) = wanted else { return Ok(()) };
    let patch = json!({"metadata": {
        "uid": object.uid(), "resourceVersion": object.meta().resource_version, "finalizers": finalizers,
    }});
    match writer.merge(&object.key(), Part::Main, patch).await {
        Err(Error::Request { source, .. }) if is_not_found(&source) => Ok(()),
        other => other.map(drop),
    }
}

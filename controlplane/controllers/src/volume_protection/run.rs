//! Adds and removes the finalizers of volumes.

use std::sync::Arc;

use serde_json::json;

use super::plan;
use crate::context::Context;
use crate::error::{Error, is_not_found};
use crate::object::{Key, Object};
use crate::queue::{Next, Queue};
use crate::queueing::queue_stored;
use crate::write::{Part, Writer};

/// Queues changed volumes.
pub(crate) fn listen(context: &Context, queue: &Arc<Queue<Key>>) {
    queue_stored(&context.caches.volumes, queue);
}

/// Reconciles one volume.
pub(crate) async fn reconcile(context: &Context, key: Key) -> Result<Next, Error> {
    let caches = &context.caches;
    if let Some(volume) = caches.volumes.get(&key) {
        let wanted = plan::finalizers(&volume.metadata, plan::VOLUME, || plan::is_bound(&volume));
        set(context.writer(&caches.volumes), &*volume, wanted).await?;
    }
    Ok(Next::Wait)
}

/// Writes the finalizers of an object. `None` means that the object is not written.
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

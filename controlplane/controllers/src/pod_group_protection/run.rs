//! Removes the finalizer of groups.

use std::sync::Arc;

use serde_json::json;

use super::plan;
use crate::context::Context;
use crate::error::Error;
use crate::object::{Key, ObjectExt};
use crate::queue::{Next, Queue};
use crate::write::Part;

/// Queues groups that are being deleted, and groups that lose their last active pod.
pub(crate) fn listen(context: &Context, queue: &Arc<Queue<Key>>) {
    let own = queue.clone();
    context.caches.pod_groups.on_change(move |change| {
        if let Some(group) = change.new.filter(|group| group.is_being_deleted()) {
            own.add(group.key());
        }
    });
    let (own, members) = (queue.clone(), context.group_members.clone());
    context.caches.pods.on_change(move |change| {
        if let Some(group) = members.count(change) {
            own.add(group);
        }
    });
}

/// Reconciles one group.
pub(crate) async fn reconcile(context: &Context, key: Key) -> Result<Next, Error> {
    let cache = &context.caches.pod_groups;
    let Some(group) = cache.get(&key) else { return Ok(Next::Wait) };
    if let Some(finalizers) = plan::released(&group.metadata, context.group_members.has(&key)) {
        let version = &group.metadata.resource_version;
        let patch =
            json!({"metadata": {"uid": group.uid(), "resourceVersion": version, "finalizers": finalizers}});
        context.writer(cache).merge(&key, Part::Main, patch).await?;
    }
    Ok(Next::Wait)
}

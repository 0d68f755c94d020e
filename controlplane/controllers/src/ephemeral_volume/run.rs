//! Creates the missing claims of a pod.

use std::sync::Arc;

use coracle_events::{Event, cause};

use super::plan;
use crate::context::Context;
use crate::error::{Error, is_already_exists, is_namespace_terminating};
use crate::object::{ClaimSource, Key, ObjectExt};
use crate::queue::{Next, Queue};
use crate::queueing::queue_pod_of_deleted;

const COMPONENT: &str = "ephemeral_volume";

/// Queues pods with ephemeral volumes, and the pods of deleted claims.
pub(crate) fn listen(context: &Context, queue: &Arc<Queue<Key>>) {
    let own = queue.clone();
    context.caches.pods.on_change(move |change| {
        let is_new = change.old.is_none();
        let has = |volume: &crate::object::PodVolume| matches!(volume.source, ClaimSource::Template(_));
        if let Some(pod) = change.new.filter(|pod| is_new && pod.spec.volumes.iter().any(has)) {
            own.add(pod.key());
        }
    });
    queue_pod_of_deleted(&context.caches.claims, queue);
}

/// Reconciles one pod.
pub(crate) async fn reconcile(context: &Context, key: Key) -> Result<Next, Error> {
    let Some(pod) = context.caches.pods.get(&key) else { return Ok(Next::Wait) };
    for (name, claim) in plan::claims(&pod) {
        if let Some(known) = context.caches.claims.get(&Key::new(&key.namespace, &name)) {
            if !plan::is_of(&known, &pod) {
                let message =
                    format!("PVC {}/{name} was not created for pod {key} (pod is not owner)", key.namespace);
                context.record(&*pod, COMPONENT, Event::warning("FailedBinding", message));
            }
            continue;
        }
        match context.writer(&context.caches.claims).create(&key.namespace, claim).await {
            Err(error) if !is_already_exists(&error) && !is_namespace_terminating(&error) => {
                let message = format!("ephemeral volume: create PVC {name}: {}", cause(&error));
                context.record(&*pod, COMPONENT, Event::warning("FailedBinding", message));
                let object = format!("PersistentVolumeClaim {}/{name}", key.namespace);
                return Err(Error::Request { verb: "create", object, source: error });
            }
            Ok(_) | Err(_) => {}
        }
    }
    Ok(Next::Wait)
}

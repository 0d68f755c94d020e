//! Removes the tracking finalizer of pods whose job does not exist any more.

use std::sync::Arc;

use super::pods::is_tracked;
use super::run::remove_finalizer;
use crate::context::Context;
use crate::error::Error;
use crate::object::{Key, ObjectExt, Pod, controller_of};
use crate::queue::{Next, Queue};

pub(crate) mod run {
    pub(crate) use super::{listen, reconcile};
}

/// Queues tracked pods that change, and the pods of removed jobs.
pub(crate) fn listen(context: &Context, queue: &Arc<Queue<Key>>) {
    let (own, jobs) = (queue.clone(), context.caches.jobs.clone());
    context.caches.pods.on_change(move |change| {
        let Some(pod) = change.new.filter(|pod| is_tracked(pod)) else { return };
        let owner = controller_of(&pod.metadata).filter(|owner| owner.kind == "Job");
        let job = owner.and_then(|owner| jobs.get(&Key::new(pod.namespace(), &owner.name)));
        if job.is_none_or(|job| Some(job.uid()) != owner.map(|owner| owner.uid.as_str())) {
            own.add(pod.key());
        }
    });
    let (own, pods) = (queue.clone(), Arc::downgrade(&context.caches.pods));
    context.caches.jobs.on_change(move |change| {
        // A handler of jobs must not read the cache of pods (see [`crate::cache`]), so a task reads it.
        let (Some(old), None) = (change.old, change.new) else { return };
        let (Some(pods), own, job) = (pods.upgrade(), own.clone(), old.clone()) else { return };
        tokio::spawn(async move {
            for pod in pods.owned_by(job.namespace(), job.uid()).iter().filter(|pod| is_tracked(pod)) {
                own.add(pod.key());
            }
        });
    });
}

/// Removes the finalizer if the pod's job does not exist.
pub(crate) async fn reconcile(context: &Context, key: Key) -> Result<Next, Error> {
    let Some(pod) = context.caches.pods.get(&key).filter(|pod| is_tracked(pod)) else {
        return Ok(Next::Wait);
    };
    // A job that is not served exists in the store.
    if context.caches.jobs.is_served() && !has_job(context, &pod) {
        remove_finalizer(context, &pod).await?;
    }
    Ok(Next::Wait)
}

fn has_job(context: &Context, pod: &Pod) -> bool {
    let Some(owner) = controller_of(&pod.metadata).filter(|owner| owner.kind == "Job") else { return false };
    let job = context.caches.jobs.get(&Key::new(pod.namespace(), &owner.name));
    job.is_some_and(|job| job.uid() == owner.uid)
}

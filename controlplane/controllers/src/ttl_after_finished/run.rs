//! Applies the plan.

use std::sync::Arc;

use jiff::Timestamp;
use kube::api::{DeleteParams, PropagationPolicy};

use super::plan::due;
use crate::context::Context;
use crate::error::Error;
use crate::object::{Key, ObjectExt};
use crate::queue::{Next, Queue, until};

/// Queues finished jobs with a TTL.
pub(crate) fn listen(context: &Context, queue: &Arc<Queue<Key>>) {
    let own = queue.clone();
    context.caches.jobs.on_change(move |change| {
        if let Some(job) = change.new.filter(|job| due(job).is_some()) {
            own.add(job.key());
        }
    });
}

/// Deletes the job if it is due. Its pods are deleted first.
pub(crate) async fn reconcile(context: &Context, key: Key) -> Result<Next, Error> {
    let Some(job) = context.caches.jobs.get(&key) else { return Ok(Next::Wait) };
    let Some(due) = due(&job) else { return Ok(Next::Wait) };
    if let Some(wait) = until(due, Timestamp::now()) {
        return Ok(Next::After(wait));
    }
    let params =
        DeleteParams { propagation_policy: Some(PropagationPolicy::Foreground), ..DeleteParams::default() };
    let deleted = context.writer(&context.caches.jobs).delete(&job, params).await;
    deleted.map_err(|source| Error::Request { verb: "delete", object: format!("Job {key}"), source })?;
    Ok(Next::Wait)
}

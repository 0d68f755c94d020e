//! Deletes finished jobs.

use std::sync::Arc;

use jiff::Timestamp;
use kube::api::{DeleteParams, PropagationPolicy};

use super::plan::due;
use crate::context::Context;
use crate::error::Error;
use crate::object::{Key, ObjectExt};
use crate::queue::{Next, Queue, until};
use crate::write::if_unchanged;

/// Queues finished jobs with a TTL.
pub(crate) fn listen(context: &Context, queue: &Arc<Queue<Key>>) {
    let own = queue.clone();
    context.caches.jobs.on_change(move |change| {
        if let Some(job) = change.new.filter(|job| due(job).is_some()) {
            own.add(job.key());
        }
    });
}

/// Deletes the job if its TTL has expired. The pods of the job are deleted first. A newer version of the job may have
/// another TTL, so the version is a precondition.
pub(crate) async fn reconcile(context: &Context, key: Key) -> Result<Next, Error> {
    let Some(job) = context.caches.jobs.get(&key) else { return Ok(Next::Wait) };
    let Some(due) = due(&job) else { return Ok(Next::Wait) };
    if let Some(wait) = until(due, Timestamp::now()) {
        return Ok(Next::After(wait));
    }
    let params =
        DeleteParams { propagation_policy: Some(PropagationPolicy::Foreground), ..if_unchanged(&*job) };
    let deleted = context.writer(&context.caches.jobs).delete(&job, params).await;
    deleted.map_err(|source| Error::Request { verb: "delete", object: format!("Job {key}"), source })?;
    Ok(Next::Wait)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::test_api::TestApi;

    #[tokio::test]
    async fn only_the_version_that_is_due_is_deleted() {
        let condition =
            json!({"type": "Complete", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"});
        let job = json!({"metadata": {"name": "j", "namespace": "n", "uid": "u", "resourceVersion": "7"},
            "spec": {"ttlSecondsAfterFinished": 1}, "status": {"conditions": [condition]}});
        let api = TestApi::new(&[]);
        api.context.caches.jobs.written(serde_json::from_value(job).unwrap());
        reconcile(&api.context, Key::new("n", "j")).await.unwrap();
        let [write] = &api.writes()[..] else { panic!("{:?}", api.writes()) };
        assert_eq!(write.body["preconditions"], json!({"uid": "u", "resourceVersion": "7"}));
        assert_eq!(write.body["propagationPolicy"], "Foreground");
    }
}

//! Removes the tracking finalizer of pods whose job does not exist any more.

use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;

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
        let owner = controller_of(&pod.metadata);
        if owner.is_some_and(|owner| !is_job(owner)) {
            return;
        }
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
    // If jobs are not served, the job may still exist in the store.
    if context.caches.jobs.is_served() && !has_controller(context, &pod).await? {
        remove_finalizer(context, &pod).await?;
    }
    Ok(Next::Wait)
}

fn is_job(owner: &OwnerReference) -> bool {
    owner.kind == "Job" && owner.api_version == "batch/v1"
}

/// Whether the pod's controller exists, or is not a job. If the cache does not have the job, the job is read from the
/// API server. A new job may not be in the cache yet. If its pod lost the finalizer, the pod might not be counted.
async fn has_controller(context: &Context, pod: &Pod) -> Result<bool, Error> {
    let Some(owner) = controller_of(&pod.metadata) else { return Ok(false) };
    // As upstream, the finalizer stays: a controller that is not a job may use it for its own pods.
    if !is_job(owner) {
        return Ok(true);
    }
    let (jobs, key) = (&context.caches.jobs, Key::new(pod.namespace(), &owner.name));
    if jobs.get(&key).is_some_and(|job| job.uid() == owner.uid) {
        return Ok(true);
    }
    Ok(context.writer(jobs).live(&key).await?.is_some_and(|job| job.uid() == owner.uid))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::test_api::TestApi;

    #[tokio::test]
    async fn the_finalizer_stays_on_pods_of_another_controller() {
        for (version, releases) in [("batch/v1", true), ("example.com/v1", false)] {
            let owner =
                json!({"apiVersion": version, "kind": "Job", "name": "j", "uid": "j", "controller": true});
            let pod = json!({"metadata": {"name": "p", "namespace": "n", "uid": "p", "resourceVersion": "7",
                "finalizers": [crate::job::FINALIZER], "ownerReferences": [owner]}});
            let job = json!({"metadata": {"name": "j", "namespace": "n", "uid": "other"}});
            let api = TestApi::new(&[
                ("/apis/batch/v1/namespaces/n/jobs/j", job),
                ("/api/v1/namespaces/n/pods/p", pod.clone()),
            ]);
            api.context.caches.pods.written(serde_json::from_value(pod).unwrap());
            reconcile(&api.context, Key::new("n", "p")).await.unwrap();
            assert_eq!(api.writes().len(), usize::from(releases), "{version}");
        }
    }

    #[tokio::test]
    async fn the_finalizer_stays_while_the_api_server_has_the_job() {
        let owner =
            json!({"apiVersion": "batch/v1", "kind": "Job", "name": "j", "uid": "j", "controller": true});
        let pod = json!({"metadata": {"name": "p", "namespace": "n", "uid": "p", "resourceVersion": "7",
            "finalizers": [crate::job::FINALIZER], "ownerReferences": [owner]}});
        for (uid, releases) in [("j", false), ("other", true)] {
            let job = json!({"metadata": {"name": "j", "namespace": "n", "uid": uid}});
            let api = TestApi::new(&[
                ("/apis/batch/v1/namespaces/n/jobs/j", job),
                ("/api/v1/namespaces/n/pods/p", pod.clone()),
            ]);
            api.context.caches.pods.written(serde_json::from_value(pod.clone()).unwrap());
            reconcile(&api.context, Key::new("n", "p")).await.unwrap();
            assert_eq!(api.writes().len(), usize::from(releases), "{uid}");
        }
    }
}

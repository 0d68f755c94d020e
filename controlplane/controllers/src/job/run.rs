//! Applies the plans of jobs.

use std::sync::Arc;
use std::time::{Duration, Instant};

use coracle_values::label_selector::{has_many_values, has_requirements, selects};
use futures::future::join_all;
use jiff::Timestamp;
use k8s_openapi::api::batch::v1::JobStatus;
use serde_json::{Value, json};

use super::plan::{self, Change, IndexFailures, NewPod};
use super::status::{self, Update};
use super::verdict::ObservedJob;
use super::{FINALIZER, pods};
use crate::annotation::{JOB_INDEX, JOB_INDEX_FAILURES, JOB_INDEX_IGNORED_FAILURES};
use crate::context::Context;
use crate::error::{Error, is_not_found};
use crate::job_metrics::JobSync;
use crate::object::{Job, Key, ObjectExt, Pod, controller_of};
use crate::pod_control::{self, Claim, PodControl};
use crate::queue::{Next, Queue};
use crate::queueing::{Selecting, own_pods, queue_changed};
use crate::write::{Part, status_patch};

const COMPONENT: &str = "job-controller";
/// The value of `managedBy` that means this controller.
const OWN_NAME: &str = "kubernetes.io/job-controller";
/// Concurrent requests that remove finalizers.
const CONCURRENT: usize = 50;

/// Queues changed jobs, and the jobs of changed pods.
pub(crate) fn listen(context: &Context, queue: &Arc<Queue<Key>>) {
    queue_changed(&context.caches.jobs, queue);
    let metrics = context.config.job_metrics.clone();
    context.caches.pods.on_change(move |change| {
        let is_ended = |pod: &Arc<Pod>| pod.finished() && pods::is_tracked(pod);
        match (change.old.is_some_and(is_ended), change.new.is_some_and(is_ended)) {
            (false, true) => metrics.tracked("add"),
            (true, false) => metrics.tracked("delete"),
            (false, false) | (true, true) => {}
        }
    });
    let may_adopt = |job: &Job, pod: &Pod| {
        let selector = &job.spec.selector;
        has_requirements(selector) && selects(selector, pod.metadata.labels.as_ref())
    };
    let is_large = |job: &Job| has_many_values(&job.spec.selector);
    let (own, jobs) = (queue.clone(), Selecting::new(queue, &context.caches.jobs, may_adopt, is_large));
    context.caches.pods.on_change(move |change| {
        if change.old.zip(change.new).is_some_and(|(old, new)| !pods::is_relevant(old, new)) {
            return;
        }
        for pod in [change.old, change.new].into_iter().flatten() {
            if let Some(owner) = controller_of(&pod.metadata) {
                if owner.kind == "Job" {
                    own.add(Key::new(pod.namespace(), &owner.name));
                }
            } else if change.new.is_some() {
                jobs.changed(pod.namespace(), pod);
            }
        }
    });
}

/// Reconciles one job.
pub(crate) async fn reconcile(context: &Context, key: Key) -> Result<Next, Error> {
    let Some(job) = context.caches.jobs.get(&key) else {
        context.job_failures.forget(&key);
        return Ok(Next::Wait);
    };
    if job.spec.managed_by.as_deref().is_some_and(|name| name != OWN_NAME) {
        return Ok(Next::Wait);
    }
    if job.finished() {
        context.job_failures.forget(&key);
    }
    let (began, mut action) = (Instant::now(), "reconciling");
    let result = sync(context, &job, &mut action).await;
    if !job.finished() {
        let completion_mode = pods::completion_mode(&job);
        let sync = JobSync { completion_mode, succeeded: result.is_ok(), action };
        context.config.job_metrics.synced(sync, began.elapsed());
    }
    result
}

/// The control of the job's pods.
fn control<'a>(context: &'a Context, job: &'a Job) -> PodControl<'a, Job> {
    PodControl {
        context,
        owner: job,
        cache: &context.caches.jobs,
        component: COMPONENT,
        finalizer: Some(FINALIZER),
    }
}

/// Creates and deletes pods, and writes the status. Sets `action` to the kind of the change, for the metrics.
async fn sync(context: &Context, job: &Job, action: &mut &'static str) -> Result<Next, Error> {
    let selector = pod_control::selector_of(job, &job.spec.selector)?;
    if selector.is_empty() {
        return Ok(Next::Wait);
    }
    let control = control(context, job);
    let done = job.is_being_deleted() || job.finished();
    let claim = Claim::of(done, &selector, pod_control::candidates(context, job));
    control.apply(&claim).await?;
    if !claim.adopt.is_empty() {
        // The adoption causes the next reconcile, which counts these pods.
        return Ok(Next::Wait);
    }
    let (mut wait, mut pause) = (None, None);
    let mut outcome = Ok(());
    let mut decided = None;
    if !job.finished() {
        let former = context.job_failures.of(job);
        let observed = ObservedJob::of(job, &claim.own, Timestamp::now()).with_failures(&former);
        context.job_failures.keep(job, &observed.failures);
        decided.clone_from(&observed.verdict);
        let change = plan::plan(&observed);
        pause = change.pause();
        if decided.is_none() {
            *action = action_of(&change);
        }
        match change {
            Change::Nothing => {}
            Change::Wait(time) => wait = Some(time),
            Change::Create(pods) => match create(&control, &pods).await {
                Ok(throttled) => pause = throttled.or(pause),
                Err(error) => outcome = Err(error),
            },
            Change::Delete(pods) => outcome = delete(&control, &pods).await,
            Change::Discard(pods) => outcome = discard(&control, &pods).await,
        }
    }
    // The cache already contains the results of the writes above.
    let own = own_pods(context, job, &selector);
    let update = status::update(&ObservedJob::of(job, &own, Timestamp::now()).with_verdict(decided));
    let again = apply(&control, update).await?;
    outcome?;
    let next: Option<Duration> = wait.into_iter().chain(again).min();
    Ok(pause.map(Next::NotBefore).or(next.map(Next::After)).unwrap_or(Next::Wait))
}

/// The name of the change for the metrics.
fn action_of(change: &Change) -> &'static str {
    match change {
        Change::Nothing => "tracking",
        Change::Wait(_) | Change::Create(_) => "pods_created",
        Change::Delete(_) | Change::Discard(_) => "pods_deleted",
    }
}

/// Creates pods. If the jobs of the namespace have created too many pods, creates no pods and returns the delay of the
/// next attempt. Pods that the API server refuses do not count.
async fn create(control: &PodControl<'_, Job>, pods: &[NewPod]) -> Result<Option<Duration>, Error> {
    let (context, job) = (control.context, control.owner);
    let wait = context.job_creations.charge(job.namespace(), pods.len(), Instant::now());
    if wait.is_some() {
        return Ok(wait);
    }
    let template = job.spec.template.value();
    let pods: Vec<Value> = pods.iter().map(|pod| new_pod(job, &template, *pod)).collect();
    let (created, result) = control.create_counted(&pods).await;
    context.job_creations.refund(job.namespace(), pods.len().saturating_sub(created));
    result.map_err(|error| control.failed("create pods of", error))?;
    Ok(None)
}

async fn delete(control: &PodControl<'_, Job>, pods: &[Arc<Pod>]) -> Result<(), Error> {
    control.delete(pods).await.map_err(|error| control.failed("delete pods of", error))
}

/// Deletes pods that must not count as failed. If a pod keeps its finalizer, for example because a webhook refuses the
/// change, the other pods are still deleted.
async fn discard(control: &PodControl<'_, Job>, pods: &[Arc<Pod>]) -> Result<(), Error> {
    let (mut released, mut outcome) = (Vec::new(), Ok(()));
    for batch in pods.chunks(CONCURRENT) {
        let results = join_all(batch.iter().map(|pod| release(control.context, pod))).await;
        for (pod, result) in batch.iter().zip(results) {
            match result {
                Ok(()) => released.push(pod.clone()),
                Err(error) => outcome = Err(error),
            }
        }
    }
    let deleted = delete(control, &released).await;
    outcome.and(deleted)
}

/// Removes the tracking finalizer of a pod, if it has one.
async fn release(context: &Context, pod: &Pod) -> Result<(), Error> {
    if pods::is_tracked(pod) { remove_finalizer(context, pod).await } else { Ok(()) }
}

/// Removes the tracking finalizer of pods.
async fn finalize(context: &Context, pods: &[Arc<Pod>]) -> Result<(), Error> {
    for batch in pods.chunks(CONCURRENT) {
        for result in join_all(batch.iter().map(|pod| release(context, pod))).await {
            result?;
        }
    }
    Ok(())
}

/// Writes the status, then removes the finalizers of the pods that it counts. Returns the delay of the next reconcile.
async fn apply(control: &PodControl<'_, Job>, update: Update) -> Result<Option<Duration>, Error> {
    let job = control.owner;
    if let Some(patch) = counting_patch(job, &update.status) {
        control.context.writer(control.cache).merge(&job.key(), Part::Status, patch).await?;
        let mode = pods::completion_mode(job);
        control.context.config.job_metrics.counted(mode, &job.status, &update.status);
    }
    control.context.config.job_metrics.handled(&update.policy_actions);
    for event in update.events {
        control.record(event);
    }
    finalize(control.context, &update.finalize).await?;
    Ok(update.again)
}

/// The patch of the status. It is valid only for the version of the job with the former counts. Otherwise a late
/// request of an earlier process could replace newer counts: pods would be counted twice or not at all.
fn counting_patch(job: &Job, status: &JobStatus) -> Option<Value> {
    let mut patch = status_patch(job, &json!(job.status), &json!(status))?;
    patch["metadata"]["resourceVersion"] = job.metadata.resource_version.clone().into();
    Some(patch)
}

/// Removes the tracking finalizer of a pod. A pod that does not exist is not an error.
pub(super) async fn remove_finalizer(context: &Context, pod: &Pod) -> Result<(), Error> {
    let others = pod.metadata.finalizers.iter().flatten().filter(|name| *name != FINALIZER);
    let patch = json!({"metadata": {
        "uid": pod.uid(),
        "resourceVersion": pod.metadata.resource_version,
        "finalizers": others.collect::<Vec<_>>(),
    }});
    match context.pods().merge(&pod.key(), Part::Main, patch).await {
        Err(Error::Request { source, .. }) if is_not_found(&source) => {
            context.caches.pods.removed(&pod.key(), pod.uid());
            Ok(())
        }
        other => other.map(drop),
    }
}

/// A pod of a job. A pod of an indexed job gets its index as annotation, label, variable and host name.
fn new_pod(job: &Job, template: &Value, new: NewPod) -> Value {
    let mut pod = pod_control::from_template(job, template);
    let mut finalizers = pod["metadata"]["finalizers"].as_array().cloned().unwrap_or_default();
    finalizers.push(FINALIZER.into());
    pod["metadata"]["finalizers"] = finalizers.into();
    let Some(index) = new.index else {
        pod["metadata"]["generateName"] = format!("{}-", job.name()).into();
        return pod;
    };
    pod["metadata"]["generateName"] = indexed_prefix(job.name(), index).into();
    pod["metadata"]["annotations"][JOB_INDEX] = index.to_string().into();
    pod["metadata"]["labels"][JOB_INDEX] = index.to_string().into();
    if let Some(IndexFailures { counted, ignored }) = new.failures {
        pod["metadata"]["annotations"][JOB_INDEX_FAILURES] = counted.to_string().into();
        if ignored > 0 {
            pod["metadata"]["annotations"][JOB_INDEX_IGNORED_FAILURES] = ignored.to_string().into();
        }
    }
    pod["spec"]["hostname"] = format!("{}-{index}", job.name()).into();
    let source = json!({"fieldRef": {"fieldPath": format!("metadata.labels['{JOB_INDEX}']")}});
    for list in ["containers", "initContainers"] {
        for container in pod["spec"][list].as_array_mut().into_iter().flatten() {
            if !container.is_object() {
                continue;
            }
            let variables = container["env"].as_array().cloned().unwrap_or_default();
            if variables.iter().all(|variable| variable["name"] != "JOB_COMPLETION_INDEX") {
                let own = json!({"name": "JOB_COMPLETION_INDEX", "valueFrom": source});
                container["env"] = variables.into_iter().chain([own]).collect();
            }
        }
    }
    pod
}

/// The prefix of a pod's name with its index. The job's name is shortened, so that the API server does not cut the
/// index off.
fn indexed_prefix(job: &str, index: i32) -> String {
    /// Maximum length of a prefix, to which the API server adds five characters.
    const LONGEST: usize = 58;
    let index = format!("-{index}-");
    // The names of jobs are ASCII, so every byte is a character boundary.
    let name = job.get(..LONGEST - index.len()).unwrap_or(job);
    format!("{name}{index}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_api::TestApi;

    fn job() -> Job {
        serde_json::from_value(json!({"metadata": {"name": "j", "namespace": "n", "uid": "j"}})).unwrap()
    }

    #[tokio::test]
    async fn a_pod_that_keeps_its_finalizer_does_not_prevent_the_deletion_of_others() {
        let pod = |name: &str| {
            let metadata = json!({"name": name, "namespace": "n", "uid": name, "resourceVersion": "7",
                "finalizers": [FINALIZER]});
            json!({"metadata": metadata})
        };
        // The response to the change of the first pod cannot be read.
        let api = TestApi::new(&[
            ("/api/v1/namespaces/n/pods/bad", json!("no pod")),
            ("/api/v1/namespaces/n/pods/good", pod("good")),
        ]);
        let job = job();
        let control = control(&api.context, &job);
        let own: Vec<Arc<Pod>> =
            ["bad", "good"].map(|name| Arc::new(serde_json::from_value::<Pod>(pod(name)).unwrap())).into();
        assert!(discard(&control, &own).await.is_err());
        let writes = api.writes();
        let deleted = writes.iter().filter(|write| write.method == "DELETE").map(|write| write.path.as_str());
        assert_eq!(deleted.collect::<Vec<_>>(), ["/api/v1/namespaces/n/pods/good"]);
    }

    #[tokio::test]
    async fn a_job_of_a_namespace_above_its_rate_creates_no_pods_and_waits() {
        let api = TestApi::new(&[]);
        let job = job();
        let control = control(&api.context, &job);
        for namespace in ["other", "n"] {
            assert_eq!(api.context.job_creations.charge(namespace, 5000, Instant::now()), None);
        }
        let wait = create(&control, &[NewPod::default()]).await.unwrap();
        assert!(wait.is_some_and(|wait| wait > Duration::from_secs(5)), "{wait:?}");
        assert!(api.writes().is_empty());
    }

    #[tokio::test]
    async fn pods_of_a_job_that_are_refused_do_not_use_the_rate_of_the_namespace() {
        // The API has no path for pods, so it refuses them.
        let api = TestApi::new(&[]);
        let job = job();
        let control = control(&api.context, &job);
        for _ in 0..10 {
            assert!(create(&control, &[NewPod::default(); 500]).await.is_err());
        }
        assert_eq!(api.writes().len(), 10, "one request finds out that pods are refused");
        assert_eq!(api.context.job_creations.charge("n", 1, Instant::now()), None);
    }

    #[test]
    fn a_long_name_keeps_its_index() {
        assert_eq!(indexed_prefix("short", 7), "short-7-");
        let prefix = indexed_prefix(&"j".repeat(63), 12);
        assert_eq!((prefix.len(), prefix.ends_with("j-12-")), (58, true));
        assert_eq!(indexed_prefix(&"j".repeat(54), 12), format!("{}-12-", "j".repeat(54)));
    }

    #[test]
    fn an_indexed_pod_has_its_own_host_name() {
        let job: Job = serde_json::from_value(json!({"metadata": {"name": "j", "uid": "u"}})).unwrap();
        let new = NewPod { index: Some(3), failures: None };
        let pod = new_pod(&job, &json!({"spec": {"hostname": "same"}}), new);
        assert_eq!(pod["spec"]["hostname"], "j-3");
    }

    #[test]
    fn counts_are_written_to_the_version_that_they_continue() {
        let metadata = json!({"name": "j", "namespace": "n", "uid": "u", "resourceVersion": "7"});
        let job: Job =
            serde_json::from_value(json!({"metadata": metadata, "status": {"succeeded": 1}})).unwrap();
        assert_eq!(counting_patch(&job, &job.status), None);
        let status = JobStatus { succeeded: Some(2), ..job.status.clone() };
        let expected = json!({"metadata": {"uid": "u", "resourceVersion": "7"}, "status": {"succeeded": 2}});
        assert_eq!(counting_patch(&job, &status), Some(expected));
    }
}

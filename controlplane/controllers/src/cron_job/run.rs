//! Applies the plans of cron jobs.

use std::sync::Arc;

use coracle_events::{Event, cause};
use jiff::Timestamp;
use k8s_openapi::api::batch::v1::CronJobStatus;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::api::{DeleteParams, PropagationPolicy};
use serde_json::{Value, json};

use super::plan::{self, Plan, job_name, reference};
use crate::context::Context;
use crate::error::{Error, is_already_exists, is_namespace_terminating};
use crate::object::{CronJob, Job, Key, ObjectExt, controller_of};
use crate::queue::{Next, Queue};
use crate::write::{Part, status_patch};

const COMPONENT: &str = "cronjob-controller";
/// The annotation with the scheduled time of a job.
const SCHEDULED: &str = "batch.kubernetes.io/cronjob-scheduled-timestamp";

/// Queues changed cron jobs, and the cron jobs of changed jobs.
pub(crate) fn listen(context: &Context, queue: &Arc<Queue<Key>>) {
    let own = queue.clone();
    context.caches.cron_jobs.on_change(move |change| {
        let changed = change.old.zip(change.new).filter(|(old, new)| has_other_schedule(old, new));
        match (changed.and_then(|(_, new)| plan::until_next(new, Timestamp::now())), change.latest()) {
            (Some(delay), Some(cron_job)) => own.add_after(cron_job.key(), delay),
            (None, Some(cron_job)) => own.add(cron_job.key()),
            (_, None) => {}
        }
    });
    let own = queue.clone();
    context.caches.jobs.on_change(move |change| {
        for job in [change.old, change.new].into_iter().flatten() {
            if let Some(owner) = controller_of(&job.metadata).filter(|owner| owner.kind == "CronJob") {
                own.add(Key::new(job.namespace(), &owner.name));
            }
        }
    });
}

fn has_other_schedule(old: &CronJob, new: &CronJob) -> bool {
    let schedule = |cron_job: &CronJob| (cron_job.spec.schedule.clone(), cron_job.spec.time_zone.clone());
    old.uid() == new.uid() && schedule(old) != schedule(new)
}

/// Reconciles one cron job.
pub(crate) async fn reconcile(context: &Context, key: Key) -> Result<Next, Error> {
    let Some(cron_job) = context.caches.cron_jobs.get(&key) else { return Ok(Next::Wait) };
    let mut jobs = context.caches.jobs.owned_by(cron_job.namespace(), cron_job.uid());
    // The cache may lack a new job. Without a read from the API server, the cron job would start another job.
    for reference in plan::missing(&cron_job, &jobs) {
        let name = reference.name.unwrap_or_default();
        if !name.is_empty() {
            let key = Key::new(cron_job.namespace(), &name);
            let live = context.writer(&context.caches.jobs).live(&key).await?;
            jobs.extend(live.filter(|job| reference.uid.as_deref() == Some(job.uid())).map(Arc::new));
        }
    }
    let Plan { delete, create, mut status, events, again } = plan::plan(&cron_job, &jobs, Timestamp::now());
    for event in events {
        context.record(&*cron_job, COMPONENT, event);
    }
    for job in delete {
        remove(context, &cron_job, &job).await?;
    }
    // Ended jobs are removed from the status even if the next job cannot be created.
    let created = match create {
        Some(time) => self::create(context, &cron_job, time, &mut status).await,
        None => Ok(()),
    };
    if let Some(patch) = status_patch(&*cron_job, &json!(cron_job.status), &json!(status)) {
        context.writer(&context.caches.cron_jobs).merge(&key, Part::Status, patch).await?;
    }
    created?;
    Ok(again.map_or(Next::Wait, Next::After))
}

async fn remove(context: &Context, cron_job: &CronJob, job: &Job) -> Result<(), Error> {
    let params =
        DeleteParams { propagation_policy: Some(PropagationPolicy::Background), ..DeleteParams::default() };
    match context.writer(&context.caches.jobs).delete(job, params).await {
        Ok(()) => {
            let message = format!("Deleted job {}", job.name());
            context.record(cron_job, COMPONENT, Event::normal("SuccessfulDelete", message));
            Ok(())
        }
        Err(source) => {
            let message = format!("Deleted job: {}", cause(&source));
            context.record(cron_job, COMPONENT, Event::warning("FailedDelete", message));
            Err(Error::Request { verb: "delete", object: format!("Job {}", job.key()), source })
        }
    }
}

/// Creates the job of a scheduled time, and adds it to the status.
async fn create(
    context: &Context,
    cron_job: &CronJob,
    time: Timestamp,
    status: &mut CronJobStatus,
) -> Result<(), Error> {
    let name = job_name(cron_job, time);
    let key = Key::new(cron_job.namespace(), &name);
    let writer = context.writer(&context.caches.jobs);
    let job = match writer.create(cron_job.namespace(), new_job(cron_job, time, &name)).await {
        Ok(job) => {
            let message = format!("Created job {name}");
            context.record(cron_job, COMPONENT, Event::normal("SuccessfulCreate", message));
            if let Some(created) = &job.metadata.creation_timestamp {
                context.config.job_metrics.created_after(created.0.duration_since(time).as_secs_f64());
            }
            Some(job)
        }
        // An earlier process created the job and stopped before it wrote the status.
        Err(error) if is_already_exists(&error) => {
            let found = writer.live(&key).await?;
            found.filter(|job| is_of(job, cron_job) && !job.finished()).map(Arc::new)
        }
        Err(error) if is_namespace_terminating(&error) => return Ok(()),
        Err(source) => {
            let message = format!("Error creating job: {}", cause(&source));
            context.record(cron_job, COMPONENT, Event::warning("FailedCreate", message));
            return Err(Error::Request { verb: "create", object: format!("Job {key}"), source });
        }
    };
    if let Some(job) = job {
        status.active.get_or_insert_default().push(reference(&job));
    }
    status.last_schedule_time = Some(Time(time));
    Ok(())
}

fn is_of(job: &Job, cron_job: &CronJob) -> bool {
    controller_of(&job.metadata).is_some_and(|owner| owner.uid == cron_job.uid())
}

/// The job of a scheduled time.
fn new_job(cron_job: &CronJob, time: Timestamp, name: &str) -> Value {
    let template = cron_job.spec.job_template.value();
    let mut metadata = json!({"name": name, "ownerReferences": [cron_job.controller_reference()]});
    for field in ["labels", "annotations"] {
        if template["metadata"][field].is_object() {
            metadata[field] = template["metadata"][field].clone();
        }
    }
    metadata["annotations"][SCHEDULED] = scheduled(cron_job, time).into();
    json!({"metadata": metadata, "spec": template["spec"]})
}

/// A scheduled time in the time zone of the cron job. It has Go's form: an offset of zero is `Z`.
fn scheduled(cron_job: &CronJob, time: Timestamp) -> String {
    let zone = cron_job.spec.time_zone.as_deref().and_then(|name| jiff::tz::TimeZone::get(name).ok());
    match zone.map(|zone| zone.to_offset(time)).filter(|offset| !offset.is_zero()) {
        Some(offset) => time.display_with_offset(offset).to_string(),
        None => time.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scheduled_times_have_the_offset_of_the_zone() {
        let time: Timestamp = "2026-11-01T00:00:00Z".parse().unwrap();
        let of = |zone: Value| {
            let spec = json!({"timeZone": zone, "schedule": "0 0 1 * *", "jobTemplate": {}});
            scheduled(&serde_json::from_value(json!({"spec": spec})).unwrap(), time)
        };
        assert_eq!(of(json!("Etc/UTC")), "2026-11-01T00:00:00Z");
        assert_eq!(of(json!("Asia/Tokyo")), "2026-11-01T09:00:00+09:00");
        assert_eq!(of(Value::Null), "2026-11-01T00:00:00Z");
    }
}

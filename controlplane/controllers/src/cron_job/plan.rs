//! The actions for one cron job, from the cron job and its jobs.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use coracle_events::Event;
use coracle_schedule::{Schedule, TimeZone};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::batch::v1::CronJobStatus;
use k8s_openapi::api::core::v1::ObjectReference;

use super::times::{Times, times};
use crate::object::{CronJob, Job, ObjectExt};
use crate::queue::until;

/// Maximum number of unexpected jobs that one reconcile reports. Users can create many such jobs, and their events
/// would displace the events of other objects.
const MAX_UNEXPECTED: usize = 10;

/// The actions, in this order.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    /// Old finished jobs, and running jobs that are replaced.
    pub(crate) delete: Vec<Arc<Job>>,
    /// The scheduled time of the job to create.
    pub(crate) create: Option<Timestamp>,
    /// The status without the job to create.
    pub(crate) status: CronJobStatus,
    pub(crate) events: Vec<Event>,
    /// Delay of the next reconcile if nothing changes.
    pub(crate) again: Option<Duration>,
}

/// References to active jobs that the cache does not have. The cache may be older than the status.
pub(crate) fn missing(cron_job: &CronJob, jobs: &[Arc<Job>]) -> Vec<ObjectReference> {
    let known: HashSet<&str> = jobs.iter().map(|job| job.uid()).collect();
    let active = cron_job.status.active.iter().flatten();
    active.filter(|reference| !known.contains(uid_of(reference))).cloned().collect()
}

/// Plans the actions. `jobs` are all jobs that the cron job controls.
pub(crate) fn plan(cron_job: &CronJob, jobs: &[Arc<Job>], now: Timestamp) -> Plan {
    let mut plan = Plan { status: cron_job.status.clone(), ..Plan::default() };
    let running = update_active(cron_job, jobs, &mut plan);
    for succeeded in [true, false] {
        clean(cron_job, jobs, succeeded, &mut plan);
    }
    if !cron_job.is_being_deleted() && cron_job.spec.suspend != Some(true) {
        schedule(cron_job, running, now, &mut plan);
    }
    plan
}

/// The name of the job for a scheduled time. The name is the same after a restart, so that no scheduled time gets two
/// jobs.
pub(crate) fn job_name(cron_job: &CronJob, time: Timestamp) -> String {
    format!("{}-{}", cron_job.name(), time.as_second() / 60)
}

/// The reference to a job in `status.active`.
pub(crate) fn reference(job: &Job) -> ObjectReference {
    job.object_reference()
}

fn uid_of(reference: &ObjectReference) -> &str {
    reference.uid.as_deref().unwrap_or_default()
}

/// The delay until the next time of a changed schedule. As upstream, times before the change get no job, because the
/// new schedule did not exist then. `None` if the schedule is invalid or never fires.
pub(crate) fn until_next(cron_job: &CronJob, now: Timestamp) -> Option<Duration> {
    let spec = &cron_job.spec;
    let schedule: Schedule = spec.schedule.parse().ok()?;
    let zone = spec.time_zone.as_deref().map_or_else(|| Ok(TimeZone::utc()), str::parse).ok()?;
    until(times(&schedule, &zone, last_time(cron_job, now), now).next?, now)
}

/// The last time that got a job, or the creation of the cron job.
fn last_time(cron_job: &CronJob, now: Timestamp) -> Timestamp {
    let times = [cron_job.status.last_schedule_time.as_ref(), cron_job.metadata.creation_timestamp.as_ref()];
    times.into_iter().flatten().next().map_or(now, |time| time.0)
}

/// Removes ended and missing jobs from `status.active`. Returns the jobs that run.
fn update_active(cron_job: &CronJob, jobs: &[Arc<Job>], plan: &mut Plan) -> Vec<Arc<Job>> {
    let by_uid: HashMap<&str, &Arc<Job>> = jobs.iter().map(|job| (job.uid(), job)).collect();
    let mut running = Vec::new();
    let mut active = cron_job.status.active.clone().unwrap_or_default();
    active.retain(|reference| {
        let name = reference.name.clone().unwrap_or_default();
        let Some(job) = by_uid.get(uid_of(reference)) else {
            let message = format!("Active job went missing: {name}");
            plan.events.push(Event::normal("MissingJob", message));
            return false;
        };
        if job.finished() {
            let condition = if job.has("Complete") { "Complete" } else { "Failed" };
            let message = format!("Saw completed job: {name}, condition: {condition}");
            plan.events.push(Event::normal("SawCompletedJob", message));
            return false;
        }
        running.push((*job).clone());
        true
    });
    plan.events.extend(unexpected(jobs, &active));
    plan.status.active = (!active.is_empty()).then_some(active);
    let ends =
        jobs.iter().filter(|job| job.has("Complete")).filter_map(|job| job.status.completion_time.clone());
    plan.status.last_successful_time = ends.chain(plan.status.last_successful_time.take()).max();
    running
}

/// The events about unfinished jobs that are not in `status.active`, for example of `kubectl create job --from`.
fn unexpected(jobs: &[Arc<Job>], active: &[ObjectReference]) -> Vec<Event> {
    let known: HashSet<&str> = active.iter().map(uid_of).collect();
    let jobs = jobs.iter().filter(|job| !job.finished() && !known.contains(job.uid()));
    let event = |job: &Arc<Job>| {
        let message = format!("Saw a job that the controller did not create or forgot: {}", job.name());
        Event::warning("UnexpectedJob", message)
    };
    jobs.take(MAX_UNEXPECTED).map(event).collect()
}

/// Plans the deletion of finished jobs above the history limit, oldest first.
fn clean(cron_job: &CronJob, jobs: &[Arc<Job>], succeeded: bool, plan: &mut Plan) {
    let spec = &cron_job.spec;
    let limit = if succeeded { spec.successful_jobs_history_limit } else { spec.failed_jobs_history_limit };
    let Some(limit) = limit.and_then(|limit| usize::try_from(limit).ok()) else { return };
    let condition = if succeeded { "Complete" } else { "Failed" };
    let mut finished: Vec<_> =
        jobs.iter().filter(|job| job.has(condition) && !job.is_being_deleted()).cloned().collect();
    let order = |job: &Job| (job.status.start_time.clone(), job.name().to_owned());
    finished.sort_by_key(|job| order(job));
    finished.truncate(finished.len().saturating_sub(limit));
    plan.delete.extend(finished);
}

fn schedule(cron_job: &CronJob, running: Vec<Arc<Job>>, now: Timestamp, plan: &mut Plan) {
    let spec = &cron_job.spec;
    let parsed: Result<Schedule, _> = spec.schedule.parse();
    let zone = spec.time_zone.as_deref().map_or_else(|| Ok(TimeZone::utc()), str::parse);
    let (schedule, zone) = match (parsed, zone) {
        (Ok(schedule), Ok(zone)) => (schedule, zone),
        (Err(error), _) => {
            let message = format!("unparseable schedule: {:?} : {error}", spec.schedule);
            return plan.events.push(Event::warning("UnparseableSchedule", message));
        }
        (_, Err(error)) => return plan.events.push(Event::warning("UnknownTimeZone", error.to_string())),
    };
    plan.events.extend(unsupported_zone(&spec.schedule));
    let deadline = spec.starting_deadline_seconds.map(SignedDuration::from_secs);
    let mut from = last_time(cron_job, now);
    if let Some(start) = deadline.and_then(|deadline| now.checked_sub(deadline).ok()) {
        from = from.max(start);
    }
    let Times { missed, many, next } = times(&schedule, &zone, from, now);
    plan.again = next.and_then(|next| until(next, now));
    if missed.is_none() && next.is_none() {
        // Upstream's error text.
        let why = "time difference between two schedules is less than 1 second";
        let message = format!("invalid schedule: {} : {why}", spec.schedule);
        return plan.events.push(Event::warning("InvalidSchedule", message));
    }
    if many && deadline.is_none() {
        let message =
            "too many missed start times. Set or decrease .spec.startingDeadlineSeconds or check clock skew";
        plan.events.push(Event::warning("TooManyMissedTimes", message.to_owned()));
    }
    let Some(missed) = missed else { return };
    let late = deadline.and_then(|deadline| missed.checked_add(deadline).ok()).is_some_and(|end| end < now);
    if late {
        let time = missed.strftime("%a, %d %b %Y %H:%M:%S +0000");
        let message = format!("Missed scheduled time to start a job: {time}");
        return plan.events.push(Event::warning("MissSchedule", message));
    }
    let name = job_name(cron_job, missed);
    if running.iter().any(|job| job.name() == name) {
        return;
    }
    match spec.concurrency_policy.as_deref() {
        Some("Forbid") if !running.is_empty() => {
            let message =
                "Not starting job because prior execution is running and concurrency policy is Forbid";
            return plan.events.push(Event::normal("JobAlreadyActive", message.to_owned()));
        }
        Some("Replace") => {
            plan.status.active = None;
            plan.delete.extend(running.into_iter().filter(|job| !job.is_being_deleted()));
        }
        Some(_) | None => {}
    }
    plan.create = Some(missed);
}

/// The event about a schedule with a time zone, which only cron jobs of former versions can have.
fn unsupported_zone(schedule: &str) -> Option<Event> {
    let message = || {
        format!(
            "CRON_TZ or TZ used in schedule {schedule:?} is not officially supported, see \
             https://kubernetes.io/docs/concepts/workloads/controllers/cron-jobs/ for more details"
        )
    };
    schedule.contains("TZ").then(|| Event::warning("UnsupportedSchedule", message()))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn now() -> Timestamp {
        "2026-01-01T12:10:30Z".parse().unwrap()
    }

    fn cron_job(spec: Value, status: Value) -> CronJob {
        let mut whole =
            json!({"schedule": "*/5 * * * *", "successfulJobsHistoryLimit": 1, "failedJobsHistoryLimit": 0});
        whole.as_object_mut().unwrap().extend(spec.as_object().unwrap().clone());
        serde_json::from_value(json!({"metadata": {"name": "c", "creationTimestamp": "2026-01-01T12:00:00Z"},
            "spec": whole, "status": status}))
        .unwrap()
    }

    fn job(name: &str, condition: &str) -> Arc<Job> {
        let conditions =
            if condition.is_empty() { json!([]) } else { json!([{"type": condition, "status": "True"}]) };
        let job = json!({"metadata": {"name": name, "uid": name}, "status": {"conditions": conditions,
            "startTime": "2026-01-01T12:00:00Z", "completionTime": "2026-01-01T12:01:00Z"}});
        Arc::new(serde_json::from_value(job).unwrap())
    }

    fn active(name: &str) -> Value {
        json!({"active": [{"name": name, "uid": name}], "lastScheduleTime": "2026-01-01T12:05:00Z"})
    }

    fn summary(plan: &Plan) -> String {
        let names: Vec<&str> = plan.delete.iter().map(|job| job.name()).collect();
        let create = plan.create.map(|time| time.to_string()).unwrap_or_default();
        format!("delete[{}] create[{create}]", names.join(","))
    }

    #[test]
    fn the_most_recent_time_gets_a_job_and_the_next_one_is_awaited() {
        let plan = plan(&cron_job(json!({}), json!({})), &[], now());
        assert_eq!(summary(&plan), "delete[] create[2026-01-01T12:10:00Z]");
        assert!(plan.again.is_some_and(|wait| wait > Duration::from_secs(269)));
    }

    #[test]
    fn a_schedule_that_never_fires_has_no_job_and_no_timer() {
        for spec in [
            json!({"schedule": "0 0 30 2 *"}),
            json!({"schedule": "0 0 30 2 *", "startingDeadlineSeconds": 100}),
        ] {
            let plan = plan(&cron_job(spec.clone(), json!({})), &[], now());
            assert_eq!(summary(&plan), "delete[] create[]", "for {spec}");
            let reasons: Vec<_> = plan.events.iter().map(|event| event.reason).collect();
            assert_eq!((plan.again, reasons), (None, vec!["InvalidSchedule"]), "for {spec}");
        }
    }

    #[test]
    fn a_schedule_with_a_time_zone_follows_it_and_is_reported() {
        let spec = json!({"schedule": "TZ=Asia/Kolkata 40 17 * * *", "timeZone": "America/New_York"});
        let plan = plan(&cron_job(spec, json!({})), &[], now());
        assert_eq!(summary(&plan), "delete[] create[2026-01-01T12:10:00Z]");
        let reasons: Vec<_> = plan.events.iter().map(|event| event.reason).collect();
        assert_eq!(reasons, ["UnsupportedSchedule"]);
    }

    #[test]
    fn suspension_the_deadline_and_the_last_time_prevent_a_job() {
        let last = json!({"lastScheduleTime": "2026-01-01T12:10:00Z"});
        for (spec, status) in [
            (json!({"suspend": true}), json!({})),
            (json!({"startingDeadlineSeconds": 10}), json!({})),
            (json!({"schedule": "* *"}), json!({})),
            (json!({}), last),
        ] {
            let plan = plan(&cron_job(spec.clone(), status), &[], now());
            assert_eq!(summary(&plan), "delete[] create[]", "for {spec}");
        }
    }

    #[test]
    fn the_concurrency_policy_decides_while_a_job_runs() {
        let cases = [
            ("Allow", "delete[] create[2026-01-01T12:10:00Z]", 1),
            ("Forbid", "delete[] create[]", 1),
            ("Replace", "delete[x] create[2026-01-01T12:10:00Z]", 0),
        ];
        for (policy, expect, left) in cases {
            let cron_job = cron_job(json!({"concurrencyPolicy": policy}), active("x"));
            let plan = plan(&cron_job, &[job("x", "")], now());
            assert_eq!(summary(&plan), expect, "for {policy}");
            assert_eq!(plan.status.active.map_or(0, |list| list.len()), left, "for {policy}");
        }
    }

    #[test]
    fn ended_jobs_leave_the_status_and_old_ones_are_deleted() {
        let jobs = [job("a", "Complete"), job("b", "Complete"), job("c", "Failed")];
        let plan = plan(&cron_job(json!({"suspend": true}), active("b")), &jobs, now());
        assert_eq!(summary(&plan), "delete[a,c] create[]");
        assert_eq!(plan.status.active, None);
        assert_eq!(plan.status.last_successful_time.unwrap().0.to_string(), "2026-01-01T12:01:00Z");
    }

    #[test]
    fn a_job_that_the_controller_did_not_create_is_reported() {
        let plan =
            plan(&cron_job(json!({"suspend": true}), active("a")), &[job("a", ""), job("manual", "")], now());
        let reasons: Vec<_> = plan.events.iter().map(|event| event.reason).collect();
        assert_eq!(reasons, ["UnexpectedJob"]);
        let many: Vec<_> =
            (0..MAX_UNEXPECTED + 5).map(|number| job(&format!("manual-{number}"), "")).collect();
        let plan = super::plan(&cron_job(json!({"suspend": true}), json!({})), &many, now());
        assert_eq!(plan.events.len(), MAX_UNEXPECTED);
    }

    #[test]
    fn a_changed_schedule_waits_for_its_next_time() {
        let last = || json!({"lastScheduleTime": "2026-01-01T03:00:00Z"});
        let noon = cron_job(json!({"schedule": "0 12 * * *"}), last());
        assert_eq!(summary(&plan(&noon, &[], now())), "delete[] create[2026-01-01T12:00:00Z]");
        let wait = until_next(&noon, now()).unwrap();
        assert!((85_000..86_400).contains(&wait.as_secs()), "{wait:?}");
        assert_eq!(until_next(&cron_job(json!({"schedule": "* *"}), last()), now()), None);
    }

    #[test]
    fn active_jobs_that_the_cache_does_not_have_are_named() {
        let status = json!({"active": [{"name": "a", "uid": "a"}, {"name": "b", "uid": "b"}]});
        let missing = missing(&cron_job(json!({}), status), &[job("a", "")]);
        let names: Vec<_> = missing.iter().filter_map(|reference| reference.name.as_deref()).collect();
        assert_eq!(names, ["b"]);
    }
}

//! Jobs and cron jobs.

use jiff::Timestamp;
use serde_json::Value;

use super::age::{age, span};
use super::workload::{CONTAINERS, IMAGES, SELECTOR, template};
use super::{AGE, Column, NAME, age_cell, integer, items, length, name, or_none, string};

pub(crate) const JOB: &[Column] = &[
    NAME,
    string("Status", "State of the job."),
    string("Completions", "Number of pods that succeeded, and number of pods that must succeed."),
    string("Duration", "Time from the job's start to its completion."),
    AGE,
    CONTAINERS,
    IMAGES,
    SELECTOR,
];

pub(crate) fn job(object: &Value, now: Timestamp) -> Vec<Value> {
    let (spec, status) = (&object["spec"], &object["status"]);
    let succeeded = status["succeeded"].as_i64().unwrap_or(0);
    let completions = match (spec["completions"].as_i64(), spec["parallelism"].as_i64().unwrap_or(0)) {
        (Some(completions), _) => format!("{succeeded}/{completions}"),
        (None, parallelism @ 2..) => format!("{succeeded}/1 of {parallelism}"),
        (None, _) => format!("{succeeded}/1"),
    };
    let mut cells = vec![
        name(object),
        state(object).into(),
        completions.into(),
        duration(status, now).into(),
        age_cell(object, now),
    ];
    cells.extend(template(spec));
    cells
}

fn state(job: &Value) -> &'static str {
    let has = |name: &str| {
        let mut conditions = items(&job["status"]["conditions"]);
        conditions.any(|condition| condition["type"] == name && condition["status"] == "True")
    };
    if has("Complete") {
        "Complete"
    } else if has("Failed") {
        "Failed"
    } else if job["metadata"]["deletionTimestamp"].is_string() {
        "Terminating"
    } else if has("Suspended") {
        "Suspended"
    } else if has("FailureTarget") {
        "FailureTarget"
    } else if has("SuccessCriteriaMet") {
        "SuccessCriteriaMet"
    } else {
        "Running"
    }
}

fn duration(status: &Value, now: Timestamp) -> String {
    let time = |name: &str| status[name].as_str().and_then(|text| text.parse::<Timestamp>().ok());
    let Some(start) = time("startTime") else { return String::new() };
    span(time("completionTime").unwrap_or(now).as_second() - start.as_second())
}

pub(crate) const CRON_JOB: &[Column] = &[
    NAME,
    string("Schedule", "Times of the jobs, in the format of cron."),
    string("Timezone", "Time zone of the schedule."),
    Column { r#type: "boolean", ..string("Suspend", "Whether the creation of jobs is suspended.") },
    integer("Active", "Jobs that are running."),
    string("Last Schedule", "Time since the last job was created."),
    AGE,
    CONTAINERS,
    IMAGES,
    SELECTOR,
];

pub(crate) fn cron_job(object: &Value, now: Timestamp) -> Vec<Value> {
    let (spec, status) = (&object["spec"], &object["status"]);
    let last = match &status["lastScheduleTime"] {
        Value::Null => "<none>".to_owned(),
        time => age(time, now),
    };
    let suspend = match spec["suspend"].as_bool() {
        Some(true) => "True",
        Some(false) => "False",
        None => "<unset>",
    };
    let mut cells = vec![
        name(object),
        spec["schedule"].clone(),
        or_none(&spec["timeZone"]),
        suspend.into(),
        length(&status["active"]),
        last.into(),
        age_cell(object, now),
    ];
    cells.extend(template(&spec["jobTemplate"]["spec"]));
    cells
}

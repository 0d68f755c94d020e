//! Jobs and cron jobs.

use serde_json::{Map, Value};

use super::{child, child_of, each, fill, fill_absent, pod, present};

/// Sets the defaults of a Job.
pub(crate) fn job(object: &mut Value) {
    let Some(spec) = child(object, "spec") else { return };
    job_spec(spec);
    let labels = spec.get("template").map(|template| template["metadata"]["labels"].clone());
    if let (Some(labels @ Value::Object(_)), Some(metadata)) = (labels, child(object, "metadata"))
        && metadata.get("labels").and_then(Value::as_object).is_none_or(Map::is_empty)
    {
        metadata.insert("labels".to_owned(), labels);
    }
    child(object, "status");
}

/// Sets the defaults of a CronJob. In the job template, only the pod template and the policies get defaults here. The
/// other fields get their defaults when a job is created.
pub(crate) fn cron_job(object: &mut Value) {
    let Some(spec) = child(object, "spec") else { return };
    fill(spec, "concurrencyPolicy", "Allow");
    fill(spec, "suspend", false);
    fill(spec, "successfulJobsHistoryLimit", 3);
    fill(spec, "failedJobsHistoryLimit", 1);
    if let Some(template) = child_of(spec, "jobTemplate") {
        child_of(template, "metadata");
        if let Some(job) = child_of(template, "spec") {
            policies(job);
            if let Some(template) = child_of(job, "template") {
                pod::template(template);
            }
        }
    }
    child(object, "status");
}

fn job_spec(spec: &mut Map<String, Value>) {
    let absent = |spec: &Map<String, Value>, name: &str| spec.get(name).is_none_or(Value::is_null);
    if absent(spec, "completions") && absent(spec, "parallelism") {
        fill(spec, "completions", 1);
    }
    fill(spec, "parallelism", 1);
    let limit = if absent(spec, "backoffLimitPerIndex") { 6 } else { i32::MAX };
    fill(spec, "backoffLimit", limit);
    fill_absent(spec, "completionMode", "NonIndexed");
    fill(spec, "suspend", false);
    let replacement = if absent(spec, "podFailurePolicy") { "TerminatingOrFailed" } else { "Failed" };
    fill_absent(spec, "podReplacementPolicy", replacement);
    fill(spec, "manualSelector", false);
    policies(spec);
    if let Some(template) = child_of(spec, "template") {
        pod::template(template);
    }
}

fn policies(spec: &mut Map<String, Value>) {
    if let Some(policy) = present(spec, "podFailurePolicy") {
        for rule in each(policy, "rules") {
            for pattern in each(rule, "onPodConditions") {
                fill(pattern, "status", "True");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_empty_completion_mode_gets_no_default() {
        for (spec, expect) in [
            (json!({}), "NonIndexed"),
            (json!({"completionMode": null}), "NonIndexed"),
            (json!({"completionMode": ""}), ""),
        ] {
            let mut object = json!({"spec": spec});
            job(&mut object);
            assert_eq!(object["spec"]["completionMode"], expect);
        }
    }
}

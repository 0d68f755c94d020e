//! Workloads and groups of pods.

use jiff::Timestamp;
use serde_json::Value;

use super::{AGE, Column, NAME, age_cell, items, name, or_none, string};

pub(crate) const WORKLOAD: &[Column] = &[NAME, AGE];

pub(crate) fn workload(object: &Value, now: Timestamp) -> Vec<Value> {
    vec![name(object), age_cell(object, now)]
}

pub(crate) const POD_GROUP: &[Column] = &[
    NAME,
    string("Policy", "Scheduling policy of the pods."),
    string("Workload", "The workload that has the template of the group."),
    string("Status", "Whether the group is scheduled."),
    AGE,
];

pub(crate) fn pod_group(object: &Value, now: Timestamp) -> Vec<Value> {
    let spec = &object["spec"];
    let policy = if spec["schedulingPolicy"]["gang"].is_null() { "Basic" } else { "Gang" };
    let workload = &spec["podGroupTemplateRef"]["workload"]["workloadName"];
    vec![name(object), policy.into(), or_none(workload), status(object).into(), age_cell(object, now)]
}

/// The cell of the column `Status`. A disruption takes precedence over the state of scheduling.
fn status(object: &Value) -> &str {
    let conditions = &object["status"]["conditions"];
    let condition = |type_: &str| items(conditions).rfind(|one| one["type"] == type_);
    if let Some(target) = condition("DisruptionTarget") {
        return target["reason"].as_str().unwrap_or_default();
    }
    match condition("PodGroupScheduled") {
        None => "Pending",
        Some(scheduled) if scheduled["status"] == "True" => "Scheduled",
        Some(_) => "Unschedulable",
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_status_follows_the_conditions() {
        let of = |conditions: Value| {
            let reference = json!({"workload": {"workloadName": "w", "podGroupTemplateName": "t"}});
            let spec =
                json!({"schedulingPolicy": {"gang": {"minCount": 2}}, "podGroupTemplateRef": reference});
            let object =
                json!({"metadata": {"name": "g"}, "spec": spec, "status": {"conditions": conditions}});
            pod_group(&object, Timestamp::UNIX_EPOCH)[..4].to_vec()
        };
        assert_eq!(of(json!(null)), ["g", "Gang", "w", "Pending"]);
        let scheduled = |status: &str| json!({"type": "PodGroupScheduled", "status": status});
        assert_eq!(of(json!([scheduled("True")]))[3], "Scheduled");
        assert_eq!(of(json!([scheduled("False")]))[3], "Unschedulable");
        let target = json!({"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"});
        assert_eq!(of(json!([target, scheduled("True")]))[3], "PreemptionByScheduler");
        let basic = json!({"metadata": {"name": "g"}, "spec": {"schedulingPolicy": {"basic": {}}}});
        assert_eq!(pod_group(&basic, Timestamp::UNIX_EPOCH)[1..3], ["Basic", "<none>"]);
    }
}

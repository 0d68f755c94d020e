//! Pod disruption budgets.

use serde_json::Value;

use super::{Causes, Path, condition, selector, workload};

pub(crate) fn budget(causes: &mut Causes, object: &Value, _old: Option<&Value>) {
    let (path, spec) = (Path::root("spec"), &object["spec"]);
    let (least, most) = (&spec["minAvailable"], &spec["maxUnavailable"]);
    if !least.is_null() && !most.is_null() {
        causes.invalid(&path, spec, "minAvailable and maxUnavailable cannot be both set");
    }
    for (name, value) in [("minAvailable", least), ("maxUnavailable", most)] {
        workload::int_or_percent(causes, &path.field(name), value);
        if workload::percent(value).is_some_and(|percent| percent > 100) {
            causes.invalid(&path.field(name), value, "must not be greater than 100%");
        }
    }
    let policy = &spec["unhealthyPodEvictionPolicy"];
    if !policy.is_null() {
        let known = ["AlwaysAllow", "IfHealthyBudget"];
        if !known.iter().any(|known| policy == known) {
            causes.unsupported(&path.field("unhealthyPodEvictionPolicy"), policy, &known);
        }
    }
    if !spec["selector"].is_null() {
        selector::label_selector(causes, &path.field("selector"), &spec["selector"]);
    }
}

pub(super) fn status(causes: &mut Causes, status: &Value) {
    let path = Path::root("status");
    condition::conditions(causes, &path.field("conditions"), &status["conditions"]);
    for name in ["disruptionsAllowed", "currentHealthy", "desiredHealthy", "expectedPods"] {
        causes.not_negative(&path.field(name), &status[name]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::validate::Cause;
    use serde_json::json;

    fn said(spec: Value) -> Vec<String> {
        let mut causes = Causes::default();
        budget(&mut causes, &json!({"spec": spec}), None);
        let text = |cause: Cause| format!("{}: {}", cause.field, cause.message);
        causes.into_list().into_iter().map(text).collect()
    }

    #[test]
    fn a_budget_is_one_number_or_percentage() {
        let selector = json!({"matchLabels": {"a": "b"}});
        for spec in [
            json!({}),
            json!({"minAvailable": 0, "selector": selector}),
            json!({"minAvailable": "100%", "selector": {}}),
            json!({"maxUnavailable": 3, "unhealthyPodEvictionPolicy": "AlwaysAllow"}),
        ] {
            assert_eq!(said(spec.clone()), Vec::<String>::new(), "{spec}");
        }
        for (spec, expect) in [
            (
                json!({"minAvailable": -1}),
                "spec.minAvailable: Invalid value: -1: must be greater than or equal to 0",
            ),
            (
                json!({"maxUnavailable": "101%"}),
                "spec.maxUnavailable: Invalid value: \"101%\": must not be greater",
            ),
            (
                json!({"maxUnavailable": "half"}),
                "spec.maxUnavailable: Invalid value: \"half\": a valid percent string",
            ),
            (json!({"minAvailable": 1, "maxUnavailable": 1}), "cannot be both set"),
            (json!({"unhealthyPodEvictionPolicy": "Never"}), "\"AlwaysAllow\", \"IfHealthyBudget\""),
            (json!({"selector": {"matchLabels": {"a": "b c"}}}), "spec.selector.matchLabels"),
        ] {
            let causes = said(spec.clone());
            assert!(causes.len() == 1 && causes[0].contains(expect), "{spec}: {causes:?}");
        }
    }

    #[test]
    fn a_status_counts_and_has_conditions() {
        let said = |object: Value| {
            let mut causes = Causes::default();
            status(&mut causes, &object);
            causes.into_list().into_iter().map(|cause| cause.field).collect::<Vec<_>>()
        };
        let condition = json!({"type": "DisruptionAllowed", "status": "True", "reason": "SufficientPods",
            "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"});
        assert_eq!(said(json!({"disruptionsAllowed": 1, "conditions": [condition]})), Vec::<String>::new());
        let wrong = json!({"disruptionsAllowed": -1, "conditions": [condition, condition]});
        assert_eq!(said(wrong), ["status.conditions[1].type", "status.disruptionsAllowed"]);
    }
}

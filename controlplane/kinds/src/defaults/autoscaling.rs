//! Horizontal pod autoscalers. Source: `pkg/apis/autoscaling/v2/defaults.go`.

use serde_json::{Map, Value, json};

use super::{child, child_of, fill, fill_absent, present};

/// Sets the defaults of an autoscaler of v1. Its metrics get their default when it is converted to v2.
pub(crate) fn autoscaler_v1(object: &mut Value) {
    if let Some(spec) = child(object, "spec") {
        fill(spec, "minReplicas", 1);
    }
}

/// Sets the defaults of an autoscaler of v2.
pub(crate) fn autoscaler(object: &mut Value) {
    let Some(spec) = child(object, "spec") else { return };
    fill(spec, "minReplicas", 1);
    if spec.get("metrics").and_then(Value::as_array).is_none_or(Vec::is_empty) {
        let target = json!({"type": "Utilization", "averageUtilization": 80});
        let metric = json!({"type": "Resource", "resource": {"name": "cpu", "target": target}});
        spec.insert("metrics".to_owned(), json!([metric]));
    }
    let Some(behavior) = present(spec, "behavior") else { return };
    let (pods, percent) = (
        json!({"type": "Pods", "value": 4, "periodSeconds": 15}),
        json!({"type": "Percent", "value": 100, "periodSeconds": 15}),
    );
    if let Some(up) = child_of(behavior, "scaleUp") {
        fill(up, "stabilizationWindowSeconds", 0);
        rules(up, json!([pods, percent]));
    }
    if let Some(down) = child_of(behavior, "scaleDown") {
        rules(down, json!([percent]));
    }
}

fn rules(rules: &mut Map<String, Value>, policies: Value) {
    fill_absent(rules, "selectPolicy", "Max");
    // An empty list is kept, for validation to refuse, as upstream does.
    fill_absent(rules, "policies", policies);
}

//! Horizontal pod autoscalers. Source: `pkg/apis/autoscaling/v2/defaults.go`.

use serde_json::{Map, Value, json};

use super::{child, child_of, fill, fill_absent, present};

/// The annotation that holds the metrics of an autoscaler in v1, except the utilization of CPU.
const METRICS: &str = "autoscaling.alpha.kubernetes.io/metrics";
/// Target utilization of CPU of an autoscaler without metrics, in percent.
const UTILIZATION: i64 = 80;

/// Sets the defaults of an autoscaler of v1. An autoscaler with metrics in its annotation gets no target utilization.
pub(crate) fn autoscaler_v1(object: &mut Value) {
    let has_metrics = object["metadata"]["annotations"][METRICS].is_string();
    let Some(spec) = child(object, "spec") else { return };
    fill(spec, "minReplicas", 1);
    if !has_metrics {
        fill_absent(spec, "targetCPUUtilizationPercentage", UTILIZATION);
    }
}

/// Sets the defaults of an autoscaler of v2.
pub(crate) fn autoscaler(object: &mut Value) {
    let Some(spec) = child(object, "spec") else { return };
    fill(spec, "minReplicas", 1);
    if spec.get("metrics").and_then(Value::as_array).is_none_or(Vec::is_empty) {
        let target = json!({"type": "Utilization", "averageUtilization": UTILIZATION});
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
    // As upstream, an empty list is kept. Validation refuses it.
    fill_absent(rules, "policies", policies);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_autoscaler_without_metrics_has_a_target_utilization() {
        let target = |annotations: Value, spec: Value| {
            let mut object = json!({"metadata": {"annotations": annotations}, "spec": spec});
            autoscaler_v1(&mut object);
            object["spec"]["targetCPUUtilizationPercentage"].clone()
        };
        assert_eq!(target(Value::Null, json!({})), 80);
        assert_eq!(target(Value::Null, json!({"targetCPUUtilizationPercentage": 50})), 50);
        assert_eq!(target(json!({METRICS: "[]"}), json!({})), Value::Null);
    }
}

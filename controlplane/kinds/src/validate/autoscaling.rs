//! Horizontal pod autoscalers of v2. Source: `pkg/apis/autoscaling/validation/validation.go`.

use coracle_values::Quantity;
use serde_json::Value;

use super::{Causes, Path, format, items, resources, text};

/// Maximum of a stabilization window.
const MAX_WINDOW_SECONDS: i64 = 3600;
/// Maximum of the period of a scaling policy.
const MAX_PERIOD_SECONDS: i64 = 1800;
/// The kind of the core group that has a scale.
const CORE_SCALE: &str = "ReplicationController";
/// Types of metrics, and the field of each.
const SOURCES: [(&str, &str); 5] = [
    ("ContainerResource", "containerResource"),
    ("External", "external"),
    ("Object", "object"),
    ("Pods", "pods"),
    ("Resource", "resource"),
];

/// Checks an autoscaler of v2.
pub(crate) fn autoscaler(causes: &mut Causes, object: &Value, _old: Option<&Value>) {
    let (path, spec) = (Path::root("spec"), &object["spec"]);
    let (fewest, most) = (spec["minReplicas"].as_i64(), spec["maxReplicas"].as_i64().unwrap_or(0));
    if fewest.is_some_and(|fewest| fewest < 1) {
        causes.invalid(
            &path.field("minReplicas"),
            &spec["minReplicas"],
            "must be greater than or equal to 1",
        );
    }
    let here = path.field("maxReplicas");
    match most {
        0 => causes.required(&here, "must be set and greater than 0"),
        ..0 => causes.invalid(&here, &spec["maxReplicas"], "must be greater than or equal to 1"),
        _ => {}
    }
    if fewest.is_some_and(|fewest| most < fewest) {
        causes.invalid(&here, &spec["maxReplicas"], "must be greater than or equal to `minReplicas`");
    }
    let target = &spec["scaleTargetRef"];
    reference(causes, &path.field("scaleTargetRef"), target);
    if !text(&target["apiVersion"]).contains('/') && target["kind"] != CORE_SCALE {
        let here = path.field("scaleTargetRef").field("apiVersion");
        causes.invalid(&here, &text(&target["apiVersion"]).into(), "apiVersion must specify API group");
    }
    for (index, metric) in items(&spec["metrics"]) {
        self::metric(causes, &path.field("metrics").index(index), metric);
    }
    let may_be_zero =
        items(&spec["metrics"]).any(|(_, metric)| matches!(text(&metric["type"]), "Object" | "External"));
    if fewest == Some(0) && !may_be_zero {
        let detail =
            "must specify at least one Object or External metric to support scaling to zero replicas";
        causes.forbidden(&path.field("metrics"), detail);
    }
    for rules in ["scaleUp", "scaleDown"] {
        if spec["behavior"][rules].is_object() {
            scaling_rules(causes, &path.field("behavior").field(rules), &spec["behavior"][rules]);
        }
    }
}

/// Checks the status of an autoscaler.
pub(super) fn status(causes: &mut Causes, status: &Value) {
    for field in ["currentReplicas", "desiredReplicas"] {
        causes.not_negative(&Path::root("status").field(field), &status[field]);
    }
}

/// Checks a reference. Its kind may be of the core group, such as the service that a metric describes.
fn reference(causes: &mut Causes, path: &Path, reference: &Value) {
    for field in ["kind", "name"] {
        let value = text(&reference[field]);
        if value.is_empty() {
            causes.required(&path.field(field), "");
        } else {
            causes.format(&path.field(field), value, format::path_segment(value));
        }
    }
    let version = text(&reference["apiVersion"]);
    if version.matches('/').count() > 1 {
        let detail = format!("unexpected GroupVersion string: {version}");
        causes.invalid(&path.field("apiVersion"), &version.into(), &detail);
    }
}

fn metric(causes: &mut Causes, path: &Path, metric: &Value) {
    let kind = text(&metric["type"]);
    if kind.is_empty() {
        causes.required(&path.field("type"), "must specify a metric source type");
    }
    let field = SOURCES.iter().find(|(name, _)| *name == kind).map(|(_, field)| *field);
    match field {
        None => causes.unsupported(&path.field("type"), &metric["type"], &SOURCES.map(|(name, _)| name)),
        Some(field) if metric[field].is_null() => {
            causes.required(&path.field(field), "must populate information for the given metric source");
        }
        Some(_) => {}
    }
    let present: Vec<&str> = ["object", "external", "pods", "resource", "containerResource"]
        .into_iter()
        .filter(|field| !metric[*field].is_null())
        .collect();
    if let Some(first) = present.first() {
        source(causes, &path.field(first), first, &metric[*first]);
    }
    if present.len() != 1 {
        for other in present.iter().filter(|other| Some(**other) != field) {
            causes.forbidden(&path.field(other), "must populate the given metric source only");
        }
    }
}

fn source(causes: &mut Causes, path: &Path, kind: &str, source: &Value) {
    let target = &source["target"];
    let has = |field: &str| !target[field].is_null();
    match kind {
        "object" | "external" | "pods" => {
            if kind == "object" {
                reference(causes, &path.field("describedObject"), &source["describedObject"]);
            }
            let (here, name) = (path.field("metric").field("name"), text(&source["metric"]["name"]));
            if name.is_empty() {
                causes.required(&here, "must specify a metric name");
            } else {
                causes.format(&here, name, format::path_segment(name));
            }
        }
        _ => resource_source(causes, path, kind, source),
    }
    let path = path.field("target");
    self::target(causes, &path, target);
    let (average, value) = (has("averageValue"), has("value"));
    match kind {
        "object" if !value && !average => {
            causes.required(&path.field("averageValue"), "must set either a target value or averageValue");
        }
        "external" if !value && !average => {
            let detail = "must set either a target value for metric or a per-pod target";
            causes.required(&path.field("averageValue"), detail);
        }
        "external" if value && average => {
            let detail = "may not set both a target value for metric and a per-pod target";
            causes.forbidden(&path.field("value"), detail);
        }
        "pods" if !average => {
            causes.required(&path.field("averageValue"), "must specify a positive target averageValue");
        }
        "resource" | "containerResource" => match (has("averageUtilization"), average) {
            (false, false) => {
                let detail = "must set either a target raw value or a target utilization";
                causes.required(&path.field("averageUtilization"), detail);
            }
            (true, true) => {
                let detail = "may not set both a target raw value and a target utilization";
                causes.forbidden(&path.field("averageValue"), detail);
            }
            _ => {}
        },
        _ => {}
    }
}

/// Checks the resource of a metric, and the container if the metric is of one container.
fn resource_source(causes: &mut Causes, path: &Path, kind: &str, source: &Value) {
    let has_container = kind == "containerResource";
    match text(&source["name"]) {
        "" => causes.required(&path.field("name"), "must specify a resource name"),
        name if has_container => resources::container_name(causes, &path.field("name"), name),
        _ => {}
    }
    if has_container {
        match text(&source["container"]) {
            "" => causes.required(&path.field("container"), "must specify a container"),
            name => causes.format(&path.field("container"), name, format::dns1123_label(name)),
        }
    }
}

fn target(causes: &mut Causes, path: &Path, target: &Value) {
    let kind = &target["type"];
    if text(kind).is_empty() {
        causes.required(&path.field("type"), "must specify a metric target type");
    }
    if !["Utilization", "Value", "AverageValue"].contains(&text(kind)) {
        causes.invalid(&path.field("type"), kind, "must be either Utilization, Value, or AverageValue");
    }
    for field in ["value", "averageValue"] {
        let amount = target[field].as_str().and_then(|amount| Quantity::parse(amount).ok());
        if amount.is_some_and(|amount| amount.signum() != 1) {
            causes.invalid(&path.field(field), &target[field], "must be positive");
        }
    }
    if target["averageUtilization"].as_i64().is_some_and(|percentage| percentage < 1) {
        let here = path.field("averageUtilization");
        causes.invalid(&here, &target["averageUtilization"], "must be greater than 0");
    }
}

fn scaling_rules(causes: &mut Causes, path: &Path, rules: &Value) {
    let (here, window) = (path.field("stabilizationWindowSeconds"), &rules["stabilizationWindowSeconds"]);
    match window.as_i64().unwrap_or(0) {
        ..0 => causes.invalid(&here, window, "must be greater than or equal to zero"),
        seconds if seconds > MAX_WINDOW_SECONDS => {
            causes.invalid(&here, window, &format!("must be less than or equal to {MAX_WINDOW_SECONDS}"));
        }
        _ => {}
    }
    let select = &rules["selectPolicy"];
    if !select.is_null() && !["Disabled", "Max", "Min"].contains(&text(select)) {
        causes.unsupported(&path.field("selectPolicy"), select, &["Disabled", "Max", "Min"]);
    }
    let policies = path.field("policies");
    if items(&rules["policies"]).next().is_none() {
        causes.required(&policies, "must specify at least one Policy");
    }
    for (index, policy) in items(&rules["policies"]) {
        scaling_policy(causes, &policies.index(index), policy);
    }
    let tolerance = rules["tolerance"].as_str().and_then(|amount| Quantity::parse(amount).ok());
    if tolerance.is_some_and(|tolerance| tolerance.signum() < 0) {
        causes.invalid(&path.field("tolerance"), &rules["tolerance"], "must be greater than or equal to 0");
    }
}

fn scaling_policy(causes: &mut Causes, path: &Path, policy: &Value) {
    if !["Pods", "Percent"].contains(&text(&policy["type"])) {
        causes.unsupported(&path.field("type"), &policy["type"], &["Percent", "Pods"]);
    }
    for field in ["value", "periodSeconds"] {
        if policy[field].as_i64().unwrap_or(0) <= 0 {
            causes.invalid(&path.field(field), &policy[field], "must be greater than zero");
        }
    }
    if policy["periodSeconds"].as_i64().is_some_and(|seconds| seconds > MAX_PERIOD_SECONDS) {
        let detail = format!("must be less than or equal to {MAX_PERIOD_SECONDS}");
        causes.invalid(&path.field("periodSeconds"), &policy["periodSeconds"], &detail);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn problems(metric: Value) -> Vec<String> {
        let mut causes = Causes::default();
        let object = json!({"spec": {"maxReplicas": 3, "minReplicas": 1, "metrics": [metric],
            "scaleTargetRef": {"kind": "Deployment", "name": "d", "apiVersion": "apps/v1"}}});
        autoscaler(&mut causes, &object, None);
        causes.into_list().into_iter().map(|cause| cause.field.replace("spec.metrics[0]", "m")).collect()
    }

    #[test]
    fn zero_replicas_need_an_external_metric() {
        let fields = |kind: &str| {
            let spec = json!({"maxReplicas": 3, "minReplicas": 0, "metrics": [{"type": kind}],
                "scaleTargetRef": {"kind": "Deployment", "name": "d", "apiVersion": "apps/v1"}});
            let mut causes = Causes::default();
            autoscaler(&mut causes, &json!({"spec": spec}), None);
            let found = causes.into_list().into_iter().map(|cause| cause.field);
            found.filter(|field| field == "spec.metrics").count()
        };
        assert_eq!((fields("Pods"), fields("Object"), fields("External")), (1, 0, 0));
    }

    #[test]
    fn a_metric_has_one_source_of_its_type_with_one_target() {
        let cpu = |target: Value| json!({"type": "Resource", "resource": {"name": "cpu", "target": target}});
        assert_eq!(
            problems(cpu(json!({"type": "Utilization", "averageUtilization": 50}))),
            Vec::<String>::new()
        );
        assert_eq!(problems(cpu(json!({"type": "Utilization"}))), ["m.resource.target.averageUtilization"]);
        assert_eq!(
            problems(cpu(json!({"type": "Value", "averageUtilization": 1, "averageValue": "0"}))),
            ["m.resource.target.averageValue", "m.resource.target.averageValue"]
        );
        assert_eq!(problems(json!({"type": "Pods"})), ["m.pods"]);
        assert_eq!(problems(json!({"type": "Nope"})), ["m.type"]);
        // The described object may be of the core group.
        let target = json!({"type": "Value", "value": "1"});
        let about = json!({"apiVersion": "v1", "kind": "Service", "name": "s"});
        let object = json!({"target": target, "describedObject": about, "metric": {"name": "x"}});
        assert_eq!(problems(json!({"type": "Object", "object": object})), Vec::<String>::new());
    }
}

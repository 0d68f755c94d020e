//! Conversion of autoscalers between v1 and v2. v1 has one field for CPU utilization; annotations hold the rest.
//!
//! Source: `pkg/apis/autoscaling/v1/conversion.go`.

use coracle_values::CollectMap;
use serde_json::{Map, Value, json};

use crate::schema::{self, FieldValidation};

const METRICS: &str = "autoscaling.alpha.kubernetes.io/metrics";
const CURRENT_METRICS: &str = "autoscaling.alpha.kubernetes.io/current-metrics";
const CONDITIONS: &str = "autoscaling.alpha.kubernetes.io/conditions";
const BEHAVIOR: &str = "autoscaling.alpha.kubernetes.io/behavior";

/// A field in v1, and its path in v2.
type Fields = &'static [(&'static str, &'static [&'static str])];

/// Fields of a metric's source by the name of the source.
const SOURCES: &[(&str, Fields)] = &[
    (
        "object",
        &[
            ("target", &["describedObject"]),
            ("metricName", &["metric", "name"]),
            ("selector", &["metric", "selector"]),
            ("targetValue", &["target", "value"]),
            ("averageValue", &["target", "averageValue"]),
        ],
    ),
    (
        "pods",
        &[
            ("metricName", &["metric", "name"]),
            ("selector", &["metric", "selector"]),
            ("targetAverageValue", &["target", "averageValue"]),
        ],
    ),
    (
        "external",
        &[
            ("metricName", &["metric", "name"]),
            ("metricSelector", &["metric", "selector"]),
            ("targetValue", &["target", "value"]),
            ("targetAverageValue", &["target", "averageValue"]),
        ],
    ),
    ("resource", RESOURCE),
    ("containerResource", RESOURCE),
];
const RESOURCE: Fields = &[
    ("name", &["name"]),
    ("container", &["container"]),
    ("targetAverageUtilization", &["target", "averageUtilization"]),
    ("targetAverageValue", &["target", "averageValue"]),
];

/// Fields of a metric's status by the name of the source.
const STATUSES: &[(&str, Fields)] = &[
    (
        "object",
        &[
            ("target", &["describedObject"]),
            ("metricName", &["metric", "name"]),
            ("selector", &["metric", "selector"]),
            ("currentValue", &["current", "value"]),
            ("averageValue", &["current", "averageValue"]),
        ],
    ),
    (
        "pods",
        &[
            ("metricName", &["metric", "name"]),
            ("selector", &["metric", "selector"]),
            ("currentAverageValue", &["current", "averageValue"]),
        ],
    ),
    (
        "external",
        &[
            ("metricName", &["metric", "name"]),
            ("metricSelector", &["metric", "selector"]),
            ("currentValue", &["current", "value"]),
            ("currentAverageValue", &["current", "averageValue"]),
        ],
    ),
    ("resource", RESOURCE_STATUS),
    ("containerResource", RESOURCE_STATUS),
];
const RESOURCE_STATUS: Fields = &[
    ("name", &["name"]),
    ("container", &["container"]),
    ("currentAverageUtilization", &["current", "averageUtilization"]),
    ("currentAverageValue", &["current", "averageValue"]),
];

/// Converts a v2 object to v1.
pub(super) fn to_v1(mut object: Value) -> Result<Value, String> {
    let mut notes = Map::new();
    if let Some(spec) = object.get_mut("spec").and_then(Value::as_object_mut) {
        let metrics = list(spec.remove("metrics"));
        let cpu = metrics.iter().find(|metric| is_cpu(metric)).map(utilization);
        if let Some(percentage) = cpu {
            spec.insert("targetCPUUtilizationPercentage".to_owned(), percentage);
        }
        let others: Vec<Value> = metrics
            .iter()
            .filter(|metric| !is_cpu(metric))
            .map(|metric| metric_to_v1(metric, SOURCES))
            .collect();
        note(&mut notes, METRICS, others);
        if let Some(behavior) = spec.remove("behavior").filter(Value::is_object) {
            notes.insert(BEHAVIOR.to_owned(), renamed(behavior, capitalized).to_string().into());
        }
    }
    if let Some(status) = object.get_mut("status").and_then(Value::as_object_mut) {
        let current = list(status.remove("currentMetrics"));
        let cpu = current.iter().find(|metric| metric["resource"]["name"] == "cpu");
        let cpu = cpu.map(|metric| metric["resource"]["current"]["averageUtilization"].clone());
        if let Some(percentage) = cpu.filter(|percentage| !percentage.is_null()) {
            status.insert("currentCPUUtilizationPercentage".to_owned(), percentage);
        }
        note(&mut notes, CURRENT_METRICS, current.iter().map(|one| metric_to_v1(one, STATUSES)).collect());
        note(&mut notes, CONDITIONS, list(status.remove("conditions")));
        status.entry("currentReplicas").or_insert_with(|| 0.into());
    }
    let _stale = take_annotations(&mut object);
    if !notes.is_empty()
        && let Some(metadata) = object.get_mut("metadata").and_then(Value::as_object_mut)
        && let Some(annotations) = metadata.entry("annotations").or_insert_with(|| json!({})).as_object_mut()
    {
        annotations.extend(notes);
    }
    Ok(object)
}

/// Converts a v1 object to v2. An annotation that does not have the form of its field is ignored.
pub(super) fn to_v2(mut object: Value) -> Result<Value, String> {
    let notes = take_annotations(&mut object);
    let parsed = |name: &str| notes.get(name).and_then(|text| serde_json::from_str(text.as_str()?).ok());
    if let Some(spec) = object.get_mut("spec").and_then(Value::as_object_mut) {
        let others = list(parsed(METRICS)).iter().map(|metric| metric_to_v2(metric, SOURCES)).collect();
        let mut metrics = list(checked("spec", "metrics", others));
        let cpu = spec.remove("targetCPUUtilizationPercentage").filter(|percentage| !percentage.is_null());
        metrics.extend(cpu.map(cpu_metric));
        if !metrics.is_empty() {
            spec.insert("metrics".to_owned(), metrics.into());
        }
        let behavior = parsed(BEHAVIOR).map(|behavior| renamed(behavior, small));
        if let Some(behavior) = behavior.and_then(|behavior| checked("spec", "behavior", behavior)) {
            spec.insert("behavior".to_owned(), behavior);
        }
    }
    if let Some(status) = object.get_mut("status").and_then(Value::as_object_mut) {
        let current: Vec<Value> =
            list(parsed(CURRENT_METRICS)).iter().map(|one| metric_to_v2(one, STATUSES)).collect();
        let mut current = list(checked("status", "currentMetrics", current.into()));
        let cpu = status.remove("currentCPUUtilizationPercentage").filter(|percentage| !percentage.is_null());
        if let (true, Some(cpu)) = (current.is_empty(), cpu) {
            let resource = json!({"name": "cpu", "current": {"averageUtilization": cpu}});
            current.push(json!({"type": "Resource", "resource": resource}));
        }
        if !current.is_empty() {
            status.insert("currentMetrics".to_owned(), current.into());
        }
        let conditions = parsed(CONDITIONS).and_then(|list| checked("status", "conditions", list));
        if let Some(conditions) = conditions {
            status.insert("conditions".to_owned(), conditions);
        }
    }
    crate::defaults::autoscaling::autoscaler(&mut object);
    Ok(object)
}

fn cpu_metric(percentage: Value) -> Value {
    let target = json!({"type": "Utilization", "averageUtilization": percentage});
    json!({"type": "Resource", "resource": {"name": "cpu", "target": target}})
}

fn is_cpu(metric: &Value) -> bool {
    metric["type"] == "Resource" && metric["resource"]["name"] == "cpu" && !utilization(metric).is_null()
}

fn utilization(metric: &Value) -> Value {
    metric["resource"]["target"]["averageUtilization"].clone()
}

fn list(value: Option<Value>) -> Vec<Value> {
    match value {
        Some(Value::Array(list)) => list,
        _ => Vec::new(),
    }
}

fn note(notes: &mut Map<String, Value>, name: &str, list: Vec<Value>) {
    if !list.is_empty() {
        notes.insert(name.to_owned(), Value::Array(list).to_string().into());
    }
}

/// Removes the annotations of the conversion from the object.
fn take_annotations(object: &mut Value) -> Map<String, Value> {
    let mut notes = Map::new();
    let Some(metadata) = object.get_mut("metadata").and_then(Value::as_object_mut) else { return notes };
    let Some(annotations) = metadata.get_mut("annotations").and_then(Value::as_object_mut) else {
        return notes;
    };
    for name in [METRICS, CURRENT_METRICS, CONDITIONS, BEHAVIOR] {
        if let Some(text) = annotations.remove(name) {
            notes.insert(name.to_owned(), text);
        }
    }
    if annotations.is_empty() && !notes.is_empty() {
        metadata.remove("annotations");
    }
    notes
}

fn metric_to_v1(metric: &Value, sources: &[(&str, Fields)]) -> Value {
    let mut converted = Map::from_iter([("type".to_owned(), metric["type"].clone())]);
    for (name, fields) in sources {
        let Some(source) = metric.get(*name).filter(|source| source.is_object()) else { continue };
        let values = fields.iter().filter_map(|(v1, v2)| {
            let value = v2.iter().try_fold(source, |value, part| value.get(part))?;
            Some(((*v1).to_owned(), value.clone()))
        });
        converted.insert((*name).to_owned(), values.collect_map::<Map<_, _>>().into());
    }
    converted.into()
}

fn metric_to_v2(metric: &Value, sources: &[(&str, Fields)]) -> Value {
    let mut converted = Map::from_iter([("type".to_owned(), metric["type"].clone())]);
    for (name, fields) in sources {
        let Some(source) = metric.get(*name).filter(|source| source.is_object()) else { continue };
        let mut values = Map::new();
        for (v1, v2) in *fields {
            let Some(value) = source.get(*v1).filter(|value| !value.is_null()) else { continue };
            match *v2 {
                [field] => values.insert((*field).to_owned(), value.clone()),
                [outer, field] => values
                    .entry(*outer)
                    .or_insert_with(|| json!({}))
                    .as_object_mut()
                    .and_then(|outer| outer.insert((*field).to_owned(), value.clone())),
                _ => None,
            };
        }
        if let Some(target) = values.get_mut("target").and_then(Value::as_object_mut) {
            let kind = target_type(target);
            target.insert("type".to_owned(), kind.into());
        }
        converted.insert((*name).to_owned(), values.into());
    }
    converted.into()
}

/// The type of a target, which v1 does not have.
fn target_type(target: &mut Map<String, Value>) -> &'static str {
    if target.contains_key("averageUtilization") {
        "Utilization"
    } else if target.contains_key("averageValue") {
        // v1 writes 0 for a value that is not set.
        if target.get("value").is_some_and(|value| value == "0") {
            target.remove("value");
        }
        "AverageValue"
    } else {
        "Value"
    }
}

/// The value, if the schema of v2 accepts it as this field. Clients can write any text into the annotations.
fn checked(part: &str, field: &str, value: Value) -> Option<Value> {
    let mut object = json!({"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler",
        "spec": {"maxReplicas": 1, "scaleTargetRef": {"kind": "", "name": ""}}, "status": {"desiredReplicas": 0}});
    object.get_mut(part)?.as_object_mut()?.insert(field.to_owned(), value);
    let parsed = schema::parse_json(object.to_string().as_bytes()).ok()?;
    let name = "io.k8s.api.autoscaling.v2.HorizontalPodAutoscaler";
    let (mut object, _) = schema::decode(name, parsed, FieldValidation::Ignore).ok()?;
    object.get_mut(part)?.as_object_mut()?.remove(field)
}

/// The value with other field names: upstream writes the behavior with the names of its Go fields.
fn renamed(value: Value, name: fn(&str) -> String) -> Value {
    match value {
        Value::Object(map) => map
            .into_iter()
            .map(|(field, value)| (name(&field), renamed(value, name)))
            .collect_map::<Map<_, _>>()
            .into(),
        Value::Array(list) => list.into_iter().map(|value| renamed(value, name)).collect(),
        other => other,
    }
}

fn capitalized(field: &str) -> String {
    let mut letters = field.chars();
    letters.next().map(|first| first.to_ascii_uppercase()).into_iter().chain(letters).collect()
}

fn small(field: &str) -> String {
    let mut letters = field.chars();
    letters.next().map(|first| first.to_ascii_lowercase()).into_iter().chain(letters).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn v2() -> Value {
        json!({
            "metadata": {"name": "a", "annotations": {"own": "x"}},
            "spec": {
                "maxReplicas": 5, "minReplicas": 1, "scaleTargetRef": {"kind": "Deployment", "name": "d"},
                "metrics": [
                    {"type": "Pods", "pods": {"metric": {"name": "hits"}, "target": {"type": "AverageValue", "averageValue": "10"}}},
                    {"type": "Resource", "resource": {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 60}}},
                ],
                "behavior": {
                    "scaleUp": {"stabilizationWindowSeconds": 0, "selectPolicy": "Max",
                        "policies": [{"type": "Pods", "value": 4, "periodSeconds": 15}]},
                    "scaleDown": {"selectPolicy": "Max",
                        "policies": [{"type": "Percent", "value": 100, "periodSeconds": 15}]},
                },
            },
            "status": {"currentReplicas": 1, "desiredReplicas": 2,
                "currentMetrics": [{"type": "Resource", "resource": {"name": "cpu", "current": {"averageUtilization": 40, "averageValue": "4m"}}}],
                "conditions": [{"type": "AbleToScale", "status": "True"}]},
        })
    }

    #[test]
    fn both_versions_have_the_same_content() {
        let v1 = to_v1(v2()).unwrap();
        assert_eq!(v1["spec"]["targetCPUUtilizationPercentage"], 60);
        assert_eq!(v1["status"]["currentCPUUtilizationPercentage"], 40);
        assert!(v1["spec"].get("metrics").is_none() && v1["spec"].get("behavior").is_none());
        assert_eq!(
            v1["metadata"]["annotations"][METRICS],
            r#"[{"pods":{"metricName":"hits","targetAverageValue":"10"},"type":"Pods"}]"#
        );
        assert_eq!(to_v2(v1).unwrap(), v2());
    }

    #[test]
    fn annotations_of_another_form_are_ignored() {
        for text in ["x", "{}", "[1]", r#"[{"type":{"a":1}}]"#, r#"[{"type":"Pods","pods":[]}]"#] {
            let mut v1 = json!({"metadata": {"annotations": {}}, "spec": {"maxReplicas": 1,
                "targetCPUUtilizationPercentage": 50, "scaleTargetRef": {"kind": "D", "name": "d"}}});
            v1["metadata"]["annotations"][METRICS] = text.into();
            v1["metadata"]["annotations"][BEHAVIOR] = text.into();
            let metrics = to_v2(v1).unwrap()["spec"]["metrics"].clone();
            assert_eq!(metrics.as_array().unwrap().last(), Some(&cpu_metric(50.into())), "{text}");
        }
    }
}

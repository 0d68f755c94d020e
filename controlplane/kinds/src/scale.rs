//! The `scale` subresource of workloads.

use serde_json::{Map, Value, json};

use crate::Resource;
use crate::validate::{Cause, Causes, Path};
use coracle_values::label_selector::LabelSelector;

/// The `autoscaling/v1` Scale of a workload.
pub fn read(kind: &Resource, workload: &Value) -> Value {
    let mut metadata = Map::new();
    for name in ["name", "namespace", "uid", "resourceVersion", "creationTimestamp"] {
        if let Some(value) = workload["metadata"].get(name) {
            metadata.insert(name.to_owned(), value.clone());
        }
    }
    let (spec, status, selector) = match &kind.scale {
        Some(paths) => (
            at(workload, &paths.spec_replicas),
            at(workload, &paths.status_replicas),
            paths
                .selector
                .as_deref()
                .map_or("", |path| at(workload, path).as_str().unwrap_or_default())
                .to_owned(),
        ),
        None => {
            let selector = &workload["spec"]["selector"];
            let selector = if kind.is("", "ReplicationController") {
                // The selector of a ReplicationController is a map of labels.
                LabelSelector::from_object(&json!({"matchLabels": selector}))
            } else {
                LabelSelector::from_object(selector)
            };
            let selector = selector.unwrap_or_default();
            (&workload["spec"]["replicas"], &workload["status"]["replicas"], selector.to_string())
        }
    };
    let count = |replicas: &Value| replicas.as_i64().unwrap_or(0);
    let mut scale = json!({
        "kind": "Scale",
        "apiVersion": "autoscaling/v1",
        "metadata": metadata,
        "spec": {"replicas": count(spec)},
        "status": {"replicas": count(status)},
    });
    if !selector.is_empty() {
        scale["status"]["selector"] = selector.into();
    }
    scale
}

/// Writes the replicas of a Scale into the workload. If the Scale has a resourceVersion, this resourceVersion becomes
/// the precondition of the update.
pub fn apply(kind: &Resource, workload: &mut Value, scale: &Value) -> Result<(), Vec<Cause>> {
    set_replicas(kind, workload, replicas(scale)?);
    if let Some(version) = scale["metadata"].get("resourceVersion").filter(|version| !version.is_null()) {
        workload["metadata"]["resourceVersion"] = version.clone();
    }
    Ok(())
}

/// The replicas in the spec of a Scale; 0 if absent.
///
/// # Errors
/// The replicas are negative.
pub fn replicas(scale: &Value) -> Result<i64, Vec<Cause>> {
    let replicas = scale["spec"]["replicas"].as_i64().unwrap_or(0);
    let mut causes = Causes::default();
    let path = Path::root("spec").field("replicas");
    if replicas < 0 {
        causes.invalid(&path, &replicas.into(), "must be greater than or equal to 0");
    }
    if causes.is_empty() { Ok(replicas) } else { Err(causes.into_list()) }
}

/// Sets the replicas of a workload, or of an apply configuration of a workload.
pub fn set_replicas(kind: &Resource, workload: &mut Value, replicas: i64) {
    match &kind.scale {
        Some(paths) => set(workload, &paths.spec_replicas, replicas),
        None => workload["spec"]["replicas"] = replicas.into(),
    }
}

/// The value at a path. Null if absent.
fn at<'a>(object: &'a Value, path: &[String]) -> &'a Value {
    path.iter().fold(object, |value, name| &value[name.as_str()])
}

/// Sets the value at a path. Creates missing objects; leaves the object unchanged if a value on the path is not an
/// object.
fn set(object: &mut Value, path: &[String], value: i64) {
    let mut place = object;
    for name in path {
        if place.is_null() {
            *place = Value::Object(Map::new());
        }
        let Some(map) = place.as_object_mut() else { return };
        place = map.entry(name.as_str()).or_insert(Value::Null);
    }
    *place = value.into();
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kind::by_kind;

    #[test]
    fn a_scale_is_read_and_applied() {
        let kind = by_kind("apps/v1", "Deployment").unwrap();
        let mut workload = json!({"metadata": {"name": "d", "namespace": "n", "uid": "u", "resourceVersion": "7", "labels": {"x": "y"}},
            "spec": {"replicas": 2, "selector": {"matchLabels": {"b": "1", "a": "2"}}}, "status": {"replicas": 1}});
        let mut scale = read(kind, &workload);
        let expect = json!({"kind": "Scale", "apiVersion": "autoscaling/v1",
            "metadata": {"name": "d", "namespace": "n", "uid": "u", "resourceVersion": "7"},
            "spec": {"replicas": 2}, "status": {"replicas": 1, "selector": "a=2,b=1"}});
        assert_eq!(scale, expect);
        scale["spec"]["replicas"] = 5.into();
        assert_eq!(apply(kind, &mut workload, &scale), Ok(()));
        assert_eq!(workload["spec"]["replicas"], 5);
        scale["spec"]["replicas"] = (-1).into();
        let causes = apply(kind, &mut workload, &scale).unwrap_err();
        assert_eq!(causes[0].message, "Invalid value: -1: must be greater than or equal to 0");
        let bare = read(kind, &json!({"metadata": {"name": "d"}, "spec": {"selector": {}}}));
        assert_eq!(bare["status"], json!({"replicas": 0}), "no selector");
    }
}

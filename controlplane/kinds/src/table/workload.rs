//! Deployments, replica sets, stateful sets, daemon sets, replication controllers, pod templates, controller revisions.

use jiff::Timestamp;
use serde_json::Value;

use super::{AGE, Column, NAME, age_cell, integer, items, name, string, wide};
use coracle_values::label_selector::LabelSelector;

pub(super) const CONTAINERS: Column = wide(string("Containers", "Names of the template's containers."));
pub(super) const IMAGES: Column = wide(string("Images", "Images of the template's containers."));
pub(super) const SELECTOR: Column = wide(string("Selector", "Labels of the selected pods."));

pub(crate) const DEPLOYMENT: &[Column] = &[
    NAME,
    string("Ready", "Number of ready pods, and of desired pods."),
    string("Up-to-date", "Pods of the newest template."),
    string("Available", "Pods that have been ready for long enough."),
    AGE,
    CONTAINERS,
    IMAGES,
    SELECTOR,
];

pub(crate) fn deployment(object: &Value, now: Timestamp) -> Vec<Value> {
    let (spec, status) = (&object["spec"], &object["status"]);
    let ready = status["readyReplicas"].as_i64().unwrap_or(0);
    let mut cells = vec![
        name(object),
        format!("{ready}/{}", spec["replicas"].as_i64().unwrap_or(0)).into(),
        count(&status["updatedReplicas"]),
        count(&status["availableReplicas"]),
        age_cell(object, now),
    ];
    cells.extend(template(spec));
    cells
}

pub(super) const SCALE: &[Column] =
    &[NAME, integer("Desired", "Desired pods."), integer("Available", "Existing pods."), AGE];

pub(super) fn scale(object: &Value, now: Timestamp) -> Vec<Value> {
    let replicas = |part: &str| count(&object[part]["replicas"]);
    vec![name(object), replicas("spec"), replicas("status"), age_cell(object, now)]
}

pub(crate) const REPLICA_SET: &[Column] = &[
    NAME,
    integer("Desired", "Desired pods."),
    integer("Current", "Existing pods."),
    integer("Ready", "Pods that are ready."),
    AGE,
    CONTAINERS,
    IMAGES,
    SELECTOR,
];

pub(crate) fn replica_set(object: &Value, now: Timestamp) -> Vec<Value> {
    let (spec, status) = (&object["spec"], &object["status"]);
    let mut cells = vec![
        name(object),
        count(&spec["replicas"]),
        count(&status["replicas"]),
        count(&status["readyReplicas"]),
        age_cell(object, now),
    ];
    cells.extend(template(spec));
    cells
}

pub(crate) fn replication_controller(object: &Value, now: Timestamp) -> Vec<Value> {
    let mut cells = replica_set(object, now);
    if let Some(last) = cells.last_mut() {
        *last = labels(&object["spec"]["selector"]);
    }
    cells
}

pub(crate) const STATEFUL_SET: &[Column] =
    &[NAME, string("Ready", "Number of ready pods, and of desired pods."), AGE, CONTAINERS, IMAGES];

pub(crate) fn stateful_set(object: &Value, now: Timestamp) -> Vec<Value> {
    let (spec, status) = (&object["spec"], &object["status"]);
    let number = |value: &Value| value.as_i64().unwrap_or(0);
    let ready = format!("{}/{}", number(&status["readyReplicas"]), number(&spec["replicas"]));
    let [containers, images, _] = template(spec);
    vec![name(object), ready.into(), age_cell(object, now), containers, images]
}

pub(crate) const DAEMON_SET: &[Column] = &[
    NAME,
    integer("Desired", "Nodes that must run the pod."),
    integer("Current", "Nodes that run the pod."),
    integer("Ready", "Nodes whose pod is ready."),
    integer("Up-to-date", "Nodes whose pod has the newest template."),
    integer("Available", "Nodes whose pod has been ready for long enough."),
    string("Node Selector", "Labels that a node must have."),
    AGE,
    CONTAINERS,
    IMAGES,
    SELECTOR,
];

pub(crate) fn daemon_set(object: &Value, now: Timestamp) -> Vec<Value> {
    let (spec, status) = (&object["spec"], &object["status"]);
    let mut cells = vec![
        name(object),
        count(&status["desiredNumberScheduled"]),
        count(&status["currentNumberScheduled"]),
        count(&status["numberReady"]),
        count(&status["updatedNumberScheduled"]),
        count(&status["numberAvailable"]),
        labels(&spec["template"]["spec"]["nodeSelector"]),
        age_cell(object, now),
    ];
    cells.extend(template(spec));
    cells
}

pub(crate) const POD_TEMPLATE: &[Column] = &[
    NAME,
    string("Containers", "Names of the template's containers."),
    string("Images", "Images of the template's containers."),
    string("Pod Labels", "Labels of the template's pods."),
];

pub(crate) fn pod_template(object: &Value, _now: Timestamp) -> Vec<Value> {
    let [containers, images, _] = template(object);
    vec![name(object), containers, images, labels(&object["template"]["metadata"]["labels"])]
}

/// Labels as `a=b,c=d`, or `<none>`.
fn labels(labels: &Value) -> Value {
    let labels = labels.as_object().into_iter().flatten();
    let mut list: Vec<String> =
        labels.map(|(name, value)| format!("{name}={}", value.as_str().unwrap_or_default())).collect();
    list.sort();
    if list.is_empty() { "<none>".into() } else { list.join(",").into() }
}

pub(crate) const CONTROLLER_REVISION: &[Column] = &[
    NAME,
    string("Controller", "The object that the revision belongs to."),
    string("Revision", "Number of the revision."),
    AGE,
];

pub(crate) fn controller_revision(object: &Value, now: Timestamp) -> Vec<Value> {
    let owner = items(&object["metadata"]["ownerReferences"]).find(|owner| owner["controller"] == true);
    let owner = owner.map_or_else(
        || "<none>".to_owned(),
        |owner| {
            let text = |name: &str| owner[name].as_str().unwrap_or_default();
            let kind = text("kind").to_lowercase();
            match text("apiVersion").split_once('/') {
                Some((group, _)) => format!("{kind}.{group}/{}", text("name")),
                None => format!("{kind}/{}", text("name")),
            }
        },
    );
    vec![name(object), owner.into(), count(&object["revision"]), age_cell(object, now)]
}

fn count(value: &Value) -> Value {
    value.as_i64().unwrap_or(0).into()
}

/// The cells of the columns Containers, Images and Selector.
pub(super) fn template(spec: &Value) -> [Value; 3] {
    let join = |field: &str| -> Value {
        let list =
            items(&spec["template"]["spec"]["containers"]).filter_map(|container| container[field].as_str());
        list.collect::<Vec<_>>().join(",").into()
    };
    let selector = match LabelSelector::from_object(&spec["selector"]) {
        Ok(selector) if selector.is_empty() => "<none>".to_owned(),
        Ok(selector) => selector.to_string(),
        Err(_) => "<error>".to_owned(),
    };
    [join("name"), join("image"), selector.into()]
}

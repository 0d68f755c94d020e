//! Deployments, replica sets, controller revisions.

use jiff::Timestamp;
use serde_json::Value;

use super::{AGE, Column, NAME, created, integer, items, name, string, wide};
use crate::selector::LabelSelector;

const CONTAINERS: Column = wide(string("Containers", "Names of the template's containers."));
const IMAGES: Column = wide(string("Images", "Images of the template's containers."));
const SELECTOR: Column = wide(string("Selector", "Which pods are selected."));

pub(crate) const DEPLOYMENT: &[Column] = &[
    NAME,
    string("Ready", "Pods that are ready, of all that are wanted."),
    integer("Up-to-date", "Pods of the newest template."),
    integer("Available", "Pods that have been ready for long enough."),
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
        created(object, now),
    ];
    cells.extend(template(spec));
    cells
}

pub(crate) const REPLICA_SET: &[Column] = &[
    NAME,
    integer("Desired", "Pods that are wanted."),
    integer("Current", "Pods that are there."),
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
        created(object, now),
    ];
    cells.extend(template(spec));
    cells
}

pub(crate) const CONTROLLER_REVISION: &[Column] = &[
    NAME,
    string("Controller", "The object that the revision belongs to."),
    integer("Revision", "Number of the revision."),
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
    vec![name(object), owner.into(), count(&object["revision"]), created(object, now)]
}

fn count(value: &Value) -> Value {
    value.as_i64().unwrap_or(0).into()
}

/// Containers, images, selector.
fn template(spec: &Value) -> [Value; 3] {
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

//! Limit ranges and priority classes.

use serde_json::{Map, Value};

use super::{child, child_of, each, fill_absent};

/// Completes each limit of containers. Source: `SetDefaults_LimitRangeItem`.
pub(crate) fn limit_range(object: &mut Value) {
    let Some(spec) = child(object, "spec") else { return };
    for limit in
        each(spec, "limits").filter(|limit| limit.get("type").is_some_and(|kind| kind == "Container"))
    {
        copy_missing(limit, "max", "default");
        copy_missing(limit, "default", "defaultRequest");
        copy_missing(limit, "min", "defaultRequest");
    }
}

/// Copies those entries of the map `from` that the map `to` does not have.
fn copy_missing(limit: &mut Map<String, Value>, from: &str, to: &str) {
    let Some(from) = limit.get(from).and_then(Value::as_object).filter(|from| !from.is_empty()).cloned()
    else {
        return;
    };
    let Some(to) = child_of(limit, to) else { return };
    for (name, amount) in from {
        to.entry(name).or_insert(amount);
    }
}

pub(crate) fn priority_class(object: &mut Value) {
    if let Some(object) = object.as_object_mut() {
        fill_absent(object, "preemptionPolicy", "PreemptLowerPriority");
    }
}

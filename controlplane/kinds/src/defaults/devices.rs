//! Claims of devices. Source: `pkg/apis/resource/v1/defaults.go`.

use serde_json::{Map, Value};

use super::{child, each, fill, present};

/// Sets the defaults of a ResourceClaim.
pub(crate) fn claim(object: &mut Value) {
    if let Some(spec) = child(object, "spec") {
        requests(spec);
    }
}

/// Sets the defaults of a ResourceClaimTemplate.
pub(crate) fn template(object: &mut Value) {
    if let Some(spec) = child(object, "spec").and_then(|spec| super::child_of(spec, "spec")) {
        requests(spec);
    }
}

fn requests(spec: &mut Map<String, Value>) {
    let Some(devices) = present(spec, "devices") else { return };
    for request in each(devices, "requests") {
        if let Some(exact) = present(request, "exactly") {
            count(exact);
        }
        each(request, "firstAvailable").for_each(count);
    }
}

fn count(request: &mut Map<String, Value>) {
    fill(request, "allocationMode", "ExactCount");
    let is_exact = request.get("allocationMode").is_some_and(|mode| mode == "ExactCount");
    if is_exact && request.get("count").and_then(Value::as_i64).unwrap_or(0) == 0 {
        request.insert("count".to_owned(), 1.into());
    }
}

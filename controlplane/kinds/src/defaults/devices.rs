//! Defaults of ResourceClaims, ResourceClaimTemplates and ResourceSlices. Source: `pkg/apis/resource/v1/defaults.go`.

use serde_json::{Map, Value};

use super::{child, each, fill, fill_absent, present};

/// Sets the defaults of a ResourceClaim.
pub(crate) fn claim(object: &mut Value) {
    if let Some(spec) = child(object, "spec") {
        requests(spec);
    }
    let allocated = object.pointer_mut("/status/allocation/devices").and_then(Value::as_object_mut);
    if let Some(devices) = allocated {
        each(devices, "results").for_each(tolerations);
    }
}

/// Sets the defaults of a ResourceClaimTemplate.
pub(crate) fn template(object: &mut Value) {
    if let Some(spec) = child(object, "spec").and_then(|spec| super::child_of(spec, "spec")) {
        requests(spec);
    }
}

/// Sets the defaults of a ResourceSlice: the time at which a device got a taint.
pub(crate) fn slice(object: &mut Value) {
    let Some(spec) = object.pointer_mut("/spec").and_then(Value::as_object_mut) else { return };
    for device in each(spec, "devices") {
        for taint in each(device, "taints") {
            let now = jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ");
            fill_absent(taint, "timeAdded", now.to_string());
        }
    }
}

fn requests(spec: &mut Map<String, Value>) {
    let Some(devices) = present(spec, "devices") else { return };
    for request in each(devices, "requests") {
        if let Some(exact) = present(request, "exactly") {
            one_request(exact);
        }
        each(request, "firstAvailable").for_each(one_request);
    }
}

fn one_request(request: &mut Map<String, Value>) {
    count(request);
    tolerations(request);
}

fn tolerations(owner: &mut Map<String, Value>) {
    for toleration in each(owner, "tolerations") {
        fill(toleration, "operator", "Equal");
    }
}

fn count(request: &mut Map<String, Value>) {
    fill(request, "allocationMode", "ExactCount");
    let is_exact = request.get("allocationMode").is_some_and(|mode| mode == "ExactCount");
    if is_exact && request.get("count").and_then(Value::as_i64).unwrap_or(0) == 0 {
        request.insert("count".to_owned(), 1.into());
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_taint_of_a_device_has_the_time_at_which_it_was_added() {
        let known = "2026-01-01T00:00:00Z";
        let taints = json!([{"key": "a", "timeAdded": known}, {"key": "b"}]);
        let mut slice = json!({"spec": {"devices": [{"name": "d", "taints": taints}, {"name": "e"}]}});
        super::slice(&mut slice);
        let taints = &slice["spec"]["devices"][0]["taints"];
        assert_eq!(taints[0]["timeAdded"], known);
        assert!(taints[1]["timeAdded"].as_str().is_some_and(|time| time.ends_with('Z')), "{taints}");
        let before = slice.clone();
        super::slice(&mut slice);
        assert_eq!(slice, before);
        super::slice(&mut json!({}));
    }

    #[test]
    fn tolerations_of_taints_have_an_operator() {
        let owner = |operator: Value| json!({"tolerations": [{"key": "a", "operator": operator}]});
        let requests = json!([{"exactly": owner(Value::Null)}, {"firstAvailable": [owner("".into())]},
            {"exactly": owner("Exists".into())}]);
        let devices = json!({"requests": requests});
        let results = json!([owner(Value::Null)]);
        let status = json!({"allocation": {"devices": {"results": results}}});
        let mut claim = json!({"spec": {"devices": devices}, "status": status});
        super::claim(&mut claim);
        let mut template = json!({"spec": {"spec": {"devices": devices}}});
        super::template(&mut template);
        for spec in [&claim["spec"], &template["spec"]["spec"]] {
            let requests = &spec["devices"]["requests"];
            assert_eq!(requests[0]["exactly"]["tolerations"][0]["operator"], "Equal");
            assert_eq!(requests[1]["firstAvailable"][0]["tolerations"][0]["operator"], "Equal");
            assert_eq!(requests[2]["exactly"]["tolerations"][0]["operator"], "Exists");
        }
        let result = &claim["status"]["allocation"]["devices"]["results"][0];
        assert_eq!(result["tolerations"][0]["operator"], "Equal");
    }
}

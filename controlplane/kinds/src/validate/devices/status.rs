//! The status of a claim: its consumers, its devices, and the data of drivers about the devices.

use std::collections::HashSet;

use serde_json::Value;

use super::{
    MAX_CONFIGS, RequestNames, config, driver, immutable, label, limit, pool_name, references, request_names,
    request_reference, slice, unique,
};
use crate::validate::{Causes, Path, condition, format, items, scheduling, text};

const MAX_RESERVED: usize = 256;
const MAX_RESULTS: usize = 32;
const MAX_CONDITIONS: usize = 8;
/// Maximum size of the data of a driver about a device, as JSON, in bytes.
const MAX_DATA: usize = 10 << 10;
const MAX_INTERFACE_NAME: usize = 256;
const MAX_HARDWARE_ADDRESS: usize = 128;
const MAX_ADDRESSES: usize = 16;
const UID_FORM: &str = "uid must be in RFC 4122 normalized form, `xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx` with \
    lowercase hexadecimal characters";

/// Checks the status of a claim.
pub(crate) fn status(causes: &mut Causes, new: &Value, old: &Value) {
    let (path, status) = (Path::root("status"), &new["status"]);
    let (here, consumers) = (path.field("reservedFor"), &status["reservedFor"]);
    if limit(causes, &here, consumers, MAX_RESERVED) {
        for (index, consumer) in items(consumers) {
            for field in ["resource", "name", "uid"] {
                if text(&consumer[field]).is_empty() {
                    causes.required(&here.index(index).field(field), "");
                }
            }
        }
        unique(causes, &here, consumers, |consumer| &consumer["uid"]);
    }
    devices(causes, &path.field("devices"), status);
    if items(consumers).next().is_some() {
        let before: HashSet<&Value> = items(&old["status"]["reservedFor"]).map(|(_, one)| one).collect();
        let is_new = |(_, consumer): (usize, &Value)| !before.contains(consumer);
        if status["allocation"].is_null() {
            causes.forbidden(&here, "may not be specified when `allocated` is not set");
        } else if !new["metadata"]["deletionTimestamp"].is_null() && items(consumers).any(is_new) {
            let detail =
                "new entries may not be added while `deallocationRequested` or `deletionTimestamp` are set";
            causes.forbidden(&here, detail);
        }
    }
    let (here, before) = (path.field("allocation"), &old["status"]["allocation"]);
    match (status["allocation"].is_null(), before.is_null()) {
        (true, _) => {}
        (false, false) => immutable(causes, &here, &status["allocation"], before),
        (false, true) => {
            allocation(causes, &here, &status["allocation"], &request_names(&new["spec"]["devices"]));
        }
    }
}

/// Checks the devices that a claim gets.
fn allocation(causes: &mut Causes, path: &Path, allocation: &Value, names: &RequestNames<'_>) {
    let (here, results) = (path.field("devices").field("results"), &allocation["devices"]["results"]);
    if limit(causes, &here, results, MAX_RESULTS) {
        for (index, result) in items(results) {
            let here = here.index(index);
            request_reference(causes, &here.field("request"), &result["request"], names);
            identity(causes, &here, result);
            slice::binding(causes, &here, result);
            share(causes, &here.field("shareID"), &result["shareID"]);
        }
    }
    let (here, configs) = (path.field("devices").field("config"), &allocation["devices"]["config"]);
    if limit(causes, &here, configs, 2 * MAX_CONFIGS) {
        for (index, one) in items(configs) {
            let here = here.index(index);
            causes.one_of(&here.field("source"), &one["source"], &["FromClaim", "FromClass"]);
            references(causes, &here.field("requests"), &one["requests"], names);
            config(causes, &here, one);
        }
    }
    if allocation["nodeSelector"].is_object() {
        scheduling::node_terms(causes, &path.field("nodeSelector"), &allocation["nodeSelector"]);
    }
}

/// Checks the names that identify a device.
fn identity(causes: &mut Causes, path: &Path, device: &Value) {
    driver(causes, &path.field("driver"), &device["driver"]);
    pool_name(causes, &path.field("pool"), text(&device["pool"]));
    label(causes, &path.field("device"), &device["device"]);
}

/// Checks the uid of a share of a device.
fn share(causes: &mut Causes, path: &Path, uid: &Value) {
    let Some(text) = uid.as_str() else { return };
    let is_plain = text.len() == 36
        && text.bytes().enumerate().all(|(index, byte)| match index {
            8 | 13 | 18 | 23 => byte == b'-',
            _ => matches!(byte, b'0'..=b'9' | b'a'..=b'f'),
        });
    if is_plain {
        return;
    }
    // Go's parser also accepts a uid without separators, in braces, or as a URN.
    let is_other_form = {
        let plain = text.trim_start_matches("urn:uuid:").trim_start_matches('{').trim_end_matches('}');
        let digits: String = plain.chars().filter(|letter| *letter != '-').collect();
        digits.len() == 32 && digits.bytes().all(|byte| byte.is_ascii_hexdigit())
    };
    if is_other_form {
        causes.invalid(path, uid, UID_FORM);
    } else if [32, 36, 38, 45].contains(&text.len()) {
        causes.invalid(path, uid, "error validating uid: invalid UUID format");
    } else {
        let detail = format!("error validating uid: invalid UUID length: {}", text.len());
        causes.invalid(path, uid, &detail);
    }
}

/// The names of a device, and the id of the share of the device that the claim has.
type Identity<'a> = [&'a str; 4];

fn identity_of(device: &Value) -> Identity<'_> {
    ["driver", "pool", "device", "shareID"].map(|field| text(&device[field]))
}

fn shown(identity: Identity<'_>) -> Value {
    identity.join("/").trim_end_matches('/').into()
}

/// Checks the data of drivers about the devices of a claim.
fn devices(causes: &mut Causes, path: &Path, status: &Value) {
    let allocated: HashSet<Identity<'_>> =
        items(&status["allocation"]["devices"]["results"]).map(|(_, result)| identity_of(result)).collect();
    for (index, device) in items(&status["devices"]) {
        let here = path.index(index);
        identity(causes, &here, device);
        share(causes, &here.field("shareID"), &device["shareID"]);
        if !allocated.contains(&identity_of(device)) {
            let detail = "must be an allocated device in the claim";
            causes.invalid(&here, &shown(identity_of(device)), detail);
        }
        let conditions = &device["conditions"];
        limit(causes, &here.field("conditions"), conditions, MAX_CONDITIONS);
        condition::conditions(causes, &here.field("conditions"), conditions);
        data(causes, &here.field("data"), &device["data"]);
        network(causes, &here.field("networkData"), &device["networkData"]);
    }
    let mut seen = HashSet::new();
    for (index, device) in items(&status["devices"]) {
        let identity = identity_of(device);
        if !seen.insert(identity) {
            causes.duplicate(&path.index(index), &shown(identity));
        }
    }
}

fn data(causes: &mut Causes, path: &Path, data: &Value) {
    if data.is_null() {
        return;
    }
    if data.to_string().len() > MAX_DATA {
        causes.too_long(path, MAX_DATA);
    } else if !data.is_object() {
        causes.invalid(path, &"<value omitted>".into(), "must be a valid JSON object");
    }
}

fn network(causes: &mut Causes, path: &Path, network: &Value) {
    for (field, max) in [("interfaceName", MAX_INTERFACE_NAME), ("hardwareAddress", MAX_HARDWARE_ADDRESS)] {
        if text(&network[field]).len() > max {
            causes.too_long(&path.field(field), max);
        }
    }
    let here = path.field("ips");
    if limit(causes, &here, &network["ips"], MAX_ADDRESSES) {
        for (index, address) in items(&network["ips"]) {
            let address = text(address);
            causes.format(&here.index(index), address, format::interface_address(address));
        }
        unique(causes, &here, &network["ips"], |address| address);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::validate::tests::found;

    const UID: &str = "0f0e0d0c-0b0a-0908-0706-050403020100";

    fn claim(status: Value) -> Value {
        json!({"metadata": {}, "spec": {"devices": {"requests": [{"name": "a"}]}}, "status": status})
    }

    fn fields(new: &Value, old: &Value) -> Vec<String> {
        let causes = found(|causes| status(causes, new, old));
        causes.iter().map(|cause| cause.split(": ").take(2).collect::<Vec<_>>().join(" ")).collect()
    }

    fn result() -> Value {
        json!({"request": "a", "driver": "d.example.com", "pool": "p", "device": "x", "shareID": UID})
    }

    #[test]
    fn results_name_requests_and_devices() {
        let old = claim(json!({}));
        let of = |result: Value| claim(json!({"allocation": {"devices": {"results": [result]}}}));
        assert_eq!(fields(&of(result()), &old), Vec::<String>::new());
        let here = "status.allocation.devices.results[0]";
        for (field, value, problem) in [
            ("request", json!("b"), "request Invalid value"),
            ("driver", json!(""), "driver Required value"),
            ("pool", json!(""), "pool Required value"),
            ("pool", json!("A"), "pool Invalid value"),
            ("device", json!("A"), "device Invalid value"),
            ("shareID", json!(UID.to_uppercase()), "shareID Invalid value"),
            ("shareID", json!("x"), "shareID Invalid value"),
            ("bindingConditions", json!(["a"]), "bindingFailureConditions Invalid value"),
        ] {
            let mut result = result();
            result[field] = value;
            assert_eq!(fields(&of(result), &old), [format!("{here}.{problem}")], "{field}");
        }
        let config = json!([{"source": "X", "requests": ["b"]}]);
        let bad = claim(json!({"allocation": {"devices": {"config": config}}}));
        let here = "status.allocation.devices.config[0]";
        assert_eq!(
            fields(&bad, &old),
            [
                format!("{here}.source Unsupported value"),
                format!("{here}.requests[0] Invalid value"),
                format!("{here}.opaque Required value"),
            ]
        );
    }

    #[test]
    fn drivers_write_data_about_allocated_devices() {
        let allocation = json!({"devices": {"results": [result()]}});
        let of = |device: Value| claim(json!({"allocation": allocation, "devices": [device]}));
        let device = |more: (&str, Value)| {
            let mut device = result();
            device.as_object_mut().unwrap().remove("request");
            device[more.0] = more.1;
            of(device)
        };
        let old = claim(json!({"allocation": allocation}));
        let network = json!({"interfaceName": "eth0", "ips": ["10.0.0.1/24", "fd00::1/64"]});
        assert_eq!(fields(&device(("networkData", network)), &old), Vec::<String>::new());
        assert_eq!(fields(&device(("device", json!("y"))), &old), ["status.devices[0] Invalid value"]);
        let network = json!({"interfaceName": "x".repeat(257), "ips": ["10.0.0.1", "10.0.0.1"]});
        assert_eq!(
            fields(&device(("networkData", network)), &old),
            [
                "status.devices[0].networkData.interfaceName Too long",
                "status.devices[0].networkData.ips[0] Invalid value",
                "status.devices[0].networkData.ips[1] Invalid value",
                "status.devices[0].networkData.ips[1] Duplicate value",
            ]
        );
        assert_eq!(fields(&device(("data", json!([]))), &old), ["status.devices[0].data Invalid value"]);
    }

    #[test]
    fn a_claim_that_is_being_deleted_gets_no_consumers() {
        let of = |uids: &[&str]| {
            let consumers: Vec<Value> =
                uids.iter().map(|uid| json!({"resource": "pods", "name": "p", "uid": uid})).collect();
            let mut claim = claim(json!({"allocation": {"devices": {}}, "reservedFor": consumers}));
            claim["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z".into();
            claim
        };
        assert_eq!(fields(&of(&["a"]), &of(&["a", "b"])), Vec::<String>::new());
        assert_eq!(fields(&of(&["a", "b"]), &of(&["a"])), ["status.reservedFor Forbidden"]);
        assert_eq!(fields(&of(&["a", "a"]), &of(&["a"])), ["status.reservedFor[1] Duplicate value"]);
    }
}

use serde_json::{Value, json};

use super::object::{Claim, Class, Slice};
use super::*;
use crate::fixture;

/// Nodes a and b with two devices each, and a class that selects those of the driver.
fn devices() -> Devices {
    let devices = Devices::default();
    {
        let mut state = devices.lock();
        let class = json!({"metadata": {"name": "gpu"}, "spec": {"selectors": [
            {"cel": {"expression": "device.driver == 'gpu.example.com'"}}],
            "config": [{"opaque": {"driver": "gpu.example.com", "parameters": {"a": 1}}}]}});
        let class: Class = serde_json::from_value(class).unwrap();
        state.classes.insert("gpu".to_owned(), class);
        for node in ["a", "b"] {
            let device = |name: &str, size: &str, bus: i64| {
                json!({"name": name, "attributes": {"bus": {"int": bus}, "model": {"string": "m1"},
                    "other.example.com/version": {"version": "1.2.0"}}, "capacity": {"memory": {"value": size}}})
            };
            let slice = json!({"metadata": {"name": node}, "spec": {"driver": "gpu.example.com", "nodeName": node,
                "pool": {"name": node, "generation": 1, "resourceSliceCount": 1},
                "devices": [device("small", "8Gi", 1), device("large", "80Gi", 2)]}});
            state.slices.insert(node.to_owned(), serde_json::from_value::<Slice>(slice).unwrap());
        }
    }
    devices
}

fn claim(name: &str, requests: Value) -> Claim {
    let claim = json!({"metadata": {"name": name, "namespace": "d", "uid": name}, "spec": {"devices": {"requests": requests}}});
    serde_json::from_value(claim).unwrap()
}

fn exactly(fields: Value) -> Value {
    let mut exact = json!({"deviceClassName": "gpu"});
    exact.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    json!([{"name": "r", "exactly": exact}])
}

fn pod(name: &str, claim: &str) -> Pod {
    fixture::pod(name, json!({"resourceClaims": [{"name": "c", "resourceClaimName": claim}]}))
}

fn facts(name: &str) -> Facts {
    Facts { name: name.to_owned(), ..Facts::default() }
}

fn put(devices: &Devices, claim: Claim) {
    devices.lock().claims.insert(claim.key(), claim);
}

fn reason(devices: &Devices, pod: &Pod, node: &str) -> String {
    match devices.of_pod(pod) {
        Ok(claims) => {
            devices.refuse(&claims, &facts(node)).map_or_else(String::new, |one| one.reasons.join(", "))
        }
        Err(why) => why,
    }
}

fn chosen(devices: &Devices, pod: &Pod, node: &str) -> Vec<String> {
    let reserved = devices.reserve(&devices.of_pod(pod).unwrap(), &facts(node));
    let results = reserved[0].1.as_ref().unwrap()["devices"]["results"].as_array().unwrap().clone();
    results.iter().map(|result| result["device"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn devices_are_allocated_once_and_released_with_their_pod() {
    let devices = devices();
    put(&devices, claim("two", exactly(json!({"count": 2}))));
    put(&devices, claim("one", exactly(json!({}))));
    let (first, second) = (pod("p", "two"), pod("q", "one"));
    assert_eq!(reason(&devices, &first, "a"), "");
    assert_eq!(reason(&devices, &first, "c"), "cannot allocate all claims");
    let reserved = devices.reserve(&devices.of_pod(&first).unwrap(), &facts("a"));
    assert_eq!(reason(&devices, &second, "a"), "cannot allocate all claims");
    assert_eq!(reason(&devices, &second, "b"), "");
    // The claim has devices now: they are on one node.
    assert_eq!(reason(&devices, &first, "b"), "resourceclaim not available on the node");
    assert_eq!(reason(&devices, &first, "a"), "");
    let allocation = reserved[0].1.clone().unwrap();
    assert_eq!(allocation["devices"]["config"][0]["source"], "FromClass");
    let written = bind::status(&claim("two", json!([])), &first, Some(&allocation)).unwrap();
    assert_eq!(written["reservedFor"][0], json!({"resource": "pods", "name": "p", "uid": "p"}));
    devices.release(&reserved);
    assert_eq!(reason(&devices, &second, "a"), "");
}

#[test]
fn a_claim_that_was_deleted_unseen_keeps_no_devices() {
    let devices = devices();
    put(&devices, claim("two", exactly(json!({"count": 2}))));
    put(&devices, claim("one", exactly(json!({}))));
    assert_eq!(chosen(&devices, &pod("p", "two"), "a").len(), 2);
    assert_eq!(reason(&devices, &pod("q", "one"), "a"), "cannot allocate all claims");
    let gone = claim("two", json!([]));
    devices.lock().retain_claims(&HashSet::from([claim("one", json!([])).key()]));
    devices.lock().update(&gone.key(), gone);
    assert_eq!(devices.lock().claims.len(), 1);
    assert_eq!(reason(&devices, &pod("q", "one"), "a"), "");
}

#[test]
fn expressions_read_attributes_and_capacity() {
    let cases = [
        ("device.attributes['gpu.example.com'].bus == 2", vec!["large"]),
        ("device.capacity['gpu.example.com'].memory.compareTo(quantity('10Gi')) > 0", vec!["large"]),
        ("device.attributes['other.example.com'].version.isGreaterThan(semver('1.1.0'))", vec!["small"]),
        ("'x' in device.attributes['gpu.example.com']", vec![]),
    ];
    for (expression, expected) in cases {
        let devices = devices();
        put(&devices, claim("c", exactly(json!({"selectors": [{"cel": {"expression": expression}}]}))));
        if expected.is_empty() {
            assert_eq!(reason(&devices, &pod("p", "c"), "a"), "cannot allocate all claims", "{expression}");
        } else {
            assert_eq!(chosen(&devices, &pod("p", "c"), "a"), expected, "{expression}");
        }
    }
}

#[test]
fn alternatives_constraints_and_modes_are_kept() {
    let wants = |requests: Value, constraints: Value| {
        let devices = devices();
        let mut claim = claim("c", requests);
        claim.spec.devices.constraints = serde_json::from_value(constraints).unwrap();
        put(&devices, claim);
        devices
    };
    let first = json!([{"name": "r", "firstAvailable": [{"name": "many", "deviceClassName": "gpu", "count": 5},
        {"name": "few", "deviceClassName": "gpu", "count": 1}]}]);
    let few = wants(first, json!([]));
    assert_eq!(chosen(&few, &pod("p", "c"), "a"), ["small"]);
    let all = wants(exactly(json!({"allocationMode": "All"})), json!([]));
    assert_eq!(chosen(&all, &pod("p", "c"), "a").len(), 2);
    let same = |attribute: &str| {
        wants(
            exactly(json!({"count": 2})),
            json!([{"matchAttribute": format!("gpu.example.com/{attribute}")}]),
        )
    };
    assert_eq!(reason(&same("bus"), &pod("p", "c"), "a"), "cannot allocate all claims");
    assert_eq!(reason(&same("model"), &pod("p", "c"), "a"), "");
}

#[test]
fn claims_that_cannot_be_used_are_named() {
    let devices = devices();
    assert_eq!(reason(&devices, &pod("p", "x"), "a"), "resourceclaim \"x\" not found");
    let other = json!([{"name": "r", "exactly": {"deviceClassName": "fpga"}}]);
    put(&devices, claim("c", other));
    assert_eq!(reason(&devices, &pod("p", "c"), "a"), "request r: device class fpga does not exist");
    let by_template =
        fixture::pod("p", json!({"resourceClaims": [{"name": "c", "resourceClaimTemplateName": "t"}]}));
    assert_eq!(reason(&devices, &by_template, "a"), "pod \"d/p\": ResourceClaim not created yet");
}

#[test]
fn a_slice_with_a_negative_number_is_read_and_has_no_devices() {
    let devices = devices();
    put(&devices, claim("c", exactly(json!({}))));
    let slice = json!({"metadata": {"name": "a"}, "spec": {"driver": "gpu.example.com", "nodeName": "a",
        "pool": {"name": "a", "generation": 1, "resourceSliceCount": -1}, "devices": [{"name": "d"}]}});
    devices.lock().slices.insert("a".to_owned(), serde_json::from_value::<Slice>(slice).unwrap());
    assert_eq!(reason(&devices, &pod("p", "c"), "a"), "cannot allocate all claims");
}

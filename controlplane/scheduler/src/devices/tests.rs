use serde_json::{Value, json};

use super::object::{Claim, Class, Slice};
use super::*;
use crate::config::Profile;
use crate::decide::{FoundBy, decide};
use crate::fixture;
use crate::groups::placement::{Decision, place};
use crate::preempt::with_outcome;

/// Nodes a and b with two devices each, and a class that selects the devices of the driver.
fn devices() -> Devices {
    let devices = Devices::default();
    {
        let mut state = devices.lock();
        let class = json!({"metadata": {"name": "gpu"}, "spec": {"selectors": [
            {"cel": {"expression": "device.driver == 'gpu.example.com'"}}],
            "config": [{"opaque": {"driver": "gpu.example.com", "parameters": {"a": 1}}}]}});
        let class: Class = serde_json::from_value(class).unwrap();
        state.classes.insert(class);
        for node in ["a", "b"] {
            let device = |name: &str, size: &str, bus: i64| {
                json!({"name": name, "attributes": {"bus": {"int": bus}, "model": {"string": "m1"},
                    "other.example.com/version": {"version": "1.2.0"}}, "capacity": {"memory": {"value": size}}})
            };
            let slice = json!({"metadata": {"name": node}, "spec": {"driver": "gpu.example.com", "nodeName": node,
                "pool": {"name": node, "generation": 1, "resourceSliceCount": 1},
                "devices": [device("small", "8Gi", 1), device("large", "80Gi", 2)]}});
            state.slices.insert(serde_json::from_value::<Slice>(slice).unwrap());
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

fn properties(name: &str) -> NodeProperties {
    NodeProperties { name: name.to_owned(), ..NodeProperties::default() }
}

fn put(devices: &Devices, claim: Claim) {
    devices.lock().put_claim(claim);
}

fn reason(devices: &Devices, pod: &Pod, node: &str) -> String {
    match devices.of_pod(pod) {
        Ok(claims) => {
            let refused = devices.refuse(&claims, &properties(node));
            refused.map_or_else(|why| why, |one| one.map_or_else(String::new, |one| one.reasons.join(", ")))
        }
        Err(why) => why,
    }
}

fn chosen(devices: &Devices, pod: &Pod, node: &str) -> Vec<String> {
    let reserved = devices.reserve(&devices.of_pod(pod).unwrap(), &properties(node)).unwrap();
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
    let reserved = devices.reserve(&devices.of_pod(&first).unwrap(), &properties("a")).unwrap();
    assert_eq!(reason(&devices, &second, "a"), "cannot allocate all claims");
    assert_eq!(reason(&devices, &second, "b"), "");
    // Until the allocation is written, no other pod can use the claim.
    assert_eq!(reason(&devices, &first, "a"), "resource claim d/two is in the process of being allocated");
    let allocation = reserved[0].1.clone().unwrap();
    let mut written = claim("two", json!([]));
    written.status.allocation = Some(allocation.clone());
    put(&devices, written);
    assert_eq!(reason(&devices, &first, "b"), "resourceclaim not available on the node");
    assert_eq!(reason(&devices, &first, "a"), "");
    assert_eq!(reason(&devices, &second, "a"), "cannot allocate all claims");
    assert_eq!(allocation["devices"]["config"][0]["source"], "FromClass");
    let written = bind::status(&claim("two", json!([])), &first, Some(&allocation)).unwrap();
    assert_eq!(written["reservedFor"][0], json!({"resource": "pods", "name": "p", "uid": "p"}));
    put(&devices, claim("two", exactly(json!({"count": 2}))));
    assert_eq!(reason(&devices, &second, "a"), "");
    let reserved = devices.reserve(&devices.of_pod(&first).unwrap(), &properties("a")).unwrap();
    assert_eq!(reason(&devices, &second, "a"), "cannot allocate all claims");
    devices.release(&reserved);
    assert_eq!(reason(&devices, &second, "a"), "");
    assert_eq!(devices.lock().allocated, Allocated::default());
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
fn a_written_claim_does_not_replace_a_later_state() {
    let devices = devices();
    let of = |version: &str, allocation: bool| {
        let mut claim = claim("two", exactly(json!({"count": 2})));
        claim.metadata.resource_version = Some(version.to_owned());
        claim.status.allocation = allocation.then(|| json!({"devices": {"results": []}}));
        claim
    };
    put(&devices, of("12", false));
    let key = of("12", false).key();
    devices.lock().update(&key, of("9", true));
    assert_eq!(devices.lock().claims[&key].status.allocation, None, "the controller released the devices");
    devices.lock().update(&key, of("13", true));
    assert!(devices.lock().claims[&key].status.allocation.is_some());
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

/// Source: `allocateDevice` of upstream's allocator, with its argument `must`.
#[test]
fn a_request_for_all_devices_takes_each_device_or_none() {
    let devices = devices();
    let put_all = |name: &str, requests: Value, constraints: Value| {
        let mut claim = claim(name, requests);
        claim.spec.devices.constraints = serde_json::from_value(constraints).unwrap();
        put(&devices, claim);
    };
    let all = || exactly(json!({"allocationMode": "All"}));
    let same = |attribute: &str| json!([{"matchAttribute": format!("gpu.example.com/{attribute}")}]);
    put_all("same-model", all(), same("model"));
    assert_eq!(reason(&devices, &pod("p", "same-model"), "a"), "");
    let device = "gpu.example.com/a/large";
    let fault =
        format!("request r: cannot add device {device} because a claim constraint would not be satisfied");
    put_all("same-bus", all(), same("bus"));
    assert_eq!(reason(&devices, &pod("p", "same-bus"), "a"), format!("claim d/same-bus, {fault}"));
    let alternative = json!({"name": "r", "deviceClassName": "gpu", "allocationMode": "All"});
    put_all("alternative", json!([{"name": "q", "firstAvailable": [alternative]}]), same("bus"));
    assert_eq!(reason(&devices, &pod("p", "alternative"), "a"), format!("claim d/alternative, {fault}"));

    put(&devices, claim("one", exactly(json!({}))));
    assert_eq!(chosen(&devices, &pod("p", "one"), "a"), ["small"]);
    let none = "cannot allocate all claims";
    assert_eq!(reason(&devices, &pod("q", "same-bus"), "a"), none, "a device in use is no fault");
    let taints = json!([{"key": "k", "effect": "NoSchedule"}]);
    let slice = json!({"metadata": {"name": "c"}, "spec": {"driver": "gpu.example.com", "nodeName": "c",
        "pool": {"name": "c", "generation": 1, "resourceSliceCount": 1},
        "devices": [{"name": "tainted", "taints": taints}, {"name": "plain"}]}});
    devices.lock().slices.insert(serde_json::from_value::<Slice>(slice).unwrap());
    put(&devices, claim("all", all()));
    put(&devices, claim("other", exactly(json!({}))));
    let tolerations = json!([{"operator": "Exists"}]);
    put(&devices, claim("tolerant", exactly(json!({"allocationMode": "All", "tolerations": tolerations}))));
    assert_eq!(reason(&devices, &pod("p", "all"), "c"), none);
    assert_eq!(reason(&devices, &pod("p", "tolerant"), "c"), "");
    assert_eq!(chosen(&devices, &pod("p", "other"), "c"), ["plain"]);
}

/// Source: `errAllocationResultMaxSizeExceeded` of upstream's allocator. The limit comes before the constraints.
#[test]
fn an_alternative_with_too_many_devices_is_no_fault() {
    let devices = devices();
    let device = |at: i32| json!({"name": format!("d{at}"), "attributes": {"bus": {"int": at}}});
    let many: Vec<Value> = (0..33).map(device).collect();
    let slice = json!({"metadata": {"name": "c"}, "spec": {"driver": "gpu.example.com", "nodeName": "c",
        "pool": {"name": "c", "generation": 1, "resourceSliceCount": 1}, "devices": many}});
    devices.lock().slices.insert(serde_json::from_value::<Slice>(slice).unwrap());
    let alternatives = json!([{"name": "all", "deviceClassName": "gpu", "allocationMode": "All"},
        {"name": "one", "deviceClassName": "gpu"}]);
    let mut claim = claim("c", json!([{"name": "q", "firstAvailable": alternatives}]));
    let constraints = json!([{"matchAttribute": "gpu.example.com/bus"}]);
    claim.spec.devices.constraints = serde_json::from_value(constraints).unwrap();
    put(&devices, claim);
    assert_eq!(chosen(&devices, &pod("p", "c"), "c"), ["d0"]);
}

#[test]
fn the_filter_of_devices_comes_before_the_filter_of_declared_features() {
    let mut snapshot = fixture::snapshot(&["a", "c"].map(|name| fixture::node(name, json!({}))));
    snapshot.devices = devices();
    put(&snapshot.devices, claim("c", exactly(json!({}))));
    let rules = json!([{"action": "RestartAllContainers", "exitCodes": {"operator": "In", "values": [1]}}]);
    let spec = json!({"containers": [{"restartPolicyRules": rules}],
        "resourceClaims": [{"name": "c", "resourceClaimName": "c"}]});
    let refused = decide(&fixture::pod("p", spec), &Profile::default(), &mut snapshot).unwrap_err();
    let counts = "1 cannot allocate all claims, 1 node(s) didn't match Pod's required features";
    assert_eq!(refused.message, format!("0/2 nodes are available: {counts}."));
}

#[test]
fn a_pod_that_the_pre_filter_of_devices_refuses_has_no_claims_to_release() {
    let mut snapshot = fixture::snapshot(&[fixture::node("a", json!({}))]);
    snapshot.devices = devices();
    put(&snapshot.devices, claim("c", json!([{"name": "r", "exactly": {"deviceClassName": "fpga"}}])));
    let refused = decide(&pod("p", "c"), &Profile::default(), &mut snapshot).unwrap_err();
    let message = "0/1 nodes are available: request r: device class fpga does not exist.";
    assert_eq!(with_outcome(&refused, "devices", ""), format!("{message} no new claims to deallocate"));
    let preempted = with_outcome(&refused, "devices", "preemption: none");
    assert_eq!(preempted, format!("{message} no new claims to deallocate, preemption: none"));
    let volume = json!({"name": "v", "persistentVolumeClaim": {"claimName": "absent"}});
    let spec = json!({"volumes": [volume], "resourceClaims": [{"name": "c", "resourceClaimName": "c"}]});
    let refused = decide(&fixture::pod("p", spec), &Profile::default(), &mut snapshot).unwrap_err();
    let message = "0/1 nodes are available: persistentvolumeclaim \"absent\" not found.";
    assert_eq!(with_outcome(&refused, "devices", "preemption: none"), format!("{message} not found"));
}

/// A fault does not depend on pods that are nominated for the node.
#[test]
fn a_fault_of_a_claim_on_a_node_with_nominated_pods_also_ends_the_search() {
    let mut snapshot = fixture::snapshot(&[fixture::node("a", json!({}))]);
    snapshot.devices = devices();
    let absent = json!([{"cel": {"expression": "device.attributes['gpu.example.com'].absent == 1"}}]);
    put(&snapshot.devices, claim("c", exactly(json!({"selectors": absent}))));
    snapshot.nominate(&fixture::pod("nominated", json!({})), "a");
    let failed = decide(&pod("p", "c"), &Profile::default(), &mut snapshot).unwrap_err();
    assert_eq!(failed.found_by, FoundBy::Error, "{}", failed.message);
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
fn a_pod_waits_until_its_claims_exist() {
    let devices = devices();
    assert!(devices.has_claims_of(&fixture::pod("p", json!({}))));
    assert!(!devices.has_claims_of(&pod("p", "c")));
    put(&devices, claim("c", exactly(json!({"count": 9}))));
    assert!(devices.has_claims_of(&pod("p", "c")), "no node has the devices, but the claim exists");
    let mut by_template =
        fixture::pod("p", json!({"resourceClaims": [{"name": "c", "resourceClaimTemplateName": "t"}]}));
    assert!(!devices.has_claims_of(&by_template));
    let mut generated = |name: Value| {
        let status = json!({"resourceClaimStatuses": [{"name": "c", "resourceClaimName": name}]});
        by_template.status = serde_json::from_value(status).unwrap();
        devices.has_claims_of(&by_template)
    };
    assert!(generated(Value::Null), "the pod needs no claim object");
    assert!(!generated(json!("c")), "the claim of that name is not the pod's");
}

#[test]
fn an_expression_that_fails_for_a_device_is_a_fault_of_the_claim_or_class() {
    let devices = devices();
    let selectors = |expression: &str| json!([{"cel": {"expression": expression}}]);
    put(&devices, claim("c", exactly(json!({"selectors": selectors("device.attributes['x'].y")}))));
    let claims = devices.of_pod(&pod("p", "c")).unwrap();
    let why = devices.refuse(&claims, &properties("a")).unwrap_err();
    assert!(why.starts_with("claim d/c: selector #0: CEL runtime error: "), "{why}");
    assert_eq!(devices.refuse(&claims, &properties("c")), Ok(Some(refused("cannot allocate all claims"))));
    let broken = json!({"metadata": {"name": "gpu"}, "spec": {"selectors": selectors("device.nothing")}});
    let broken: Class = serde_json::from_value(broken).unwrap();
    devices.lock().classes.insert(broken);
    let why = devices.refuse(&claims, &properties("a")).unwrap_err();
    assert!(why.starts_with("class gpu: selector #0: CEL compile error: "), "{why}");
}

#[test]
fn a_fault_of_a_device_that_the_search_does_not_need_is_none() {
    let devices = devices();
    let slice = |parts: Value| {
        let slice = json!({"metadata": {"name": "c"}, "spec": {"driver": "gpu.example.com", "nodeName": "c",
            "pool": {"name": "c", "generation": 1, "resourceSliceCount": 1}, "devices": parts}});
        devices.lock().slices.insert(serde_json::from_value::<Slice>(slice).unwrap());
    };
    let (with, without) =
        (json!({"name": "with", "attributes": {"x": {"int": 1}}}), json!({"name": "without"}));
    let only = json!([{"cel": {"expression": "device.attributes['gpu.example.com'].x == 1"}}]);
    put(&devices, claim("one", exactly(json!({"selectors": only}))));
    put(&devices, claim("two", exactly(json!({"selectors": only, "count": 2}))));
    put(&devices, claim("all", exactly(json!({"selectors": only, "allocationMode": "All"}))));
    slice(json!([with, without]));
    assert_eq!(reason(&devices, &pod("p", "one"), "c"), "");
    for name in ["two", "all"] {
        let why = reason(&devices, &pod("p", name), "c");
        assert!(why.starts_with(&format!("claim d/{name}: selector #0: CEL runtime error: ")), "{why}");
    }
    slice(json!([without, with]));
    assert!(reason(&devices, &pod("p", "one"), "c").contains("CEL runtime error"));
}

#[test]
fn a_fault_of_a_claim_ends_the_search_although_another_node_fits() {
    let mut snapshot = fixture::snapshot(&["a", "c"].map(|name| fixture::node(name, json!({}))));
    snapshot.devices = devices();
    let slice = json!({"metadata": {"name": "c"}, "spec": {"driver": "gpu.example.com", "nodeName": "c",
        "pool": {"name": "c", "generation": 1, "resourceSliceCount": 1},
        "devices": [{"name": "d", "attributes": {"only": {"int": 1}}}]}});
    snapshot.devices.lock().slices.insert(serde_json::from_value::<Slice>(slice).unwrap());
    let only = json!([{"cel": {"expression": "device.attributes['gpu.example.com'].only == 1"}}]);
    put(&snapshot.devices, claim("c", exactly(json!({"selectors": only}))));
    let failed = decide(&pod("p", "c"), &Profile::default(), &mut snapshot).unwrap_err();
    let expected = "running \"DynamicResources\" filter plugin: claim d/c: selector #0: CEL runtime error: ";
    assert!(failed.message.starts_with(expected), "{}", failed.message);
    assert_eq!(failed.found_by, FoundBy::Error);
    assert_eq!(with_outcome(&failed, "devices", "preemption"), failed.message);
}

#[test]
fn a_fault_of_a_claim_fails_the_whole_gang() {
    let mut snapshot = fixture::snapshot(&["a", "c"].map(|name| fixture::node(name, json!({}))));
    snapshot.devices = devices();
    let slice = json!({"metadata": {"name": "c"}, "spec": {"driver": "gpu.example.com", "nodeName": "c",
        "pool": {"name": "c", "generation": 1, "resourceSliceCount": 1}, "devices": [{"name": "d"}]}});
    snapshot.devices.lock().slices.insert(serde_json::from_value::<Slice>(slice).unwrap());
    let absent = json!([{"cel": {"expression": "device.attributes['gpu.example.com'].absent == 1"}}]);
    put(&snapshot.devices, claim("c", exactly(json!({"selectors": absent}))));
    let gang = ["first", "p", "last"].map(|name| match name {
        "p" => pod("p", "c"),
        other => fixture::pod(other, json!({"containers": [{}]})),
    });
    let members: Vec<&Pod> = gang.iter().collect();
    let outcome = place(&members, &Profile::default(), &mut snapshot, 1, &|_uid| true);
    let why = "running \"DynamicResources\" filter plugin: claim d/c: selector #0: CEL runtime error: ";
    let of_group = format!("failed to schedule other pod from a pod group: {why}");
    assert!(outcome.verdict.is_error() && outcome.verdict.message.starts_with(&of_group));
    for (decision, expected) in outcome.decisions.iter().zip([of_group.as_str(), why, of_group.as_str()]) {
        let Decision::Refuse { message, nominated: None, victims } = decision else { panic!("{decision:?}") };
        assert!(message.starts_with(expected) && victims.is_empty(), "{message}");
    }
    assert!(snapshot.candidates().all(|node| node.info.requested.pods == 0), "the gang holds no resources");
}

#[test]
fn devices_are_allocated_while_their_shared_counters_suffice() {
    let devices = devices();
    let slice = |name: &str, spec: Value| {
        let mut slice = json!({"metadata": {"name": name}, "spec": {"driver": "gpu.example.com", "nodeName": "c",
            "pool": {"name": "c", "generation": 1, "resourceSliceCount": 2}}});
        slice["spec"].as_object_mut().unwrap().extend(spec.as_object().unwrap().clone());
        devices.lock().slices.insert(serde_json::from_value::<Slice>(slice).unwrap());
    };
    let memory = |amount: &str| json!({"memory": {"value": amount}});
    slice("counters", json!({"sharedCounters": [{"name": "card", "counters": memory("8Gi")}]}));
    let part = |name: &str, amount: &str| json!({"name": name, "consumesCounters": [{"counterSet": "card", "counters": memory(amount)}]});
    slice("parts", json!({"devices": [part("half", "4Gi"), part("most", "6Gi"), part("rest", "4096Mi")]}));
    put(&devices, claim("two", exactly(json!({"count": 2}))));
    put(&devices, claim("three", exactly(json!({"count": 3}))));
    put(&devices, claim("one", exactly(json!({}))));
    assert_eq!(chosen(&devices, &pod("p", "one"), "c"), ["half"]);
    assert_eq!(reason(&devices, &pod("q", "two"), "c"), "cannot allocate all claims");
    devices.lock().remove_claim(&claim("one", json!([])).key());
    assert_eq!(reason(&devices, &pod("q", "three"), "c"), "cannot allocate all claims");
    assert_eq!(chosen(&devices, &pod("q", "two"), "c"), ["half", "rest"]);
    // The search drops the first device, and gives its counters back.
    devices.lock().remove_claim(&claim("two", json!([])).key());
    slice("parts", json!({"devices": [part("most", "6Gi"), part("half", "4Gi"), part("rest", "4096Mi")]}));
    put(&devices, claim("two", exactly(json!({"count": 2}))));
    assert_eq!(chosen(&devices, &pod("q", "two"), "c"), ["half", "rest"]);
    devices.lock().remove_claim(&claim("two", json!([])).key());
    let unknown =
        json!({"name": "x", "consumesCounters": [{"counterSet": "other", "counters": memory("1")}]});
    slice("parts", json!({"devices": [unknown]}));
    put(&devices, claim("one", exactly(json!({}))));
    assert_eq!(reason(&devices, &pod("p", "one"), "c"), "cannot allocate all claims");
}

/// Devices with one more slice, of node `c`.
fn with_slice_of_c(spec: Value) -> Devices {
    let devices = devices();
    let mut slice = json!({"metadata": {"name": "c"}, "spec": {"driver": "gpu.example.com", "nodeName": "c",
        "pool": {"name": "c", "generation": 1, "resourceSliceCount": 1}}});
    slice["spec"].as_object_mut().unwrap().extend(spec.as_object().unwrap().clone());
    devices.apply(|state| state.put_slice(serde_json::from_value::<Slice>(slice).unwrap()));
    devices
}

fn memory(amount: &str) -> Value {
    exactly(json!({"capacity": {"requests": {"memory": amount}}}))
}

#[test]
fn claims_share_a_device_while_its_capacity_suffices() {
    let policy = json!({"default": "1Gi", "validRange": {"min": "1Gi", "step": "1Gi"}});
    let devices = with_slice_of_c(json!({"devices": [{"name": "card", "allowMultipleAllocations": true,
        "capacity": {"memory": {"value": "8Gi", "requestPolicy": policy}}}]}));
    for (name, amount) in [("five", "5Gi"), ("two", "1025Mi"), ("last", "1"), ("more", "1")] {
        put(&devices, claim(name, memory(amount)));
    }
    put(&devices, claim("nothing", exactly(json!({"capacity": {"requests": {"cores": "1"}}}))));
    put(&devices, claim("all", exactly(json!({"allocationMode": "All"}))));
    let reserved =
        |name: &str| devices.reserve(&devices.of_pod(&pod(name, name)).unwrap(), &properties("c")).unwrap();
    let result = |reserved: &Reservations| {
        reserved[0].1.as_ref().unwrap().pointer("/devices/results/0").unwrap().clone()
    };
    let five = reserved("five");
    let two = reserved("two");
    assert_eq!(result(&five)["consumedCapacity"], json!({"memory": "5Gi"}));
    assert_eq!(result(&two)["consumedCapacity"], json!({"memory": "2Gi"}));
    assert_eq!(result(&two)["device"], "card");
    let ids = [&five, &two].map(|one| result(one)["shareID"].as_str().unwrap().to_owned());
    assert!(ids[0] != ids[1] && ids[0].len() == 36, "{ids:?}");
    assert_eq!(reason(&devices, &pod("p", "nothing"), "c"), "cannot allocate all claims");
    assert_eq!(reason(&devices, &pod("p", "all"), "c"), "");
    let last = reserved("last");
    for name in ["more", "all"] {
        assert_eq!(reason(&devices, &pod("p", name), "c"), "cannot allocate all claims", "{name}");
    }
    devices.take_changes();
    // The watch delivers the written claim: its share stays in use.
    let mut written = claim("two", memory("1025Mi"));
    written.status.allocation.clone_from(&two[0].1);
    put(&devices, written.clone());
    assert!(!devices.take_changes().supply);
    assert_eq!(reason(&devices, &pod("p", "more"), "c"), "cannot allocate all claims");
    written.status.allocation = None;
    put(&devices, written);
    assert!(devices.take_changes().supply, "a share was released");
    assert_eq!(reason(&devices, &pod("p", "more"), "c"), "");
    devices.release(&five);
    devices.release(&last);
    assert_eq!(devices.lock().allocated, Allocated::default());
}

#[test]
fn the_requests_of_a_claim_share_a_device_and_one_request_gets_different_devices() {
    let devices = with_slice_of_c(json!({"devices": [{"name": "card", "allowMultipleAllocations": true,
        "capacity": {"memory": {"value": "8Gi"}}}]}));
    let requests = |amounts: [&str; 2]| {
        let [first, second] = amounts.map(|amount| memory(amount)[0].clone());
        let mut requests = json!([first, second]);
        requests[1]["name"] = "s".into();
        requests
    };
    put(&devices, claim("fits", requests(["5Gi", "3Gi"])));
    put(&devices, claim("large", requests(["5Gi", "4Gi"])));
    let count = json!({"count": 2, "capacity": {"requests": {"memory": "1Gi"}}});
    put(&devices, claim("two", exactly(count)));
    assert_eq!(reason(&devices, &pod("p", "large"), "c"), "cannot allocate all claims");
    assert_eq!(reason(&devices, &pod("p", "two"), "c"), "cannot allocate all claims");
    assert_eq!(chosen(&devices, &pod("p", "fits"), "c"), ["card", "card"]);
}

#[test]
fn the_shares_of_a_device_consume_its_counters_once() {
    let amount = json!({"memory": {"value": "6Gi"}});
    let consumed = json!([{"counterSet": "card", "counters": amount}]);
    let devices = with_slice_of_c(json!({"pool": {"name": "c", "generation": 1, "resourceSliceCount": 2},
        "devices": [{"name": "shared", "allowMultipleAllocations": true, "consumesCounters": consumed},
            {"name": "single", "consumesCounters": consumed}]}));
    let counters = json!({"metadata": {"name": "counters"}, "spec": {"driver": "gpu.example.com", "nodeName": "c",
        "pool": {"name": "c", "generation": 1, "resourceSliceCount": 2},
        "sharedCounters": [{"name": "card", "counters": {"memory": {"value": "8Gi"}}}]}});
    devices.apply(|state| state.put_slice(serde_json::from_value::<Slice>(counters).unwrap()));
    let one = exactly(json!({}))[0].clone();
    let mut two = json!([one, one]);
    two[1]["name"] = "s".into();
    put(&devices, claim("two", two));
    put(&devices, claim("next", exactly(json!({}))));
    let single = json!([{"cel": {"expression": "!device.allowMultipleAllocations"}}]);
    put(&devices, claim("single", exactly(json!({"selectors": single}))));
    assert_eq!(reason(&devices, &pod("p", "single"), "c"), "");
    assert_eq!(chosen(&devices, &pod("p", "two"), "c"), ["shared", "shared"]);
    assert_eq!(reason(&devices, &pod("p", "single"), "c"), "cannot allocate all claims");
    assert_eq!(chosen(&devices, &pod("p", "next"), "c"), ["shared"]);
}

#[test]
fn a_device_with_its_own_nodes_is_allocated_there_only() {
    let devices = devices();
    let zone = json!({"nodeSelectorTerms": [{"matchExpressions": [{"key": "zone", "operator": "In", "values": ["z"]}]}]});
    let slice = json!({"metadata": {"name": "own"}, "spec": {"driver": "gpu.example.com", "perDeviceNodeSelection": true,
        "pool": {"name": "own", "generation": 1, "resourceSliceCount": 1}, "devices": [{"name": "of-e", "nodeName": "e"},
            {"name": "of-z", "nodeSelector": zone}, {"name": "of-all", "allNodes": true, "bindsToNode": true}]}});
    devices.apply(|state| state.put_slice(serde_json::from_value::<Slice>(slice).unwrap()));
    let in_zone = NodeProperties { labels: [("zone".into(), "z".into())].into(), ..properties("f") };
    let cases = [
        (properties("e"), "two", vec!["of-e", "of-all"], Some("metadata.name")),
        (in_zone, "one", vec!["of-z"], Some("zone")),
        (properties("g"), "one", vec!["of-all"], Some("metadata.name")),
    ];
    put(&devices, claim("one", exactly(json!({}))));
    put(&devices, claim("two", exactly(json!({"count": 2}))));
    for (node, name, expected, key) in cases {
        let reserved = devices.reserve(&devices.of_pod(&pod("p", name)).unwrap(), &node).unwrap();
        let allocation = reserved[0].1.as_ref().unwrap();
        let results = allocation["devices"]["results"].as_array().unwrap();
        let found: Vec<&str> = results.iter().map(|result| result["device"].as_str().unwrap()).collect();
        assert_eq!(found, expected, "{}", node.name);
        let term = &allocation["nodeSelector"]["nodeSelectorTerms"][0];
        let requirement = [&term["matchFields"][0], &term["matchExpressions"][0]];
        let found = requirement.into_iter().find_map(|one| one["key"].as_str());
        assert_eq!(found, key, "{}", node.name);
        devices.release(&reserved);
    }
}

#[test]
fn a_share_with_a_negative_amount_gives_other_claims_nothing() {
    let devices = with_slice_of_c(json!({"devices": [{"name": "card", "allowMultipleAllocations": true,
        "capacity": {"memory": {"value": "8Gi"}}}]}));
    let mut hostile = claim("hostile", memory("1Gi"));
    let result = json!({"request": "r", "driver": "gpu.example.com", "pool": "c", "device": "card",
        "shareID": "a", "consumedCapacity": {"memory": "-100Gi"}});
    hostile.status.allocation = Some(json!({"devices": {"results": [result]}}));
    put(&devices, hostile);
    put(&devices, claim("six", memory("6Gi")));
    put(&devices, claim("three", memory("3Gi")));
    assert_eq!(chosen(&devices, &pod("p", "six"), "c"), ["card"]);
    assert_eq!(reason(&devices, &pod("q", "three"), "c"), "cannot allocate all claims");
}

#[tokio::test]
async fn a_claim_that_another_pod_reserved_is_read_and_written_again() {
    let devices = devices();
    let version = |version: &str, users: &[&str]| {
        let users: Vec<Value> = users.iter().map(|user| json!({"name": user, "uid": user})).collect();
        json!({"metadata": {"name": "c", "namespace": "d", "uid": "c", "resourceVersion": version},
            "status": {"allocation": {"devices": {"results": []}}, "reservedFor": users}})
    };
    put(&devices, serde_json::from_value(version("1", &[])).unwrap());
    let conflict = json!({"kind": "Status", "status": "Failure", "reason": "Conflict", "code": 409});
    let answers = [(409_u16, conflict), (200, version("2", &["q"])), (200, version("3", &["q", "p"]))];
    let answers = Mutex::new(answers.into_iter());
    let requests = Arc::new(Mutex::new(Vec::new()));
    let log = requests.clone();
    let service = tower::service_fn(move |request: http::Request<kube::client::Body>| {
        log.lock().unwrap().push(request.method().to_string());
        let (code, body) = answers.lock().unwrap().next().unwrap();
        async move {
            let body = kube::client::Body::from(body.to_string().into_bytes());
            Ok::<_, std::convert::Infallible>(http::Response::builder().status(code).body(body).unwrap())
        }
    });
    let client = kube::Client::new(service, "d");
    let pod = pod("p", "c");
    let reserved = devices.reserve(&devices.of_pod(&pod).unwrap(), &properties("a")).unwrap();
    bind::bind(&client, &devices, &pod, &reserved).await.unwrap();
    assert_eq!(*requests.lock().unwrap(), ["PATCH", "GET", "PATCH"]);
    assert_eq!(devices.lock().claims[&Key::new("d", "c")].status.reserved_for.len(), 2);
}

#[test]
fn a_slice_with_a_negative_number_is_read_and_has_no_devices() {
    let devices = devices();
    put(&devices, claim("c", exactly(json!({}))));
    let slice = json!({"metadata": {"name": "a"}, "spec": {"driver": "gpu.example.com", "nodeName": "a",
        "pool": {"name": "a", "generation": 1, "resourceSliceCount": -1}, "devices": [{"name": "d"}]}});
    devices.lock().slices.insert(serde_json::from_value::<Slice>(slice).unwrap());
    assert_eq!(reason(&devices, &pod("p", "c"), "a"), "cannot allocate all claims");
}

/// A slice with the pool `b` and these fields of the pool. Without a node, it is a slice of all nodes.
fn slice(name: &str, node: Option<&str>, pool: Value) -> Slice {
    let mut slice = json!({"metadata": {"name": name}, "spec": {"driver": "gpu.example.com", "nodeName": node,
        "allNodes": node.is_none(), "pool": {"name": "b", "generation": 1, "resourceSliceCount": 1},
        "devices": [{"name": "small"}, {"name": "large"}]}});
    slice["spec"]["pool"].as_object_mut().unwrap().extend(pool.as_object().unwrap().clone());
    serde_json::from_value(slice).unwrap()
}

#[test]
fn a_slice_of_a_node_never_changes_the_devices_of_other_nodes() {
    let hostile = [
        json!({"generation": 9}),
        json!({"resourceSliceCount": 5}),
        json!({}),
        json!({"generation": 9, "resourceSliceCount": 9}),
    ];
    for pool in hostile {
        let devices = devices();
        put(&devices, claim("two", exactly(json!({"count": 2}))));
        put(&devices, claim("all", exactly(json!({"allocationMode": "All"}))));
        devices.apply(|state| state.put_slice(slice("x", Some("a"), pool.clone())));
        assert_eq!(reason(&devices, &pod("p", "two"), "b"), "", "{pool}");
        let reserved = devices.reserve(&devices.of_pod(&pod("p", "all")).unwrap(), &properties("b")).unwrap();
        let results = reserved[0].1.as_ref().unwrap()["devices"]["results"].as_array().unwrap().len();
        assert_eq!(results, 2, "{pool}");
    }
}

#[test]
fn devices_in_use_on_a_node_are_not_in_use_on_other_nodes() {
    let devices = devices();
    // Node a has the pools a and b, with two devices each.
    devices.apply(|state| state.put_slice(slice("x", Some("a"), json!({}))));
    put(&devices, claim("four", exactly(json!({"count": 4}))));
    put(&devices, claim("two", exactly(json!({"count": 2}))));
    assert_eq!(chosen(&devices, &pod("p", "four"), "a").len(), 4);
    assert_eq!(reason(&devices, &pod("q", "two"), "a"), "cannot allocate all claims");
    assert_eq!(chosen(&devices, &pod("q", "two"), "b"), ["small", "large"]);
}

#[test]
fn a_node_cannot_add_devices_to_a_pool_of_all_nodes_or_use_them_up() {
    let devices = devices();
    devices.apply(|state| state.slices = Slices::default());
    devices.apply(|state| state.put_slice(slice("all", None, json!({}))));
    devices.apply(|state| state.put_slice(slice("x", Some("a"), json!({"generation": 9}))));
    put(&devices, claim("three", exactly(json!({"count": 3}))));
    put(&devices, claim("two", exactly(json!({"count": 2}))));
    put(&devices, claim("one", exactly(json!({}))));
    assert_eq!(reason(&devices, &pod("p", "three"), "a"), "cannot allocate all claims");
    assert_eq!(chosen(&devices, &pod("p", "two"), "c").len(), 2);
    assert_eq!(reason(&devices, &pod("q", "one"), "a"), "cannot allocate all claims");
}

#[tokio::test]
async fn pods_of_a_gang_share_a_claim_that_one_of_them_allocates() {
    use futures::FutureExt as _;
    let devices = devices();
    put(&devices, claim("one", exactly(json!({}))));
    let key = claim("one", json!([])).key();
    let reserved = devices.reserve(&devices.of_pod(&pod("p", "one")).unwrap(), &properties("a")).unwrap();
    assert!(reason(&devices, &pod("q", "one"), "a").ends_with("in the process of being allocated"));
    devices.share(&reserved);
    assert_eq!(reason(&devices, &pod("q", "one"), "a"), "");
    assert_eq!(
        reason(&devices, &pod("q", "one"), "b"),
        "resourceclaim not available on the node",
        "the devices are on node a"
    );
    let second = devices.reserve(&devices.of_pod(&pod("q", "one")).unwrap(), &properties("a")).unwrap();
    assert_eq!(second, [(key.clone(), None)]);
    devices.end_sharing();
    assert!(reason(&devices, &pod("r", "one"), "a").ends_with("in the process of being allocated"));
    // The second pod is bound after the first one has written the claim.
    assert!(devices.wait_for_allocation(&key).now_or_never().is_none());
    let mut written = claim("one", exactly(json!({})));
    written.status.allocation.clone_from(&reserved[0].1);
    devices.apply(|state| state.update(&key, written));
    assert!(devices.wait_for_allocation(&key).now_or_never().is_some());
    assert!(devices.lock().reserved_claim(&key, None).is_ok());
}

#[test]
fn a_reservation_that_is_taken_back_helps_no_pod() {
    let devices = devices();
    put(&devices, claim("one", exactly(json!({}))));
    devices.take_changes();
    let reserved = devices.reserve(&devices.of_pod(&pod("p", "one")).unwrap(), &properties("a")).unwrap();
    devices.undo(&reserved);
    assert_eq!(devices.take_changes(), DeviceChanges::default());
    assert_eq!(devices.lock().allocated, Allocated::default());
}

#[test]
fn a_reservation_fails_if_slices_or_claims_changed_after_the_filter() {
    let devices = devices();
    put(&devices, claim("one", exactly(json!({}))));
    let claims = devices.of_pod(&pod("p", "one")).unwrap();
    assert_eq!(devices.refuse(&claims, &properties("a")), Ok(None));
    devices.apply(|state| assert!(state.slices.remove("a")));
    assert_eq!(devices.reserve(&claims, &properties("a")).unwrap_err(), "cannot allocate all claims");
    let reserved = devices.reserve(&claims, &properties("b")).unwrap();
    let (key, allocation) = reserved[0].clone();
    assert!(devices.lock().reserved_claim(&key, allocation.as_ref()).is_ok());
    // The pod must not be bound if the claim has no allocation any more, or is another claim.
    assert!(devices.lock().reserved_claim(&key, None).is_err());
    devices.apply(|state| state.remove_claim(&key));
    assert!(devices.lock().reserved_claim(&key, allocation.as_ref()).is_err());
    assert_eq!(devices.reserve(&claims, &properties("b")).unwrap_err(), "resourceclaim d/one changed");
    assert_eq!(devices.lock().allocated, Allocated::default());
}

#[test]
fn only_changes_that_can_help_are_reported() {
    let devices = devices();
    let changes = || devices.take_changes();
    put(&devices, claim("one", exactly(json!({}))));
    let own = HashSet::from([claim("one", json!([])).key()]);
    assert_eq!(changes(), DeviceChanges { supply: false, claims: own.clone() });
    put(&devices, claim("one", exactly(json!({}))));
    assert_eq!(changes(), DeviceChanges::default(), "nothing changed");
    let reserved = devices.reserve(&devices.of_pod(&pod("p", "one")).unwrap(), &properties("a")).unwrap();
    let mut written = claim("one", exactly(json!({})));
    written.status.allocation.clone_from(&reserved[0].1);
    put(&devices, written.clone());
    assert_eq!(changes(), DeviceChanges { supply: false, claims: own.clone() }, "no device was released");
    written.status.allocation = None;
    put(&devices, written);
    assert_eq!(changes(), DeviceChanges { supply: true, claims: own });
    let slice = devices.lock().slices.get("a").unwrap().clone();
    devices.apply(|state| state.put_slice(slice));
    assert_eq!(changes(), DeviceChanges::default(), "the slice is the same");
}

/// An API server with one claim. Its log has the method and the last path segment of each request.
fn server_with_one_claim() -> (kube::Client, Arc<Mutex<Vec<String>>>) {
    let requests = Arc::new(Mutex::new(Vec::new()));
    let (log, stored) = (requests.clone(), Arc::new(Mutex::new(json!({}))));
    let service = tower::service_fn(move |request: http::Request<kube::client::Body>| {
        let (log, stored) = (log.clone(), stored.clone());
        async move {
            let (parts, body) = request.into_parts();
            let body = body.collect_bytes().await.unwrap();
            let path = parts.uri.path().rsplit('/').next().unwrap().to_owned();
            log.lock().unwrap().push(format!("{} {path}", parts.method));
            let mut claim = stored.lock().unwrap();
            if let Ok(Value::Object(change)) = serde_json::from_slice(&body) {
                for (field, value) in change {
                    match value {
                        Value::Object(fields) if claim[&field].is_object() => {
                            claim[&field].as_object_mut().unwrap().extend(fields);
                        }
                        value => claim[&field] = value,
                    }
                }
            }
            if parts.method == http::Method::POST {
                claim["metadata"] = json!({"name": "x", "namespace": "d", "uid": "x", "resourceVersion": "7",
                    "annotations": claim["metadata"]["annotations"],
                    "ownerReferences": claim["metadata"]["ownerReferences"]});
            }
            let body = kube::client::Body::from(claim.to_string().into_bytes());
            Ok::<_, std::convert::Infallible>(http::Response::new(body))
        }
    });
    let client = kube::Client::new(service, "d");
    (client, requests)
}

#[tokio::test]
async fn a_claim_is_created_for_extended_resources_and_deleted_if_the_pod_is_not_bound() {
    let devices = devices();
    let class = json!({"metadata": {"name": "gpu"}, "spec": {"extendedResourceName": "example.com/gpu"}});
    devices.apply(|state| state.put_class(serde_json::from_value::<Class>(class).unwrap()));
    put(&devices, claim("one", exactly(json!({}))));
    let container = json!({"name": "a", "resources": {"requests": {"example.com/gpu": "2"}}});
    let pod = fixture::pod("p", json!({"containers": [container]}));
    assert_eq!(reason(&devices, &pod, "c"), "cannot allocate all claims");
    assert_eq!(reason(&devices, &pod, "a"), "");
    let reserved = devices.reserve(&devices.of_pod(&pod).unwrap(), &properties("a")).unwrap();
    let claims = json!([{"name": "c", "resourceClaimName": "one"}]);
    let other = fixture::pod("q", json!({"resourceClaims": claims}));
    assert_eq!(reason(&devices, &other, "a"), "cannot allocate all claims");
    let (client, log) = server_with_one_claim();
    let keys = bind::bind(&client, &devices, &pod, &reserved).await.unwrap();
    assert_eq!(keys, [Key::new("d", "x")]);
    let requests = || std::mem::take(&mut *log.lock().unwrap());
    assert_eq!(requests(), ["POST resourceclaims", "PATCH x", "PATCH status", "PATCH status"]);
    {
        let mut state = devices.lock();
        assert!(state.claims[&keys[0]].status.allocation.is_some() && state.new_claims.is_empty());
        assert_eq!(state.former_claim(&pod), Some(&keys[0]));
        // The watch delivers the claim as it was before its allocation: the devices stay in use.
        let written = state.claims[&keys[0]].clone();
        let mut before = written.clone();
        before.status.allocation = None;
        state.put_claim(before);
        assert_eq!(state.assumed.len(), 1);
        assert_ne!(state.allocated, Allocated::default());
        state.put_claim(written);
        assert!(state.assumed.is_empty());
    }
    bind::unreserve(&client, &devices, &pod, &keys).await;
    // The pod, its claim, the status of the pod, the finalizers of the claim, the claim.
    assert_eq!(requests(), ["GET p", "GET x", "PATCH status", "PATCH x", "DELETE x"]);
    devices.apply(|state| state.remove_claim(&keys[0]));
    assert_eq!(devices.lock().allocated, Allocated::default());
}

#[test]
fn devices_with_binding_conditions_are_chosen_last_and_named_in_the_allocation() {
    let conditional =
        json!([{"name": "card", "bindingConditions": ["ok"], "bindingFailureConditions": ["bad"]}]);
    let devices = with_slice_of_c(json!({"devices": conditional}));
    let plain = json!({"metadata": {"name": "d"}, "spec": {"driver": "gpu.example.com", "nodeName": "c",
        "pool": {"name": "d", "generation": 1, "resourceSliceCount": 1}, "devices": [{"name": "plain"}]}});
    devices.apply(|state| state.put_slice(serde_json::from_value::<Slice>(plain).unwrap()));
    put(&devices, claim("one", exactly(json!({}))));
    put(&devices, claim("two", exactly(json!({}))));
    assert_eq!(chosen(&devices, &pod("p", "one"), "c"), ["plain"]);
    let reserved = devices.reserve(&devices.of_pod(&pod("q", "two")).unwrap(), &properties("c")).unwrap();
    let result = &reserved[0].1.as_ref().unwrap()["devices"]["results"][0];
    assert_eq!(result["device"], "card");
    assert_eq!(result["bindingConditions"], json!(["ok"]));
    assert_eq!(result["bindingFailureConditions"], json!(["bad"]));
}

#[test]
fn the_devices_of_an_unusable_claim_are_released_if_no_other_pod_uses_it() {
    let devices = devices();
    let result = json!({"request": "r", "driver": "gpu.example.com", "pool": "a", "device": "small",
        "bindingConditions": ["ok"]});
    let allocated = |users: &[&str], time: &str| {
        let mut claim = claim("one", exactly(json!({})));
        let allocation = json!({"devices": {"results": [result]}, "allocationTimestamp": time});
        claim.status.allocation = Some(allocation);
        claim.status.reserved_for = users.iter().map(|uid| json!({"uid": uid})).collect();
        put(&devices, claim);
    };
    let (node, unavailable) = (properties("a"), "1 resourceclaim not available on the node");
    let releasable = |why: &str| {
        let unusable = devices.releasable(&pod("p", "one"), why, &[&node]);
        unusable.map(|unusable| (unusable.key(), unusable.is_former))
    };
    allocated(&["p"], "2000-01-01T00:00:00Z");
    assert_eq!(reason(&devices, &pod("p", "one"), "a"), NOT_AVAILABLE, "the driver was too slow");
    assert_eq!(releasable(unavailable), Some((Key::new("d", "one"), false)));
    assert_eq!(releasable("1 Insufficient cpu"), None);
    allocated(&["p", "q"], "2000-01-01T00:00:00Z");
    assert_eq!(releasable(unavailable), None, "another pod uses it");
    allocated(&[], "9999-01-01T00:00:00Z");
    assert_eq!(reason(&devices, &pod("p", "one"), "a"), "", "the driver still has time");
    assert_eq!(releasable(unavailable), None);
}

#[test]
fn a_node_with_the_first_alternative_is_preferred() {
    let mut snapshot = fixture::snapshot(&["a", "b"].map(|name| fixture::node(name, json!({}))));
    snapshot.devices = devices();
    let only = |bus: i64| {
        let expression = format!("device.attributes['gpu.example.com'].bus == {bus}");
        json!({"name": format!("bus{bus}"), "deviceClassName": "gpu", "selectors": [{"cel": {"expression": expression}}]})
    };
    put(
        &snapshot.devices,
        claim(
            "first",
            exactly(json!({"selectors": [
        {"cel": {"expression": "device.attributes['gpu.example.com'].bus == 2"}}]})),
        ),
    );
    // Node a has no device with the first bus any more.
    let taken = snapshot.devices.of_pod(&pod("p", "first")).unwrap();
    snapshot.devices.reserve(&taken, &properties("a")).unwrap();
    put(&snapshot.devices, claim("c", json!([{"name": "r", "firstAvailable": [only(2), only(1)]}])));
    let claims = snapshot.devices.of_pod(&pod("q", "c")).unwrap();
    assert_eq!(["a", "b"].map(|node| snapshot.devices.score(&claims, &properties(node))), [7, 8]);
    assert_eq!(decide(&pod("q", "c"), &Profile::default(), &mut snapshot), Ok("b".to_owned()));
}

/// A version of a claim for two devices, without an allocation.
fn claim_of_two(version: &str) -> Claim {
    let mut claim = claim("two", exactly(json!({"count": 2})));
    claim.metadata.resource_version = Some(version.to_owned());
    claim
}

/// Notes that the reserved devices were written into version 3 of the claim.
fn write_allocation(devices: &Devices, reserved: &Reservations) {
    let mut written = claim_of_two("3");
    written.status.allocation.clone_from(&reserved[0].1);
    devices.apply(|state| state.update(&reserved[0].0, written));
}

#[test]
fn a_released_claim_keeps_no_devices_although_the_watch_skipped_its_allocation() {
    let devices = devices();
    put(&devices, claim_of_two("1"));
    let reserved = devices.reserve(&devices.of_pod(&pod("p", "two")).unwrap(), &properties("a")).unwrap();
    write_allocation(&devices, &reserved);
    put(&devices, claim_of_two("2"));
    assert_ne!(devices.lock().allocated, Allocated::default(), "the state is older than the allocation");
    write_allocation(&devices, &reserved);
    put(&devices, claim_of_two("4"));
    assert_eq!(devices.lock().allocated, Allocated::default());
}

#[test]
fn a_pod_that_is_not_bound_keeps_its_written_devices_while_the_watch_is_behind() {
    let devices = devices();
    put(&devices, claim_of_two("1"));
    let reserved = devices.reserve(&devices.of_pod(&pod("p", "two")).unwrap(), &properties("a")).unwrap();
    write_allocation(&devices, &reserved);
    // The claim has a finalizer, but no allocation yet.
    devices.apply(|state| state.put_changed(claim_of_two("2")));
    devices.release(&reserved);
    assert_ne!(devices.lock().allocated, Allocated::default());
    devices.apply(|state| state.put_changed(claim_of_two("4")));
    assert_eq!(devices.lock().allocated, Allocated::default(), "the claim is released");
}

#[test]
fn the_searches_of_an_attempt_share_one_limit_and_the_reservation_has_its_own() {
    let devices = devices();
    put(&devices, claim("one", exactly(json!({}))));
    let pod = pod("p", "one");
    devices.start_attempt(1, 1);
    let claims = devices.of_pod(&pod).unwrap();
    assert_eq!(reason(&devices, &pod, "a"), "");
    claims.work.add(u64::MAX / 2);
    assert_eq!(reason(&devices, &pod, "a"), TOO_MUCH_WORK, "another search of the same attempt");
    devices.end_attempt();
    assert_eq!(reason(&devices, &pod, "a"), "", "the next attempt");
    assert!(devices.reserve(&claims, &properties("a")).is_ok(), "the node was found before the limit");
}

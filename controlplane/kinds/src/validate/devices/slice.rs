//! Devices of resource slices. Source: `validateDevice` and `validateCounterSet` of `pkg/apis/resource/validation`.

use std::collections::HashSet;

use serde_json::Value;

use super::{driver, label, limit, name_of, policy, unique};
use crate::validate::{Causes, Path, entries, format, items, scheduling, text};
use coracle_values::Quantity;

const MAX_DEVICES: usize = 128;
/// Maximum devices of a slice in which a device has taints, counters or lists of values.
const MAX_ADVANCED_DEVICES: usize = 64;
const MAX_COUNTER_SETS: usize = 8;
const MAX_COUNTERS: usize = 32;
const MAX_CONSUMPTIONS: usize = 2;
const MAX_ATTRIBUTES: usize = 32;
const MAX_ATTRIBUTE_VALUES: usize = 48;
const MAX_TAINTS: usize = 16;
const MAX_CONDITIONS: usize = 4;
/// Maximum size of a C identifier, in bytes.
const MAX_IDENTIFIER: usize = 32;
/// Maximum size of a value of the type string or version, in bytes.
const MAX_VALUE: usize = 64;
const IDENTIFIER: &str = "a valid C identifier must start with alphabetic character or '_', followed by a string of \
    alphanumeric characters or '_' (e.g. 'my_name',  or 'MY_NAME',  or 'MyName', regex used for validation is \
    '[A-Za-z_][A-Za-z0-9_]*')";
/// Effects of taints of devices.
pub(super) const EFFECTS: &[&str] = &["NoExecute", "NoSchedule", "None"];
/// Fields with a list of values of an attribute.
const LISTS: [&str; 4] = ["bools", "ints", "strings", "versions"];

/// Checks the devices and the shared counters of a slice.
pub(super) fn devices(causes: &mut Causes, path: &Path, spec: &Value) {
    let here = path.field("devices");
    let is_advanced = |device: &Value| {
        ["taints", "consumesCounters"].iter().any(|list| items(&device[list]).next().is_some())
            || entries(&device["attributes"]).any(|(_, one)| LISTS.iter().any(|list| !one[list].is_null()))
    };
    let most = if items(&spec["devices"]).any(|(_, device)| is_advanced(device)) {
        MAX_ADVANCED_DEVICES
    } else {
        MAX_DEVICES
    };
    if limit(causes, &here, &spec["devices"], most) {
        for (index, one) in items(&spec["devices"]) {
            device(causes, &here.index(index), one, spec["perDeviceNodeSelection"] == true);
        }
        unique(causes, &here, &spec["devices"], |device| &device["name"]);
    }
    let here = path.field("sharedCounters");
    if limit(causes, &here, &spec["sharedCounters"], MAX_COUNTER_SETS) {
        for (index, set) in items(&spec["sharedCounters"]) {
            counters(causes, &here.index(index), set, "name");
        }
        unique(causes, &here, &spec["sharedCounters"], |set| &set["name"]);
    }
}

fn device(causes: &mut Causes, path: &Path, device: &Value, has_own_nodes: bool) {
    name_of(causes, path, device);
    numbers(causes, path, device);
    for (name, attribute) in entries(&device["attributes"]) {
        qualified(causes, &path.field("attributes"), name);
        self::attribute(causes, &path.field("attributes").key(name), attribute);
    }
    let is_shared = device["allowMultipleAllocations"] == true;
    for (name, capacity) in entries(&device["capacity"]) {
        qualified(causes, &path.field("capacity"), name);
        let here = path.field("capacity").key(name).field("requestPolicy");
        match (capacity["requestPolicy"].is_null(), is_shared) {
            (true, _) => {}
            (false, true) => policy::check(causes, &here, capacity),
            (false, false) => causes.forbidden(&here, "allowMultipleAllocations must be true"),
        }
    }
    let here = path.field("taints");
    if limit(causes, &here, &device["taints"], MAX_TAINTS) {
        for (index, one) in items(&device["taints"]) {
            taint(causes, &here.index(index), one);
        }
    }
    let here = path.field("consumesCounters");
    if limit(causes, &here, &device["consumesCounters"], MAX_CONSUMPTIONS) {
        for (index, set) in items(&device["consumesCounters"]) {
            counters(causes, &here.index(index), set, "counterSet");
        }
        unique(causes, &here, &device["consumesCounters"], |set| &set["counterSet"]);
    }
    nodes(causes, path, device, has_own_nodes);
    binding(causes, path, device);
    mappings(causes, &path.field("nodeAllocatableResourceMappings"), device);
}

/// Checks the number of attributes, capacities and values.
fn numbers(causes: &mut Causes, path: &Path, device: &Value) {
    let entries_of = |field: &str| entries(&device[field]).count();
    let both = entries_of("attributes") + entries_of("capacity");
    if both > MAX_ATTRIBUTES {
        let detail =
            format!("the total number of attributes and capacities must not exceed {MAX_ATTRIBUTES}");
        causes.invalid(path, &both.into(), &detail);
    }
    let values =
        |attribute: &Value| LISTS.iter().map(|list| items(&attribute[list]).count()).sum::<usize>().max(1);
    let values: usize = entries(&device["attributes"]).map(|(_, attribute)| values(attribute)).sum();
    if values > MAX_ATTRIBUTE_VALUES {
        let detail = format!("the total number of attribute values must not exceed {MAX_ATTRIBUTE_VALUES}");
        causes.invalid(path, &values.into(), &detail);
    }
}

fn attribute(causes: &mut Causes, path: &Path, attribute: &Value) {
    let set = |field: &&str| !attribute[*field].is_null();
    let count = ["bool", "int", "string", "version"].iter().filter(|field| set(field)).count()
        + LISTS.iter().filter(|field| set(field)).count();
    value(causes, &path.field("string"), &attribute["string"], false);
    value(causes, &path.field("version"), &attribute["version"], true);
    for list in LISTS {
        if attribute[list].as_array().is_some_and(Vec::is_empty) {
            causes.invalid(&path.field(list), &attribute[list], "must not be empty if specified");
        }
    }
    for (list, is_version) in [("strings", false), ("versions", true)] {
        for (index, one) in items(&attribute[list]) {
            value(causes, &path.field(list).index(index), one, is_version);
        }
    }
    match count {
        0 => causes.invalid(path, &"".into(), "exactly one value must be specified"),
        1 => {}
        _ => causes.invalid(path, attribute, "exactly one value must be specified"),
    }
}

fn value(causes: &mut Causes, path: &Path, value: &Value, is_version: bool) {
    let Some(text) = value.as_str() else { return };
    if is_version && !is_semantic_version(text) {
        causes.invalid(path, value, "must be a string compatible with semver.org spec 2.0.0");
    }
    if text.len() > MAX_VALUE {
        causes.too_long(path, MAX_VALUE);
    }
}

/// Whether a text is a version such as `1.2.3-alpha.1+build`.
fn is_semantic_version(text: &str) -> bool {
    let is_number = |part: &str| {
        !part.is_empty()
            && part.bytes().all(|byte| byte.is_ascii_digit())
            && (part == "0" || !part.starts_with('0'))
    };
    let is_word = |part: &str| {
        !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
    };
    let (rest, build) = text.split_once('+').map_or((text, None), |(rest, build)| (rest, Some(build)));
    let (core, pre) = rest.split_once('-').map_or((rest, None), |(core, pre)| (core, Some(pre)));
    let all_digits = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
    core.split('.').count() == 3
        && core.split('.').all(is_number)
        && pre.is_none_or(|pre| {
            pre.split('.').all(|part| is_word(part) && (!all_digits(part) || is_number(part)))
        })
        && build.is_none_or(|build| build.split('.').all(is_word))
}

/// Checks the name of an attribute or a capacity: an identifier, or a domain and an identifier.
pub(super) fn qualified(causes: &mut Causes, path: &Path, name: &str) {
    match name.split('/').collect::<Vec<_>>().as_slice() {
        [one] => identifier(causes, path, one),
        [domain, one] => {
            match *domain {
                "" => causes.invalid(path, &"".into(), "the domain must not be empty"),
                domain => driver(causes, path, &domain.into()),
            }
            match *one {
                "" => causes.invalid(path, &"".into(), "the name must not be empty"),
                one => identifier(causes, path, one),
            }
        }
        // As upstream, names with more than one slash are not checked.
        _ => {}
    }
}

/// Checks the name of an attribute with a domain.
pub(super) fn fully_qualified(causes: &mut Causes, path: &Path, name: &str) {
    qualified(causes, path, name);
    if !name.contains('/') {
        let detail = "a fully qualified name must be a domain and a name separated by a slash";
        causes.invalid(path, &name.into(), detail);
    }
}

fn identifier(causes: &mut Causes, path: &Path, name: &str) {
    if name.len() > MAX_IDENTIFIER {
        causes.too_long(path, MAX_IDENTIFIER);
    }
    let is_letter = |byte: u8| byte.is_ascii_alphabetic() || byte == b'_';
    let fits = name.bytes().next().is_some_and(is_letter)
        && name.bytes().all(|byte| is_letter(byte) || byte.is_ascii_digit());
    if !fits {
        causes.invalid(path, &name.into(), IDENTIFIER);
    }
}

fn taint(causes: &mut Causes, path: &Path, taint: &Value) {
    let key = text(&taint["key"]);
    causes.format(&path.field("key"), key, format::qualified_name(key));
    let value = text(&taint["value"]);
    causes.format(&path.field("value"), value, format::label_value(value));
    causes.one_of(&path.field("effect"), &taint["effect"], EFFECTS);
}

/// Checks a set of counters, whose name is in this field.
fn counters(causes: &mut Causes, path: &Path, set: &Value, name: &str) {
    label(causes, &path.field(name), &set[name]);
    let here = path.field("counters");
    match entries(&set["counters"]).count() {
        0 => return causes.required(&here, ""),
        count if count > MAX_COUNTERS => return causes.too_many(&here, count, MAX_COUNTERS),
        _ => {}
    }
    for (name, _) in entries(&set["counters"]) {
        causes.format(&here, name, format::dns1123_label(name));
    }
}

/// Checks the nodes of a device. With `perDeviceNodeSelection` each device has exactly one of nodeName, nodeSelector
/// and allNodes.
fn nodes(causes: &mut Causes, path: &Path, device: &Value, has_own_nodes: bool) {
    const ONE: &str = "exactly one of `nodeName`, `nodeSelector`, or `allNodes` is required when \
        `perDeviceNodeSelection` is set to true in the ResourceSlice spec";
    let fields = ["nodeName", "nodeSelector", "allNodes"];
    if !has_own_nodes {
        if fields.iter().any(|field| !device[*field].is_null()) {
            let detail = "`nodeName`, `nodeSelector` and `allNodes` can only be set if `perDeviceNodeSelection` is set \
                to true in the ResourceSlice spec";
            causes.invalid(path, &Value::Null, detail);
        }
        return;
    }
    let mut set = Vec::new();
    match device["nodeName"].as_str() {
        None => {}
        Some("") => causes.invalid(&path.field("nodeName"), &"".into(), "must not be empty"),
        Some(name) => {
            set.push("`nodeName`");
            causes.format(&path.field("nodeName"), name, format::dns1123_subdomain(name));
        }
    }
    if device["nodeSelector"].is_object() {
        set.push("`nodeSelector`");
        scheduling::node_terms(causes, &path.field("nodeSelector"), &device["nodeSelector"]);
    }
    match device["allNodes"].as_bool() {
        Some(true) => set.push("`allNodes`"),
        Some(false) => {
            causes.invalid(&path.field("allNodes"), &false.into(), "must be either unset or set to true");
        }
        None => {}
    }
    match set.len() {
        0 => causes.required(path, ONE),
        1 => {}
        _ => causes.invalid(path, &format!("{{{}}}", set.join(", ")).into(), ONE),
    }
}

/// Checks the conditions of a device that a pod waits for.
pub(super) fn binding(causes: &mut Causes, path: &Path, device: &Value) {
    let (conditions, failures) = ("bindingConditions", "bindingFailureConditions");
    for list in [conditions, failures] {
        let here = path.field(list);
        if limit(causes, &here, &device[list], MAX_CONDITIONS) {
            for (index, name) in items(&device[list]) {
                causes.format(&here.index(index), text(name), format::qualified_name(text(name)));
            }
        }
        unique(causes, &here, &device[list], |name| name);
    }
    let needed: HashSet<&Value> = items(&device[conditions]).map(|(_, name)| name).collect();
    for (index, name) in items(&device[failures]) {
        if needed.contains(name) {
            let detail = "bindingFailureConditions must not overlap with bindingConditions";
            causes.invalid(&path.field(failures).index(index), name, detail);
        }
    }
    for (list, other) in [(conditions, failures), (failures, conditions)] {
        if items(&device[list]).next().is_none() && items(&device[other]).next().is_some() {
            causes.invalid(&path.field(list), &device[list], &format!("{list} are required to use {other}"));
        }
    }
}

/// Checks the node resources that a device maps to.
fn mappings(causes: &mut Causes, path: &Path, device: &Value) {
    for (name, mapping) in entries(&device["nodeAllocatableResourceMappings"]) {
        let here = path.key(name);
        if name.contains('/') && !name.contains("kubernetes.io/") {
            causes.invalid(&here, &name.as_str().into(), "must be a node allocatable resource name");
        }
        let (multiplier, key) = (&mapping["allocationMultiplier"], &mapping["capacityKey"]);
        if multiplier.is_null() && key.is_null() {
            let detail = "at least one of allocationMultiplier or capacityKey must be set";
            causes.invalid(&here, &"".into(), detail);
        }
        let amount = multiplier.as_str().and_then(|text| Quantity::parse(text).ok());
        if amount.is_some_and(|amount| amount.signum() <= 0) {
            causes.invalid(&here.field("allocationMultiplier"), multiplier, "must be positive");
        }
        match key.as_str() {
            Some("") => {
                let detail = "capacityKey must not be an empty string";
                causes.invalid(&here.field("capacityKey"), key, detail);
            }
            Some(name) if device["capacity"].get(name).is_none() => {
                causes.not_found(&here.field("capacityKey"), key);
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn fields(device: Value) -> Vec<String> {
        let mut causes = Causes::default();
        devices(&mut causes, &Path::root("spec"), &json!({"devices": [device]}));
        causes.into_list().into_iter().map(|cause| cause.field).collect()
    }

    #[test]
    fn attributes_have_one_value_and_a_valid_name() {
        let good = json!({"name": "a", "attributes": {"x": {"bool": true}, "d.example.com/v": {"version": "1.2.3-a.1"}}});
        assert_eq!(fields(good), Vec::<String>::new());
        let here = "spec.devices[0].attributes";
        let cases = [
            (json!({"x": {}}), vec![format!("{here}[x]")]),
            (json!({"x": {"bool": true, "int": 1}}), vec![format!("{here}[x]")]),
            (json!({"x": {"version": "01.2.3"}}), vec![format!("{here}[x].version")]),
            (json!({"a b": {"int": 1}}), vec![here.to_owned()]),
            (json!({"/b": {"int": 1}}), vec![here.to_owned()]),
        ];
        for (attributes, expect) in cases {
            assert_eq!(fields(json!({"name": "a", "attributes": attributes})), expect);
        }
    }

    #[test]
    fn taints_counters_and_conditions_are_checked() {
        let device = json!({"name": "a", "taints": [{"key": "k", "effect": "x"}], "consumesCounters": [{"counterSet": "A"}],
            "bindingConditions": ["a"], "allNodes": true, "capacity": {"c": {"value": "1", "requestPolicy": {}}}});
        let here = "spec.devices[0]";
        let expect = [
            format!("{here}.capacity[c].requestPolicy"),
            format!("{here}.taints[0].effect"),
            format!("{here}.consumesCounters[0].counterSet"),
            format!("{here}.consumesCounters[0].counters"),
            here.to_owned(),
            format!("{here}.bindingFailureConditions"),
        ];
        assert_eq!(fields(device), expect);
    }

    #[test]
    fn lists_of_values_have_a_value() {
        let here = "spec.devices[0].attributes[x].bools";
        assert_eq!(fields(json!({"name": "a", "attributes": {"x": {"bools": []}}})), [here]);
        assert_eq!(
            fields(json!({"name": "a", "attributes": {"x": {"bools": [true]}}})),
            Vec::<String>::new()
        );
    }

    #[test]
    fn shared_devices_may_have_policies() {
        let capacity = json!({"c": {"value": "1", "requestPolicy": {"validValues": ["1"]}}});
        let device = json!({"name": "a", "allowMultipleAllocations": true, "capacity": capacity});
        assert_eq!(fields(device), ["spec.devices[0].capacity[c].requestPolicy.default"]);
    }
}

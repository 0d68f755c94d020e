//! Nodes and CSINodes.

use std::collections::{HashMap, HashSet};

use serde_json::Value;

use super::{Causes, Path, entries, format, items, quota, text, volume_source};

/// Maximum size of a storage driver's node id, in bytes.
const MAX_NODE_ID: usize = 256;
/// Fields of the entry of a storage driver that cannot change.
const FIXED: [&str; 2] = ["nodeID", "topologyKeys"];

pub(crate) fn node(causes: &mut Causes, object: &Value, old: Option<&Value>) {
    let (path, spec) = (Path::root("spec"), &object["spec"]);
    // As upstream, violations of taints have a path in the metadata.
    taints(causes, &Path::root("metadata").field("taints"), &spec["taints"]);
    for (index, cidr) in items(&spec["podCIDRs"]) {
        causes.format(&path.field("podCIDRs").index(index), text(cidr), format::cidr(text(cidr)));
    }
    if !one_of_each_family(&spec["podCIDRs"]) {
        let detail = "may specify no more than one CIDR for each IP family";
        causes.invalid(&path.field("podCIDRs"), &spec["podCIDRs"], detail);
    }
    let swap = &object["status"]["nodeInfo"]["swap"]["capacity"];
    if swap.as_i64().is_some_and(|capacity| capacity <= 0) {
        // As upstream, the path of the error is in the metadata.
        let path = Path::root("metadata").field("nodeSwapStatus").field("capacity");
        causes.invalid(&path, swap, "must be greater than zero");
    }
    status(causes, &object["status"], old.is_some());
    let Some(old) = old else { return };
    let before = &old["spec"]["podCIDRs"];
    if items(before).next().is_some() && spec["podCIDRs"] != *before {
        let detail = "node updates may not change podCIDR except from \"\" to valid";
        causes.forbidden(&path.field("podCIDRs"), detail);
    }
    let provider = &old["spec"]["providerID"];
    if !text(provider).is_empty() && spec["providerID"] != *provider {
        causes.forbidden(
            &path.field("providerID"),
            "node updates may not change providerID except from \"\" to valid",
        );
    }
}

/// Checks amounts, features and addresses in the status of a node. The addresses are checked in updates only.
pub(super) fn status(causes: &mut Causes, status: &Value, is_update: bool) {
    let path = Path::root("status");
    for list in ["capacity", "allocatable"] {
        for (name, amount) in entries(&status[list]) {
            quota::amount(causes, &path.field(list).field(name), name, amount);
        }
    }
    features(causes, &path.field("declaredFeatures"), &status["declaredFeatures"]);
    if !is_update {
        return;
    }
    let mut seen = HashSet::new();
    for (index, address) in items(&status["addresses"]) {
        if !seen.insert((text(&address["type"]), text(&address["address"]))) {
            causes.duplicate(&path.field("addresses").index(index), address);
        }
    }
}

/// Checks the features that a node declares: a sorted list of names.
fn features(causes: &mut Causes, path: &Path, list: &Value) {
    let mut last: Option<&str> = None;
    for (index, feature) in items(list) {
        let (here, name) = (path.index(index), text(feature));
        match last {
            Some(last) if last == name => causes.duplicate(&here, feature),
            Some(last) if last > name => causes.invalid(&here, feature, "list must be sorted alphabetically"),
            _ => {}
        }
        last = Some(name);
        if name.len() > 253 {
            let detail = format!("invalid feature name {name:?}: must be no more than 253 characters");
            causes.invalid(&here, feature, &detail);
        } else if !is_feature(name) {
            let detail = format!(
                "invalid feature name {name:?}: must start with an UpperCamelCase segment, with subsequent segments separated by '/' (e.g., MyFeature or MyFeature/mySubFeature), and contain only alphanumeric characters and slashes"
            );
            causes.invalid(&here, feature, &detail);
        }
    }
}

fn is_feature(name: &str) -> bool {
    let is_segment = |segment: &str| {
        segment.starts_with(|letter: char| letter.is_ascii_alphabetic())
            && segment.bytes().all(|byte| byte.is_ascii_alphanumeric())
    };
    name.starts_with(|letter: char| letter.is_ascii_uppercase()) && name.split('/').all(is_segment)
}

/// Whether a list has at most one range of each address family.
fn one_of_each_family(list: &Value) -> bool {
    let families: Vec<bool> = items(list).map(|(_, range)| text(range).contains(':')).collect();
    families.len() < 2 || (families.len() == 2 && families[0] != families[1])
}

pub(crate) fn csi_node(causes: &mut Causes, object: &Value, old: Option<&Value>) {
    let (path, drivers) = (Path::root("spec").field("drivers"), &object["spec"]["drivers"]);
    let mut seen = HashSet::new();
    for (index, driver) in items(drivers) {
        let here = path.index(index);
        volume_source::driver(causes, &here.field("name"), text(&driver["name"]));
        let id = text(&driver["nodeID"]);
        if id.is_empty() {
            causes.required(&here.field("nodeID"), "");
        } else if id.len() > MAX_NODE_ID {
            let detail = format!("must be {MAX_NODE_ID} characters or less");
            causes.invalid(&here.field("nodeID"), &driver["nodeID"], &detail);
        }
        causes.not_negative(&here.field("allocatable").field("count"), &driver["allocatable"]["count"]);
        if !seen.insert(text(&driver["name"])) {
            causes.duplicate(&here.field("name"), &driver["name"]);
        }
        let mut keys = HashSet::new();
        // As upstream, violations of these keys have the path of the driver.
        for (_, key) in items(&driver["topologyKeys"]) {
            if text(key).is_empty() {
                causes.required(&here, "");
            }
            if !keys.insert(text(key)) {
                causes.duplicate(&here, key);
            }
            causes.format(&here, text(key), format::qualified_name(text(key)));
        }
    }
    let Some(old) = old else { return };
    // In the entry of a driver, only `allocatable` may change: the number of volumes that fit.
    let before: HashMap<&str, &Value> =
        items(&old["spec"]["drivers"]).map(|(_, driver)| (text(&driver["name"]), driver)).collect();
    for (_, driver) in items(drivers) {
        let was = before.get(text(&driver["name"]));
        if was.is_some_and(|was| FIXED.iter().any(|field| was[field] != driver[field])) {
            causes.invalid(&path, driver, "field is immutable");
        }
    }
}

fn taints(causes: &mut Causes, path: &Path, taints: &Value) {
    let mut seen = HashSet::new();
    for (index, taint) in items(taints) {
        let here = path.index(index);
        let key = text(&taint["key"]);
        causes.format(&here.field("key"), key, format::qualified_name(key));
        let value = text(&taint["value"]);
        causes.format(&here.field("value"), value, format::label_value(value));
        causes.one_of(
            &here.field("effect"),
            &taint["effect"],
            &["NoSchedule", "PreferNoSchedule", "NoExecute"],
        );
        if !seen.insert((key, text(&taint["effect"]))) {
            causes.duplicate_because(&here, taint, "taints must be unique by key and effect pair");
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::validate::tests::found;

    fn fields(check: impl FnOnce(&mut Causes)) -> Vec<String> {
        found(check).iter().map(|cause| cause.split(": ").take(2).collect::<Vec<_>>().join(": ")).collect()
    }

    #[test]
    fn statuses_of_nodes_are_checked() {
        let good = json!({"capacity": {"cpu": "1500m", "pods": "110"}, "declaredFeatures": ["A", "A/b", "B"],
            "addresses": [{"type": "InternalIP", "address": "10.0.0.1"}, {"type": "Hostname", "address": "a"}]});
        assert_eq!(fields(|causes| status(causes, &good, true)), Vec::<String>::new());
        let address = json!({"type": "Hostname", "address": "a"});
        let bad = json!({"capacity": {"pods": "1500m"}, "allocatable": {"example.com/a": "-1"},
            "declaredFeatures": ["B", "A", "A", "b", "B/"], "addresses": [address, address]});
        assert_eq!(
            fields(|causes| status(causes, &bad, true)),
            [
                "status.capacity.pods: Invalid value",
                "status.allocatable.example.com/a: Invalid value",
                "status.declaredFeatures[1]: Invalid value",
                "status.declaredFeatures[2]: Duplicate value",
                "status.declaredFeatures[3]: Invalid value",
                "status.declaredFeatures[4]: Invalid value",
                "status.declaredFeatures[4]: Invalid value",
                "status.addresses[1]: Duplicate value",
            ]
        );
    }

    #[test]
    fn entries_of_storage_drivers_are_fixed() {
        let of = |driver: Value| json!({"spec": {"drivers": [driver]}});
        let old = of(json!({"name": "d", "nodeID": "1", "allocatable": {"count": 1}}));
        let update = |driver: Value| fields(|causes| csi_node(causes, &of(driver), Some(&old)));
        assert_eq!(
            update(json!({"name": "d", "nodeID": "1", "allocatable": {"count": 2}})),
            Vec::<String>::new()
        );
        assert_eq!(update(json!({"name": "e", "nodeID": "2"})), Vec::<String>::new());
        assert_eq!(update(json!({"name": "d", "nodeID": "2"})), ["spec.drivers: Invalid value"]);
        let long = json!({"name": "d".repeat(64), "nodeID": "1"});
        assert_eq!(update(long), ["spec.drivers[0].name: Too long"]);
    }

    #[test]
    fn ids_of_storage_drivers_have_a_limit() {
        let messages = |id: usize| {
            let driver = json!({"name": "d", "nodeID": "x".repeat(id)});
            found(|causes| csi_node(causes, &json!({"spec": {"drivers": [driver]}}), None))
        };
        assert_eq!(messages(256), Vec::<String>::new());
        let long = messages(257);
        assert!(matches!(&long[..], [one] if one.ends_with("must be 256 characters or less")), "{long:?}");
    }

    #[test]
    fn ranges_of_pods_do_not_change() {
        let of = |ranges: &[&str]| json!({"spec": {"podCIDRs": ranges}});
        let update = |new: &[&str], old: &[&str]| fields(|causes| node(causes, &of(new), Some(&of(old))));
        assert_eq!(update(&["10.0.0.0/24"], &[]), Vec::<String>::new());
        assert_eq!(update(&["10.0.1.0/24"], &["10.0.0.0/24"]), ["spec.podCIDRs: Forbidden"]);
    }
}

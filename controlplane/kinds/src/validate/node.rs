//! Nodes and CSINodes.

use std::collections::HashSet;

use serde_json::Value;

use super::volume_source::driver as driver_name;
use super::{Causes, Path, format, items, text};

/// Maximum size of a storage driver's node id, in bytes.
const MAX_NODE_ID: usize = 256;

pub(crate) fn node(causes: &mut Causes, node: &Value, old: Option<&Value>) {
    let (path, spec) = (Path::root("spec"), &node["spec"]);
    // Upstream reports taints at the metadata.
    taints(causes, &Path::root("metadata").field("taints"), &spec["taints"]);
    for (index, cidr) in items(&spec["podCIDRs"]) {
        causes.format(&path.field("podCIDRs").index(index), text(cidr), format::cidr(text(cidr)));
    }
    if !one_of_each_family(&spec["podCIDRs"]) {
        let detail = "may specify no more than one CIDR for each IP family";
        causes.invalid(&path.field("podCIDRs"), &spec["podCIDRs"], detail);
    }
    let Some(old) = old else { return };
    for name in ["podCIDR", "podCIDRs"] {
        if !old["spec"][name].is_null() && spec[name] != old["spec"][name] {
            let detail = "node updates may not change podCIDR except from \"\" to valid";
            causes.forbidden(&path.field(name), detail);
        }
    }
    let provider = &old["spec"]["providerID"];
    if !text(provider).is_empty() && spec["providerID"] != *provider {
        causes.forbidden(
            &path.field("providerID"),
            "node updates may not change providerID except from \"\" to valid",
        );
    }
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
        let name = text(&driver["name"]);
        driver_name(causes, &here.field("name"), name);
        if text(&driver["nodeID"]).is_empty() {
            causes.required(&here.field("nodeID"), "");
        } else if text(&driver["nodeID"]).len() > MAX_NODE_ID {
            let detail = format!("must be {MAX_NODE_ID} characters or less");
            causes.invalid(&here.field("nodeID"), &driver["nodeID"], &detail);
        }
        causes.not_negative(&here.field("allocatable").field("count"), &driver["allocatable"]["count"]);
        let mut keys = HashSet::new();
        // Upstream reports these keys at the driver.
        for (_, key) in items(&driver["topologyKeys"]) {
            if text(key).is_empty() {
                causes.required(&here, "");
            }
            causes.format(&here, text(key), format::qualified_name(text(key)));
            if !keys.insert(text(key)) {
                causes.duplicate(&here, key);
            }
        }
        if !seen.insert(name) {
            causes.duplicate(&here.field("name"), &driver["name"]);
        }
        let before = old.and_then(|old| {
            items(&old["spec"]["drivers"]).find(|(_, before)| before["name"] == driver["name"])
        });
        for field in ["nodeID", "topologyKeys"] {
            if before.is_some_and(|(_, before)| before[field] != driver[field]) {
                causes.invalid(&here.field(field), &driver[field], "field is immutable");
            }
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

    #[test]
    fn names_and_ids_of_storage_drivers_have_limits() {
        let messages = |name: usize, id: usize| {
            let driver = json!({"name": "x".repeat(name), "nodeID": "x".repeat(id)});
            let mut causes = Causes::default();
            csi_node(&mut causes, &json!({"spec": {"drivers": [driver]}}), None);
            causes.into_list().into_iter().map(|cause| cause.message).collect::<Vec<_>>()
        };
        assert_eq!(messages(63, 256), Vec::<String>::new());
        assert_eq!(messages(64, 1), ["Too long: may not be more than 63 bytes"]);
        let long = messages(1, 257);
        assert!(matches!(&long[..], [one] if one.ends_with("must be 256 characters or less")), "{long:?}");
    }
}

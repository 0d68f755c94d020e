//! Allowed updates of a pod's spec: images, additional tolerations, deadlines.

use std::collections::HashSet;

use serde_json::Value;

use super::{Causes, Path, items};

const ONLY: &str = "pod updates may not change fields other than `spec.containers[*].image`,`spec.initContainers[*].image`,`spec.activeDeadlineSeconds`,`spec.tolerations` (only additions to existing tolerations),`spec.terminationGracePeriodSeconds` (allow it to be set to 1 if it was previously negative)";

/// Checks that an update changes only mutable fields of the spec.
pub(super) fn pod(causes: &mut Causes, new: &Value, old: &Value) {
    let path = Path::root("spec");
    for list in ["containers", "initContainers"] {
        if items(&new[list]).count() != items(&old[list]).count() {
            return causes.forbidden(&path.field(list), "pod updates may not add or remove containers");
        }
    }
    deadline(causes, &path.field("activeDeadlineSeconds"), new, old);
    tolerations(causes, &path.field("tolerations"), new, old);
    gates(causes, &path.field("schedulingGates"), new, old);
    let mut compared = new.clone();
    for list in ["containers", "initContainers"] {
        for (index, before) in items(&old[list]) {
            compared[list][index]["image"] = before["image"].clone();
        }
    }
    let mut free = vec!["activeDeadlineSeconds", "tolerations", "schedulingGates"];
    let grace = "terminationGracePeriodSeconds";
    if old[grace].as_i64().is_some_and(|seconds| seconds < 0) && new[grace] == 1 {
        free.push(grace);
    }
    if items(&old["schedulingGates"]).next().is_some() {
        // A pod with scheduling gates may still be restricted to fewer nodes.
        free.extend(["nodeSelector", "affinity"]);
    }
    let pair = (compared.as_object_mut(), old.as_object());
    if let (Some(compared), Some(old)) = pair {
        for name in free {
            match old.get(name) {
                Some(value) => compared.insert(name.to_owned(), value.clone()),
                None => compared.remove(name),
            };
        }
    }
    if compared != *old {
        causes.forbidden(&path, ONLY);
    }
}

fn deadline(causes: &mut Causes, path: &Path, new: &Value, old: &Value) {
    let (new, old) = (new["activeDeadlineSeconds"].as_i64(), old["activeDeadlineSeconds"].as_i64());
    match (new, old) {
        (Some(new), Some(old)) if new > old => {
            causes.invalid(path, &new.into(), "must be less than or equal to previous value");
        }
        (None, Some(old)) => {
            causes.invalid(path, &old.into(), "must not update from a positive integer to nil value")
        }
        _ => {}
    }
}

/// The fields of a toleration that an update cannot change.
fn toleration_id(toleration: &Value) -> [&Value; 4] {
    ["key", "operator", "value", "effect"].map(|name| &toleration[name])
}

fn tolerations(causes: &mut Causes, path: &Path, new: &Value, old: &Value) {
    let after: HashSet<[&Value; 4]> =
        items(&new["tolerations"]).map(|(_, toleration)| toleration_id(toleration)).collect();
    if !items(&old["tolerations"]).all(|(_, before)| after.contains(&toleration_id(before))) {
        let detail = "existing toleration can not be modified except its tolerationSeconds";
        causes.forbidden(path, detail);
    }
}

fn gates(causes: &mut Causes, path: &Path, new: &Value, old: &Value) {
    let known: HashSet<&Value> = items(&old["schedulingGates"]).map(|(_, gate)| gate).collect();
    for (index, gate) in items(&new["schedulingGates"]) {
        if !known.contains(gate) {
            let detail = format!(
                "only deletion is allowed, but found new scheduling gate '{}'",
                super::text(&gate["name"])
            );
            causes.forbidden(&path.index(index), &detail);
        }
    }
}

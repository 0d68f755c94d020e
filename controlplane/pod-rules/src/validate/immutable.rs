//! Allowed updates of a pod's spec: images, additional tolerations, deadlines.

use std::collections::HashSet;

use serde_json::Value;

use super::{Causes, Path, entries, items};

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
        restrictions(causes, &path, new, old);
        free.push("nodeSelector");
        let others =
            |spec: &Value| ["podAffinity", "podAntiAffinity"].map(|name| spec["affinity"][name].clone());
        if others(new) == others(old) {
            free.push("affinity");
        }
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
        (None, Some(_)) => {
            causes.invalid(path, &Value::Null, "must not update from a positive integer to nil value");
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

/// Checks that node selector and node affinity of a pod with scheduling gates only get stricter. Sources:
/// `validateNodeSelectorMutation`, `validateNodeAffinityMutation` of `pkg/apis/core/validation`.
fn restrictions(causes: &mut Causes, path: &Path, new: &Value, old: &Value) {
    let (after, before) = (&new["nodeSelector"], &old["nodeSelector"]);
    if entries(before).any(|(key, value)| after.get(key) != Some(value)) {
        let detail = "only additions to spec.nodeSelector are allowed (no mutations or deletions)";
        causes.invalid(&path.field("nodeSelector"), after, detail);
    }
    let required = "requiredDuringSchedulingIgnoredDuringExecution";
    let terms = |spec: &Value| spec["affinity"]["nodeAffinity"][required]["nodeSelectorTerms"].clone();
    let (after, before) = (terms(new), terms(old));
    let here = path.field("affinity").field("nodeAffinity").field(required).field("nodeSelectorTerms");
    let (now, was) = (items(&after).count(), items(&before).count());
    if was > 0 && was != now {
        let detail = "no additions/deletions to non-empty NodeSelectorTerms list are allowed";
        return causes.invalid(&here, &after, detail);
    }
    for ((index, before), (_, after)) in items(&before).zip(items(&after)) {
        if !is_only_extended(after, before) {
            let detail = "only additions are allowed (no mutations or deletions)";
            causes.invalid(&here.index(index), after, detail);
        }
    }
}

/// Whether a term of a node selector has all requirements of the old term, and possibly more after them. A term without
/// requirements selects no node. A requirement that is added to such a term would select more nodes, so it is not
/// allowed.
fn is_only_extended(new: &Value, old: &Value) -> bool {
    let lists = ["matchExpressions", "matchFields"];
    let is_empty = |term: &Value| lists.iter().all(|list| items(&term[*list]).next().is_none());
    let begins_with_old = |list: &&str| {
        let mut after = items(&new[*list]);
        items(&old[*list]).all(|before| after.next() == Some(before))
    };
    if is_empty(old) { is_empty(new) } else { lists.iter().all(begins_with_old) }
}

fn gates(causes: &mut Causes, path: &Path, new: &Value, old: &Value) {
    let known: HashSet<&Value> = items(&old["schedulingGates"]).map(|(_, gate)| gate).collect();
    for (index, gate) in items(&new["schedulingGates"]) {
        if !known.contains(gate) {
            let detail = format!(
                "only deletion is allowed, but found new scheduling gate '{}'",
                super::text(&gate["name"])
            );
            causes.forbidden(&path.index(index).field("name"), &detail);
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::tests::found;
    use super::*;

    fn gated(more: Value) -> Value {
        let mut spec =
            json!({"containers": [{"name": "a", "image": "x"}], "schedulingGates": [{"name": "a.b/c"}]});
        spec.as_object_mut().unwrap().extend(more.as_object().cloned().unwrap());
        spec
    }

    fn required(terms: Value) -> Value {
        let selector = json!({"nodeSelectorTerms": terms});
        gated(
            json!({"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": selector}}}),
        )
    }

    fn changed(old: &Value, new: &Value) -> Vec<String> {
        found(|causes| pod(causes, new, old))
    }

    #[test]
    fn the_node_selector_of_a_gated_pod_only_grows() {
        let of = |selector: Value| gated(json!({"nodeSelector": selector}));
        let old = of(json!({"a": "b"}));
        assert!(changed(&old, &of(json!({"a": "b", "c": "d"}))).is_empty());
        for selector in [json!({"a": "c"}), json!({"c": "d"}), Value::Null] {
            let causes = changed(&old, &of(selector));
            assert!(
                causes.len() == 1 && causes[0].starts_with("spec.nodeSelector: Invalid value"),
                "{causes:?}"
            );
        }
        let mut free = old.clone();
        free["schedulingGates"] = json!([]);
        assert_eq!(changed(&free, &of(json!({"a": "b"}))).len(), 1, "a gate cannot be added");
    }

    #[test]
    fn the_node_affinity_of_a_gated_pod_only_gets_stricter() {
        let expression = |key: &str| json!({"key": key, "operator": "Exists"});
        let term = |keys: &[&str]| json!({"matchExpressions": keys.iter().map(|key| expression(key)).collect::<Vec<_>>()});
        let old = required(json!([term(&["a"])]));
        assert!(changed(&old, &required(json!([term(&["a", "b"])]))).is_empty());
        assert!(changed(&gated(json!({})), &old).is_empty(), "a pod without affinity can get any");
        let here =
            "spec.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms";
        for (new, expect) in [
            (required(json!([term(&["a"]), term(&["b"])])), format!("{here}: Invalid value")),
            (gated(json!({})), format!("{here}: Invalid value")),
            (required(json!([term(&["b", "a"])])), format!("{here}[0]: Invalid value")),
            (required(json!([term(&[])])), format!("{here}[0]: Invalid value")),
        ] {
            let causes = changed(&old, &new);
            assert!(causes.len() == 1 && causes[0].starts_with(&expect), "{new}: {causes:?}");
        }
        let empty = required(json!([{}]));
        assert_eq!(changed(&empty, &old).len(), 1, "a term without requirements selects no node");
    }

    #[test]
    fn a_deadline_is_not_removed() {
        let causes = changed(&gated(json!({"activeDeadlineSeconds": 100})), &gated(json!({})));
        let expect = "spec.activeDeadlineSeconds: Invalid value: null: must not update from a positive integer to nil value";
        assert_eq!(causes, [expect]);
    }

    #[test]
    fn the_affinity_to_pods_does_not_change() {
        let affinity = json!({"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}});
        let causes = changed(&gated(json!({})), &gated(json!({"affinity": affinity})));
        assert!(causes.len() == 1 && causes[0].starts_with("spec: Forbidden: pod updates"), "{causes:?}");
    }
}

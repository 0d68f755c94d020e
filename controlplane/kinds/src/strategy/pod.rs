//! Changes to the pods of requests: the condition of scheduling gates, selectors from `matchLabelKeys`, profiles from
//! AppArmor annotations, observed generations. Source: `podStrategy` of `pkg/registry/core/pod`.

use coracle_values::CollectMap;
use serde_json::{Map, Value, json};

use super::storage::now;

/// Prefix of the annotation that named the AppArmor profile of a container before the field existed.
const APPARMOR: &str = "container.apparmor.security.beta.kubernetes.io/";
/// Maximum length of a profile's name in bytes.
const MAX_PROFILE: usize = 4095;
/// Maximum length of a label's value in bytes. Validation refuses a pod with a longer value.
const MAX_LABEL: usize = 63;
/// Maximum number of requirements that are added to the selectors of a pod. The scheduler reads `matchLabelKeys`
/// itself, so further keys have an effect, too.
const MAX_REQUIREMENTS: usize = 1000;

/// Prepares a new pod. The caller has set its first status.
pub(super) fn new_pod(pod: &mut Value) {
    gated_condition(pod);
    let labels = pod["metadata"]["labels"].as_object().cloned().unwrap_or_default();
    let Some(spec) = pod.get_mut("spec") else { return };
    let mut budget = MAX_REQUIREMENTS;
    for constraint in list(spec, "/topologySpreadConstraints") {
        add_requirements(constraint, "matchLabelKeys", "In", &labels, &mut budget);
    }
    for kind in ["podAffinity", "podAntiAffinity"] {
        let preferred = format!("/affinity/{kind}/preferredDuringSchedulingIgnoredDuringExecution");
        for term in list(spec, &preferred) {
            if let Some(term) = term.get_mut("podAffinityTerm") {
                affinity_term(term, &labels, &mut budget);
            }
        }
        let required = format!("/affinity/{kind}/requiredDuringSchedulingIgnoredDuringExecution");
        for term in list(spec, &required) {
            affinity_term(term, &labels, &mut budget);
        }
    }
    apparmor_profiles(pod);
}

/// Keeps the observed generations of a pod's status if an update omits them. Source: `preserveOldObservedGeneration`.
pub(super) fn keep_observed_generations(new: &mut Value, old: &Value) {
    const FIELD: &str = "observedGeneration";
    fn keep(new: &mut Value, old: &Value) {
        if let Some(new) = new.as_object_mut()
            && new.get(FIELD).and_then(Value::as_i64).unwrap_or(0) == 0
            && let Some(generation) = old.get(FIELD)
        {
            new.insert(FIELD.to_owned(), generation.clone());
        }
    }
    let Some(status) = new.get_mut("status") else { return };
    keep(status, &old["status"]);
    let before: Map<String, Value> = old["status"]["conditions"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|condition| Some((condition["type"].as_str()?.to_owned(), condition[FIELD].clone())))
        .filter(|(_, generation)| !generation.is_null())
        .collect_map();
    for condition in list(status, "/conditions") {
        let kind = condition["type"].as_str().unwrap_or_default();
        if let Some(generation) = before.get(kind).cloned() {
            keep(condition, &json!({FIELD: generation}));
        }
    }
}

/// The elements of a list. Empty if the list is absent.
fn list<'a>(value: &'a mut Value, pointer: &str) -> impl Iterator<Item = &'a mut Value> + use<'a> {
    value.pointer_mut(pointer).and_then(Value::as_array_mut).into_iter().flatten()
}

/// Sets the condition PodScheduled of a pod with scheduling gates: it is False until the gates are removed.
fn gated_condition(pod: &mut Value) {
    if pod["spec"]["schedulingGates"].as_array().is_some_and(|gates| !gates.is_empty()) {
        pod["status"]["conditions"] = json!([{"type": "PodScheduled", "status": "False", "reason": "SchedulingGated",
            "message": "Scheduling is blocked due to non-empty scheduling gates", "lastTransitionTime": now()}]);
    }
}

fn affinity_term(term: &mut Value, labels: &Map<String, Value>, budget: &mut usize) {
    add_requirements(term, "matchLabelKeys", "In", labels, budget);
    add_requirements(term, "mismatchLabelKeys", "NotIn", labels, budget);
}

/// Adds a requirement to the selector for each key that is a label of the pod. A term without a selector matches
/// nothing and is not changed.
fn add_requirements(
    term: &mut Value,
    field: &str,
    operator: &str,
    labels: &Map<String, Value>,
    budget: &mut usize,
) {
    let keys: Vec<(String, Value)> = term[field]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|key| Some((key.as_str()?, labels.get(key.as_str()?)?)))
        .filter(|(_, value)| value.as_str().is_some_and(|value| value.len() <= MAX_LABEL))
        .take(*budget)
        .map(|(key, value)| (key.to_owned(), value.clone()))
        .collect();
    let Some(selector) = term.get_mut("labelSelector").and_then(Value::as_object_mut) else { return };
    if keys.is_empty() {
        return;
    }
    *budget -= keys.len();
    let expressions = selector.entry("matchExpressions").or_insert(Value::Null);
    if !expressions.is_array() {
        *expressions = json!([]);
    }
    if let Some(expressions) = expressions.as_array_mut() {
        let requirement =
            |(key, value): (String, Value)| json!({"key": key, "operator": operator, "values": [value]});
        expressions.extend(keys.into_iter().map(requirement));
    }
}

/// Sets the AppArmor profiles of containers from the annotations. Source: `applyAppArmorVersionSkew`.
fn apparmor_profiles(pod: &mut Value) {
    let annotations = pod["metadata"]["annotations"].as_object();
    let profiles: Map<String, Value> = annotations
        .into_iter()
        .flatten()
        .filter_map(|(key, value)| Some((key.strip_prefix(APPARMOR)?.to_owned(), profile(value.as_str()?)?)))
        .collect_map();
    if profiles.is_empty() || pod["spec"]["os"]["name"] == "windows" {
        return;
    }
    let Some(spec) = pod.get_mut("spec") else { return };
    let whole = spec["securityContext"]["appArmorProfile"].clone();
    for name in ["/initContainers", "/containers"] {
        for container in list(spec, name) {
            let profile = profiles.get(container["name"].as_str().unwrap_or_default());
            let has_own = !container["securityContext"]["appArmorProfile"].is_null();
            if let Some(profile) = profile.filter(|profile| !has_own && **profile != whole)
                && container.is_object()
            {
                if !container["securityContext"].is_object() {
                    container["securityContext"] = json!({});
                }
                container["securityContext"]["appArmorProfile"] = profile.clone();
            }
        }
    }
}

/// The profile that an annotation names. `None` if it is not valid.
fn profile(annotation: &str) -> Option<Value> {
    match annotation {
        "unconfined" => Some(json!({"type": "Unconfined"})),
        "runtime/default" => Some(json!({"type": "RuntimeDefault"})),
        _ => {
            let name = annotation.strip_prefix("localhost/")?;
            let is_valid = !name.is_empty() && name.trim() == name && name.len() <= MAX_PROFILE;
            is_valid.then(|| json!({"type": "Localhost", "localhostProfile": name}))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kind::by_kind;
    use crate::strategy::{prepare_for_create, prepare_for_status_update};

    fn created(metadata: Value, spec: Value) -> Value {
        let mut pod = json!({"metadata": metadata, "spec": spec});
        prepare_for_create(by_kind("v1", "Pod").unwrap(), &mut pod);
        pod
    }

    #[test]
    fn a_new_pod_with_scheduling_gates_has_the_condition_pod_scheduled_false() {
        let pod = created(json!({}), json!({"schedulingGates": [{"name": "a"}]}));
        let condition = &pod["status"]["conditions"][0];
        assert_eq!((&condition["type"], &condition["status"]), (&json!("PodScheduled"), &json!("False")));
        assert_eq!(condition["reason"], "SchedulingGated");
        assert!(condition["lastTransitionTime"].is_string());
        assert!(created(json!({}), json!({}))["status"]["conditions"].is_null());
    }

    #[test]
    fn match_label_keys_become_requirements_of_the_selector() {
        let labels = json!({"labels": {"a": "1", "b": "2", "long": "x".repeat(64)}});
        let term = json!({"labelSelector": {}, "matchLabelKeys": ["a", "missing", "long"], "mismatchLabelKeys": ["b"]});
        let preferred = json!([{"weight": 1, "podAffinityTerm": term}]);
        let spread = json!([{"labelSelector": {"matchLabels": {"x": "y"}}, "matchLabelKeys": ["a"]}, {"matchLabelKeys": ["a"]}]);
        let pod = created(
            labels,
            json!({"topologySpreadConstraints": spread, "affinity": {
                "podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]},
                "podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}}),
        );
        let requirement = |key: &str, operator: &str, value: &str| json!({"key": key, "operator": operator, "values": [value]});
        let both = json!({"matchExpressions": [requirement("a", "In", "1"), requirement("b", "NotIn", "2")]});
        let affinity = &pod["spec"]["affinity"];
        let required = "requiredDuringSchedulingIgnoredDuringExecution";
        assert_eq!(affinity["podAffinity"][required][0]["labelSelector"], both);
        let preferred = "preferredDuringSchedulingIgnoredDuringExecution";
        assert_eq!(affinity["podAntiAffinity"][preferred][0]["podAffinityTerm"]["labelSelector"], both);
        let spread = &pod["spec"]["topologySpreadConstraints"];
        assert_eq!(
            spread[0]["labelSelector"],
            json!({"matchLabels": {"x": "y"}, "matchExpressions": [requirement("a", "In", "1")]})
        );
        assert!(spread[1].get("labelSelector").is_none(), "an absent selector matches nothing");
    }

    #[test]
    fn the_number_of_requirements_is_limited() {
        let constraint = json!({"labelSelector": {}, "matchLabelKeys": vec!["a"; 700]});
        let spread = json!({"topologySpreadConstraints": [constraint, constraint, constraint]});
        let pod = created(json!({"labels": {"a": "1"}}), spread);
        let count = |index: usize| {
            let selector = &pod["spec"]["topologySpreadConstraints"][index]["labelSelector"];
            selector["matchExpressions"].as_array().map_or(0, Vec::len)
        };
        assert_eq!([0, 1, 2].map(count), [700, 300, 0]);
    }

    #[test]
    fn apparmor_annotations_become_profiles_of_containers() {
        let annotation = |name: &str| format!("{APPARMOR}{name}");
        let pod = created(
            json!({"annotations": {annotation("a"): "localhost/p", annotation("b"): "unconfined",
                annotation("c"): "runtime/default", annotation("d"): "localhost/", annotation("none"): "unconfined"}}),
            json!({"securityContext": {"appArmorProfile": {"type": "RuntimeDefault"}}, "containers": [{"name": "a"},
                {"name": "b", "securityContext": {"appArmorProfile": {"type": "RuntimeDefault"}}},
                {"name": "c"}, {"name": "d"}]}),
        );
        let profile =
            |index: usize| pod["spec"]["containers"][index]["securityContext"]["appArmorProfile"].clone();
        assert_eq!(profile(0), json!({"type": "Localhost", "localhostProfile": "p"}));
        assert_eq!(profile(1), json!({"type": "RuntimeDefault"}));
        assert_eq!((profile(2), profile(3)), (Value::Null, Value::Null));
    }

    #[test]
    fn a_status_update_without_observed_generations_keeps_the_old_ones() {
        let condition =
            |kind: &str, generation: Value| json!({"type": kind, "observedGeneration": generation});
        let conditions = json!([condition("Ready", json!(3)), condition("Other", json!(null))]);
        let old = json!({"spec": {}, "status": {"observedGeneration": 3, "conditions": conditions}});
        let conditions = json!([{"type": "Ready"}, {"type": "Other"}, condition("New", json!(4))]);
        let mut new = json!({"spec": {}, "status": {"conditions": conditions}});
        prepare_for_status_update(by_kind("v1", "Pod").unwrap(), &mut new, &old);
        assert_eq!(new["status"]["observedGeneration"], 3);
        assert_eq!(new["status"]["conditions"][0]["observedGeneration"], 3);
        assert!(new["status"]["conditions"][1].get("observedGeneration").is_none());
        assert_eq!(new["status"]["conditions"][2]["observedGeneration"], 4);
    }
}

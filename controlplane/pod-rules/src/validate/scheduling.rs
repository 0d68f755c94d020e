//! Scheduling fields: tolerations, node selectors, affinity, topology spread.

use std::collections::{HashMap, HashSet};

use serde_json::Value;

use super::{Causes, Path, entries, format, items, meta, selector, text};

/// Checks the scheduling fields of a spec.
pub(super) fn spec(causes: &mut Causes, path: &Path, spec: &Value) {
    meta::labels(causes, &path.field("nodeSelector"), &spec["nodeSelector"]);
    tolerations(causes, &path.field("tolerations"), &spec["tolerations"]);
    node_affinity(causes, &path.field("affinity").field("nodeAffinity"), &spec["affinity"]["nodeAffinity"]);
    for name in ["podAffinity", "podAntiAffinity"] {
        pod_affinity(causes, &path.field("affinity").field(name), &spec["affinity"][name]);
    }
    spreading(causes, &path.field("topologySpreadConstraints"), &spec["topologySpreadConstraints"]);
    group(causes, &path.field("schedulingGroup"), &spec["schedulingGroup"]);
    let mut gates = HashSet::new();
    for (index, gate) in items(&spec["schedulingGates"]) {
        let (here, name) = (path.field("schedulingGates").index(index), text(&gate["name"]));
        causes.format(&here, name, format::qualified_name(name));
        if !gates.insert(name) {
            causes.duplicate(&here, &name.into());
        }
    }
}

/// Checks a list of tolerations.
pub fn tolerations(causes: &mut Causes, path: &Path, tolerations: &Value) {
    for (index, toleration) in items(tolerations) {
        let here = path.index(index);
        let (key, operator) = (text(&toleration["key"]), text(&toleration["operator"]));
        if !key.is_empty() {
            causes.format(&here.field("key"), key, format::qualified_name(key));
        }
        if key.is_empty() && operator != "Exists" {
            causes.invalid(
                &here.field("operator"),
                &operator.into(),
                "operator must be Exists when `key` is empty, which means \"match all values and all keys\"",
            );
        }
        if !toleration["tolerationSeconds"].is_null() && toleration["effect"] != "NoExecute" {
            causes.invalid(
                &here.field("effect"),
                &text(&toleration["effect"]).into(),
                "effect must be 'NoExecute' when `tolerationSeconds` is set",
            );
        }
        let value = text(&toleration["value"]);
        match operator {
            // As upstream, the error about the value has the path of the operator.
            "" | "Equal" => causes.format(&here.field("operator"), value, format::label_value(value)),
            "Exists" if !value.is_empty() => {
                let detail = "value must be empty when `operator` is 'Exists'";
                causes.invalid(&here.field("operator"), &value.into(), detail);
            }
            "Exists" => {}
            // Upstream refuses these operators with this error while the gate `TaintTolerationComparisonOperators` is
            // off.
            "Lt" | "Gt" => {
                let known = &["Equal", "Exists", "Lt", "Gt"];
                causes.unsupported(&here.field("operator"), &operator.into(), known);
            }
            _ => causes.unsupported(&here.field("operator"), &operator.into(), &["Equal", "Exists"]),
        }
        if !text(&toleration["effect"]).is_empty() {
            let effects = &["NoSchedule", "PreferNoSchedule", "NoExecute"];
            causes.one_of(&here.field("effect"), &toleration["effect"], effects);
        }
    }
}

fn node_affinity(causes: &mut Causes, path: &Path, affinity: &Value) {
    let required = &affinity["requiredDuringSchedulingIgnoredDuringExecution"];
    let here = path.field("requiredDuringSchedulingIgnoredDuringExecution");
    node_terms(causes, &here, required);
    for (index, preferred) in items(&affinity["preferredDuringSchedulingIgnoredDuringExecution"]) {
        let here = path.field("preferredDuringSchedulingIgnoredDuringExecution").index(index);
        weight(causes, &here, preferred);
        node_term(causes, &here.field("preference"), &preferred["preference"]);
    }
}

/// Checks a node selector of a pod or a volume.
pub fn node_terms(causes: &mut Causes, path: &Path, selector: &Value) {
    if selector.is_null() {
        return;
    }
    let here = path.field("nodeSelectorTerms");
    if items(&selector["nodeSelectorTerms"]).next().is_none() {
        causes.required(&here, "must have at least one node selector term");
    }
    for (index, term) in items(&selector["nodeSelectorTerms"]) {
        node_term(causes, &here.index(index), term);
        for (at, expression) in items(&term["matchExpressions"]) {
            let here = here.index(index).field("matchExpressions").index(at).field("values");
            for (at, value) in items(&expression["values"]) {
                causes.format(&here.index(at), text(value), format::label_value(text(value)));
            }
        }
    }
}

fn weight(causes: &mut Causes, path: &Path, preferred: &Value) {
    let weight = preferred["weight"].as_i64().unwrap_or(0);
    if !(1..=100).contains(&weight) {
        causes.invalid(&path.field("weight"), &weight.into(), "must be in the range 1-100");
    }
}

fn node_term(causes: &mut Causes, path: &Path, term: &Value) {
    for (index, expression) in items(&term["matchExpressions"]) {
        node_requirement(causes, &path.field("matchExpressions").index(index), expression);
    }
    for (index, expression) in items(&term["matchFields"]) {
        node_field(causes, &path.field("matchFields").index(index), expression);
    }
}

/// Checks a requirement for a field of the node. The only possible field is the node's name.
fn node_field(causes: &mut Causes, path: &Path, expression: &Value) {
    match text(&expression["operator"]) {
        "In" | "NotIn" if items(&expression["values"]).count() != 1 => {
            let detail = "must be only one value when `operator` is 'In' or 'NotIn' for node field selector";
            causes.required(&path.field("values"), detail);
        }
        "In" | "NotIn" => {}
        other => causes.invalid(&path.field("operator"), &other.into(), "not a valid selector operator"),
    }
    if expression["key"] != "metadata.name" {
        let key = text(&expression["key"]);
        return causes.invalid(&path.field("key"), &key.into(), "not a valid field selector key");
    }
    for (index, value) in items(&expression["values"]) {
        let here = path.field("values").index(index);
        causes.format(&here, text(value), format::dns1123_subdomain(text(value)));
    }
}

fn node_requirement(causes: &mut Causes, path: &Path, expression: &Value) {
    let count = items(&expression["values"]).count();
    let values = path.field("values");
    match text(&expression["operator"]) {
        "In" | "NotIn" if count == 0 => {
            causes.required(&values, "must be specified when `operator` is 'In' or 'NotIn'");
        }
        "Exists" | "DoesNotExist" if count > 0 => {
            causes.forbidden(&values, "may not be specified when `operator` is 'Exists' or 'DoesNotExist'");
        }
        "Gt" | "Lt" if count != 1 => {
            causes.required(&values, "must be specified single value when `operator` is 'Lt' or 'Gt'");
        }
        "In" | "NotIn" | "Exists" | "DoesNotExist" | "Gt" | "Lt" => {}
        _ => {
            let operator = text(&expression["operator"]).into();
            causes.invalid(&path.field("operator"), &operator, "not a valid selector operator");
        }
    }
    let key = text(&expression["key"]);
    causes.format(&path.field("key"), key, format::qualified_name(key));
}

fn pod_affinity(causes: &mut Causes, path: &Path, affinity: &Value) {
    for (index, term) in items(&affinity["requiredDuringSchedulingIgnoredDuringExecution"]) {
        let here = path.field("requiredDuringSchedulingIgnoredDuringExecution").index(index);
        pod_term(causes, &here, term);
    }
    for (index, preferred) in items(&affinity["preferredDuringSchedulingIgnoredDuringExecution"]) {
        let here = path.field("preferredDuringSchedulingIgnoredDuringExecution").index(index);
        weight(causes, &here, preferred);
        pod_term(causes, &here.field("podAffinityTerm"), &preferred["podAffinityTerm"]);
    }
}

fn pod_term(causes: &mut Causes, path: &Path, term: &Value) {
    selector::label_selector(causes, &path.field("labelSelector"), &term["labelSelector"]);
    selector::label_selector(causes, &path.field("namespaceSelector"), &term["namespaceSelector"]);
    for (_, name) in items(&term["namespaces"]) {
        causes.format(&path.field("namespace"), text(name), format::dns1123_label(text(name)));
    }
    label_keys(causes, path, term);
    let key = text(&term["topologyKey"]);
    if key.is_empty() {
        causes.required(&path.field("topologyKey"), "can not be empty");
    }
    causes.format(&path.field("topologyKey"), key, format::qualified_name(key));
}

/// Checks `matchLabelKeys` and `mismatchLabelKeys` of a term. In a new pod, the selector of the term already has a
/// requirement for each key. Source: `ValidateMatchLabelKeysAndMismatchLabelKeys`.
fn label_keys(causes: &mut Causes, path: &Path, term: &Value) {
    let selector = &term["labelSelector"];
    for field in ["matchLabelKeys", "mismatchLabelKeys"] {
        let here = path.field(field);
        if selector.is_null() && items(&term[field]).next().is_some() {
            causes.forbidden(&here, "must not be specified when labelSelector is not set");
            continue;
        }
        for (index, key) in items(&term[field]) {
            causes.format(&here.index(index), text(key), format::qualified_name(text(key)));
        }
    }
    let same: HashMap<&str, usize> =
        items(&term["matchLabelKeys"]).map(|(index, key)| (text(key), index)).collect();
    let mut selected: HashSet<&str> =
        entries(&selector["matchLabels"]).map(|(key, _)| key.as_str()).collect();
    for (_, expression) in items(&selector["matchExpressions"]) {
        let key = text(&expression["key"]);
        let is_new = selected.insert(key);
        if let Some(index) = same.get(key).filter(|_| !is_new) {
            // Upstream leaves out the name of the field.
            let detail = "exists in both matchLabelKeys and labelSelector";
            causes.invalid(&path.index(*index), &key.into(), detail);
        }
    }
    let others: HashSet<&str> = items(&term["mismatchLabelKeys"]).map(|(_, key)| text(key)).collect();
    for (index, key) in items(&term["matchLabelKeys"]) {
        if others.contains(text(key)) {
            let detail = "exists in both matchLabelKeys and mismatchLabelKeys";
            causes.invalid(&path.field("matchLabelKeys").index(index), key, detail);
        }
    }
}

/// The fields that must differ between two topology spread constraints of a pod.
fn spread_id(constraint: &Value) -> [&Value; 2] {
    ["topologyKey", "whenUnsatisfiable"].map(|name| &constraint[name])
}

fn spreading(causes: &mut Causes, path: &Path, constraints: &Value) {
    let last: HashMap<[&Value; 2], usize> =
        items(constraints).map(|(index, constraint)| (spread_id(constraint), index)).collect();
    for (index, constraint) in items(constraints) {
        let here = path.index(index);
        if constraint["maxSkew"].as_i64().unwrap_or(0) <= 0 {
            causes.invalid(&here.field("maxSkew"), &constraint["maxSkew"], "must be greater than zero");
        }
        let key = text(&constraint["topologyKey"]);
        if key.is_empty() {
            causes.required(&here.field("topologyKey"), "can not be empty");
        }
        let way = text(&constraint["whenUnsatisfiable"]);
        if !matches!(way, "DoNotSchedule" | "ScheduleAnyway") {
            let ways = &["DoNotSchedule", "ScheduleAnyway"];
            causes.unsupported(&here.field("whenUnsatisfiable"), &way.into(), ways);
        }
        if last.get(&spread_id(constraint)).is_some_and(|last| *last > index) {
            let id = format!("{{{key}, {way}}}");
            causes.duplicate(&here.field("{topologyKey, whenUnsatisfiable}"), &id.into());
        }
        let domains = &constraint["minDomains"];
        if domains.as_i64().is_some_and(|domains| domains <= 0) {
            causes.invalid(&here.field("minDomains"), domains, "must be greater than zero");
        }
        if !domains.is_null() && way != "DoNotSchedule" {
            let detail = format!("can only use minDomains if whenUnsatisfiable=DoNotSchedule, not {way}");
            causes.invalid(&here.field("minDomains"), domains, &detail);
        }
        for field in ["nodeAffinityPolicy", "nodeTaintsPolicy"] {
            causes.optional_word(&here.field(field), &constraint[field], &["Honor", "Ignore"]);
        }
        label_keys(causes, &here, constraint);
        selector::label_selector(causes, &here.field("labelSelector"), &constraint["labelSelector"]);
    }
}

/// Checks the group of a pod.
fn group(causes: &mut Causes, path: &Path, reference: &Value) {
    if reference.is_null() {
        return;
    }
    let (here, name) = (path.field("podGroupName"), &reference["podGroupName"]);
    match name.as_str() {
        None => causes.invalid(&here, &Value::Null, "must specify one of: `podGroupName`"),
        Some(name) => causes.format(&here, name, format::dns1123_subdomain(name)),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::tests::found;
    use super::*;

    fn constraint(more: Value) -> Value {
        let mut constraint =
            json!({"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"});
        constraint.as_object_mut().unwrap().extend(more.as_object().cloned().unwrap());
        constraint
    }

    #[test]
    fn keys_of_labels_are_names_that_the_selector_does_not_have() {
        let of =
            |more: Value| found(|causes| spreading(causes, &Path::root("c"), &json!([constraint(more)])));
        let expression = json!({"key": "a", "operator": "In", "values": ["1"]});
        assert!(of(json!({"labelSelector": {}, "matchLabelKeys": ["a"]})).is_empty());
        // The selector of a new pod already has the requirement for the key.
        let merged = json!({"labelSelector": {"matchExpressions": [expression]}, "matchLabelKeys": ["a"]});
        assert!(of(merged).is_empty());
        let both = json!({"matchLabels": {"a": "1"}, "matchExpressions": [expression]});
        assert_eq!(
            of(json!({"labelSelector": both, "matchLabelKeys": ["b", "a"]})),
            ["c[0][1]: Invalid value: \"a\": exists in both matchLabelKeys and labelSelector"]
        );
        assert_eq!(
            of(json!({"matchLabelKeys": ["a"]})),
            ["c[0].matchLabelKeys: Forbidden: must not be specified when labelSelector is not set"]
        );
        let wrong = of(json!({"labelSelector": {}, "matchLabelKeys": ["a b"]}));
        assert!(wrong[0].starts_with("c[0].matchLabelKeys[0]: Invalid value: \"a b\""), "{wrong:?}");
        let term = json!({"labelSelector": {}, "topologyKey": "zone", "matchLabelKeys": ["a"], "mismatchLabelKeys": ["a"]});
        assert_eq!(
            found(|causes| pod_term(causes, &Path::root("t"), &term)),
            [
                "t.matchLabelKeys[0]: Invalid value: \"a\": exists in both matchLabelKeys and mismatchLabelKeys"
            ]
        );
    }

    #[test]
    fn policies_of_constraints_are_honor_or_ignore() {
        let of =
            |more: Value| found(|causes| spreading(causes, &Path::root("c"), &json!([constraint(more)])));
        assert!(of(json!({"nodeAffinityPolicy": "Ignore", "nodeTaintsPolicy": "Honor"})).is_empty());
        let causes = of(json!({"nodeTaintsPolicy": "x"}));
        assert_eq!(
            causes,
            ["c[0].nodeTaintsPolicy: Unsupported value: \"x\": supported values: \"Honor\", \"Ignore\""]
        );
    }

    #[test]
    fn gates_differ_and_tolerations_have_known_operators() {
        let gates = json!({"schedulingGates": [{"name": "a"}, {"name": "a"}]});
        let causes = found(|causes| spec(causes, &Path::root("s"), &gates));
        assert_eq!(causes, ["s.schedulingGates[1]: Duplicate value: \"a\""]);
        let of =
            |toleration: Value| found(|causes| tolerations(causes, &Path::root("t"), &json!([toleration])));
        assert_eq!(
            of(json!({"key": "a", "operator": "Exists", "value": "b"})),
            ["t[0].operator: Invalid value: \"b\": value must be empty when `operator` is 'Exists'"]
        );
        let causes = of(json!({"key": "a", "operator": "Gt", "value": "1"}));
        assert!(causes[0].ends_with("supported values: \"Equal\", \"Exists\", \"Lt\", \"Gt\""), "{causes:?}");
    }

    #[test]
    fn the_group_of_a_pod_has_a_name() {
        let of = |reference: Value| found(|causes| group(causes, &Path::root("schedulingGroup"), &reference));
        assert!(of(json!(null)).is_empty() && of(json!({"podGroupName": "a.b"})).is_empty());
        assert!(of(json!({}))[0].ends_with("must specify one of: `podGroupName`"));
        assert!(
            of(json!({"podGroupName": "A"}))[0].starts_with("schedulingGroup.podGroupName: Invalid value")
        );
    }
}

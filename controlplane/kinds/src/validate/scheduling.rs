//! Scheduling fields: tolerations, node selectors, affinity, topology spread.

use std::collections::HashMap;

use serde_json::Value;

use super::{Causes, Path, format, items, meta, pod_group, selector, text};

/// Checks the scheduling fields of a spec.
pub(super) fn spec(causes: &mut Causes, path: &Path, spec: &Value) {
    meta::labels(causes, &path.field("nodeSelector"), &spec["nodeSelector"]);
    tolerations(causes, &path.field("tolerations"), &spec["tolerations"]);
    node_affinity(causes, &path.field("affinity").field("nodeAffinity"), &spec["affinity"]["nodeAffinity"]);
    for name in ["podAffinity", "podAntiAffinity"] {
        pod_affinity(causes, &path.field("affinity").field(name), &spec["affinity"][name]);
    }
    spreading(causes, &path.field("topologySpreadConstraints"), &spec["topologySpreadConstraints"]);
    pod_group::of_pod(causes, &path.field("schedulingGroup"), &spec["schedulingGroup"]);
    for (index, gate) in items(&spec["schedulingGates"]) {
        let name = text(&gate["name"]);
        causes.format(&path.field("schedulingGates").index(index), name, format::qualified_name(name));
    }
}

pub(super) fn tolerations(causes: &mut Causes, path: &Path, tolerations: &Value) {
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
            // Upstream reports the value at the operator.
            "" | "Equal" => causes.format(&here.field("operator"), value, format::label_value(value)),
            "Exists" if !value.is_empty() => {
                causes.invalid(
                    &here.field("operator"),
                    toleration,
                    "value must be empty when `operator` is 'Exists'",
                );
            }
            "Exists" => {}
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

/// Checks a node selector, also that of a volume.
pub(super) fn node_terms(causes: &mut Causes, path: &Path, selector: &Value) {
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

/// Checks a requirement for a field of the node. Only its name can be one.
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
    let key = text(&term["topologyKey"]);
    if key.is_empty() {
        causes.required(&path.field("topologyKey"), "can not be empty");
    }
    causes.format(&path.field("topologyKey"), key, format::qualified_name(key));
}

/// The fields of a topology spread constraint that two constraints of a pod may not share.
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
        let domains = &constraint["minDomains"];
        if domains.as_i64().is_some_and(|domains| domains <= 0) {
            causes.invalid(&here.field("minDomains"), domains, "must be greater than zero");
        }
        if !domains.is_null() && constraint["whenUnsatisfiable"] != "DoNotSchedule" {
            let way = text(&constraint["whenUnsatisfiable"]);
            let detail = format!("can only use minDomains if whenUnsatisfiable=DoNotSchedule, not {way}");
            causes.invalid(&here.field("minDomains"), domains, &detail);
        }
        if last.get(&spread_id(constraint)).is_some_and(|last| *last > index) {
            let id = format!("{{{key}, {}}}", text(&constraint["whenUnsatisfiable"]));
            causes.duplicate(&here.field("{topologyKey, whenUnsatisfiable}"), &id.into());
        }
        let ways = &["DoNotSchedule", "ScheduleAnyway"];
        match text(&constraint["whenUnsatisfiable"]) {
            "DoNotSchedule" | "ScheduleAnyway" => {}
            other => causes.unsupported(&here.field("whenUnsatisfiable"), &other.into(), ways),
        }
        selector::label_selector(causes, &here.field("labelSelector"), &constraint["labelSelector"]);
    }
}

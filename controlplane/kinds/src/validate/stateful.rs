//! Stateful sets.

use std::collections::HashSet;

use serde_json::{Value, json};

use super::selector::is_label_selector;
use super::workload::{
    collisions, int_or_percent, is_zero, percent, restarts, selected_template, template_of,
};
use super::{Causes, Path, claim_spec, format, items, text};

const MUTABLE: &[&str] = &[
    "replicas",
    "ordinals",
    "template",
    "updateStrategy",
    "revisionHistoryLimit",
    "persistentVolumeClaimRetentionPolicy",
    "minReadySeconds",
];
const FORBIDDEN: &str = "updates to statefulset spec for fields other than 'replicas', 'ordinals', 'template', 'updateStrategy', 'revisionHistoryLimit', 'persistentVolumeClaimRetentionPolicy' and 'minReadySeconds' are forbidden";

pub(crate) fn stateful_set(causes: &mut Causes, object: &Value, old: Option<&Value>) {
    let (path, spec) = (Path::root("spec"), &object["spec"]);
    match text(&spec["podManagementPolicy"]) {
        "" => causes.required(&path.field("podManagementPolicy"), ""),
        "OrderedReady" | "Parallel" => {}
        _ => causes.invalid(
            &path.field("podManagementPolicy"),
            &spec["podManagementPolicy"],
            "must be 'OrderedReady' or 'Parallel'",
        ),
    }
    strategy(causes, &path.field("updateStrategy"), &spec["updateStrategy"]);
    let (here, policy) =
        (path.field("persistentVolumeClaimRetentionPolicy"), &spec["persistentVolumeClaimRetentionPolicy"]);
    for name in ["whenDeleted", "whenScaled"] {
        if !policy.is_null() && !matches!(text(&policy[name]), "Retain" | "Delete") {
            causes.unsupported(&here.field(name), &policy[name], &["Retain", "Delete"]);
        }
    }
    if old.is_none() {
        for (index, claim) in items(&spec["volumeClaimTemplates"]) {
            let here = path.field("volumeClaimTemplates").index(index);
            claim_spec::of_template(causes, &here.field("spec"), &claim["spec"]);
        }
        let service = text(&spec["serviceName"]);
        if !service.is_empty() {
            causes.format(&path.field("serviceName"), service, format::dns1123_label(service));
        }
    }
    causes.not_negative(&path.field("replicas"), &spec["replicas"]);
    causes.not_negative(&path.field("minReadySeconds"), &spec["minReadySeconds"]);
    causes.not_negative(&path.field("ordinals.start"), &spec["ordinals"]["start"]);
    let here = path.field("template");
    if selector(causes, &path, spec) {
        template_of(causes, &here, &with_claims(spec), "StatefulSet");
    } else {
        restarts(causes, &here.field("spec"), &spec["template"]["spec"], "StatefulSet");
    }
    if old.is_some_and(|old| immutable_fields(&old["spec"]) != immutable_fields(spec)) {
        causes.forbidden(&path, FORBIDDEN);
    }
}

/// Checks the counts in a status.
pub(super) fn status(causes: &mut Causes, status: &Value, old: &Value) {
    let path = Path::root("status");
    super::workload::counts(causes, status, "updatedReplicas", &[], "status.readyReplicas");
    causes.not_negative(&path.field("currentReplicas"), &status["currentReplicas"]);
    let count = |status: &Value, name: &str| status[name].as_i64().unwrap_or(0);
    if count(status, "currentReplicas") > count(status, "replicas") {
        let detail = "cannot be greater than status.replicas";
        causes.invalid(&path.field("currentReplicas"), &status["currentReplicas"], detail);
    }
    collisions(causes, &path, status, old);
}

/// Checks a selector and the labels of the template. Returns whether the selector is valid.
fn selector(causes: &mut Causes, path: &Path, spec: &Value) -> bool {
    let (here, selector) = (path.field("selector"), &spec["selector"]);
    if selector.is_null() {
        causes.required(&here, "");
        selected_template(causes, path, spec);
        return true;
    }
    let is_valid = is_label_selector(causes, &here, selector);
    let empty =
        |name: &str| selector[name].is_null() || selector[name] == json!({}) || selector[name] == json!([]);
    if empty("matchLabels") && empty("matchExpressions") {
        causes.invalid(&here, selector, "empty selector is invalid for statefulset");
    }
    if is_valid {
        selected_template(causes, path, spec);
    } else {
        causes.invalid_selector(&here, selector, "");
    }
    is_valid
}

fn strategy(causes: &mut Causes, path: &Path, strategy: &Value) {
    let (here, rolling) = (path.field("rollingUpdate"), &strategy["rollingUpdate"]);
    match text(&strategy["type"]) {
        "" => causes.required(path, ""),
        "OnDelete" if !rolling.is_null() => {
            causes.invalid(&here, rolling, "only allowed for updateStrategy 'RollingUpdate'");
        }
        "OnDelete" => {}
        "RollingUpdate" => {
            causes.not_negative(&here.field("partition"), &rolling["partition"]);
            let (here, unavailable) = (here.field("maxUnavailable"), &rolling["maxUnavailable"]);
            if !unavailable.is_null() {
                int_or_percent(causes, &here, unavailable);
                if is_zero(unavailable) {
                    causes.invalid(&here, unavailable, "cannot be 0");
                }
                if percent(unavailable).is_some_and(|percent| percent > 100) {
                    causes.invalid(&here, unavailable, "must not be greater than 100%");
                }
            }
        }
        _ => causes.invalid(path, strategy, "must be 'RollingUpdate' or 'OnDelete'"),
    }
}

/// The pod template with a volume for each claim template, and without host names. The controller sets the host names.
fn with_claims(spec: &Value) -> Value {
    let mut template = spec["template"].clone();
    let Some(pod) = template["spec"].as_object_mut() else { return template };
    pod.remove("hostname");
    pod.remove("subdomain");
    // Upstream collects the claim templates in a map by name, so templates with the same name make one volume.
    let mut claims: Vec<&Value> = Vec::new();
    let mut seen = HashSet::new();
    for (_, claim) in items(&spec["volumeClaimTemplates"]) {
        let name = &claim["metadata"]["name"];
        if seen.insert(text(name)) {
            claims.push(name);
        }
    }
    if claims.is_empty() {
        return template;
    }
    let own = pod.get("volumes").cloned().unwrap_or_default();
    let mut volumes: Vec<Value> = claims
        .iter()
        .map(|name| json!({"name": name, "persistentVolumeClaim": {"claimName": name}}))
        .collect();
    let others = items(&own).filter(|(_, volume)| !seen.contains(text(&volume["name"])));
    volumes.extend(others.map(|(_, volume)| volume.clone()));
    pod.insert("volumes".to_owned(), volumes.into());
    template
}

/// The fields that an update cannot change.
fn immutable_fields(spec: &Value) -> Value {
    let mut spec = spec.clone();
    if let Some(spec) = spec.as_object_mut() {
        spec.retain(|name, value| !MUTABLE.contains(&name.as_str()) && !value.is_null());
    }
    spec
}

//! Warnings about fields of valid objects: deprecated, ignored and contradictory fields. Clients show them to their
//! users.
//!
//! Source: `WarningsOnCreate` and `WarningsOnUpdate` of upstream's strategies. Upstream's warnings about Go types and
//! about a Secret's key are not implemented. The number of warnings and the number of compared elements are limited,
//! because an object may have thousands of elements.

mod address;
mod pod;
mod port;
mod service;
mod volume;

use std::collections::BTreeSet;

use coracle_values::names;
use coracle_values::quantity::Quantity;
use serde_json::Value;

use crate::Resource;
use crate::pod_security::template_path;

/// Maximum number of warnings about one object.
const MAX: usize = 100;
/// Limit of the bytes of all warnings about one object. The warning that reaches this limit is the last warning. A
/// warning contains parts of the object, which may be very long. Responses have a lower limit.
const MAX_BYTES: usize = 16 << 10;
/// Maximum number of earlier elements of a list with which an element is compared.
const MAX_COMPARED: usize = 100;

/// Deprecated labels and annotations of nodes, with their warnings.
const LABELS: [(&str, &str); 8] = [
    ("beta.kubernetes.io/arch", "deprecated since v1.14; use \"kubernetes.io/arch\" instead"),
    ("beta.kubernetes.io/os", "deprecated since v1.14; use \"kubernetes.io/os\" instead"),
    (
        "failure-domain.beta.kubernetes.io/region",
        "deprecated since v1.17; use \"topology.kubernetes.io/region\" instead",
    ),
    (
        "failure-domain.beta.kubernetes.io/zone",
        "deprecated since v1.17; use \"topology.kubernetes.io/zone\" instead",
    ),
    (
        "beta.kubernetes.io/instance-type",
        "deprecated since v1.17; use \"node.kubernetes.io/instance-type\" instead",
    ),
    ("app.kubernetes.io/created-by", "deprecated since v1.9"),
    (
        "scheduler.alpha.kubernetes.io/preferAvoidPods",
        "deprecated since v1.22; use Taints and Tolerations instead",
    ),
    ("node-role.kubernetes.io/master", "use \"node-role.kubernetes.io/control-plane\" instead"),
];
/// Kinds of workloads whose name becomes a part of the names of their pods.
const NAMES_OF_PODS: [&str; 5] = ["CronJob", "Deployment", "Job", "ReplicaSet", "ReplicationController"];
/// Finalizers of namespaces and of the garbage collector. They have no domain.
const STANDARD_FINALIZERS: [&str; 3] = ["foregroundDeletion", "kubernetes", "orphan"];
const INGRESS_CLASS: &str = "kubernetes.io/ingress.class";
const MOUNTABLE_SECRETS: &str = "kubernetes.io/enforce-mountable-secrets";

/// The warnings about one object.
#[derive(Default)]
struct Found {
    warnings: Vec<String>,
    bytes: usize,
}

impl Found {
    fn add(&mut self, text: String) {
        if !self.is_full() {
            self.bytes += text.len();
            self.warnings.push(text);
        }
    }

    /// Whether further warnings are dropped.
    fn is_full(&self) -> bool {
        self.warnings.len() >= MAX || self.bytes >= MAX_BYTES
    }

    /// Adds a warning about a field, if there is one.
    fn add_at(&mut self, path: impl FnOnce() -> String, text: Option<String>) {
        if let Some(text) = text {
            self.add(format!("{}: {text}", path()));
        }
    }
}

/// The warnings about a valid object. `old` is the object before an update. `None` for a create.
pub fn about(kind: &Resource, new: &Value, old: Option<&Value>) -> Vec<String> {
    let mut found = Found::default();
    if !kind.is_built_in() {
        finalizers(&mut found, new, old);
        return found.warnings;
    }
    match (&*kind.group, &*kind.kind) {
        // As upstream, an update of a pod has no warnings, because most of these updates come from programs.
        ("", "Pod") if old.is_none() => {
            name(&mut found, new, "this is used in the Pod's hostname");
            pod::check(&mut found, "", new);
        }
        ("", "Service") => service::service(&mut found, new),
        ("", "Node") => node(&mut found, new),
        ("", "PersistentVolume") => volume::persistent(&mut found, new),
        ("", "PersistentVolumeClaim") => volume::claim(&mut found, new),
        ("", "ServiceAccount") => account(&mut found, new, old),
        ("discovery.k8s.io", "EndpointSlice") => service::slice(&mut found, new, old.is_none()),
        ("networking.k8s.io", "NetworkPolicy") => service::policy(&mut found, new),
        ("networking.k8s.io", "Ingress") if old.is_none() => ingress(&mut found, new),
        ("node.k8s.io", "RuntimeClass") => {
            for (_, message) in keys(&new["scheduling"]["nodeSelector"]).filter_map(label) {
                found.add(format!("scheduling.nodeSelector: {message}"));
            }
        }
        ("storage.k8s.io", "StorageClass") => volume::class(&mut found, new),
        ("storage.k8s.io", "CSIStorageCapacity") => volume::capacity(&mut found, new),
        _ => workload(&mut found, kind, new, old),
    }
    found.warnings
}

/// Warns about new finalizers of a custom resource without a domain. Source: `generateWarningsFromObj` of its strategy.
fn finalizers(found: &mut Found, new: &Value, old: Option<&Value>) {
    let known = old.map(finalizers_of).unwrap_or_default();
    for name in finalizers_of(new).difference(&known) {
        if !name.contains('/') && !STANDARD_FINALIZERS.contains(name) {
            found.add(format!(
                "metadata.finalizers: {name:?}: prefer a domain-qualified finalizer name including a path (/) to avoid \
                 accidental conflicts with other finalizer writers"
            ));
        }
    }
}

fn finalizers_of(object: &Value) -> BTreeSet<&str> {
    items(&object["metadata"]["finalizers"]).map(|(_, name)| text(name)).collect()
}

/// Adds the warnings about an object with a pod template.
fn workload(found: &mut Found, kind: &Resource, new: &Value, old: Option<&Value>) {
    let Some(path) = template_path(&kind.group, &kind.plural) else { return };
    if old.is_none() && NAMES_OF_PODS.contains(&&*kind.kind) {
        name(found, new, "this is used in Pod names and hostnames");
    }
    let is_changed = old.is_none_or(|old| match &*kind.kind {
        "DaemonSet" => new.pointer(path) != old.pointer(path),
        _ => new["metadata"]["generation"] != old["metadata"]["generation"],
    });
    let prefix = format!("{}.", path.trim_start_matches('/').replace('/', "."));
    if is_changed && kind.group == "batch" {
        indexed_job(found, prefix.trim_end_matches(".template."), &new["spec"], &kind.kind);
    }
    if is_changed {
        pod::check(found, &prefix, new.pointer(path).unwrap_or(&Value::Null));
    }
    match &*kind.kind {
        "StatefulSet" => stateful_set(found, &new["spec"]),
        "CronJob" if old.is_some() && text(&new["spec"]["schedule"]).contains("TZ") => {
            // Upstream's text has the wrong path, too.
            found.add(
                "cannot use TZ or CRON_TZ in spec.spec.schedule, use timeZone instead, see \
                 https://kubernetes.io/docs/concepts/workloads/controllers/cron-jobs/ for more details"
                    .to_owned(),
            );
        }
        _ => {}
    }
}

/// Warns about an indexed job whose status may have no room for its completed indexes if many indexes fail.
fn indexed_job(found: &mut Found, path: &str, spec: &Value, kind: &str) {
    let spec = if kind == "CronJob" { &spec["jobTemplate"]["spec"] } else { spec };
    let above = |field: &str, limit: i64| spec[field].as_i64().is_some_and(|count| count > limit);
    if spec["completionMode"] == "Indexed" && above("completions", 100_000) && above("parallelism", 10_000) {
        found.add(format!(
            "{path}: In Indexed Jobs with a number of completions higher than 10^5 and a parallelism higher than 10^4, \
             Kubernetes might not be able to track completedIndexes when a big number of indexes fail"
        ));
    }
}

fn stateful_set(found: &mut Found, spec: &Value) {
    for (index, claim) in items(&spec["volumeClaimTemplates"]) {
        volume::claim_spec(found, &format!("spec.volumeClaimTemplates[{index}]"), &claim["spec"]);
    }
    if spec["revisionHistoryLimit"].as_i64().is_some_and(|limit| limit < 0) {
        found.add(
            "spec.revisionHistoryLimit: a negative value retains all historical revisions; a value >= 0 is recommended"
                .to_owned(),
        );
    }
}

/// Warns about a name that is not a DNS label.
fn name(found: &mut Found, object: &Value, use_of_name: &str) {
    let problems = names::dns1123_label(text(&object["metadata"]["name"]));
    if !problems.is_empty() {
        found.add(format!(
            "metadata.name: {use_of_name}, which can result in surprising behavior; a DNS label is recommended: [{}]",
            problems.join(" ")
        ));
    }
}

fn node(found: &mut Found, node: &Value) {
    let spec = &node["spec"];
    if !spec["configSource"].is_null() {
        found.add("spec.configSource: the feature is removed".to_owned());
    }
    if !text(&spec["externalID"]).is_empty() {
        found.add("spec.externalID: this field is deprecated, and is unused by Kubernetes".to_owned());
    }
    for (index, range) in items(&spec["podCIDRs"]) {
        address::ranges(found, || format!("spec.podCIDRs[{index}]"), text(range));
    }
}

fn account(found: &mut Found, new: &Value, old: Option<&Value>) {
    let has = |object: &Value| !object["metadata"]["annotations"][MOUNTABLE_SECRETS].is_null();
    if has(new) && !old.is_some_and(has) {
        found.add(format!(
            "metadata.annotations[{MOUNTABLE_SECRETS}]: deprecated in v1.32+; prefer separate namespaces to isolate access to \
             mounted secrets"
        ));
    }
}

fn ingress(found: &mut Found, ingress: &Value) {
    let is_annotated = !ingress["metadata"]["annotations"][INGRESS_CLASS].is_null();
    if is_annotated && ingress["spec"]["ingressClassName"].is_null() {
        found.add(format!(
            "annotation {INGRESS_CLASS:?} is deprecated, please use 'spec.ingressClassName' instead"
        ));
    }
}

/// Warns about deprecated labels in a node selector term. In a preferred term it also warns about invalid values, which
/// validation refuses in required terms.
fn node_term(found: &mut Found, path: &str, term: &Value, is_preferred: bool) {
    for (index, expression) in items(&term["matchExpressions"]) {
        if let Some((label, message)) = label(text(&expression["key"])) {
            found.add(format!("{path}.matchExpressions[{index}].key: {label} is {message}"));
        }
        for (number, value) in items(&expression["values"]).filter(|_| is_preferred) {
            let value = text(value);
            for problem in names::label_value(value) {
                found.add(format!(
                    "{path}.matchExpressions[{index}].values[{number}]: {value} is invalid, {problem}"
                ));
            }
        }
    }
}

/// The warning about an amount of bytes that is not a whole number.
fn fraction(amount: &Value) -> Option<String> {
    let number;
    let text = match amount {
        Value::String(text) => text.as_str(),
        Value::Number(_) => {
            number = amount.to_string();
            number.as_str()
        }
        _ => return None,
    };
    let quantity = Quantity::parse(text).ok().filter(|quantity| quantity.millis() % 1000 != 0)?;
    let shown = quantity.to_string();
    Some(format!("fractional byte value {shown:?} is invalid, must be an integer"))
}

/// A deprecated label of nodes with its message.
fn label(key: &str) -> Option<(&'static str, &'static str)> {
    LABELS.into_iter().find(|(label, _)| *label == key)
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// The elements of a list with their indexes.
fn items(value: &Value) -> impl Iterator<Item = (usize, &Value)> {
    value.as_array().into_iter().flatten().enumerate()
}

/// The keys of a map.
fn keys(value: &Value) -> impl Iterator<Item = &str> {
    value.as_object().into_iter().flat_map(|map| map.keys().map(String::as_str))
}

#[cfg(test)]
mod tests;

//! Pods and templates of pods. Source: `warningsForPodSpecAndMeta` of `pkg/api/pod`.

use std::collections::HashSet;

use serde_json::{Value, json};

use super::{Found, address, fraction, items, keys, label, node_term, port, text, volume};

const ANNOTATIONS: [(&str, &str); 3] = [
    (
        "scheduler.alpha.kubernetes.io/critical-pod",
        "non-functional in v1.16+; use the \"priorityClassName\" field instead",
    ),
    ("security.alpha.kubernetes.io/sysctls", "non-functional in v1.11+; use the \"sysctls\" field instead"),
    (
        "security.alpha.kubernetes.io/unsafe-sysctls",
        "non-functional in v1.11+; use the \"sysctls\" field instead",
    ),
];
const SECCOMP_POD: &str = "seccomp.security.alpha.kubernetes.io/pod";
const SECCOMP_CONTAINER: &str = "container.seccomp.security.alpha.kubernetes.io/";
const APPARMOR_CONTAINER: &str = "container.apparmor.security.beta.kubernetes.io/";
const SECCOMP: &str = "non-functional in v1.27+; use the \"seccompProfile\" field instead";
const APPARMOR: &str = "deprecated since v1.30; use the \"appArmorProfile\" field instead";
const NULL_SELECTOR: &str = "a null labelSelector results in matching no pod";
/// Lists of containers in upstream's order.
const CONTAINERS: [&str; 3] = ["initContainers", "containers", "ephemeralContainers"];

/// Warns about a pod, or about a template whose path is the prefix.
pub(super) fn check(found: &mut Found, prefix: &str, pod: &Value) {
    let (spec, annotations) = (&pod["spec"], &pod["metadata"]["annotations"]);
    nodes(found, prefix, spec);
    for (key, message) in ANNOTATIONS {
        if !annotations[key].is_null() {
            found.add(format!("{prefix}metadata.annotations[{key}]: {message}"));
        }
    }
    volume::of_pod(found, prefix, &spec["volumes"]);
    lists(found, prefix, spec);
    for resource in ["memory", "ephemeral-storage"] {
        let amount = &spec["overhead"][resource];
        found.add_at(|| format!("{prefix}spec.overhead[{resource}]"), fraction(amount));
    }
    if spec["securityContext"]["seccompProfile"].is_null() && !annotations[SECCOMP_POD].is_null() {
        found.add(format!("{prefix}metadata.annotations[{SECCOMP_POD}]: {SECCOMP}"));
    }
    let containers = containers(prefix, spec);
    for (path, one) in &containers {
        profiles(found, prefix, pod, one);
        container(found, path, one);
    }
    port::ports(found, &containers);
    if spec["terminationGracePeriodSeconds"].as_i64().is_some_and(|seconds| seconds < 0) {
        found.add(format!(
            "{prefix}spec.terminationGracePeriodSeconds: must be >= 0; negative values are invalid and will be treated as 1"
        ));
    }
    affinity(found, prefix, &spec["affinity"]);
    for (index, server) in items(&spec["dnsConfig"]["nameservers"]) {
        address::address(found, || format!("{prefix}spec.dnsConfig.nameservers[{index}]"), text(server));
    }
    for (index, alias) in items(&spec["hostAliases"]) {
        address::address(found, || format!("{prefix}spec.hostAliases[{index}].ip"), text(&alias["ip"]));
    }
}

/// All containers with their paths.
fn containers<'a>(prefix: &str, spec: &'a Value) -> Vec<(String, &'a Value)> {
    let lists = CONTAINERS.into_iter().map(|list| (list, &spec[list]));
    let paths = lists.flat_map(|(list, containers)| {
        items(containers).map(move |(index, one)| (format!("{prefix}spec.{list}[{index}]"), one))
    });
    paths.collect()
}

/// Warns about deprecated node labels, and about constraints that match no pod.
fn nodes(found: &mut Found, prefix: &str, spec: &Value) {
    for (key, message) in keys(&spec["nodeSelector"]).filter_map(label) {
        found.add(format!("{prefix}spec.nodeSelector[{key}]: {message}"));
    }
    let affinity = &spec["affinity"]["nodeAffinity"];
    let required = "requiredDuringSchedulingIgnoredDuringExecution";
    for (index, term) in items(&affinity[required]["nodeSelectorTerms"]) {
        let path = format!("{prefix}spec.affinity.nodeAffinity.{required}.nodeSelectorTerms[{index}]");
        node_term(found, &path, term, false);
    }
    let preferred = "preferredDuringSchedulingIgnoredDuringExecution";
    for (index, term) in items(&affinity[preferred]) {
        let path = format!("{prefix}spec.affinity.nodeAffinity.{preferred}[{index}].preference");
        node_term(found, &path, &term["preference"], true);
    }
    for (index, constraint) in items(&spec["topologySpreadConstraints"]) {
        let path = || format!("{prefix}spec.topologySpreadConstraints[{index}]");
        if let Some((key, message)) = label(text(&constraint["topologyKey"])) {
            found.add(format!("{}.topologyKey: {key} is {message}", path()));
        }
        if constraint["labelSelector"].is_null() {
            found.add(format!("{}.labelSelector: {NULL_SELECTOR}", path()));
        }
    }
}

/// Warns about list elements that occur twice or have no name.
fn lists(found: &mut Found, prefix: &str, spec: &Value) {
    for (list, field) in [("hostAliases", "ip"), ("imagePullSecrets", "name")] {
        let mut seen = HashSet::new();
        for (index, item) in items(&spec[list]) {
            let value = text(&item[field]);
            if !seen.insert(value) {
                found.add(format!("{prefix}spec.{list}[{index}].{field}: duplicate {field} {value:?}"));
            }
        }
    }
    for (index, secret) in items(&spec["imagePullSecrets"]) {
        if text(&secret["name"]).is_empty() {
            found.add(format!("{prefix}spec.imagePullSecrets[{index}].name: invalid empty name \"\""));
        }
    }
}

/// Warns about profile annotations without the matching field. AppArmor annotations of pods cause no warning, because
/// they are copied to the fields.
fn profiles(found: &mut Found, prefix: &str, pod: &Value, container: &Value) {
    let (annotations, security) = (&pod["metadata"]["annotations"], &container["securityContext"]);
    if !annotations.is_object() {
        return;
    }
    let name = text(&container["name"]);
    let key = format!("{SECCOMP_CONTAINER}{name}");
    if security["seccompProfile"].is_null() && !annotations[key.as_str()].is_null() {
        found.add(format!("{prefix}metadata.annotations[{key}]: {SECCOMP}"));
    }
    let key = format!("{APPARMOR_CONTAINER}{name}");
    let annotation = &annotations[key.as_str()];
    if prefix.is_empty() || annotation.is_null() || !security["appArmorProfile"].is_null() {
        return;
    }
    if app_armor(text(annotation)).as_ref() != Some(&pod["spec"]["securityContext"]["appArmorProfile"]) {
        found.add(format!("{prefix}metadata.annotations[{key}]: {APPARMOR}"));
    }
}

/// Converts the value of an AppArmor annotation to the field `appArmorProfile`.
fn app_armor(annotation: &str) -> Option<Value> {
    match annotation {
        "unconfined" => Some(json!({"type": "Unconfined"})),
        "runtime/default" => Some(json!({"type": "RuntimeDefault"})),
        other => {
            let profile = other.strip_prefix("localhost/")?;
            Some(json!({"type": "Localhost", "localhostProfile": profile}))
        }
    }
}

/// Warns about fractions of bytes, and about variables that hide earlier variables.
fn container(found: &mut Found, path: &str, container: &Value) {
    for resource in ["memory", "ephemeral-storage"] {
        for list in ["limits", "requests"] {
            let amount = &container["resources"][list][resource];
            found.add_at(|| format!("{path}.resources.{list}[{resource}]"), fraction(amount));
        }
    }
    let mut seen = HashSet::new();
    for (index, variable) in items(&container["env"]) {
        let name = text(&variable["name"]);
        if seen.insert(name) {
            continue;
        }
        let (value, reference) = (text(&variable["value"]), format!("$({name})"));
        let extends = variable["valueFrom"].is_null() && value != reference && value.contains(&reference);
        if !extends {
            found.add(format!(
                "{path}.env[{index}]: hides previous definition of {name:?}, which may be dropped when using apply"
            ));
        }
    }
}

/// Warns about affinity terms that match no pod.
fn affinity(found: &mut Found, prefix: &str, affinity: &Value) {
    for kind in ["podAffinity", "podAntiAffinity"] {
        let required = "requiredDuringSchedulingIgnoredDuringExecution";
        for (index, term) in items(&affinity[kind][required]) {
            if term["labelSelector"].is_null() {
                found.add(format!(
                    "{prefix}spec.affinity.{kind}.{required}[{index}].labelSelector: {NULL_SELECTOR}"
                ));
            }
        }
        let preferred = "preferredDuringSchedulingIgnoredDuringExecution";
        for (index, term) in items(&affinity[kind][preferred]) {
            if term["podAffinityTerm"]["labelSelector"].is_null() {
                found.add(format!(
                    "{prefix}spec.affinity.{kind}.{preferred}[{index}].podAffinityTerm.labelSelector: {NULL_SELECTOR}"
                ));
            }
        }
    }
}

//! Pods and the specs of pod templates.

use std::collections::{HashMap, HashSet};

use serde_json::Value;

use super::{
    Causes, Path, container, env, format, immutable, items, resize, resources, scheduling, security, text,
    volume,
};

const RESTART_POLICIES: &[&str] = &["Always", "OnFailure", "Never"];
const DNS_POLICIES: &[&str] = &["ClusterFirstWithHostNet", "ClusterFirst", "Default", "None"];

pub(crate) fn pod(causes: &mut Causes, pod: &Value, old: Option<&Value>) {
    spec(causes, &Path::root("spec"), &pod["spec"]);
    match old {
        Some(old) => {
            mirror_annotation(causes, pod, old);
            immutable::pod(causes, &pod["spec"], &old["spec"]);
        }
        None if items(&pod["spec"]["ephemeralContainers"]).next().is_some() => {
            let path = Path::root("spec").field("ephemeralContainers");
            causes.forbidden(&path, "cannot be set on create");
        }
        None => {}
    }
}

/// Refuses a change of the annotation of mirror pods: admission has other rules for a new pod with it. Source:
/// `ValidatePodSpecificAnnotationUpdates` of `pkg/apis/core/validation`.
pub(super) fn mirror_annotation(causes: &mut Causes, new: &Value, old: &Value) {
    let name = resize::MIRROR;
    let (after, before) = (&new["metadata"]["annotations"][name], &old["metadata"]["annotations"][name]);
    if after != before {
        let detail = match before.is_null() {
            true => "may not add mirror pod annotation",
            false => "may not remove or update mirror pod annotation",
        };
        causes.forbidden(&Path::root("metadata").field("annotations").key(name), detail);
    }
}

/// Checks changed ephemeral containers: they must be valid, and none may be removed or changed.
pub(super) fn ephemeral_update(causes: &mut Causes, new: &Value, old: &Value) {
    spec(causes, &Path::root("spec"), &new["spec"]);
    let path = Path::root("spec").field("ephemeralContainers");
    let mut after: HashMap<&Value, &Value> = HashMap::new();
    for (_, container) in items(&new["spec"]["ephemeralContainers"]) {
        after.entry(&container["name"]).or_insert(container);
    }
    for (_, before) in items(&old["spec"]["ephemeralContainers"]) {
        match after.get(&before["name"]) {
            None => {
                let detail = format!("existing ephemeral containers {} may not be removed\n", before["name"]);
                causes.forbidden(&path, &detail);
            }
            Some(container) if *container != before => {
                let detail = format!("existing ephemeral containers {} may not be changed\n", before["name"]);
                causes.forbidden(&path, &detail);
            }
            Some(_) => {}
        }
    }
}

/// Checks the spec of a pod or a pod template.
pub(super) fn spec(causes: &mut Causes, path: &Path, spec: &Value) {
    let volumes = volume::volumes(causes, &path.field("volumes"), &spec["volumes"]);
    container::all(causes, path, spec, &volumes);
    resources::pod(causes, path, spec);
    resize::policies(causes, path, spec);
    causes.one_of(&path.field("restartPolicy"), &spec["restartPolicy"], RESTART_POLICIES);
    dns(causes, path, spec);
    let deadline = &spec["activeDeadlineSeconds"];
    causes.in_range(&path.field("activeDeadlineSeconds"), deadline, 1..=i64::from(i32::MAX));
    names(causes, path, spec);
    hostname_override(causes, path, spec);
    security::pod(causes, &path.field("securityContext"), &spec["securityContext"]);
    security::namespaces(causes, path, spec);
    scheduling::spec(causes, path, spec);
    host_network(causes, path, spec);
    env::file_volumes(causes, path, spec);
    if spec["os"].is_object() {
        match text(&spec["os"]["name"]) {
            "" => causes.required(&path.field("os").field("name"), ""),
            _ => causes.optional_word(&path.field("os"), &spec["os"]["name"], &["linux", "windows"]),
        }
    }
    for (index, alias) in items(&spec["hostAliases"]) {
        let here = path.field("hostAliases").index(index);
        causes.format(&here.field("ip"), text(&alias["ip"]), format::ip(text(&alias["ip"])));
        for (at, name) in items(&alias["hostnames"]) {
            let name = text(name);
            causes.format(&here.field("hostnames").index(at), name, format::dns1123_subdomain(name));
        }
    }
    for (index, gate) in items(&spec["readinessGates"]) {
        let here = path.field("readinessGates").index(index).field("conditionType");
        let name = text(&gate["conditionType"]);
        causes.format(&here, name, format::qualified_name(name));
    }
}

fn names(causes: &mut Causes, path: &Path, spec: &Value) {
    let mut check = |field: &str, rule: fn(&str) -> Vec<String>| {
        let name = text(&spec[field]);
        if !name.is_empty() {
            causes.format(&path.field(field), name, rule(name));
        }
    };
    check("serviceAccountName", format::dns1123_subdomain);
    check("nodeName", format::dns1123_subdomain);
    check("hostname", format::dns1123_label);
    check("subdomain", format::dns1123_label);
    check("priorityClassName", format::dns1123_subdomain);
    check("runtimeClassName", format::dns1123_subdomain);
    if text(&spec["schedulerName"]).is_empty() {
        causes.required(&path.field("schedulerName"), "");
    }
}

/// Checks `hostnameOverride`: a subdomain of at most 64 bytes, in a pod whose host name has no other source.
fn hostname_override(causes: &mut Causes, path: &Path, spec: &Value) {
    let Some(name) = spec["hostnameOverride"].as_str() else { return };
    let here = path.field("hostnameOverride");
    for other in ["setHostnameAsFQDN", "hostNetwork"] {
        if spec[other] == true {
            causes.forbidden(&here, &format!("may not be specified when {other} is true"));
        }
    }
    if name.len() > 64 {
        causes.too_long(&here, 64);
    }
    causes.format(&here, name, format::dns1123_subdomain(name));
}

fn dns(causes: &mut Causes, path: &Path, spec: &Value) {
    causes.one_of(&path.field("dnsPolicy"), &spec["dnsPolicy"], DNS_POLICIES);
    let (here, config) = (path.field("dnsConfig"), &spec["dnsConfig"]);
    let servers = items(&config["nameservers"]).count();
    if spec["dnsPolicy"] == "None" {
        if config.is_null() {
            causes.required(&here, "must provide `dnsConfig` when `dnsPolicy` is None");
        } else if servers == 0 {
            let detail = "must provide at least one DNS nameserver when `dnsPolicy` is None";
            causes.required(&here.field("nameservers"), detail);
        }
    }
    if servers > 3 {
        causes.invalid(
            &here.field("nameservers"),
            &config["nameservers"],
            "must not have more than 3 nameservers",
        );
    }
    for (index, server) in items(&config["nameservers"]) {
        causes.format(&here.field("nameservers").index(index), text(server), format::ip(text(server)));
    }
    for (index, search) in items(&config["searches"]) {
        // A dot alone is the root of all names; underscores are allowed.
        let name = text(search);
        if name != "." {
            let name = name.strip_suffix('.').unwrap_or(name);
            causes.format(&here.field("searches").index(index), name, format::search_domain(name));
        }
    }
    for (index, option) in items(&config["options"]) {
        if text(&option["name"]).is_empty() {
            causes.required(&here.field("options").index(index), "");
        }
    }
}

/// Checks host ports: with hostNetwork they equal the container ports, and no two containers may have the same one.
fn host_network(causes: &mut Causes, path: &Path, spec: &Value) {
    let shared = spec["hostNetwork"] == true;
    let mut taken = HashSet::new();
    for (index, container) in items(&spec["containers"]) {
        for (at, port) in items(&container["ports"]) {
            let here = path.field("containers").index(index).field("ports").index(at);
            let host_port = port["hostPort"].as_i64().unwrap_or(0);
            if shared && host_port != 0 && port["hostPort"] != port["containerPort"] {
                let detail = "must match `hostPort` when `hostNetwork` is true";
                causes.invalid(&here.field("containerPort"), &port["containerPort"], detail);
            }
            let id = format!("{}/{}/{host_port}", text(&port["protocol"]), text(&port["hostIP"]));
            if host_port != 0 && !taken.insert(id.clone()) {
                causes.duplicate(&here.field("hostPort"), &id.into());
            }
        }
    }
}

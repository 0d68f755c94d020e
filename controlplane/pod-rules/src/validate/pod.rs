//! Pods and the specs of pod templates.

use std::collections::{HashMap, HashSet};

use serde_json::Value;

use super::{
    Causes, Path, claims, container, env, format, immutable, items, meta, pod_annotations, probe, resize,
    resources, scheduling, security, text, volume, windows,
};
use crate::cause::are_cut;

const RESTART_POLICIES: &[&str] = &["Always", "OnFailure", "Never"];
/// Maximum number of search domains.
const MAX_SEARCHES: usize = 32;
/// Maximum length of all search domains, with a space between two domains.
const MAX_SEARCH_LIST: usize = 2048;
const DNS_POLICIES: &[&str] = &["ClusterFirstWithHostNet", "ClusterFirst", "Default", "None"];

/// Checks a pod, and its changes since `old`, if it is an update.
pub fn pod(causes: &mut Causes, pod: &Value, old: Option<&Value>) {
    let (path, spec) = (Path::root("spec"), &pod["spec"]);
    match old {
        Some(old) => {
            of_pod(causes, pod);
            pod_annotations::update(causes, pod, old);
            immutable::pod(causes, spec, &old["spec"]);
        }
        None => {
            let annotations = &pod["metadata"]["annotations"];
            let here = Path::root("metadata").field("annotations");
            pod_annotations::specific(causes, &here, annotations, spec);
            of_pod(causes, pod);
            if items(&spec["ephemeralContainers"]).next().is_some() {
                causes.forbidden(&path.field("ephemeralContainers"), "cannot be set on create");
            }
            if !text(&spec["nodeName"]).is_empty() && items(&spec["schedulingGates"]).next().is_some() {
                let detail = "cannot be set until all schedulingGates have been cleared";
                causes.forbidden(&path.field("nodeName"), detail);
            }
            pod_annotations::agree(causes, &path, annotations, spec);
        }
    }
}

/// Checks a pod template.
pub fn template(causes: &mut Causes, path: &Path, template: &Value) {
    let (metadata, spec, here) = (&template["metadata"], &template["spec"], path.field("spec"));
    meta::labels(causes, &path.field("labels"), &metadata["labels"]);
    meta::annotations(causes, &path.field("annotations"), &metadata["annotations"]);
    pod_annotations::specific(causes, &path.field("annotations"), &metadata["annotations"], spec);
    self::spec(causes, &here, spec);
    pod_annotations::agree(causes, &here, &metadata["annotations"], spec);
    if items(&spec["ephemeralContainers"]).next().is_some() {
        let detail = "ephemeral containers not allowed in pod template";
        causes.forbidden(&here.field("ephemeralContainers"), detail);
    }
}

/// Checks the spec of a pod, including the rules that pod templates do not have.
pub(super) fn of_pod(causes: &mut Causes, pod: &Value) {
    let (path, spec) = (Path::root("spec"), &pod["spec"]);
    self::spec(causes, &path, spec);
    for list in ["containers", "initContainers", "ephemeralContainers"] {
        for (index, container) in items(&spec[list]) {
            let image = text(&container["image"]);
            if image.trim() != image {
                let detail = "must not have leading or trailing whitespace";
                causes.invalid(&path.field(list).index(index).field("image"), &image.into(), detail);
            }
        }
    }
    let is_mirror = pod["metadata"]["annotations"].get(resize::MIRROR).is_some();
    for _ in items(&spec["resourceClaims"]).filter(|_| is_mirror) {
        causes.forbidden(&Path::whole(), "static pods do not support resource claims");
    }
    volume::of_pod(causes, &path.field("volumes"), spec, text(&pod["metadata"]["name"]));
}

/// Checks an updated pod with the given rules. Violations that the stored pod already has are omitted, because an
/// earlier version accepted them. If the list of violations is truncated, none is omitted.
pub(super) fn new_problems(
    causes: &mut Causes,
    new: &Value,
    old: &Value,
    rules: impl Fn(&mut Causes, &Value),
) {
    let problems = |pod: &Value| {
        let mut causes = Causes::default();
        rules(&mut causes, pod);
        causes.into_list()
    };
    let found = problems(new);
    let is_complete = !found.is_empty() && !are_cut(&found);
    let known = if is_complete { problems(old) } else { Vec::new() };
    found.into_iter().filter(|cause| !known.contains(cause)).for_each(|cause| causes.push(cause));
}

/// Checks changed ephemeral containers: they must be valid, and an existing container may not be removed or changed.
pub(super) fn ephemeral_update(causes: &mut Causes, new: &Value, old: &Value) {
    if old["metadata"]["annotations"].get(resize::MIRROR).is_some() {
        return causes.forbidden(&Path::whole(), "static pods do not support ephemeral containers");
    }
    new_problems(causes, new, old, |causes, pod| {
        of_pod(causes, pod);
        pod_annotations::update(causes, pod, old);
    });
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
                let detail = format!("existing ephemeral containers {} may not be changed", before["name"]);
                causes.forbidden(&path, &detail);
            }
            Some(_) => {}
        }
    }
}

/// Checks the spec of a pod or a pod template.
pub(super) fn spec(causes: &mut Causes, path: &Path, spec: &Value) {
    let volumes = volume::volumes(causes, &path.field("volumes"), &spec["volumes"]);
    claims::all(causes, path, spec);
    container::all(causes, path, spec, &volumes);
    probe::sleeps(causes, path, spec);
    resources::pod(causes, path, spec);
    resize::policies(causes, path, spec);
    causes.one_of(&path.field("restartPolicy"), &spec["restartPolicy"], RESTART_POLICIES);
    dns(causes, path, spec);
    let deadline = &spec["activeDeadlineSeconds"];
    causes.in_range(&path.field("activeDeadlineSeconds"), deadline, 1..=i64::from(i32::MAX));
    names(causes, path, spec);
    if !spec["preemptionPolicy"].is_null() {
        let policies = &["PreemptLowerPriority", "Never"];
        causes.one_of(&path.field("preemptionPolicy"), &spec["preemptionPolicy"], policies);
    }
    resources::overhead(causes, &path.field("overhead"), &spec["overhead"]);
    hostname_override(causes, path, spec);
    security::pod(causes, &path.field("securityContext"), &spec["securityContext"]);
    security::namespaces(causes, path, spec);
    windows::spec(causes, path, spec);
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

/// Checks `hostnameOverride`: a DNS subdomain of at most 64 bytes. `hostnameOverride` excludes `setHostnameAsFQDN` and
/// `hostNetwork`.
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
    if spec["dnsPolicy"] == "None" && config.is_null() {
        return causes.required(&here, "must provide `dnsConfig` when `dnsPolicy` is None");
    }
    if spec["dnsPolicy"] == "None" && servers == 0 {
        let detail = "must provide at least one DNS nameserver when `dnsPolicy` is None";
        return causes.required(&here.field("nameservers"), detail);
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
    searches(causes, &here.field("searches"), &config["searches"]);
    for (index, option) in items(&config["options"]) {
        if text(&option["name"]).is_empty() {
            causes.required(&here.field("options").index(index), "must not be empty");
        }
    }
}

/// Checks the search domains of a pod. The limits are from the C library.
fn searches(causes: &mut Causes, path: &Path, searches: &Value) {
    let count = items(searches).count();
    if count > MAX_SEARCHES {
        let detail = format!("must not have more than {MAX_SEARCHES} search paths");
        causes.invalid(path, searches, &detail);
    }
    // There is a space between two domains.
    let length: usize = items(searches).map(|(_, search)| text(search).len() + 1).sum();
    if length.saturating_sub(1) > MAX_SEARCH_LIST {
        let detail = format!(
            "must not have more than {MAX_SEARCH_LIST} characters (including spaces) in the search list"
        );
        causes.invalid(path, searches, &detail);
    }
    for (index, search) in items(searches) {
        // A dot alone is the root of all names; underscores are allowed.
        let name = text(search);
        if name != "." {
            let name = name.strip_suffix('.').unwrap_or(name);
            causes.format(&path.index(index), name, format::search_domain(name));
        }
    }
}

/// Checks host ports. With hostNetwork the host ports equal the container ports. Two containers cannot use the same
/// host port. Init containers run one after another, so the ports of different init containers may be equal.
fn host_network(causes: &mut Causes, path: &Path, spec: &Value) {
    let mut taken = HashSet::new();
    for (index, container) in items(&spec["containers"]) {
        let here = path.field("containers").index(index).field("ports");
        host_ports(causes, &here, container, &mut taken);
        for (at, port) in items(&container["ports"]).filter(|_| spec["hostNetwork"] == true) {
            let number = port["hostPort"].as_i64().unwrap_or(0);
            if number != 0 && port["hostPort"] != port["containerPort"] {
                let detail = "must match `containerPort` when `hostNetwork` is true";
                causes.invalid(&here.index(at).field("hostPort"), &port["hostPort"], detail);
            }
        }
    }
    for (_, container) in items(&spec["initContainers"]) {
        // As upstream, the error names the first init container.
        let here = path.field("initContainers").index(0).field("ports");
        host_ports(causes, &here, container, &mut HashSet::new());
    }
}

fn host_ports(causes: &mut Causes, path: &Path, container: &Value, taken: &mut HashSet<String>) {
    for (at, port) in items(&container["ports"]) {
        let number = port["hostPort"].as_i64().unwrap_or(0);
        let id = format!("{}/{}/{number}", text(&port["protocol"]), text(&port["hostIP"]));
        if number != 0 && !taken.insert(id.clone()) {
            causes.duplicate(&path.index(at).field("hostPort"), &id.into());
        }
    }
}

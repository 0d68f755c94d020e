//! Containers, init containers and ephemeral containers.

use std::collections::HashSet;

use serde_json::{Value, json};

use super::volume::Volumes;
use super::{Causes, Path, env, format, items, mount, probe, resources, restart, security, text};

const PULL_POLICIES: &[&str] = &["Always", "IfNotPresent", "Never"];
const PROTOCOLS: &[&str] = &["SCTP", "TCP", "UDP"];
/// Fields that an ephemeral container cannot have.
const NOT_EPHEMERAL: [&str; 9] = [
    "ports",
    "resources",
    "resizePolicy",
    "restartPolicy",
    "restartPolicyRules",
    "livenessProbe",
    "readinessProbe",
    "startupProbe",
    "lifecycle",
];

/// Checks every container of a spec.
pub(super) fn all(causes: &mut Causes, path: &Path, spec: &Value, volumes: &Volumes<'_>) {
    let (mut names, mut targets) = (HashSet::new(), HashSet::new());
    if items(&spec["containers"]).next().is_none() {
        causes.required(&path.field("containers"), "");
    }
    for list in ["containers", "initContainers", "ephemeralContainers"] {
        for (index, item) in items(&spec[list]) {
            let here = path.field(list).index(index);
            let name = text(&item["name"]);
            if !name.is_empty() && !names.insert(name) {
                causes.duplicate(&here.field("name"), &item["name"]);
            }
            container(causes, &here, item, volumes);
            security::container(causes, &here.field("securityContext"), item, spec);
            match list {
                "containers" => ordinary(causes, &here, item),
                "initContainers" => init(causes, &here, item),
                _ => ephemeral(causes, &here, item, &targets),
            }
            if list != "ephemeralContainers" {
                targets.insert(name);
            }
        }
    }
}

fn container(causes: &mut Causes, path: &Path, container: &Value, volumes: &Volumes<'_>) {
    let name = text(&container["name"]);
    if name.is_empty() {
        causes.required(&path.field("name"), "");
    } else {
        causes.format(&path.field("name"), name, format::dns1123_label(name));
    }
    if text(&container["image"]).is_empty() {
        causes.required(&path.field("image"), "");
    }
    causes.one_of(&path.field("imagePullPolicy"), &container["imagePullPolicy"], PULL_POLICIES);
    causes.one_of(
        &path.field("terminationMessagePolicy"),
        &container["terminationMessagePolicy"],
        &["File", "FallbackToLogsOnError"],
    );
    ports(causes, &path.field("ports"), &container["ports"]);
    env::all(causes, path, container);
    mount::all(causes, path, container, volumes);
    resources::container(causes, &path.field("resources"), &container["resources"]);
}

fn ordinary(causes: &mut Causes, path: &Path, container: &Value) {
    probe::all(causes, path, container);
    restart::container(causes, path, container);
}

fn init(causes: &mut Causes, path: &Path, container: &Value) {
    restart::init_container(causes, path, container);
    if container["restartPolicy"] == "Always" {
        return probe::all(causes, path, container);
    }
    for name in ["lifecycle", "livenessProbe", "readinessProbe", "startupProbe"] {
        if !container[name].is_null() {
            let detail = "may not be set for init containers without restartPolicy=Always";
            causes.forbidden(&path.field(name), detail);
        }
    }
}

/// Checks an ephemeral container. `targets` has the names of the other containers.
fn ephemeral(causes: &mut Causes, path: &Path, container: &Value, targets: &HashSet<&str>) {
    let forbidden = "cannot be set for an Ephemeral Container";
    let target = text(&container["targetContainerName"]);
    if !target.is_empty() && !targets.contains(target) {
        causes.not_found(&path.field("targetContainerName"), &target.into());
    }
    for name in NOT_EPHEMERAL {
        let value = &container[name];
        // In Go, `resources` is a struct: an empty value counts as absent.
        let is_set = !value.is_null() && (name != "resources" || *value != json!({}));
        if is_set {
            causes.forbidden(&path.field(name), forbidden);
        }
    }
    for (index, mount) in items(&container["volumeMounts"]) {
        for name in ["subPath", "subPathExpr"] {
            if !text(&mount[name]).is_empty() {
                causes.forbidden(&path.field("volumeMounts").index(index).field(name), forbidden);
            }
        }
    }
}

fn ports(causes: &mut Causes, path: &Path, ports: &Value) {
    let mut names = HashSet::new();
    for (index, port) in items(ports) {
        let here = path.index(index);
        let name = text(&port["name"]);
        if !name.is_empty() {
            causes.format(&here.field("name"), name, format::port_name(name));
            if !names.insert(name) {
                causes.duplicate(&here.field("name"), &port["name"]);
            }
        }
        match port["containerPort"].as_i64().unwrap_or(0) {
            0 => causes.required(&here.field("containerPort"), ""),
            _ => causes.in_range(&here.field("containerPort"), &port["containerPort"], 1..=65_535),
        }
        if port["hostPort"].as_i64().unwrap_or(0) != 0 {
            causes.in_range(&here.field("hostPort"), &port["hostPort"], 1..=65_535);
        }
        causes.one_of(&here.field("protocol"), &port["protocol"], PROTOCOLS);
    }
}

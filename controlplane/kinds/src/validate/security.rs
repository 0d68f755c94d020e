//! Security contexts of pods and containers.

use std::collections::HashSet;

use serde_json::Value;

use super::{Causes, Path, items, text};

/// Largest valid user id and group id.
const MAX_ID: i64 = i32::MAX as i64;

/// Checks the security context of a pod.
pub(super) fn pod(causes: &mut Causes, path: &Path, context: &Value) {
    for name in ["runAsUser", "runAsGroup", "fsGroup"] {
        causes.in_range(&path.field(name), &context[name], 0..=MAX_ID);
    }
    for (index, group) in items(&context["supplementalGroups"]) {
        causes.in_range(&path.field("supplementalGroups").index(index), group, 0..=MAX_ID);
    }
    profile(causes, path, context, "seccompProfile");
    profile(causes, path, context, "appArmorProfile");
    let policies = &["Always", "OnRootMismatch"];
    causes.optional_word(&path.field("fsGroupChangePolicy"), &context["fsGroupChangePolicy"], policies);
    let mut names = HashSet::new();
    for (index, sysctl) in items(&context["sysctls"]) {
        let here = path.field("sysctls").index(index).field("name");
        let name = text(&sysctl["name"]);
        if name.is_empty() {
            causes.required(&here, "");
        } else if !is_sysctl(name) {
            let detail = "must have at most 253 characters and match regex ^([a-z0-9]([-_a-z0-9]*[a-z0-9])?[\\./])*[a-z0-9]([-_a-z0-9]*[a-z0-9])?$";
            causes.invalid(&here, &sysctl["name"], detail);
        } else if !names.insert(name) {
            causes.duplicate(&here, &sysctl["name"]);
        }
    }
}

/// Checks the namespaces of the node that a pod uses: none of them together with an own user namespace, and not the pid
/// namespace together with a shared one.
pub(super) fn namespaces(causes: &mut Causes, path: &Path, spec: &Value) {
    if spec["hostPID"] == true && spec["shareProcessNamespace"] == true {
        let here = path.field("securityContext").field("shareProcessNamespace");
        causes.invalid(&here, &true.into(), "ShareProcessNamespace and HostPID cannot both be enabled");
    }
    if spec["hostUsers"] != false {
        return;
    }
    for name in ["hostNetwork", "hostPID", "hostIPC"] {
        if spec[name] == true {
            causes.forbidden(&path.field(name), "when `hostUsers` is false");
        }
    }
}

/// Checks the security context of a container in a pod with this spec.
pub(super) fn container(causes: &mut Causes, path: &Path, container: &Value, spec: &Value) {
    let context = &container["securityContext"];
    for name in ["runAsUser", "runAsGroup"] {
        causes.in_range(&path.field(name), &context[name], 0..=MAX_ID);
    }
    profile(causes, path, context, "seccompProfile");
    profile(causes, path, context, "appArmorProfile");
    let mount = &context["procMount"];
    if !mount.is_null() && !matches!(text(mount), "Default" | "Unmasked") {
        causes.unsupported(&path.field("procMount"), mount, &["Default", "Unmasked"]);
    }
    if mount == "Unmasked" && spec["hostUsers"] != false {
        let detail = "`hostUsers` must be false to use `Unmasked`";
        causes.invalid(&path.field("procMount"), mount, detail);
    }
    if context["allowPrivilegeEscalation"] == false {
        if context["privileged"] == true {
            let detail = "cannot set `allowPrivilegeEscalation` to false and `privileged` to true";
            causes.invalid(path, context, detail);
        }
        if items(&context["capabilities"]["add"]).any(|(_, name)| name == "CAP_SYS_ADMIN") {
            let detail =
                "cannot set `allowPrivilegeEscalation` to false and `capabilities.Add` CAP_SYS_ADMIN";
            causes.invalid(path, context, detail);
        }
    }
}

fn profile(causes: &mut Causes, path: &Path, context: &Value, name: &str) {
    let (path, profile) = (path.field(name), &context[name]);
    if profile.is_null() {
        return;
    }
    if text(&profile["type"]).is_empty() {
        causes.required(&path.field("type"), &format!("type is required when {name} is set"));
    } else {
        causes.one_of(&path.field("type"), &profile["type"], &["Localhost", "RuntimeDefault", "Unconfined"]);
    }
    let (here, local) = (path.field("localhostProfile"), &profile["localhostProfile"]);
    match (profile["type"] == "Localhost", local.is_null()) {
        (true, true) => causes.required(&here, "must be set when type is Localhost"),
        (false, false) => causes.invalid(&here, local, "can only be set when type is Localhost"),
        (true, false) => super::file_path::relative(causes, &here, text(local)),
        (false, true) => {}
    }
}

fn is_sysctl(name: &str) -> bool {
    let good = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let part = |part: &str| {
        part.bytes().next().is_some_and(good)
            && part.bytes().next_back().is_some_and(good)
            && part.bytes().all(|byte| good(byte) || b"-_".contains(&byte))
    };
    name.len() <= 253 && name.split(['.', '/']).all(part)
}

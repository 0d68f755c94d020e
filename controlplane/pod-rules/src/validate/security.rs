//! Security contexts of pods and containers.

use std::collections::HashSet;

use serde_json::Value;

use super::file_path::relative;
use super::{Causes, Path, items, text, windows};

/// Largest valid user id and group id.
const MAX_ID: i64 = i32::MAX as i64;
/// Maximum length of the name of an AppArmor profile in bytes.
const MAX_PROFILE: usize = 4095;

/// Checks the security context of a pod.
pub(super) fn pod(causes: &mut Causes, path: &Path, context: &Value) {
    for name in ["runAsUser", "runAsGroup", "fsGroup"] {
        causes.in_range(&path.field(name), &context[name], 0..=MAX_ID);
    }
    for (index, group) in items(&context["supplementalGroups"]) {
        causes.in_range(&path.field("supplementalGroups").index(index), group, 0..=MAX_ID);
    }
    profiles(causes, path, context);
    for (field, known) in [
        ("fsGroupChangePolicy", &["Always", "OnRootMismatch"][..]),
        ("supplementalGroupsPolicy", &["Merge", "Strict"][..]),
        // Another value needs the gate `SELinuxMount`, which is off by default.
        ("seLinuxChangePolicy", &["Recursive"][..]),
    ] {
        causes.optional_word(&path.field(field), &context[field], known);
    }
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

/// Checks the namespaces of the node that a pod uses. Such a pod cannot have its own user namespace, and cannot set
/// sysctls that belong to a shared namespace. `hostPID` excludes `shareProcessNamespace`.
pub(super) fn namespaces(causes: &mut Causes, path: &Path, spec: &Value) {
    if spec["hostPID"] == true && spec["shareProcessNamespace"] == true {
        let here = path.field("securityContext").field("shareProcessNamespace");
        causes.invalid(&here, &true.into(), "ShareProcessNamespace and HostPID cannot both be enabled");
    }
    for (index, sysctl) in items(&spec["securityContext"]["sysctls"]) {
        let name = text(&sysctl["name"]);
        if let Some(field) = node_namespace(name).filter(|field| spec[*field] == true) {
            let here = path.field("securityContext").field("sysctls").index(index).field("name");
            causes.invalid(&here, &name.into(), &format!("may not be specified when '{field}' is true"));
        }
    }
    if spec["hostUsers"] != false {
        return;
    }
    // The second name is the name in the path of upstream's error.
    for (name, shown) in [("hostNetwork", "hostNetwork"), ("hostPID", "HostPID"), ("hostIPC", "HostIPC")] {
        if spec[name] == true {
            causes.forbidden(&path.field(shown), "when `hostUsers` is false");
        }
    }
    for list in ["initContainers", "containers", "ephemeralContainers"] {
        for (index, container) in items(&spec[list]) {
            if items(&container["volumeDevices"]).next().is_some() {
                let here = path.field(list).index(index).field("volumeDevices");
                causes.forbidden(&here, "when `hostUsers` is false");
            }
        }
    }
}

/// The spec field that makes the pod share the node's namespace of a sysctl. With this field, the sysctl would apply to
/// the node. `None` for sysctls of other namespaces.
fn node_namespace(sysctl: &str) -> Option<&'static str> {
    const IPC: [&str; 10] = [
        "kernel.sem",
        "kernel.shmall",
        "kernel.shmmax",
        "kernel.shmmni",
        "kernel.shm_rmid_forced",
        "kernel.shm",
        "kernel.msgmax",
        "kernel.msgmnb",
        "kernel.msgmni",
        "kernel.msg",
    ];
    // The first separator, a dot or a slash, decides the form of the whole name.
    let with_dots = match sysctl.find(['.', '/']).map(|at| &sysctl[at..=at]) {
        Some("/") => sysctl.replace('/', "."),
        _ => sysctl.to_owned(),
    };
    let name = with_dots.split('*').next().unwrap_or_default();
    if name.starts_with("net.") {
        Some("hostNetwork")
    } else if name.starts_with("fs.mqueue.") || IPC.contains(&name) {
        Some("hostIPC")
    } else {
        None
    }
}

/// Checks the security context of a container in a pod with this spec.
pub(super) fn container(causes: &mut Causes, path: &Path, container: &Value, spec: &Value) {
    let context = &container["securityContext"];
    for name in ["runAsUser", "runAsGroup"] {
        causes.in_range(&path.field(name), &context[name], 0..=MAX_ID);
    }
    profiles(causes, path, context);
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

/// Checks the profiles and the Windows options of a security context.
fn profiles(causes: &mut Causes, path: &Path, context: &Value) {
    seccomp(causes, &path.field("seccompProfile"), &context["seccompProfile"]);
    apparmor(causes, &path.field("appArmorProfile"), &context["appArmorProfile"]);
    windows::options(causes, path, context);
}

fn seccomp(causes: &mut Causes, path: &Path, profile: &Value) {
    if profile.is_null() {
        return;
    }
    profile_type(causes, path, &profile["type"], "seccompProfile");
    let (here, file) = (path.field("localhostProfile"), &profile["localhostProfile"]);
    match (profile["type"] == "Localhost", file.is_null()) {
        (true, true) => causes.required(&here, "must be set when seccomp type is Localhost"),
        (false, false) => causes.invalid(&here, profile, "can only be set when seccomp type is Localhost"),
        (true, false) => relative(causes, &here, text(file)),
        (false, true) => {}
    }
}

/// Checks an AppArmor profile. Its name is not a path, so a leading slash is valid.
fn apparmor(causes: &mut Causes, path: &Path, profile: &Value) {
    if profile.is_null() {
        return;
    }
    let (here, name) = (path.field("localhostProfile"), &profile["localhostProfile"]);
    match text(&profile["type"]) {
        "Localhost" => {
            let (name, must) = (text(name), "must be set when AppArmor type is Localhost");
            if name.trim() != name {
                causes.invalid(&here, &name.into(), "must not be padded with whitespace");
            } else if name.is_empty() {
                causes.required(&here, must);
            }
            if name.len() > MAX_PROFILE {
                causes.too_long(&here, MAX_PROFILE);
            }
        }
        "RuntimeDefault" | "Unconfined" if !name.is_null() => {
            causes.invalid(&here, name, "can only be set when AppArmor type is Localhost");
        }
        _ => profile_type(causes, path, &profile["type"], "appArmorProfile"),
    }
}

fn profile_type(causes: &mut Causes, path: &Path, kind: &Value, field: &str) {
    let here = path.field("type");
    match text(kind) {
        "" => causes.required(&here, &format!("type is required when {field} is set")),
        _ => causes.optional_word(&here, kind, &["Localhost", "RuntimeDefault", "Unconfined"]),
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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::tests::found;
    use super::*;

    #[test]
    fn the_name_of_an_apparmor_profile_may_be_a_path() {
        let of = |profile: Value| found(|causes| apparmor(causes, &Path::root("p"), &profile));
        let local = |name: &str| json!({"type": "Localhost", "localhostProfile": name});
        for name in ["/usr/bin/x", "a/../b", "k8s-nginx"] {
            assert!(of(local(name)).is_empty(), "{name}");
        }
        for (profile, expect) in [
            (local(" a"), "p.localhostProfile: Invalid value: \" a\": must not be padded with whitespace"),
            (local(""), "p.localhostProfile: Required value: must be set when AppArmor type is Localhost"),
            (json!({"type": "Localhost"}), "p.localhostProfile: Required value"),
            (local(&"a".repeat(4096)), "p.localhostProfile: Too long: may not be more than 4095 bytes"),
            (json!({}), "p.type: Required value: type is required when appArmorProfile is set"),
            (json!({"type": "x"}), "p.type: Unsupported value: \"x\""),
            (
                json!({"type": "Unconfined", "localhostProfile": "a"}),
                "p.localhostProfile: Invalid value: \"a\": can only be set when AppArmor type is Localhost",
            ),
        ] {
            let causes = of(profile);
            assert!(causes.len() == 1 && causes[0].starts_with(expect), "{expect}: {causes:?}");
        }
    }

    #[test]
    fn a_seccomp_profile_is_a_file() {
        let of = |profile: Value| found(|causes| seccomp(causes, &Path::root("p"), &profile));
        assert!(of(json!({"type": "Localhost", "localhostProfile": "a/b"})).is_empty());
        assert_eq!(
            of(json!({"type": "Localhost"})),
            ["p.localhostProfile: Required value: must be set when seccomp type is Localhost"]
        );
        assert_eq!(of(json!({"type": "Localhost", "localhostProfile": "/a"})).len(), 1);
    }

    #[test]
    fn parameters_of_the_kernel_belong_to_the_pod() {
        let of = |name: &str, field: &str| {
            let spec = json!({"securityContext": {"sysctls": [{"name": name}]}, (field): true});
            found(|causes| namespaces(causes, &Path::root("s"), &spec))
        };
        for (name, field) in [
            ("net.ipv4.ip_forward", "hostNetwork"),
            ("net/ipv4/conf/eth0.1/rp_filter", "hostNetwork"),
            ("kernel.shm_rmid_forced", "hostIPC"),
            ("fs.mqueue.msg_max", "hostIPC"),
        ] {
            let expect = format!(
                "s.securityContext.sysctls[0].name: Invalid value: \"{name}\": may not be specified when '{field}' is true"
            );
            assert_eq!(of(name, field), [expect]);
            assert!(of(name, "hostPID").is_empty());
        }
        assert!(of("vm.swappiness", "hostIPC").is_empty());
    }

    #[test]
    fn a_user_namespace_has_no_block_devices() {
        let containers = json!([{"volumeDevices": [{"name": "a"}]}]);
        let spec = json!({"hostUsers": false, "containers": containers});
        let causes = found(|causes| namespaces(causes, &Path::root("s"), &spec));
        assert_eq!(causes, ["s.containers[0].volumeDevices: Forbidden: when `hostUsers` is false"]);
    }

    #[test]
    fn policies_of_the_security_context_are_words() {
        let of = |context: Value| found(|causes| pod(causes, &Path::root("s"), &context));
        assert!(
            of(json!({"supplementalGroupsPolicy": "Strict", "seLinuxChangePolicy": "Recursive"})).is_empty()
        );
        assert_eq!(of(json!({"seLinuxChangePolicy": "MountOption"})).len(), 1);
        for field in ["supplementalGroupsPolicy", "seLinuxChangePolicy", "fsGroupChangePolicy"] {
            let causes = of(json!({(field): "x"}));
            assert!(
                causes.len() == 1 && causes[0].starts_with(&format!("s.{field}: Unsupported value: \"x\"")),
                "{causes:?}"
            );
        }
    }
}

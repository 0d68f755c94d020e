//! Checks of AppArmor, SELinux and seccomp.

use serde_json::Value;

use super::{Pod, SortedTexts, Violation, listed, name, plural, quoted, setters, violation};

const APP_ARMOR_CONTAINER: &str = "container.apparmor.security.beta.kubernetes.io/";
const SECCOMP_POD: &str = "seccomp.security.alpha.kubernetes.io/pod";
const SECCOMP_CONTAINER: &str = "container.seccomp.security.alpha.kubernetes.io/";

/// The type of a profile, if it is neither the runtime's default nor a local file. The pod and each container have this
/// field.
fn wrong_type(object: &Value, field: &str) -> Option<String> {
    let profile = &object["securityContext"][field];
    let wrong =
        profile.is_object() && !matches!(profile["type"].as_str(), Some("RuntimeDefault" | "Localhost"));
    wrong.then(|| profile["type"].as_str().unwrap_or_default().to_owned())
}

/// Profiles of a wrong type.
struct WrongTypes {
    /// Whether the pod has a profile of a wrong type.
    of_pod: bool,
    /// Names of the containers that have a profile of a wrong type.
    containers: Vec<String>,
    types: SortedTexts,
}

fn wrong_types(pod: &Pod<'_>, field: &str) -> WrongTypes {
    let mut types = SortedTexts::new();
    let mut note = |object: &Value| {
        let found = wrong_type(object, field);
        types.extend(found.clone());
        found.is_some()
    };
    let of_pod = note(pod.spec);
    let containers = pod.named(note);
    WrongTypes { of_pod, containers, types }
}

pub(super) fn app_armor(pod: &Pod<'_>) -> Option<Violation> {
    let WrongTypes { of_pod, containers, types } = wrong_types(pod, "appArmorProfile");
    let mut who = setters(of_pod, &containers);
    let mut values: Vec<String> = types.into_iter().collect();
    let annotations = pod.annotations.as_object().into_iter().flatten();
    let wrong = annotations.filter_map(|(key, value)| {
        let value = value.as_str().unwrap_or_default();
        let good = value.is_empty() || value == "runtime/default" || value.starts_with("localhost/");
        (key.starts_with(APP_ARMOR_CONTAINER) && !good).then(|| format!("{key}={value:?}"))
    });
    let wrong: SortedTexts = wrong.collect();
    if !wrong.is_empty() {
        if !who.is_empty() {
            who.push_str(" and ");
        }
        who.push_str(plural(wrong.len(), "annotation", "annotations"));
        values.extend(wrong);
    }
    if who.is_empty() {
        return None;
    }
    let reason = plural(values.len(), "forbidden AppArmor profile", "forbidden AppArmor profiles");
    violation(reason, format!("{who} must not set AppArmor profile type to {}", quoted(&values)))
}

pub(super) fn se_linux(pod: &Pod<'_>) -> Option<Violation> {
    se_linux_of(pod, &["", "container_t", "container_init_t", "container_kvm_t"])
}

pub(super) fn se_linux_1_31(pod: &Pod<'_>) -> Option<Violation> {
    se_linux_of(pod, &["", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"])
}

fn se_linux_of(pod: &Pod<'_>, allowed: &[&str]) -> Option<Violation> {
    let (mut types, mut user, mut role) = (SortedTexts::new(), false, false);
    let mut note = |object: &Value| {
        let options = &object["securityContext"]["seLinuxOptions"];
        let text = |field: &str| options[field].as_str().unwrap_or_default();
        let wrong_type = !allowed.contains(&text("type"));
        if wrong_type {
            types.insert(text("type").to_owned());
        }
        let (has_user, has_role) = (!text("user").is_empty(), !text("role").is_empty());
        user |= has_user;
        role |= has_role;
        wrong_type || has_user || has_role
    };
    let of_pod = note(pod.spec);
    let who = setters(of_pod, &pod.named(note));
    if who.is_empty() {
        return None;
    }
    let mut wrong = Vec::new();
    if !types.is_empty() {
        wrong.push(format!("{} {}", plural(types.len(), "type", "types"), quoted(&types)));
    }
    if user {
        wrong.push("user may not be set".to_owned());
    }
    if role {
        wrong.push("role may not be set".to_owned());
    }
    let detail = format!("{who} set forbidden securityContext.seLinuxOptions: {}", wrong.join("; "));
    violation("seLinuxOptions", detail)
}

/// The check of the policy versions before 1.19, which read seccomp profiles from annotations.
pub(super) fn seccomp_annotations(pod: &Pod<'_>) -> Option<Violation> {
    let keys = pod.containers().map(|container| format!("{SECCOMP_CONTAINER}{}", name(container)));
    let wrong = std::iter::once(SECCOMP_POD.to_owned()).chain(keys).filter_map(|key| {
        let value = pod.annotations[&key].as_str()?;
        let good = matches!(value, "runtime/default" | "docker/default") || value.starts_with("localhost/");
        (!good).then(|| format!("{key}={value:?}"))
    });
    let wrong: SortedTexts = wrong.collect();
    if wrong.is_empty() {
        return None;
    }
    let list = wrong.iter().map(String::as_str).collect::<Vec<_>>().join(", ");
    violation(
        "seccompProfile",
        format!("forbidden {} {list}", plural(wrong.len(), "annotation", "annotations")),
    )
}

pub(super) fn seccomp(pod: &Pod<'_>) -> Option<Violation> {
    let WrongTypes { of_pod, containers, types } = wrong_types(pod, "seccompProfile");
    let who = setters(of_pod, &containers);
    if who.is_empty() {
        return None;
    }
    let detail = format!("{who} must not set securityContext.seccompProfile.type to {}", quoted(&types));
    violation("seccompProfile", detail)
}

pub(super) fn seccomp_required(pod: &Pod<'_>) -> Option<Violation> {
    if let Some(explicit) = seccomp(pod) {
        return Some(explicit);
    }
    let is_set = |object: &Value| object["securityContext"]["seccompProfile"].is_object();
    let of_pod = is_set(pod.spec);
    let implicit = pod.named(|container| !of_pod && !is_set(container));
    if implicit.is_empty() {
        return None;
    }
    let detail = format!(
        "pod or {} must set securityContext.seccompProfile.type to \"RuntimeDefault\" or \"Localhost\"",
        listed(&implicit)
    );
    violation("seccompProfile", detail)
}

pub(super) fn seccomp_required_1_25(pod: &Pod<'_>) -> Option<Violation> {
    if pod.is_windows() { None } else { seccomp_required(pod) }
}

//! Checks of the restricted level: users, capabilities, privilege escalation.

use serde_json::Value;

use super::{Pod, SortedTexts, Violation, listed, quoted, setters, violation};

pub(super) fn privilege_escalation(pod: &Pod<'_>) -> Option<Violation> {
    let names = pod.named(|container| container["securityContext"]["allowPrivilegeEscalation"] != false);
    if names.is_empty() {
        return None;
    }
    let detail = format!("{} must set securityContext.allowPrivilegeEscalation=false", listed(&names));
    violation("allowPrivilegeEscalation != false", detail)
}

pub(super) fn privilege_escalation_1_25(pod: &Pod<'_>) -> Option<Violation> {
    if pod.is_windows() { None } else { privilege_escalation(pod) }
}

pub(super) fn capabilities(pod: &Pod<'_>) -> Option<Violation> {
    let list = |container: &Value, field: &str| -> Vec<String> {
        let names = container["securityContext"]["capabilities"][field].as_array().into_iter().flatten();
        names.filter_map(Value::as_str).map(str::to_owned).collect()
    };
    let undropped = pod.named(|container| !list(container, "drop").iter().any(|name| name == "ALL"));
    let mut wrong = SortedTexts::new();
    let adding = pod.named(|container| {
        let added = list(container, "add").into_iter().filter(|name| name != "NET_BIND_SERVICE");
        let added: Vec<String> = added.collect();
        wrong.extend(added.iter().cloned());
        !added.is_empty()
    });
    let mut details = Vec::new();
    if !undropped.is_empty() {
        details.push(format!("{} must set securityContext.capabilities.drop=[\"ALL\"]", listed(&undropped)));
    }
    if !adding.is_empty() {
        details.push(format!(
            "{} must not include {} in securityContext.capabilities.add",
            listed(&adding),
            quoted(&wrong)
        ));
    }
    if details.is_empty() { None } else { violation("unrestricted capabilities", details.join("; ")) }
}

pub(super) fn capabilities_1_25(pod: &Pod<'_>) -> Option<Violation> {
    if pod.is_windows() { None } else { capabilities(pod) }
}

pub(super) fn non_root(pod: &Pod<'_>) -> Option<Violation> {
    let reason = "runAsNonRoot != true";
    let field = |object: &Value| object["securityContext"]["runAsNonRoot"].as_bool();
    let of_pod = field(pod.spec);
    let explicit = setters(of_pod == Some(false), &pod.named(|container| field(container) == Some(false)));
    if !explicit.is_empty() {
        return violation(reason, format!("{explicit} must not set securityContext.runAsNonRoot=false"));
    }
    let implicit = pod.named(|container| of_pod != Some(true) && field(container).is_none());
    if implicit.is_empty() {
        return None;
    }
    violation(reason, format!("pod or {} must set securityContext.runAsNonRoot=true", listed(&implicit)))
}

pub(super) fn non_root_1_35(pod: &Pod<'_>) -> Option<Violation> {
    if pod.has_user_namespace() { None } else { non_root(pod) }
}

pub(super) fn user(pod: &Pod<'_>) -> Option<Violation> {
    let is_root = |object: &Value| object["securityContext"]["runAsUser"] == 0;
    let who = setters(is_root(pod.spec), &pod.named(is_root));
    if who.is_empty() { None } else { violation("runAsUser=0", format!("{who} must not set runAsUser=0")) }
}

pub(super) fn user_1_35(pod: &Pod<'_>) -> Option<Violation> {
    if pod.has_user_namespace() { None } else { user(pod) }
}

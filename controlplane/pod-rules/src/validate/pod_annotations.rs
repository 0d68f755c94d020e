//! Annotations of pods and pod templates that Kubernetes interprets. Sources: `ValidatePodSpecificAnnotations`,
//! `ValidatePodSpecificAnnotationUpdates`, `validateSeccompAnnotationsAndFields` and
//! `validateAppArmorAnnotationsAndFieldsMatchOnCreate` of `pkg/apis/core/validation`.

use std::collections::HashSet;

use serde_json::Value;

use super::file_path::relative;
use super::resize::MIRROR;
use super::{Causes, Path, entries, items, scheduling, text};

const TOLERATIONS: &str = "scheduler.alpha.kubernetes.io/tolerations";
const DELETION_COST: &str = "controller.kubernetes.io/pod-deletion-cost";
const SECCOMP_POD: &str = "seccomp.security.alpha.kubernetes.io/pod";
/// Prefixes of annotations that end with the name of a container.
const SECCOMP: &str = "container.seccomp.security.alpha.kubernetes.io/";
const APPARMOR: &str = "container.apparmor.security.beta.kubernetes.io/";
const LOCALHOST: &str = "localhost/";
const LISTS: [&str; 3] = ["initContainers", "containers", "ephemeralContainers"];

/// Checks the annotations of a pod or a template with this spec.
pub(super) fn specific(causes: &mut Causes, path: &Path, annotations: &Value, spec: &Value) {
    if !annotations.is_object() {
        return;
    }
    let mirror = &annotations[MIRROR];
    if !mirror.is_null() && text(&spec["nodeName"]).is_empty() {
        causes.invalid(&path.key(MIRROR), mirror, "must set spec.nodeName if mirror pod annotation is set");
    }
    tolerations(causes, path, text(&annotations[TOLERATIONS]));
    let cost = &annotations[DELETION_COST];
    if cost.as_str().is_some_and(|cost| !is_cost(cost)) {
        causes.invalid(&path.key(DELETION_COST), cost, "must be a 32bit integer");
    }
    if let Some(profile) = annotations[SECCOMP_POD].as_str() {
        seccomp(causes, &path.field(SECCOMP_POD), profile);
    }
    for (key, value) in entries(annotations).filter(|(key, _)| key.starts_with(SECCOMP)) {
        seccomp(causes, &path.field(key), text(value));
    }
    apparmor(causes, path, annotations, spec);
}

/// Checks an update: the annotations of mirror pods and of AppArmor cannot change.
pub fn update(causes: &mut Causes, new: &Value, old: &Value) {
    let path = Path::root("metadata").field("annotations");
    let (after, before) = (&new["metadata"]["annotations"], &old["metadata"]["annotations"]);
    let is_fixed = |key: &str| key.starts_with(APPARMOR) || key == MIRROR;
    let what = |key: &str| if key == MIRROR { "mirror pod annotation" } else { "AppArmor annotations" };
    for (key, value) in entries(before).filter(|(key, _)| is_fixed(key)) {
        if after.get(key) != Some(value) {
            causes.forbidden(&path.key(key), &format!("may not remove or update {}", what(key)));
        }
    }
    for (key, _) in entries(after).filter(|(key, _)| is_fixed(key)) {
        if before.get(key).is_none() {
            causes.forbidden(&path.key(key), &format!("may not add {}", what(key)));
        }
    }
    specific(causes, &path, after, &new["spec"]);
}

/// Checks that profiles are the same in annotations and in fields. `path` is the path of the spec.
pub(super) fn agree(causes: &mut Causes, path: &Path, annotations: &Value, spec: &Value) {
    if !annotations.is_object() {
        return;
    }
    let whole = &spec["securityContext"];
    if let Some(annotation) = annotations[SECCOMP_POD].as_str() {
        let here = path.field("securityContext").field("seccompProfile");
        same(causes, &here, annotation, &whole["seccompProfile"], "seccomp");
    }
    for list in LISTS {
        for (index, container) in items(&spec[list]) {
            let here = path.field(list).index(index).field("securityContext");
            let (own, name) = (&container["securityContext"], text(&container["name"]));
            if let Some(annotation) = annotations[&*format!("{SECCOMP}{name}")].as_str() {
                let here = here.field("seccompProfile");
                same(causes, &here, annotation, &own["seccompProfile"], "seccomp");
            }
            let of_pod = own["appArmorProfile"].is_null();
            let profile = if of_pod { &whole["appArmorProfile"] } else { &own["appArmorProfile"] };
            if spec["os"]["name"] != "windows"
                && let Some(annotation) = annotations[&*format!("{APPARMOR}{name}")].as_str()
            {
                same(causes, &here.field("appArmorProfile"), annotation, profile, "apparmor");
            }
        }
    }
}

fn tolerations(causes: &mut Causes, path: &Path, annotation: &str) {
    if annotation.is_empty() {
        return;
    }
    match serde_json::from_str::<Value>(annotation) {
        Ok(list @ (Value::Array(_) | Value::Null)) => {
            scheduling::tolerations(causes, &path.field(TOLERATIONS), &list);
        }
        Ok(_) => causes.invalid(path, &TOLERATIONS.into(), "must be a list of tolerations in JSON"),
        Err(error) => causes.invalid(path, &TOLERATIONS.into(), &error.to_string()),
    }
}

/// Whether a text is a number of 32 bits without a plus sign and without leading zeros. As upstream, zeros after a
/// minus sign are allowed.
fn is_cost(cost: &str) -> bool {
    let is_plain =
        cost == "0" || cost.starts_with(|first: char| first == '-' || ('1'..='9').contains(&first));
    is_plain && cost.parse::<i32>().is_ok()
}

fn seccomp(causes: &mut Causes, path: &Path, profile: &str) {
    match profile {
        "runtime/default" | "docker/default" | "unconfined" => {}
        _ => match profile.strip_prefix(LOCALHOST) {
            Some(file) => relative(causes, path, file),
            None => causes.invalid(path, &profile.into(), "must be a valid seccomp profile"),
        },
    }
}

fn apparmor(causes: &mut Causes, path: &Path, annotations: &Value, spec: &Value) {
    let containers = LISTS.iter().flat_map(|list| items(&spec[*list]));
    let names: HashSet<&str> = containers.map(|(_, container)| text(&container["name"])).collect();
    for (key, value) in entries(annotations) {
        let Some(name) = key.strip_prefix(APPARMOR) else { continue };
        let here = path.key(key);
        if !names.contains(name) {
            causes.invalid(&here, &name.into(), "container not found");
        }
        let profile = text(value);
        if !matches!(profile, "" | "runtime/default" | "unconfined") && !profile.starts_with(LOCALHOST) {
            causes.invalid(&here, value, &format!("invalid AppArmor profile name: {value}"));
        }
    }
}

/// Checks that an annotation and a field name the same profile.
fn same(causes: &mut Causes, path: &Path, annotation: &str, profile: &Value, what: &str) {
    let (kind, file) = (text(&profile["type"]), annotation.strip_prefix(LOCALHOST));
    let is_same_type = match kind {
        "Unconfined" => annotation == "unconfined",
        "RuntimeDefault" => {
            annotation == "runtime/default" || (what == "seccomp" && annotation == "docker/default")
        }
        "Localhost" => file.is_some(),
        _ => return,
    };
    if !is_same_type {
        let detail = format!("{what} type in annotation and field must match");
        causes.forbidden(&path.field("type"), &detail);
    } else if kind == "Localhost" && file != profile["localhostProfile"].as_str() {
        let detail = format!("{what} profile in annotation and field must match");
        causes.forbidden(&path.field("localhostProfile"), &detail);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::tests::found;
    use super::*;

    fn said(key: &str, value: &str) -> Vec<String> {
        let spec = json!({"containers": [{"name": "c"}]});
        found(|causes| specific(causes, &Path::root("a"), &json!({key: value}), &spec))
    }

    #[test]
    fn annotations_with_a_meaning_are_checked() {
        for (key, value) in [
            (DELETION_COST, "0"),
            (DELETION_COST, "-5"),
            (SECCOMP_POD, "localhost/a/b"),
            (&*format!("{SECCOMP}c"), "docker/default"),
            (&*format!("{APPARMOR}c"), "localhost/x"),
            (TOLERATIONS, r#"[{"operator": "Exists"}]"#),
            ("other", "x"),
        ] {
            assert!(said(key, value).is_empty(), "{key}: {value}");
        }
        for (key, value, expect) in [
            (
                DELETION_COST,
                "08",
                "a[controller.kubernetes.io/pod-deletion-cost]: Invalid value: \"08\": must be",
            ),
            (DELETION_COST, "+1", "a[controller.kubernetes.io/pod-deletion-cost]: Invalid value: \"+1\""),
            (DELETION_COST, "2147483648", "a[controller.kubernetes.io/pod-deletion-cost]: Invalid value"),
            (
                SECCOMP_POD,
                "x",
                "a.seccomp.security.alpha.kubernetes.io/pod: Invalid value: \"x\": must be a valid",
            ),
            (
                SECCOMP_POD,
                "localhost/../x",
                "a.seccomp.security.alpha.kubernetes.io/pod: Invalid value: \"../x\"",
            ),
            (MIRROR, "x", "a[kubernetes.io/config.mirror]: Invalid value: \"x\": must set spec.nodeName"),
            (TOLERATIONS, "{", "a: Invalid value: \"scheduler.alpha.kubernetes.io/tolerations\""),
            (
                TOLERATIONS,
                r#"[{"key": "a b"}]"#,
                "a.scheduler.alpha.kubernetes.io/tolerations[0].key: Invalid value: \"a b\"",
            ),
            (
                &*format!("{APPARMOR}d"),
                "unconfined",
                "a[container.apparmor.security.beta.kubernetes.io/d]: Invalid",
            ),
            (
                &*format!("{APPARMOR}c"),
                "x",
                "a[container.apparmor.security.beta.kubernetes.io/c]: Invalid value: \"x\": invalid AppArmor profile name: \"x\"",
            ),
        ] {
            let causes = said(key, value);
            assert!(causes.len() == 1 && causes[0].starts_with(expect), "{key}: {causes:?}");
        }
    }

    #[test]
    fn annotations_and_fields_name_the_same_profile() {
        let of = |annotations: Value, context: Value| {
            let spec = json!({"containers": [{"name": "c", "securityContext": context}]});
            found(|causes| agree(causes, &Path::root("spec"), &annotations, &spec))
        };
        let at = "spec.containers[0].securityContext";
        let (seccomp, apparmor) = (format!("{SECCOMP}c"), format!("{APPARMOR}c"));
        let local = json!({"type": "Localhost", "localhostProfile": "p"});
        let context = json!({"seccompProfile": local, "appArmorProfile": local});
        assert!(
            of(json!({(&*seccomp): "localhost/p", (&*apparmor): "localhost/p"}), context.clone()).is_empty()
        );
        assert_eq!(
            of(json!({(&*seccomp): "localhost/q", (&*apparmor): "unconfined"}), context),
            [
                format!(
                    "{at}.seccompProfile.localhostProfile: Forbidden: seccomp profile in annotation and field must match"
                ),
                format!(
                    "{at}.appArmorProfile.type: Forbidden: apparmor type in annotation and field must match"
                ),
            ]
        );
        let default = json!({"seccompProfile": {"type": "RuntimeDefault"}, "appArmorProfile": {"type": "RuntimeDefault"}});
        let docker = json!({(&*seccomp): "docker/default", (&*apparmor): "docker/default"});
        assert_eq!(of(docker, default).len(), 1, "AppArmor has no such word");
    }

    #[test]
    fn some_annotations_stay() {
        let pod = |annotations: Value| {
            let spec = json!({"nodeName": "n", "containers": [{"name": "c"}]});
            json!({"metadata": {"annotations": annotations}, "spec": spec})
        };
        let apparmor = format!("{APPARMOR}c");
        let (plain, mirror) = (pod(json!({"a": "b"})), pod(json!({(MIRROR): "x"})));
        let profile = pod(json!({(&*apparmor): "unconfined"}));
        for (old, new, expect) in [
            (&plain, &mirror, "may not add mirror pod annotation"),
            (&mirror, &plain, "may not remove or update mirror pod annotation"),
            (&plain, &profile, "may not add AppArmor annotations"),
            (&profile, &plain, "may not remove or update AppArmor annotations"),
        ] {
            let causes = found(|causes| update(causes, new, old));
            assert!(causes.len() == 1 && causes[0].ends_with(expect), "{causes:?}");
        }
        for pod in [&plain, &mirror, &profile] {
            assert!(found(|causes| update(causes, pod, pod)).is_empty());
        }
    }
}

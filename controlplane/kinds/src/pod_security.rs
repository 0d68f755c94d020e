//! Pod Security Standards: the policy of a namespace and the checks of a pod, as data and pure functions.
//!
//! Source: `k8s.io/pod-security-admission`, v1.36. [`Policy::of_labels`] reads the namespace, [`evaluate`] checks a
//! pod.

mod checks;
mod level;
mod policy;

use serde_json::Value;

pub use level::{Level, LevelVersion, Version};
pub use policy::{PREFIX, Policy};

/// One failed check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// Short reason, such as `host namespaces`.
    pub reason: &'static str,
    /// The objects and values that violate the policy.
    pub detail: String,
}

/// Checks a pod's metadata and spec at a level and version. An empty list means allowed.
pub fn evaluate(at: LevelVersion, metadata: &Value, spec: &Value) -> Vec<Violation> {
    let pod = checks::Pod { annotations: &metadata["annotations"], spec };
    checks::selected(at).into_iter().filter_map(|check| check(&pod)).collect()
}

/// `privileged (container "a" must not …), hostPort (…)`.
pub fn details(violations: &[Violation]) -> String {
    let one = |violation: &Violation| match violation.detail.as_str() {
        "" => violation.reason.to_owned(),
        detail => format!("{} ({detail})", violation.reason),
    };
    violations.iter().map(one).collect::<Vec<_>>().join(", ")
}

/// The reasons without details, separated by commas.
pub fn reasons(violations: &[Violation]) -> String {
    violations.iter().map(|violation| violation.reason).collect::<Vec<_>>().join(", ")
}

/// The metadata and spec of a workload's pod template. `None` for other kinds and for an absent template.
pub fn template<'a>(group: &str, plural: &str, object: &'a Value) -> Option<(&'a Value, &'a Value)> {
    let template = object.pointer(template_path(group, plural)?).filter(|template| template.is_object())?;
    Some((&template["metadata"], &template["spec"]))
}

/// The path of a workload's pod template. `None` for other kinds.
pub(crate) fn template_path(group: &str, plural: &str) -> Option<&'static str> {
    match (group, plural) {
        ("", "replicationcontrollers")
        | ("apps", "deployments" | "replicasets" | "statefulsets" | "daemonsets")
        | ("batch", "jobs") => Some("/spec/template"),
        ("", "podtemplates") => Some("/template"),
        ("batch", "cronjobs") => Some("/spec/jobTemplate/spec/template"),
        _ => None,
    }
}

/// Whether an update of a pod adds a container or changes an image. Other updates of a pod that violates a newer policy
/// stay allowed. Source: `isSignificantPodUpdate`.
pub fn is_significant_update(new: &Value, old: &Value) -> bool {
    let images = |pod: &Value, list: &str| -> Vec<(Value, Value)> {
        let all = pod["spec"][list].as_array().into_iter().flatten();
        all.map(|container| (container["name"].clone(), container["image"].clone())).collect()
    };
    ["containers", "initContainers", "ephemeralContainers"]
        .iter()
        .any(|list| images(new, list) != images(old, list))
}

#[cfg(test)]
mod tests;

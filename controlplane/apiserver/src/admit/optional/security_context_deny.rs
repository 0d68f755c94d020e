//! Refuses pods that set users, groups or SELinux labels. Pod Security replaces this plugin, which Kubernetes removed
//! in v1.30.
//!
//! Source: `plugin/pkg/admission/securitycontext/scdeny` of v1.29.

use async_trait::async_trait;
use serde_json::Value;

use super::{PodContainer, containers, forbidden, writes_pod};
use crate::{
    admit::{Admission, Admit, Attributes},
    error::Result,
};

pub(in crate::admit) struct SecurityContextDeny;

#[async_trait]
impl Admit for SecurityContextDeny {
    async fn validate(
        &self,
        _admission: &Admission,
        attributes: &Attributes<'_>,
        object: &Value,
    ) -> Result<()> {
        if !writes_pod(attributes) {
            return Ok(());
        }
        match forbidden_field(&object["spec"]) {
            None => Ok(()),
            Some(field) => Err(forbidden(attributes, format!("{field} is forbidden"))),
        }
    }
}

/// The first forbidden field that is set.
fn forbidden_field(spec: &Value) -> Option<String> {
    let pod = &spec["securityContext"];
    let of_pod = ["supplementalGroups", "seLinuxOptions", "runAsUser", "fsGroup"];
    if let Some(field) = of_pod.into_iter().find(|field| !pod[*field].is_null()) {
        return Some(format!("pod.Spec.SecurityContext.{field}"));
    }
    containers(spec).find_map(|PodContainer { value: container, .. }| {
        let context = &container["securityContext"];
        let field = ["seLinuxOptions", "runAsUser"].into_iter().find(|field| !context[*field].is_null())?;
        Some(format!("SecurityContext.{field}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn users_and_labels_are_found_in_pods_and_containers() {
        assert_eq!(
            forbidden_field(&json!({"containers": [{"securityContext": {"privileged": true}}]})),
            None
        );
        let pod = forbidden_field(&json!({"securityContext": {"fsGroup": 0}}));
        assert_eq!(pod.unwrap(), "pod.Spec.SecurityContext.fsGroup");
        let container = forbidden_field(&json!({"initContainers": [{"securityContext": {"runAsUser": 0}}]}));
        assert_eq!(container.unwrap(), "SecurityContext.runAsUser");
    }
}

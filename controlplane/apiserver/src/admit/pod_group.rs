//! Groups of pods: the protection of groups in use, and the check of the workload that a group names.
//!
//! Upstream's plugins PodGroupProtection and PodGroupWorkloadExists.

use async_trait::async_trait;
use coracle_kinds::kind::by_resource;
use serde_json::Value;

use super::storage::protect;
use super::{Admission, Admit, Attributes, Operation};
use crate::error::{ApiError, Result};

const GROUP: &str = "scheduling.k8s.io";
/// The controller `podgroup-protection-controller` removes it.
const FINALIZER: &str = "scheduling.k8s.io/podgroup-protection";

pub(super) struct PodGroupProtection;
pub(super) struct PodGroupWorkloadExists;

fn creates_group(attributes: &Attributes<'_>) -> bool {
    attributes.operation == Operation::Create
        && attributes.subresource.is_empty()
        && attributes.kind.is(GROUP, "PodGroup")
}

#[async_trait]
impl Admit for PodGroupProtection {
    async fn mutate(
        &self,
        _admission: &Admission,
        attributes: &Attributes<'_>,
        object: &mut Value,
    ) -> Result<()> {
        if creates_group(attributes)
            && let Some(metadata) = object.get_mut("metadata").and_then(Value::as_object_mut)
        {
            protect(metadata, FINALIZER);
        }
        Ok(())
    }
}

#[async_trait]
impl Admit for PodGroupWorkloadExists {
    async fn validate(
        &self,
        admission: &Admission,
        attributes: &Attributes<'_>,
        object: &Value,
    ) -> Result<()> {
        let reference = &object["spec"]["podGroupTemplateRef"]["workload"];
        if !creates_group(attributes) || reference.is_null() {
            return Ok(());
        }
        let text = |field: &str| reference[field].as_str().unwrap_or_default();
        let (name, template) = (text("workloadName"), text("podGroupTemplateName"));
        let kind = by_resource(GROUP, "v1alpha2", "workloads").ok_or_else(ApiError::no_resource)?;
        let found = admission.cache.get(kind, attributes.namespace, name);
        let problem = problem(found.map(|workload| workload.value()).as_ref(), name, template);
        let Some(problem) = problem else { return Ok(()) };
        Err(ApiError::forbidden_object(attributes.kind, attributes.name, &problem))
    }
}

/// Why a group cannot be made from a template of a workload.
fn problem(workload: Option<&Value>, name: &str, template: &str) -> Option<String> {
    let Some(workload) = workload else {
        return Some(format!("PodGroup rejected: Workload \"{name}\" not found"));
    };
    if !workload["metadata"]["deletionTimestamp"].is_null() {
        return Some(format!("PodGroup rejected: Workload \"{name}\" is being deleted"));
    }
    let mut templates = workload["spec"]["podGroupTemplates"].as_array().into_iter().flatten();
    let is_known = templates.any(|known| known["name"] == template);
    (!is_known).then(|| {
        format!("PodGroup rejected: PodGroupTemplate \"{template}\" not found in Workload \"{name}\"")
    })
}

//! Rules for PodGroups: groups in use cannot be deleted, and the Workload of a group must exist. The parallelism of a
//! Job cannot change while the Job has a gang-scheduled group.
//!
//! As upstream, these plugins run by default. They do nothing while the kinds of `scheduling.k8s.io` are not served,
//! although the cache then still contains objects that were created before.
//!
//! Source: `plugin/pkg/admission/podgroup`, `plugin/pkg/admission/job`.

use async_trait::async_trait;
use coracle_kinds::kind::by_resource;
use serde_json::Value;

use super::storage::protect;
use super::{Admission, Admit, Attributes, Operation};
use crate::error::{ApiError, Result};

const GROUP: &str = "scheduling.k8s.io";
const VERSION: &str = "v1alpha2";

/// Finalizer that `podgroup-protection-controller` removes.
const FINALIZER: &str = "scheduling.k8s.io/podgroup-protection";

/// The plugin PodGroupProtection.
pub(super) struct Protection;

/// The plugin PodGroupWorkloadExists.
pub(super) struct WorkloadExists;

/// The plugin JobValidation.
pub(super) struct JobValidation;

#[async_trait]
impl Admit for Protection {
    async fn mutate(
        &self,
        _admission: &Admission,
        attributes: &Attributes<'_>,
        object: &mut Value,
    ) -> Result<()> {
        if is_new_group(attributes)
            && let Some(metadata) = object.get_mut("metadata").and_then(Value::as_object_mut)
        {
            protect(metadata, FINALIZER);
        }
        Ok(())
    }
}

#[async_trait]
impl Admit for WorkloadExists {
    async fn validate(
        &self,
        admission: &Admission,
        attributes: &Attributes<'_>,
        object: &Value,
    ) -> Result<()> {
        let wanted = &object["spec"]["podGroupTemplateRef"]["workload"];
        if !is_new_group(attributes) || !wanted.is_object() {
            return Ok(());
        }
        let Some(kind) = by_resource(GROUP, VERSION, "workloads") else { return Ok(()) };
        let name = wanted["workloadName"].as_str().unwrap_or_default();
        let workload = admission.cache.get(kind, attributes.namespace, name).map(|workload| workload.value());
        missing(workload.as_ref(), wanted).map_or(Ok(()), |why| {
            Err(ApiError::forbidden_object(
                attributes.kind,
                attributes.name,
                format!("PodGroup rejected: {why}"),
            ))
        })
    }
}

#[async_trait]
impl Admit for JobValidation {
    async fn validate(
        &self,
        admission: &Admission,
        attributes: &Attributes<'_>,
        object: &Value,
    ) -> Result<()> {
        let is_job = attributes.kind.is("batch", "Job") && attributes.subresource.is_empty();
        let old = attributes.old.filter(|_| is_job && attributes.operation == Operation::Update);
        let Some(old) = old.filter(|old| old["spec"]["parallelism"] != object["spec"]["parallelism"]) else {
            return Ok(());
        };
        if !admission.registry.load().serves_pod_groups() {
            return Ok(());
        }
        let Some(kind) = by_resource(GROUP, VERSION, "podgroups") else { return Ok(()) };
        let reference = &old["spec"]["template"]["spec"]["schedulingGroup"]["podGroupName"];
        let groups = match reference.as_str() {
            Some(name) => admission.cache.get(kind, attributes.namespace, name).into_iter().collect(),
            None => admission.cache.list(kind, attributes.namespace),
        };
        let mut parts =
            groups.iter().map(|group| group.part(&[&["metadata"], &["spec", "schedulingPolicy"]]));
        let is_own = |group: &Value| reference.is_string() || is_controlled_by(group, old);
        let Some(group) = parts.find(|group| is_own(group) && is_gang(group)) else { return Ok(()) };
        let name = group["metadata"]["name"].as_str().unwrap_or_default();
        let why = format!("cannot change parallelism for a Job referencing gang-scheduled PodGroup {name:?}");
        Err(ApiError::forbidden_object(attributes.kind, attributes.name, why))
    }
}

/// Whether the request creates a PodGroup. While PodGroups are not served, a custom resource may have the same name.
fn is_new_group(attributes: &Attributes<'_>) -> bool {
    attributes.operation == Operation::Create
        && attributes.subresource.is_empty()
        && attributes.kind.is(GROUP, "PodGroup")
        && attributes.kind.is_built_in()
}

/// The reason why a PodGroup cannot refer to a Workload.
fn missing(workload: Option<&Value>, wanted: &Value) -> Option<String> {
    let text = |field: &str| wanted[field].as_str().unwrap_or_default();
    let (name, template) = (text("workloadName"), text("podGroupTemplateName"));
    let Some(workload) = workload else { return Some(format!("Workload {name:?} not found")) };
    if !workload["metadata"]["deletionTimestamp"].is_null() {
        return Some(format!("Workload {name:?} is being deleted"));
    }
    let templates = workload["spec"]["podGroupTemplates"].as_array();
    let has_template = templates.into_iter().flatten().any(|one| one["name"] == template);
    (!has_template).then(|| format!("PodGroupTemplate {template:?} not found in Workload {name:?}"))
}

fn is_controlled_by(group: &Value, job: &Value) -> bool {
    let owners = group["metadata"]["ownerReferences"].as_array();
    let uid = &job["metadata"]["uid"];
    owners.into_iter().flatten().any(|owner| owner["controller"] == true && owner["uid"] == *uid)
}

fn is_gang(group: &Value) -> bool {
    group["spec"]["schedulingPolicy"]["gang"].is_object()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_group_comes_from_a_template_of_an_existing_workload() {
        let wanted = json!({"workloadName": "w", "podGroupTemplateName": "t"});
        let mut workload = json!({"metadata": {}, "spec": {"podGroupTemplates": [{"name": "t"}]}});
        assert_eq!(missing(Some(&workload), &wanted), None);
        assert_eq!(missing(None, &wanted).unwrap(), "Workload \"w\" not found");
        workload["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z".into();
        assert_eq!(missing(Some(&workload), &wanted).unwrap(), "Workload \"w\" is being deleted");
        let other = json!({"spec": {"podGroupTemplates": [{"name": "u"}]}});
        let why = "PodGroupTemplate \"t\" not found in Workload \"w\"";
        assert_eq!(missing(Some(&other), &wanted).unwrap(), why);
    }

    #[test]
    fn a_gang_is_recognized_by_its_policy_and_its_owner() {
        let owner = |controller: bool| json!([{"uid": "1", "controller": controller}]);
        let group = |controller: bool| json!({"metadata": {"ownerReferences": owner(controller)}});
        let job = json!({"metadata": {"uid": "1"}});
        assert!(is_controlled_by(&group(true), &job) && !is_controlled_by(&group(false), &job));
        assert!(is_gang(&json!({"spec": {"schedulingPolicy": {"gang": {"minCount": 1}}}})));
        assert!(!is_gang(&json!({"spec": {"schedulingPolicy": {"basic": {}}}})));
    }
}

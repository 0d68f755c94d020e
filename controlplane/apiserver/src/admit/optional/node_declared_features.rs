//! Refuses updates of pods that need a feature that the node does not declare in `status.declaredFeatures`.
//!
//! Source: `plugin/pkg/admission/nodedeclaredfeatures`, `k8s.io/component-helpers/nodedeclaredfeatures`.

use async_trait::async_trait;
use coracle_kinds::kind::by_resource;
use serde_json::Value;

use super::forbidden;
use crate::{
    admit::{Admission, Admit, Attributes, Operation},
    error::{ApiError, Result},
};

/// Feature for changes of pod-level resources.
const POD_LEVEL: &str = "InPlacePodLevelResourcesVerticalScaling";
/// Feature for changes of the resources of init containers that terminate.
const INIT_CONTAINERS: &str = "InPlacePodVerticalScalingInitContainers";

pub(in crate::admit) struct NodeDeclaredFeatures;

#[async_trait]
impl Admit for NodeDeclaredFeatures {
    async fn validate(
        &self,
        admission: &Admission,
        attributes: &Attributes<'_>,
        object: &Value,
    ) -> Result<()> {
        let name = object["spec"]["nodeName"].as_str().unwrap_or_default();
        let is_update = attributes.is(Operation::Update, "Pod") || attributes.is_resize();
        let (Some(old), true) = (attributes.old, is_update && !name.is_empty()) else { return Ok(()) };
        let needed = needed(&old["spec"], &object["spec"]);
        if needed.is_empty() {
            return Ok(());
        }
        let kind = by_resource("", "v1", "nodes").ok_or_else(ApiError::no_resource)?;
        let node = admission.cache.get(kind, "", name);
        let node = node.ok_or_else(|| forbidden(attributes, format!("node {name:?} not found")))?;
        let node = node.part(&[&["status", "declaredFeatures"]]);
        let missing = missing(&needed, &node["status"]["declaredFeatures"]);
        if missing.is_empty() {
            return Ok(());
        }
        let missing = missing.join(", ");
        let why = format!("pod update requires features {missing} which are not available on node {name:?}");
        Err(forbidden(attributes, why))
    }
}

/// The features that a change of a pod's spec needs, sorted. Other features of v1.36 concern immutable fields.
fn needed(old: &Value, new: &Value) -> Vec<&'static str> {
    let mut needed = Vec::new();
    if old["resources"] != new["resources"] {
        needed.push(POD_LEVEL);
    }
    let list = |spec: &Value| spec["initContainers"].as_array().cloned().unwrap_or_default();
    let is_changed =
        |(old, new): (Value, Value)| old["restartPolicy"] != "Always" && old["resources"] != new["resources"];
    if list(old).into_iter().zip(list(new)).any(is_changed) {
        needed.push(INIT_CONTAINERS);
    }
    needed
}

fn missing(needed: &[&'static str], declared: &Value) -> Vec<&'static str> {
    let has = |feature: &str| declared.as_array().into_iter().flatten().any(|declared| declared == feature);
    needed.iter().copied().filter(|feature| !has(feature)).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_change_needs_the_features_of_its_fields() {
        let sized = |cpu: &str| json!({"requests": {"cpu": cpu}});
        let spec = |whole: &str, init: &str, policy: &str| {
            json!({"resources": sized(whole), "containers": [{"resources": sized(whole)}],
                "initContainers": [{"resources": sized(init), "restartPolicy": policy}]})
        };
        let old = spec("1", "1", "");
        assert!(needed(&old, &old).is_empty());
        assert_eq!(needed(&old, &spec("2", "1", "")), [POD_LEVEL]);
        assert_eq!(needed(&old, &spec("1", "2", "")), [INIT_CONTAINERS]);
        assert_eq!(needed(&json!({}), &spec("1", "2", "")), [POD_LEVEL]);
        assert!(needed(&spec("1", "1", "Always"), &spec("1", "2", "Always")).is_empty());
        assert!(missing(&[POD_LEVEL], &json!([INIT_CONTAINERS, POD_LEVEL])).is_empty());
        assert_eq!(missing(&[POD_LEVEL], &Value::Null), [POD_LEVEL]);
    }
}

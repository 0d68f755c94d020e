//! Runtime classes of new pods: checks that the class exists, and adds its overhead, node selector and tolerations.

use async_trait::async_trait;
use coracle_kinds::kind::by_resource;
use serde_json::{Value, json};

use super::{Admission, Admit, Attributes};
use crate::error::{ApiError, Result};

pub(super) struct RuntimeClass;

#[async_trait]
impl Admit for RuntimeClass {
    async fn mutate(
        &self,
        admission: &Admission,
        attributes: &Attributes<'_>,
        object: &mut Value,
    ) -> Result<()> {
        if attributes.writes_new_pod()
            && let Some(old) = attributes.old
        {
            remove_former_overhead(object, old);
        }
        let Some(class) = class(admission, attributes, object)? else { return Ok(()) };
        add(&class, &mut object["spec"])
            .map_err(|why| ApiError::forbidden_object(attributes.kind, attributes.name, why))
    }

    async fn validate(
        &self,
        admission: &Admission,
        attributes: &Attributes<'_>,
        object: &Value,
    ) -> Result<()> {
        if !attributes.writes_new_pod() {
            return Ok(());
        }
        let class = class(admission, attributes, object)?.unwrap_or_default();
        if object["spec"]["overhead"] == class["overhead"]["podFixed"] {
            return Ok(());
        }
        let why = "pod rejected: Pod's Overhead doesn't match RuntimeClass's defined Overhead";
        Err(ApiError::forbidden_object(attributes.kind, attributes.name, why))
    }
}

/// Removes the overhead of the stored pod, because an initializer may change the class.
fn remove_former_overhead(pod: &mut Value, old: &Value) {
    if let Some(spec) = pod.get_mut("spec").and_then(Value::as_object_mut)
        && spec.get("overhead") == old["spec"].get("overhead")
    {
        spec.remove("overhead");
    }
}

/// The class of a new pod. `None` if the pod names none.
fn class(admission: &Admission, attributes: &Attributes<'_>, pod: &Value) -> Result<Option<Value>> {
    let name = pod["spec"]["runtimeClassName"].as_str().unwrap_or_default();
    if !attributes.writes_new_pod() || name.is_empty() {
        return Ok(None);
    }
    let kind = by_resource("node.k8s.io", "v1", "runtimeclasses").ok_or_else(ApiError::no_resource)?;
    let found = admission.cache.get(kind, "", name).map(|class| class.value());
    let why = || format!("pod rejected: RuntimeClass \"{name}\" not found");
    found.map(Some).ok_or_else(|| ApiError::forbidden_object(attributes.kind, attributes.name, why()))
}

fn add(class: &Value, spec: &mut Value) -> std::result::Result<(), String> {
    let overhead = &class["overhead"]["podFixed"];
    if overhead.is_object() {
        if !spec["overhead"].is_null() && spec["overhead"] != *overhead {
            return Err(
                "pod rejected: Pod's Overhead doesn't match RuntimeClass's defined Overhead".to_owned()
            );
        }
        spec["overhead"] = overhead.clone();
    }
    for (key, value) in class["scheduling"]["nodeSelector"].as_object().into_iter().flatten() {
        let own = &spec["nodeSelector"][key];
        if !own.is_null() && own != value {
            return Err(format!(
                "conflict: runtimeClass.scheduling.nodeSelector[{key}] = {value}; pod = {own}"
            ));
        }
        spec["nodeSelector"][key] = value.clone();
    }
    let wanted = class["scheduling"]["tolerations"].as_array().into_iter().flatten();
    let known = spec["tolerations"].as_array().cloned().unwrap_or_default();
    let missing: Vec<Value> = wanted.filter(|toleration| !known.contains(toleration)).cloned().collect();
    if !missing.is_empty() {
        spec["tolerations"] = json!([known, missing].concat());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_class_adds_its_overhead_and_scheduling() {
        let toleration = json!({"key": "gpu", "operator": "Exists"});
        let class = json!({"overhead": {"podFixed": {"cpu": "10m"}},
            "scheduling": {"nodeSelector": {"a": "b"}, "tolerations": [toleration]}});
        let mut spec = json!({"tolerations": [toleration], "nodeSelector": {"c": "d"}});
        add(&class, &mut spec).unwrap();
        let expect = json!({"overhead": {"cpu": "10m"}, "tolerations": [toleration], "nodeSelector": {"a": "b", "c": "d"}});
        assert_eq!(spec, expect);
        assert!(add(&class, &mut json!({"nodeSelector": {"a": "x"}})).is_err());
        assert!(add(&class, &mut json!({"overhead": {"cpu": "1"}})).is_err());
    }
}

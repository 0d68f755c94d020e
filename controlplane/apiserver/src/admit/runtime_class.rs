//! Runtime classes of new pods: checks that the class exists, and adds its overhead, node selector and tolerations.

use async_trait::async_trait;
use coracle_kinds::kind::by_resource;
use serde::Deserialize as _;
use serde_json::{Value, json};

use super::{
    Admission, Admit, Attributes,
    toleration::{MAX_TOLERATIONS, Toleration, merged},
};
use crate::error::{ApiError, Result};

const OTHER_OVERHEAD: &str = "pod rejected: Pod's Overhead doesn't match RuntimeClass's defined Overhead";

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
        check_overhead(&class, &object["spec"]["overhead"])
            .map_err(|why| ApiError::forbidden_object(attributes.kind, attributes.name, why))
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

/// The class of a new pod. `None` if the pod names no class.
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

/// Checks that a pod has the overhead of its class. `class` is null if the pod names no class.
fn check_overhead(class: &Value, own: &Value) -> std::result::Result<(), &'static str> {
    match &class["overhead"] {
        Value::Null if own.is_null() => Ok(()),
        Value::Null => {
            Err("pod rejected: Pod Overhead set without corresponding RuntimeClass defined Overhead")
        }
        overhead if overhead["podFixed"] == *own => Ok(()),
        _ => Err(OTHER_OVERHEAD),
    }
}

fn add(class: &Value, spec: &mut Value) -> std::result::Result<(), String> {
    let overhead = &class["overhead"]["podFixed"];
    if overhead.is_object() {
        if !spec["overhead"].is_null() && spec["overhead"] != *overhead {
            return Err(OTHER_OVERHEAD.to_owned());
        }
        spec["overhead"] = overhead.clone();
    }
    for (key, value) in class["scheduling"]["nodeSelector"].as_object().into_iter().flatten() {
        let own = &spec["nodeSelector"][key];
        if !own.is_null() && own != value {
            let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
            return Err(format!(
                "conflict: runtimeClass.scheduling.nodeSelector[{key}] = {}; pod.spec.nodeSelector[{key}] = {}",
                text(value),
                text(own)
            ));
        }
        spec["nodeSelector"][key] = value.clone();
    }
    add_tolerations(spec, &class["scheduling"]["tolerations"]);
    Ok(())
}

/// Adds the tolerations of the class. As upstream, a toleration that another toleration includes is omitted.
fn add_tolerations(spec: &mut Value, wanted: &Value) {
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let (own, mut added) = (list(&spec["tolerations"]), list(wanted));
    if added.is_empty() {
        return;
    }
    let read = |list: &[Value]| -> Option<Vec<Toleration>> {
        list.iter().map(|one| Toleration::deserialize(one).ok()).collect()
    };
    let is_short = own.len() + added.len() <= MAX_TOLERATIONS;
    spec["tolerations"] = match read(&own).zip(read(&added)).filter(|_| is_short) {
        Some((own, added)) => json!(merged(own, added)),
        None => {
            added.retain(|toleration| !own.contains(toleration));
            json!([own, added].concat())
        }
    };
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
        let conflict = add(&class, &mut json!({"nodeSelector": {"a": "x"}})).unwrap_err();
        let expect = "conflict: runtimeClass.scheduling.nodeSelector[a] = b; pod.spec.nodeSelector[a] = x";
        assert_eq!(conflict, expect);
        assert!(add(&class, &mut json!({"overhead": {"cpu": "1"}})).is_err());
    }

    #[test]
    fn tolerations_that_others_include_are_left_out() {
        let merged = |own: Value, wanted: Value| {
            let mut spec = json!({"tolerations": own});
            add_tolerations(&mut spec, &wanted);
            spec["tolerations"].take()
        };
        let (all, gpu) = (json!({"operator": "Exists"}), json!({"key": "gpu", "operator": "Exists"}));
        assert_eq!(merged(json!([all]), json!([gpu])), json!([all]));
        assert_eq!(merged(json!([gpu]), json!([all])), json!([all]));
        assert_eq!(merged(json!(null), json!([gpu])), json!([gpu]));
        assert_eq!(merged(json!([gpu]), json!(null)), json!([gpu]));
        // Long lists are not compared.
        let many: Vec<Value> =
            (0..MAX_TOLERATIONS).map(|number| json!({"key": number.to_string()})).collect();
        assert_eq!(merged(json!(many), json!([all])).as_array().unwrap().len(), MAX_TOLERATIONS + 1);
    }

    #[test]
    fn a_pod_has_the_overhead_of_its_class() {
        let class = json!({"overhead": {"podFixed": {"cpu": "10m"}}});
        assert_eq!(check_overhead(&class, &json!({"cpu": "10m"})), Ok(()));
        assert_eq!(check_overhead(&class, &json!(null)), Err(OTHER_OVERHEAD));
        assert_eq!(check_overhead(&json!({}), &json!(null)), Ok(()));
        let why = check_overhead(&json!(null), &json!({"cpu": "1"})).unwrap_err();
        assert!(why.contains("without corresponding RuntimeClass"), "{why}");
    }
}

//! The pods of a namespace run on nodes with labels that an annotation of the namespace names.
//!
//! Source: `plugin/pkg/admission/podnodeselector`. The plugin's configuration file is not supported: the annotation alone
//! decides.

use async_trait::async_trait;
use coracle_kinds::kind::by_resource;
use serde_json::{Map, Value, json};

use super::{forbidden, writes_pod};
use crate::{
    admit::{Admission, Admit, Attributes, Operation},
    error::Result,
};

const ANNOTATION: &str = "scheduler.alpha.kubernetes.io/node-selector";

pub(in crate::admit) struct PodNodeSelector;

#[async_trait]
impl Admit for PodNodeSelector {
    async fn mutate(
        &self,
        admission: &Admission,
        attributes: &Attributes<'_>,
        object: &mut Value,
    ) -> Result<()> {
        if !attributes.is(Operation::Create, "Pod") {
            return Ok(());
        }
        let wanted = wanted(admission, attributes)?;
        merge(object, &wanted).map_err(|why| forbidden(attributes, why))
    }

    async fn validate(
        &self,
        admission: &Admission,
        attributes: &Attributes<'_>,
        object: &Value,
    ) -> Result<()> {
        if !writes_pod(attributes) || attributes.operation != Operation::Create {
            return Ok(());
        }
        let mut copy = object.clone();
        merge(&mut copy, &wanted(admission, attributes)?).map_err(|why| forbidden(attributes, why))
    }
}

/// The labels that the namespace's annotation names.
fn wanted(admission: &Admission, attributes: &Attributes<'_>) -> Result<Map<String, Value>> {
    let Some(kind) = by_resource("", "v1", "namespaces") else { return Ok(Map::new()) };
    let Some(namespace) = admission.cache.get(kind, "", attributes.namespace) else { return Ok(Map::new()) };
    let namespace = namespace.value();
    let text = namespace["metadata"]["annotations"][ANNOTATION].as_str().unwrap_or_default();
    parse(text).map_err(|why| forbidden(attributes, why))
}

/// Reads `key=value,key=value`.
fn parse(text: &str) -> std::result::Result<Map<String, Value>, String> {
    let parts = text.split(',').map(str::trim).filter(|part| !part.is_empty());
    parts
        .map(|part| match part.split_once('=') {
            Some((key, value)) => Ok((key.trim().to_owned(), value.trim().into())),
            None => Err(format!("the namespace's annotation {ANNOTATION} has an invalid label {part:?}")),
        })
        .collect()
}

/// Adds the labels to the pod's node selector. A different value there is an error.
fn merge(pod: &mut Value, wanted: &Map<String, Value>) -> std::result::Result<(), String> {
    let Some(spec) = pod.get_mut("spec").and_then(Value::as_object_mut).filter(|_| !wanted.is_empty()) else {
        return Ok(());
    };
    let selector = spec.entry("nodeSelector").or_insert_with(|| json!({}));
    if selector.is_null() {
        *selector = json!({});
    }
    let Some(selector) = selector.as_object_mut() else { return Ok(()) };
    for (key, value) in wanted {
        if selector.get(key).is_some_and(|own| own != value) {
            return Err("pod node label selector conflicts with its namespace node label selector".to_owned());
        }
        selector.insert(key.clone(), value.clone());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_of_the_namespace_are_added_and_cannot_be_changed() {
        let wanted = parse("env=test, zone=a").unwrap();
        let mut pod = json!({"spec": {"nodeSelector": {"zone": "a"}}});
        merge(&mut pod, &wanted).unwrap();
        assert_eq!(pod["spec"]["nodeSelector"], json!({"env": "test", "zone": "a"}));
        let mut other = json!({"spec": {"nodeSelector": {"env": "prod"}}});
        assert!(merge(&mut other, &wanted).unwrap_err().contains("conflicts"));
        assert!(parse("env").is_err());
        assert!(parse("").unwrap().is_empty());
    }
}

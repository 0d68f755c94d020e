//! Adds the node selector in an annotation of a namespace to the pods of the namespace. The plugin's configuration has
//! the default for namespaces without the annotation, and whitelists of labels per namespace.
//!
//! Source: `plugin/pkg/admission/podnodeselector`.

use std::collections::BTreeMap;

use async_trait::async_trait;
use coracle_kinds::kind::by_resource;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::forbidden;
use crate::{
    admit::{Admission, Admit, Attributes, config::PluginConfigs},
    error::Result,
};

const ANNOTATION: &str = "scheduler.alpha.kubernetes.io/node-selector";

/// The configuration key of the default. All other keys are names of namespaces.
const CLUSTER_DEFAULT: &str = "clusterDefaultNodeSelector";

type Labels = Map<String, Value>;

#[derive(Default)]
pub(in crate::admit) struct PodNodeSelector {
    /// The labels for pods of namespaces without the annotation.
    cluster_default: Labels,
    /// The labels that the pods of a namespace may select.
    whitelists: BTreeMap<String, Labels>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Config {
    pod_node_selector_plugin_config: BTreeMap<String, String>,
}

#[async_trait]
impl Admit for PodNodeSelector {
    async fn mutate(
        &self,
        admission: &Admission,
        attributes: &Attributes<'_>,
        object: &mut Value,
    ) -> Result<()> {
        if !attributes.writes_new_pod() {
            return Ok(());
        }
        let wanted = self.wanted(admission, attributes)?;
        merge(object, &wanted).map_err(|why| forbidden(attributes, why))
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
        let mut copy = object.clone();
        let checked = merge(&mut copy, &self.wanted(admission, attributes)?);
        let checked =
            checked.and_then(|()| self.check(attributes.namespace, &object["spec"]["nodeSelector"]));
        checked.map_err(|why| forbidden(attributes, why))
    }
}

// === impl PodNodeSelector ===

impl PodNodeSelector {
    /// Reads the plugin's configuration.
    ///
    /// # Errors
    /// The configuration is invalid.
    pub(in crate::admit) fn read(configs: &mut PluginConfigs) -> std::result::Result<Self, String> {
        let Some(config) = configs.take::<Config>("PodNodeSelector")? else { return Ok(Self::default()) };
        let mut whitelists = BTreeMap::new();
        for (namespace, text) in config.pod_node_selector_plugin_config {
            let labels =
                parse(&text).map_err(|why| format!("podNodeSelectorPluginConfig.{namespace}: {why}"))?;
            whitelists.insert(namespace, labels);
        }
        Ok(Self { cluster_default: whitelists.remove(CLUSTER_DEFAULT).unwrap_or_default(), whitelists })
    }

    /// The labels in the namespace's annotation, or else the default labels.
    fn wanted(&self, admission: &Admission, attributes: &Attributes<'_>) -> Result<Labels> {
        let Some(kind) = by_resource("", "v1", "namespaces") else { return Ok(Map::new()) };
        let Some(namespace) = admission.cache.get(kind, "", attributes.namespace) else {
            return Ok(Map::new());
        };
        let namespace = namespace.part(&[&["metadata", "annotations"]]);
        let Some(text) = namespace["metadata"]["annotations"][ANNOTATION].as_str() else {
            return Ok(self.cluster_default.clone());
        };
        let parsed = parse(text).map_err(|why| format!("the namespace's annotation {ANNOTATION}: {why}"));
        parsed.map_err(|why| forbidden(attributes, why))
    }

    /// Checks a pod's node selector against the whitelist of its namespace. An empty whitelist allows all.
    fn check(&self, namespace: &str, selector: &Value) -> std::result::Result<(), String> {
        let Some(whitelist) = self.whitelists.get(namespace).filter(|labels| !labels.is_empty()) else {
            return Ok(());
        };
        let mut labels = selector.as_object().into_iter().flatten();
        if labels.all(|(key, value)| whitelist.get(key) == Some(value)) {
            return Ok(());
        }
        Err("pod node label selector labels conflict with its namespace whitelist".to_owned())
    }
}

/// Parses `key=value,key=value`.
fn parse(text: &str) -> std::result::Result<Labels, String> {
    let parts = text.split(',').map(str::trim).filter(|part| !part.is_empty());
    parts
        .map(|part| match part.split_once('=') {
            Some((key, value)) => Ok((key.trim().to_owned(), value.trim().into())),
            None => Err(format!("invalid label {part:?}")),
        })
        .collect()
}

/// Adds the labels to the pod's node selector. A different value of a key is an error.
fn merge(pod: &mut Value, wanted: &Labels) -> std::result::Result<(), String> {
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
    use std::path::Path;

    use super::*;

    #[test]
    fn the_configuration_has_a_default_and_whitelists() {
        let read = |text: &str| PodNodeSelector::read(&mut PluginConfigs::parse(text, Path::new(""))?);
        let text = "podNodeSelectorPluginConfig: {clusterDefaultNodeSelector: env=test, a: 'env=test,zone=a', b: ''}";
        let plugin = read(text).unwrap();
        assert_eq!(json!(plugin.cluster_default), json!({"env": "test"}));
        assert!(plugin.check("a", &json!({"zone": "a"})).is_ok() && plugin.check("a", &Value::Null).is_ok());
        for other in [json!({"zone": "b"}), json!({"disk": "ssd"})] {
            assert!(plugin.check("a", &other).unwrap_err().contains("namespace whitelist"), "{other}");
            assert!(plugin.check("b", &other).is_ok() && plugin.check("c", &other).is_ok());
        }
        let refused = read("podNodeSelectorPluginConfig: {a: env}").err().unwrap();
        assert_eq!(refused, "podNodeSelectorPluginConfig.a: invalid label \"env\"");
    }

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

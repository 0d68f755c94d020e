//! Default and allowed tolerations of the pods of a namespace. The annotations of the namespace set them, or else the
//! configuration of the plugin.
//!
//! Source: `plugin/pkg/admission/podtolerationrestriction`.

use async_trait::async_trait;
use coracle_kinds::{kind::by_resource, strategy::qos_class, validate};
use coracle_values::qos::QosClass;
use serde::Deserialize;
use serde_json::{Value, json};

use super::{forbidden, writes_pod};
use crate::{
    admit::{
        Admission, Admit, Attributes,
        config::{PluginConfigs, expect},
        toleration::{self, MAX_TOLERATIONS, Toleration, are_allowed, merged},
    },
    error::{ApiError, Result},
};

const DEFAULTS: &str = "scheduler.alpha.kubernetes.io/defaultTolerations";
const WHITELIST: &str = "scheduler.alpha.kubernetes.io/tolerationsWhitelist";

/// The lists for namespaces without annotations.
#[derive(Default)]
pub(in crate::admit) struct PodTolerationRestriction {
    defaults: Vec<Toleration>,
    whitelist: Vec<Toleration>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Config {
    api_version: String,
    kind: String,
    #[serde(default)]
    default: Vec<Value>,
    #[serde(default)]
    whitelist: Vec<Value>,
}

#[async_trait]
impl Admit for PodTolerationRestriction {
    async fn mutate(
        &self,
        admission: &Admission,
        attributes: &Attributes<'_>,
        object: &mut Value,
    ) -> Result<()> {
        if !writes_pod(attributes) {
            return Ok(());
        }
        let annotations = annotations(admission, attributes)?;
        let own = own(attributes, object)?;
        let mut added = Vec::new();
        if attributes.writes_new_pod() {
            added = listed(attributes, &annotations, DEFAULTS)?.unwrap_or_else(|| self.defaults.clone());
        }
        if qos_class(&object["spec"]) != QosClass::BestEffort {
            added.push(Toleration::of_memory_pressure());
        }
        if added.is_empty() {
            return self.check(attributes, &annotations, &own);
        }
        let tolerations = merged(own, added);
        self.check(attributes, &annotations, &tolerations)?;
        object["spec"]["tolerations"] = json!(tolerations);
        Ok(())
    }

    async fn validate(
        &self,
        admission: &Admission,
        attributes: &Attributes<'_>,
        object: &Value,
    ) -> Result<()> {
        if !writes_pod(attributes) {
            return Ok(());
        }
        self.check(attributes, &annotations(admission, attributes)?, &own(attributes, object)?)
    }
}

// === impl PodTolerationRestriction ===

impl PodTolerationRestriction {
    /// Reads the plugin's configuration.
    ///
    /// # Errors
    /// The configuration is invalid.
    pub(in crate::admit) fn read(configs: &mut PluginConfigs) -> std::result::Result<Self, String> {
        let Some(config) = configs.take::<Config>("PodTolerationRestriction")? else {
            return Ok(Self::default());
        };
        expect("apiVersion", &config.api_version, "podtolerationrestriction.admission.k8s.io/v1alpha1")?;
        expect("kind", &config.kind, "Configuration")?;
        Ok(Self {
            defaults: configured("default", config.default)?,
            whitelist: configured("whitelist", config.whitelist)?,
        })
    }

    /// Checks the tolerations of a pod against the whitelist of its namespace, or else against the whitelist of the
    /// cluster.
    fn check(&self, attributes: &Attributes<'_>, annotations: &Value, own: &[Toleration]) -> Result<()> {
        if own.is_empty() {
            return Ok(());
        }
        let of_namespace = listed(attributes, annotations, WHITELIST)?;
        let scope = if of_namespace.is_some() { "namespace" } else { "cluster" };
        if are_allowed(own, of_namespace.as_deref().unwrap_or(&self.whitelist)) {
            return Ok(());
        }
        let merged = "pod tolerations (possibly merged with namespace default tolerations)";
        Err(ApiError::without_reason(format!("{merged} conflict with its {scope} whitelist")))
    }
}

/// Parses the tolerations of a configuration field.
fn configured(field: &str, list: Vec<Value>) -> std::result::Result<Vec<Toleration>, String> {
    let path = format!("podtolerationrestriction.{field}");
    for (index, toleration) in list.iter().enumerate() {
        let mut names = toleration.as_object().into_iter().flat_map(|fields| fields.keys());
        if let Some(unknown) = names.find(|name| !toleration::FIELDS.contains(&name.as_str())) {
            return Err(format!("{path}[{index}]: unknown field {unknown:?}"));
        }
    }
    let list = Value::Array(list);
    let causes = validate::tolerations(&path, &list);
    if !causes.is_empty() {
        let causes = causes.iter().map(|cause| format!("{}: {}", cause.field, cause.message));
        return Err(format!("invalid config: [{}]", causes.collect::<Vec<_>>().join(", ")));
    }
    serde_json::from_value(list).map_err(|error| format!("{path}: {error}"))
}

/// The annotations of the request's namespace.
fn annotations(admission: &Admission, attributes: &Attributes<'_>) -> Result<Value> {
    let kind = by_resource("", "v1", "namespaces").ok_or_else(ApiError::no_resource)?;
    let namespace = admission.cache.get(kind, "", attributes.namespace);
    let namespace = namespace.ok_or_else(|| ApiError::not_found(kind, attributes.namespace))?;
    let mut value = namespace.part(&[&["metadata", "annotations"]]);
    Ok(value["metadata"]["annotations"].take())
}

/// The tolerations in an annotation. `None` without the annotation: the cluster's list then applies.
fn listed(attributes: &Attributes<'_>, annotations: &Value, name: &str) -> Result<Option<Vec<Toleration>>> {
    let text = match annotations[name].as_str() {
        None => return Ok(None),
        Some("") => return Ok(Some(Vec::new())),
        Some(text) => text,
    };
    let list: Option<Vec<Toleration>> = serde_json::from_str(text)
        .map_err(|error| ApiError::without_reason(format!("the annotation {name}: {error}")))?;
    let list = list.unwrap_or_default();
    check_count(attributes, list.len(), &format!("the annotation {name} of the namespace"))?;
    Ok(Some(list))
}

/// The tolerations of a pod.
fn own(attributes: &Attributes<'_>, pod: &Value) -> Result<Vec<Toleration>> {
    let list = pod["spec"]["tolerations"].as_array().map(Vec::as_slice).unwrap_or_default();
    check_count(attributes, list.len(), "the pod")?;
    let read = list.iter().map(Toleration::deserialize).collect::<std::result::Result<_, _>>();
    read.map_err(|error| ApiError::bad_request(format!("spec.tolerations: {error}")))
}

fn check_count(attributes: &Attributes<'_>, count: usize, owner: &str) -> Result<()> {
    if count <= MAX_TOLERATIONS {
        return Ok(());
    }
    let most = format!("{owner} has {count} tolerations, more than {MAX_TOLERATIONS}");
    Err(forbidden(attributes, most))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    const HEAD: &str = "apiVersion: apiserver.config.k8s.io/v1\nkind: AdmissionConfiguration\nplugins:\n\
        - name: PodTolerationRestriction\n  configuration:\n    \
        apiVersion: podtolerationrestriction.admission.k8s.io/v1alpha1\n    kind: Configuration\n";

    fn plugin(rest: &str) -> std::result::Result<PodTolerationRestriction, String> {
        let text = format!("{HEAD}    {rest}\n");
        PodTolerationRestriction::read(&mut PluginConfigs::parse(&text, Path::new(""))?)
    }

    #[test]
    fn the_configuration_has_valid_tolerations() {
        let plugin_of =
            plugin("default: [{key: a, operator: Exists}]\n    whitelist: [{key: b, value: c}]").unwrap();
        assert_eq!(json!(plugin_of.defaults), json!([{"key": "a", "operator": "Exists"}]));
        assert_eq!(json!(plugin_of.whitelist), json!([{"key": "b", "value": "c"}]));
        for (rest, expected) in [
            (
                "default: [{key: a, operator: Exists, value: b}]",
                "podtolerationrestriction.default[0].operator: ",
            ),
            (
                "whitelist: [{key: a, seconds: 1}]",
                "podtolerationrestriction.whitelist[0]: unknown field \"seconds\"",
            ),
            ("whitelist: [{tolerationSeconds: x, operator: Exists, effect: NoExecute}]", "invalid type"),
            ("allowed: []", "unknown field `allowed`"),
        ] {
            let refused = plugin(rest).err().unwrap();
            assert!(refused.contains(expected), "{rest}: {refused}");
        }
    }
}

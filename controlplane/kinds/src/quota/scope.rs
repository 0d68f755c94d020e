//! The scopes of a quota. They select the pods and claims that the quota covers.

use std::fmt;

use serde::Deserialize;
use serde_json::Value;

use crate::Resource;
use crate::strategy::qos_class;
use coracle_values::qos::QosClass;

/// One requirement of `scopeSelector`, or one of `scopes`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ScopeSelector {
    #[serde(rename = "scopeName")]
    name: String,
    #[serde(default)]
    operator: String,
    #[serde(default)]
    values: Vec<String>,
}

/// The scopes of a quota's spec.
pub(super) fn read(spec: &Value) -> Vec<ScopeSelector> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let scopes = spec["scopes"].as_array().into_iter().flatten();
    let plain = scopes.map(|scope| ScopeSelector {
        name: text(scope),
        operator: "Exists".to_owned(),
        values: Vec::new(),
    });
    let selectors = spec["scopeSelector"]["matchExpressions"].as_array().into_iter().flatten();
    let selectors = selectors.map(|selector| ScopeSelector {
        name: text(&selector["scopeName"]),
        operator: text(&selector["operator"]),
        values: selector["values"].as_array().into_iter().flatten().map(text).collect(),
    });
    plain.chain(selectors).collect()
}

// === impl ScopeSelector ===

impl ScopeSelector {
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn matches(&self, kind: &Resource, object: &Value) -> bool {
        let spec = &object["spec"];
        if kind.is("", "PersistentVolumeClaim") {
            return self.name == "VolumeAttributesClass" && self.selects(&attributes_classes(object));
        }
        if !kind.is("", "Pod") {
            return false;
        }
        match self.name.as_str() {
            "Terminating" => is_terminating(object),
            "NotTerminating" => !is_terminating(object),
            "BestEffort" => qos_class(spec) == QosClass::BestEffort,
            "NotBestEffort" => qos_class(spec) != QosClass::BestEffort,
            "PriorityClass" => {
                let class = spec["priorityClassName"].as_str().filter(|class| !class.is_empty());
                self.selects(&class.into_iter().collect::<Vec<_>>())
            }
            "CrossNamespacePodAffinity" => has_foreign_affinity(&spec["affinity"]),
            _ => false,
        }
    }

    /// Whether the selector matches one of the values, or the absence of values.
    fn selects(&self, values: &[&str]) -> bool {
        let named = |value: &&str| self.values.iter().any(|known| known == value);
        match self.operator.as_str() {
            "Exists" => !values.is_empty(),
            "DoesNotExist" => values.is_empty(),
            "In" => values.iter().any(named),
            "NotIn" => values.is_empty() || values.iter().any(|value| !named(value)),
            _ => false,
        }
    }
}

impl fmt::Display for ScopeSelector {
    /// Prints the selector in the form of a Go struct, as upstream's messages do.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{{{} {} [{}]}}", self.name, self.operator, self.values.join(" "))
    }
}

/// Whether the pod has a deadline.
pub fn is_terminating(pod: &Value) -> bool {
    pod["spec"]["activeDeadlineSeconds"].as_i64().is_some_and(|seconds| seconds >= 0)
}

fn attributes_classes(claim: &Value) -> Vec<&str> {
    let names = [
        &claim["spec"]["volumeAttributesClassName"],
        &claim["status"]["currentVolumeAttributesClassName"],
        &claim["status"]["modifyVolumeStatus"]["targetVolumeAttributesClassName"],
    ];
    names.into_iter().filter_map(Value::as_str).filter(|name| !name.is_empty()).collect()
}

/// Whether a term of an affinity names other namespaces or selects them.
fn has_foreign_affinity(affinity: &Value) -> bool {
    let is_foreign = |term: &Value| {
        !term["namespaceSelector"].is_null()
            || term["namespaces"].as_array().is_some_and(|all| !all.is_empty())
    };
    ["podAffinity", "podAntiAffinity"].into_iter().any(|field| {
        let list = |name: &str| affinity[field][name].as_array().into_iter().flatten();
        list("requiredDuringSchedulingIgnoredDuringExecution").any(is_foreign)
            || list("preferredDuringSchedulingIgnoredDuringExecution")
                .any(|term| is_foreign(&term["podAffinityTerm"]))
    })
}

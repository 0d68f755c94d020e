//! Pod disruption budgets.

use coracle_values::resource;
use k8s_openapi::api::policy::v1::PodDisruptionBudgetStatus;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use serde::de::Error;
use serde::{Deserialize, Deserializer};
use serde_json::Value;

use super::Object;

/// A pod disruption budget: the number of selected pods that must stay available during evictions.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct PodDisruptionBudget {
    pub(crate) metadata: ObjectMeta,
    pub(crate) spec: PodDisruptionBudgetSpec,
    #[serde(deserialize_with = "status_with_times")]
    pub(crate) status: PodDisruptionBudgetStatus,
}

/// The spec of a budget.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct PodDisruptionBudgetSpec {
    pub(crate) min_available: Option<IntOrString>,
    pub(crate) max_unavailable: Option<IntOrString>,
    /// The selector of pods. `None` selects no pods; an empty selector selects all pods of the namespace.
    pub(crate) selector: Option<LabelSelector>,
}

resource!(PodDisruptionBudget, "policy", "poddisruptionbudgets", NamespaceResourceScope);

impl Object for PodDisruptionBudget {}

/// Go's time without a value, which is null in JSON.
const NO_TIME: &str = "0001-01-01T00:00:00Z";

/// Reads a status in which the time of a disrupted pod may be null.
fn status_with_times<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<PodDisruptionBudgetStatus, D::Error> {
    let mut status = Value::deserialize(deserializer)?;
    if let Some(pods) = status.get_mut("disruptedPods").and_then(Value::as_object_mut) {
        for time in pods.values_mut().filter(|time| time.is_null()) {
            *time = NO_TIME.into();
        }
    }
    serde_json::from_value(status).map_err(D::Error::custom)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_time_of_a_disrupted_pod_may_be_null() {
        let status = json!({"disruptionsAllowed": 1, "currentHealthy": 1, "desiredHealthy": 1, "expectedPods": 1,
            "disruptedPods": {"p": null, "q": "2026-01-01T00:00:00Z"}});
        let budget: PodDisruptionBudget = serde_json::from_value(json!({"status": status})).unwrap();
        let pods = budget.status.disrupted_pods.unwrap();
        assert!(pods["p"].0 < pods["q"].0);
        let budget: PodDisruptionBudget = serde_json::from_value(json!({})).unwrap();
        assert!(budget.status.disrupted_pods.is_none());
    }
}

//! Pod disruption budgets.

use coracle_values::resource;
use k8s_openapi::api::policy::v1::PodDisruptionBudgetStatus;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use serde::Deserialize;

use super::Object;

/// A pod disruption budget: how many of the selected pods must stay available during evictions.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct PodDisruptionBudget {
    pub(crate) metadata: ObjectMeta,
    pub(crate) spec: PodDisruptionBudgetSpec,
    pub(crate) status: PodDisruptionBudgetStatus,
}

/// The spec of a budget.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct PodDisruptionBudgetSpec {
    pub(crate) min_available: Option<IntOrString>,
    pub(crate) max_unavailable: Option<IntOrString>,
    /// `None` selects no pods; an empty selector selects all pods of the namespace.
    pub(crate) selector: Option<LabelSelector>,
}

resource!(PodDisruptionBudget, "policy", "poddisruptionbudgets", NamespaceResourceScope);

impl Object for PodDisruptionBudget {}

//! Budgets of disruptions.

use std::borrow::Cow;

use k8s_openapi::api::policy::v1::PodDisruptionBudgetStatus;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::Resource;
use kube::core::NamespaceResourceScope;
use serde::Deserialize;

use super::Object;

/// How many pods of some must stay when others are evicted.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct PodDisruptionBudget {
    pub(crate) metadata: ObjectMeta,
    pub(crate) spec: PodDisruptionBudgetSpec,
    pub(crate) status: PodDisruptionBudgetStatus,
}

/// What a budget wants.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct PodDisruptionBudgetSpec {
    pub(crate) min_available: Option<IntOrString>,
    pub(crate) max_unavailable: Option<IntOrString>,
    /// Nothing selects nothing, an empty one all pods of the namespace.
    pub(crate) selector: Option<LabelSelector>,
}

resource!(PodDisruptionBudget, "policy", "poddisruptionbudgets", NamespaceResourceScope);

impl Object for PodDisruptionBudget {}

//! Cluster roles.

use coracle_values::resource;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta};
use serde::Deserialize;
use serde_json::Value;

use super::Object;

/// A cluster role.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct ClusterRole {
    pub(crate) metadata: ObjectMeta,
    /// The rules as JSON, because the controller only copies them.
    pub(crate) rules: Option<Vec<Value>>,
    pub(crate) aggregation_rule: Option<AggregationRule>,
}

/// The selectors of an aggregated role.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct AggregationRule {
    pub(crate) cluster_role_selectors: Vec<LabelSelector>,
}

resource!(ClusterRole, "rbac.authorization.k8s.io", "clusterroles", ClusterResourceScope);

impl Object for ClusterRole {}

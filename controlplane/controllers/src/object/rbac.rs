//! Roles.

use std::borrow::Cow;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta};
use kube::Resource;
use kube::core::ClusterResourceScope;
use serde::Deserialize;
use serde_json::Value;

use super::Object;

/// A role that may be made of others.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct ClusterRole {
    pub(crate) metadata: ObjectMeta,
    /// As they are: nobody here reads them.
    pub(crate) rules: Option<Vec<Value>>,
    pub(crate) aggregation_rule: Option<AggregationRule>,
}

/// Which others.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct AggregationRule {
    pub(crate) cluster_role_selectors: Vec<LabelSelector>,
}

resource!(ClusterRole, "rbac.authorization.k8s.io", "clusterroles", ClusterResourceScope);

impl Object for ClusterRole {}

//! Resource quotas.

use coracle_values::resource;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::Deserialize;
use serde_json::Value;

use super::Object;

/// A resource quota. `coracle_kinds::quota` reads the spec.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct ResourceQuota {
    pub(crate) metadata: ObjectMeta,
    pub(crate) spec: Value,
    pub(crate) status: Value,
}

resource!(ResourceQuota, "", "resourcequotas", NamespaceResourceScope);

impl Object for ResourceQuota {}

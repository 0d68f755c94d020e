//! Resource claims.

use coracle_values::resource;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::Deserialize;
use serde_json::Value;

use super::{Object, Pod};

/// A resource claim.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct ResourceClaim {
    pub(crate) metadata: ObjectMeta,
    pub(crate) status: ResourceClaimStatus,
}

/// The allocated devices of a claim, and the pods that use them.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct ResourceClaimStatus {
    pub(crate) allocation: Option<Value>,
    pub(crate) reserved_for: Vec<Value>,
}

/// A claim in a pod's spec.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct PodResourceClaim {
    pub(crate) name: String,
    pub(crate) resource_claim_name: Option<String>,
    pub(crate) resource_claim_template_name: Option<String>,
}

/// The name of a generated claim of a pod.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct PodClaimStatus {
    pub(crate) name: String,
    pub(crate) resource_claim_name: Option<String>,
}

resource!(ResourceClaim, "resource.k8s.io", "resourceclaims", NamespaceResourceScope);

impl Object for ResourceClaim {}

impl ResourceClaim {
    /// The value of an annotation.
    pub(crate) fn annotation(&self, name: &str) -> Option<&str> {
        self.metadata.annotations.as_ref()?.get(name).map(String::as_str)
    }
}

impl Pod {
    /// Names of the pod's claims. Claims without a name yet are omitted.
    pub(crate) fn claims(&self) -> impl Iterator<Item = &str> {
        let named = self.spec.resource_claims.iter().filter_map(|claim| claim.resource_claim_name.as_deref());
        let made = self.status.resource_claim_statuses.iter();
        named.chain(made.filter_map(|status| status.resource_claim_name.as_deref()))
    }
}

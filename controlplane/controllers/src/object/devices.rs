//! Resource claims.

use coracle_values::resource;
use coracle_values::toleration::evicts;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Taint;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use serde::{Deserialize, Deserializer};
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

/// The claim that the scheduler created for extended resources of a pod.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct ExtendedClaimStatus {
    pub(crate) resource_claim_name: String,
}

resource!(ResourceClaim, "resource.k8s.io", "resourceclaims", NamespaceResourceScope);

/// Devices that a driver publishes. Only devices with NoExecute taints are kept.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct ResourceSlice {
    #[serde(deserialize_with = "super::without_managed_fields")]
    pub(crate) metadata: ObjectMeta,
    pub(crate) spec: SliceSpec,
}

/// The fields of a slice's spec that controllers read.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct SliceSpec {
    pub(crate) driver: String,
    pub(crate) pool: SlicePool,
    pub(crate) node_name: Option<String>,
    /// Devices with NoExecute taints, and these taints.
    #[serde(deserialize_with = "tainted")]
    pub(crate) devices: Box<[TaintedDevice]>,
}

#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default)]
pub(crate) struct SlicePool {
    pub(crate) name: String,
    pub(crate) generation: i64,
}

#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default)]
pub(crate) struct TaintedDevice {
    pub(crate) name: String,
    pub(crate) taints: Vec<Taint>,
}

resource!(ResourceSlice, "resource.k8s.io", "resourceslices", ClusterResourceScope);

impl Object for ResourceClaim {}
impl Object for ResourceSlice {}

impl ResourceSlice {
    /// Driver and name of the pool.
    pub(crate) fn pool(&self) -> (String, String) {
        (self.spec.driver.clone(), self.spec.pool.name.clone())
    }

    /// Whether a device has a NoExecute taint.
    pub(crate) fn is_tainted(&self) -> bool {
        !self.spec.devices.is_empty()
    }
}

fn tainted<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Box<[TaintedDevice]>, D::Error> {
    let mut devices = Option::<Vec<TaintedDevice>>::deserialize(deserializer)?.unwrap_or_default();
    for device in &mut devices {
        device.taints.retain(evicts);
        // A slice that an earlier server version stored has taints without a time. The time is set only once, here. A
        // time that each reconcile sets would change.
        for taint in &mut device.taints {
            taint.time_added.get_or_insert_with(|| Time(Timestamp::now()));
        }
    }
    devices.retain(|device| !device.taints.is_empty());
    Ok(devices.into())
}

impl Pod {
    /// Names of the pod's claims. Claims without a name yet are omitted.
    pub(crate) fn claims(&self) -> impl Iterator<Item = &str> {
        let named = self.spec.resource_claims.iter().filter_map(|claim| claim.resource_claim_name.as_deref());
        let made = self.status.resource_claim_statuses.iter();
        let made = made.filter_map(|status| status.resource_claim_name.as_deref());
        let extended = self.status.extended_resource_claim_status.iter();
        named.chain(made).chain(extended.map(|status| status.resource_claim_name.as_str()))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_claims_of_a_pod_are_named_generated_or_for_extended_resources() {
        let pod: Pod = serde_json::from_value(json!({
            "spec": {"resourceClaims": [{"name": "a", "resourceClaimName": "named"}]},
            "status": {"resourceClaimStatuses": [{"name": "b", "resourceClaimName": "made"}, {"name": "c"}],
                "extendedResourceClaimStatus": {"resourceClaimName": "extended", "requestMappings": []}},
        }))
        .unwrap();
        assert_eq!(pod.claims().collect::<Vec<_>>(), ["named", "made", "extended"]);
    }

    #[test]
    fn a_taint_without_a_time_counts_from_when_the_slice_is_read() {
        let taints = json!([{"key": "k", "effect": "NoExecute"}, {"key": "l", "effect": "NoSchedule"}]);
        let devices = json!([{"name": "x", "taints": taints}, {"name": "y"}]);
        let slice: ResourceSlice = serde_json::from_value(json!({"spec": {"devices": devices}})).unwrap();
        let [device] = &*slice.spec.devices else { panic!("{:?}", slice.spec.devices) };
        assert!(device.taints.len() == 1 && device.taints[0].time_added.is_some());
    }
}

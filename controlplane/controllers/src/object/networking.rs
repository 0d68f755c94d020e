//! ServiceCIDRs and IPAddresses: the ranges of service addresses, and the addresses in use.

use coracle_values::resource;
use k8s_openapi::api::networking::v1::IPAddressSpec;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, ObjectMeta};
use serde::Deserialize;

use super::Object;

/// Ranges from which services get addresses.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct ServiceCIDR {
    pub(crate) metadata: ObjectMeta,
    pub(crate) spec: ServiceCidrSpec,
    pub(crate) status: ServiceCidrStatus,
}

/// The spec of a ServiceCIDR: at most one range of each address family.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct ServiceCidrSpec {
    pub(crate) cidrs: Option<Vec<String>>,
}

/// The status of a ServiceCIDR.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct ServiceCidrStatus {
    pub(crate) conditions: Option<Vec<Condition>>,
}

/// An allocated address. The object's name is the text of the address.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct IPAddress {
    pub(crate) metadata: ObjectMeta,
    pub(crate) spec: IPAddressSpec,
}

resource!(ServiceCIDR, "networking.k8s.io", "servicecidrs", ClusterResourceScope);
resource!(IPAddress, "networking.k8s.io", "ipaddresses", ClusterResourceScope);

impl Object for ServiceCIDR {}
impl Object for IPAddress {}

//! Reduced types of device claims, classes and slices: the fields that scheduling reads.

use std::collections::BTreeMap;

use coracle_values::{Quantity, resource};
use k8s_openapi::api::core::v1::{NodeSelector, Taint, Toleration};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::Deserialize;
use serde_json::Value;

/// A claim of devices.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default)]
pub(super) struct ResourceClaim {
    pub(super) metadata: ObjectMeta,
    pub(super) spec: ClaimSpec,
    pub(super) status: ClaimStatus,
}

pub(super) type Claim = ResourceClaim;

#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default)]
pub(super) struct ClaimSpec {
    pub(super) devices: ClaimDevices,
}

#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default)]
pub(super) struct ClaimDevices {
    pub(super) requests: Vec<Request>,
    pub(super) constraints: Vec<Constraint>,
    pub(super) config: Vec<Config>,
}

/// A request for certain devices, or a list of alternatives. The first available alternative is used.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct Request {
    pub(super) name: String,
    pub(super) exactly: Option<Exact>,
    pub(super) first_available: Vec<Alternative>,
}

#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default)]
pub(super) struct Alternative {
    pub(super) name: String,
    #[serde(flatten)]
    pub(super) exact: Exact,
}

#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct Exact {
    pub(super) device_class_name: String,
    pub(super) selectors: Vec<Selector>,
    pub(super) allocation_mode: Option<String>,
    pub(super) count: Option<i64>,
    pub(super) admin_access: Option<bool>,
    pub(super) tolerations: Vec<Toleration>,
    /// Amounts of the device's capacity that the claim requests.
    pub(super) capacity: Option<Value>,
}

#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default)]
pub(super) struct Selector {
    pub(super) cel: Option<Cel>,
}

#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default)]
pub(super) struct Cel {
    pub(super) expression: String,
}

#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct Constraint {
    pub(super) requests: Vec<String>,
    pub(super) match_attribute: Option<String>,
    pub(super) distinct_attribute: Option<String>,
}

/// Configuration for a driver. The scheduler copies it to the allocation.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default)]
pub(super) struct Config {
    pub(super) requests: Vec<String>,
    pub(super) opaque: Option<Value>,
}

#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct ClaimStatus {
    pub(super) allocation: Option<Value>,
    pub(super) reserved_for: Vec<Value>,
    pub(super) devices: Vec<DeviceStatus>,
}

/// The status that a driver reports of an allocated device.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default)]
pub(super) struct DeviceStatus {
    pub(super) driver: String,
    pub(super) pool: String,
    pub(super) device: String,
    pub(super) conditions: Vec<DeviceCondition>,
}

#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default)]
pub(super) struct DeviceCondition {
    #[serde(rename = "type")]
    pub(super) kind: String,
    pub(super) status: String,
    pub(super) reason: String,
    pub(super) message: String,
}

/// A class of devices.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default)]
pub(super) struct DeviceClass {
    pub(super) metadata: ObjectMeta,
    pub(super) spec: ClassSpec,
}

pub(super) type Class = DeviceClass;

#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct ClassSpec {
    pub(super) selectors: Vec<Selector>,
    pub(super) config: Vec<Config>,
    pub(super) extended_resource_name: Option<String>,
}

/// Devices that a driver publishes.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default)]
pub(super) struct ResourceSlice {
    pub(super) metadata: ObjectMeta,
    pub(super) spec: SliceSpec,
}

pub(super) type Slice = ResourceSlice;

#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct SliceSpec {
    pub(super) driver: String,
    pub(super) pool: Pool,
    pub(super) node_name: Option<String>,
    pub(super) node_selector: Option<NodeSelector>,
    pub(super) all_nodes: Option<bool>,
    pub(super) per_device_node_selection: Option<bool>,
    pub(super) shared_counters: Vec<CounterSet>,
    pub(super) devices: Vec<Device>,
}

/// Counters that devices of the pool share.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default)]
pub(super) struct CounterSet {
    pub(super) name: String,
    pub(super) counters: BTreeMap<String, Counter>,
}

/// The amounts that a device takes from a counter set while it is allocated.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct CounterConsumption {
    pub(super) counter_set: String,
    pub(super) counters: BTreeMap<String, Counter>,
}

#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default)]
pub(super) struct Counter {
    /// The text of a quantity.
    pub(super) value: Value,
}

#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct Pool {
    pub(super) name: String,
    pub(super) generation: i64,
    /// The number is signed, so that a negative number can be decoded. A decoding error would stop the watch, and so
    /// all scheduling.
    pub(super) resource_slice_count: i64,
}

#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct Device {
    pub(super) name: String,
    pub(super) attributes: BTreeMap<String, Value>,
    pub(super) capacity: BTreeMap<String, Value>,
    pub(super) taints: Vec<Taint>,
    pub(super) consumes_counters: Vec<CounterConsumption>,
    pub(super) allow_multiple_allocations: Option<bool>,
    pub(super) node_name: Option<String>,
    pub(super) node_selector: Option<NodeSelector>,
    pub(super) all_nodes: Option<bool>,
    pub(super) binds_to_node: Option<bool>,
    /// Conditions that the driver must set before a pod with the device is bound.
    pub(super) binding_conditions: Vec<String>,
    /// Conditions with which the driver reports that the device cannot be used.
    pub(super) binding_failure_conditions: Vec<String>,
}

resource!(ResourceClaim, "resource.k8s.io", "resourceclaims", NamespaceResourceScope);
resource!(DeviceClass, "resource.k8s.io", "deviceclasses", ClusterResourceScope);
resource!(ResourceSlice, "resource.k8s.io", "resourceslices", ClusterResourceScope);

impl Request {
    /// The request, or each of its alternatives, with its full name: `REQUEST` or `REQUEST/ALTERNATIVE`.
    pub(super) fn exact(&self) -> Vec<(String, &Exact)> {
        let one = self.exactly.iter().map(|exact| (self.name.clone(), exact));
        let others = self.first_available.iter();
        one.chain(others.map(|other| (format!("{}/{}", self.name, other.name), &other.exact))).collect()
    }
}

impl Exact {
    /// Whether the request needs all devices that it selects.
    pub(super) fn needs_all(&self) -> bool {
        self.allocation_mode.as_deref() == Some("All")
    }
}

impl Counter {
    /// The amount in thousandths. 0 for a text that is not a quantity. The API server does not store such a text.
    pub(super) fn thousandths(&self) -> i128 {
        let amount = self.value.as_str().and_then(|text| Quantity::parse(text).ok());
        amount.map_or(0, Quantity::thousandths)
    }
}

impl Device {
    /// Whether several claims can use the device at the same time.
    pub(super) fn is_shared(&self) -> bool {
        self.allow_multiple_allocations == Some(true)
    }

    /// The attribute with this full name. Names without a domain belong to the driver.
    pub(super) fn attribute(&self, driver: &str, name: &str) -> Option<&Value> {
        self.attributes.get(name).or_else(|| {
            let (domain, short) = name.split_once('/')?;
            if domain == driver { self.attributes.get(short) } else { None }
        })
    }
}

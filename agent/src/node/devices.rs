//! Devices of device plugins in the status of the Node.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

/// Number of devices of a resource.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct DeviceCount {
    pub(crate) capacity: usize,
    /// Healthy devices.
    pub(crate) allocatable: usize,
}

/// Numbers of devices by resource.
pub(crate) type DeviceCounts = BTreeMap<String, DeviceCount>;

/// Sets the numbers of devices in the capacity and the allocatable resources of the node.
pub(super) fn add(
    counts: &DeviceCounts,
    capacity: &mut BTreeMap<String, Quantity>,
    allocatable: &mut BTreeMap<String, Quantity>,
) {
    for (name, count) in counts {
        capacity.insert(name.clone(), Quantity(count.capacity.to_string()));
        allocatable.insert(name.clone(), Quantity(count.allocatable.to_string()));
    }
}

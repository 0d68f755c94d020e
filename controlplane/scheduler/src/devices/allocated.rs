//! The index of the devices that are allocated to claims.

use std::collections::HashMap;

use serde_json::Value;

/// A device: driver, pool and name.
pub(super) type DeviceId = (String, String, String);

/// The devices in use. For each device it has the number of allocations by the node to which the allocation is
/// restricted, or by `None` for an allocation without such a node.
///
/// Slices of two nodes can have the same pool name. The node distinguishes their devices.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Allocated {
    users: HashMap<DeviceId, HashMap<Option<String>, usize>>,
}

impl Allocated {
    /// Adds the devices of an allocation.
    pub(super) fn add(&mut self, allocation: &Value) {
        let node = node_of(allocation);
        for device in devices_of(allocation) {
            *self.users.entry(device).or_default().entry(node.clone()).or_default() += 1;
        }
    }

    /// Removes the devices of an allocation that was added.
    pub(super) fn remove(&mut self, allocation: &Value) {
        let node = node_of(allocation);
        for device in devices_of(allocation) {
            let Some(nodes) = self.users.get_mut(&device) else { continue };
            if let Some(count) = nodes.get_mut(&node) {
                *count -= 1;
            }
            nodes.retain(|_, count| *count > 0);
            if nodes.is_empty() {
                self.users.remove(&device);
            }
        }
    }

    /// Whether a device of an allocation is not in use any more.
    pub(super) fn lacks_any_of(&self, allocation: &Value) -> bool {
        devices_of(allocation).any(|device| !self.users.contains_key(&device))
    }

    /// Whether a device is in use. `node` is the node of the device's slice, or `None` for devices of several nodes.
    pub(super) fn has(&self, device: &DeviceId, node: Option<&str>) -> bool {
        let Some(nodes) = self.users.get(device) else { return false };
        // The allocation of a node's device together with a device of several nodes is restricted to the node.
        node.is_none() || nodes.keys().any(|user| user.is_none() || user.as_deref() == node)
    }
}

/// The devices of an allocation, except devices with admin access.
fn devices_of(allocation: &Value) -> impl Iterator<Item = DeviceId> {
    let results = allocation.pointer("/devices/results").and_then(Value::as_array).into_iter().flatten();
    let text = |result: &Value, field: &str| result[field].as_str().unwrap_or_default().to_owned();
    results
        .filter(|result| result["adminAccess"] != true)
        .map(move |one| (text(one, "driver"), text(one, "pool"), text(one, "device")))
}

/// The node to which an allocation is restricted. `None` if it is not restricted to one node.
fn node_of(allocation: &Value) -> Option<String> {
    let terms = allocation.pointer("/nodeSelector/nodeSelectorTerms")?.as_array()?;
    let [term] = terms.as_slice() else { return None };
    let mut fields = term["matchFields"].as_array().into_iter().flatten();
    let field = fields.find(|field| field["key"] == "metadata.name" && field["operator"] == "In")?;
    let [name] = field["values"].as_array()?.as_slice() else { return None };
    name.as_str().map(str::to_owned)
}

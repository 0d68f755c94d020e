//! The index of the devices that are allocated to claims.

use std::collections::{BTreeMap, HashMap};

use serde_json::Value;

use super::capacity;

/// Identifies a device.
#[derive(Debug, PartialEq, Eq, Hash)]
pub(super) struct DeviceId {
    pub(super) driver: String,
    pub(super) pool: String,
    pub(super) name: String,
}

/// The devices in use. Each device has the number of its allocations by node. `None` counts the allocations that are
/// not restricted to one node.
///
/// Slices of two nodes can have the same pool name. The node distinguishes the devices of the two pools.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Allocated {
    /// Devices that one claim uses alone.
    users: HashMap<DeviceId, HashMap<Option<String>, usize>>,
    /// Devices that several claims share.
    shares: HashMap<DeviceId, HashMap<Option<String>, Shares>>,
}

/// The shares of a device.
#[derive(Debug, Default, PartialEq)]
struct Shares {
    /// Number of allocations by the share's id.
    ids: HashMap<String, usize>,
    /// Consumed amounts by the name of the capacity, in thousandths.
    consumed: BTreeMap<String, i128>,
}

/// A device or a share of a device in an allocation.
struct Use {
    device: DeviceId,
    /// Id of the share. `None` if the claim uses the device alone.
    share: Option<String>,
    /// Consumed amounts by the name of the capacity, in thousandths.
    consumed: Vec<(String, i128)>,
}

impl Allocated {
    /// Adds the devices of an allocation.
    pub(super) fn add(&mut self, allocation: &Value) {
        let node = node_of(allocation);
        for one in uses_of(allocation) {
            let Some(id) = one.share else {
                *self.users.entry(one.device).or_default().entry(node.clone()).or_default() += 1;
                continue;
            };
            let shares = self.shares.entry(one.device).or_default().entry(node.clone()).or_default();
            *shares.ids.entry(id).or_default() += 1;
            for (name, amount) in one.consumed {
                // Wrapping is safe: the later subtraction of the same amount undoes an overflow.
                let total = shares.consumed.entry(name).or_default();
                *total = total.wrapping_add(amount);
            }
        }
    }

    /// Removes the devices of an allocation that was added.
    pub(super) fn remove(&mut self, allocation: &Value) {
        let node = node_of(allocation);
        for one in uses_of(allocation) {
            match &one.share {
                Some(id) => self.remove_share(&one, id, &node),
                None => self.remove_user(&one.device, &node),
            }
        }
    }

    fn remove_user(&mut self, device: &DeviceId, node: &Option<String>) {
        let Some(nodes) = self.users.get_mut(device) else { return };
        if let Some(count) = nodes.get_mut(node) {
            *count -= 1;
        }
        nodes.retain(|_, count| *count > 0);
        if nodes.is_empty() {
            self.users.remove(device);
        }
    }

    fn remove_share(&mut self, used: &Use, id: &str, node: &Option<String>) {
        let Some(nodes) = self.shares.get_mut(&used.device) else { return };
        if let Some(shares) = nodes.get_mut(node) {
            if let Some(count) = shares.ids.get_mut(id) {
                *count -= 1;
                if *count == 0 {
                    shares.ids.remove(id);
                }
            }
            for (name, amount) in &used.consumed {
                if let Some(total) = shares.consumed.get_mut(name) {
                    *total = total.wrapping_sub(*amount);
                }
            }
            // Names in allocations are arbitrary. Names without an amount are removed, so that the map does not grow.
            shares.consumed.retain(|_, total| *total != 0);
        }
        nodes.retain(|_, shares| !shares.ids.is_empty());
        if nodes.is_empty() {
            self.shares.remove(&used.device);
        }
    }

    /// Whether a device or share of an allocation is not in use any more.
    pub(super) fn lacks_any_of(&self, allocation: &Value) -> bool {
        uses_of(allocation).any(|one| match &one.share {
            None => !self.users.contains_key(&one.device),
            Some(id) => {
                let mut nodes = self.shares.get(&one.device).into_iter().flat_map(|nodes| nodes.values());
                !nodes.any(|shares| shares.ids.contains_key(id))
            }
        })
    }

    /// Whether one claim uses the device alone. `node` is the node of the device's slice, or `None` for devices of
    /// several nodes.
    pub(super) fn has(&self, device: &DeviceId, node: Option<&str>) -> bool {
        let Some(nodes) = self.users.get(device) else { return false };
        nodes.keys().any(|user| counts(user.as_deref(), node))
    }

    /// Whether claims share the device. `node` as for [`Self::has`].
    pub(super) fn has_shares(&self, device: &DeviceId, node: Option<&str>) -> bool {
        let Some(nodes) = self.shares.get(device) else { return false };
        nodes.keys().any(|user| counts(user.as_deref(), node))
    }

    /// The amount of a capacity that the shares of a device consume, in thousandths. `node` as for [`Self::has`].
    pub(super) fn consumed(&self, device: &DeviceId, node: Option<&str>, capacity: &str) -> i128 {
        let nodes = self.shares.get(device).into_iter().flatten();
        let own = nodes.filter(|(user, _)| counts(user.as_deref(), node));
        let amounts = own.filter_map(|(_, shares)| shares.consumed.get(capacity));
        amounts.fold(0, |sum: i128, amount| sum.saturating_add(*amount))
    }
}

/// Whether an allocation that is restricted to the node `user` may use a device of a slice of `node`.
fn counts(user: Option<&str>, node: Option<&str>) -> bool {
    // An allocation can have a device of one node and a device of several nodes. The allocation is then restricted to
    // the one node.
    node.is_none() || user.is_none() || user == node
}

/// The devices of an allocation, except devices with admin access.
fn uses_of(allocation: &Value) -> impl Iterator<Item = Use> {
    let results = allocation.pointer("/devices/results").and_then(Value::as_array).into_iter().flatten();
    let text = |result: &Value, field: &str| result[field].as_str().unwrap_or_default().to_owned();
    results.filter(|result| result["adminAccess"] != true).map(move |one| Use {
        device: DeviceId { driver: text(one, "driver"), pool: text(one, "pool"), name: text(one, "device") },
        share: one["shareID"].as_str().map(str::to_owned),
        consumed: consumed_of(&one["consumedCapacity"]),
    })
}

/// Amounts by name, in thousandths. A negative amount counts as 0. Otherwise other claims could get more than the
/// device has.
fn consumed_of(amounts: &Value) -> Vec<(String, i128)> {
    let amounts = amounts.as_object().into_iter().flatten();
    let read = |amount: &Value| capacity::amount(amount).map(|amount| amount.thousandths().max(0));
    amounts.filter_map(|(name, amount)| Some((name.clone(), read(amount)?))).collect()
}

/// The node to which an allocation is restricted. `None` if the allocation is not restricted to one node.
fn node_of(allocation: &Value) -> Option<String> {
    let terms = allocation.pointer("/nodeSelector/nodeSelectorTerms")?.as_array()?;
    let [term] = terms.as_slice() else { return None };
    let mut fields = term["matchFields"].as_array().into_iter().flatten();
    let field = fields.find(|field| field["key"] == "metadata.name" && field["operator"] == "In")?;
    let [name] = field["values"].as_array()?.as_slice() else { return None };
    name.as_str().map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_names_of_removed_shares_are_not_kept() {
        let allocation = |share: &str, capacity: &str| {
            let result = json!({"driver": "d", "pool": "p", "device": "card", "shareID": share,
                "consumedCapacity": {capacity: "1"}});
            json!({"devices": {"results": [result]}})
        };
        let (mut allocated, mut expected) = (Allocated::default(), Allocated::default());
        allocated.add(&allocation("a", "memory"));
        expected.add(&allocation("a", "memory"));
        allocated.add(&allocation("b", "cores"));
        assert_ne!(allocated, expected);
        allocated.remove(&allocation("b", "cores"));
        assert_eq!(allocated, expected);
    }
}

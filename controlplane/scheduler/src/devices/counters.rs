//! Counters that the devices of a pool share. Source: `checkAvailableCounters` of
//! `dynamic-resource-allocation/structured`.

use std::collections::HashMap;

use super::allocated::{Allocated, DeviceId};
use super::object::{Device, Slice};
use super::slices::node_of;

/// Identifies a counter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct CounterId<'a> {
    driver: &'a str,
    pool: &'a str,
    /// Name of the counter set.
    set: &'a str,
    name: &'a str,
}

/// The free amounts of the counters of a node's pools, in thousandths. The allocated and the chosen devices are
/// subtracted.
#[derive(Debug, Default)]
pub(super) struct Counters<'a> {
    left: HashMap<CounterId<'a>, i128>,
}

impl<'a> Counters<'a> {
    /// Adds the counters of a pool. `slices` are all slices of its newest generation, including slices of other nodes.
    pub(super) fn add_pool(&mut self, slices: &[&'a Slice], in_use: &Allocated) {
        for &slice in slices {
            let spec = &slice.spec;
            for set in &spec.shared_counters {
                let id = |name: &'a String| CounterId {
                    driver: &spec.driver,
                    pool: &spec.pool.name,
                    set: &set.name,
                    name,
                };
                self.left
                    .extend(set.counters.iter().map(|(name, counter)| (id(name), counter.thousandths())));
            }
        }
        for &slice in slices {
            for device in slice.spec.devices.iter().filter(|device| !device.consumes_counters.is_empty()) {
                let spec = &slice.spec;
                let id = DeviceId {
                    driver: spec.driver.clone(),
                    pool: spec.pool.name.clone(),
                    name: device.name.clone(),
                };
                // All claims that share a device consume its counters only once.
                if in_use.has(&id, node_of(slice)) || in_use.has_shares(&id, node_of(slice)) {
                    self.take(slice, device);
                }
            }
        }
    }

    /// Whether the counters suffice for a device.
    pub(super) fn suffice(&self, slice: &Slice, device: &Device) -> bool {
        consumed(slice, device)
            .all(|(counter, amount)| self.left.get(&counter).is_some_and(|left| *left >= amount))
    }

    /// Subtracts the amounts that a device consumes.
    pub(super) fn take(&mut self, slice: &'a Slice, device: &'a Device) {
        for (counter, amount) in consumed(slice, device) {
            if let Some(left) = self.left.get_mut(&counter) {
                *left -= amount;
            }
        }
    }

    /// Undoes [`Self::take`] for a device.
    pub(super) fn release(&mut self, slice: &'a Slice, device: &'a Device) {
        for (counter, amount) in consumed(slice, device) {
            if let Some(left) = self.left.get_mut(&counter) {
                *left += amount;
            }
        }
    }
}

/// The counters that a device consumes, with the amounts in thousandths.
fn consumed<'b>(slice: &'b Slice, device: &'b Device) -> impl Iterator<Item = (CounterId<'b>, i128)> {
    let spec = &slice.spec;
    device.consumes_counters.iter().flat_map(move |consumption| {
        let (driver, pool, set) =
            (spec.driver.as_str(), spec.pool.name.as_str(), consumption.counter_set.as_str());
        let counters = consumption.counters.iter();
        counters.map(move |(name, counter)| (CounterId { driver, pool, set, name }, counter.thousandths()))
    })
}

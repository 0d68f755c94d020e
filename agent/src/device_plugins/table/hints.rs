//! Topology hints for devices.

use std::collections::{BTreeMap, BTreeSet};

use coracle_values::CollectMap;

use super::super::choose::{DeviceHint, DeviceRequest, Devices, HintInputs, hints};
use super::{Owner, Resource, Table, own};

// === impl Table ===

impl Table {
    /// All healthy devices, by resource.
    pub(in crate::device_plugins) fn allocatable(&self) -> BTreeMap<String, Devices> {
        let devices = |resource: &Resource| resource.healthy().map(own).collect_map();
        self.resources.iter().map(|(name, resource)| (name.clone(), devices(resource))).collect_map()
    }

    /// Topology hints for a container's request on a machine with these NUMA nodes. None means no preference.
    pub(in crate::device_plugins) fn hints(
        &self,
        owner: Owner<'_>,
        want: &DeviceRequest,
        machine: &[u32],
    ) -> Option<Vec<DeviceHint>> {
        let all = self.all(&want.resource)?;
        let none = BTreeSet::new();
        let inputs = match self.allocation(owner, &want.resource) {
            // As upstream, the container keeps its devices, so the hints are for these devices only.
            Some(allocation) => HintInputs { all: &all, free: &allocation.devices, reusable: &none },
            None => {
                let free = self.free(&want.resource);
                return hints(
                    want.count,
                    machine,
                    HintInputs { all: &all, free: &free, reusable: &want.reusable },
                );
            }
        };
        hints(want.count, machine, inputs)
    }

    /// Topology hints for a number of devices of a pod. The pod keeps the devices that it has. As upstream, if these
    /// devices suffice, the hints are for these devices only.
    pub(in crate::device_plugins) fn pod_hints(
        &self,
        uid: &str,
        resource: &str,
        count: usize,
        machine: &[u32],
    ) -> Option<Vec<DeviceHint>> {
        let all = self.all(resource)?;
        let containers = self.pods.get(uid).into_iter().flat_map(|pod| pod.containers.values());
        let held = containers.filter_map(|resources| resources.get(resource));
        let mut free: Devices = held.flat_map(|allocation| allocation.devices.clone()).collect_map();
        if free.len() < count {
            free.extend(self.free(resource));
        }
        hints(count, machine, HintInputs { all: &all, free: &free, reusable: &BTreeSet::new() })
    }

    /// All devices of a resource. None if the resource is unknown or removed.
    fn all(&self, name: &str) -> Option<Devices> {
        let resource = self.resources.get(name).filter(|resource| !resource.is_removed)?;
        Some(resource.devices.iter().map(own).collect_map())
    }
}

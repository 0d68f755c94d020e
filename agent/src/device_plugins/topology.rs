//! Devices near to NUMA nodes, for the topology manager: hints, and reservations at the admission of a pod.

use std::collections::BTreeMap;

use coracle_values::CollectMap;
use k8s_openapi::api::core::v1::{Container, Pod};

use super::DevicePlugins;
use super::choose::{DeviceHint, DeviceRequest};
use super::requests;
use super::table::{Owner, Refusal, Step, Table};
use crate::topology::numa_mask::NumaMask;
use crate::topology::{AllocationError, Hint, HintProvider, Hints};

/// Device plugins as a provider of topology hints.
pub(crate) struct AlignedDevices {
    plugins: DevicePlugins,
    /// NUMA nodes of the machine.
    machine: Vec<u32>,
}

// === impl AlignedDevices ===

impl AlignedDevices {
    /// Devices on a machine with these NUMA nodes.
    pub(crate) fn new(plugins: DevicePlugins, machine: Vec<u32>) -> Self {
        Self { plugins, machine }
    }
}

impl HintProvider for AlignedDevices {
    fn container_hints(&self, pod: &Pod, container: &Container) -> Hints {
        converted(self.plugins.hints(pod, container, &self.machine))
    }

    fn pod_hints(&self, pod: &Pod) -> Hints {
        converted(self.plugins.pod_hints(pod, &self.machine))
    }

    fn allocate(&self, pod: &Pod, container: &Container, affinity: Hint) -> Result<(), AllocationError> {
        // Without an affinity, nothing is reserved: the plugin may choose the devices later, before the pod's sandbox
        // is made.
        let Some(nodes) = affinity.nodes else { return Ok(()) };
        let mask = nodes.nodes().fold(0, |mask, node| mask | (1_u64 << node));
        self.plugins.reserve(pod, container, Some(mask)).map_err(AllocationError::Unexpected)
    }

    fn release(&self, uid: &str) {
        self.plugins.cancel(uid);
    }

    fn retain(&self, keep: &dyn Fn(&str) -> bool) {
        let pods = self.plugins.pods();
        pods.iter().filter(|uid| !keep(uid)).for_each(|uid| self.plugins.cancel(uid));
    }
}

fn converted(hints: BTreeMap<String, Vec<DeviceHint>>) -> Hints {
    let nodes = |mask: u64| NumaMask::of((0..64).filter(move |node| mask & (1_u64 << node) != 0));
    let one = |hint: DeviceHint| Hint { nodes: Some(nodes(hint.nodes)), preferred: hint.preferred };
    hints.into_iter().map(|(name, hints)| (name, hints.into_iter().map(one).collect())).collect_map()
}

// === impl DevicePlugins ===

impl DevicePlugins {
    /// Reserves devices near to NUMA nodes, unless the container has devices. Bit n of the affinity is node n.
    /// [`Self::allocate`] gives the pod these devices, or devices that the plugin prefers and that are as near to the
    /// nodes.
    ///
    /// # Errors
    /// When there are too few devices. The message is upstream's.
    fn reserve(&self, pod: &Pod, container: &Container, affinity: Option<u64>) -> Result<(), String> {
        self.reserve_in(&mut self.state().table, pod, container, affinity)
    }

    /// Checks that the devices of a pod are free. Nothing stays reserved.
    ///
    /// # Errors
    /// When there are too few devices. The message is upstream's.
    pub(crate) fn check_free(&self, pod: &Pod) -> Result<(), String> {
        // The lock is held until the end of the reservations, so that the allocation for another pod does not fail
        // because of them.
        let mut state = self.state();
        let spec = pod.spec.iter();
        let mut all = spec.flat_map(|spec| spec.init_containers.iter().flatten().chain(&spec.containers));
        let reserved = all.try_for_each(|container| self.reserve_in(&mut state.table, pod, container, None));
        state.table.cancel(pod.metadata.uid.as_deref().unwrap_or_default());
        reserved
    }

    fn reserve_in(
        &self,
        table: &mut Table,
        pod: &Pod,
        container: &Container,
        affinity: Option<u64>,
    ) -> Result<(), String> {
        let (uid, requests) = (pod.metadata.uid.as_deref().unwrap_or_default(), requests::of_pod(pod));
        let owner = Owner { uid, container: &container.name };
        for (resource, count) in requests::of_container(pod, container) {
            if !table.manages(&resource) {
                continue;
            }
            let reusable = table.reusable(owner, &resource, &requests);
            let want = DeviceRequest { resource, count, reusable, affinity };
            let step = table.step(owner, &want, &self.shared.boot);
            let reserved = match step {
                Ok(Step::Choose(_)) => table.reserve(owner, &want, &[]).map(drop),
                Ok(Step::Done | Step::Call(_)) => Ok(()),
                Err(refusal) => Err(refusal),
            };
            match reserved {
                // The later allocation waits for the devices that the pod had before the reboot.
                Ok(()) | Err(Refusal::Wait(_)) => {}
                Err(Refusal::Reject(message)) => return Err(message),
            }
        }
        Ok(())
    }

    /// Frees the devices of a pod that [`Self::reserve`] has reserved.
    fn cancel(&self, uid: &str) {
        self.state().table.cancel(uid);
    }

    /// Topology hints for the devices of a container, by resource, on a machine with these NUMA nodes. Resources whose
    /// devices have no topology are left out, because all nodes are equally good for them. A list is empty if the
    /// devices do not suffice.
    fn hints(&self, pod: &Pod, container: &Container, machine: &[u32]) -> BTreeMap<String, Vec<DeviceHint>> {
        let uid = pod.metadata.uid.as_deref().unwrap_or_default();
        let owner = Owner { uid, container: &container.name };
        let state = self.state();
        let requests = requests::of_pod(pod);
        let numbers = requests::of_container(pod, container).into_iter();
        let hints = numbers.filter_map(|(resource, count)| {
            let reusable = state.table.reusable(owner, &resource, &requests);
            let want = DeviceRequest { resource: resource.clone(), count, reusable, affinity: None };
            Some((resource, state.table.hints(owner, &want, machine)?))
        });
        hints.collect_map()
    }

    /// Topology hints for the devices of all containers of a pod, in the form of [`Self::hints`].
    fn pod_hints(&self, pod: &Pod, machine: &[u32]) -> BTreeMap<String, Vec<DeviceHint>> {
        let uid = pod.metadata.uid.as_deref().unwrap_or_default();
        let state = self.state();
        let numbers = requests::at_once(&requests::of_pod(pod)).into_iter();
        let hints = numbers.filter_map(|(resource, count)| {
            let found = state.table.pod_hints(uid, &resource, count, machine)?;
            Some((resource, found))
        });
        hints.collect_map()
    }
}

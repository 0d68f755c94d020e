//! Reports of devices: the health in the statuses of pods, and the lists of the pod resources API.

use k8s_openapi::api::core::v1::PodStatus;

use super::table::Owner;
use super::{DevicePlugins, ResourceDevices};

impl DevicePlugins {
    /// Reports the health of the pod's devices in the statuses of its containers, except init containers, as upstream.
    pub(crate) fn report_health(&self, uid: &str, status: &mut PodStatus) {
        let state = self.state();
        if state.table.pod(uid).is_none() {
            return;
        }
        for container in status.container_statuses.iter_mut().flatten() {
            let health = state.table.health(Owner { uid, container: &container.name });
            if !health.is_empty() {
                let reported = container.allocated_resources_status.get_or_insert_default();
                reported.retain(|old| health.iter().all(|new| new.name != old.name));
                reported.extend(health);
            }
        }
    }

    /// The devices of a container, by resource.
    pub(crate) fn of_container(&self, uid: &str, container: &str) -> Vec<ResourceDevices> {
        let state = self.state();
        let pod = state.table.pod(uid).and_then(|pod| pod.containers.get(container));
        pod.into_iter()
            .flatten()
            .map(|(name, allocation)| (name.clone(), allocation.devices.clone()))
            .collect()
    }

    /// All healthy devices, by resource.
    pub(crate) fn allocatable(&self) -> Vec<ResourceDevices> {
        self.state().table.allocatable().into_iter().collect()
    }
}

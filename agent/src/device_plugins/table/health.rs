//! The health of devices, for the status of pods.

use k8s_openapi::api::core::v1::{ResourceHealth, ResourceStatus};

use super::{Allocation, Owner, Table};

/// Maximum devices of one resource of a container in the status of the pod. The API server limits the size of a pod.
pub(super) const HEALTH_MAX: usize = 1000;

// === impl Table ===

impl Table {
    /// The health of a container's devices, for its status. If the container has more than [`HEALTH_MAX`] devices of a
    /// resource, only unhealthy devices are reported.
    pub(in crate::device_plugins) fn health(&self, owner: Owner<'_>) -> Vec<ResourceStatus> {
        let container = self.pods.get(owner.uid).and_then(|pod| pod.containers.get(owner.container));
        let one = |(name, allocation): (&String, &Allocation)| {
            let known = self.resources.get(name);
            let device = |id: &String| known.and_then(|resource| resource.devices.get(id));
            let is_short = allocation.devices.len() <= HEALTH_MAX;
            let all =
                allocation.devices.keys().map(|id| (id, device(id).is_none_or(|device| device.is_healthy)));
            let shown = all.filter(|(_, is_healthy)| is_short || !is_healthy).take(HEALTH_MAX);
            let resources = shown.map(|(id, is_healthy)| {
                let health = if is_healthy { "Healthy" } else { "Unhealthy" };
                ResourceHealth {
                    health: Some(health.to_owned()),
                    resource_id: id.clone(),
                    ..ResourceHealth::default()
                }
            });
            ResourceStatus { name: name.clone(), resources: Some(resources.collect()) }
        };
        container.into_iter().flatten().map(one).collect()
    }
}

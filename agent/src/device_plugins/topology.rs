//! Devices near to NUMA nodes, for the topology manager: hints, and reservations at the admission of a pod.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Container, Pod};

use super::DevicePlugins;
use super::choose::{DeviceHint, Want};
use super::requests;
use super::table::{Place, Refusal, Step};

#[allow(dead_code, reason = "for the topology manager")]
impl DevicePlugins {
    /// Reserves the devices of one container near to NUMA nodes (bit n of the affinity is node n), if it has none. The
    /// pod gets them by [`Self::allocate`], without asking the plugin for its preference.
    ///
    /// # Errors
    /// When there are too few devices. The message is upstream's.
    pub(crate) fn reserve(
        &self,
        pod: &Pod,
        container: &Container,
        affinity: Option<u64>,
    ) -> Result<(), String> {
        let (uid, requests) = (pod.metadata.uid.as_deref().unwrap_or_default(), requests::of_pod(pod));
        let place = Place { uid, container: &container.name };
        let mut state = self.state();
        for (resource, count) in requests::of_container(pod, container) {
            if !state.table.manages(&resource) {
                continue;
            }
            let reusable = state.table.reusable(place, &resource, &requests);
            let want = Want { resource, count, reusable, affinity };
            let step = state.table.step(place, &want, &self.shared.boot);
            let reserved = match step {
                Ok(Step::Choose(_)) => state.table.reserve(place, &want, &[]).map(drop),
                Ok(Step::Done | Step::Call(_)) => Ok(()),
                Err(refusal) => Err(refusal),
            };
            match reserved {
                // The allocation waits for the devices of the earlier boot.
                Ok(()) | Err(Refusal::Wait(_)) => {}
                Err(Refusal::Reject(message)) => return Err(message),
            }
        }
        Ok(())
    }

    /// Frees the devices of a pod that [`Self::reserve`] has reserved.
    pub(crate) fn cancel(&self, uid: &str) {
        self.state().table.cancel(uid);
    }

    /// Topology hints for the devices of a container, by resource, on a machine with these NUMA nodes. Resources whose
    /// devices have no topology are left out: every node is as good. An empty list: the devices do not suffice.
    pub(crate) fn hints(
        &self,
        pod: &Pod,
        container: &Container,
        machine: &[u32],
    ) -> BTreeMap<String, Vec<DeviceHint>> {
        let uid = pod.metadata.uid.as_deref().unwrap_or_default();
        let place = Place { uid, container: &container.name };
        let state = self.state();
        let requests = requests::of_pod(pod);
        let numbers = requests::of_container(pod, container).into_iter();
        let hints = numbers.filter_map(|(resource, count)| {
            let reusable = state.table.reusable(place, &resource, &requests);
            let want = Want { resource: resource.clone(), count, reusable, affinity: None };
            Some((resource, state.table.hints(place, &want, machine)?))
        });
        hints.collect()
    }
}

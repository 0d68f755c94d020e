//! Check of CPU, memory, ephemeral storage, huge pages, extended resources and the number of pods.

use std::collections::{BTreeMap, BTreeSet};

use coracle_values::CollectMap;
use coracle_values::names::is_extended_resource;
use coracle_values::pod_resources::PodResources;
use coracle_values::quantity::value_of;
use k8s_openapi::api::core::v1::{Pod, PodSpec};

use super::input::{AdmissionInput, refuse};
use crate::cgroup::resources::pod_requests;
use crate::pod::state::Verdict;

const EPHEMERAL_STORAGE: &str = "ephemeral-storage";
/// Prefix of the resources of huge pages. The size of the pages follows.
const HUGE_PAGES: &str = "hugepages-";

/// A resource of which the node has too little for the pod. CPU is in millicores, memory in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Shortage {
    pub(crate) name: String,
    requested: i128,
    used: i128,
    capacity: i128,
}

/// The resources of which the node has too little for the pod, in upstream's order.
pub(super) fn shortages(input: &AdmissionInput<'_>) -> Vec<Shortage> {
    let used = input.used.requested;
    let wanted = pod_requests(input.pod);
    let pods = i64::try_from(input.used.pods).unwrap_or(i64::MAX);
    let max_pods = i64::try_from(input.max_pods).unwrap_or(i64::MAX);
    let mut found: Vec<Shortage> = [
        ("pods", 1, pods, max_pods),
        ("cpu", wanted.cpu_millis, used.cpu_millis, input.allocatable.cpu_millis),
        ("memory", wanted.memory, used.memory, input.allocatable.memory),
    ]
    .into_iter()
    .filter_map(|(name, requested, used, capacity)| {
        let name = name.to_owned();
        Shortage { name, requested: requested.into(), used: used.into(), capacity: capacity.into() }
            .if_short()
    })
    .collect();
    let of_node = input.node.and_then(|node| node.status.as_ref()?.allocatable.as_ref());
    let mut others: Vec<(String, i128)> =
        other_requests(input.pod).into_iter().filter(|(name, _)| !input.managed.contains(name)).collect();
    others.sort_by_key(|(name, _)| name != EPHEMERAL_STORAGE);
    for (name, requested) in others {
        let capacity = match of_node.and_then(|all| all.get(&name)) {
            Some(capacity) if is_extended_resource(&name) => value_of(capacity),
            // As upstream, an extended resource that the node does not have is ignored: it may belong to the cluster.
            None if is_extended_resource(&name) => continue,
            // As upstream (`fitsRequest` of the scheduler's plugin NodeResourcesFit), an unknown amount counts as 0.
            _ => input.of_machine.get(&name).map_or(0, value_of),
        };
        let used = input.used.others.get(&name).copied().unwrap_or_default();
        found.extend(Shortage { name, requested, used, capacity: capacity.into() }.if_short());
    }
    found
}

// === impl Shortage ===

impl Shortage {
    /// None if the request fits.
    fn if_short(self) -> Option<Self> {
        let fits = self.requested <= 0 || self.used + self.requested <= self.capacity;
        (!fits).then_some(self)
    }

    /// The amount that other pods must release.
    pub(crate) fn missing(&self) -> i128 {
        self.used + self.requested - self.capacity
    }

    /// A shortage of this amount.
    #[cfg(test)]
    pub(crate) fn of_amount(name: &str, missing: i128) -> Self {
        Self { name: name.to_owned(), requested: missing, used: 0, capacity: 0 }
    }

    /// The rejection of the pod.
    pub(super) fn rejection(&self) -> Verdict {
        let Self { name, requested, used, capacity } = self;
        let message = format!(
            "Pod was rejected: Node didn't have enough resource: {name}, requested: {requested}, used: {used}, \
             capacity: {capacity}"
        );
        refuse(&format!("OutOf{name}"), message)
    }
}

/// The ephemeral storage and huge pages, in bytes, and the extended resources of device plugins, in units, that a pod
/// requests, by name.
pub(crate) fn other_requests(pod: &Pod) -> BTreeMap<String, i128> {
    let Some(spec) = &pod.spec else { return BTreeMap::new() };
    let requests = match without_claimed(pod, spec) {
        Some(spec) => PodResources::from(&spec).requests(),
        None => PodResources::from(spec).requests(),
    };
    let is_counted = |name: &str| is_extended_resource(name) || name.starts_with(HUGE_PAGES);
    let others = requests.others.into_iter().filter(|(name, _)| is_counted(name));
    let storage = (EPHEMERAL_STORAGE.to_owned(), requests.ephemeral_storage);
    others.chain([storage]).filter(|(_, amount)| *amount > 0).collect_map()
}

/// The spec without the extended resources for which the scheduler has allocated devices in a ResourceClaim. `None` if
/// there are none. Source: `removeMissingExtendedResources`.
fn without_claimed(pod: &Pod, spec: &PodSpec) -> Option<PodSpec> {
    let status = pod.status.as_ref()?.extended_resource_claim_status.as_ref()?;
    let mappings = status.request_mappings.iter();
    let claimed: BTreeSet<(&str, &str)> =
        mappings.map(|one| (one.container_name.as_str(), one.resource_name.as_str())).collect();
    let mut spec = spec.clone();
    let inits = spec.init_containers.iter_mut().flatten();
    for container in inits.chain(&mut spec.containers) {
        if let Some(requests) = container.resources.as_mut().and_then(|resources| resources.requests.as_mut())
        {
            requests.retain(|name, _| !claimed.contains(&(container.name.as_str(), name.as_str())));
        }
    }
    Some(spec)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn resources_with_devices_of_a_claim_are_not_those_of_a_device_plugin() {
        let container = |name: &str| {
            let requests = json!({"example.com/gpu": "2", "example.com/fpga": "1"});
            json!({"name": name, "resources": {"requests": requests}})
        };
        let mut pod = json!({"metadata": {}, "spec": {"containers": [container("a"), container("b")]}});
        let requests =
            |pod: &serde_json::Value| other_requests(&serde_json::from_value(pod.clone()).unwrap());
        let gpus = |pod: &serde_json::Value| requests(pod).get("example.com/gpu").copied();
        assert_eq!(gpus(&pod), Some(4));
        let mapping = json!({"containerName": "a", "requestName": "r", "resourceName": "example.com/gpu"});
        let status = json!({"resourceClaimName": "c", "requestMappings": [mapping]});
        pod["status"] = json!({"extendedResourceClaimStatus": status});
        assert_eq!(gpus(&pod), Some(2));
        assert_eq!(requests(&pod)["example.com/fpga"], 2);
    }
}

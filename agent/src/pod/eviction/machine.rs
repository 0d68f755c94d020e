//! Selection of pods to evict for a lack of memory or process IDs, with the reason. Pure.
//!
//! Source: `pkg/kubelet/eviction` (`rankMemoryPressure`, `rankPIDPressure`, `evictionMessage`).

use std::cmp::Reverse;
use std::time::Duration;

use coracle_values::quantity::value_of;
use k8s_openapi::api::core::v1::Pod;

use super::plan::{ContainerUsage, MeasuredPod, is_critical, priority, quantity, shortage_message};
use crate::cgroup::PodUsage;
use crate::cgroup::resources::pod_requests;
use crate::node::{MachineResource, MachineShortage, SoftThresholds};

/// Interval of the rounds while memory or process IDs are short.
const SHORTAGE_INTERVAL: Duration = Duration::from_secs(1);
/// Interval of the rounds while little more than a threshold is available, and the amount is falling.
const NEAR_INTERVAL: Duration = Duration::from_secs(2);

/// The results of the last round that decide when the next round starts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Urgency {
    /// Memory or process IDs are short, or an evicted pod is ending.
    pub(super) is_short: bool,
    /// Little more than a threshold of memory or process IDs is available, and the amount is falling.
    pub(super) is_near: bool,
    /// Memory or process IDs are short, but no pod can be evicted.
    pub(super) is_unrelieved: bool,
}

// === impl Urgency ===

impl Urgency {
    /// The time until the next round: the shorter of the interval for this urgency and `other`, the interval of other
    /// measurements. None if the next round starts with the next renewal of the lease. If no pod can be evicted, the
    /// urgency has no interval, because faster rounds would only use CPU.
    pub(super) fn interval(self, other: Option<Duration>) -> Option<Duration> {
        let own = match self {
            Self { is_unrelieved: true, .. } => None,
            Self { is_short: true, .. } => Some(SHORTAGE_INTERVAL),
            Self { is_near: true, .. } => Some(NEAR_INTERVAL),
            Self { is_short: false, is_near: false, is_unrelieved: false } => None,
        };
        [own, other].into_iter().flatten().min()
    }

    /// Whether a notification that tasks wait for memory starts a round. Not needed if rounds are already frequent, or
    /// if no pod can be evicted.
    pub(super) fn follows_stalls(self) -> bool {
        !self.is_short && !self.is_unrelieved
    }
}

/// The pod to evict first. For memory, pods above their request are first, then the lowest priority, then the largest
/// excess over the request. For process IDs the lowest priority is first, then the largest usage. Critical pods, and
/// pods that use nothing, are excluded.
pub(super) fn first(
    pods: &[MeasuredPod<PodUsage>],
    resource: MachineResource,
) -> Option<&MeasuredPod<PodUsage>> {
    let candidates = pods.iter().filter(|one| !is_critical(&one.pod) && of(one.usage, resource) > 0);
    candidates.min_by_key(|MeasuredPod { pod, usage }| {
        let used = i64::try_from(of(*usage, resource)).unwrap_or(i64::MAX);
        match resource {
            MachineResource::Memory => {
                let requested = pod_requests(pod).memory;
                (used <= requested, priority(pod), Reverse(used.saturating_sub(requested)))
            }
            // Process IDs cannot be requested.
            MachineResource::Pids => (false, priority(pod), Reverse(used)),
        }
    })
}

/// The message of an eviction. `containers` has the memory of the pod's containers by name, in bytes.
pub(super) fn message(pod: &Pod, containers: &[(String, u64)], shortage: MachineShortage) -> String {
    let name = name_of(shortage.resource);
    match shortage.resource {
        MachineResource::Memory => {
            let containers = containers.iter().map(|(container, used)| {
                let requested = memory_request(pod, container);
                ContainerUsage { container, used: *used, requested }
            });
            shortage_message(name, &shortage, quantity, containers)
        }
        MachineResource::Pids => {
            shortage_message(name, &shortage, |pids| pids.to_string(), std::iter::empty())
        }
    }
}

/// Name of the resource in messages.
pub(super) fn name_of(resource: MachineResource) -> &'static str {
    match resource {
        MachineResource::Memory => "memory",
        MachineResource::Pids => "pids",
    }
}

/// The kubelet's signal of a shortage.
pub(super) fn signal_of(resource: MachineResource) -> &'static str {
    match resource {
        MachineResource::Memory => "memory.available",
        MachineResource::Pids => "pid.available",
    }
}

/// Grace period of the soft threshold of a resource.
pub(super) fn grace_period(soft: &SoftThresholds, resource: MachineResource) -> Duration {
    match resource {
        MachineResource::Memory => soft.memory_available.grace,
        MachineResource::Pids => soft.pid_available.grace,
    }
}

fn of(usage: PodUsage, resource: MachineResource) -> u64 {
    match resource {
        MachineResource::Memory => usage.memory,
        MachineResource::Pids => usage.pids,
    }
}

/// Bytes of memory that a container requests.
fn memory_request(pod: &Pod, container: &str) -> i64 {
    let Some(spec) = &pod.spec else { return 0 };
    let mut all = spec.containers.iter().chain(spec.init_containers.iter().flatten());
    let resources = all.find(|one| one.name == container).and_then(|one| one.resources.as_ref());
    let requests = resources.and_then(|resources| resources.requests.as_ref());
    requests.and_then(|requests| requests.get("memory")).map_or(0, value_of)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::json;

    use super::*;

    const MI: u64 = 1 << 20;

    /// A pod with a priority, and a request in MiB.
    fn pod(name: &str, priority: i32, request: u64) -> Arc<Pod> {
        let resources = json!({"requests": {"memory": format!("{request}Mi")}});
        let container = json!({"name": "a", "resources": resources});
        let pod =
            json!({"metadata": {"name": name}, "spec": {"priority": priority, "containers": [container]}});
        Arc::new(serde_json::from_value(pod).unwrap())
    }

    fn usage(mebibytes: u64, pids: u64) -> PodUsage {
        PodUsage { memory: mebibytes * MI, pids }
    }

    /// The names of the pods in the order of their eviction.
    fn order(pods: Vec<(Arc<Pod>, PodUsage)>, resource: MachineResource) -> Vec<String> {
        let mut pods: Vec<_> = pods.into_iter().map(|(pod, usage)| MeasuredPod { pod, usage }).collect();
        let mut order = Vec::new();
        while let Some(next) = first(&pods, resource) {
            let at = pods.iter().position(|pod| std::ptr::eq(pod, next)).unwrap();
            order.push(pods.remove(at).pod.metadata.name.clone().unwrap());
        }
        order
    }

    #[test]
    fn memory_is_taken_from_pods_above_their_request_then_by_priority_then_by_excess() {
        let pods = vec![
            (pod("within", -5, 100), usage(100, 1)),
            (pod("important", 10, 1), usage(500, 1)),
            (pod("small", 5, 1), usage(10, 1)),
            (pod("large", 5, 50), usage(70, 1)),
            (pod("critical", 2_000_000_000, 1), usage(900, 1)),
            (pod("ended", -9, 0), usage(0, 0)),
        ];
        assert_eq!(order(pods, MachineResource::Memory), ["large", "small", "important", "within"]);
    }

    #[test]
    fn process_ids_are_taken_by_priority_then_by_number() {
        let pods = vec![
            (pod("important", 10, 0), usage(1, 900)),
            (pod("few", 0, 0), usage(900, 2)),
            (pod("many", 0, 0), usage(1, 300)),
            (pod("critical", 2_000_001_000, 0), usage(1, 9000)),
        ];
        assert_eq!(order(pods, MachineResource::Pids), ["many", "few", "important"]);
    }

    #[test]
    fn the_message_names_the_containers_above_their_request() {
        let shortage =
            MachineShortage { resource: MachineResource::Memory, threshold: 100 * MI, available: 90 << 10 };
        let containers = [("a".to_owned(), 7 * MI), ("b".to_owned(), 3 * MI)];
        assert_eq!(
            message(&pod("p", 0, 5), &containers, shortage),
            "The node was low on resource: memory. Threshold quantity: 100Mi, available: 90Ki. Container a was using \
             7Mi, request is 5Mi, has larger consumption of memory. Container b was using 3Mi, request is 0, has larger \
             consumption of memory. "
        );
        assert_eq!(
            message(&pod("p", 0, 7), &containers[..1], shortage),
            "The node was low on resource: memory. Threshold quantity: 100Mi, available: 90Ki. "
        );
        let pids = MachineShortage { resource: MachineResource::Pids, threshold: 1024, available: 5 };
        assert_eq!(
            message(&pod("p", 0, 5), &containers, pids),
            "The node was low on resource: pids. Threshold quantity: 1024, available: 5. "
        );
    }

    #[test]
    fn rounds_are_fast_only_while_an_eviction_can_help() {
        let ten = Some(Duration::from_secs(10));
        let urgency = |is_short, is_near, is_unrelieved| Urgency { is_short, is_near, is_unrelieved };
        assert_eq!(urgency(false, false, false).interval(None), None);
        assert_eq!(urgency(false, false, false).interval(ten), ten);
        assert_eq!(urgency(false, true, false).interval(ten), Some(NEAR_INTERVAL));
        assert_eq!(urgency(true, true, false).interval(None), Some(SHORTAGE_INTERVAL));
        let disk = Some(Duration::from_millis(900));
        assert_eq!(urgency(true, true, false).interval(disk), disk, "the disk fills up at the same time");
        assert!(urgency(false, true, false).follows_stalls() && !urgency(true, true, true).follows_stalls());
        assert_eq!(
            (urgency(true, true, true).interval(ten), urgency(true, true, true).interval(None)),
            (ten, None)
        );
    }
}

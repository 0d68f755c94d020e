//! Resources of a container: shares, quota, memory, OOM score. Pure.

use std::collections::HashMap;

use coracle_proto::cri::{HugepageLimit, LinuxContainerResources};
use coracle_values::Quantity;
use coracle_values::pod_resources::{PodResources, Resources, Side};
use coracle_values::quantity::{millis_of, value_of};
use k8s_openapi::api::core::v1::{Container, Pod, ResourceRequirements};

use super::cpu::{PERIOD, quota, shares};
use super::qos::{QosClass, qos_class};

/// Properties of the machine that a container's resources depend on.
#[derive(Clone, Copy, Debug)]
pub struct Machine {
    /// The node's memory in bytes.
    pub memory: i64,
    /// Whether cgroup v2 is used.
    pub cgroup_v2: bool,
    /// Whether swap can be limited.
    pub limits_swap: bool,
}

/// CPU and memory of a whole pod.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Amount {
    /// Millicores.
    pub cpu_millis: i64,
    /// Bytes.
    pub memory: i64,
}

/// The resources of a container for the runtime, computed as by the kubelet.
pub fn container_resources(pod: &Pod, container: &Container, machine: Machine) -> LinuxContainerResources {
    let wants = container.resources.as_ref();
    let request = Side::Requests.get(wants, "cpu").map(millis_of);
    let limit = Side::Limits.get(wants, "cpu").map(millis_of).unwrap_or(0);
    let memory = Side::Limits.get(wants, "memory").map(value_of).unwrap_or(0);
    // The limit replaces a missing request, unless zero is requested explicitly.
    let weight = request.unwrap_or(limit);
    let mut unified = HashMap::new();
    if machine.cgroup_v2 {
        // The OOM killer ends all processes of the container: a container must not continue without some of
        // them.
        unified.insert("memory.oom.group".to_owned(), "1".to_owned());
    }
    LinuxContainerResources {
        cpu_period: if limit > 0 { PERIOD } else { 0 },
        cpu_quota: quota(limit).unwrap_or(0),
        cpu_shares: shares(weight),
        memory_limit_in_bytes: memory,
        memory_swap_limit_in_bytes: if machine.limits_swap { memory } else { 0 },
        oom_score_adj: oom_score_adj(pod, container, machine.memory),
        hugepage_limits: hugepages(wants),
        unified,
        ..LinuxContainerResources::default()
    }
}

/// The resources of a container for `UpdateContainerResources`, without those that no resize changes.
pub fn resized_resources(pod: &Pod, container: &Container, machine: Machine) -> LinuxContainerResources {
    LinuxContainerResources {
        hugepage_limits: Vec::new(),
        unified: HashMap::new(),
        ..container_resources(pod, container, machine)
    }
}

/// The OOM score adjustment, with the kubelet's scale: 1000 is killed first.
pub fn oom_score_adj(pod: &Pod, container: &Container, node_memory: i64) -> i64 {
    const GUARANTEED: i64 = -997;
    let spec = pod.spec.as_ref();
    if spec.and_then(|spec| spec.priority_class_name.as_deref()) == Some("system-node-critical") {
        return GUARANTEED;
    }
    match qos_class(pod) {
        QosClass::Guaranteed => return GUARANTEED,
        QosClass::BestEffort => return 1000,
        QosClass::Burstable => {}
    }
    let own = burstable_score(container, node_memory);
    let is_sidecar = container.restart_policy.as_deref() == Some("Always");
    // A sidecar must not be killed before the containers that it serves.
    let others = spec
        .filter(|_| is_sidecar)
        .and_then(|spec| spec.containers.iter().map(|c| burstable_score(c, node_memory)).min());
    let score = others.map_or(own, |others| own.min(others));
    score.clamp(1000 + GUARANTEED, 999)
}

fn burstable_score(container: &Container, node_memory: i64) -> i64 {
    let request = Side::Requests.get(container.resources.as_ref(), "memory").map(value_of).unwrap_or(0);
    let parts = i128::from(request) * 1000 / i128::from(node_memory.max(1));
    1000 - i64::try_from(parts).unwrap_or(1000)
}

/// Total requests of the pod. Each amount is at most 2^47, so that sums over the node's pods cannot overflow.
pub fn pod_requests(pod: &Pod) -> Amount {
    pod.spec.as_ref().map_or_else(Amount::default, |spec| Amount::of(&PodResources::from(spec).requests()))
}

/// Total limits of the pod; 0 without a limit.
pub fn pod_limits(pod: &Pod) -> Amount {
    pod.spec.as_ref().map_or_else(Amount::default, |spec| Amount::of(&PodResources::from(spec).limits()))
}

impl Amount {
    fn of(resources: &Resources) -> Self {
        /// Maximum amount: 128 TiB of memory, or 10^11 cores.
        const MAX: i64 = i64::MAX >> 16;
        let cap = |amount: i128| i64::try_from(amount).unwrap_or(MAX).min(MAX);
        Self { cpu_millis: cap(resources.cpu_millis), memory: cap(resources.memory) }
    }
}

fn hugepages(resources: Option<&ResourceRequirements>) -> Vec<HugepageLimit> {
    let limits = Side::Limits.list(resources).into_iter().flatten();
    let pages =
        limits.filter_map(|(name, amount)| Some((page_size(name.strip_prefix("hugepages-")?)?, amount)));
    pages
        .map(|(page_size, amount)| HugepageLimit {
            page_size,
            limit: u64::try_from(value_of(amount)).unwrap_or(0),
        })
        .collect()
}

/// "2Mi" in the kernel's form for file names: "2MB".
fn page_size(quantity: &str) -> Option<String> {
    let bytes = Quantity::parse(quantity).ok()?.value();
    Some(match bytes {
        b if b >= 1 << 30 => format!("{}GB", b >> 30),
        b if b >= 1 << 20 => format!("{}MB", b >> 20),
        b => format!("{}KB", b >> 10),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const NODE: Machine = Machine { memory: 1 << 30, cgroup_v2: false, limits_swap: false };

    fn pod(spec: serde_json::Value) -> Pod {
        serde_json::from_value(json!({"metadata": {"name": "p", "uid": "u"}, "spec": spec})).expect("pod")
    }

    fn first(pod: &Pod) -> LinuxContainerResources {
        container_resources(pod, &pod.spec.as_ref().expect("spec").containers[0], NODE)
    }

    #[test]
    fn a_burstable_container_gets_its_shares_quota_and_memory() {
        let got = first(&pod(json!({"containers": [{"name": "a", "resources": {
            "requests": {"cpu": "250m", "memory": "256Mi"}, "limits": {"cpu": "500m", "memory": "512Mi", "hugepages-2Mi": "4Mi"}}}]})));
        assert_eq!((got.cpu_shares, got.cpu_quota, got.cpu_period), (256, 50_000, 100_000));
        assert_eq!((got.memory_limit_in_bytes, got.oom_score_adj), (512 << 20, 750));
        assert_eq!(got.hugepage_limits, [HugepageLimit { page_size: "2MB".to_owned(), limit: 4 << 20 }]);
    }

    #[test]
    fn a_best_effort_container_gets_the_least() {
        let got = first(&pod(json!({"containers": [{"name": "a"}]})));
        assert_eq!((got.cpu_shares, got.cpu_quota, got.cpu_period, got.memory_limit_in_bytes), (2, 0, 0, 0));
        assert_eq!(got.oom_score_adj, 1000);
    }

    #[test]
    fn a_limit_replaces_a_missing_request() {
        let got = first(&pod(json!({"containers": [{"name": "a", "resources": {"limits": {"cpu": "2"}}}]})));
        assert_eq!(got.cpu_shares, 2048);
    }

    #[test]
    fn the_oom_score_follows_class_priority_and_sidecars() {
        let full =
            json!({"requests": {"cpu": "1", "memory": "1Mi"}, "limits": {"cpu": "1", "memory": "1Mi"}});
        assert_eq!(
            first(&pod(json!({"containers": [{"name": "a", "resources": full}]}))).oom_score_adj,
            -997
        );
        let critical =
            pod(json!({"priorityClassName": "system-node-critical", "containers": [{"name": "a"}]}));
        assert_eq!(first(&critical).oom_score_adj, -997);
        let small = pod(json!({"containers": [{"name": "a", "resources": {"requests": {"memory": "1"}}}]}));
        assert_eq!(first(&small).oom_score_adj, 999);
        let whole = pod(json!({"containers": [{"name": "a", "resources": {"requests": {"memory": "2Gi"}}}]}));
        assert_eq!(first(&whole).oom_score_adj, 3);
        let sidecar =
            pod(json!({"containers": [{"name": "a", "resources": {"requests": {"memory": "512Mi"}}}],
            "initContainers": [{"name": "s", "restartPolicy": "Always"}]}));
        let spec = sidecar.spec.as_ref().expect("spec");
        assert_eq!(
            oom_score_adj(&sidecar, &spec.init_containers.as_ref().expect("init")[0], NODE.memory),
            500
        );
    }

    #[test]
    fn init_containers_count_by_their_peak_and_sidecars_stay() {
        let cpu = |name: &str, cpu: &str| json!({"name": name, "resources": {"requests": {"cpu": cpu}}});
        let mut sidecar = cpu("s", "100m");
        sidecar["restartPolicy"] = json!("Always");
        let got = pod_requests(&pod(json!({"containers": [cpu("a", "200m"), cpu("b", "100m")],
            "initContainers": [cpu("i", "350m"), sidecar, cpu("j", "250m")], "overhead": {"cpu": "10m"}})));
        assert_eq!(got.cpu_millis, 410);
    }
}

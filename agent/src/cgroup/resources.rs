//! Resources of a container: shares, quota, memory, OOM score. Pure.

use std::collections::HashMap;

use coracle_proto::cri::{HugepageLimit, LinuxContainerResources};
use coracle_values::Quantity;
use coracle_values::pod_resources::{PodResources, Resources, Side};
use coracle_values::quantity::{millis_of, value_of};
use k8s_openapi::api::core::v1::{Container, Pod, PodSpec, ResourceRequirements};

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
    /// Whether CPU limits are enforced by quotas: the kubelet's `cpuCFSQuota`.
    pub has_cpu_quota: bool,
}

/// CPU and memory of a whole pod.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Amount {
    /// Millicores.
    pub cpu_millis: i64,
    /// Bytes.
    pub memory: i64,
}

/// The resources of a container with the limits of CPU and memory that it inherits from its pod. A container without a
/// limit of its own has the limit of the pod as a whole. Source: `GetLimits` of `pkg/kubelet/util/util.go`.
pub fn effective_resources(
    pod_level: Option<&ResourceRequirements>,
    own: Option<&ResourceRequirements>,
) -> ResourceRequirements {
    let mut resources = own.cloned().unwrap_or_default();
    for name in ["cpu", "memory"] {
        let is_limited = Side::Limits.get(Some(&resources), name).is_some_and(|limit| millis_of(limit) > 0);
        let inherited = Side::Limits.get(pod_level, name).filter(|limit| !is_limited && millis_of(limit) > 0);
        if let Some(limit) = inherited {
            resources.limits.get_or_insert_default().insert(name.to_owned(), limit.clone());
        }
    }
    resources
}

/// The resources of a container for the runtime, computed as by the kubelet.
pub fn container_resources(pod: &Pod, container: &Container, machine: Machine) -> LinuxContainerResources {
    let pod_level = pod.spec.as_ref().and_then(|spec| spec.resources.as_ref());
    let effective = effective_resources(pod_level, container.resources.as_ref());
    let wants = Some(&effective);
    let request = Side::Requests.get(wants, "cpu").map(millis_of);
    let limit = Side::Limits.get(wants, "cpu").map(millis_of).unwrap_or(0);
    let memory = Side::Limits.get(wants, "memory").map(value_of).unwrap_or(0);
    // The limit replaces a missing request, unless zero is requested explicitly.
    let weight = request.unwrap_or(limit);
    let mut unified = HashMap::new();
    if machine.cgroup_v2 {
        // The OOM killer ends all processes of the container, because a container must not continue with only some of
        // its processes.
        unified.insert("memory.oom.group".to_owned(), "1".to_owned());
        if machine.limits_swap {
            // As with upstream's NoSwap (`ConfigureNoSwap`), a container without a memory limit uses no swap either.
            unified.insert("memory.swap.max".to_owned(), "0".to_owned());
        }
    }
    let enforced = if machine.has_cpu_quota { limit } else { 0 };
    LinuxContainerResources {
        cpu_period: if enforced > 0 { PERIOD } else { 0 },
        cpu_quota: quota(enforced).unwrap_or(0),
        cpu_shares: shares(weight),
        memory_limit_in_bytes: memory,
        memory_swap_limit_in_bytes: if machine.limits_swap { memory } else { 0 },
        oom_score_adj: oom_score_adj(pod, container, machine.memory),
        hugepage_limits: hugepages(wants),
        unified,
        ..LinuxContainerResources::default()
    }
}

/// The resources of a container for `UpdateContainerResources`, without the values that a resize never changes.
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
    let spare = spec.map_or(0, spare_memory);
    let own = burstable_score(container, spare, node_memory);
    // A sidecar is an init container with the policy Always. A main container can have this policy, too, so its name is
    // compared.
    let inits = spec.iter().flat_map(|spec| spec.init_containers.iter().flatten());
    let is_sidecar = container.restart_policy.as_deref() == Some("Always")
        && inits.into_iter().any(|init| init.name == container.name);
    // A sidecar must not be killed before the containers that it serves.
    let others = spec
        .filter(|_| is_sidecar)
        .and_then(|spec| spec.containers.iter().map(|c| burstable_score(c, spare, node_memory)).min());
    let score = others.map_or(own, |others| own.min(others));
    score.clamp(1000 + GUARANTEED, 999)
}

fn burstable_score(container: &Container, spare: i128, node_memory: i64) -> i64 {
    let request = Side::Requests.get(container.resources.as_ref(), "memory").map(value_of).unwrap_or(0);
    let parts = (i128::from(request) + spare) * 1000 / i128::from(node_memory.max(1));
    1000 - i64::try_from(parts).unwrap_or(1000)
}

/// The pod-level memory request without the requests of the containers, divided by the number of containers, in bytes.
///
/// Source: `remainingPodMemReqPerContainer` of `pkg/kubelet/qos/helpers.go`.
fn spare_memory(spec: &PodSpec) -> i128 {
    let whole = Side::Requests.get(spec.resources.as_ref(), "memory").map(value_of).unwrap_or(0);
    if whole == 0 {
        return 0;
    }
    let of_containers = PodResources { pod_level: None, overhead: None, ..PodResources::from(spec) };
    let containers = spec.containers.len() + spec.init_containers.as_ref().map_or(0, Vec::len);
    let containers = i128::try_from(containers).unwrap_or(1).max(1);
    (i128::from(whole) - of_containers.requests().memory).max(0) / containers
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

    const NODE: Machine =
        Machine { memory: 1 << 30, cgroup_v2: false, limits_swap: false, has_cpu_quota: true };

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
    fn a_container_without_limits_inherits_those_of_its_pod() {
        let whole =
            json!({"requests": {"cpu": "1", "memory": "256Mi"}, "limits": {"cpu": "2", "memory": "512Mi"}});
        let own = json!({"limits": {"cpu": "500m"}, "requests": {"cpu": "250m"}});
        let got = first(&pod(json!({"resources": whole, "containers": [{"name": "a", "resources": own}]})));
        assert_eq!((got.cpu_shares, got.cpu_quota, got.memory_limit_in_bytes), (256, 50_000, 512 << 20));
        let pod = pod(json!({"resources": whole, "containers": [{"name": "a"}, {"name": "b"}]}));
        let got = first(&pod);
        assert_eq!((got.cpu_shares, got.cpu_quota, got.memory_limit_in_bytes), (2048, 200_000, 512 << 20));
        assert_eq!(got.oom_score_adj, 875, "half of what the pod requests as a whole");
    }

    #[test]
    fn a_best_effort_container_gets_the_least() {
        let got = first(&pod(json!({"containers": [{"name": "a"}]})));
        assert_eq!((got.cpu_shares, got.cpu_quota, got.cpu_period, got.memory_limit_in_bytes), (2, 0, 0, 0));
        assert_eq!(got.oom_score_adj, 1000);
    }

    #[test]
    fn a_node_without_quotas_enforces_no_cpu_limit_and_keeps_shares() {
        let pod = pod(json!({"containers": [{"name": "a", "resources": {"limits": {"cpu": "2"}}}]}));
        let machine = Machine { has_cpu_quota: false, ..NODE };
        let got = container_resources(&pod, &pod.spec.as_ref().expect("spec").containers[0], machine);
        assert_eq!((got.cpu_shares, got.cpu_quota, got.cpu_period), (2048, 0, 0));
        assert_eq!(first(&pod).cpu_quota, 200_000);
    }

    #[test]
    fn containers_use_no_swap_with_and_without_a_memory_limit() {
        let swap_of = |machine: Machine, resources: serde_json::Value| {
            let pod = pod(json!({"containers": [{"name": "a", "resources": resources}]}));
            let got = container_resources(&pod, &pod.spec.as_ref().expect("spec").containers[0], machine);
            (got.memory_swap_limit_in_bytes, got.unified.get("memory.swap.max").cloned())
        };
        let v2 = Machine { cgroup_v2: true, limits_swap: true, ..NODE };
        let none = Some("0".to_owned());
        assert_eq!(swap_of(v2, json!({})), (0, none.clone()));
        assert_eq!(swap_of(v2, json!({"limits": {"memory": "1Mi"}})), (1 << 20, none));
        assert_eq!(swap_of(Machine { limits_swap: false, ..v2 }, json!({})), (0, None));
        assert_eq!(swap_of(Machine { cgroup_v2: false, ..v2 }, json!({})), (0, None));
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
        let always = pod(json!({"containers": [{"name": "s", "restartPolicy": "Always"},
            {"name": "a", "resources": {"requests": {"memory": "512Mi"}}}]}));
        assert_eq!(first(&always).oom_score_adj, 999, "a main container is not a sidecar");
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

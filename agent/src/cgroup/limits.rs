//! Limits of a cgroup, and the file writes that set them on v1 and v2. Pure.

use coracle_values::Quantity;
use coracle_values::pod_resources::{PodResources, ResourceList};
use coracle_values::quantity::millis_of;
use k8s_openapi::api::core::v1::{Pod, ResourceRequirements};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as ApiQuantity;

use super::cpu::{MAX_SHARES, MIN_SHARES, PERIOD, quota, shares};
use super::qos::{QosClass, qos_class};
use super::resources::{pod_limits, pod_requests};

/// The limits of one cgroup. None leaves a limit unchanged.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Limits {
    /// CPU shares, in v1's scale.
    pub(crate) shares: Option<i64>,
    /// Microseconds of CPU time in each [`PERIOD`].
    pub(crate) quota: Option<i64>,
    /// Bytes.
    pub(crate) memory: Option<i64>,
    /// Processes and threads.
    pub(crate) pids: Option<i64>,
}

/// One file to be written below a controller's mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Write {
    pub(crate) controller: &'static str,
    pub(crate) file: &'static str,
    pub(crate) value: String,
}

// === impl Limits ===

impl Limits {
    /// These limits with the CPU quota rounded up to whole percents of a CPU. systemd stores quotas in this form. The
    /// kubelet rounds in the same way. On v1 the quota of a pod cannot be set below the quota of its container, which
    /// is rounded, too.
    pub(crate) fn with_whole_percent_quota(&self) -> Self {
        const PERCENT: i64 = PERIOD / 100;
        let round = |quota: i64| quota.saturating_add(PERCENT - 1) / PERCENT * PERCENT;
        Self { quota: self.quota.map(round), ..self.clone() }
    }
}

impl Limits {
    /// The larger value of each limit. A limit that only one side has becomes `None`, which leaves the cgroup
    /// unchanged.
    pub(crate) fn max_of_each(&self, other: &Self) -> Self {
        let larger = |a: Option<i64>, b: Option<i64>| Some(a?.max(b?));
        Self {
            shares: larger(self.shares, other.shares),
            quota: larger(self.quota, other.quota),
            memory: larger(self.memory, other.memory),
            pids: None,
        }
    }
}

/// The limits of a pod's cgroup. A resource is limited only if all containers limit it.
pub(crate) fn of_pod(pod: &Pod) -> Limits {
    let class = qos_class(pod);
    if class == QosClass::BestEffort {
        return Limits { shares: Some(MIN_SHARES), ..Limits::default() };
    }
    let limits = pod_limits(pod);
    Limits {
        shares: Some(shares(pod_requests(pod).cpu_millis)),
        quota: quota(limits.cpu_millis).filter(|_| every_container_limits(pod, "cpu")),
        memory: Some(limits.memory).filter(|bytes| *bytes > 0 && every_container_limits(pod, "memory")),
        pids: None,
    }
}

/// Whether the pod's cgroup has a memory limit.
pub(crate) fn limits_memory(pod: &Pod) -> bool {
    of_pod(pod).memory.is_some()
}

/// The resources in the status of a pod: the pod-level resources, completed by sums over the containers. The status has
/// a limit only if the pod's cgroup has that limit. The overhead is left out, because readers of the status add it.
pub(crate) fn status_resources(pod: &Pod) -> ResourceRequirements {
    let Some(spec) = &pod.spec else { return ResourceRequirements::default() };
    let mut resources = spec.resources.clone().unwrap_or_default();
    let sums = PodResources { overhead: None, ..PodResources::from(spec) };
    let (requests, limits) = (sums.requests(), sums.limits());
    complete(&mut resources.requests, [("cpu", requests.cpu_millis), ("memory", requests.memory)]);
    let enforced = |name, amount| (name, if every_container_limits(pod, name) { amount } else { 0 });
    complete(&mut resources.limits, [enforced("cpu", limits.cpu_millis), enforced("memory", limits.memory)]);
    resources
}

/// The requests in the status of a pod: the requests of [`status_resources`], and of all other resources of the
/// containers.
pub(crate) fn status_requests(pod: &Pod) -> Option<ResourceList> {
    let spec = pod.spec.as_ref()?;
    let mut requests = status_resources(pod).requests;
    let sums = PodResources { overhead: None, ..PodResources::from(spec) }.requests();
    complete(&mut requests, [("ephemeral-storage", sums.ephemeral_storage)]);
    complete(&mut requests, sums.others.iter().map(|(name, amount)| (name.as_str(), *amount)));
    requests
}

/// Adds missing amounts above zero: CPU in millicores, other resources in units.
fn complete<'a>(list: &mut Option<ResourceList>, amounts: impl IntoIterator<Item = (&'a str, i128)>) {
    for (name, amount) in amounts.into_iter().filter(|(_, amount)| *amount > 0) {
        let text = if name == "cpu" { format!("{amount}m") } else { amount.to_string() };
        let Ok(quantity) = Quantity::parse(&text) else { continue };
        let entry = list.get_or_insert_default().entry(name.to_owned());
        entry.or_insert_with(|| ApiQuantity(quantity.to_string()));
    }
}

fn every_container_limits(pod: &Pod, name: &str) -> bool {
    let Some(spec) = &pod.spec else { return false };
    let limited = |list: Option<&k8s_openapi::api::core::v1::ResourceRequirements>| {
        list.and_then(|r| r.limits.as_ref()).and_then(|l| l.get(name)).is_some_and(|q| millis_of(q) > 0)
    };
    let mut containers = spec.containers.iter().chain(spec.init_containers.iter().flatten());
    limited(spec.resources.as_ref()) || containers.all(|c| limited(c.resources.as_ref()))
}

/// The writes that set these limits, in an order that the kernel accepts.
pub(crate) fn writes(limits: &Limits, v2: bool) -> Vec<Write> {
    let write = |controller, file, value: String| Write { controller, file, value };
    let mut out = Vec::new();
    if let Some(shares) = limits.shares {
        out.push(if v2 {
            write("cpu", "cpu.weight", weight(shares).to_string())
        } else {
            write("cpu", "cpu.shares", shares.to_string())
        });
    }
    if let Some(quota) = limits.quota {
        if v2 {
            out.push(write("cpu", "cpu.max", format!("{quota} {PERIOD}")));
        } else {
            out.push(write("cpu", "cpu.cfs_period_us", PERIOD.to_string()));
            out.push(write("cpu", "cpu.cfs_quota_us", quota.to_string()));
        }
    }
    if let Some(memory) = limits.memory {
        let file = if v2 { "memory.max" } else { "memory.limit_in_bytes" };
        out.push(write("memory", file, memory.to_string()));
    }
    if let Some(pids) = limits.pids {
        out.push(write("pids", "pids.max", pids.to_string()));
    }
    out
}

/// v1 shares in v2's scale of 1 to 10000, by the curve of runc and crun since 2025. The curve maps v1's default 1024 to
/// v2's default 100.
fn weight(shares: i64) -> u64 {
    if shares <= MIN_SHARES {
        return 1;
    }
    if shares >= MAX_SHARES {
        return 10_000;
    }
    let log = f64::from(i32::try_from(shares).unwrap_or(i32::MAX)).log2();
    let exponent = (log * log + 125.0 * log) / 612.0 - 7.0 / 34.0;
    // The two returns above bound the value, and ceil has removed the fraction.
    10_f64.powf(exponent).ceil() as u64
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn shares_and_quota_are_bounded() {
        assert_eq!([0, 1, 100, 1000, 1_000_000].map(shares), [2, 2, 102, 1024, 262_144]);
        assert_eq!([0, 1, 500].map(quota), [None, Some(1000), Some(50_000)]);
        assert_eq!(quota(i64::MAX), Some((1 << 44) - 1));
        assert_eq!([2, 1024, 262_144].map(weight), [1, 100, 10_000]);
    }

    #[test]
    fn systemd_keeps_whole_percents_of_a_processor() {
        let kept = |quota| Limits { quota, ..Limits::default() }.with_whole_percent_quota().quota;
        assert_eq!([Some(20_000), Some(20_001), None].map(kept), [Some(20_000), Some(21_000), None]);
    }

    #[test]
    fn the_widest_limits_are_those_that_both_have() {
        let of = |shares, quota, memory| Limits { shares: Some(shares), quota, memory, pids: Some(9) };
        let widest = of(2, Some(5), None).max_of_each(&of(4, Some(3), Some(7)));
        assert_eq!(widest, Limits { shares: Some(4), quota: Some(5), memory: None, pids: None });
    }

    #[test]
    fn a_pod_has_a_limit_only_if_all_its_containers_have() {
        let pod = |second: serde_json::Value| -> Pod {
            let first = json!({"name": "a", "resources": {"limits": {"cpu": "1", "memory": "1Mi"}, "requests": {"cpu": "100m"}}});
            serde_json::from_value(json!({"spec": {"containers": [first, second]}})).expect("pod")
        };
        let both = of_pod(&pod(json!({"name": "b", "resources": {"limits": {"cpu": "1", "memory": "1Mi"}}})));
        assert_eq!(
            both,
            Limits { shares: Some(102), quota: Some(200_000), memory: Some(2 << 20), pids: None }
        );
        let one = of_pod(&pod(json!({"name": "b", "resources": {"limits": {"cpu": "1"}}})));
        assert_eq!(one, Limits { shares: Some(102), quota: Some(200_000), memory: None, pids: None });
        let none =
            of_pod(&serde_json::from_value(json!({"spec": {"containers": [{"name": "a"}]}})).expect("pod"));
        assert_eq!(none, Limits { shares: Some(2), ..Limits::default() });
    }

    #[test]
    fn the_status_has_pod_level_resources_and_the_sums_of_others() {
        let of = |whole: serde_json::Value| {
            let own = json!({"requests": {"cpu": "500m", "memory": "1Mi"}, "limits": {"cpu": "1"}});
            let containers = json!([{"name": "a", "resources": own}, {"name": "b", "resources": own}]);
            let pod =
                json!({"spec": {"resources": whole, "containers": containers, "overhead": {"cpu": "1"}}});
            json!(status_resources(&serde_json::from_value(pod).expect("pod")))
        };
        let sums = json!({"requests": {"cpu": "1", "memory": "2097152"}, "limits": {"cpu": "2"}});
        assert_eq!(of(json!(null)), sums);
        let whole =
            json!({"requests": {"cpu": "2", "memory": "10m"}, "limits": {"cpu": "3", "memory": "4Mi"}});
        assert_eq!(of(whole.clone()), whole);
        let own = json!({"requests": {"cpu": "1", "x.io/y": "2"}});
        let pod = json!({"spec": {"containers": [{"name": "a", "resources": own}]}});
        let requests = status_requests(&serde_json::from_value(pod).expect("pod"));
        assert_eq!(json!(requests), own["requests"]);
    }

    #[test]
    fn the_same_limits_are_spelled_for_both_versions() {
        let limits = Limits { shares: Some(1024), quota: Some(50_000), memory: Some(4096), pids: Some(10) };
        let spelled = |v2| {
            writes(&limits, v2)
                .into_iter()
                .map(|w| format!("{}={}", w.file, w.value))
                .collect::<Vec<_>>()
                .join(" ")
        };
        assert_eq!(
            spelled(false),
            "cpu.shares=1024 cpu.cfs_period_us=100000 cpu.cfs_quota_us=50000 memory.limit_in_bytes=4096 pids.max=10"
        );
        assert_eq!(spelled(true), "cpu.weight=100 cpu.max=50000 100000 memory.max=4096 pids.max=10");
    }
}

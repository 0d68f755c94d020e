//! Selection of pods to evict for disk usage, with the reason. Pure.
//!
//! Source: `pkg/kubelet/eviction` (`localStorageEviction`, `rankDiskPressureFunc`, `evictionMessage`).

use std::cmp::Reverse;
use std::sync::Arc;
use std::time::Duration;

use coracle_values::Quantity;
use coracle_values::quantity::value_of;
use k8s_openapi::api::core::v1::{Container, EmptyDirVolumeSource, Pod, ResourceRequirements};

use super::MIN_GRACE;
use crate::node::{DiskShortage, Resource, Shortage, SoftThresholds};
use crate::source::is_static;

/// The name of disk space in limits and requests.
const EPHEMERAL_STORAGE: &str = "ephemeral-storage";
/// Pods of this priority and above are critical to the node and never evicted.
const CRITICAL_PRIORITY: i32 = 2_000_000_000;

/// Bytes and inodes on disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Disk {
    pub(crate) bytes: u64,
    pub(crate) inodes: u64,
}

/// Disk usage of one pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    /// Usage of writable layer and logs, by container name.
    pub(crate) containers: Vec<(String, Disk)>,
    /// Usage of `emptyDir` volumes on disk, by volume name.
    pub(crate) empty_dirs: Vec<(String, Disk)>,
    /// `/etc/hosts`, `/etc/resolv.conf`, `/etc/hostname` and termination messages, which containers write.
    pub(crate) own_files: Disk,
}

/// A pod with its measured usage.
pub(crate) struct MeasuredPod<U> {
    pub(crate) pod: Arc<Pod>,
    pub(crate) usage: U,
}

// === impl Disk ===

impl Disk {
    pub(crate) fn plus(self, other: Self) -> Self {
        Self {
            bytes: self.bytes.saturating_add(other.bytes),
            inodes: self.inodes.saturating_add(other.inodes),
        }
    }

    fn of(self, resource: Resource) -> u64 {
        match resource {
            Resource::Bytes => self.bytes,
            Resource::Inodes => self.inodes,
        }
    }
}

// === impl Usage ===

impl Usage {
    /// Total disk usage of the pod.
    pub(crate) fn total(&self) -> Disk {
        let parts = self.containers.iter().chain(&self.empty_dirs).map(|(_, disk)| *disk);
        parts.fold(self.own_files, Disk::plus)
    }
}

/// Whether the pod is evicted if it exceeds its own limits on disk usage: it has such a limit, and is not critical.
pub(crate) fn is_limited(pod: &Pod) -> bool {
    let Some(spec) = pod.spec.as_ref().filter(|_| !is_critical(pod)) else { return false };
    let limited = |container: &Container| limit_of(container).is_some();
    let volumes = spec.volumes.iter().flatten().filter_map(|volume| volume.empty_dir.as_ref());
    volumes.into_iter().any(|empty| is_on_disk(empty.medium.as_deref()) && size_limit(empty).is_some())
        || spec.containers.iter().any(limited)
        || spec.init_containers.iter().flatten().any(limited)
}

/// The size limit of an `emptyDir` in bytes, with its text. Zero means that there is no limit, as in the kubelet.
fn size_limit(empty: &EmptyDirVolumeSource) -> Option<(i64, &str)> {
    let limit = empty.size_limit.as_ref()?;
    Some((value_of(limit), limit.0.as_str())).filter(|(bytes, _)| *bytes > 0)
}

/// Whether an `emptyDir` of this medium is on the disk of the node.
pub(crate) fn is_on_disk(medium: Option<&str>) -> bool {
    medium.unwrap_or_default().is_empty()
}

/// Whether the pod is critical to the node: by its priority, or as a static pod. Critical pods are never evicted.
pub(crate) fn is_critical(pod: &Pod) -> bool {
    priority(pod) >= CRITICAL_PRIORITY || pod.metadata.uid.as_deref().is_some_and(is_static)
}

/// The message and the signal of the eviction, if the pod exceeds one of its own limits. None otherwise.
pub(crate) fn exceeded(pod: &Pod, usage: &Usage) -> Option<(String, &'static str)> {
    let spec = pod.spec.as_ref()?;
    for volume in spec.volumes.iter().flatten() {
        let limit = volume.empty_dir.as_ref().and_then(size_limit);
        let used = usage.empty_dirs.iter().find(|(name, _)| *name == volume.name);
        if let (Some((limit, text)), Some((name, used))) = (limit, used)
            && exceeds(used.bytes, limit)
        {
            let message = format!("Usage of EmptyDir volume \"{name}\" exceeds the limit \"{text}\". ");
            return Some((message, "emptydirfs.limit"));
        }
    }
    if let Some(limit) = pod_limit(pod)
        && exceeds(usage.total().bytes, limit)
    {
        let limit = quantity(limit.unsigned_abs());
        let message =
            format!("Pod ephemeral local storage usage exceeds the total limit of containers {limit}. ");
        return Some((message, "ephemeralpodfs.limit"));
    }
    let containers = spec.containers.iter().chain(spec.init_containers.iter().flatten());
    for container in containers {
        let used = usage.containers.iter().find(|(name, _)| *name == container.name);
        if let (Some((limit, text)), Some((name, used))) = (own_limit(container), used)
            && exceeds(used.bytes, limit)
        {
            let message = format!("Container {name} exceeded its local ephemeral storage limit \"{text}\". ");
            return Some((message, "ephemeralcontainerfs.limit"));
        }
    }
    None
}

/// The pod to evict first for a shortage on the node. Pods above their request are first, then the lowest priority,
/// then the largest excess over the request. Critical pods, and pods that use nothing, are excluded.
pub(crate) fn first(pods: &[MeasuredPod<Usage>], resource: Resource) -> Option<&MeasuredPod<Usage>> {
    let uses = |usage: &Usage| usage.total().of(resource) > 0;
    let candidates = pods.iter().filter(|one| !is_critical(&one.pod) && uses(&one.usage));
    candidates.min_by_key(|MeasuredPod { pod, usage }| {
        let used = i128::from(usage.total().of(resource));
        // Inodes cannot be requested.
        let requested = match resource {
            Resource::Bytes => i128::from(pod_request(pod)),
            Resource::Inodes => 0,
        };
        (used <= requested, priority(pod), Reverse(used - requested))
    })
}

/// The message of an eviction for a shortage on the node's disk.
pub(crate) fn message(pod: &Pod, usage: &Usage, shortage: DiskShortage) -> String {
    let name = name_of(shortage.resource);
    match shortage.resource {
        Resource::Bytes => {
            let containers = usage.containers.iter().map(|(container, used)| {
                let requested = request_of(pod, container);
                ContainerUsage { container, used: used.bytes, requested }
            });
            shortage_message(name, &shortage, quantity, containers)
        }
        Resource::Inodes => {
            shortage_message(name, &shortage, |inodes| inodes.to_string(), std::iter::empty())
        }
    }
}

/// Usage and request of a container, in bytes.
pub(super) struct ContainerUsage<'a> {
    pub(super) container: &'a str,
    pub(super) used: u64,
    pub(super) requested: i64,
}

/// The message of an eviction for a shortage. `name` is the name of the resource, and `text` formats an amount of it.
/// `containers` are the containers of the pod if the resource can be requested, and empty otherwise.
pub(super) fn shortage_message<'a, R>(
    name: &str,
    shortage: &Shortage<R>,
    text: impl Fn(u64) -> String,
    containers: impl Iterator<Item = ContainerUsage<'a>>,
) -> String {
    let mut message = format!(
        "The node was low on resource: {name}. Threshold quantity: {}, available: {}. ",
        text(shortage.threshold),
        text(shortage.available)
    );
    for ContainerUsage { container, used, requested } in containers.filter(|c| exceeds(c.used, c.requested)) {
        message.push_str(&format!(
            "Container {container} was using {}, request is {}, has larger consumption of {name}. ",
            text(used),
            text(requested.unsigned_abs())
        ));
    }
    message
}

/// Name of the resource in messages.
pub(crate) fn name_of(resource: Resource) -> &'static str {
    match resource {
        Resource::Bytes => EPHEMERAL_STORAGE,
        Resource::Inodes => "inodes",
    }
}

/// The kubelet's signal of a shortage.
pub(crate) fn signal_of(resource: Resource) -> &'static str {
    match resource {
        Resource::Bytes => "nodefs.available",
        Resource::Inodes => "nodefs.inodesFree",
    }
}

/// Grace period of the soft threshold of a resource.
pub(super) fn grace_period(soft: &SoftThresholds, resource: Resource) -> Duration {
    match resource {
        Resource::Bytes => soft.nodefs_available.grace,
        Resource::Inodes => soft.nodefs_inodes_free.grace,
    }
}

/// Grace period of an evicted pod in seconds: its own grace period, but at most `max`.
pub(crate) fn grace(pod: &Pod, max: u32) -> u32 {
    let own = pod.spec.as_ref().and_then(|spec| spec.termination_grace_period_seconds).unwrap_or(30);
    u32::try_from(own.max(0)).unwrap_or(u32::MAX).min(max).max(MIN_GRACE)
}

fn exceeds(used: u64, limit: i64) -> bool {
    u64::try_from(limit).is_ok_and(|limit| used > limit)
}

/// The priority of the pod. The default is 0.
pub(crate) fn priority(pod: &Pod) -> i32 {
    pod.spec.as_ref().and_then(|spec| spec.priority).unwrap_or_default()
}

/// Bytes as a quantity with a binary suffix.
pub(super) fn quantity(bytes: u64) -> String {
    Quantity::of_bytes(bytes).to_string()
}

/// The limit of a container in bytes, with its text. As in the kubelet, a container with the limit 0 has no limit of
/// its own. The sum for the pod's limit counts the 0.
fn own_limit(container: &Container) -> Option<(i64, &str)> {
    let text = limit_of(container)?;
    let bytes = Quantity::parse(text).map_or(i64::MAX, Quantity::value);
    Some((bytes, text)).filter(|(bytes, _)| *bytes != 0)
}

fn limit_of(container: &Container) -> Option<&str> {
    let limits = container.resources.as_ref()?.limits.as_ref()?;
    limits.get(EPHEMERAL_STORAGE).map(|limit| limit.0.as_str())
}

fn request_of(pod: &Pod, container: &str) -> i64 {
    let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
    containers.filter(|c| c.name == container).map(|c| amount(c.resources.as_ref(), true).unwrap_or(0)).sum()
}

fn amount(resources: Option<&ResourceRequirements>, requests: bool) -> Option<i64> {
    let resources = resources?;
    let limits = resources.limits.as_ref().and_then(|limits| limits.get(EPHEMERAL_STORAGE));
    let found = if requests {
        resources.requests.as_ref().and_then(|requests| requests.get(EPHEMERAL_STORAGE)).or(limits)
    } else {
        limits
    };
    found.map(value_of)
}

fn pod_request(pod: &Pod) -> i64 {
    total(pod, true).unwrap_or(0)
}

fn pod_limit(pod: &Pod) -> Option<i64> {
    total(pod, false)
}

/// The sum over containers and sidecars, or the largest init container with the sidecars before it, whichever is
/// larger. None if no container has a value.
fn total(pod: &Pod, requests: bool) -> Option<i64> {
    let spec = pod.spec.as_ref()?;
    let of = |container: &Container| amount(container.resources.as_ref(), requests);
    let (mut sidecars, mut largest) = (None, None);
    for init in spec.init_containers.iter().flatten() {
        let with_sidecars = sum(sidecars, of(init));
        if init.restart_policy.as_deref() == Some("Always") {
            sidecars = with_sidecars;
        }
        largest = largest.max(with_sidecars);
    }
    let running = spec.containers.iter().map(of).fold(None, sum);
    sum(running, sidecars).max(largest)
}

/// The sum of two amounts, of which either can be absent.
fn sum(left: Option<i64>, right: Option<i64>) -> Option<i64> {
    match (left, right) {
        (Some(left), Some(right)) => Some(left.saturating_add(right)),
        (left, right) => left.or(right),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    const MI: u64 = 1 << 20;

    fn pod(spec: Value) -> Arc<Pod> {
        Arc::new(serde_json::from_value(json!({"metadata": {"name": "p"}, "spec": spec})).unwrap())
    }

    fn disk(mebibytes: u64) -> Disk {
        Disk { bytes: mebibytes * MI, inodes: mebibytes }
    }

    fn usage(containers: &[(&str, u64)], empty_dirs: &[(&str, u64)]) -> Usage {
        let named = |list: &[(&str, u64)]| list.iter().map(|(n, m)| ((*n).to_owned(), disk(*m))).collect();
        Usage { containers: named(containers), empty_dirs: named(empty_dirs), own_files: Disk::default() }
    }

    fn limited(limit: &str) -> Value {
        json!({"limits": {"ephemeral-storage": limit}})
    }

    #[test]
    fn a_pod_above_one_of_its_limits_is_evicted_with_the_reason() {
        let volume = json!([{"name": "cache", "emptyDir": {"sizeLimit": "5Mi"}}]);
        let volumes = pod(json!({"containers": [{"name": "a"}], "volumes": volume}));
        let message = "Usage of EmptyDir volume \"cache\" exceeds the limit \"5Mi\". ";
        let evicted = |message: &str, signal| Some((message.to_owned(), signal));
        assert_eq!(exceeded(&volumes, &usage(&[], &[("cache", 6)])), evicted(message, "emptydirfs.limit"));
        assert_eq!(exceeded(&volumes, &usage(&[("a", 900)], &[("cache", 5)])), None);

        let two =
            json!([{"name": "a", "resources": limited("10Mi")}, {"name": "b", "resources": limited("20Mi")}]);
        let two = pod(json!({"containers": two}));
        let message = "Container a exceeded its local ephemeral storage limit \"10Mi\". ";
        let container = evicted(message, "ephemeralcontainerfs.limit");
        assert_eq!(exceeded(&two, &usage(&[("a", 11), ("b", 1)], &[])), container);
        let message = "Pod ephemeral local storage usage exceeds the total limit of containers 30Mi. ";
        let whole = evicted(message, "ephemeralpodfs.limit");
        assert_eq!(exceeded(&two, &usage(&[("a", 10), ("b", 20)], &[("v", 1)])), whole);
        assert_eq!(exceeded(&two, &usage(&[("a", 10), ("b", 20)], &[])), None);
        let mut sidecar = json!({"name": "s", "resources": limited("5Mi")});
        sidecar["restartPolicy"] = "Always".into();
        let first = json!({"name": "i", "resources": limited("20Mi")});
        let main = json!([{"name": "a", "resources": limited("10Mi")}]);
        let parts = pod(json!({"initContainers": [sidecar, first], "containers": main}));
        assert_eq!(exceeded(&parts, &usage(&[("i", 20)], &[("v", 5)])), None, "sidecars before it count");
        let message = "Pod ephemeral local storage usage exceeds the total limit of containers 25Mi. ";
        let above = exceeded(&parts, &usage(&[("i", 20)], &[("v", 6)]));
        assert_eq!(above, evicted(message, "ephemeralpodfs.limit"));
        assert_eq!(quantity(1 << 40), "1Ti");
        let mut hosts = usage(&[("a", 1)], &[]);
        hosts.own_files = disk(40);
        assert_eq!(exceeded(&two, &hosts), whole, "/etc/hosts counts");
        assert!(is_limited(&two) && is_limited(&volumes));
    }

    #[test]
    fn an_evicted_pod_has_its_own_grace_period_up_to_the_maximum() {
        let with = |seconds: i64| pod(json!({"terminationGracePeriodSeconds": seconds, "containers": []}));
        assert_eq!([grace(&with(60), 0), grace(&with(60), 20), grace(&with(5), 20)], [1, 20, 5]);
        assert_eq!([grace(&with(0), 20), grace(&pod(json!({"containers": []})), 40)], [1, 30]);
    }

    #[test]
    fn a_pod_without_limits_is_not_measured() {
        let volumes = json!([{"name": "a", "emptyDir": {}},
            {"name": "b", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}}]);
        let free = pod(json!({"containers": [{"name": "a"}], "volumes": volumes}));
        assert!(!is_limited(&free));
        assert_eq!(exceeded(&free, &usage(&[("a", 1 << 20)], &[("a", 1 << 20)])), None);
    }

    #[test]
    fn critical_pods_and_limits_of_zero_do_not_lead_to_evictions() {
        let containers = json!([{"name": "a", "resources": limited("10Mi")}]);
        let with = |priority: i32| pod(json!({"priority": priority, "containers": containers}));
        assert!(is_limited(&with(CRITICAL_PRIORITY - 1)));
        assert!(!is_limited(&with(CRITICAL_PRIORITY)));
        let mut of_manifest = with(0);
        std::sync::Arc::make_mut(&mut of_manifest).metadata.uid =
            Some("0123456789abcdef0123456789abcdef".to_owned());
        assert!(!is_limited(&of_manifest), "a static pod");
        let volumes = json!([{"name": "cache", "emptyDir": {"sizeLimit": "0"}}]);
        let unlimited = pod(json!({"containers": [{"name": "a"}], "volumes": volumes}));
        assert!(!is_limited(&unlimited));
        assert_eq!(exceeded(&unlimited, &usage(&[], &[("cache", 1)])), None);
        let containers =
            json!([{"name": "a", "resources": limited("0")}, {"name": "b", "resources": limited("10Mi")}]);
        let zero = pod(json!({"containers": containers}));
        assert_eq!(exceeded(&zero, &usage(&[("a", 9), ("b", 1)], &[])), None);
        let whole = exceeded(&zero, &usage(&[("a", 10), ("b", 1)], &[]));
        assert_eq!(whole.map(|(_, signal)| signal), Some("ephemeralpodfs.limit"));
    }

    #[test]
    fn pods_above_their_request_are_evicted_first_then_by_priority_then_by_excess() {
        let with = |priority: i32, request: &str| {
            let resources = json!({"requests": {"ephemeral-storage": request}});
            pod(json!({"priority": priority, "containers": [{"name": "a", "resources": resources}]}))
        };
        let within = MeasuredPod { pod: with(0, "100Mi"), usage: usage(&[("a", 99)], &[]) };
        let important = MeasuredPod { pod: with(10, "1Mi"), usage: usage(&[("a", 500)], &[]) };
        let small = MeasuredPod { pod: with(5, "1Mi"), usage: usage(&[("a", 10)], &[]) };
        let large = MeasuredPod { pod: with(5, "1Mi"), usage: usage(&[("a", 20)], &[]) };
        let critical = MeasuredPod { pod: with(CRITICAL_PRIORITY, "1Mi"), usage: usage(&[("a", 900)], &[]) };
        let empty = MeasuredPod { pod: with(-1, "0"), usage: usage(&[], &[]) };
        let mut pods = vec![within, important, small, large, critical, empty];
        let mut order = Vec::new();
        while let Some(next) = first(&pods, Resource::Bytes) {
            let at = pods.iter().position(|pod| std::ptr::eq(pod, next)).unwrap();
            order.push(pods.remove(at).usage.total().bytes / MI);
        }
        assert_eq!(order, [20, 10, 500, 99]);
    }

    #[test]
    fn the_message_names_the_threshold_and_the_containers_above_their_request() {
        let shortage = DiskShortage { resource: Resource::Bytes, threshold: 3 << 30, available: 123 << 10 };
        let pod = pod(json!({"containers": [{"name": "a"}]}));
        assert_eq!(
            message(&pod, &usage(&[("a", 7)], &[]), shortage),
            "The node was low on resource: ephemeral-storage. Threshold quantity: 3Gi, available: 123Ki. Container a was \
             using 7Mi, request is 0, has larger consumption of ephemeral-storage. "
        );
        let inodes = DiskShortage { resource: Resource::Inodes, threshold: 1024, available: 5 };
        assert_eq!(
            message(&pod, &usage(&[("a", 7)], &[]), inodes),
            "The node was low on resource: inodes. Threshold quantity: 1024, available: 5. "
        );
    }
}

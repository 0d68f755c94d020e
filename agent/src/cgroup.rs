//! The cgroup tree of the node's pods: QoS classes, pod cgroups, limits, removal.
//!
//! ```text
//! <root>/kubepods                      weight of the whole node, limits of all pods together
//! <root>/kubepods/pod<uid>             guaranteed pods
//! <root>/kubepods/burstable/pod<uid>   weight: the sum of the CPU requests of burstable pods
//! <root>/kubepods/besteffort/pod<uid>  minimum weight
//! ```
//! The runtime creates containers' cgroups one level below. The tree has the form that a kubelet with the cgroupfs
//! driver makes, so that tools for kubelets find the same paths. With systemd each cgroup is a slice with the kubelet's
//! name: `kubepods-burstable-pod<uid>.slice`.
//!
//! [`hierarchies`] finds the mount points and creates the directories (v1, hybrid and v2). [`mod@write`] writes the
//! limits and returns every error, because a pod must not run without its limits. [`tree`] removes cgroups with their
//! children.

mod cpu;
mod error;
mod hierarchies;
mod limits;
pub mod qos;
pub mod resources;
mod tree;
pub(crate) mod usage;
mod write;

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use coracle_backoff::Backoff;
use coracle_cri::CgroupDriver;
use k8s_openapi::api::core::v1::Pod;

pub use error::CgroupError;
pub use qos::{QosClass, qos_class};
pub use resources::{Machine, container_resources, effective_resources, resized_resources};

use limits::Limits;
pub(crate) use limits::{limits_memory, status_requests, status_resources};
use tree::Tree;
use usage::CgroupUsage;
pub(crate) use usage::PodUsage;

use crate::kubelet_metrics::{CgroupOperation, CgroupOperations};

/// A pod's cgroup path below each hierarchy's mount: CRI's `cgroup_parent`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CgroupParent(pub String);

/// Configuration of the tree.
#[derive(Clone, Debug)]
pub struct CgroupConfig {
    /// The cgroup that contains `kubepods`; usually `/`.
    pub root: String,
    /// The cgroup driver.
    pub driver: CgroupDriver,
    /// Millicores of the node: the weight of `kubepods`.
    pub cpu_millis: i64,
    /// Maximum bytes of memory of all pods together. 0 if no limit is set.
    pub memory: i64,
    /// Maximum processes of one pod. None means no limit.
    pub pod_pids_limit: Option<i64>,
    /// Number of reserved processes. All pods together leave this number free.
    pub reserved_pids: i64,
}

/// The cgroups of the node's pods. Functions that are not async block for file writes or calls of systemd.
#[derive(Clone, Debug)]
pub struct Cgroups {
    shared: Arc<Shared>,
    /// Whether pods get CPU quotas.
    has_quota: bool,
}

#[derive(Debug)]
struct Shared {
    config: CgroupConfig,
    tree: Tree,
    /// The last weight of the burstable class: an unchanged weight is not written.
    burstable: Mutex<Option<i64>>,
    operations: CgroupOperations,
}

// === impl Cgroups ===

impl Cgroups {
    /// Finds the hierarchies, logs missing controllers and creates the QoS classes.
    pub fn open(config: CgroupConfig) -> Result<Cgroups, CgroupError> {
        let tree = Tree::open(&config.root, config.driver)?;
        let shared = Arc::new(Shared {
            config,
            tree,
            burstable: Mutex::new(None),
            operations: CgroupOperations::default(),
        });
        let cgroups = Cgroups { shared, has_quota: true };
        cgroups.ensure_qos()?;
        Ok(cgroups)
    }

    /// The same cgroups with CPU quotas enabled or disabled. Disabled quotas leave an existing quota of a pod
    /// unchanged.
    pub(crate) fn with_quota(self, has_quota: bool) -> Self {
        Self { has_quota, ..self }
    }

    /// Durations of the operations on cgroups of pods.
    pub(crate) fn operations(&self) -> &CgroupOperations {
        &self.shared.operations
    }

    /// Whether limits are written for cgroup v2.
    pub fn is_v2(&self) -> bool {
        self.shared.tree.is_v2()
    }

    /// Whether swap can be limited. If not, swap limits are not passed to the runtime.
    pub fn limits_swap(&self) -> bool {
        self.shared.tree.limits_swap()
    }

    /// Creates `kubepods` and the QoS classes with their weights, and limits all pods together.
    pub fn ensure_qos(&self) -> Result<(), CgroupError> {
        let Shared { config, tree, .. } = &*self.shared;
        let shares = Some(cpu::shares(config.cpu_millis));
        let node = Limits { shares, pids: pids_of_all_pods(config.reserved_pids), ..Limits::default() };
        tree.ensure("kubepods", &node)?;
        tree.inherit_cpusets("kubepods");
        self.limit_memory();
        for class in ["kubepods/besteffort", "kubepods/burstable"] {
            tree.ensure(class, &Limits { shares: Some(cpu::MIN_SHARES), ..Limits::default() })?;
            // This also applies to a cgroup that an earlier version created.
            tree.inherit_cpusets(class);
        }
        Ok(())
    }

    /// Limits the memory of all pods together, as a kubelet does, so that pods cannot use the reserved memory. A
    /// failure is logged: v1 refuses a limit below the memory that pods use already. The limit is then set at a later
    /// start.
    fn limit_memory(&self) {
        let Shared { config, tree, .. } = &*self.shared;
        let memory = Some(config.memory).filter(|bytes| *bytes > 0);
        if let Err(error) = tree.ensure("kubepods", &Limits { memory, ..Limits::default() }) {
            tracing::warn!(error = &error as &dyn std::error::Error, "cannot limit the memory of all pods");
        }
    }

    /// Sets the weight of the burstable class from the millicores that its pods request. To be called when the set of
    /// pods changes.
    pub fn update_qos(&self, millis: i64) -> Result<(), CgroupError> {
        let mut last = self.shared.burstable.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if *last == Some(millis) {
            return Ok(());
        }
        let wanted = Limits { shares: Some(cpu::shares(millis)), ..Limits::default() };
        self.shared.tree.ensure("kubepods/burstable", &wanted)?;
        *last = Some(millis);
        Ok(())
    }

    /// The parent cgroup of the pod's containers.
    pub fn parent(&self, pod: &Pod) -> Result<CgroupParent, CgroupError> {
        Ok(CgroupParent(self.shared.tree.absolute(&pod_path(pod)?)))
    }

    /// Creates the pod's cgroup and sets its limits. A later call changes the limits.
    pub async fn ensure_pod(&self, pod: &Pod) -> Result<CgroupParent, CgroupError> {
        let path = pod_path(pod)?;
        let mut wanted = self.limits(pod);
        wanted.pids = self.shared.config.pod_pids_limit;
        let parent = CgroupParent(self.shared.tree.absolute(&path));
        let operation =
            if self.shared.tree.is_made(&path) { CgroupOperation::Update } else { CgroupOperation::Create };
        let ensured = self.run_blocking(move |tree| {
            tree.ensure(&path, &wanted)?;
            tree.limit_descendants(&path);
            Ok(())
        });
        self.operations().measure(operation, ensured).await?;
        Ok(parent)
    }

    /// Sets each limit of the pod's cgroup to the larger one of two versions of the pod, while its containers are
    /// resized.
    pub async fn widen_pod(&self, before: &Pod, after: &Pod) -> Result<(), CgroupError> {
        let path = pod_path(after)?;
        let wanted = self.limits(before).max_of_each(&self.limits(after));
        let ensured = self.run_blocking(move |tree| tree.ensure(&path, &wanted));
        self.operations().measure(CgroupOperation::Update, ensured).await
    }

    fn limits(&self, pod: &Pod) -> Limits {
        let limits = limits::of_pod(pod);
        Limits { quota: limits.quota.filter(|_| self.has_quota), ..limits }
    }

    /// Removes the pod's cgroup with its children, in any QoS class. Succeeds if it does not exist.
    ///
    /// A killed task leaves the process table shortly before it leaves its cgroup. So the removal of a busy cgroup is
    /// retried for about a second.
    pub async fn remove_pod(&self, uid: &str) -> Result<(), CgroupError> {
        self.operations().measure(CgroupOperation::Destroy, self.try_to_remove(uid)).await
    }

    async fn try_to_remove(&self, uid: &str) -> Result<(), CgroupError> {
        const TRIES: u32 = 8;
        let mut backoff = Backoff::new(Duration::from_millis(5), Duration::from_millis(320));
        for _ in 1..TRIES {
            if self.remove_once(uid).await.is_ok() {
                return Ok(());
            }
            tokio::time::sleep(backoff.next_delay()).await;
        }
        self.remove_once(uid).await
    }

    /// The uids of all pods that have a cgroup, desired or not.
    pub fn pods(&self) -> BTreeSet<String> {
        CLASSES.iter().flat_map(|class| self.shared.tree.children(class)).filter_map(uid_of_dir).collect()
    }

    /// Usage of all pods.
    pub(crate) fn usage_of_pods(&self) -> CgroupUsage {
        let tree = &self.shared.tree;
        usage::read(&tree.directories_by_controller(&tree.below("kubepods")), tree.is_v2())
    }

    /// Bytes of memory that all pods together can still take, and their limit. None if the limit is not less than
    /// `machine`, the memory of the machine in bytes: then the machine's memory is used up before the limit is reached.
    pub(crate) fn memory_left(&self, machine: i64) -> Option<[u64; 2]> {
        let limit = Some(self.shared.config.memory).filter(|limit| *limit < machine)?;
        let limit = u64::try_from(limit).ok().filter(|limit| *limit > 0)?;
        let tree = &self.shared.tree;
        let dirs = tree.directories_by_controller(&tree.below("kubepods"));
        let used = usage::without_caches(dirs.get("memory")?, tree.is_v2())?;
        Some([limit.saturating_sub(used), limit])
    }

    /// Memory and processes of one pod. None without a cgroup.
    pub(crate) fn usage_of_pod(&self, pod: &Pod) -> Option<PodUsage> {
        let tree = &self.shared.tree;
        let below = tree.below(&pod_path(pod).ok()?);
        usage::read_pod(&tree.directories_by_controller(&below), tree.is_v2())
    }

    /// Usage of the cgroup of this process. None in the root cgroup, which has all processes.
    pub(crate) fn usage_of_agent(&self) -> Option<CgroupUsage> {
        let tree = &self.shared.tree;
        let text = std::fs::read_to_string("/proc/self/cgroup").ok()?;
        let dirs = usage::own_directories(&text, &tree.directories_by_controller(""), tree.is_v2())?;
        Some(usage::read(&dirs, tree.is_v2()))
    }

    /// Removes the whole tree, for `coracle down`, after all its processes have ended.
    pub async fn remove_all(&self) -> Result<(), CgroupError> {
        for uid in self.pods() {
            self.remove_pod(&uid).await?;
        }
        self.shared.tree.remove("kubepods")
    }

    async fn remove_once(&self, uid: &str) -> Result<(), CgroupError> {
        let paths = CLASSES.map(|class| format!("{class}/pod{uid}")).into_iter();
        let existing: Vec<String> = paths.filter(|path| self.shared.tree.exists(path)).collect();
        if existing.is_empty() {
            return Ok(());
        }
        // This also removes the cgroups of ended containers. Root in a container can have made very many cgroups below
        // the container's cgroup.
        self.run_apart(move |tree| {
            let results: Vec<_> = existing.iter().map(|path| tree.remove(path)).collect();
            results.into_iter().collect()
        })
        .await
    }

    /// Runs calls of systemd outside the executor's threads.
    async fn run_blocking(
        &self,
        call: impl FnOnce(&Tree) -> Result<(), CgroupError> + Send + 'static,
    ) -> Result<(), CgroupError> {
        if !self.shared.tree.uses_systemd() {
            return call(&self.shared.tree);
        }
        self.run_apart(call).await
    }

    /// Runs calls outside the executor's threads.
    async fn run_apart(
        &self,
        call: impl FnOnce(&Tree) -> Result<(), CgroupError> + Send + 'static,
    ) -> Result<(), CgroupError> {
        let shared = Arc::clone(&self.shared);
        let done = coracle_threads::spawn_blocking(move || call(&shared.tree)).await;
        done.map_err(CgroupError::Interrupted)?
    }
}

/// Maximum processes and threads of all pods together. Pods without their own limit could otherwise use up the process
/// IDs of the machine. The node could then start no process to end a pod. `None` if the machine's limits cannot be
/// read.
fn pids_of_all_pods(reserved: i64) -> Option<i64> {
    let read = |name: &str| {
        let text = std::fs::read_to_string(format!("/proc/sys/kernel/{name}")).ok()?;
        text.trim().parse::<i64>().ok()
    };
    Some(pids_for_pods(read("pid_max")?.min(read("threads-max")?), reserved))
}

/// Maximum processes of all pods together: nine tenths of the machine's maximum. If more than one tenth is reserved,
/// the limit is the maximum without the reserved number. At least 1, because the kernel refuses a negative limit.
fn pids_for_pods(most: i64, reserved: i64) -> i64 {
    (most - most / 10).min(most.saturating_sub(reserved)).max(1)
}

const CLASSES: [&str; 3] = ["kubepods", "kubepods/burstable", "kubepods/besteffort"];

fn uid_of_dir(name: String) -> Option<String> {
    name.strip_prefix("pod").map(str::to_owned)
}

fn pod_path(pod: &Pod) -> Result<String, CgroupError> {
    let uid = pod.metadata.uid.as_deref().filter(|uid| !uid.is_empty());
    let uid = uid.ok_or_else(|| CgroupError::NoUid(pod.metadata.name.clone().unwrap_or_default()))?;
    Ok(match qos_class(pod) {
        QosClass::Guaranteed => format!("kubepods/pod{uid}"),
        QosClass::Burstable => format!("kubepods/burstable/pod{uid}"),
        QosClass::BestEffort => format!("kubepods/besteffort/pod{uid}"),
    })
}

#[cfg(test)]
mod tests;

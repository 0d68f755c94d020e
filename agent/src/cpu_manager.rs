//! The CPU manager: exclusive CPUs for containers, and the CPUs of the shared pool for all other containers.
//!
//! Source: `pkg/kubelet/cm/cpumanager`. [`policy`] decides which containers get exclusive CPUs, and [`assign`] chooses
//! these CPUs. A change of the shared pool wakes a task that updates the cpusets of running containers. The kubelet
//! updates them every ten seconds.

mod assign;
mod options;
mod policy;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use coracle_proto::cri;
use k8s_openapi::api::core::v1::{Container, Pod};
use serde::{Deserialize, Serialize};
use tokio::sync::Notify;

use crate::kubelet_metrics::{Boundary, KubeletMetrics, Scope};
use crate::runtime::{Runtime, RuntimeError};
use crate::topology::machine::Level;
use crate::topology::state_file::{self, StateFileError};
use crate::topology::{AllocationError, CpuSet, Hint, HintProvider, Hints, is_regular_init};
pub use options::CpuOptions;
pub(crate) use policy::StaticPolicy;
use policy::{CpuState, exclusive_count, exclusive_count_of_pod};

/// Name of the policy in the kubelet's configuration and in the state file.
pub(crate) const STATIC: &str = "static";
/// Delay before failed updates of cpusets are retried. It equals the interval of the kubelet's updates.
const RETRY: Duration = Duration::from_secs(10);
/// Labels of a container, with the kubelet's names.
const POD_UID: &str = "io.kubernetes.pod.uid";
const CONTAINER_NAME: &str = "io.kubernetes.container.name";
/// Name of the resource in topology hints.
const CPU: &str = "cpu";

/// The CPU manager with the static policy.
pub(crate) struct CpuManager {
    policy: StaticPolicy,
    file: PathBuf,
    current: Mutex<Current>,
    /// Notified when the cpuset of a running container may be wrong.
    changed: Notify,
    metrics: Arc<KubeletMetrics>,
}

#[derive(Default)]
struct Current {
    state: CpuState,
    /// Whether the state differs from the state file.
    is_changed: bool,
    /// Uid of the pod whose CPUs are being allocated, and the CPUs of its init containers. Later containers of the pod
    /// may use these CPUs.
    reusable: (String, CpuSet),
    /// CPUs in the cpusets of running containers, by pod uid and container name. The next update also sets the cpusets
    /// of containers without an entry.
    applied: HashMap<String, HashMap<String, Applied>>,
}

/// The newest container of a name, and the CPUs in its cpuset.
struct Applied {
    id: String,
    cpus: CpuSet,
}

/// The state file: format 2 of the kubelet.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct StateFile {
    policy_name: String,
    default_cpu_set: CpuSet,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    entries: BTreeMap<String, BTreeMap<String, CpuSet>>,
    #[serde(default)]
    checksum: u64,
}

// === impl StateFile ===

impl StateFile {
    fn of(state: &CpuState) -> Self {
        Self {
            policy_name: STATIC.to_owned(),
            default_cpu_set: state.shared.clone(),
            entries: state.exclusive.clone(),
            checksum: 0,
        }
    }
}

// === impl CpuManager ===

impl CpuManager {
    /// Opens the state of an earlier start, or creates it.
    ///
    /// # Errors
    /// When the state cannot be read or written, or does not fit the machine or the settings.
    pub(crate) fn open(
        policy: StaticPolicy,
        file: PathBuf,
        metrics: Arc<KubeletMetrics>,
    ) -> Result<Self, StateFileError> {
        let stored: Option<StateFile> = state_file::read(&file, STATIC)?;
        let stored = stored.map(|file| CpuState { shared: file.default_cpu_set, exclusive: file.entries });
        // A state without exclusive CPUs is replaced. Such a state may differ from the machine: other CPUs may be
        // online or reserved now.
        let state = match stored.filter(|state| !state.exclusive.is_empty()) {
            Some(state) => {
                policy.check_state(&state).map_err(|problem| state_file::unusable(&file, problem))?;
                state
            }
            None => {
                let state = policy.initial_state();
                state_file::write(&file, &StateFile::of(&state))?;
                state
            }
        };
        metrics.create_alignments(Scope::Container, Boundary::PhysicalCpu, [true, false]);
        metrics.create_alignments(Scope::Container, Boundary::UncoreCache, [true]);
        let current = Mutex::new(Current { state, ..Current::default() });
        let manager = Self { policy, file, current, changed: Notify::new(), metrics };
        manager.report(&manager.lock().state);
        // The cpusets of containers of an earlier agent may be wrong.
        manager.changed.notify_one();
        Ok(manager)
    }

    /// Sets the CPUs of a container at its creation. Exclusive CPUs need no quota.
    pub(crate) fn pin(&self, uid: &str, container: &str, resources: &mut cri::LinuxContainerResources) {
        let current = self.lock();
        resources.cpuset_cpus = current.state.cpus_of(uid, container).to_string();
        current.lift_quota(uid, container, resources);
    }

    /// Removes the CPU quota of a container with exclusive CPUs.
    pub(crate) fn lift_quota(
        &self,
        uid: &str,
        container: &str,
        resources: &mut cri::LinuxContainerResources,
    ) {
        self.lock().lift_quota(uid, container, resources);
    }

    /// Whether a container of the pod has exclusive CPUs.
    pub(crate) fn has_exclusive(&self, uid: &str) -> bool {
        self.lock().state.exclusive.contains_key(uid)
    }

    /// The exclusive CPUs of a container.
    pub(crate) fn exclusive_cpus(&self, uid: &str, container: &str) -> CpuSet {
        self.lock().state.of(uid, container).cloned().unwrap_or_default()
    }

    /// CPUs that containers can get exclusively, including CPUs that are already assigned.
    pub(crate) fn assignable(&self) -> CpuSet {
        self.policy.assignable()
    }

    /// Records the CPUs with which a container has started. If the shared pool has changed since its creation, the
    /// container is updated.
    pub(crate) fn started(&self, uid: &str, container: &str, id: &str, cpus: &str) {
        let Ok(cpus) = cpus.parse::<CpuSet>() else { return };
        let mut current = self.lock();
        let is_outdated = *current.state.cpus_of(uid, container) != cpus;
        let of_pod = current.applied.entry(uid.to_owned()).or_default();
        // An entry with this id comes from an update of the running container, which is newer.
        if of_pod.get(container).is_none_or(|applied| applied.id != id) {
            of_pod.insert(container.to_owned(), Applied { id: id.to_owned(), cpus });
        }
        if is_outdated {
            self.changed.notify_one();
        }
    }

    /// Updates the CPUs of running containers after each change, until dropped.
    pub(crate) async fn run(&self, runtime: &dyn Runtime) {
        loop {
            self.changed.notified().await;
            while !self.update_containers(runtime).await {
                self.wait_to_retry().await;
            }
        }
    }

    /// Waits until failed updates are retried. A change ends the wait, so a container that cannot be updated does not
    /// delay the updates of other containers.
    async fn wait_to_retry(&self) {
        // Cancel-safe: a notification that the dropped future has not taken is kept.
        let _changed_or_elapsed = tokio::time::timeout(RETRY, self.changed.notified()).await;
    }

    /// Gives running containers the CPUs that they should have. Returns whether all updates succeeded.
    async fn update_containers(&self, runtime: &dyn Runtime) -> bool {
        let known: HashSet<String> = self.lock().applied.keys().cloned().collect();
        let listed = match runtime.list_containers(cri::ListContainersRequest::default()).await {
            Ok(listed) => listed.containers,
            Err(error) => {
                tracing::warn!(error = error.message(), "cannot list containers to update their CPUs");
                return false;
            }
        };
        let is_running =
            |container: &cri::Container| container.state() == cri::ContainerState::ContainerRunning;
        let running: Vec<cri::Container> = listed.into_iter().filter(is_running).collect();
        let uids: HashSet<&str> = running.iter().filter_map(|container| Some(owner(container)?.0)).collect();
        // Entries of pods that were added during the call stay, because their containers are possibly not in the list.
        self.lock().applied.retain(|uid, _| uids.contains(uid.as_str()) || !known.contains(uid));
        let mut succeeded = true;
        for container in &running {
            let Some(cpus) = self.due(container) else { continue };
            succeeded &= self.update(runtime, container, cpus).await;
        }
        succeeded
    }

    /// The CPUs that a running container should have. None if its cpuset has exactly these CPUs, or if it does not
    /// belong to a pod.
    fn due(&self, container: &cri::Container) -> Option<CpuSet> {
        let (uid, name) = owner(container)?;
        let current = self.lock();
        let cpus = current.state.cpus_of(uid, name);
        let applied = current.applied.get(uid).and_then(|of_pod| of_pod.get(name));
        let is_applied = applied.is_some_and(|applied| applied.id == container.id && applied.cpus == *cpus);
        (!cpus.is_empty() && !is_applied).then(|| cpus.clone())
    }

    async fn update(&self, runtime: &dyn Runtime, container: &cri::Container, cpus: CpuSet) -> bool {
        let resources = cri::LinuxContainerResources { cpuset_cpus: cpus.to_string(), ..Default::default() };
        let request = cri::UpdateContainerResourcesRequest {
            container_id: container.id.clone(),
            linux: Some(resources),
            ..Default::default()
        };
        match runtime.update_container_resources(request).await {
            Ok(_updated) => {
                self.updated(container, cpus);
                true
            }
            Err(RuntimeError::NotFound(_)) => true,
            Err(error) => {
                tracing::warn!(
                    container = container.id,
                    error = error.message(),
                    "cannot update the CPUs of a container"
                );
                false
            }
        }
    }

    /// Records the CPUs to which a running container was updated.
    fn updated(&self, container: &cri::Container, cpus: CpuSet) {
        let Some((uid, name)) = owner(container) else { return };
        let applied = Applied { id: container.id.clone(), cpus };
        self.lock().applied.entry(uid.to_owned()).or_default().insert(name.to_owned(), applied);
    }

    /// Assigns the CPUs that a container requests. An error changes nothing.
    fn assign(
        &self,
        current: &mut Current,
        pod: &Pod,
        container: &Container,
        affinity: Hint,
    ) -> Result<CpuSet, AllocationError> {
        let count = exclusive_count(pod, container);
        let state = &mut current.state;
        let cpus = self.policy.assign(state, count, affinity.nodes, &current.reusable.1)?;
        let of_pod = state.exclusive.entry(uid(pod).to_owned()).or_default();
        of_pod.insert(container.name.clone(), cpus.clone());
        current.is_changed = true;
        self.report(&current.state);
        self.changed.notify_one();
        if self.policy.is_in_one_cache(&cpus) {
            self.metrics.aligned(Scope::Container, Boundary::UncoreCache, true);
        }
        Ok(cpus)
    }

    fn write(&self, current: &mut Current) -> Result<(), StateFileError> {
        let written = state_file::write(&self.file, &StateFile::of(&current.state));
        current.is_changed = written.is_err();
        written.inspect_err(|error| {
            let error = error as &dyn std::error::Error;
            tracing::warn!(error, "cannot record exclusive CPUs");
        })
    }

    fn report(&self, state: &CpuState) {
        let exclusive = state.all_exclusive();
        let topology = self.policy.topology();
        let nodes = topology.parts(Level::Numa).into_iter();
        let per_node =
            nodes.map(|node| (node, topology.members(Level::Numa, node).intersection(&exclusive).len()));
        let available = self.policy.available(state).len();
        self.metrics.exclusive_cpus(available, exclusive.len(), per_node);
    }

    fn lock(&self) -> MutexGuard<'_, Current> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl HintProvider for CpuManager {
    fn container_hints(&self, pod: &Pod, container: &Container) -> Hints {
        let count = exclusive_count(pod, container);
        if count == 0 {
            return Hints::new();
        }
        let current = self.lock();
        let uid = uid(pod);
        let hints = match current.state.of(uid, &container.name) {
            Some(cpus) if cpus.len() != count => Vec::new(),
            Some(cpus) => self.policy.hints(cpus, &CpuSet::default(), count),
            None => self.policy.hints(&self.policy.available(&current.state), current.reusable(uid), count),
        };
        Hints::from([(CPU.to_owned(), hints)])
    }

    fn pod_hints(&self, pod: &Pod) -> Hints {
        let Some(spec) = &pod.spec else { return Hints::new() };
        let count = exclusive_count_of_pod(pod, spec);
        if count == 0 {
            return Hints::new();
        }
        let current = self.lock();
        let uid = uid(pod);
        let mut assigned = CpuSet::default();
        for container in spec.init_containers.iter().flatten().chain(&spec.containers) {
            let Some(cpus) = current.state.of(uid, &container.name) else { continue };
            if cpus.len() != exclusive_count(pod, container) {
                return Hints::from([(CPU.to_owned(), Vec::new())]);
            }
            assigned = assigned.union(cpus);
        }
        let hints = if assigned.len() == count {
            self.policy.hints(&assigned, &CpuSet::default(), count)
        } else {
            let reusable = current.reusable(uid).union(&assigned);
            self.policy.hints(&self.policy.available(&current.state), &reusable, count)
        };
        Hints::from([(CPU.to_owned(), hints)])
    }

    fn allocate(&self, pod: &Pod, container: &Container, affinity: Hint) -> Result<(), AllocationError> {
        if exclusive_count(pod, container) == 0 {
            return Ok(());
        }
        let (uid, name) = (uid(pod), container.name.as_str());
        let mut current = self.lock();
        if current.reusable.0 != uid {
            current.reusable = (uid.to_owned(), CpuSet::default());
        }
        let known = current.state.of(uid, name).cloned();
        let allocated = match known {
            Some(cpus) => Ok(cpus),
            None => self.assign(&mut current, pod, container, affinity),
        };
        self.metrics.cpus_pinned(allocated.is_ok());
        if self.policy.has_full_cores() {
            self.metrics.aligned(Scope::Container, Boundary::PhysicalCpu, allocated.is_ok());
        }
        let cpus = allocated?;
        let is_init = pod.spec.as_ref().is_some_and(|spec| is_regular_init(spec, name));
        let reusable = &current.reusable.1;
        current.reusable.1 = if is_init { reusable.union(&cpus) } else { reusable.difference(&cpus) };
        Ok(())
    }

    fn record(&self, uid: &str) -> Result<(), AllocationError> {
        let mut current = self.lock();
        if !current.is_changed || !current.state.exclusive.contains_key(uid) {
            return Ok(());
        }
        self.write(&mut current).map_err(|error| AllocationError::Unexpected(error.to_string()))
    }

    fn holds(&self, uid: &str) -> bool {
        self.has_exclusive(uid)
    }

    fn release(&self, uid: &str) {
        let mut current = self.lock();
        current.applied.remove(uid);
        if !current.state.release(uid) {
            return;
        }
        if current.reusable.0 == uid {
            current.reusable = Default::default();
        }
        // If the write fails, the file still has the CPUs of this pod. The next start of the agent releases them.
        let _logged = self.write(&mut current);
        self.report(&current.state);
        self.changed.notify_one();
    }

    fn retain(&self, keep: &dyn Fn(&str) -> bool) {
        let stale: Vec<String> =
            self.lock().state.exclusive.keys().filter(|uid| !keep(uid)).cloned().collect();
        stale.iter().for_each(|uid| self.release(uid));
    }
}

// === impl Current ===

impl Current {
    /// Removes the CPU quota of a container with exclusive CPUs.
    fn lift_quota(&self, uid: &str, container: &str, resources: &mut cri::LinuxContainerResources) {
        if resources.cpu_period > 0 && self.state.of(uid, container).is_some() {
            resources.cpu_quota = -1;
        }
    }

    /// CPUs that the containers of this pod can take over from its init containers.
    fn reusable(&self, uid: &str) -> &CpuSet {
        static NONE: CpuSet = CpuSet::EMPTY;
        if self.reusable.0 == uid { &self.reusable.1 } else { &NONE }
    }
}

/// Path of the state file in the state directory.
pub(crate) fn state_path(state_dir: &Path) -> PathBuf {
    state_dir.join("cpu_manager_state")
}

/// Pod uid and name of a container. None if the container does not belong to a pod.
fn owner(container: &cri::Container) -> Option<(&str, &str)> {
    Some((container.labels.get(POD_UID)?.as_str(), container.labels.get(CONTAINER_NAME)?.as_str()))
}

fn uid(pod: &Pod) -> &str {
    pod.metadata.uid.as_deref().unwrap_or_default()
}

#[cfg(test)]
mod tests;

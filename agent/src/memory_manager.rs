//! The memory manager: chooses NUMA nodes for the memory of containers.
//!
//! Source: `pkg/kubelet/cm/memorymanager`. [`policy`] decides. Containers of pods with class Guaranteed get memory and
//! huge pages of as few NUMA nodes as possible. `cpuset.mems` restricts a container to its nodes.

pub(crate) mod policy;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use k8s_openapi::api::core::v1::{Container, Pod, PodSpec};
use serde::{Deserialize, Serialize};

use crate::kubelet_metrics::KubeletMetrics;
use crate::topology::state_file::{self, StateFileError};
use crate::topology::{AllocationError, CpuSet, Hint, HintProvider, Hints, is_regular_init};
use policy::{Block, MemoryState, NodeMemory, Reusable, is_pinned, known_hints, requested, requested_of_pod};

/// Name of the policy in the kubelet's configuration and in the state file.
pub(crate) const STATIC: &str = "Static";

/// The memory manager with the static policy.
pub(crate) struct MemoryManager {
    file: PathBuf,
    current: Mutex<Current>,
    metrics: Arc<KubeletMetrics>,
}

struct Current {
    state: MemoryState,
    /// Whether the state differs from the state file.
    is_changed: bool,
    /// Memory of the init containers of the pod whose memory is being allocated.
    reusable: Reusable,
}

/// The state file: format 1 of the kubelet.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct StateFile {
    policy_name: String,
    machine_state: BTreeMap<u32, NodeMemory>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    entries: BTreeMap<String, BTreeMap<String, Vec<Block>>>,
    #[serde(default)]
    checksum: u64,
}

// === impl MemoryManager ===

impl MemoryManager {
    /// Opens the state of an earlier start, or creates it. `empty` is the memory of this machine without containers.
    ///
    /// # Errors
    /// When the state cannot be read or written, or does not fit the machine or the settings.
    pub(crate) fn open(
        empty: MemoryState,
        file: PathBuf,
        metrics: Arc<KubeletMetrics>,
    ) -> Result<Self, StateFileError> {
        let stored: Option<StateFile> = state_file::read(&file, STATIC)?;
        let stored = stored.map(|file| MemoryState { nodes: file.machine_state, blocks: file.entries });
        // A state without memory of containers is replaced, because the machine may have changed since it was written.
        let state = match stored.filter(|state| !state.blocks.is_empty()) {
            Some(state) => {
                state.check(&empty).map_err(|problem| state_file::unusable(&file, problem))?;
                state
            }
            None => {
                write(&file, &empty)?;
                empty
            }
        };
        let current = Current { state, is_changed: false, reusable: Reusable::default() };
        Ok(Self { file, current: Mutex::new(current), metrics })
    }

    /// The NUMA nodes of a container's memory, in the kernel's list format. Empty if the container may use all nodes.
    pub(crate) fn nodes_of(&self, uid: &str, container: &str) -> String {
        let current = self.lock();
        let blocks = current.state.of(uid, container).into_iter().flatten();
        let nodes: CpuSet = blocks.flat_map(|block| block.nodes().nodes()).collect();
        nodes.to_string()
    }

    /// The memory of a container.
    pub(crate) fn blocks_of(&self, uid: &str, container: &str) -> Vec<Block> {
        self.lock().state.of(uid, container).cloned().unwrap_or_default()
    }

    /// The memory that containers can get, including memory that is already allocated.
    pub(crate) fn allocatable(&self) -> Vec<Block> {
        self.lock().state.allocatable()
    }

    /// Releases the memory of the init containers that precede a started container, because they have ended. The start
    /// of an ephemeral container releases nothing: it can start at any time.
    pub(crate) fn started(&self, uid: &str, spec: &PodSpec, container: &str) {
        let mut all = spec.init_containers.iter().flatten().chain(&spec.containers);
        let mut current = self.lock();
        if !current.state.blocks.contains_key(uid) || !all.any(|other| other.name == container) {
            return;
        }
        let inits = spec.init_containers.iter().flatten().map(|init| init.name.as_str());
        let ended = inits.take_while(|name| *name != container).filter(|name| is_regular_init(spec, name));
        let mut is_changed = false;
        for name in ended {
            is_changed |= current.state.release_container(uid, name);
        }
        if is_changed {
            let _logged = self.write(&mut current);
        }
    }

    fn write(&self, current: &mut Current) -> Result<(), StateFileError> {
        let written = write(&self.file, &current.state);
        current.is_changed = written.is_err();
        written.inspect_err(|error| {
            let error = error as &dyn std::error::Error;
            tracing::warn!(error, "cannot record the memory of containers");
        })
    }

    fn lock(&self) -> MutexGuard<'_, Current> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl HintProvider for MemoryManager {
    fn container_hints(&self, pod: &Pod, container: &Container) -> Hints {
        let Some(requested) = requested(container).ok().filter(|_| is_pinned(pod)) else {
            return Hints::new();
        };
        let current = self.lock();
        let uid = uid(pod);
        match current.state.of(uid, &container.name) {
            Some(blocks) => known_hints(blocks, &requested),
            None if current.reusable.uid == uid => current.state.hints(&requested, &current.reusable),
            None => current.state.hints(&requested, &Reusable::default()),
        }
    }

    fn pod_hints(&self, pod: &Pod) -> Hints {
        let Some(spec) = pod.spec.as_ref().filter(|_| is_pinned(pod)) else { return Hints::new() };
        let Ok(requested) = requested_of_pod(spec) else { return Hints::new() };
        let current = self.lock();
        let mut containers = spec.init_containers.iter().flatten().chain(&spec.containers);
        match containers.find_map(|container| current.state.of(uid(pod), &container.name)) {
            Some(blocks) => known_hints(blocks, &requested),
            None => current.state.hints(&requested, &Reusable::default()),
        }
    }

    fn allocate(&self, pod: &Pod, container: &Container, affinity: Hint) -> Result<(), AllocationError> {
        let Some(spec) = pod.spec.as_ref().filter(|_| is_pinned(pod)) else { return Ok(()) };
        let uid = uid(pod);
        let mut current = self.lock();
        let known = current.state.of(uid, &container.name).cloned();
        let allocated = match known {
            Some(blocks) => Ok(blocks),
            None => current.assign(uid, spec, container, affinity),
        };
        self.metrics.memory_pinned(allocated.is_ok());
        let blocks = allocated?;
        let is_init = is_regular_init(spec, &container.name);
        policy::reuse(&mut current.reusable, uid, &blocks, is_init);
        Ok(())
    }

    fn record(&self, uid: &str) -> Result<(), AllocationError> {
        let mut current = self.lock();
        if !current.is_changed || !current.state.blocks.contains_key(uid) {
            return Ok(());
        }
        self.write(&mut current).map_err(|error| AllocationError::Unexpected(error.to_string()))
    }

    fn holds(&self, uid: &str) -> bool {
        self.lock().state.blocks.contains_key(uid)
    }

    fn release(&self, uid: &str) {
        let mut current = self.lock();
        if current.reusable.uid == uid {
            current.reusable = Reusable::default();
        }
        if current.state.release(uid) {
            // If the write fails, the file still has the memory of this pod. The next start of the agent releases it.
            let _logged = self.write(&mut current);
        }
    }

    fn retain(&self, keep: &dyn Fn(&str) -> bool) {
        let stale: Vec<String> = self.lock().state.blocks.keys().filter(|uid| !keep(uid)).cloned().collect();
        stale.iter().for_each(|uid| self.release(uid));
    }
}

// === impl Current ===

impl Current {
    /// Allocates memory. After an error the state is the same as before.
    fn assign(
        &mut self,
        uid: &str,
        spec: &PodSpec,
        container: &Container,
        affinity: Hint,
    ) -> Result<Vec<Block>, AllocationError> {
        let unexpected = AllocationError::Unexpected;
        let requested = requested(container).map_err(unexpected)?;
        let none = Reusable::default();
        let reusable = if self.reusable.uid == uid { &self.reusable } else { &none };
        let blocks = self.state.allocate(&requested, affinity, reusable).map_err(unexpected)?;
        self.state.store(uid, spec, &container.name, blocks.clone());
        self.is_changed = true;
        Ok(blocks)
    }
}

/// Path of the state file in the state directory.
pub(crate) fn state_path(state_dir: &Path) -> PathBuf {
    state_dir.join("memory_manager_state")
}

fn write(file: &Path, state: &MemoryState) -> Result<(), StateFileError> {
    let content = StateFile {
        policy_name: STATIC.to_owned(),
        machine_state: state.nodes.clone(),
        entries: state.blocks.clone(),
        checksum: 0,
    };
    state_file::write(file, &content)
}

fn uid(pod: &Pod) -> &str {
    pod.metadata.uid.as_deref().unwrap_or_default()
}

#[cfg(test)]
mod tests;

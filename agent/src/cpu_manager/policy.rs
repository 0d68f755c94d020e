//! The static policy: which containers get exclusive CPUs, and which CPUs these are. Pure.
//!
//! ```text
//! all online CPUs = shared pool + exclusive CPUs of containers      (+ reserved CPUs, with strict-cpu-reservation)
//! shared pool     = reserved CPUs + CPUs that can be assigned
//! ```
//! A container of a pod with class Guaranteed that requests whole CPUs gets exclusive CPUs. All other containers run in
//! the shared pool. Source: `pkg/kubelet/cm/cpumanager/policy_static.go`, with the feature gate
//! PodLevelResourceManagers off: pods with pod-level resources run in the shared pool.

use std::collections::{BTreeMap, BTreeSet};

use coracle_values::pod_resources::Side;
use coracle_values::quantity::{millis_of, value_of};
use k8s_openapi::api::core::v1::{Container, Pod, PodSpec};

use super::assign::{AssignError, Distribution, distributed, packed};
use super::options::{CpuOptions, Placement};
use crate::cgroup::{QosClass, qos_class};
use crate::topology::machine::{CpuTopology, Level};
use crate::topology::numa_mask::{NumaMask, for_each_mask};
use crate::topology::{AllocationError, CpuSet, Hint, TopologyPolicy, has_pod_resources, is_regular_init};

/// The shared pool, and the exclusive CPUs of containers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct CpuState {
    pub(crate) shared: CpuSet,
    /// By pod uid and container name. Containers of one pod may have the same CPUs if they do not run at the same time.
    pub(crate) exclusive: BTreeMap<String, BTreeMap<String, CpuSet>>,
}

/// The static policy on one machine.
#[derive(Clone, Debug)]
pub(crate) struct StaticPolicy {
    topology: CpuTopology,
    /// CPUs that no container can get exclusively.
    reserved: CpuSet,
    /// The reserved CPUs, and the other CPUs of their cores.
    reserved_cores: CpuSet,
    options: CpuOptions,
}

// === impl CpuState ===

impl CpuState {
    /// The exclusive CPUs of a container.
    pub(crate) fn of(&self, uid: &str, container: &str) -> Option<&CpuSet> {
        self.exclusive.get(uid)?.get(container)
    }

    /// The CPUs of a container: its exclusive CPUs, or the shared pool.
    pub(crate) fn cpus_of(&self, uid: &str, container: &str) -> &CpuSet {
        self.of(uid, container).unwrap_or(&self.shared)
    }

    /// All exclusive CPUs.
    pub(crate) fn all_exclusive(&self) -> CpuSet {
        let sets = self.exclusive.values().flat_map(BTreeMap::values);
        sets.fold(CpuSet::default(), |all, cpus| all.union(cpus))
    }

    /// Returns the exclusive CPUs of a pod to the shared pool. Returns whether the pod had exclusive CPUs.
    pub(crate) fn release(&mut self, uid: &str) -> bool {
        let Some(containers) = self.exclusive.remove(uid) else { return false };
        self.shared =
            containers.values().fold(std::mem::take(&mut self.shared), |shared, cpus| shared.union(cpus));
        true
    }
}

// === impl StaticPolicy ===

impl StaticPolicy {
    /// A policy with `count` reserved CPUs: `reserved` or, if that is not set, CPUs of the lowest cores.
    ///
    /// # Errors
    /// A message if the CPUs cannot be reserved, or the options do not fit the machine or the topology policy.
    pub(crate) fn new(
        topology: CpuTopology,
        count: usize,
        reserved: Option<CpuSet>,
        options: CpuOptions,
        policy: TopologyPolicy,
    ) -> Result<Self, String> {
        options.check(&topology, policy)?;
        let mut made =
            Self { topology, options, reserved: CpuSet::default(), reserved_cores: CpuSet::default() };
        let chosen = || made.take(made.topology.all(), count).unwrap_or_default();
        let reserved = reserved.filter(|reserved| !reserved.is_empty()).unwrap_or_else(chosen);
        if reserved.len() != count {
            return Err(format!(
                "unable to reserve the required amount of CPUs (size of {reserved} did not equal {count})"
            ));
        }
        let cores: BTreeSet<u32> =
            reserved.iter().filter_map(|cpu| Some(made.topology.get(cpu)?.core)).collect();
        let siblings = cores.into_iter().map(|core| made.topology.members(Level::Core, core));
        made.reserved_cores = siblings.fold(reserved.clone(), |all, cpus| all.union(&cpus));
        made.reserved = reserved;
        Ok(made)
    }

    /// The state of a node without exclusive CPUs.
    pub(crate) fn initial_state(&self) -> CpuState {
        CpuState { shared: self.usable(), exclusive: BTreeMap::new() }
    }

    /// Checks the state of an earlier start. The messages are upstream's.
    pub(crate) fn check_state(&self, state: &CpuState) -> Result<(), String> {
        let (reserved, shared) = (&self.reserved, &state.shared);
        let both = reserved.intersection(shared);
        // With strict reservation the shared pool can be empty: containers can have all other CPUs exclusively.
        if shared.is_empty() && !self.options.strict_reservation {
            return Err("default cpuset cannot be empty".to_owned());
        }
        if self.options.strict_reservation && !both.is_empty() {
            return Err(format!(
                "some of strictly reserved cpus: \"{both}\" are present in defaultCpuSet: \"{shared}\""
            ));
        }
        if !self.options.strict_reservation && both != *reserved {
            return Err(format!(
                "not all reserved cpus: \"{reserved}\" are present in defaultCpuSet: \"{shared}\""
            ));
        }
        for (pod, containers) in &state.exclusive {
            let overlapping = containers.iter().find(|(_, cpus)| !cpus.intersection(shared).is_empty());
            if let Some((container, cpus)) = overlapping {
                return Err(format!(
                    "pod: {pod}, container: {container} cpuset: \"{cpus}\" overlaps with default cpuset \"{shared}\""
                ));
            }
        }
        let (known, usable) = (shared.union(&state.all_exclusive()), self.usable());
        if known != usable {
            return Err(format!(
                "current set of available CPUs \"{usable}\" doesn't match with CPUs in state \"{known}\""
            ));
        }
        Ok(())
    }

    /// CPUs of the shared pool that can be assigned.
    pub(crate) fn available(&self, state: &CpuState) -> CpuSet {
        state.shared.difference(&self.reserved)
    }

    /// CPUs that containers can get exclusively, including CPUs that are already assigned.
    pub(crate) fn assignable(&self) -> CpuSet {
        self.topology.all().difference(&self.reserved)
    }

    pub(crate) fn topology(&self) -> &CpuTopology {
        &self.topology
    }

    /// Whether CPUs share their last-level cache.
    pub(crate) fn is_in_one_cache(&self, cpus: &CpuSet) -> bool {
        let caches: BTreeSet<u32> =
            cpus.iter().filter_map(|cpu| Some(self.topology.get(cpu)?.cache)).collect();
        caches.len() <= 1
    }

    /// Whether only whole cores are assigned.
    pub(crate) fn has_full_cores(&self) -> bool {
        self.options.full_cores
    }

    /// Assigns `count` exclusive CPUs, if possible from the NUMA nodes of the affinity. `reusable` has the CPUs of init
    /// containers of the same pod, which end before this container starts.
    pub(crate) fn assign(
        &self,
        state: &mut CpuState,
        count: usize,
        affinity: Option<NumaMask>,
        reusable: &CpuSet,
    ) -> Result<CpuSet, AllocationError> {
        self.check_cores(state, count)?;
        let available = self.available(state).union(reusable);
        let aligned =
            affinity.map(|nodes| available.intersection(&self.cpus_of_nodes(nodes))).unwrap_or_default();
        let unexpected = |error: AssignError| AllocationError::Unexpected(error.to_string());
        let first = self.take(&aligned, count.min(aligned.len())).map_err(unexpected)?;
        let rest = self.take(&available.difference(&first), count - first.len()).map_err(unexpected)?;
        let cpus = first.union(&rest);
        state.shared = state.shared.difference(&cpus);
        Ok(cpus)
    }

    /// Hints for `count` CPUs.
    pub(crate) fn hints(&self, available: &CpuSet, reusable: &CpuSet, count: usize) -> Vec<Hint> {
        let nodes: Vec<u32> = self.topology.parts(Level::Numa).into_iter().collect();
        let in_mask = |cpus: &CpuSet, mask: NumaMask| {
            cpus.iter()
                .filter(|cpu| self.topology.get(*cpu).is_some_and(|cpu| mask.contains(cpu.numa)))
                .count()
        };
        let (mut fewest, mut masks) = (nodes.len(), Vec::new());
        for_each_mask(&nodes, |mask| {
            if in_mask(self.topology.all(), mask) >= count {
                fewest = fewest.min(mask.count());
            }
            let reused = in_mask(reusable, mask);
            if reused == reusable.len() && reused + in_mask(available, mask) >= count {
                masks.push(mask);
            }
        });
        let is_preferred = |mask: NumaMask| mask.count() == fewest || self.is_of_few_sockets(mask, fewest);
        masks.into_iter().map(|mask| Hint { nodes: Some(mask), preferred: is_preferred(mask) }).collect()
    }

    /// Whether the nodes of a mask are in as few sockets as `fewest` nodes need. Always false unless CPUs are aligned
    /// with sockets.
    fn is_of_few_sockets(&self, mask: NumaMask, fewest: usize) -> bool {
        let per_socket = self
            .topology
            .parts(Level::Numa)
            .len()
            .checked_div(self.topology.parts(Level::Socket).len())
            .unwrap_or(0);
        self.options.align_by_socket
            && per_socket > 0
            && self.sockets(mask).len() == fewest.div_ceil(per_socket)
    }

    fn sockets(&self, mask: NumaMask) -> BTreeSet<u32> {
        let cpus = self.topology.all().iter().filter_map(|cpu| self.topology.get(cpu));
        cpus.filter(|cpu| mask.contains(cpu.numa)).map(|cpu| cpu.socket).collect()
    }

    /// The CPUs of these nodes or, with the option align-by-socket, of their sockets.
    fn cpus_of_nodes(&self, nodes: NumaMask) -> CpuSet {
        let (level, parts) = if self.options.align_by_socket {
            (Level::Socket, self.sockets(nodes))
        } else {
            (Level::Numa, nodes.nodes().collect())
        };
        let members = parts.into_iter().map(|part| self.topology.members(level, part));
        members.fold(CpuSet::default(), |all, cpus| all.union(&cpus))
    }

    /// With full-pcpus-only, refuses requests that whole cores cannot satisfy.
    fn check_cores(&self, state: &CpuState, requested: usize) -> Result<(), AllocationError> {
        let per_core = self.topology.per_part(Level::Core).max(1);
        if !self.options.full_cores {
            return Ok(());
        }
        if !requested.is_multiple_of(per_core) {
            return Err(AllocationError::PartOfCore { requested, per_core });
        }
        let available = state.shared.difference(&self.reserved_cores).len();
        if requested > available {
            return Err(AllocationError::FewCores { available, requested, per_core });
        }
        Ok(())
    }

    fn take(&self, available: &CpuSet, count: usize) -> Result<CpuSet, AssignError> {
        let order = self.options.order();
        if self.options.placement == Placement::AcrossNuma {
            let group = if self.options.full_cores { self.topology.per_part(Level::Core) } else { 1 };
            return distributed(&self.topology, available, Distribution { count, group, order });
        }
        packed(&self.topology, available, count, order)
    }

    /// All CPUs that containers can use.
    fn usable(&self) -> CpuSet {
        let all = self.topology.all();
        if self.options.strict_reservation { all.difference(&self.reserved) } else { all.clone() }
    }
}

/// Number of exclusive CPUs that a container gets; 0 if it runs in the shared pool.
pub(crate) fn exclusive_count(pod: &Pod, container: &Container) -> usize {
    if has_pod_resources(pod) || qos_class(pod) != QosClass::Guaranteed {
        return 0;
    }
    let Some(request) = Side::Requests.get(container.resources.as_ref(), "cpu") else { return 0 };
    let (whole, millis) = (value_of(request), millis_of(request));
    let is_whole = i128::from(whole) * 1000 == i128::from(millis);
    if is_whole { usize::try_from(whole).unwrap_or(0) } else { 0 }
}

/// Largest number of exclusive CPUs that the containers of a pod need at the same time.
pub(crate) fn exclusive_count_of_pod(pod: &Pod, spec: &PodSpec) -> usize {
    let (mut sidecars, mut inits) = (0_usize, 0_usize);
    for container in spec.init_containers.iter().flatten() {
        let count = exclusive_count(pod, container);
        if is_regular_init(spec, &container.name) {
            inits = inits.max(sidecars.saturating_add(count));
        } else {
            sidecars = sidecars.saturating_add(count);
        }
    }
    let mains = spec.containers.iter().map(|container| exclusive_count(pod, container));
    inits.max(mains.fold(sidecars, usize::saturating_add))
}

#[cfg(test)]
mod tests;

//! The managers of CPUs, memory and topology. Settings enable each of them.
//!
//! If all policies are `none`, there is no manager, no file, no task and no cpuset. The resources of a pod are
//! allocated at its admission, and released after the end of its containers. The state files survive restarts of the
//! agent: running containers keep their CPUs and their memory.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use coracle_proto::cri;
use coracle_values::CollectMap;
use coracle_values::Quantity;
use coracle_values::pod_resources::Side;
use coracle_values::quantity::value_of;
use k8s_openapi::api::core::v1::{Container, Pod};

use crate::cgroup::{QosClass, qos_class};
use crate::cpu_manager::{self, CpuManager, CpuOptions, StaticPolicy};
use crate::device_plugins::{AlignedDevices, DevicePlugins};
use crate::kubelet_metrics::{InfeasibleReason, KubeletMetrics};
use crate::memory_manager::policy::{Amounts, Block, MemoryState};
use crate::memory_manager::{self, MemoryManager};
use crate::node::MachineProperties;
use crate::runtime::Runtime;
use crate::topology::machine::{Machine, MachineError};
use crate::topology::state_file::{self, StateFileError};
use crate::topology::{
    AllocationError, CpuSet, HintProvider, TopologyManager, TopologyPolicy, TopologySettings,
};

/// Settings of the managers.
#[derive(Clone, Debug, Default)]
pub struct ResourceManagerConfig {
    /// Options of the CPU manager's static policy. None means the policy `none`.
    pub cpu: Option<CpuOptions>,
    /// CPUs that are reserved for the system. None means the lowest CPUs, as many as the reserved amount.
    pub reserved_cpus: Option<CpuSet>,
    /// Memory that is reserved for the system, for the memory manager's static policy. None means the policy `None`.
    pub memory: Option<ReservedMemory>,
    /// Settings of the topology manager.
    pub topology: TopologySettings,
}

/// Bytes of memory and huge pages that are reserved for the system, by NUMA node and resource.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReservedMemory(pub BTreeMap<u32, BTreeMap<String, u64>>);

/// Inputs of the start of the managers.
pub(crate) struct ManagerInputs<'a> {
    pub(crate) settings: &'a ResourceManagerConfig,
    /// Resources that are reserved for the system and for the node's own processes, by name.
    pub(crate) reserved: [&'a BTreeMap<String, String>; 2],
    /// The directory of the state files.
    pub(crate) state_dir: &'a Path,
    pub(crate) properties: &'a MachineProperties,
    /// Device plugins. If the topology manager has a policy other than `none`, their devices are allocated near to CPUs
    /// and memory.
    pub(crate) devices: &'a DevicePlugins,
}

/// The reason why the managers cannot start.
#[derive(Debug, thiserror::Error)]
pub enum ResourceManagerError {
    /// The CPUs or NUMA nodes cannot be read.
    #[error("cannot read the CPUs and NUMA nodes of the machine")]
    Machine(#[source] MachineError),
    /// A state file cannot be used.
    #[error(transparent)]
    State(StateFileError),
    /// A setting does not fit the machine or another setting.
    #[error("{manager}: {problem}")]
    Setting {
        /// The manager.
        manager: &'static str,
        /// The problem.
        problem: String,
    },
}

/// The managers of this node. Cheap to clone.
#[derive(Clone, Default)]
pub(crate) struct ResourceManagers {
    /// None if all policies are `none`.
    shared: Option<Arc<Shared>>,
}

struct Shared {
    topology: TopologyManager,
    cpu: Option<Arc<CpuManager>>,
    memory: Option<Arc<MemoryManager>>,
}

// === impl ResourceManagers ===

impl ResourceManagers {
    /// Opens the managers that the settings enable.
    ///
    /// # Errors
    /// When a setting does not fit the machine, or a state file of an earlier start cannot be used.
    pub(crate) fn open(
        inputs: &ManagerInputs<'_>,
        metrics: &Arc<KubeletMetrics>,
    ) -> Result<Self, ResourceManagerError> {
        let ManagerInputs { settings, state_dir, properties, .. } = inputs;
        let (cpu_file, memory_file) =
            (cpu_manager::state_path(state_dir), memory_manager::state_path(state_dir));
        if settings.cpu.is_none() {
            state_file::check_policy(&cpu_file, "none").map_err(ResourceManagerError::State)?;
        }
        if settings.memory.is_none() {
            state_file::check_policy(&memory_file, "None").map_err(ResourceManagerError::State)?;
        }
        let has_topology = settings.topology.policy != TopologyPolicy::None;
        let has_managers = settings.cpu.is_some() || settings.memory.is_some() || has_topology;
        if !has_managers && settings.reserved_cpus.is_none() {
            return Ok(Self::default());
        }
        let machine = Machine::read(Path::new("/sys"), Path::new("/proc"));
        let machine = machine.map_err(ResourceManagerError::Machine)?;
        check_reserved(settings.reserved_cpus.as_ref(), machine.cpus.all())?;
        if !has_managers {
            return Ok(Self::default());
        }
        let cpu = cpu_policy(inputs, &machine)?
            .map(|policy| CpuManager::open(policy, cpu_file, Arc::clone(metrics)));
        let cpu = cpu.transpose().map_err(ResourceManagerError::State)?.map(Arc::new);
        let memory = memory_state(settings, properties, &machine)?;
        let memory = memory.map(|empty| MemoryManager::open(empty, memory_file, Arc::clone(metrics)));
        let memory = memory.transpose().map_err(ResourceManagerError::State)?.map(Arc::new);
        let mut providers: Vec<Arc<dyn HintProvider>> = Vec::new();
        // Devices are the first provider, as upstream.
        if has_topology {
            let nodes = machine.nodes.keys().copied().collect();
            providers.push(Arc::new(AlignedDevices::new(inputs.devices.clone(), nodes)));
        }
        providers.extend(cpu.clone().map(|manager| manager as Arc<dyn HintProvider>));
        providers.extend(memory.clone().map(|manager| manager as Arc<dyn HintProvider>));
        let topology =
            TopologyManager::new(settings.topology, &machine.nodes, providers, Arc::clone(metrics));
        let topology = topology.map_err(|problem| setting("topology manager", problem))?;
        Ok(Self { shared: Some(Arc::new(Shared { topology, cpu, memory })) })
    }

    /// Allocates the resources of a pod.
    ///
    /// # Errors
    /// When they cannot be allocated. Nothing stays allocated then.
    pub(crate) fn admit(&self, pod: &Pod) -> Result<(), AllocationError> {
        self.shared.as_ref().map_or(Ok(()), |shared| shared.topology.admit(pod))
    }

    /// Allocates the resources of a pod that an earlier agent admitted, unless that agent has allocated them. If this
    /// fails, the containers run in the shared pools.
    pub(crate) fn adopt(&self, pod: &Pod) {
        let (Some(shared), Some(uid)) = (&self.shared, &pod.metadata.uid) else { return };
        if let Err(error) = shared.topology.adopt(pod) {
            tracing::warn!(uid, %error, "cannot allocate CPUs or memory for a pod of an earlier agent");
        }
    }

    /// Whether a pod has exclusive CPUs, or memory of NUMA nodes.
    pub(crate) fn holds(&self, uid: &str) -> bool {
        self.shared.as_ref().is_some_and(|shared| {
            shared.cpu.as_ref().is_some_and(|cpu| cpu.holds(uid))
                || shared.memory.as_ref().is_some_and(|memory| memory.holds(uid))
        })
    }

    /// Releases the resources of a pod whose containers have ended.
    pub(crate) fn release(&self, uid: &str) {
        if let Some(shared) = &self.shared {
            shared.topology.release(uid);
        }
    }

    /// Releases the resources of pods that are not on this node any more.
    pub(crate) fn retain(&self, keep: impl Fn(&str) -> bool) {
        if let Some(shared) = &self.shared {
            shared.topology.retain(&keep);
        }
    }

    /// Sets CPUs, memory nodes and quota of a container that is to be created.
    pub(crate) fn pin(&self, uid: &str, container: &str, resources: &mut cri::LinuxContainerResources) {
        let Some(shared) = &self.shared else { return };
        if let Some(cpu) = &shared.cpu {
            cpu.pin(uid, container, resources);
        }
        if let Some(memory) = &shared.memory {
            resources.cpuset_mems = memory.nodes_of(uid, container);
        }
    }

    /// Removes the CPU quota of a container with exclusive CPUs.
    pub(crate) fn lift_quota(
        &self,
        uid: &str,
        container: &str,
        resources: &mut cri::LinuxContainerResources,
    ) {
        if let Some(cpu) = self.shared.as_ref().and_then(|shared| shared.cpu.as_ref()) {
            cpu.lift_quota(uid, container, resources);
        }
    }

    /// Whether a container of the pod has exclusive CPUs. The pod's cgroup has no quota then.
    pub(crate) fn has_exclusive_cpus(&self, uid: &str) -> bool {
        let cpu = self.shared.as_ref().and_then(|shared| shared.cpu.as_ref());
        cpu.is_some_and(|cpu| cpu.has_exclusive(uid))
    }

    /// Records that a container has started with these CPUs.
    pub(crate) fn started(&self, pod: &Pod, container: &str, id: &str, cpus: &str) {
        let (Some(shared), Some(uid), Some(spec)) = (&self.shared, &pod.metadata.uid, &pod.spec) else {
            return;
        };
        if let Some(cpu) = &shared.cpu {
            cpu.started(uid, container, id, cpus);
        }
        if let Some(memory) = &shared.memory {
            memory.started(uid, spec, container);
        }
    }

    /// The exclusive CPUs of a container.
    pub(crate) fn exclusive_cpus(&self, uid: &str, container: &str) -> CpuSet {
        let cpu = self.shared.as_ref().and_then(|shared| shared.cpu.as_ref());
        cpu.map(|cpu| cpu.exclusive_cpus(uid, container)).unwrap_or_default()
    }

    /// The memory of a container on NUMA nodes.
    pub(crate) fn memory_of(&self, uid: &str, container: &str) -> Vec<Block> {
        let memory = self.shared.as_ref().and_then(|shared| shared.memory.as_ref());
        memory.map(|memory| memory.blocks_of(uid, container)).unwrap_or_default()
    }

    /// The CPUs that containers can get exclusively, and the memory of NUMA nodes that they can get. Empty without the
    /// managers.
    pub(crate) fn allocatable(&self) -> (CpuSet, Vec<Block>) {
        let Some(shared) = &self.shared else { return (CpuSet::default(), Vec::new()) };
        let cpus = shared.cpu.as_ref().map(|cpu| cpu.assignable());
        let memory = shared.memory.as_ref().map(|memory| memory.allocatable());
        (cpus.unwrap_or_default(), memory.unwrap_or_default())
    }

    /// The reason why the managers make a resize infeasible: a reason for the metrics, and a message. The messages are
    /// upstream's.
    pub(crate) fn refuse_resize(
        &self,
        pod: &Pod,
        allocated: &Pod,
    ) -> Option<(InfeasibleReason, &'static str)> {
        let shared = self.shared.as_ref()?;
        if qos_class(pod) != QosClass::Guaranteed {
            return None;
        }
        if shared.cpu.is_some() && requests_differ(pod, allocated, "cpu") {
            let message = "Resize is infeasible for Guaranteed Pods alongside CPU Manager policy \"static\"";
            return Some((InfeasibleReason::CpuManager, message));
        }
        if shared.memory.is_some() && requests_differ(pod, allocated, "memory") {
            let message =
                "Resize is infeasible for Guaranteed Pods alongside Memory Manager policy \"Static\"";
            return Some((InfeasibleReason::MemoryManager, message));
        }
        None
    }

    /// The task that updates the CPUs of running containers. None if no container can get exclusive CPUs.
    pub(crate) fn task(&self, runtime: Arc<dyn Runtime>) -> Option<impl Future<Output = ()> + Send + use<>> {
        let cpu = self.shared.as_ref().and_then(|shared| shared.cpu.clone())?;
        Some(async move { cpu.run(&*runtime).await })
    }
}

/// Refuses reserved CPUs that are not online.
fn check_reserved(reserved: Option<&CpuSet>, online: &CpuSet) -> Result<(), ResourceManagerError> {
    match reserved {
        Some(reserved) if !reserved.is_subset(online) => {
            let problem = format!("reserved-cpus: {reserved} is not a subset of online-cpus: {online}");
            Err(setting("CPU manager", problem))
        }
        _ => Ok(()),
    }
}

/// The static policy of CPUs, if it is enabled.
fn cpu_policy(
    inputs: &ManagerInputs<'_>,
    machine: &Machine,
) -> Result<Option<StaticPolicy>, ResourceManagerError> {
    let settings = inputs.settings;
    let Some(options) = settings.cpu else { return Ok(None) };
    let reserved = inputs.reserved.iter().filter_map(|of| of.get("cpu"));
    let millis = reserved.filter_map(|amount| Some(Quantity::parse(amount).ok()?.millis()));
    let count = usize::try_from(millis.fold(0, i64::saturating_add)).unwrap_or(0).div_ceil(1000);
    if count == 0 {
        let problem = "the static policy requires system-reserved cpu + kube-reserved cpu to be greater than zero, \
                       or reserved-cpus";
        return Err(setting("CPU manager", problem.to_owned()));
    }
    let policy = StaticPolicy::new(
        machine.cpus.clone(),
        count,
        settings.reserved_cpus.clone(),
        options,
        settings.topology.policy,
    );
    policy.map(Some).map_err(|problem| setting("CPU manager", problem))
}

/// The memory of the machine without containers, if the static policy of memory is enabled.
fn memory_state(
    settings: &ResourceManagerConfig,
    properties: &MachineProperties,
    machine: &Machine,
) -> Result<Option<MemoryState>, ResourceManagerError> {
    let Some(ReservedMemory(reserved)) = &settings.memory else { return Ok(None) };
    let error = |problem| setting("memory manager", problem);
    if let Some(node) = reserved.keys().find(|node| !machine.nodes.contains_key(node)) {
        return Err(error(format!(
            "reserved-memory references a NUMA node {node} that does not exist on this machine"
        )));
    }
    check_node_count(machine.nodes.len(), settings.topology.max_nodes).map_err(error)?;
    check_memory_sums(reserved, held_back(properties)).map_err(error)?;
    Ok(Some(MemoryState::new(&machine.nodes, reserved)))
}

/// Refuses a machine with more NUMA nodes than permitted. Each admission visits all sets of nodes, even with the
/// topology policy `none`.
fn check_node_count(count: usize, max: usize) -> Result<(), String> {
    if count <= max {
        return Ok(());
    }
    Err(format!(
        "unsupported on machines with more than {max} NUMA nodes; this one has {count}. The option \
         max-allowable-numa-nodes of the topology manager permits more, and makes admissions slow"
    ))
}

/// Bytes of memory that the node holds back from pods: the reserved amounts and the eviction threshold.
fn held_back(properties: &MachineProperties) -> u64 {
    let huge = properties.capacity.iter().filter(|(name, _)| name.starts_with("hugepages-"));
    let huge: i64 = huge.map(|(_, quantity)| value_of(quantity)).sum();
    u64::try_from(properties.memory() - huge - properties.memory_allocatable()).unwrap_or(0)
}

/// Refuses reserved memory that is 0, or differs from the amount that the node holds back. The node holds back no huge
/// pages.
fn check_memory_sums(reserved: &BTreeMap<u32, Amounts>, held_back: u64) -> Result<(), String> {
    let mut sums = Amounts::from([("memory".to_owned(), 0)]);
    for (name, size) in reserved.values().flatten() {
        let sum = sums.entry(name.clone()).or_default();
        *sum = sum.saturating_add(*size);
    }
    if sums.get("memory") == Some(&0) {
        return Err("the static policy requires reserved-memory".to_owned());
    }
    for (name, sum) in sums {
        let expected = if name == "memory" { held_back } else { 0 };
        if sum != expected {
            return Err(format!(
                "the total amount \"{sum}\" of type {name:?} is not equal to the value \"{expected}\" determined by \
                 system-reserved, kube-reserved and eviction-hard"
            ));
        }
    }
    Ok(())
}

fn setting(manager: &'static str, problem: String) -> ResourceManagerError {
    ResourceManagerError::Setting { manager, problem }
}

/// Whether two versions of a pod request different amounts of a resource.
fn requests_differ(pod: &Pod, other: &Pod, name: &str) -> bool {
    let containers = |pod: &Pod| -> BTreeMap<String, Option<i128>> {
        let spec = pod.spec.iter();
        let all = spec.flat_map(|spec| spec.init_containers.iter().flatten().chain(&spec.containers));
        all.map(|container| (container.name.clone(), request(container, name))).collect_map()
    };
    containers(pod) != containers(other)
}

fn request(container: &Container, name: &str) -> Option<i128> {
    let quantity = Side::Requests.get(container.resources.as_ref(), name)?;
    Some(coracle_values::quantity::of(quantity).ok()?.thousandths())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn reserved_memory_must_be_what_the_node_holds_back() {
        let of = |node: u32, name: &str, size: u64| (node, Amounts::from([(name.to_owned(), size)]));
        let both = BTreeMap::from([of(0, "memory", 100), of(1, "memory", 50)]);
        assert_eq!(check_memory_sums(&both, 150), Ok(()));
        assert!(check_memory_sums(&both, 100).unwrap_err().contains("\"150\" of type \"memory\""));
        assert!(check_memory_sums(&BTreeMap::new(), 0).is_err());
        let huge = BTreeMap::from([of(0, "memory", 100), of(1, "hugepages-2Mi", 50)]);
        assert!(check_memory_sums(&huge, 100).unwrap_err().contains("hugepages-2Mi"));
    }

    #[test]
    fn memory_of_many_nodes_must_be_permitted() {
        assert_eq!(check_node_count(8, 8), Ok(()));
        let error = check_node_count(9, 8).unwrap_err();
        assert!(error.contains("more than 8 NUMA nodes") && error.contains("max-allowable-numa-nodes"));
    }

    #[test]
    fn reserved_cpus_must_be_online() {
        let set = |text: &str| text.parse::<CpuSet>().unwrap();
        assert!(
            check_reserved(Some(&set("0")), &set("0-1")).is_ok() && check_reserved(None, &set("0")).is_ok()
        );
        let error = check_reserved(Some(&set("0-2")), &set("0-1")).unwrap_err().to_string();
        assert!(error.contains("0-2 is not a subset of online-cpus: 0-1"), "{error}");
    }

    #[test]
    fn resizes_compare_requests_by_container() {
        let pod = |cpu: &str| -> Pod {
            let containers = json!([{"name": "a", "resources": {"requests": {"cpu": cpu, "memory": "1Gi"}}}]);
            serde_json::from_value(json!({"spec": {"containers": containers}})).unwrap()
        };
        assert!(requests_differ(&pod("1"), &pod("2"), "cpu"));
        assert!(!requests_differ(&pod("1"), &pod("1000m"), "cpu"));
        assert!(!requests_differ(&pod("1"), &pod("2"), "memory"));
    }

    #[test]
    fn without_policies_nothing_is_changed() {
        let managers = ResourceManagers::default();
        let mut resources =
            cri::LinuxContainerResources { cpu_quota: 5, cpu_period: 9, ..Default::default() };
        let before = resources.clone();
        managers.pin("u", "a", &mut resources);
        assert_eq!(resources, before);
        assert!(
            managers.admit(&Pod::default()).is_ok()
                && !managers.has_exclusive_cpus("u")
                && !managers.holds("u")
        );
        assert!(managers.refuse_resize(&Pod::default(), &Pod::default()).is_none());
    }
}

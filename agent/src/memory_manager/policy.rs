//! The static policy of the memory manager: memory and huge pages of NUMA nodes for containers. Pure.
//!
//! A NUMA node serves either containers that use this node alone, or containers that use one group of nodes. Two groups
//! never overlap. Source: `pkg/kubelet/cm/memorymanager/policy_static.go`, with the feature gate
//! PodLevelResourceManagers off. Messages are upstream's.

use std::collections::BTreeMap;

use coracle_values::CollectMap;
use coracle_values::Quantity;
use k8s_openapi::api::core::v1::{Container, Pod, PodSpec};
use serde::{Deserialize, Serialize};

use crate::cgroup::{QosClass, qos_class};
use crate::topology::machine::NumaNode;
use crate::topology::numa_mask::{NumaMask, for_each_mask};
use crate::topology::{Hint, Hints, has_pod_resources, is_regular_init};

/// Bytes by resource: memory, and huge pages of each size.
pub(crate) type Amounts = BTreeMap<String, u64>;

/// Name of the resource of memory.
const MEMORY: &str = "memory";
/// Prefix of the names of resources of huge pages.
const HUGE_PAGES: &str = "hugepages-";

/// One resource of a NUMA node, in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct MemoryTable {
    total: u64,
    system_reserved: u64,
    allocatable: u64,
    reserved: u64,
    free: u64,
}

/// The memory of a NUMA node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct NodeMemory {
    /// Number of blocks that use this node.
    number_of_assignments: u64,
    memory_map: BTreeMap<String, MemoryTable>,
    /// The node, or the group of nodes that serve the same containers.
    cells: NumaMask,
}

/// Memory of a container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Block {
    numa_affinity: NumaMask,
    #[serde(rename = "type")]
    resource: String,
    size: u64,
}

/// The memory of all NUMA nodes, and the blocks of containers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct MemoryState {
    pub(crate) nodes: BTreeMap<u32, NodeMemory>,
    /// By pod uid and container name.
    pub(crate) blocks: BTreeMap<String, BTreeMap<String, Vec<Block>>>,
}

/// Memory of the init containers of one pod, by nodes and resource. Later containers of the pod may use it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Reusable {
    pub(crate) uid: String,
    sizes: BTreeMap<(NumaMask, String), u64>,
}

// === impl Block ===

impl Block {
    pub(crate) fn nodes(&self) -> NumaMask {
        self.numa_affinity
    }

    /// Name of the resource: memory, or huge pages of one size.
    pub(crate) fn resource(&self) -> &str {
        &self.resource
    }

    /// Bytes.
    pub(crate) fn size(&self) -> u64 {
        self.size
    }
}

// === impl MemoryTable ===

impl MemoryTable {
    fn new(total: u64, system_reserved: u64, taken: u64) -> Self {
        let allocatable = total.saturating_sub(system_reserved).saturating_sub(taken);
        Self { total, system_reserved, allocatable, reserved: 0, free: allocatable }
    }

    /// Takes up to `size` free bytes. Returns the number of bytes that are missing.
    fn take(&mut self, size: u64) -> u64 {
        let taken = size.min(self.free);
        self.free -= taken;
        self.reserved = self.reserved.saturating_add(taken);
        size - taken
    }

    /// Frees up to `size` reserved bytes. Returns the number of bytes that other nodes must free.
    fn give(&mut self, size: u64) -> u64 {
        let given = size.min(self.reserved);
        self.reserved -= given;
        self.free = self.free.saturating_add(given);
        size - given
    }
}

// === impl Reusable ===

impl Reusable {
    fn size(&self, nodes: NumaMask, resource: &str) -> u64 {
        self.sizes.get(&(nodes, resource.to_owned())).copied().unwrap_or(0)
    }

    /// Adds the blocks of an init container, or subtracts the blocks of a container that runs beside other containers.
    fn update(&mut self, blocks: &[Block], is_regular_init: bool) {
        for block in blocks {
            let size = self.sizes.entry((block.numa_affinity, block.resource.clone())).or_default();
            *size = if is_regular_init { block.size.max(*size) } else { size.saturating_sub(block.size) };
        }
    }
}

// === impl MemoryState ===

impl MemoryState {
    /// The state without containers. `reserved` has the bytes for the system, by node.
    pub(crate) fn new(nodes: &BTreeMap<u32, NumaNode>, reserved: &BTreeMap<u32, Amounts>) -> Self {
        let of_node = |(number, node): (&u32, &NumaNode)| {
            let reserved =
                |name: &str| reserved.get(number).and_then(|of| of.get(name)).copied().unwrap_or(0);
            let huge = node.huge_pages.iter();
            let mut memory_map: BTreeMap<String, MemoryTable> = huge
                .map(|(name, size)| (name.clone(), MemoryTable::new(*size, reserved(name), 0)))
                .collect_map();
            let in_huge_pages = node.huge_pages.values().sum();
            memory_map
                .insert(MEMORY.to_owned(), MemoryTable::new(node.memory, reserved(MEMORY), in_huge_pages));
            let cells = NumaMask::of([*number]);
            (*number, NodeMemory { number_of_assignments: 0, memory_map, cells })
        };
        Self { nodes: nodes.iter().map(of_node).collect_map(), blocks: BTreeMap::new() }
    }

    /// Checks a state of an earlier start. `empty` is the state of this machine without containers.
    pub(crate) fn check(&self, empty: &Self) -> Result<(), String> {
        let mut expected = empty.clone();
        for (pod, containers) in &self.blocks {
            for (container, blocks) in containers {
                for block in blocks {
                    expected.check_block(block).map_err(|problem| {
                        format!("[memorymanager] (pod: {pod}, container: {container}) {problem}")
                    })?;
                    expected.take(block.numa_affinity, &block.resource, block.size);
                }
            }
        }
        if self.nodes.len() != expected.nodes.len()
            || !self.nodes.keys().all(|node| self.is_same_node(&expected, *node))
        {
            return Err(
                "[memorymanager] the expected machine state is different from the real one".to_owned()
            );
        }
        Ok(())
    }

    fn check_block(&self, block: &Block) -> Result<(), &'static str> {
        for node in block.numa_affinity.nodes() {
            let node =
                self.nodes.get(&node).ok_or("the memory assignment uses the NUMA that does not exist")?;
            if !node.memory_map.contains_key(&block.resource) {
                return Err("the memory assignment uses memory resource that does not exist");
            }
        }
        Ok(())
    }

    /// Whether both states agree about a NUMA node. Free and reserved memory is compared by groups.
    fn is_same_node(&self, other: &Self, number: u32) -> bool {
        let (Some(own), Some(others)) = (self.nodes.get(&number), other.nodes.get(&number)) else {
            return false;
        };
        let is_same_table = |name: &str| {
            let (Some(own), Some(others)) = (own.memory_map.get(name), others.memory_map.get(name)) else {
                return false;
            };
            let fixed = |table: &MemoryTable| (table.total, table.system_reserved, table.allocatable);
            fixed(own) == fixed(others)
        };
        let of_group = |state: &Self, name: &str| {
            let tables = own.cells.nodes().filter_map(|node| state.nodes.get(&node)?.memory_map.get(name));
            tables.fold((0_u128, 0_u128), |(free, reserved), table| {
                (free + u128::from(table.free), reserved + u128::from(table.reserved))
            })
        };
        own.number_of_assignments == others.number_of_assignments
            && own.cells == others.cells
            && own.memory_map.len() == others.memory_map.len()
            && own
                .memory_map
                .keys()
                .all(|name| is_same_table(name) && of_group(self, name) == of_group(other, name))
    }

    /// The memory that containers can get, including memory that is already allocated. One block for each NUMA node and
    /// resource.
    pub(crate) fn allocatable(&self) -> Vec<Block> {
        let blocks = self.nodes.iter().flat_map(|(node, memory)| {
            memory.memory_map.iter().map(|(resource, table)| Block {
                numa_affinity: NumaMask::of([*node]),
                resource: resource.clone(),
                size: table.allocatable,
            })
        });
        blocks.filter(|block| block.size > 0).collect()
    }

    /// The blocks of a container.
    pub(crate) fn of(&self, uid: &str, container: &str) -> Option<&Vec<Block>> {
        self.blocks.get(uid)?.get(container)
    }

    /// Hints for these amounts. No hints if no set of nodes suffices. Then the allocation fails, with a message of its
    /// own.
    pub(crate) fn hints(&self, requested: &Amounts, reusable: &Reusable) -> Hints {
        let hints = self.hints_of_each(requested, reusable);
        let has_hints = !hints.is_empty();
        requested.keys().filter(|_| has_hints).map(|name| (name.clone(), hints.clone())).collect_map()
    }

    /// The hints, which are the same for each resource.
    fn hints_of_each(&self, requested: &Amounts, reusable: &Reusable) -> Vec<Hint> {
        let numbers: Vec<u32> = self.nodes.keys().copied().collect();
        let (mut fewest, mut masks) = (numbers.len(), Vec::new());
        for_each_mask(&numbers, |mask| {
            let has = |of: fn(&MemoryTable) -> u64, extra: &dyn Fn(&str) -> u64| {
                let is_enough = |(name, size): (&String, &u64)| {
                    self.sum(mask, name, of).saturating_add(extra(name)) >= *size
                };
                requested.iter().all(is_enough)
            };
            if !has(|table| table.allocatable, &|_| 0) {
                return;
            }
            fewest = fewest.min(mask.count());
            let is_grouped = |node: u32| self.nodes.get(&node).is_some_and(|node| node.cells.count() > 1);
            if mask.count() == 1 && mask.nodes().any(is_grouped) {
                return;
            }
            if !self.violates_groups(mask) && has(|table| table.free, &|name| reusable.size(mask, name)) {
                masks.push(mask);
            }
        });
        masks.into_iter().map(|mask| Hint { nodes: Some(mask), preferred: mask.count() == fewest }).collect()
    }

    fn sum(&self, mask: NumaMask, name: &str, of: fn(&MemoryTable) -> u64) -> u64 {
        let tables = mask.nodes().filter_map(|node| self.nodes.get(&node)?.memory_map.get(name));
        tables.map(of).fold(0, u64::saturating_add)
    }

    /// Whether several nodes cannot be used together, because one of them serves other containers alone or in another
    /// group.
    fn violates_groups(&self, mask: NumaMask) -> bool {
        let mut used = mask
            .nodes()
            .filter_map(|node| self.nodes.get(&node))
            .filter(|node| node.number_of_assignments > 0);
        mask.count() > 1 && used.any(|node| node.cells != mask)
    }

    /// Allocates memory for a container, and returns its blocks. Reusable memory of init containers is used first.
    pub(crate) fn allocate(
        &mut self,
        requested: &Amounts,
        affinity: Hint,
        reusable: &Reusable,
    ) -> Result<Vec<Block>, String> {
        let nodes = self.choose(requested, affinity, reusable)?;
        let mut blocks = Vec::new();
        for (name, size) in requested {
            self.take(nodes, name, size.saturating_sub(reusable.size(nodes, name)));
            blocks.push(Block { numa_affinity: nodes, resource: name.clone(), size: *size });
        }
        Ok(blocks)
    }

    /// The nodes of the affinity, or the best nodes if the affinity has no nodes. If these nodes do not suffice, a
    /// larger set that contains them.
    fn choose(&self, requested: &Amounts, affinity: Hint, reusable: &Reusable) -> Result<NumaMask, String> {
        let error = |text: &str| format!("[memorymanager] {text}");
        let hints = || self.hints_of_each(requested, reusable);
        let (mut nodes, mut preferred) = (affinity.nodes, affinity.preferred);
        if nodes.is_none() {
            let found = best(&hints()).ok_or_else(|| {
                error(
                    "failed to get the default NUMA affinity, no NUMA nodes with enough memory is available",
                )
            })?;
            if preferred && !found.preferred {
                return Err(error("failed to find the default preferred hint"));
            }
            (nodes, preferred) = (found.nodes, found.preferred);
        }
        let mut nodes = nodes.unwrap_or_default();
        let suffices =
            |nodes| requested.iter().all(|(name, size)| self.sum(nodes, name, |table| table.free) >= *size);
        if !suffices(nodes) {
            let wider =
                hints().into_iter().filter(|hint| hint.nodes.is_some_and(|wider| nodes.is_subset(wider)));
            let found = best(&wider.collect::<Vec<_>>())
                .ok_or_else(|| error("failed to find NUMA nodes to extend the current topology hint"))?;
            if preferred && !found.preferred {
                return Err(error("failed to find the extended preferred hint"));
            }
            nodes = found.nodes.unwrap_or_default();
        }
        if self.violates_groups(nodes) {
            return Err(error("preferred hint violates NUMA node allocation"));
        }
        Ok(nodes)
    }

    /// Stores the blocks of a container. Blocks of earlier init containers shrink by the memory that the container
    /// reuses. So the sum of all blocks is the memory of the pod.
    pub(crate) fn store(&mut self, uid: &str, spec: &PodSpec, container: &str, blocks: Vec<Block>) {
        let of_pod = self.blocks.entry(uid.to_owned()).or_default();
        let inits = spec.init_containers.iter().flatten().map(|init| init.name.as_str());
        let before = inits.take_while(|name| *name != container).filter(|name| is_regular_init(spec, name));
        let before: Vec<&str> = before.collect();
        for block in &blocks {
            let mut left = block.size;
            for init in &before {
                let same = of_pod.get_mut(*init).into_iter().flatten().filter(|other| {
                    other.resource == block.resource && other.numa_affinity == block.numa_affinity
                });
                for other in same {
                    let used = left.min(other.size);
                    other.size -= used;
                    left -= used;
                }
            }
        }
        of_pod.insert(container.to_owned(), blocks);
    }

    /// Releases the blocks of one container. Returns whether it had any.
    pub(crate) fn release_container(&mut self, uid: &str, container: &str) -> bool {
        let Some(of_pod) = self.blocks.get_mut(uid) else { return false };
        let Some(blocks) = of_pod.remove(container) else { return false };
        if of_pod.is_empty() {
            self.blocks.remove(uid);
        }
        blocks.iter().for_each(|block| self.give(block));
        true
    }

    /// Releases all blocks of a pod. Returns whether it had any.
    pub(crate) fn release(&mut self, uid: &str) -> bool {
        let Some(of_pod) = self.blocks.remove(uid) else { return false };
        of_pod.values().flatten().for_each(|block| self.give(block));
        true
    }

    fn take(&mut self, nodes: NumaMask, resource: &str, size: u64) {
        let mut left = size;
        for number in nodes.nodes() {
            let Some(node) = self.nodes.get_mut(&number) else { continue };
            node.number_of_assignments = node.number_of_assignments.saturating_add(1);
            node.cells = nodes;
            if let Some(table) = node.memory_map.get_mut(resource) {
                left = table.take(left);
            }
        }
    }

    fn give(&mut self, block: &Block) {
        let mut left = block.size;
        for number in block.numa_affinity.nodes() {
            let Some(node) = self.nodes.get_mut(&number) else { continue };
            node.number_of_assignments = node.number_of_assignments.saturating_sub(1);
            if node.number_of_assignments == 0 {
                node.cells = NumaMask::of([number]);
            }
            if let Some(table) = node.memory_map.get_mut(&block.resource) {
                left = table.give(left);
            }
        }
    }
}

/// Updates the reusable memory after the allocation of a container.
pub(crate) fn reuse(reusable: &mut Reusable, uid: &str, blocks: &[Block], is_regular_init: bool) {
    if reusable.uid != uid {
        *reusable = Reusable { uid: uid.to_owned(), ..Reusable::default() };
    }
    reusable.update(blocks, is_regular_init);
}

/// Hints for memory that a container already has. None if the container requests other amounts.
pub(crate) fn known_hints(blocks: &[Block], requested: &Amounts) -> Hints {
    let is_same = |block: &Block| requested.get(&block.resource) == Some(&block.size);
    if blocks.len() != requested.len() || !blocks.iter().all(is_same) {
        return Hints::new();
    }
    let hint = |block: &Block| Hint { nodes: Some(block.numa_affinity), preferred: true };
    blocks.iter().map(|block| (block.resource.clone(), vec![hint(block)])).collect_map()
}

/// Whether containers of a pod get memory of NUMA nodes.
pub(crate) fn is_pinned(pod: &Pod) -> bool {
    qos_class(pod) == QosClass::Guaranteed && !has_pod_resources(pod)
}

/// Memory and huge pages that a container requests.
pub(crate) fn requested(container: &Container) -> Result<Amounts, String> {
    let requests = container.resources.iter().flat_map(|resources| resources.requests.iter().flatten());
    let amounts = requests.filter(|(name, _)| *name == MEMORY || name.starts_with(HUGE_PAGES));
    let amounts = amounts.map(|(name, quantity)| {
        let bytes = coracle_values::quantity::of(quantity)
            .ok()
            .and_then(Quantity::whole)
            .and_then(|bytes| u64::try_from(bytes).ok());
        let bytes = bytes.ok_or_else(|| "[memorymanager] failed to represent quantity as int64".to_owned());
        bytes.map(|bytes| (name.clone(), bytes))
    });
    amounts.collect()
}

/// The resources that the containers of a pod request at the same time. Resources that only init containers request are
/// left out, as upstream.
pub(crate) fn requested_of_pod(spec: &PodSpec) -> Result<Amounts, String> {
    let (mut sidecars, mut inits, mut mains) = (Amounts::new(), Amounts::new(), Amounts::new());
    for container in spec.init_containers.iter().flatten() {
        for (name, size) in requested(container)? {
            let beside = sidecars.entry(name.clone()).or_default();
            if is_regular_init(spec, &container.name) {
                let peak = inits.entry(name).or_default();
                *peak = (*peak).max(beside.saturating_add(size));
            } else {
                *beside = beside.saturating_add(size);
            }
        }
    }
    for container in &spec.containers {
        for (name, size) in requested(container)? {
            let sum = mains.entry(name).or_default();
            *sum = sum.saturating_add(size);
        }
    }
    let of = |amounts: &Amounts, name: &str| amounts.get(name).copied().unwrap_or(0);
    let whole = |name: &str, size: u64| size.saturating_add(of(&sidecars, name)).max(of(&inits, name));
    Ok(mains.iter().map(|(name, size)| (name.clone(), whole(name, *size))).collect_map())
}

/// The preferred hint with the fewest nodes. If no hint is preferred, the hint with the fewest nodes.
fn best(hints: &[Hint]) -> Option<Hint> {
    let key = |hint: &Hint| {
        let nodes = hint.nodes.unwrap_or_default();
        (!hint.preferred, nodes.count(), nodes)
    };
    hints.iter().copied().min_by_key(key)
}

#[cfg(test)]
mod tests;

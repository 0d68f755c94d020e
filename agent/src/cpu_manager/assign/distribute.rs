//! Even distribution of CPUs over NUMA nodes, for requests that one node cannot satisfy. Pure.
//!
//! Source: `takeByTopologyNUMADistributed` of `pkg/kubelet/cm/cpumanager/cpu_assignment.go` (KEP-2902).

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use coracle_values::CollectMap;

use super::{Accumulator, AssignError, Order, packed};
use crate::topology::CpuSet;
use crate::topology::machine::{CpuTopology, Level};

/// A request that is distributed over NUMA nodes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Distribution {
    /// Number of CPUs.
    pub(crate) count: usize,
    /// CPUs are taken in groups of this size: all CPUs of a core, or one CPU.
    pub(crate) group: usize,
    pub(crate) order: Order,
}

/// NUMA nodes that share a request.
struct Choice {
    nodes: Vec<u32>,
    /// Nodes that give the CPUs that remain after an equal division over all nodes.
    remainder: Vec<u32>,
    /// Standard deviation, in thousandths, of the numbers of CPUs that stay free on the nodes.
    balance: i64,
}

/// Chooses the same number of CPUs on each of as few NUMA nodes as possible. If this is not possible, CPUs are packed.
///
/// # Errors
/// When fewer CPUs are available.
pub(crate) fn distributed(
    topology: &CpuTopology,
    available: &CpuSet,
    request: Distribution,
) -> Result<CpuSet, AssignError> {
    let Distribution { count, group, order } = request;
    if count == 0 || group == 0 || count % group != 0 {
        return packed(topology, available, count, order);
    }
    let mut accumulator = Accumulator::new(topology, available, count, order);
    if count > accumulator.free.len() {
        return Err(AssignError::NotEnough { requested: count, available: available.len() });
    }
    let nodes = accumulator.numa_nodes();
    for size in node_counts(&accumulator, group) {
        if let Some(choice) = best_choice(&accumulator, &nodes, size, request) {
            take(&mut accumulator, &choice, request)?;
            return Ok(accumulator.taken);
        }
    }
    packed(topology, available, count, order)
}

/// The numbers of NUMA nodes that the request can need.
fn node_counts(accumulator: &Accumulator<'_>, group: usize) -> RangeInclusive<usize> {
    let topology = accumulator.topology;
    let groups = topology.all().len().div_ceil(group);
    let groups_per_node = groups.div_ceil(topology.parts(Level::Numa).len().max(1)).max(1);
    let needed = accumulator.needed.div_ceil(group);
    needed.div_ceil(groups_per_node)..=needed.min(accumulator.sorted(Level::Numa, None).len())
}

/// The nodes with the best balance. `nodes` are all nodes with free CPUs, `size` is the number of nodes
/// to choose.
fn best_choice(
    accumulator: &Accumulator<'_>,
    nodes: &[u32],
    size: usize,
    request: Distribution,
) -> Option<Choice> {
    let free: BTreeMap<u32, usize> =
        nodes.iter().map(|node| (*node, accumulator.free_in(Level::Numa, *node).len())).collect_map();
    let mut best: Option<Choice> = None;
    for_each_choice(nodes, size, &mut Vec::new(), &mut |chosen: &[u32]| {
        if best.as_ref().is_some_and(|best| best.balance == 0) {
            return;
        }
        let found = balanced(&free, chosen, request);
        let found = found.filter(|found| best.as_ref().is_none_or(|best| found.balance < best.balance));
        best = found.or(best.take());
    });
    best
}

/// The distribution over these nodes. None if they cannot satisfy the request.
fn balanced(free: &BTreeMap<u32, usize>, nodes: &[u32], request: Distribution) -> Option<Choice> {
    let Distribution { count, group, .. } = request;
    let of = |node: &u32| free.get(node).copied().unwrap_or(0);
    let groups: usize = nodes.iter().map(|node| of(node) / group).sum();
    let share = share(request, nodes);
    if groups * group < count || nodes.iter().any(|node| of(node) < share) {
        return None;
    }
    let mut left = free.clone();
    left.iter_mut().filter(|(node, _)| nodes.contains(node)).for_each(|(_, cpus)| *cpus -= share);
    let remainder = count - share * nodes.len();
    let choice = |remainder, balance| Choice { nodes: nodes.to_vec(), remainder, balance };
    if remainder == 0 {
        return Some(choice(Vec::new(), deviation(&left)));
    }
    let remainder_nodes: Vec<u32> =
        nodes.iter().copied().filter(|node| left.get(node).is_some_and(|cpus| *cpus >= group)).collect();
    let mut best: Option<Choice> = None;
    for size in (1..=remainder_nodes.len()).rev() {
        for_each_choice(&remainder_nodes, size, &mut Vec::new(), &mut |chosen: &[u32]| {
            let Some(balance) = with_remainder(left.clone(), chosen, remainder, group) else { return };
            if best.as_ref().is_none_or(|best| balance < best.balance) {
                best = Some(choice(chosen.to_vec(), balance));
            }
        });
    }
    best
}

/// The balance after these nodes have given the remainder, one group of CPUs each, in order. None if they have too few
/// CPUs.
fn with_remainder(
    mut left: BTreeMap<u32, usize>,
    remainder_nodes: &[u32],
    mut remainder: usize,
    group: usize,
) -> Option<i64> {
    while remainder > 0 {
        let before = remainder;
        for node in remainder_nodes {
            let Some(cpus) = left.get_mut(node).filter(|cpus| remainder > 0 && **cpus >= group) else {
                continue;
            };
            *cpus -= group;
            remainder = remainder.saturating_sub(group);
        }
        if remainder == before {
            return None;
        }
    }
    Some(deviation(&left))
}

/// CPUs that each node gives, in whole groups.
fn share(request: Distribution, nodes: &[u32]) -> usize {
    request.count / nodes.len().max(1) / request.group * request.group
}

/// Standard deviation in thousandths. The mean is rounded to thousandths as well, as upstream.
fn deviation(free: &BTreeMap<u32, usize>) -> i64 {
    let numbers = || free.values().map(|cpus| *cpus as f64);
    let count = free.len().max(1) as f64;
    let mean = (numbers().sum::<f64>() / count * 1000.0).round() / 1000.0;
    let variance = numbers().map(|number| (number - mean) * (number - mean)).sum::<f64>() / count;
    (variance.sqrt() * 1000.0).round() as i64
}

/// Takes the CPUs from the chosen nodes.
fn take(
    accumulator: &mut Accumulator<'_>,
    choice: &Choice,
    request: Distribution,
) -> Result<(), AssignError> {
    let share = share(request, &choice.nodes);
    for node in &choice.nodes {
        take_from(accumulator, *node, share)?;
    }
    while accumulator.needed > 0 {
        let before = accumulator.needed;
        for node in &choice.remainder {
            let has_group = accumulator.free_in(Level::Numa, *node).len() >= request.group;
            if accumulator.needed > 0 && has_group {
                take_from(accumulator, *node, request.group)?;
            }
        }
        if accumulator.needed == before {
            return Err(AssignError::Accounting(before));
        }
    }
    Ok(())
}

fn take_from(accumulator: &mut Accumulator<'_>, node: u32, count: usize) -> Result<(), AssignError> {
    let free = accumulator.free_in(Level::Numa, node);
    let cpus = packed(accumulator.topology, &free, count, accumulator.order)?;
    accumulator.take(&cpus);
    Ok(())
}

/// Calls a function with each choice of `size` items, in their order.
fn for_each_choice(items: &[u32], size: usize, chosen: &mut Vec<u32>, each: &mut dyn FnMut(&[u32])) {
    if size == 0 {
        each(chosen);
        return;
    }
    for (at, item) in items.iter().enumerate() {
        let rest = items.get(at + 1..).unwrap_or_default();
        if rest.len() + 1 < size {
            return;
        }
        chosen.push(*item);
        for_each_choice(rest, size - 1, chosen, each);
        chosen.pop();
    }
}

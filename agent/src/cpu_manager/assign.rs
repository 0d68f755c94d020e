//! Choice of CPUs for a request: whole NUMA nodes, sockets, caches and cores first. Pure.
//!
//! Source: `takeByTopologyNUMAPacked` of `pkg/kubelet/cm/cpumanager/cpu_assignment.go`. [`distribute`] implements
//! `takeByTopologyNUMADistributed`.

mod distribute;

use std::collections::{BTreeMap, BTreeSet};

use crate::topology::CpuSet;
use crate::topology::machine::{Cpu, CpuTopology, Level};

pub(crate) use distribute::{Distribution, distributed};

/// The reason why CPUs cannot be chosen. The messages are upstream's.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum AssignError {
    #[error("not enough cpus available to satisfy request: requested={requested}, available={available}")]
    NotEnough { requested: usize, available: usize },
    #[error("failed to allocate cpus")]
    Failed,
    #[error("accounting error, not enough CPUs allocated, remaining: {0}")]
    Accounting(usize),
}

/// The order in which CPUs are chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Order {
    /// Whole cores first.
    #[default]
    Packed,
    /// Whole last-level caches first, then whole cores.
    PackedByCache,
    /// CPUs of different cores.
    Spread,
}

/// A part of the topology.
#[derive(Clone, Copy)]
struct Part {
    level: Level,
    number: u32,
}

/// CPUs that are still free, and those that are taken.
struct Accumulator<'a> {
    topology: &'a CpuTopology,
    free: BTreeMap<u32, Cpu>,
    needed: usize,
    taken: CpuSet,
    order: Order,
    /// Whether a NUMA node has one socket or more. Otherwise a socket has several NUMA nodes.
    is_numa_first: bool,
}

/// Chooses `count` of the available CPUs.
///
/// # Errors
/// When fewer CPUs are available.
pub(crate) fn packed(
    topology: &CpuTopology,
    available: &CpuSet,
    count: usize,
    order: Order,
) -> Result<CpuSet, AssignError> {
    let mut accumulator = Accumulator::new(topology, available, count, order);
    if accumulator.needed > accumulator.free.len() {
        return Err(AssignError::NotEnough { requested: count, available: available.len() });
    }
    for step in Accumulator::STEPS {
        if accumulator.needed == 0 {
            break;
        }
        step(&mut accumulator);
    }
    if accumulator.needed == 0 { Ok(accumulator.taken) } else { Err(AssignError::Failed) }
}

// === impl Accumulator ===

impl<'a> Accumulator<'a> {
    /// The steps from the largest parts to single CPUs.
    const STEPS: [fn(&mut Self); 5] = [
        Self::take_first_level,
        Self::take_second_level,
        Self::take_caches,
        Self::take_cores,
        Self::take_single_cpus,
    ];

    fn new(topology: &'a CpuTopology, available: &CpuSet, needed: usize, order: Order) -> Self {
        let is_numa_first = topology.parts(Level::Socket).len() >= topology.parts(Level::Numa).len();
        let (free, taken) = (topology.keep(available), CpuSet::default());
        Self { topology, free, needed, taken, order, is_numa_first }
    }

    fn take(&mut self, cpus: &CpuSet) {
        self.free.retain(|number, _| !cpus.contains(*number));
        self.taken = self.taken.union(cpus);
        self.needed = self.needed.saturating_sub(cpus.len());
    }

    /// The free CPUs of a part.
    fn free_in(&self, level: Level, part: u32) -> CpuSet {
        let of_part = self.free.iter().filter(|(_, cpu)| cpu.part(level) == part);
        of_part.map(|(number, _)| *number).collect()
    }

    /// Parts with free CPUs. Parts with the fewest free CPUs are first. `within` restricts the result to
    /// the parts of one larger part.
    fn sorted(&self, level: Level, within: Option<Part>) -> Vec<u32> {
        let is_within = |cpu: &&Cpu| within.is_none_or(|part| cpu.part(part.level) == part.number);
        let parts: BTreeSet<u32> = self.free.values().filter(is_within).map(|cpu| cpu.part(level)).collect();
        let mut parts: Vec<u32> = parts.into_iter().collect();
        // The sort is stable, so parts with equal counts stay in ascending order.
        parts.sort_by_cached_key(|part| self.free_in(level, *part).len());
        parts
    }

    /// The parts of a level, sorted within each of `parts`, the sorted parts of the outer level.
    fn sorted_within(&self, level: Level, outer: Level, parts: Vec<u32>) -> Vec<u32> {
        let within = |number| Some(Part { level: outer, number });
        parts.into_iter().flat_map(|number| self.sorted(level, within(number))).collect()
    }

    fn numa_nodes(&self) -> Vec<u32> {
        if self.is_numa_first {
            self.sorted(Level::Numa, None)
        } else {
            self.sorted_within(Level::Numa, Level::Socket, self.sockets())
        }
    }

    fn sockets(&self) -> Vec<u32> {
        if self.is_numa_first {
            self.sorted_within(Level::Socket, Level::Numa, self.numa_nodes())
        } else {
            self.sorted(Level::Socket, None)
        }
    }

    fn caches(&self) -> Vec<u32> {
        self.sorted_within(Level::Cache, Level::Numa, self.numa_nodes())
    }

    fn cores(&self) -> Vec<u32> {
        let (outer, parts) = if self.is_numa_first {
            (Level::Socket, self.sockets())
        } else {
            (Level::Numa, self.numa_nodes())
        };
        self.sorted_within(Level::Core, outer, parts)
    }

    /// Whether all CPUs of a part are free. As upstream, sockets and cores are compared with the average size.
    fn is_free(&self, level: Level, part: u32) -> bool {
        let whole = match level {
            Level::Socket | Level::Core => self.topology.per_part(level),
            Level::Numa | Level::Cache => self.topology.members(level, part).len(),
        };
        self.free_in(level, part).len() == whole
    }

    /// Takes the parts that are completely free and not larger than the number of needed CPUs.
    fn take_whole(&mut self, level: Level, parts: Vec<u32>) {
        let free: Vec<u32> = parts.into_iter().filter(|part| self.is_free(level, *part)).collect();
        for part in free {
            let members = self.topology.members(level, part);
            if self.needed >= members.len() {
                self.take(&members);
            }
        }
    }

    fn take_first_level(&mut self) {
        let numa = self.is_numa_first;
        self.take_nodes_or_sockets(numa);
    }

    fn take_second_level(&mut self) {
        let numa = !self.is_numa_first;
        self.take_nodes_or_sockets(numa);
    }

    fn take_nodes_or_sockets(&mut self, nodes: bool) {
        if nodes {
            self.take_whole(Level::Numa, self.numa_nodes());
        } else {
            self.take_whole(Level::Socket, self.sockets());
        }
    }

    /// Takes whole caches while the request needs that many CPUs, then the rest from one cache with enough free CPUs.
    fn take_caches(&mut self) {
        if self.order != Order::PackedByCache {
            return;
        }
        for cache in self.caches() {
            if self.needed >= self.topology.per_part(Level::Cache) {
                self.take_whole(Level::Cache, self.caches());
            }
            if self.needed > 0 {
                self.take_from_cache(cache);
            }
            if self.needed == 0 {
                return;
            }
        }
    }

    /// Takes the rest of a request from one cache, from the fewest cores that could satisfy it. Takes nothing if the
    /// number of free CPUs of these cores differs from the request. Only an odd request may leave one thread of a core
    /// free.
    fn take_from_cache(&mut self, cache: u32) {
        let per_core = self.topology.per_part(Level::Core).max(1);
        let cores: BTreeSet<u32> =
            self.free.values().filter(|cpu| cpu.cache == cache).map(|cpu| cpu.core).collect();
        let cores = cores.into_iter().take(self.needed.div_ceil(per_core));
        let mut cpus: Vec<u32> =
            cores.flat_map(|core| self.free_in(Level::Core, core).iter().collect::<Vec<_>>()).collect();
        cpus.sort_unstable();
        if !self.needed.is_multiple_of(2) && per_core > 1 && cpus.len() > self.needed {
            cpus.pop();
        }
        if cpus.len() == self.needed {
            self.take(&cpus.into_iter().collect());
        }
    }

    fn take_cores(&mut self) {
        if self.order != Order::Spread {
            self.take_whole(Level::Core, self.cores());
        }
    }

    fn take_single_cpus(&mut self) {
        let (level, parts) = match self.order {
            Order::Spread => (Level::Socket, self.sockets()),
            Order::Packed | Order::PackedByCache => (Level::Core, self.cores()),
        };
        let cpus = parts.into_iter().flat_map(|part| self.free_in(level, part).iter().collect::<Vec<_>>());
        let cpus: CpuSet = cpus.take(self.needed).collect();
        self.take(&cpus);
    }
}

#[cfg(test)]
pub(crate) mod tests;

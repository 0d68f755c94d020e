//! CPUs, cores, caches, sockets and NUMA nodes of a machine, read from sysfs.
//!
//! As in the kubelet, the rules are those of cAdvisor (`info/v1/machine.go`, `utils/sysinfo`) and of
//! `pkg/kubelet/cm/cpumanager/topology`. Only online CPUs count.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use coracle_values::CollectMap;

use super::CpuSet;
use super::numa_mask::MAX_NODE;

/// NUMA node, socket, core and cache of a CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cpu {
    pub(crate) numa: u32,
    pub(crate) socket: u32,
    /// The lowest number of the CPUs of its core.
    pub(crate) core: u32,
    /// Identifies the CPUs that share its last-level cache.
    pub(crate) cache: u32,
}

/// A part of the machine that contains CPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Level {
    Numa,
    Socket,
    Cache,
    Core,
}

/// The online CPUs of a machine.
#[derive(Clone, Debug)]
pub(crate) struct CpuTopology {
    cpus: BTreeMap<u32, Cpu>,
    all: CpuSet,
}

/// Memory of a NUMA node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct NumaNode {
    /// Memory in bytes.
    pub(crate) memory: u64,
    /// Bytes in huge pages, by the name of the resource: `hugepages-2Mi`.
    pub(crate) huge_pages: BTreeMap<String, u64>,
    /// Distance to each node, 10 for the node itself. Empty if the kernel does not report the distances.
    pub(crate) distances: BTreeMap<u32, u64>,
}

/// CPUs and NUMA nodes of a machine.
#[derive(Clone, Debug)]
pub(crate) struct Machine {
    pub(crate) cpus: CpuTopology,
    pub(crate) nodes: BTreeMap<u32, NumaNode>,
}

/// A file of sysfs or procfs cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum MachineError {
    /// The file cannot be read.
    #[error("cannot read {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Cause.
        #[source]
        source: io::Error,
    },
    /// The content has an unknown form.
    #[error("cannot parse {path}")]
    Parse {
        /// The file.
        path: PathBuf,
    },
    /// The number of a NUMA node is too large.
    #[error("cannot use NUMA node {0}: the highest supported number is 63")]
    NodeNumber(u32),
}

// === impl Cpu ===

impl Cpu {
    /// The number of the part that contains this CPU.
    pub(crate) fn part(&self, level: Level) -> u32 {
        match level {
            Level::Numa => self.numa,
            Level::Socket => self.socket,
            Level::Cache => self.cache,
            Level::Core => self.core,
        }
    }
}

// === impl CpuTopology ===

impl CpuTopology {
    pub(crate) fn new(cpus: BTreeMap<u32, Cpu>) -> Self {
        Self { all: cpus.keys().copied().collect(), cpus }
    }

    /// All online CPUs.
    pub(crate) fn all(&self) -> &CpuSet {
        &self.all
    }

    pub(crate) fn get(&self, cpu: u32) -> Option<&Cpu> {
        self.cpus.get(&cpu)
    }

    /// The CPUs of a part.
    pub(crate) fn members(&self, level: Level, part: u32) -> CpuSet {
        let of_part = self.cpus.iter().filter(|(_, cpu)| cpu.part(level) == part);
        of_part.map(|(number, _)| *number).collect()
    }

    /// The parts of a level, in ascending order.
    pub(crate) fn parts(&self, level: Level) -> BTreeSet<u32> {
        self.cpus.values().map(|cpu| cpu.part(level)).collect()
    }

    /// Average number of CPUs in a part, rounded down.
    pub(crate) fn per_part(&self, level: Level) -> usize {
        self.cpus.len().checked_div(self.parts(level).len()).unwrap_or(0)
    }

    /// These CPUs with their places. CPUs that are not in the topology are left out.
    pub(crate) fn keep(&self, cpus: &CpuSet) -> BTreeMap<u32, Cpu> {
        cpus.iter().filter_map(|number| Some((number, *self.get(number)?))).collect_map()
    }
}

// === impl Machine ===

impl Machine {
    /// Reads the machine below the mount points of sysfs and procfs.
    pub(crate) fn read(sys: &Path, proc: &Path) -> Result<Self, MachineError> {
        let cpu_dir = sys.join("devices/system/cpu");
        let online = cpu_list(&cpu_dir.join("online"))?;
        let node_dir = sys.join("devices/system/node");
        let numbers = if node_dir.join("online").exists() {
            cpu_list(&node_dir.join("online"))?
        } else {
            CpuSet::default()
        };
        let (mut nodes, mut numa_of) = (BTreeMap::new(), BTreeMap::new());
        for number in numbers.iter() {
            if number > MAX_NODE {
                return Err(MachineError::NodeNumber(number));
            }
            let dir = node_dir.join(format!("node{number}"));
            let cpus = cpu_list(&dir.join("cpulist"))?.intersection(&online);
            numa_of.extend(cpus.iter().map(|cpu| (cpu, number)));
            nodes.insert(number, numa_node(&dir, &numbers)?);
        }
        if nodes.is_empty() {
            // A kernel without NUMA: the whole machine is node 0.
            nodes.insert(0, whole_machine(sys, proc)?);
        }
        let mut cpus = BTreeMap::new();
        for cpu in online.iter() {
            let numa = numa_of.get(&cpu).copied().unwrap_or(0);
            cpus.insert(cpu, place(&cpu_dir.join(format!("cpu{cpu}")), cpu, numa, &online));
        }
        share_caches(&mut cpus, &cpu_dir, &online);
        Ok(Self { cpus: CpuTopology::new(cpus), nodes })
    }
}

/// The place of a CPU. Its cache is set later.
fn place(dir: &Path, cpu: u32, numa: u32, online: &CpuSet) -> Cpu {
    let dir = dir.join("topology");
    let siblings = cpu_list(&dir.join("thread_siblings_list")).unwrap_or_default().intersection(online);
    let core = siblings.iter().next().unwrap_or(cpu);
    // On some virtual machines and boards the file is absent or contains -1.
    let socket = text(&dir.join("physical_package_id")).ok().and_then(|text| text.trim().parse().ok());
    let socket = socket.unwrap_or(0);
    Cpu { numa, socket, core, cache: socket }
}

/// Sets the cache of each CPU that shares a level-3 cache with other cores but not with the whole NUMA node. The other
/// CPUs keep the number of their socket as the number of their cache.
fn share_caches(cpus: &mut BTreeMap<u32, Cpu>, cpu_dir: &Path, online: &CpuSet) {
    let topology = CpuTopology::new(cpus.clone());
    for (number, cpu) in cpus {
        let Some((id, shared)) = level3_cache(&cpu_dir.join(format!("cpu{number}/cache")), online) else {
            continue;
        };
        let is_of_node = shared.len() == topology.members(Level::Numa, cpu.numa).len();
        let is_of_core = shared.len() <= topology.members(Level::Core, cpu.core).len();
        if !is_of_node && !is_of_core {
            cpu.cache = id;
        }
    }
}

/// Number and CPUs of a level-3 cache.
fn level3_cache(dir: &Path, online: &CpuSet) -> Option<(u32, CpuSet)> {
    let mut entries = fs::read_dir(dir).ok()?.flatten().map(|entry| entry.path());
    let third = entries.find(|dir| text(&dir.join("level")).is_ok_and(|level| level.trim() == "3"))?;
    let shared = cpu_list(&third.join("shared_cpu_list")).ok()?.intersection(online);
    let id = text(&third.join("id")).ok().and_then(|id| id.trim().parse().ok());
    Some((id.or_else(|| shared.iter().next())?, shared))
}

fn numa_node(dir: &Path, numbers: &CpuSet) -> Result<NumaNode, MachineError> {
    let path = dir.join("meminfo");
    let meminfo = text(&path)?;
    // "Node 0 MemTotal:       16310948 kB"
    let total = meminfo.lines().find_map(|line| line.split_once("MemTotal:")?.1.split_whitespace().next());
    let kib: u64 = total.and_then(|total| total.parse().ok()).ok_or(MachineError::Parse { path })?;
    let distances = text(&dir.join("distance")).unwrap_or_default();
    let distances = distances.split_whitespace().map_while(|distance| distance.parse().ok());
    Ok(NumaNode {
        memory: kib.saturating_mul(1024),
        huge_pages: huge_pages(&dir.join("hugepages")),
        distances: numbers.iter().zip(distances).collect_map(),
    })
}

fn whole_machine(sys: &Path, proc: &Path) -> Result<NumaNode, MachineError> {
    let meminfo = text(&proc.join("meminfo"))?;
    Ok(NumaNode {
        memory: crate::node::kib(&meminfo, "MemTotal").saturating_mul(1024),
        huge_pages: huge_pages(&sys.join("kernel/mm/hugepages")),
        distances: BTreeMap::from([(0, 10)]),
    })
}

/// Bytes in huge pages of each size.
fn huge_pages(dir: &Path) -> BTreeMap<String, u64> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let sizes = entries.filter_map(|entry| {
        let name = entry.file_name().into_string().ok()?;
        let kib: u64 = name.strip_prefix("hugepages-")?.strip_suffix("kB")?.parse().ok()?;
        let pages: u64 = text(&entry.path().join("nr_hugepages")).ok()?.trim().parse().ok()?;
        let bytes = pages.saturating_mul(kib).saturating_mul(1024);
        Some((format!("hugepages-{}", crate::node::binary(kib)), bytes))
    });
    sizes.collect_map()
}

fn cpu_list(path: &Path) -> Result<CpuSet, MachineError> {
    text(path)?.parse().map_err(|_error| MachineError::Parse { path: path.to_owned() })
}

fn text(path: &Path) -> Result<String, MachineError> {
    fs::read_to_string(path).map_err(|source| MachineError::Read { path: path.to_owned(), source })
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A topology of equal parts. `cpus` has the numbers of each CPU's NUMA node, socket, core and cache.
    pub(crate) fn topology(cpus: impl IntoIterator<Item = (u32, [u32; 4])>) -> CpuTopology {
        let place = |[numa, socket, core, cache]: [u32; 4]| Cpu { numa, socket, core, cache };
        CpuTopology::new(cpus.into_iter().map(|(number, parts)| (number, place(parts))).collect())
    }

    fn write(root: &Path, files: &[(&str, &str)]) {
        for (path, content) in files {
            let path = root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
    }

    /// Two NUMA nodes of two CPUs each; CPU 3 is offline.
    fn two_nodes(root: &Path) {
        let meminfo = |node: u32| format!("Node {node} MemTotal:       1024 kB\nNode {node} MemFree: 1 kB\n");
        write(
            root,
            &[
                ("devices/system/cpu/online", "0-2\n"),
                ("devices/system/node/online", "0-1\n"),
                ("devices/system/node/node0/cpulist", "0-1\n"),
                ("devices/system/node/node1/cpulist", "2-3\n"),
                ("devices/system/node/node0/meminfo", &meminfo(0)),
                ("devices/system/node/node1/meminfo", &meminfo(1)),
                ("devices/system/node/node0/distance", "10 21\n"),
                ("devices/system/node/node0/hugepages/hugepages-2048kB/nr_hugepages", "3\n"),
                ("devices/system/cpu/cpu0/topology/thread_siblings_list", "0-1\n"),
                ("devices/system/cpu/cpu1/topology/thread_siblings_list", "0-1\n"),
                ("devices/system/cpu/cpu2/topology/thread_siblings_list", "2-3\n"),
                ("devices/system/cpu/cpu0/topology/physical_package_id", "0\n"),
                ("devices/system/cpu/cpu1/topology/physical_package_id", "-1\n"),
                ("devices/system/cpu/cpu2/topology/physical_package_id", "1\n"),
            ],
        );
    }

    #[test]
    fn online_cpus_and_nodes_are_read_from_sysfs() {
        let root = tempfile::tempdir().unwrap();
        two_nodes(root.path());
        let machine = Machine::read(root.path(), Path::new("/nonexistent")).unwrap();
        assert_eq!(machine.cpus.all().to_string(), "0-2");
        assert_eq!(machine.cpus.get(1), Some(&Cpu { numa: 0, socket: 0, core: 0, cache: 0 }));
        assert_eq!(machine.cpus.get(2), Some(&Cpu { numa: 1, socket: 1, core: 2, cache: 1 }));
        let node = &machine.nodes[&0];
        assert_eq!((node.memory, node.huge_pages["hugepages-2Mi"]), (1 << 20, 6 << 20));
        assert_eq!(node.distances, BTreeMap::from([(0, 10), (1, 21)]));
        assert!(machine.nodes[&1].distances.is_empty());
    }

    #[test]
    fn a_cache_of_some_cores_of_a_node_is_a_part_of_its_own() {
        let root = tempfile::tempdir().unwrap();
        write(root.path(), &[("devices/system/cpu/online", "0-3\n"), ("meminfo", "MemTotal: 8 kB\n")]);
        for cpu in 0..4 {
            let shared = if cpu < 2 { "0-1" } else { "2-3" };
            let dir = format!("devices/system/cpu/cpu{cpu}/cache/index3");
            let level = (format!("{dir}/level"), "3\n");
            let files = [level, (format!("{dir}/shared_cpu_list"), shared)];
            write(root.path(), &files.each_ref().map(|(path, content)| (path.as_str(), *content)));
        }
        let machine = Machine::read(root.path(), root.path()).unwrap();
        let caches: Vec<u32> = (0..4).map(|cpu| machine.cpus.get(cpu).unwrap().cache).collect();
        assert_eq!(caches, [0, 0, 2, 2]);
        assert_eq!(machine.nodes[&0].memory, 8 << 10, "a kernel without NUMA has one node");
    }

    #[test]
    fn this_machine_can_be_read() {
        let machine = Machine::read(Path::new("/sys"), Path::new("/proc")).unwrap();
        assert!(!machine.cpus.all().is_empty() && machine.nodes.values().any(|node| node.memory > 0));
    }
}

//! Usage of a cgroup with its children, read from the kernel on request.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use coracle_values::CollectMap;

/// Usage of a cgroup. Values that the kernel does not have are None.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct CgroupUsage {
    /// Creation time of the cgroup.
    pub(crate) created: Option<SystemTime>,
    /// Processor time in nanoseconds.
    pub(crate) cpu_nanos: Option<u64>,
    pub(crate) memory: Option<MemoryUsage>,
}

/// Memory of a cgroup in bytes, and its page faults.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct MemoryUsage {
    pub(crate) usage: u64,
    /// `usage` without inactive file pages.
    pub(crate) working_set: u64,
    pub(crate) rss: u64,
    pub(crate) page_faults: u64,
    pub(crate) major_page_faults: u64,
}

/// Memory and processes of a pod.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PodUsage {
    /// Bytes of the working set.
    pub(crate) memory: u64,
    /// Processes and threads.
    pub(crate) pids: u64,
}

/// Bytes of memory of a cgroup without pages of files and without the kernel's cached objects, such as directory
/// entries. The kernel takes these pages and objects back when other memory is needed, so `MemAvailable` of the machine
/// includes them as well. v1 does not report the cached objects.
pub(super) fn without_caches(dir: &Path, v2: bool) -> Option<u64> {
    let read = |file: &str| fs::read_to_string(dir.join(file)).ok();
    let usage: u64 =
        read(if v2 { "memory.current" } else { "memory.usage_in_bytes" })?.trim().parse().ok()?;
    let stat = read("memory.stat")?;
    let names: &[&str] = if v2 {
        &["inactive_file", "active_file", "slab_reclaimable"]
    } else {
        &["total_inactive_file", "total_active_file"]
    };
    let caches = names.iter().filter_map(|name| value(&stat, name)).fold(0, u64::saturating_add);
    Some(usage.saturating_sub(caches))
}

/// Reads the memory and the processes of a pod. None if its cgroup does not exist.
pub(super) fn read_pod(dirs: &BTreeMap<String, PathBuf>, v2: bool) -> Option<PodUsage> {
    let memory = dirs.get("memory").and_then(|dir| memory(dir, v2)).map(|memory| memory.working_set);
    let pids: Option<u64> = dirs.get("pids").and_then(|dir| {
        let text = fs::read_to_string(dir.join("pids.current")).ok()?;
        text.trim().parse().ok()
    });
    if memory.is_none() && pids.is_none() {
        return None;
    }
    Some(PodUsage { memory: memory.unwrap_or_default(), pids: pids.unwrap_or_default() })
}

/// Reads the usage from the directories of each controller.
pub(super) fn read(dirs: &BTreeMap<String, PathBuf>, v2: bool) -> CgroupUsage {
    let (cpu, file) = if v2 { ("cpu", "cpu.stat") } else { ("cpuacct", "cpuacct.usage") };
    let cpu = dirs.get(cpu).map(|dir| dir.join(file));
    CgroupUsage {
        created: cpu.as_ref().and_then(|file| fs::metadata(file).ok()?.modified().ok()),
        cpu_nanos: cpu.and_then(|file| {
            let text = fs::read_to_string(file).ok()?;
            if v2 { value(&text, "usage_usec").map(|usec| usec * 1000) } else { text.trim().parse().ok() }
        }),
        memory: dirs.get("memory").and_then(|dir| memory(dir, v2)),
    }
}

fn memory(dir: &Path, v2: bool) -> Option<MemoryUsage> {
    let read = |file: &str| fs::read_to_string(dir.join(file)).ok();
    let usage = read(if v2 { "memory.current" } else { "memory.usage_in_bytes" })?.trim().parse().ok()?;
    let stat = read("memory.stat")?;
    let names = if v2 {
        ["inactive_file", "anon", "pgfault", "pgmajfault"]
    } else {
        ["total_inactive_file", "total_rss", "total_pgfault", "total_pgmajfault"]
    };
    let [inactive, rss, page_faults, major_page_faults] =
        names.map(|name| value(&stat, name).unwrap_or_default());
    Some(MemoryUsage {
        usage,
        working_set: usage.saturating_sub(inactive),
        rss,
        page_faults,
        major_page_faults,
    })
}

/// The number of `name` in a file that has a name and a number in each line.
fn value(text: &str, name: &str) -> Option<u64> {
    let mut lines = text.lines().filter_map(|line| line.split_once(' '));
    lines.find(|(known, _)| *known == name)?.1.trim().parse().ok()
}

/// The directories of a process's cgroup, from its `/proc/PID/cgroup` and the mounts. None for the root cgroup, and for
/// a cgroup outside of the mounts (cgroup_namespaces(7)).
pub(super) fn own_directories(
    text: &str,
    mounts: &BTreeMap<String, PathBuf>,
    v2: bool,
) -> Option<BTreeMap<String, PathBuf>> {
    let path_of = |controller: &str| {
        text.lines().find_map(|line| {
            let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
            let is_its =
                if v2 { controllers.is_empty() } else { controllers.split(',').any(|one| one == controller) };
            is_its.then(|| path.trim_matches('/'))
        })
    };
    let is_below = |path: &&str| !path.is_empty() && !path.split('/').any(|part| part == "..");
    let dirs: BTreeMap<String, PathBuf> = mounts
        .iter()
        .filter_map(|(controller, mount)| {
            Some((controller.clone(), mount.join(path_of(controller).filter(is_below)?)))
        })
        .collect_map();
    (!dirs.is_empty()).then_some(dirs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_versions_of_cgroups_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(dir.path().join(name), text).unwrap();
        write("cpu.stat", "usage_usec 7\nuser_usec 5\n");
        write("memory.current", "100\n");
        write("memory.stat", "anon 20\ninactive_file 30\npgfault 4\npgmajfault 1\n");
        let dirs: BTreeMap<String, PathBuf> =
            ["cpu", "cpuacct", "memory"].map(|name| (name.to_owned(), dir.path().to_owned())).into();
        let usage = read(&dirs, true);
        let memory =
            MemoryUsage { usage: 100, working_set: 70, rss: 20, page_faults: 4, major_page_faults: 1 };
        assert_eq!((usage.cpu_nanos, usage.memory), (Some(7000), Some(memory)));
        assert!(usage.created.is_some());
        write("cpuacct.usage", "9\n");
        write("memory.usage_in_bytes", "100");
        write(
            "memory.stat",
            "rss 1\ntotal_rss 20\ntotal_inactive_file 30\ntotal_pgfault 4\ntotal_pgmajfault 1\n",
        );
        let usage = read(&dirs, false);
        assert_eq!((usage.cpu_nanos, usage.memory), (Some(9), Some(memory)));
        assert_eq!(read(&BTreeMap::new(), true), CgroupUsage::default());
    }

    #[test]
    fn memory_and_processes_of_a_pod_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(dir.path().join(name), text).unwrap();
        let dirs: BTreeMap<String, PathBuf> =
            ["memory", "pids"].map(|name| (name.to_owned(), dir.path().to_owned())).into();
        assert_eq!(read_pod(&dirs, true), None, "a pod without a cgroup");
        write("memory.current", "100\n");
        write("memory.stat", "anon 20\ninactive_file 30\n");
        write("pids.current", "7\n");
        assert_eq!(read_pod(&dirs, true), Some(PodUsage { memory: 70, pids: 7 }));
    }

    #[test]
    fn caches_are_memory_that_can_be_taken_back() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(dir.path().join(name), text).unwrap();
        assert_eq!(without_caches(dir.path(), true), None);
        write("memory.current", "100\n");
        write("memory.stat", "anon 20\ninactive_file 30\nactive_file 45\nslab_reclaimable 4\nslab 5\n");
        assert_eq!(without_caches(dir.path(), true), Some(21));
        write("memory.usage_in_bytes", "100\n");
        write("memory.stat", "active_file 1\ntotal_inactive_file 10\ntotal_active_file 5\n");
        assert_eq!(without_caches(dir.path(), false), Some(85));
    }

    #[test]
    fn the_directories_of_a_process_are_found_unless_it_is_in_the_root() {
        let mounts = |v2: bool| -> BTreeMap<String, PathBuf> {
            let mount = |name: &str| if v2 { "/c".to_owned() } else { format!("/c/{name}") };
            ["cpu", "memory"].map(|name| (name.to_owned(), PathBuf::from(mount(name)))).into()
        };
        let unified = own_directories("0::/system.slice/a.service\n", &mounts(true), true).unwrap();
        assert_eq!(unified["memory"], Path::new("/c/system.slice/a.service"));
        let split = "4:memory:/a\n3:cpu,cpuacct:/\n0::/x\n";
        let split = own_directories(split, &mounts(false), false).unwrap();
        assert_eq!((split.len(), split["memory"].as_path()), (1, Path::new("/c/memory/a")));
        for none in ["0::/\n", "0::/../b\n", ""] {
            assert_eq!(own_directories(none, &mounts(true), true), None, "{none}");
        }
    }
}

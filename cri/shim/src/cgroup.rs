//! Cgroups through plain file writes, in every mounted hierarchy: v1, hybrid and v2.

use std::collections::BTreeSet;
use std::fs;
use std::io::{self, ErrorKind, Write as _};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use coracle_systemd::property::v1;
use coracle_tree::mountinfo::{cgroup_controllers, unescaped};

use crate::kernel;
use crate::process::ProcDirectory;
use crate::report::note;

/// The v1 controllers that the container library supports.
const SUPPORTED_V1: [&str; 12] = [
    "cpu",
    "cpuacct",
    "cpuset",
    "devices",
    "hugetlb",
    "memory",
    "net_cls",
    "net_prio",
    "pids",
    "perf_event",
    "blkio",
    "freezer",
];

/// Maximum number of scans of a cgroup while its processes are killed. A tree of processes that forks faster than the
/// scans stays alive.
const MAX_KILL_SCANS: usize = 100;

/// A cgroup operation that the kernel refused.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CgroupError {
    #[error("cannot read the mounted cgroup hierarchies")]
    Hierarchies(#[source] io::Error),
    #[error("cannot make the cgroup {}", .path.display())]
    Make { path: PathBuf, source: io::Error },
    #[error("cannot enter the cgroup {}", .path.display())]
    Enter { path: PathBuf, source: io::Error },
    #[error("cannot remove the cgroup {}", .path.display())]
    Remove { path: PathBuf, source: io::Error },
}

/// One mounted hierarchy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Hierarchy {
    pub(crate) mount: PathBuf,
    /// Comma-separated v1 controllers, empty for v2.
    controllers: String,
}

/// Result of removing a tree of cgroups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Removed {
    All,
    /// Processes still run in the tree, or more cgroups are left than one call removes.
    Busy,
}

// === impl Hierarchy ===

impl Hierarchy {
    #[cfg(test)]
    pub(crate) fn new(mount: &str, controllers: &str) -> Self {
        Self { mount: PathBuf::from(mount), controllers: controllers.to_owned() }
    }

    /// The directory names under which a container sees the hierarchy: the combined name of all its
    /// controllers and, if there are several, each single name. Empty for controllers that the container
    /// library does not support, and for v2.
    pub(crate) fn aliases(&self) -> Vec<&str> {
        let mut each: Vec<&str> =
            self.controllers.split(',').filter(|name| SUPPORTED_V1.contains(name)).collect();
        if each.len() > 1 {
            each.insert(0, &self.controllers);
        }
        each
    }

    /// Whether this is the v2 hierarchy, alone or beside v1 hierarchies.
    pub(crate) fn is_unified(&self) -> bool {
        self.controllers.is_empty()
    }

    /// Whether systemd creates the cgroups of its units in this hierarchy and moves their processes there.
    pub(crate) fn is_managed_by_systemd(&self) -> bool {
        v1::manages(&self.controllers)
    }

    pub(crate) fn has(&self, controller: &str) -> bool {
        self.controllers.split(',').any(|name| name == controller)
    }

    pub(crate) fn at(&self, path: &str) -> PathBuf {
        self.mount.join(path.trim_start_matches('/'))
    }

    /// Makes the cgroup and all its parents.
    ///
    /// A v1 cpuset accepts no process before it has processors and memory nodes. New cgroups have none, so they get
    /// their parent's values. The values are also copied into a cgroup that another process has just created.
    pub(crate) fn make(&self, path: &str) -> Result<PathBuf, CgroupError> {
        let whole = self.at(path);
        // Usually only the last component is missing.
        let made = match fs::create_dir(&whole) {
            Err(error) => error.kind() == ErrorKind::AlreadyExists,
            Ok(()) => true,
        };
        if made && whole.parent().is_some_and(|parent| self.fill(parent, &whole)) {
            return Ok(whole);
        }
        let mut at = self.mount.clone();
        for part in path.split('/').filter(|part| !part.is_empty()) {
            let parent = at.clone();
            at.push(part);
            match fs::create_dir(&at) {
                Err(error) if error.kind() != ErrorKind::AlreadyExists => {
                    return Err(CgroupError::Make { path: at, source: error });
                }
                // An error is ignored here: it is reported with the name of the file when the first process enters.
                _ => self.fill(&parent, &at),
            };
        }
        Ok(at)
    }

    /// Copies the parent's processors and memory nodes if the cgroup has none. Returns whether processes can
    /// enter.
    fn fill(&self, parent: &Path, child: &Path) -> bool {
        let read =
            |dir: &Path, file| fs::read_to_string(dir.join(file)).unwrap_or_default().trim().to_owned();
        let fill_one = |file| {
            !read(child, file).is_empty() || {
                let value = read(parent, file);
                !value.is_empty() && fs::write(child.join(file), value).is_ok()
            }
        };
        !self.has("cpuset") || ["cpuset.cpus", "cpuset.mems"].into_iter().all(fill_one)
    }
}

/// The hierarchies that the runtime passes in the configuration. If it passes no hierarchy, all mounted hierarchies.
pub(crate) fn configured(
    hierarchies: &[coracle_proto::shim::Hierarchy],
) -> Result<Vec<Hierarchy>, CgroupError> {
    let convert = |passed: &coracle_proto::shim::Hierarchy| Hierarchy {
        mount: PathBuf::from(&passed.mount),
        controllers: passed.controllers.clone(),
    };
    if hierarchies.is_empty() { self::hierarchies() } else { Ok(hierarchies.iter().map(convert).collect()) }
}

/// Whether any v1 controller is mounted (v1 or hybrid).
pub(crate) fn is_v1(hierarchies: &[Hierarchy]) -> bool {
    hierarchies.iter().any(|hierarchy| !hierarchy.aliases().is_empty())
}

/// All hierarchies mounted here, from `/proc/self/mountinfo`.
pub(crate) fn hierarchies() -> Result<Vec<Hierarchy>, CgroupError> {
    coracle_tree::read_lossy("/proc/self/mountinfo")
        .map(|text| parse(&text))
        .map_err(CgroupError::Hierarchies)
}

fn parse(mountinfo: &str) -> Vec<Hierarchy> {
    let mut found: Vec<Hierarchy> = Vec::new();
    for line in mountinfo.lines() {
        let Some((left, right)) = line.split_once(" - ") else { continue };
        let mut right = right.split(' ');
        let (kind, options) = (right.next().unwrap_or_default(), right.nth(1).unwrap_or_default());
        let Some(controllers) = cgroup_controllers(kind, options) else { continue };
        // Only a mount of the whole hierarchy is usable. Of two mounts of one hierarchy the first is used.
        let mut left = left.split(' ').skip(3);
        if left.next() != Some("/") || found.iter().any(|known| known.controllers == controllers) {
            continue;
        }
        if let Some(mount) = left.next() {
            found.push(Hierarchy { mount: unescaped(mount), controllers });
        }
    }
    found
}

/// Whether a path names a cgroup below a hierarchy's root. The root contains all processes of the machine. A kill with
/// an empty path would kill all of them. The path of a container is empty while its cgroup is not known.
pub(crate) fn is_below_root(path: &str) -> bool {
    let mut parts = path.split('/').filter(|part| !part.is_empty()).peekable();
    parts.peek().is_some() && parts.all(|part| !matches!(part, "." | ".."))
}

/// The existing directories of a cgroup path. Never the root of a hierarchy.
pub(crate) fn existing(hierarchies: &[Hierarchy], path: &str) -> Vec<PathBuf> {
    if !is_below_root(path) {
        return Vec::new();
    }
    hierarchies.iter().map(|hierarchy| hierarchy.at(path)).filter(|at| at.is_dir()).collect()
}

/// Moves a process into the cgroups; pid 0 is the calling process.
pub(crate) fn put(cgroups: &[PathBuf], pid: i32) -> Result<(), CgroupError> {
    for cgroup in cgroups {
        fs::write(cgroup.join("cgroup.procs"), pid.to_string())
            .map_err(|source| CgroupError::Enter { path: cgroup.clone(), source })?;
    }
    Ok(())
}

/// Moves the calling process, which must have one thread, into the cgroups.
///
/// On v1 this writes `tasks`, which moves only the calling thread. Moving a whole process (`cgroup.procs`) waits for
/// an RCU grace period, 10 ms and more. The kernel must synchronize with every fork and exit of the machine
/// (`cgroup_procs_write_start` in kernel/cgroup/cgroup.c, since Linux 5.13). On v2 only threaded cgroups have such a
/// file, so `cgroup.procs` is used.
pub(crate) fn enter(cgroups: &[PathBuf]) -> Result<(), CgroupError> {
    for cgroup in cgroups {
        let thread = fs::OpenOptions::new().write(true).open(cgroup.join("tasks"));
        match thread.and_then(|mut tasks| tasks.write_all(b"0")) {
            Err(error) if error.kind() == ErrorKind::NotFound => put(std::slice::from_ref(cgroup), 0)?,
            Err(source) => return Err(CgroupError::Enter { path: cgroup.clone(), source }),
            Ok(()) => {}
        }
    }
    Ok(())
}

/// Like [`enter`], for a process that joins a running container. `first` is the container's first process,
/// `path` the container's cgroup.
///
/// On v2 a cgroup that enables controllers for its children accepts no process ("no internal processes"). A
/// container that runs containers or services of its own has such a cgroup. The process then enters the child
/// cgroup in which the first process runs.
pub(crate) fn enter_child_of_first(
    cgroups: &[PathBuf],
    path: &str,
    first: &ProcDirectory,
) -> Result<(), CgroupError> {
    let refused = match enter(cgroups) {
        Err(CgroupError::Enter { path, source }) if source.kind() == ErrorKind::ResourceBusy => {
            (path, source)
        }
        entered => return entered,
    };
    let proc_cgroup = first.cgroups().unwrap_or_default();
    match below(&proc_cgroup, path) {
        Some(below) => put(&[refused.0.join(below)], 0),
        None => Err(CgroupError::Enter { path: refused.0, source: refused.1 }),
    }
}

/// The path below `cgroup` in which a process runs on v2. `proc_cgroup` is the text of its `/proc/<pid>/cgroup`.
fn below<'a>(proc_cgroup: &'a str, cgroup: &str) -> Option<&'a str> {
    let unified = proc_cgroup.lines().find_map(|line| line.strip_prefix("0::"))?;
    unified.strip_prefix(cgroup.trim_end_matches('/'))?.strip_prefix('/').filter(|below| !below.is_empty())
}

/// Kills all processes in the cgroup and below it.
pub(crate) fn kill(hierarchies: &[Hierarchy], path: &str) {
    let directories = existing(hierarchies, path);
    // v2 only, since Linux 5.14: also kills processes that are being forked.
    let kill_all = |cgroup: &PathBuf| {
        let file = fs::OpenOptions::new().write(true).open(cgroup.join("cgroup.kill"));
        file.and_then(|mut file| file.write_all(b"1")).is_ok()
    };
    if directories.iter().all(kill_all) {
        return;
    }
    // Processes that fork during a scan are found by the next scan. Killed processes fork no more.
    let mut killed = BTreeSet::new();
    for _ in 0..MAX_KILL_SCANS {
        let found = processes(hierarchies, path);
        let new: BTreeSet<i32> = found.difference(&killed).copied().collect();
        if new.is_empty() {
            return;
        }
        signal_listed(hierarchies, path, &new, nix::libc::SIGKILL);
        killed.extend(new);
    }
}

/// Sends a signal to each process in the cgroup and below it. Returns the processes found.
pub(crate) fn signal(hierarchies: &[Hierarchy], path: &str, signal: i32) -> BTreeSet<i32> {
    let listed = processes(hierarchies, path);
    signal_listed(hierarchies, path, &listed, signal);
    listed
}

/// Sends a signal to listed processes of the cgroup. Processes that are killed are also thawed.
fn signal_listed(hierarchies: &[Hierarchy], path: &str, listed: &BTreeSet<i32>, signal: i32) {
    let pids: Vec<i32> = listed.iter().copied().filter(|pid| *pid > 1).collect();
    let open = |pid| kernel::pidfd_open(pid).ok();
    let list = || -> Vec<i32> { processes(hierarchies, path).into_iter().collect() };
    // A process that has ended needs no signal.
    let send = |process: &OwnedFd| drop(kernel::send_signal(process, signal));
    coracle_tree::cgroup::signal_listed(&pids, open, list, send);
    if signal == nix::libc::SIGKILL && !pids.is_empty() {
        thaw(hierarchies, path);
    }
}

/// Thaws the cgroup and all cgroups below it. On v1 a killed process does not end while its cgroup is frozen. Root of
/// a container can freeze the cgroups that it makes.
fn thaw(hierarchies: &[Hierarchy], path: &str) {
    let freezers: Vec<Hierarchy> = hierarchies.iter().filter(|found| found.has("freezer")).cloned().collect();
    for cgroup in existing(&freezers, path) {
        if let Err(error) = coracle_tree::cgroup::thaw(&cgroup) {
            note(&format!("cannot thaw the cgroups of {}: {error}", cgroup.display()));
        }
    }
}

/// All processes in the cgroup and below it, in any hierarchy.
pub(crate) fn processes(hierarchies: &[Hierarchy], path: &str) -> BTreeSet<i32> {
    let mut pids = BTreeSet::new();
    for cgroup in existing(hierarchies, path) {
        pids.extend(coracle_tree::cgroup::processes(&cgroup));
    }
    pids
}

/// Removes the cgroup and all cgroups below it, in every hierarchy. An absent cgroup counts as removed.
pub(crate) fn remove(hierarchies: &[Hierarchy], path: &str) -> Result<Removed, CgroupError> {
    let mut removed = Removed::All;
    for hierarchy in hierarchies.iter().filter(|_| is_below_root(path)) {
        let cgroup = hierarchy.at(path);
        match coracle_tree::cgroup::remove(&cgroup) {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::ResourceBusy => removed = Removed::Busy,
            Err(source) => return Err(CgroupError::Remove { path: cgroup, source }),
        }
    }
    Ok(removed)
}

/// The parent cgroup's path.
pub(crate) fn parent(path: &str) -> &str {
    path.trim_end_matches('/').rsplit_once('/').map_or("", |(parent, _)| parent)
}

/// Number of OOM kills in the cgroup, from memory.oom_control (v1) or memory.events (v2). `None` if the
/// cgroup is gone.
pub(crate) fn oom_kills(hierarchies: &[Hierarchy], path: &str) -> Option<u64> {
    if !is_below_root(path) {
        return None;
    }
    let counters = hierarchies.iter().filter_map(|hierarchy| {
        let file = match hierarchy.controllers.as_str() {
            "" => "memory.events",
            _ if hierarchy.has("memory") => "memory.oom_control",
            _ => return None,
        };
        fs::read_to_string(hierarchy.at(path).join(file)).ok()
    });
    counters.map(|text| oom_kill_line(&text)).reduce(|one, other| one + other)
}

fn oom_kill_line(text: &str) -> u64 {
    text.lines().find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HYBRID: &str = "\
29 23 0:26 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755
30 29 0:27 / /sys/fs/cgroup/cpu,cpuacct rw,nosuid shared:9 - cgroup cgroup rw,cpu,cpuacct
31 29 0:28 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,name=systemd
32 29 0:28 /inner /mnt/part rw - cgroup cgroup rw,memory
33 29 0:29 / /sys/fs/cgroup/unified rw - cgroup2 none rw
34 29 0:27 / /mnt/again rw - cgroup cgroup rw,cpu,cpuacct
";

    #[test]
    fn a_cpuset_that_another_process_created_and_did_not_fill_is_filled() {
        let root = std::env::temp_dir().join(format!("coracle-cpuset-{}", std::process::id()));
        let _ = fs::remove_dir_all(&root);
        fs::create_dir(&root).unwrap();
        let cpuset = Hierarchy { mount: root.clone(), controllers: "cpuset".to_owned() };
        let has = |path: &str, cpus: &str| {
            let read = |file| fs::read_to_string(root.join(path).join(file)).unwrap();
            assert_eq!(
                (read("cpuset.cpus"), read("cpuset.mems")),
                (cpus.to_owned(), "0".to_owned()),
                "{path}"
            );
        };
        fs::write(root.join("cpuset.cpus"), "0-1\n").unwrap();
        fs::write(root.join("cpuset.mems"), "0\n").unwrap();
        // Another process has created, but not yet filled, the parent, the cgroup itself, or both.
        for made in ["a", "b/c", "d/e/f"] {
            fs::create_dir_all(root.join(made)).unwrap();
        }
        for path in ["/a/x", "/b/c", "/d/e/f", "/new/one"] {
            assert_eq!(cpuset.make(path).unwrap(), cpuset.at(path));
        }
        for path in ["a", "a/x", "b", "b/c", "d", "d/e", "d/e/f", "new", "new/one"] {
            has(path, "0-1");
        }
        fs::write(root.join("a/cpuset.cpus"), "1").unwrap();
        cpuset.make("/a/y").unwrap();
        cpuset.make("/a/x").unwrap();
        has("a/y", "1");
        has("a/x", "0-1");
        fs::remove_dir_all(&root).unwrap();
    }

    #[test]
    fn each_complete_hierarchy_is_found_once() {
        let found = parse(HYBRID);
        let mounts: Vec<_> = found.iter().map(|h| h.mount.to_string_lossy().into_owned()).collect();
        assert_eq!(
            mounts,
            ["/sys/fs/cgroup/cpu,cpuacct", "/sys/fs/cgroup/systemd", "/sys/fs/cgroup/unified"]
        );
        assert!(found[0].has("cpuacct"));
        assert!(!found[2].has("memory"));
    }

    #[test]
    fn the_root_of_a_hierarchy_is_never_used() {
        let root = Hierarchy { mount: PathBuf::from("/sys/fs/cgroup"), controllers: String::new() };
        for path in ["", "/", "//", "..", "/a/../..", "/./"] {
            assert!(existing(std::slice::from_ref(&root), path).is_empty(), "{path:?}");
            assert!(processes(std::slice::from_ref(&root), path).is_empty(), "{path:?}");
        }
        assert!(is_below_root("/kubepods/pod1"));
    }

    #[test]
    fn a_process_is_found_below_its_containers_cgroup_and_nowhere_else() {
        let proc_cgroup = |path: &str| format!("4:memory:/elsewhere\n0::{path}\n");
        assert_eq!(below(&proc_cgroup("/pods/c/init.scope"), "/pods/c"), Some("init.scope"));
        assert_eq!(below(&proc_cgroup("/pods/c/a/b"), "/pods/c/"), Some("a/b"));
        for elsewhere in ["/pods/c", "/pods/c2/x", "/x", "/pods"] {
            assert_eq!(below(&proc_cgroup(elsewhere), "/pods/c"), None, "{elsewhere}");
        }
        assert_eq!(below("4:memory:/pods/c/x\n", "/pods/c"), None);
    }

    #[test]
    fn the_oom_counter_is_read_in_both_formats() {
        assert_eq!(oom_kill_line("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"), 3);
        assert_eq!(oom_kill_line("low 0\nmax 12\noom 2\noom_kill 1\noom_group_kill 0\n"), 1);
        assert_eq!(oom_kill_line(""), 0);
    }
}

//! Cgroups by plain file writes, over every hierarchy that is mounted: v1, hybrid and v2 alike.

use std::collections::BTreeSet;
use std::fs;
use std::io::{self, ErrorKind, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use coracle_systemd::property::v1;
use nix::sys::signal::Signal;
use nix::unistd::Pid;

/// The v1 controllers that the container library knows.
const JOINED: [&str; 12] = [
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

/// How often who is to be killed is looked for. More cannot be expected of what only makes processes.
const MOST_ROUNDS: usize = 100;

/// A cgroup operation that the kernel refused.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CgroupError {
    #[error("read the mounted cgroup hierarchies")]
    Hierarchies(#[source] io::Error),
    #[error("make the cgroup {}", .path.display())]
    Make { path: PathBuf, source: io::Error },
    #[error("enter the cgroup {}", .path.display())]
    Enter { path: PathBuf, source: io::Error },
    #[error("remove the cgroup {}", .path.display())]
    Remove { path: PathBuf, source: io::Error },
}

/// One mounted hierarchy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Hierarchy {
    pub(crate) mount: PathBuf,
    /// Comma-separated v1 controllers, empty for v2.
    controllers: String,
}

/// Whether a tree of cgroups is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Removed {
    All,
    /// Something still runs in it.
    Busy,
}

// === impl Hierarchy ===

impl Hierarchy {
    #[cfg(test)]
    pub(crate) fn new(mount: &str, controllers: &str) -> Self {
        Self { mount: PathBuf::from(mount), controllers: controllers.to_owned() }
    }

    /// The names under which a container finds it, for one that the container library joins: all
    /// controllers together and, where there are several, each.
    pub(crate) fn aliases(&self) -> Vec<&str> {
        let mut each: Vec<&str> = self.controllers.split(',').filter(|name| JOINED.contains(name)).collect();
        if each.len() > 1 {
            each.insert(0, &self.controllers);
        }
        each
    }

    /// Whether it is the one of v2, alone or beside v1's.
    pub(crate) fn is_unified(&self) -> bool {
        self.controllers.is_empty()
    }

    /// Whether systemd makes the cgroups of its units in it, and puts their processes there.
    pub(crate) fn is_systemds(&self) -> bool {
        v1::manages(&self.controllers)
    }

    pub(crate) fn has(&self, controller: &str) -> bool {
        self.controllers.split(',').any(|name| name == controller)
    }

    pub(crate) fn at(&self, path: &str) -> PathBuf {
        self.mount.join(path.trim_start_matches('/'))
    }

    /// Makes the cgroup with all its parents. A v1 cpuset accepts no process before it has
    /// processors and memory, which new ones have not: they get their parent's. So do those that
    /// another maker has made just now and not come to give them any.
    pub(crate) fn make(&self, path: &str) -> Result<PathBuf, CgroupError> {
        let whole = self.at(path);
        // Nearly always it is the last part alone that is missing.
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
                // Failure shows at the first process that enters, with that file's name.
                _ => self.fill(&parent, &at),
            };
        }
        Ok(at)
    }

    /// Whether processes can enter, now that it has its parent's processors and memory if it had none.
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

/// The hierarchies that we were told of, or all that are mounted here.
pub(crate) fn told(hierarchies: &[coracle_proto::shim::Hierarchy]) -> Result<Vec<Hierarchy>, CgroupError> {
    let own = |told: &coracle_proto::shim::Hierarchy| Hierarchy {
        mount: PathBuf::from(&told.mount),
        controllers: told.controllers.clone(),
    };
    if hierarchies.is_empty() { self::hierarchies() } else { Ok(hierarchies.iter().map(own).collect()) }
}

/// Whether controllers are v1's, beside a hierarchy of v2 or alone.
pub(crate) fn is_v1(hierarchies: &[Hierarchy]) -> bool {
    hierarchies.iter().any(|hierarchy| !hierarchy.aliases().is_empty())
}

/// All hierarchies mounted here, from `/proc/self/mountinfo`.
pub(crate) fn hierarchies() -> Result<Vec<Hierarchy>, CgroupError> {
    fs::read_to_string("/proc/self/mountinfo").map(|text| parse(&text)).map_err(CgroupError::Hierarchies)
}

fn parse(mountinfo: &str) -> Vec<Hierarchy> {
    let mut found: Vec<Hierarchy> = Vec::new();
    for line in mountinfo.lines() {
        let Some((left, right)) = line.split_once(" - ") else { continue };
        let mut right = right.split(' ');
        let (kind, options) = (right.next().unwrap_or_default(), right.nth(1).unwrap_or_default());
        let controllers = match kind {
            "cgroup2" => String::new(),
            "cgroup" => {
                let names =
                    options.split(',').filter(|o| !matches!(*o, "rw" | "ro" | "xattr" | "clone_children"));
                names.collect::<Vec<_>>().join(",")
            }
            _ => continue,
        };
        // Only the whole hierarchy will do, and of two mounts of it one.
        let mut left = left.split(' ').skip(3);
        if left.next() != Some("/") || found.iter().any(|known| known.controllers == controllers) {
            continue;
        }
        if let Some(mount) = left.next() {
            found.push(Hierarchy { mount: PathBuf::from(mount), controllers });
        }
    }
    found
}

/// Makes the cgroup in every hierarchy; the answer is the directories made.
pub(crate) fn make(hierarchies: &[Hierarchy], path: &str) -> Result<Vec<PathBuf>, CgroupError> {
    hierarchies.iter().map(|hierarchy| hierarchy.make(path)).collect()
}

/// Whether a path names a cgroup below a hierarchy's root. The root itself holds the whole machine:
/// an empty path there, of a container whose cgroup is not known yet, would be everybody's death.
pub(crate) fn is_below_root(path: &str) -> bool {
    let mut parts = path.split('/').filter(|part| !part.is_empty()).peekable();
    parts.peek().is_some() && parts.all(|part| !matches!(part, "." | ".."))
}

/// The cgroups of that path that exist. Never the root.
pub(crate) fn existing(hierarchies: &[Hierarchy], path: &str) -> Vec<PathBuf> {
    if !is_below_root(path) {
        return Vec::new();
    }
    hierarchies.iter().map(|hierarchy| hierarchy.at(path)).filter(|at| at.is_dir()).collect()
}

/// Moves a process into the cgroups; 0 is the calling one.
pub(crate) fn put(cgroups: &[PathBuf], pid: i32) -> Result<(), CgroupError> {
    for cgroup in cgroups {
        fs::write(cgroup.join("cgroup.procs"), pid.to_string())
            .map_err(|source| CgroupError::Enter { path: cgroup.clone(), source })?;
    }
    Ok(())
}

/// Moves the calling process, which must have one thread, into the cgroups.
///
/// On v1 by `tasks`: the calling thread alone is moved, for which the kernel does not wait until every
/// fork and exit of the machine heeds the lock that whole processes are moved under (an RCU grace period,
/// 10 ms and more; `cgroup_procs_write_start` in kernel/cgroup/cgroup.c, since Linux 5.13). v2 has no such
/// file for ordinary cgroups.
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

/// The same for a process that joins a container, of which another process is `first`, in the cgroup of that path.
///
/// v2 takes no process into a cgroup that hands controllers down, as what runs containers or services of its own does
/// with that of its container. It is then in one below, as others of the container are: there is room for this one.
pub(crate) fn enter_beside(cgroups: &[PathBuf], path: &str, first: i32) -> Result<(), CgroupError> {
    let refused = match enter(cgroups) {
        Err(CgroupError::Enter { path, source }) if source.kind() == ErrorKind::ResourceBusy => {
            (path, source)
        }
        entered => return entered,
    };
    let lives = fs::read_to_string(format!("/proc/{first}/cgroup")).unwrap_or_default();
    match below(&lives, path) {
        Some(below) => put(&[refused.0.join(below)], 0),
        None => Err(CgroupError::Enter { path: refused.0, source: refused.1 }),
    }
}

/// Where below a cgroup a process lives on v2, by its `/proc/<pid>/cgroup`.
fn below<'a>(lives: &'a str, cgroup: &str) -> Option<&'a str> {
    let unified = lives.lines().find_map(|line| line.strip_prefix("0::"))?;
    unified.strip_prefix(cgroup.trim_end_matches('/'))?.strip_prefix('/').filter(|below| !below.is_empty())
}

/// Kills all processes in the cgroup and below.
pub(crate) fn kill(hierarchies: &[Hierarchy], path: &str) {
    let places = existing(hierarchies, path);
    // Of v2 alone, since Linux 5.14: whoever is being made goes as well.
    let at_once = |cgroup: &PathBuf| {
        let file = fs::OpenOptions::new().write(true).open(cgroup.join("cgroup.kill"));
        file.and_then(|mut file| file.write_all(b"1")).is_ok()
    };
    if places.iter().all(at_once) {
        return;
    }
    // What is made while we look is found by the next look. One that is to die makes no others.
    let mut killed = BTreeSet::new();
    for _ in 0..MOST_ROUNDS {
        let found = processes(hierarchies, path);
        let new: Vec<i32> = found.difference(&killed).copied().filter(|pid| *pid > 1).collect();
        if new.is_empty() {
            return;
        }
        for pid in new {
            let _ = nix::sys::signal::kill(Pid::from_raw(pid), Signal::SIGKILL);
            killed.insert(pid);
        }
    }
}

/// All processes in the cgroup and below, in any hierarchy.
pub(crate) fn processes(hierarchies: &[Hierarchy], path: &str) -> BTreeSet<i32> {
    let mut pids = BTreeSet::new();
    for cgroup in existing(hierarchies, path) {
        collect(&cgroup, &mut pids);
    }
    pids
}

fn collect(cgroup: &Path, pids: &mut BTreeSet<i32>) {
    let text = fs::read_to_string(cgroup.join("cgroup.procs")).unwrap_or_default();
    pids.extend(text.lines().filter_map(|line| line.parse::<i32>().ok()).filter(|pid| *pid > 0));
    for child in children(cgroup) {
        collect(&child, pids);
    }
}

fn children(cgroup: &Path) -> Vec<PathBuf> {
    // Itself, its entry in the parent, and a link of each child: no child saves a listing of thirty files.
    if fs::metadata(cgroup).is_ok_and(|found| found.nlink() == 2) {
        return Vec::new();
    }
    let entries = fs::read_dir(cgroup).into_iter().flatten().flatten();
    entries.filter(|e| e.file_type().is_ok_and(|kind| kind.is_dir())).map(|e| e.path()).collect()
}

/// Removes the cgroup and all below it, in every hierarchy. Absent is removed.
pub(crate) fn remove(hierarchies: &[Hierarchy], path: &str) -> Result<Removed, CgroupError> {
    let mut removed = Removed::All;
    for hierarchy in hierarchies.iter().filter(|_| is_below_root(path)) {
        if remove_tree(&hierarchy.at(path))? == Removed::Busy {
            removed = Removed::Busy;
        }
    }
    Ok(removed)
}

/// Nearly always there is nothing below it.
fn remove_tree(cgroup: &Path) -> Result<Removed, CgroupError> {
    if remove_one(cgroup)? == Removed::All {
        return Ok(Removed::All);
    }
    let below = children(cgroup);
    for child in &below {
        if remove_tree(child)? == Removed::Busy {
            return Ok(Removed::Busy);
        }
    }
    if below.is_empty() { Ok(Removed::Busy) } else { remove_one(cgroup) }
}

fn remove_one(cgroup: &Path) -> Result<Removed, CgroupError> {
    match fs::remove_dir(cgroup) {
        Ok(()) => Ok(Removed::All),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(Removed::All),
        Err(error) if error.kind() == ErrorKind::ResourceBusy => Ok(Removed::Busy),
        Err(source) => Err(CgroupError::Remove { path: cgroup.to_owned(), source }),
    }
}

/// The cgroup that a cgroup is in.
pub(crate) fn parent(path: &str) -> &str {
    path.trim_end_matches('/').rsplit_once('/').map_or("", |(parent, _)| parent)
}

/// How many processes of the cgroup the kernel killed for want of memory: v1 counts in
/// memory.oom_control, v2 in memory.events. None when it is gone.
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
    fn who_comes_between_the_making_of_a_cpuset_and_its_filling_fills_it() {
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
        // Made by another, and not filled yet: one above, the one itself, and both.
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
    fn every_whole_hierarchy_is_found_once() {
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
    fn the_root_of_a_hierarchy_is_never_ours() {
        let root = Hierarchy { mount: PathBuf::from("/sys/fs/cgroup"), controllers: String::new() };
        for path in ["", "/", "//", "..", "/a/../..", "/./"] {
            assert!(existing(std::slice::from_ref(&root), path).is_empty(), "{path:?}");
            assert!(processes(std::slice::from_ref(&root), path).is_empty(), "{path:?}");
        }
        assert!(is_below_root("/kubepods/pod1"));
    }

    #[test]
    fn a_process_is_found_below_its_containers_cgroup_and_nowhere_else() {
        let lives = |path: &str| format!("4:memory:/elsewhere\n0::{path}\n");
        assert_eq!(below(&lives("/pods/c/init.scope"), "/pods/c"), Some("init.scope"));
        assert_eq!(below(&lives("/pods/c/a/b"), "/pods/c/"), Some("a/b"));
        for elsewhere in ["/pods/c", "/pods/c2/x", "/x", "/pods"] {
            assert_eq!(below(&lives(elsewhere), "/pods/c"), None, "{elsewhere}");
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

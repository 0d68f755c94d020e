//! Cgroups on v1, hybrid and v2: find, list, kill, remove.
//!
//! The shim's creator sets the limits of containers; the agent owns the cgroups of pods. A unit of systemd is recognised by
//! the end of its path, so that the existing units are found after a change of the driver.

pub(crate) mod driver;
pub(crate) mod freezer;
mod mounts;
pub(crate) mod value;

use std::collections::{BTreeMap, HashSet};
use std::fs::File;
use std::io::{ErrorKind, Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use coracle_proto::shim;
use coracle_systemd::property::{self, v1};
use coracle_systemd::{Systemd, unit};
use tokio::time::Instant;

use self::driver::CgroupDriver;
use self::mounts::Hierarchy;
use crate::error::Error;
use crate::pidfd;

/// Maximum descendants of a cgroup in one hierarchy whose processes are counted for statistics.
const MAX_COUNTED_GROUPS: usize = 1_000;

/// Interval at which a cgroup that is being killed or removed is checked.
const KILL_STEP: Duration = Duration::from_millis(5);
/// Number of checks after which all remaining processes get the signal again.
const KILL_AGAIN: u32 = 100;
/// Size in bytes from which the list of a cgroup's processes counts as long: about 600 processes.
const MANY_PROCESSES: u64 = 4096;
/// Timeout for the end of all processes of a cgroup.
const KILL_TIMEOUT: Duration = Duration::from_secs(10);

/// Timeout for the removal of a cgroup that is still busy. A killed process does not leave its cgroup at once: the kernel
/// may first write the mounts of the process back to a disk.
const BUSY_TIMEOUT: Duration = Duration::from_secs(10);
/// Timeout for the removal of a shim's cgroup.
const SHIM_TIMEOUT: Duration = Duration::from_secs(1);
/// Time after which an empty group of a shim counts as left over. The shim of another runtime on this machine may
/// enter its new group in this time.
const STRAY_DELAY: Duration = Duration::from_millis(200);

/// The mounted hierarchies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Cgroups {
    /// All hierarchies, without duplicates.
    mounted: Vec<Hierarchy>,
    /// v1: mount point by controller. Empty on a pure v2 machine.
    v1: BTreeMap<String, PathBuf>,
    /// The v2 mount, if it has the controllers.
    v2: Option<PathBuf>,
}

// === impl Cgroups ===

impl Cgroups {
    /// Reads the mounted hierarchies.
    pub(crate) fn open() -> Result<Self, Error> {
        let path = "/proc/self/mountinfo";
        let text = coracle_tree::read_lossy(path).map_err(Error::file("read", path))?;
        Ok(Self::of(mounts::parse(&text, mounts::is_visible)))
    }

    fn of(mounted: Vec<Hierarchy>) -> Self {
        let mut v1 = BTreeMap::new();
        for Hierarchy { mount, controllers } in &mounted {
            for controller in controllers.split(',').filter(|controller| is_controller(controller)) {
                v1.insert(controller.to_owned(), mount.clone());
            }
        }
        let v2 = mounted.iter().find(|found| v1.is_empty() && found.controllers.is_empty());
        Self { v2: v2.map(|found| found.mount.clone()), v1, mounted }
    }

    /// The hierarchies in the shim's type.
    pub(crate) fn to_shim(&self) -> Vec<shim::Hierarchy> {
        let hierarchy = |found: &Hierarchy| shim::Hierarchy {
            mount: found.mount.to_string_lossy().into_owned(),
            controllers: found.controllers.clone(),
        };
        self.mounted.iter().map(hierarchy).collect()
    }

    /// Refuses a driver that is not available on this machine.
    ///
    /// # Errors
    /// If the systemd driver is configured and systemd cannot be reached.
    pub(crate) fn check_driver(driver: CgroupDriver) -> Result<(), Error> {
        match driver {
            CgroupDriver::Cgroupfs => Ok(()),
            CgroupDriver::Systemd => Ok(Systemd::connect().map(drop)?),
        }
    }

    /// A pure v2 machine with a directory as hierarchy.
    #[cfg(test)]
    pub(crate) fn unified_at(mount: &Path) -> Self {
        let whole = Hierarchy { mount: mount.to_owned(), controllers: String::new() };
        Self::of(vec![whole])
    }

    /// Whether the machine has only the unified hierarchy.
    pub(crate) fn unified(&self) -> bool {
        self.v1.is_empty()
    }

    /// Whether a controller is available.
    pub(crate) fn has(&self, controller: &str) -> bool {
        match &self.v2 {
            None => self.v1.contains_key(controller),
            Some(mount) => std::fs::read_to_string(mount.join("cgroup.controllers"))
                .is_ok_and(|list| list.split_whitespace().any(|name| name == controller)),
        }
    }

    /// The file `name` of a group, in the hierarchy of `controller`.
    pub(crate) fn file(&self, controller: &str, group: &str, name: &str) -> Option<PathBuf> {
        let mount = match &self.v2 {
            Some(mount) => mount,
            None => self.v1.get(controller)?,
        };
        Some(below(mount, group)?.join(name))
    }

    /// The directories of `group`, existing or not. Empty for a path that is not below a hierarchy's root.
    fn dirs(&self, group: &str) -> Vec<PathBuf> {
        let mut mounts: Vec<&PathBuf> = self.v1.values().chain(&self.v2).collect();
        mounts.dedup();
        mounts.into_iter().filter_map(|mount| below(mount, group)).collect()
    }

    /// The processes of a group and its descendants.
    pub(crate) fn processes(&self, group: &str) -> Vec<i32> {
        self.processes_of(group, usize::MAX)
    }

    /// Like [`processes`](Self::processes), for statistics: only processes of a limited number of descendants in each
    /// hierarchy. A container can make very many cgroups below its own.
    pub(crate) fn processes_for_statistics(&self, group: &str) -> Vec<i32> {
        self.processes_of(group, MAX_COUNTED_GROUPS)
    }

    fn processes_of(&self, group: &str, max_groups: usize) -> Vec<i32> {
        let dirs = self.dirs(group);
        let mut pids: Vec<i32> =
            dirs.iter().flat_map(|dir| coracle_tree::cgroup::processes_of(dir, max_groups)).collect();
        pids.sort_unstable();
        pids.dedup();
        pids
    }

    /// Kills all processes of a group and waits for their end. Returns true if no process is left.
    pub(crate) async fn kill(&self, group: &str) -> bool {
        let (begun, mut killed) = (Instant::now(), HashSet::new());
        for step in 1_u32.. {
            let (cgroups, path) = (self.clone(), group.to_owned());
            let pass = self.on_tree(group, move || {
                let has_processes = cgroups.kill_new(&path, &mut killed);
                (has_processes, killed)
            });
            let Ok((has_processes, signalled)) = pass.await else { return false };
            if !has_processes {
                return true;
            }
            if begun.elapsed() >= KILL_TIMEOUT {
                return false;
            }
            // The pid of a process that has ended may have been reused.
            killed = if step.is_multiple_of(KILL_AGAIN) { HashSet::new() } else { signalled };
            tokio::time::sleep(KILL_STEP).await;
        }
        false
    }

    /// Kills all processes of a group and its descendants with one write. Returns false if the kernel does not support
    /// this: on v1, before Linux 5.14, and in threaded groups. Signals take longer than the write, because the group is
    /// listed again for every 64 processes.
    fn kill_at_once(&self, group: &str) -> bool {
        let Some(dir) = self.v2.as_deref().and_then(|mount| below(mount, group)) else { return false };
        let file = File::options().write(true).open(dir.join("cgroup.kill"));
        file.and_then(|mut file| file.write_all(b"1")).is_ok()
    }

    /// Kills the processes of a group that are not in `killed`. Returns whether the group has processes. Each process gets
    /// one signal, because a pass through many processes takes long, and thousands of killed processes need many seconds
    /// to end. Afterwards `killed` contains the processes that are still in the group.
    fn kill_new(&self, group: &str, killed: &mut HashSet<i32>) -> bool {
        let pids = self.processes(group);
        if pids.is_empty() {
            return false;
        }
        let new: Vec<i32> = pids.iter().copied().filter(|pid| !killed.contains(pid)).collect();
        if !new.is_empty() && !self.kill_at_once(group) {
            self.signal(group, &new, libc::SIGKILL);
        }
        if let Err(error) = self.thaw(group) {
            tracing::warn!(group, %error, "cannot thaw a cgroup whose processes were killed");
        }
        *killed = pids.into_iter().collect();
        true
    }

    /// Thaws a group whose processes were killed.
    ///
    /// # Errors
    /// If the kernel refuses to thaw one of its groups.
    pub(crate) async fn thaw_killed(&self, group: &str) -> std::io::Result<()> {
        let (cgroups, path) = (self.clone(), group.to_owned());
        self.on_tree(group, move || cgroups.thaw(&path)).await.map_err(std::io::Error::other)?
    }

    /// Thaws a group and its descendants. On v1 a killed process does not end while its group is frozen. A checkpoint
    /// freezes the group, and root of the container can freeze groups below it.
    fn thaw(&self, group: &str) -> std::io::Result<()> {
        let freezer = self.v1.get("freezer").and_then(|mount| below(mount, group));
        freezer.map_or(Ok(()), |dir| coracle_tree::cgroup::thaw(&dir))
    }

    /// Runs work that visits a group and its descendants. If there are descendants or many processes, the work runs on a
    /// thread for blocking calls: a container can create very many groups and processes.
    async fn on_tree<T: Send + 'static>(
        &self,
        group: &str,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, tokio::task::JoinError> {
        let mut dirs = self.mounted.iter().filter_map(|found| below(&found.mount, group));
        let has_descendants = dirs.any(|dir| is_nested(&dir));
        if has_descendants || self.dirs(group).first().is_some_and(|dir| has_many_processes(dir)) {
            return coracle_threads::spawn_blocking(work).await;
        }
        Ok(work())
    }

    /// Sends a signal to listed processes of a group.
    fn signal(&self, group: &str, listed: &[i32], signal: i32) {
        let open = |pid| pidfd::open(pid).ok();
        // A process that has ended needs no signal.
        let send = |process: &OwnedFd| drop(pidfd::send(process, signal));
        coracle_tree::cgroup::signal_listed(listed, open, || self.processes(group), send);
    }

    /// Passes the limits of a unit to systemd.
    ///
    /// # Errors
    /// If systemd refuses them.
    pub(crate) fn update_unit(&self, group: &str) -> Result<(), Error> {
        let Some(unit) = unit::of_path(group) else { return Ok(()) };
        let limits = match &self.v2 {
            Some(mount) => below(mount, group).map(|dir| property::current_limits(&dir)).unwrap_or_default(),
            None => v1::limits(|controller, file| self.text(controller, group, file)),
        };
        Ok(Systemd::connect()?.set(unit, &limits)?)
    }

    /// Removes a group and its descendants. An absent group is not an error. systemd stops its units, but leaves
    /// directories of a unit in some v1 hierarchies.
    pub(crate) async fn remove(&self, group: &str) -> Result<(), Error> {
        if let Some(unit) = unit::of_path(group).filter(|_| is_below_root(group)).map(str::to_owned) {
            let stopped = coracle_threads::spawn_blocking(move || Systemd::connect()?.stop(&unit));
            stopped.await.map_err(|panic| Error::Kernel {
                doing: "stop a systemd unit",
                source: std::io::Error::other(panic),
            })??;
        }
        self.remove_directories(group, self.dirs(group), BUSY_TIMEOUT).await
    }

    /// Removes the group of a pod whose shim has ended, from all hierarchies. If a process is left in the group, such
    /// as a daemon of a hook, the group stays, and the pod is removed nevertheless.
    pub(crate) async fn remove_shim(&self, group: &str) {
        let dirs = self.mounted.iter().filter_map(|found| below(&found.mount, group)).collect();
        if let Err(error) = self.remove_directories(group, dirs, SHIM_TIMEOUT).await {
            tracing::warn!(group, error = error.chain(), "cannot remove the cgroup of a shim that has ended");
        }
    }

    /// Removes the groups directly below `parent` that are not in `known` and have no processes. A pod's group remains
    /// if it had processes when the pod was removed, or if the pod's directory was lost.
    pub(crate) async fn remove_stray_shims(&self, parent: &str, known: HashSet<String>) {
        let mounts: Vec<PathBuf> =
            self.mounted.iter().filter_map(|found| below(&found.mount, parent)).collect();
        let search = move || mounts.iter().flat_map(|dir| strays(dir, &known)).collect::<Vec<_>>();
        let found = coracle_threads::spawn_blocking(search).await.unwrap_or_default();
        if found.is_empty() {
            return;
        }
        tokio::time::sleep(STRAY_DELAY).await;
        let removal = move || {
            for dir in found.into_iter().filter(|dir| has_no_processes(dir)) {
                if let Err(error) = coracle_tree::cgroup::remove(&dir) {
                    tracing::warn!(dir = %dir.display(), %error, "cannot remove the cgroup of a lost pod's shim");
                }
            }
        };
        // A panic is logged by the executor. The groups are removed at a later start.
        let _panicked = coracle_threads::spawn_blocking(removal).await;
    }

    /// Removes directories of a group, and waits until killed processes have left them.
    async fn remove_directories(
        &self,
        group: &str,
        dirs: Vec<PathBuf>,
        limit: Duration,
    ) -> Result<(), Error> {
        let mut waited = Duration::ZERO;
        loop {
            let each = dirs.clone();
            let removed = self.on_tree(group, move || remove_each(each)).await;
            match removed.map_err(Error::panicked("remove a cgroup"))? {
                Err(Error::File { source, .. })
                    if source.kind() == ErrorKind::ResourceBusy && waited < limit =>
                {
                    tokio::time::sleep(KILL_STEP).await;
                    waited += KILL_STEP;
                }
                result => return result,
            }
        }
    }
}

fn remove_each(dirs: Vec<PathBuf>) -> Result<(), Error> {
    dirs.into_iter()
        .try_for_each(|dir| coracle_tree::cgroup::remove(&dir).map_err(Error::file("remove cgroup", dir)))
}

/// The groups directly below `parent` that are not in `known` and have no processes.
fn strays(parent: &Path, known: &HashSet<String>) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(parent).into_iter().flatten().flatten();
    let groups = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    let unknown = groups.filter(|entry| !known.contains(&*entry.file_name().to_string_lossy()));
    unknown.map(|entry| entry.path()).filter(|dir| has_no_processes(dir)).collect()
}

fn has_no_processes(group: &Path) -> bool {
    coracle_tree::cgroup::processes(group).is_empty()
}

/// Whether a group has groups below it: their number is part of its link count.
fn is_nested(dir: &Path) -> bool {
    std::fs::metadata(dir).is_ok_and(|found| found.nlink() > 2)
}

/// Whether a group has many processes, by the length of their list.
fn has_many_processes(dir: &Path) -> bool {
    let mut begin = Vec::new();
    let list = File::open(dir.join("cgroup.procs"));
    let read = list.and_then(|list| list.take(MANY_PROCESSES).read_to_end(&mut begin));
    read.is_ok() && begin.len() as u64 == MANY_PROCESSES
}

fn is_controller(option: &str) -> bool {
    matches!(
        option,
        "cpu"
            | "cpuacct"
            | "cpuset"
            | "memory"
            | "devices"
            | "freezer"
            | "blkio"
            | "pids"
            | "net_cls"
            | "net_prio"
            | "perf_event"
            | "hugetlb"
            | "rdma"
            | "misc"
    )
}

/// Whether a path names a group below a hierarchy's root. The root contains the whole machine. So a group with an empty
/// path (from a damaged record) or a path with `..` (from a client) must never be killed or removed.
pub(crate) fn is_below_root(group: &str) -> bool {
    let mut parts = group.split('/').filter(|part| !part.is_empty()).peekable();
    parts.peek().is_some() && parts.all(|part| !matches!(part, "." | ".."))
}

fn below(mount: &Path, group: &str) -> Option<PathBuf> {
    is_below_root(group).then(|| mount.join(group.trim_start_matches('/')))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(mountinfo: &str) -> Cgroups {
        Cgroups::of(mounts::parse(mountinfo, |_, _| true))
    }

    #[test]
    fn the_root_of_a_hierarchy_is_never_a_group() {
        let found = parse("2 1 0:2 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n");
        for group in ["", "/", "//", "/..", "/a/../..", "."] {
            assert_eq!(
                (found.dirs(group), found.file("cpu", group, "cgroup.procs")),
                (vec![], None),
                "{group:?}"
            );
        }
        assert!(is_below_root("/a") && is_below_root("a/b"));
    }

    #[test]
    fn a_group_with_many_processes_is_visited_outside_the_executors_threads() {
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().max_blocking_threads(1).build();
        runtime.expect("runtime").block_on(async {
            let mount = tempfile::tempdir().expect("directory");
            let cgroups = Cgroups::unified_at(mount.path());
            std::fs::create_dir(mount.path().join("c")).expect("made");
            let list = mount.path().join("c/cgroup.procs");
            std::fs::write(&list, "2000000000\n".repeat(10)).expect("written");
            let (release, released) = std::sync::mpsc::channel::<()>();
            let blocks = tokio::task::spawn_blocking(move || released.recv().is_ok());
            assert_eq!(cgroups.on_tree("c", || 7).await.expect("few processes"), 7);
            std::fs::write(&list, "2000000000\n".repeat(1_000)).expect("written");
            let mut work = std::pin::pin!(cgroups.on_tree("c", || 7));
            // Without a free thread for blocking calls the work cannot begin.
            assert!(futures::poll!(work.as_mut()).is_pending());
            drop(release);
            assert_eq!(work.await.expect("many processes"), 7);
            assert!(!blocks.await.expect("the thread"));
        });
    }

    #[test]
    fn a_process_that_is_being_killed_gets_no_further_signal() {
        let mount = tempfile::tempdir().expect("directory");
        let cgroups = Cgroups::unified_at(mount.path());
        std::fs::create_dir(mount.path().join("c")).expect("made");
        // No process has such a pid.
        let (first, second) = (2_000_000_000, 2_000_000_001);
        let mut killed = HashSet::new();
        for (listed, expected) in [
            (format!("{first}\n{second}\n"), HashSet::from([first, second])),
            (format!("{second}\n"), HashSet::from([second])),
        ] {
            std::fs::write(mount.path().join("c/cgroup.procs"), listed).expect("written");
            assert!(cgroups.kill_new("c", &mut killed));
            assert_eq!(killed, expected);
        }
        std::fs::write(mount.path().join("c/cgroup.procs"), "").expect("written");
        assert!(!cgroups.kill_new("c", &mut killed), "the group has no processes");
    }

    #[test]
    fn a_group_of_v2_is_killed_with_one_write_and_again_when_it_has_new_processes() {
        let mount = tempfile::tempdir().expect("directory");
        let cgroups = Cgroups::unified_at(mount.path());
        let (dir, mut killed) = (mount.path().join("c"), HashSet::new());
        std::fs::create_dir(&dir).expect("made");
        let mut writes = |listed: &str| {
            std::fs::write(dir.join("cgroup.procs"), listed).expect("written");
            std::fs::write(dir.join("cgroup.kill"), "").expect("written");
            assert!(cgroups.kill_new("c", &mut killed));
            std::fs::read_to_string(dir.join("cgroup.kill")).expect("read")
        };
        // No process has such a pid.
        assert_eq!(writes("2000000000\n"), "1");
        assert_eq!(writes("2000000000\n"), "", "its processes are ending");
        assert_eq!(writes("2000000000\n2000000001\n"), "1");
    }

    #[test]
    fn hybrid_counts_as_v1() {
        let found = parse(
            "1 0 0:1 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n\
             2 1 0:2 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n\
             3 1 0:3 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,name=systemd\n\
             4 1 0:4 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n",
        );
        assert!(!found.unified());
        assert!(found.has("cpuacct"));
        assert!(!found.has("memory"));
        assert_eq!(
            found.file("cpu", "/a/b", "cpu.shares"),
            Some(PathBuf::from("/sys/fs/cgroup/cpu/a/b/cpu.shares"))
        );
        assert_eq!(found.dirs("/a"), [PathBuf::from("/sys/fs/cgroup/cpu/a")]);
        let hierarchies = found.to_shim();
        let controllers: Vec<&str> = hierarchies.iter().map(|found| found.controllers.as_str()).collect();
        assert_eq!(controllers, ["cpu,cpuacct", "name=systemd", ""], "a shim gets all hierarchies");
    }

    #[test]
    fn statistics_count_the_processes_of_a_limited_number_of_groups() {
        let mount = tempfile::tempdir().expect("directory");
        for number in 0..=MAX_COUNTED_GROUPS {
            let group = mount.path().join(format!("c/{number}"));
            std::fs::create_dir_all(&group).expect("made");
            std::fs::write(group.join("cgroup.procs"), format!("{}\n", number + 1)).expect("written");
        }
        let cgroups = Cgroups::unified_at(mount.path());
        assert_eq!(cgroups.processes("c").len(), MAX_COUNTED_GROUPS + 1);
        assert_eq!(cgroups.process_count("c"), 1_000);
    }

    #[tokio::test]
    async fn empty_groups_of_shims_without_a_pod_are_removed() {
        let mount = tempfile::tempdir().expect("directory");
        let shims = mount.path().join("node/coracle/shims");
        for name in ["known", "lost/nested", "running"] {
            std::fs::create_dir_all(shims.join(name)).expect("made");
        }
        std::fs::write(shims.join("running/cgroup.procs"), "7\n").expect("written");
        let cgroups = Cgroups::unified_at(mount.path());
        cgroups.remove_stray_shims("/node/coracle/shims", HashSet::from(["known".to_owned()])).await;
        let left = ["known", "lost", "running"].map(|name| shims.join(name).exists());
        assert_eq!(left, [true, false, true]);
        cgroups.remove_stray_shims("/absent", HashSet::new()).await;
    }

    #[test]
    fn one_unified_mount_is_v2() {
        let found = parse("2 1 0:2 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate\n");
        assert!(found.unified());
        assert_eq!(
            found.file("memory", "/a", "memory.current"),
            Some(PathBuf::from("/sys/fs/cgroup/a/memory.current"))
        );
    }
}

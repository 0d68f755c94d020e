//! Cgroup hierarchies of this machine: where controllers are mounted, and how a cgroup is created there.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use coracle_tree::mountinfo::unescaped;
use coracle_values::CollectMap;
use nix::sys::statfs::{CGROUP2_SUPER_MAGIC, statfs};

/// Mount point of the unified hierarchy, if the machine uses cgroup v2 alone.
const UNIFIED: &str = "/sys/fs/cgroup";

/// Mount options of v1 that name a controller (cgroups(7)), or systemd's hierarchy, which has no controller.
const V1_CONTROLLERS: [&str; 14] = [
    "blkio",
    "cpu",
    "cpuacct",
    "cpuset",
    "devices",
    "freezer",
    "hugetlb",
    "memory",
    "name=systemd",
    "net_cls",
    "net_prio",
    "perf_event",
    "pids",
    "rdma",
];

/// Files of a v1 cpuset. In a new cpuset both files are empty. The cpuset accepts no process until both files have a
/// value.
const CPUSET_FILES: [&str; 2] = ["cpuset.cpus", "cpuset.mems"];

/// File of a v1 cgroup: with `1`, a new child cpuset has the values of its parent (cgroup_clone_children).
const CLONE_CHILDREN: &str = "cgroup.clone_children";

/// File of a v2 cgroup: the controllers that its children get.
const SUBTREE_CONTROL: &str = "cgroup.subtree_control";

/// Version of the cgroup interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Version {
    /// One hierarchy for each controller, or set of controllers.
    V1,
    /// One hierarchy for all controllers.
    V2,
}

impl Version {
    /// The version that is mounted at /sys/fs/cgroup. A hybrid layout counts as v1: v2 has no controllers there.
    pub(super) fn of_machine() -> Self {
        match statfs(UNIFIED) {
            Ok(found) if found.filesystem_type() == CGROUP2_SUPER_MAGIC => Self::V2,
            _ => Self::V1,
        }
    }

    /// Mount point of each controller. With v1, systemd's named hierarchy is listed as `systemd`.
    pub(super) fn mounts(self) -> BTreeMap<String, PathBuf> {
        match self {
            Self::V1 => mounts_of_v1(&coracle_tree::read_lossy("/proc/self/mountinfo").unwrap_or_default()),
            Self::V2 => controllers_of_v2().into_iter().map(|name| (name, UNIFIED.into())).collect_map(),
        }
    }

    /// Creates the cgroup `below` the mount point, with its parents. With v2, the parents enable all controllers for
    /// the cgroup.
    pub(super) fn create(self, controller: &str, mount: &Path, below: &str) -> io::Result<()> {
        if self == Self::V1 {
            make_dir(&mount.join(below))?;
            if controller == "cpuset"
                && let Err(error) = fill_cpusets(mount, below)
            {
                tracing::warn!(%error, cgroup = below, "cannot set CPUs and memory nodes of a cpuset");
            }
            return Ok(());
        }
        create_on_v2(&controllers_of_v2(), mount, below)
    }
}

/// Creates the cgroup with its parents. Each parent enables these controllers for its children.
fn create_on_v2(controllers: &[String], mount: &Path, below: &str) -> io::Result<()> {
    let whole = mount.join(below);
    // The kernel lets a cgroup enable only controllers that its own parent enables. So it is enough to check that
    // parent.
    if whole.parent().is_some_and(|parent| enables_all(parent, controllers)) && make_dir(&whole).is_ok() {
        return Ok(());
    }
    let mut dir = mount.to_owned();
    for name in below.split('/') {
        enable_all(&dir, controllers);
        dir.push(name);
        make_dir(&dir)?;
    }
    Ok(())
}

/// Whether a cgroup enables all these controllers for its children.
fn enables_all(dir: &Path, controllers: &[String]) -> bool {
    let Ok(enabled) = fs::read_to_string(dir.join(SUBTREE_CONTROL)) else { return false };
    controllers.iter().all(|wanted| enabled.split_whitespace().any(|name| name == wanted))
}

/// Enables controllers for the children of a cgroup. A write of all controllers at once costs the kernel as much as a
/// write of one controller. The kernel refuses a controller that the cgroup does not have. Pods have no limits of that
/// controller then.
fn enable_all(dir: &Path, controllers: &[String]) {
    let file = dir.join(SUBTREE_CONTROL);
    let each = || controllers.iter().map(|controller| format!("+{controller}"));
    if fs::write(&file, each().collect::<Vec<_>>().join(" ")).is_err() {
        each().for_each(|one| {
            let _refused = fs::write(&file, one);
        });
    }
}

/// Creates a cgroup. Usually only the last component is missing.
fn make_dir(dir: &Path) -> io::Result<()> {
    match fs::create_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => fs::create_dir_all(dir),
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
        _ => Ok(()),
    }
}

fn controllers_of_v2() -> Vec<String> {
    let text = fs::read_to_string(Path::new(UNIFIED).join("cgroup.controllers")).unwrap_or_default();
    text.split_whitespace().map(str::to_owned).collect()
}

/// The first mount point of each controller in a mountinfo (proc_pid_mountinfo(5)).
fn mounts_of_v1(mountinfo: &str) -> BTreeMap<String, PathBuf> {
    let mut mounts = BTreeMap::new();
    for line in mountinfo.lines() {
        let Some((left, right)) = line.split_once(" - cgroup ") else { continue };
        let (Some(mount), Some(options)) = (left.split(' ').nth(4), right.split(' ').nth(1)) else {
            continue;
        };
        let mount = unescaped(mount);
        for option in options.split(',').filter(|option| V1_CONTROLLERS.contains(option)) {
            let name = option.trim_start_matches("name=").to_owned();
            mounts.entry(name).or_insert_with(|| mount.clone());
        }
    }
    mounts
}

/// Makes new cpusets below a cgroup inherit CPUs and memory nodes, at any depth. If this fails, [`fill_cpusets`] and
/// the shims write the values. With each such write the kernel rebuilds its scheduling domains and visits all cpusets.
/// So the cost of a pod grows with the number of pods.
pub(super) fn inherit_cpusets(mount: &Path, below: &str) {
    if let Err(error) = fs::write(mount.join(below).join(CLONE_CHILDREN), "1") {
        tracing::debug!(%error, cgroup = below, "new cpusets do not inherit the values of their parent");
    }
}

/// Copies CPUs and memory nodes from the parent to each cpuset on the path that has no values.
fn fill_cpusets(mount: &Path, below: &str) -> io::Result<()> {
    let mut dir = mount.join(below);
    let has = |file| Ok::<_, io::Error>(!fs::read_to_string(dir.join(file))?.trim().is_empty());
    // The values are a subset of the parent's values, so all ancestors have values too. New cpusets usually inherit the
    // values.
    if has(CPUSET_FILES[0])? && has(CPUSET_FILES[1])? {
        return Ok(());
    }
    dir = mount.to_owned();
    for name in below.split('/') {
        let parent = dir.clone();
        dir.push(name);
        for file in CPUSET_FILES {
            if fs::read_to_string(dir.join(file))?.trim().is_empty() {
                fs::write(dir.join(file), fs::read(parent.join(file))?)?;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_v1_controller_is_at_its_first_mount() {
        let mounts = mounts_of_v1(
            "30 25 0:26 / /sys/fs/cgroup/systemd rw,nosuid shared:9 - cgroup cgroup rw,xattr,name=systemd\n\
             31 25 0:27 / /sys/fs/cgroup/cpu,cpuacct rw shared:10 - cgroup cgroup rw,cpu,cpuacct\n\
             32 25 0:28 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n\
             33 25 0:29 / /mnt/a\\040b rw - cgroup cgroup rw,memory\n\
             34 25 0:29 / /mnt/again rw - cgroup cgroup rw,memory\n\
             35 25 0:30 / /mnt/elogind rw - cgroup cgroup rw,xattr,release_agent=/x,name=elogind\n",
        );
        let expected = [
            ("cpu", "/sys/fs/cgroup/cpu,cpuacct"),
            ("cpuacct", "/sys/fs/cgroup/cpu,cpuacct"),
            ("memory", "/mnt/a b"),
            ("systemd", "/sys/fs/cgroup/systemd"),
        ];
        let expected = expected.map(|(name, mount)| (name.to_owned(), PathBuf::from(mount)));
        assert_eq!(mounts, BTreeMap::from(expected));
    }

    #[test]
    fn parents_that_enable_all_controllers_are_not_written_again() {
        let mount = tempfile::tempdir().unwrap();
        let given = |below: &str| {
            let text = fs::read_to_string(mount.path().join(below).join(SUBTREE_CONTROL)).ok()?;
            Some(text.trim().to_owned())
        };
        let all = ["cpu", "memory"].map(str::to_owned);
        create_on_v2(&all, mount.path(), "kubepods/pod1").unwrap();
        assert!(mount.path().join("kubepods/pod1").is_dir());
        assert_eq!(
            ["", "kubepods", "kubepods/pod1"].map(given),
            [Some("+cpu +memory".to_owned()), Some("+cpu +memory".to_owned()), None]
        );
        // The kernel lists the names without `+`.
        let parent = mount.path().join("kubepods").join(SUBTREE_CONTROL);
        fs::write(&parent, "cpuset cpu memory\n").unwrap();
        fs::remove_file(mount.path().join(SUBTREE_CONTROL)).unwrap();
        for below in ["kubepods/pod2", "kubepods/pod2"] {
            create_on_v2(&all, mount.path(), below).unwrap();
        }
        assert!(mount.path().join("kubepods/pod2").is_dir());
        assert_eq!(given(""), None, "the parents above are not touched");
        fs::write(&parent, "cpu\n").unwrap();
        create_on_v2(&all, mount.path(), "kubepods/pod3").unwrap();
        assert_eq!(
            ["", "kubepods"].map(|below| given(below).is_some_and(|text| text.contains("+memory"))),
            [true, true]
        );
    }

    #[test]
    fn an_empty_cpuset_gets_the_values_of_its_parent() {
        let mount = tempfile::tempdir().unwrap();
        let dir = mount.path().join("a/b");
        fs::create_dir_all(&dir).unwrap();
        for (path, value) in [("", "0-3\n"), ("a/", "\n"), ("a/b/", "")] {
            for file in CPUSET_FILES {
                fs::write(mount.path().join(format!("{path}{file}")), value).unwrap();
            }
        }
        fs::write(mount.path().join("a/cpuset.mems"), "1\n").unwrap();
        fill_cpusets(mount.path(), "a/b").unwrap();
        let read = |file| fs::read_to_string(dir.join(file)).unwrap();
        assert_eq!((read("cpuset.cpus"), read("cpuset.mems")), ("0-3\n".into(), "1\n".into()));
        // Parents of a cpuset with values are not read.
        for file in CPUSET_FILES {
            fs::remove_file(mount.path().join("a").join(file)).unwrap();
        }
        fill_cpusets(mount.path(), "a/b").unwrap();
    }
}

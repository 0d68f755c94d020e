//! Cgroup directories in all mounted hierarchies.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use coracle_cri::CgroupDriver;
use coracle_systemd::property::{self, v1};
use coracle_systemd::{Property, Systemd, unit};
use coracle_values::CollectMap;

use super::error::CgroupError;
use super::hierarchies::{Version, inherit_cpusets};
use super::limits::{Limits, writes};

/// Controllers that the limits of pods need.
const WANTED: [&str; 3] = ["cpu", "memory", "pids"];

/// Maximum cgroups below the cgroup of a pod, including the cgroups of its containers.
const MAX_DESCENDANTS: &str = "4096";

/// The parent cgroup of pods in each hierarchy.
#[derive(Debug)]
pub(crate) struct Tree {
    driver: CgroupDriver,
    version: Version,
    /// Path below each mount, without slashes at its ends. Empty means the mount itself.
    root: String,
    /// Mount point of each controller's hierarchy. On v2 all are equal.
    mounts: BTreeMap<String, PathBuf>,
}

// === impl Tree ===

impl Tree {
    pub(crate) fn open(root: &str, driver: CgroupDriver) -> Result<Tree, CgroupError> {
        let version = Version::of_machine();
        let mounts = version.mounts();
        let tree = Tree { driver, version, root: root.trim_matches('/').to_owned(), mounts };
        if tree.mounts.is_empty() {
            return Err(CgroupError::NoHierarchy);
        }
        for controller in WANTED.iter().filter(|name| !tree.mounts.contains_key(**name)) {
            tracing::warn!(
                controller,
                "the machine does not have a cgroup controller: its limits do not apply to pods"
            );
        }
        Ok(tree)
    }

    pub(crate) fn is_v2(&self) -> bool {
        self.version == Version::V2
    }

    pub(crate) fn limits_swap(&self) -> bool {
        let Some(memory) = self.mounts.get("memory") else { return false };
        match self.version {
            Version::V1 => memory.join("memory.memsw.limit_in_bytes").exists(),
            // The root cgroup of v2 has no limits, so a child is examined.
            Version::V2 => memory.join(self.below("kubepods")).join("memory.swap.max").exists(),
        }
    }

    /// The cgroup's path below the mount of each hierarchy, with a slash at the beginning.
    pub(crate) fn absolute(&self, path: &str) -> String {
        format!("/{}", self.below(path))
    }

    /// Whether systemd makes the cgroups, which takes longer than file writes.
    pub(crate) fn uses_systemd(&self) -> bool {
        self.driver == CgroupDriver::Systemd
    }

    /// Creates the cgroup in every hierarchy and sets its limits.
    pub(crate) fn ensure(&self, path: &str, limits: &Limits) -> Result<(), CgroupError> {
        if self.uses_systemd() {
            return self.ensure_slice(path, &limits.with_whole_percent_quota());
        }
        let below = self.below(path);
        self.create(path, &below, |_| true)?;
        self.write(&self.directories_by_controller(&below), limits)
    }

    /// Limits the number of cgroups below this one. On v2, root in a container can create cgroups. The kernel has room
    /// for 65,535 cgroups with the memory controller; without room no pod starts. A failure is logged. v1 has no such
    /// limit.
    pub(crate) fn limit_descendants(&self, path: &str) {
        let Some(mount) = self.mounts.values().next().filter(|_| self.is_v2()) else { return };
        let file = mount.join(self.below(path)).join("cgroup.max.descendants");
        if let Err(error) = super::write::write_file(&file, MAX_DESCENDANTS) {
            tracing::warn!(%error, path, "cannot limit the number of cgroups below that of a pod");
        }
    }

    /// Makes new cgroups below this one inherit its CPUs and memory nodes. On v2 cgroups always inherit them.
    pub(crate) fn inherit_cpusets(&self, path: &str) {
        if let Some(mount) = self.cpuset_mount_of_v1() {
            inherit_cpusets(&mount, &self.below(path));
        }
    }

    pub(super) fn cpuset_mount_of_v1(&self) -> Option<PathBuf> {
        self.mounts.get("cpuset").filter(|_| !self.is_v2()).cloned()
    }

    /// Writes limits. On v1 the kernel refuses a CPU quota below the quota of a child, even if the child's container
    /// has ended. Then the quotas of children without processes are removed, and the limits are written again.
    fn write(&self, dirs: &BTreeMap<String, PathBuf>, limits: &Limits) -> Result<(), CgroupError> {
        let written = super::write::limits(dirs, limits, self.is_v2());
        let was_refused = written.is_err() && !self.is_v2();
        if was_refused && dirs.get("cpu").is_some_and(|dir| release_ended(dir)) {
            return super::write::limits(dirs, limits, self.is_v2());
        }
        written
    }

    /// Writes limits through systemd, which also stores them. On v1, hierarchies that systemd does not manage are
    /// written directly.
    fn ensure_slice(&self, path: &str, limits: &Limits) -> Result<(), CgroupError> {
        let below = self.below(path);
        let mut dirs = self.directories_by_controller(&below);
        if !self.is_v2() {
            // systemd creates and removes the cgroup of this controller with the slice's scopes.
            dirs.remove("devices");
        }
        if super::write::has_limits(&dirs, limits, self.is_v2()) {
            return Ok(());
        }
        let slice = self.slice(path);
        let properties = self.properties(limits);
        let made = Systemd::connect().and_then(|mut systemd| systemd.ensure_slice(&slice, &properties));
        made.map_err(|source| CgroupError::Slice { slice, source })?;
        if !self.is_v2() {
            self.create(path, &below, is_managed_by_agent)?;
        }
        self.write(&dirs, limits)
    }

    fn properties(&self, limits: &Limits) -> Vec<Property> {
        let files = writes(limits, self.is_v2());
        if self.is_v2() {
            let limits = files.iter().flat_map(|write| property::of_file(write.file, &write.value));
            return property::accounting().into_iter().chain(limits).collect();
        }
        let read = |controller, file| {
            let write = files.iter().find(|write| (write.controller, write.file) == (controller, file));
            write.map(|write| write.value.clone())
        };
        [v1::accounting(), v1::limits(read)].concat()
    }

    /// Creates the cgroup in the hierarchies of the selected controllers.
    fn create(&self, path: &str, below: &str, select: impl Fn(&str) -> bool) -> Result<(), CgroupError> {
        let mut selected: Vec<_> = self.mounts.iter().filter(|(name, _)| select(name)).collect();
        if self.is_v2() {
            // On v2 all controllers have the same mount.
            selected.truncate(1);
        }
        let failed = |source| CgroupError::Create { path: self.absolute(path), source };
        selected.iter().try_for_each(|(name, mount)| self.version.create(name, mount, below)).map_err(failed)
    }

    /// The directory of the cgroup `below` in each controller's hierarchy, by the name of the controller.
    pub(super) fn directories_by_controller(&self, below: &str) -> BTreeMap<String, PathBuf> {
        self.mounts.iter().map(|(name, mount)| (name.clone(), mount.join(below))).collect_map()
    }

    /// Names of the child cgroups in any hierarchy, in the form that [`Tree::ensure`] takes.
    pub(crate) fn children(&self, path: &str) -> Vec<String> {
        let mut names: Vec<String> = self.directories(path).iter().flat_map(|dir| child_names(dir)).collect();
        if self.uses_systemd() {
            names = names.iter().filter_map(|name| name_of_slice(name)).collect();
        }
        names.sort();
        names.dedup();
        names
    }

    /// Whether a hierarchy has the cgroup.
    pub(crate) fn exists(&self, path: &str) -> bool {
        self.directories(path).iter().any(|dir| dir.exists())
    }

    /// Whether the first hierarchy has the cgroup. After an interrupted creation, the other hierarchies may lack the
    /// cgroup.
    pub(crate) fn is_made(&self, path: &str) -> bool {
        self.mounts.values().next().is_some_and(|mount| mount.join(self.below(path)).exists())
    }

    /// Removes the cgroup with its children from every hierarchy, and continues after an error. Returns the first
    /// error.
    pub(crate) fn remove(&self, path: &str) -> Result<(), CgroupError> {
        if self.uses_systemd() && self.exists(path) {
            let slice = self.slice(path);
            let stopped = Systemd::connect().and_then(|mut systemd| systemd.stop(&slice));
            stopped.map_err(|source| CgroupError::Slice { slice, source })?;
        }
        let results: Vec<_> = self.directories(path).iter().map(|dir| remove_dir(dir)).collect();
        results.into_iter().collect()
    }

    /// The path of a cgroup of this tree below the mounts.
    pub(super) fn below(&self, path: &str) -> String {
        match self.driver {
            CgroupDriver::Systemd => unit::slice_path(&self.slice(path)).trim_start_matches('/').to_owned(),
            CgroupDriver::Cgroupfs if self.root.is_empty() => path.to_owned(),
            CgroupDriver::Cgroupfs => format!("{}/{path}", self.root),
        }
    }

    /// The systemd slice of the cgroup. The root must be a slice or empty.
    fn slice(&self, path: &str) -> String {
        let root = self.root.trim_end_matches(".slice").split('-');
        unit::slice_of(root.chain(path.split('/')).filter(|name| !name.is_empty()))
    }

    pub(super) fn directories(&self, path: &str) -> Vec<PathBuf> {
        let below = self.below(path);
        let mut all: Vec<PathBuf> = self.mounts.values().map(|mount| mount.join(&below)).collect();
        all.sort();
        all.dedup();
        all
    }
}

/// Whether systemd does not manage a v1 controller. The mounts list systemd's own hierarchy like a controller.
fn is_managed_by_agent(controller: &str) -> bool {
    controller != "systemd" && !v1::manages(controller)
}

/// Removes the CPU quotas of child cgroups without processes. Returns whether there was such a child.
fn release_ended(dir: &Path) -> bool {
    let mut found = false;
    for name in child_names(dir) {
        let child = dir.join(name);
        let is_empty = child_names(&child).is_empty()
            && fs::read_to_string(child.join("cgroup.procs")).is_ok_and(|list| list.trim().is_empty());
        found |= is_empty && std::fs::write(child.join("cpu.cfs_quota_us"), "-1").is_ok();
    }
    found
}

fn child_names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let dirs = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    dirs.filter_map(|entry| entry.file_name().into_string().ok()).collect()
}

/// The last component of a slice's name, with escaped dashes restored.
fn name_of_slice(slice: &str) -> Option<String> {
    Some(slice.strip_suffix(".slice")?.rsplit('-').next()?.replace('_', "-"))
}

/// Removes a cgroup and all cgroups below it, which containers can have made.
pub(super) fn remove_dir(dir: &Path) -> Result<(), CgroupError> {
    coracle_tree::cgroup::remove(dir).map_err(|source| CgroupError::Remove { path: dir.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use coracle_systemd::Value;

    use super::*;

    #[test]
    fn a_pods_slice_has_the_kubelets_name_and_is_listed() {
        let Ok(tree) = Tree::open("/", CgroupDriver::Cgroupfs) else { panic!("no hierarchy is mounted") };
        let tree = Tree { driver: CgroupDriver::Systemd, ..tree };
        let below = "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1f_2.slice";
        assert_eq!(tree.below("kubepods/burstable/pod1f-2"), below);
        assert_eq!(tree.slice("kubepods"), "kubepods.slice");
        assert_eq!(name_of_slice("kubepods-burstable-pod1f_2.slice").as_deref(), Some("pod1f-2"));
        assert_eq!(name_of_slice("cri-coracle-1.scope"), None);
        let tree = Tree { root: "edge-a.slice".into(), ..tree };
        assert_eq!(tree.below("kubepods"), "edge.slice/edge-a.slice/edge-a-kubepods.slice");
    }

    #[test]
    fn a_pod_makes_a_limited_number_of_cgroups_on_v2() {
        let mount = tempfile::tempdir().expect("directory");
        let file = mount.path().join("pod1/cgroup.max.descendants");
        fs::create_dir(mount.path().join("pod1")).expect("make");
        fs::write(&file, "max\n").expect("write");
        let mut tree = Tree {
            driver: CgroupDriver::Cgroupfs,
            version: Version::V1,
            root: String::new(),
            mounts: BTreeMap::from([("memory".to_owned(), mount.path().to_owned())]),
        };
        tree.limit_descendants("pod1");
        assert_eq!(fs::read_to_string(&file).expect("read"), "max\n");
        tree.version = Version::V2;
        tree.limit_descendants("pod1");
        assert_eq!(fs::read_to_string(&file).expect("read"), MAX_DESCENDANTS);
    }

    #[test]
    fn systemd_gets_the_limits_under_the_names_of_the_cgroup_version() {
        let limits =
            Limits { shares: Some(102), quota: Some(20_500), memory: Some(1 << 20), pids: Some(100) };
        let tree = |version| Tree {
            driver: CgroupDriver::Systemd,
            version,
            root: String::new(),
            mounts: BTreeMap::new(),
        };
        let named = |version, name: &str| {
            let found = tree(version).properties(&limits.with_whole_percent_quota());
            found.into_iter().find(|(known, _)| *known == name).map(|(_, value)| value)
        };
        let v1 = || Version::V1;
        assert_eq!(named(v1(), "CPUShares"), Some(Value::Number(102)));
        assert_eq!(named(v1(), "MemoryLimit"), Some(Value::Number(1 << 20)));
        assert_eq!(named(v1(), "TasksMax"), Some(Value::Number(100)));
        assert_eq!(named(v1(), "CPUQuotaPerSecUSec"), Some(Value::Number(210_000)));
        assert_eq!(named(v1(), "BlockIOAccounting"), Some(Value::Flag(true)));
        assert_eq!((named(v1(), "MemoryMax"), named(v1(), "IOAccounting")), (None, None));
        let v2 = || Version::V2;
        assert_eq!(named(v2(), "MemoryMax"), Some(Value::Number(1 << 20)));
        assert_eq!(named(v2(), "IOAccounting"), Some(Value::Flag(true)));
        assert_eq!((named(v2(), "MemoryLimit"), named(v2(), "CPUShares")), (None, None));
    }

    #[test]
    fn hierarchies_that_systemd_does_not_manage_are_written_directly() {
        let ours = ["cpuset", "freezer", "net_cls", "hugetlb"].map(is_managed_by_agent);
        let its_own = ["cpu", "memory", "devices", "systemd"].map(is_managed_by_agent);
        assert_eq!((ours, its_own), ([true; 4], [false; 4]));
    }
}

//! A container's cgroups: creation, limits and entry. All writes are planned before the first write.
//!
//! On v1 this module writes all limits itself, because the container library would search for the hierarchies with
//! hundreds of system calls. On v2 the container library's cgroup code writes the limits. Cgroup v2 has no files for
//! devices: a BPF program decides ([`super::device_program`]).

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Write as _};
use std::path::{Path, PathBuf};

use libcgroups::common::{CgroupManager as _, ControllerOpt};
use libcgroups::v2::manager::{Manager, V2ManagerError};
use libcontainer::oci_spec::runtime::{LinuxCpu, LinuxMemory, LinuxResources, Spec};
use nix::errno::Errno;
use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit, setrlimit};

use super::access;
use super::device_program::{Instruction, program};
use crate::cgroup::{self, CgroupError, Hierarchy};
use crate::kernel;
use crate::user_namespace;

#[derive(Debug, thiserror::Error)]
pub(super) enum LimitError {
    #[error(transparent)]
    Cgroup(#[from] CgroupError),
    #[error("no cgroup hierarchy has the controller {0}, which a limit needs")]
    NoController(&'static str),
    #[error("cannot write {value:?} to {}", .path.display())]
    Write { path: PathBuf, value: String, source: io::Error },
    #[error("cannot limit the container's cgroup")]
    Unified(#[from] V2ManagerError),
    #[error("cannot limit the container's devices{}", bpf_hint(.0))]
    Devices(#[source] io::Error),
}

/// The cgroups of one container.
pub(super) struct Cgroups<'a> {
    hierarchies: Vec<&'a Hierarchy>,
    path: &'a str,
    directories: Vec<PathBuf>,
}

/// The pids limit. It is written after the fork, because the fork could exceed the limit and fail.
pub(super) struct PidsLimit {
    path: PathBuf,
    file: File,
    value: String,
}

/// One write to one file of a controller.
#[derive(Debug, PartialEq, Eq)]
struct Write {
    controller: &'static str,
    file: String,
    value: String,
    /// If true, a file that the kernel does not have is skipped.
    optional: bool,
}

/// Enforces the device rules for a container that the library makes. Needed on v2 only, because the library does not
/// set the rules on v2, and uses the existing cgroup.
pub(super) fn restrict_devices_for_library(
    hierarchies: &[Hierarchy],
    path: &str,
    spec: &Spec,
) -> Result<(), LimitError> {
    if hierarchies.iter().all(Hierarchy::is_unified) {
        Cgroups::make(hierarchies, path)?.restrict_devices(spec)?;
    }
    Ok(())
}

// === impl Cgroups ===

impl<'a> Cgroups<'a> {
    /// Makes the container's cgroup in all v1 hierarchies, or in the v2 hierarchy if there is no v1 hierarchy.
    pub(super) fn make(hierarchies: &'a [Hierarchy], path: &'a str) -> Result<Self, LimitError> {
        let v1: Vec<&Hierarchy> = hierarchies.iter().filter(|h| !h.aliases().is_empty()).collect();
        let chosen = if v1.is_empty() { hierarchies.iter().collect() } else { v1 };
        let directories =
            chosen.iter().map(|hierarchy| hierarchy.make_limited(path)).collect::<Result<_, _>>()?;
        Ok(Self { hierarchies: chosen, path, directories })
    }

    /// Writes all limits except the pids limit, which is returned.
    pub(super) fn limit(&self, spec: &Spec) -> Result<Option<PidsLimit>, LimitError> {
        self.restrict_devices(spec)?;
        let Some(resources) = resources(spec) else { return Ok(None) };
        match self.unified() {
            Some(mount) => {
                let mut early = resources.clone();
                early.set_pids(None);
                let limits = ControllerOpt {
                    resources: &early,
                    disable_oom_killer: false,
                    oom_score_adj: None,
                    freezer_state: None,
                };
                Manager::new(mount.to_owned(), self.path.into())?.apply(&limits)?;
            }
            None => {
                plan(resources).iter().try_for_each(|write| self.write(write))?;
                self.allow_devices(resources)?;
            }
        }
        self.pids_limit(resources)
    }

    /// Attaches the program with the container's device rules to its cgroup, on pure v2.
    fn restrict_devices(&self, spec: &Spec) -> Result<(), LimitError> {
        let Some(directory) = self.unified_directory() else { return Ok(()) };
        let Some(program) = program(&access::rules(resources(spec))) else { return Ok(()) };
        match attach(directory, &program) {
            // Inside a user namespace no programs can be loaded, and the parent namespace controls the devices. runc
            // ignores the error too.
            Err(_) if user_namespace::is_inside_one() => Ok(()),
            attached => attached.map_err(LimitError::Devices),
        }
    }

    /// The container's cgroup directory on pure v2. The caller forks the container's process into it.
    pub(super) fn unified_directory(&self) -> Option<&Path> {
        self.unified().and(self.directories.first()).map(PathBuf::as_path)
    }

    /// Moves this process into the cgroups. On v1 the move does not wait for an RCU grace period (see
    /// [`cgroup::enter`]).
    pub(super) fn enter(&self) -> Result<(), LimitError> {
        Ok(cgroup::enter(&self.directories)?)
    }

    fn unified(&self) -> Option<&Path> {
        self.hierarchies.first().filter(|first| first.is_unified()).map(|first| first.mount.as_path())
    }

    fn directory(&self, controller: &'static str) -> Result<&Path, LimitError> {
        let has = |hierarchy: &&Hierarchy| hierarchy.is_unified() || hierarchy.has(controller);
        let at = self.hierarchies.iter().position(has);
        let found = at.and_then(|at| self.directories.get(at));
        found.map(PathBuf::as_path).ok_or(LimitError::NoController(controller))
    }

    fn write(&self, write: &Write) -> Result<(), LimitError> {
        let path = self.directory(write.controller)?.join(&write.file);
        match put(&path, &write.value) {
            Err(error) if error.kind() == ErrorKind::NotFound && write.optional => Ok(()),
            written => {
                written.map_err(|source| LimitError::Write { path, value: write.value.clone(), source })
            }
        }
    }

    /// Each rule is a separate write to devices.allow or devices.deny.
    fn allow_devices(&self, resources: &LinuxResources) -> Result<(), LimitError> {
        let Ok(directory) = self.directory("devices") else { return Ok(()) };
        let open = |name: &str| {
            let path = directory.join(name);
            let opened = OpenOptions::new().write(true).open(&path);
            opened.map(|file| (file, path.clone())).map_err(|source| LimitError::Write {
                path,
                value: String::new(),
                source,
            })
        };
        let (allow, deny) = (open("devices.allow")?, open("devices.deny")?);
        for rule in access::rules(Some(resources)) {
            let (mut file, path) = if rule.allow { (&allow.0, &allow.1) } else { (&deny.0, &deny.1) };
            let value = rule.to_string();
            file.write_all(value.as_bytes()).map_err(|source| LimitError::Write {
                path: path.clone(),
                value,
                source,
            })?;
        }
        Ok(())
    }

    fn pids_limit(&self, resources: &LinuxResources) -> Result<Option<PidsLimit>, LimitError> {
        let Some(pids) = resources.pids() else { return Ok(None) };
        let value = if pids.limit() > 0 { pids.limit().to_string() } else { "max".to_owned() };
        let path = self.directory("pids")?.join("pids.max");
        match OpenOptions::new().write(true).open(&path) {
            Ok(file) => Ok(Some(PidsLimit { path, file, value })),
            Err(source) => Err(LimitError::Write { path, value, source }),
        }
    }
}

// === impl Write ===

impl Write {
    /// The write of a limit. `None` if the limit is not set.
    fn limit(controller: &'static str, file: &str, value: Option<String>) -> Option<Self> {
        value.map(|value| Self { controller, file: file.to_owned(), value, optional: false })
    }
}

// === impl PidsLimit ===

impl PidsLimit {
    pub(super) fn write(mut self) -> Result<(), LimitError> {
        let written = self.file.write_all(self.value.as_bytes());
        written.map_err(|source| LimitError::Write { path: self.path, value: self.value, source })
    }
}

// === impl Hierarchy ===

impl Hierarchy {
    /// Makes the cgroup. On v2 each parent first enables all its controllers for its children.
    fn make_limited(&self, path: &str) -> Result<PathBuf, CgroupError> {
        if self.is_unified() {
            let whole = self.at(path);
            if let Some(parent) = whole.parent().filter(|parent| has_all(parent, &self.mount)) {
                // A cgroup has a controller only if its parent enables it, so the parents above enable all
                // controllers.
                enable_controllers(parent);
                return self.make(path);
            }
            let parents = whole.parent().into_iter().flat_map(Path::ancestors);
            let mut parents: Vec<&Path> =
                parents.take_while(|parent| parent.starts_with(&self.mount)).collect();
            parents.reverse();
            for parent in parents {
                if let Err(source) = fs::create_dir(parent)
                    && source.kind() != ErrorKind::AlreadyExists
                {
                    return Err(CgroupError::Make { path: parent.to_owned(), source });
                }
                enable_controllers(parent);
            }
        }
        self.make(path)
    }
}

/// Enables all controllers for children, with one write if possible. Failures are ignored here: the write of a limit
/// that needs the controller reports the failure.
fn enable_controllers(cgroup: &Path) {
    let file = cgroup.join("cgroup.subtree_control");
    let (available, enabled) = (controllers(cgroup), fs::read_to_string(&file).unwrap_or_default());
    let enabled: Vec<&str> = enabled.split_whitespace().collect();
    let missing = available.split_whitespace().filter(|controller| !enabled.contains(controller));
    let missing: Vec<String> = missing.map(|controller| format!("+{controller}")).collect();
    if !missing.is_empty() && put(&file, &missing.join(" ")).is_err() {
        // The kernel refuses one of the controllers, so each controller is enabled with its own write.
        for controller in missing {
            let _ = put(&file, &controller);
        }
    }
}

/// The controllers of a v2 cgroup. Empty if the cgroup does not exist.
fn controllers(cgroup: &Path) -> String {
    fs::read_to_string(cgroup.join("cgroup.controllers")).unwrap_or_default()
}

/// Whether a cgroup exists and has all controllers of the root.
fn has_all(cgroup: &Path, root: &Path) -> bool {
    let (of_root, has) = (controllers(root), controllers(cgroup));
    !of_root.trim().is_empty()
        && of_root.split_whitespace().all(|name| has.split_whitespace().any(|h| h == name))
}

fn resources(spec: &Spec) -> Option<&LinuxResources> {
    spec.linux().as_ref()?.resources().as_ref()
}

fn attach(cgroup: &Path, program: &[Instruction]) -> io::Result<()> {
    let loaded = match kernel::load_device_program(program) {
        // Before Linux 5.11 BPF programs count against the user's RLIMIT_MEMLOCK.
        Err(error) if error.kind() == ErrorKind::PermissionDenied => {
            let (soft, hard) = getrlimit(Resource::RLIMIT_MEMLOCK)?;
            let lifted = setrlimit(Resource::RLIMIT_MEMLOCK, RLIM_INFINITY, RLIM_INFINITY);
            let loaded = lifted.map_err(|_may_not| error).and_then(|()| kernel::load_device_program(program));
            setrlimit(Resource::RLIMIT_MEMLOCK, soft, hard)?;
            loaded
        }
        loaded => loaded,
    };
    kernel::attach_device_program(&File::open(cgroup)?.into(), &loaded?)
}

/// A hint for the error message if the kernel seems not to support device programs.
fn bpf_hint(error: &io::Error) -> &'static str {
    match error.raw_os_error().map(Errno::from_raw) {
        Some(Errno::ENOSYS | Errno::EINVAL) => ", which needs a kernel with CONFIG_CGROUP_BPF",
        _ => "",
    }
}

fn put(path: &Path, value: &str) -> io::Result<()> {
    OpenOptions::new().write(true).open(path)?.write_all(value.as_bytes())
}

/// The writes to v1 files, in an order that the kernel accepts.
fn plan(resources: &LinuxResources) -> Vec<Write> {
    let mut writes = Vec::new();
    if let Some(cpu) = resources.cpu() {
        plan_cpu(cpu, &mut writes);
    }
    if let Some(memory) = resources.memory() {
        plan_memory(memory, &mut writes);
    }
    for page in resources.hugepage_limits().iter().flatten() {
        let file = |kind: &str| format!("hugetlb.{}.{kind}limit_in_bytes", page.page_size());
        for (file, optional) in [(file(""), false), (file("rsvd."), true)] {
            writes.push(Write { controller: "hugetlb", file, value: page.limit().to_string(), optional });
        }
    }
    writes
}

fn plan_cpu(cpu: &LinuxCpu, writes: &mut Vec<Write>) {
    let unsigned = |value: Option<u64>| value.filter(|value| *value != 0).map(|value| value.to_string());
    let signed = |value: Option<i64>| value.filter(|value| *value != 0).map(|value| value.to_string());
    let limits = [
        Write::limit("cpu", "cpu.shares", unsigned(cpu.shares())),
        Write::limit("cpu", "cpu.cfs_period_us", unsigned(cpu.period())),
        Write::limit("cpu", "cpu.cfs_quota_us", signed(cpu.quota())),
        Write::limit("cpu", "cpu.cfs_burst_us", unsigned(cpu.burst())),
        Write::limit("cpu", "cpu.rt_period_us", unsigned(cpu.realtime_period())),
        Write::limit("cpu", "cpu.rt_runtime_us", signed(cpu.realtime_runtime())),
        Write::limit("cpu", "cpu.idle", signed(cpu.idle())),
        Write::limit("cpuset", "cpuset.cpus", cpu.cpus().clone()),
        Write::limit("cpuset", "cpuset.mems", cpu.mems().clone()),
    ];
    writes.extend(limits.into_iter().flatten());
}

/// The order matters: the limit of memory plus swap can never be below the limit of memory. At the beginning, both are
/// unlimited.
fn plan_memory(memory: &LinuxMemory, writes: &mut Vec<Write>) {
    let value = |value: Option<i64>| value.filter(|value| *value != 0).map(|value| value.to_string());
    let swappiness = memory.swappiness().map(|value| value.to_string());
    let limits = [
        Write::limit("memory", "memory.limit_in_bytes", value(memory.limit())),
        Write::limit("memory", "memory.memsw.limit_in_bytes", value(memory.swap())),
        Write::limit("memory", "memory.soft_limit_in_bytes", value(memory.reservation())),
        Write::limit("memory", "memory.kmem.limit_in_bytes", value(memory.kernel())),
        Write::limit("memory", "memory.kmem.tcp.limit_in_bytes", value(memory.kernel_tcp())),
        Write::limit("memory", "memory.swappiness", swappiness),
    ];
    writes.extend(limits.into_iter().flatten());
}

#[cfg(test)]
mod tests {
    use coracle_testing::{eventually, skip};

    use super::*;

    fn planned(resources: serde_json::Value) -> Vec<(String, String)> {
        let resources: LinuxResources = serde_json::from_value(resources).unwrap();
        plan(&resources).into_iter().map(|write| (write.file, write.value)).collect()
    }

    fn lines(lines: &[(&str, &str)]) -> Vec<(String, String)> {
        lines.iter().map(|(file, value)| ((*file).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn limits_of_v1_are_written_in_an_order_that_the_kernel_accepts() {
        let found = planned(serde_json::json!({
            "cpu": { "shares": 512, "quota": 50000, "period": 100_000, "cpus": "0" },
            "memory": { "limit": 1024, "swap": 2048 },
            "hugepageLimits": [{ "pageSize": "2MB", "limit": 0 }],
        }));
        let expected = [
            ("cpu.shares", "512"),
            ("cpu.cfs_period_us", "100000"),
            ("cpu.cfs_quota_us", "50000"),
            ("cpuset.cpus", "0"),
            ("memory.limit_in_bytes", "1024"),
            ("memory.memsw.limit_in_bytes", "2048"),
            ("hugetlb.2MB.limit_in_bytes", "0"),
            ("hugetlb.2MB.rsvd.limit_in_bytes", "0"),
        ];
        assert_eq!(found, lines(&expected));
        assert_eq!(planned(serde_json::json!({ "cpu": { "shares": 0 } })), lines(&[]));
    }

    #[test]
    fn the_kernel_loads_the_device_program_and_enforces_it() {
        // Needs root, and a v2 hierarchy, alone or beside v1.
        let hierarchies = cgroup::hierarchies().unwrap();
        let Some(unified) = hierarchies.iter().find(|hierarchy| hierarchy.is_unified()) else {
            skip!("no hierarchy of cgroup v2 is mounted");
        };
        let path = format!("/coracle-devices-{}", std::process::id());
        let cgroup = unified.make(&path).unwrap();
        let rules = access::tests::of(serde_json::json!([
            { "allow": false, "access": "rwm" },
            { "allow": true, "type": "c", "major": 1, "minor": 11, "access": "r" },
        ]));
        let attached = attach(&cgroup, &program(&rules).unwrap());
        let procs = cgroup.join("cgroup.procs");
        // /dev/kmsg: the rules allow mknod and reading.
        let script = format!(
            "echo 0 >{} && : >/dev/null && head -c1 /dev/urandom >/dev/null && \
             mknod $0 c 1 11 && (: <$0) && ! (: >$0) 2>/dev/null",
            procs.display(),
        );
        let node = std::env::current_exe().unwrap().with_extension("kmsg");
        let ended = std::process::Command::new("sh").args(["-c", &script]).arg(&node).output().unwrap();
        let _ = fs::remove_file(node);
        eventually("the cgroup to be removed", 10, || {
            !fs::remove_dir(&cgroup).is_err_and(|error| error.kind() == ErrorKind::ResourceBusy)
        });
        attached.unwrap();
        assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
    }

    #[test]
    fn parents_of_a_cgroup_with_all_controllers_are_not_touched() {
        let mount = std::env::temp_dir().join(format!("coracle-controllers-{}", std::process::id()));
        let _ = fs::remove_dir_all(&mount);
        let file = |at: &str, name: &str| mount.join(at).join(format!("cgroup.{name}"));
        for at in ["", "pods", "pods/pod1"] {
            fs::create_dir_all(mount.join(at)).unwrap();
            fs::write(file(at, "controllers"), "cpu memory\n").unwrap();
            fs::write(file(at, "subtree_control"), "").unwrap();
        }
        let unified = Hierarchy::new(mount.to_str().unwrap(), "");
        let given =
            || ["", "pods", "pods/pod1"].map(|at| fs::read_to_string(file(at, "subtree_control")).unwrap());
        unified.make_limited("/pods/pod1/c1").unwrap();
        assert!(mount.join("pods/pod1/c1").is_dir());
        assert_eq!(given(), ["", "", "+cpu +memory"]);
        // The parent of `pod1` does not enable all controllers yet.
        fs::write(file("pods/pod1", "controllers"), "cpu\n").unwrap();
        unified.make_limited("/pods/pod1/c2").unwrap();
        assert!(mount.join("pods/pod1/c2").is_dir());
        assert_eq!(given()[..2], ["+cpu +memory", "+cpu +memory"]);
        fs::remove_dir_all(&mount).unwrap();
    }

    #[test]
    fn a_limit_without_its_controller_is_refused_by_name() {
        let hierarchies = [Hierarchy::new("/h/cpu", "cpu")];
        let cgroups = Cgroups {
            hierarchies: hierarchies.iter().collect(),
            path: "/x",
            directories: vec!["/h/cpu/x".into()],
        };
        assert_eq!(cgroups.directory("cpu").unwrap(), Path::new("/h/cpu/x"));
        assert!(matches!(cgroups.directory("memory"), Err(LimitError::NoController("memory"))));
    }
}

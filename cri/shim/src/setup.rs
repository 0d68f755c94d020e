//! Sets up the pod: the steps from an ordinary process to a pod, in the order that the kernel requires.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use coracle_proto::shim::SandboxConfig;
use coracle_systemd::{Scope, Systemd, unit};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::stat::{Mode, umask};

use crate::cgroup::{self, CgroupError, Hierarchy};
use crate::host_mounts::HostMounts;
use crate::init::{Init, Process1};
use crate::kernel::{self, Fork};
use crate::selinux;
use crate::user_namespace::{self, InnerNamespaces, Mapping, Owner, UserNamespace, UserNamespaceError};
use crate::wire::Listener;

const DEFAULT_SHM: u64 = 64 << 20;

/// The step that failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SetupError {
    #[error("cannot begin a new session")]
    Session(#[source] nix::Error),
    #[error("cannot set the process name")]
    Name(#[source] io::Error),
    #[error("cannot prepare the shim's cgroup")]
    Cgroup(#[source] CgroupError),
    #[error("cannot make the shim's systemd scope")]
    Scope(#[source] coracle_systemd::Error),
    #[error("cannot become a subreaper for orphans")]
    Subreaper(#[source] io::Error),
    #[error("cannot set up the signal descriptor")]
    Signals(#[source] nix::Error),
    #[error("cannot open the host's mount namespace")]
    HostMounts(#[source] io::Error),
    #[error("cannot make the pod's namespaces ({flags:?})")]
    Unshare { flags: CloneFlags, source: nix::Error },
    #[error("cannot make the pod's user namespace")]
    User(#[source] UserNamespaceError),
    #[error("cannot keep the pod's mounts from propagating to the host")]
    Propagation(#[source] nix::Error),
    #[error("cannot set the host name {name:?}")]
    Hostname { name: String, source: nix::Error },
    #[error("cannot set the kernel parameter {name}")]
    Sysctl { name: String, source: io::Error },
    #[error("cannot mount the pod's shared memory at {}", .path.display())]
    SharedMemory { path: PathBuf, source: io::Error },
    #[error("cannot start process 1 of the pod's pid namespace")]
    Init(#[source] io::Error),
    #[error("cannot make the directory {}", .path.display())]
    Directory { path: PathBuf, source: io::Error },
    #[error("cannot listen on {}", .path.display())]
    Listen { path: PathBuf, source: io::Error },
}

/// The resources of a pod that is set up.
#[derive(Debug)]
pub(crate) struct Pod {
    pub(crate) hierarchies: Vec<Hierarchy>,
    /// The shim's own cgroups.
    pub(crate) own_cgroups: OwnCgroups,
    pub(crate) host_mounts: HostMounts,
    pub(crate) signals: SignalFd,
    pub(crate) listener: Listener,
    /// Process 1 of the shared pid namespace, if containers share one.
    pub(crate) init: Option<Process1>,
    /// The pod's user namespace, if it is not the node's.
    pub(crate) user: Option<UserNamespace>,
}

/// The cgroups of the shim itself. They are separate, so that killing the agent's cgroup does not kill the
/// pod.
#[derive(Debug, Default)]
pub(crate) struct OwnCgroups {
    v1: Vec<PathBuf>,
    unified: Vec<PathBuf>,
    /// Whether the shim need not enter a v2 cgroup: the shim was forked in its cgroup, or the sandbox has no v2 cgroup.
    entered_unified: bool,
}

// === impl OwnCgroups ===

impl OwnCgroups {
    /// Makes the cgroups of the shim. A container gets its own cgroup only in hierarchies whose controllers limit
    /// containers. In the other hierarchies the container stays in the shim's cgroup. Root of a container can mount
    /// that cgroup in a user namespace of its own, and kill or freeze its processes. So in the other hierarchies each
    /// pod has its own cgroup below `path`. The runtime removes this cgroup with the pod.
    fn make(hierarchies: &[Hierarchy], path: &str, sandbox_id: &str) -> Result<Self, CgroupError> {
        if path.is_empty() {
            return Ok(Self { entered_unified: true, ..Self::default() });
        }
        let is_v1 = cgroup::is_v1(hierarchies);
        let (mut v1, mut unified) = (Vec::new(), Vec::new());
        for hierarchy in hierarchies {
            let has_containers = is_v1 && hierarchy.aliases().is_empty();
            let own = if has_containers { format!("{path}/{sandbox_id}") } else { path.to_owned() };
            let cgroups = if hierarchy.is_unified() { &mut unified } else { &mut v1 };
            cgroups.push(hierarchy.make(&own)?);
        }
        Ok(Self { entered_unified: unified.is_empty(), v1, unified })
    }

    /// The cgroups in addition to a systemd scope: cgroups of v1 hierarchies that systemd does not manage. In
    /// hierarchies where containers have their own cgroup, all shims of a slice share the slice's cgroup. In the other
    /// hierarchies each pod has its own cgroup below the slice's cgroup, as with [`make`](Self::make).
    fn outside_scope(hierarchies: &[Hierarchy], slice: &str, sandbox_id: &str) -> Result<Self, CgroupError> {
        let path = unit::slice_path(slice);
        let mut v1 = Vec::new();
        for hierarchy in hierarchies.iter().filter(|hierarchy| !hierarchy.is_managed_by_systemd()) {
            let has_containers = hierarchy.aliases().is_empty();
            let own = if has_containers { format!("{path}/{sandbox_id}") } else { path.clone() };
            v1.push(hierarchy.make(&own)?);
        }
        Ok(Self { v1, entered_unified: true, ..Self::default() })
    }

    /// The cgroups that the shim has not entered yet, because entering them takes time.
    pub(crate) fn not_entered(&self) -> &[PathBuf] {
        if self.entered_unified { &[] } else { &self.unified }
    }
}

/// One side of the fork into the pod's cgroup.
pub(crate) struct ForkedShim {
    pub(crate) side: Fork,
    /// The cgroup hierarchies of the machine.
    pub(crate) hierarchies: Vec<Hierarchy>,
    /// The cgroups of the shim.
    pub(crate) own_cgroups: OwnCgroups,
}

/// The first step: forks a sibling (a child of the same parent) directly into the v2 cgroup. The sibling continues. A
/// move of the process into the cgroup would wait for an RCU grace period, 10 ms and more. During a move every other
/// creation, entry and removal of a cgroup on the machine waits. With a systemd scope, systemd moves this process, and
/// nothing is forked.
pub(crate) fn fork_into_cgroup(config: &SandboxConfig) -> Result<ForkedShim, SetupError> {
    let hierarchies = cgroup::configured(&config.hierarchies).map_err(SetupError::Cgroup)?;
    if let Some(scope) = Scope::parse(&config.shim_cgroup) {
        let mut systemd = Systemd::connect().map_err(SetupError::Scope)?;
        let entered = systemd.start_scope(&scope.unit(), &scope.slice, &[std::process::id()], &[]);
        entered.map_err(SetupError::Scope)?;
        let own = OwnCgroups::outside_scope(&hierarchies, &scope.slice, &config.sandbox_id);
        let own_cgroups = own.map_err(SetupError::Cgroup)?;
        return Ok(ForkedShim { side: Fork::Child, hierarchies, own_cgroups });
    }
    let own = OwnCgroups::make(&hierarchies, &config.shim_cgroup, &config.sandbox_id);
    let mut own = own.map_err(SetupError::Cgroup)?;
    let unified = own.unified.first().and_then(|cgroup| fs::File::open(cgroup).ok());
    let forked = unified.map(|cgroup| kernel::clone_sibling_into(&cgroup.into()));
    let side = match forked {
        Some(Ok(Fork::Parent(pid))) => Fork::Parent(pid),
        Some(Ok(Fork::Child)) => {
            own.entered_unified = true;
            Fork::Child
        }
        // Linux before 5.7, or a cgroup that accepts no processes: the process is moved later.
        Some(Err(_)) | None => Fork::Child,
    };
    Ok(ForkedShim { side, hierarchies, own_cgroups: own })
}

/// Sets up the pod that `config` describes, in the calling process.
pub(crate) fn enter(
    config: &SandboxConfig,
    dir: &Path,
    hierarchies: Vec<Hierarchy>,
    own_cgroups: OwnCgroups,
) -> Result<Pod, SetupError> {
    nix::unistd::setsid().map_err(SetupError::Session)?;
    // Containers inherit this umask. It does not depend on the agent's umask.
    umask(Mode::from_bits_truncate(0o022));
    kernel::set_name(c"coracle-shim").map_err(SetupError::Name)?;
    cgroup::enter(&own_cgroups.v1).map_err(SetupError::Cgroup)?;
    // Without CAP_SYS_RESOURCE the value cannot be lowered below the inherited value. Then the shim keeps the
    // agent's value.
    let _ = fs::write("/proc/self/oom_score_adj", config.oom_score_adj.to_string());
    kernel::become_subreaper().map_err(SetupError::Subreaper)?;
    let signals = receive_signals().map_err(SetupError::Signals)?;

    let host_mounts = HostMounts::capture().map_err(SetupError::HostMounts)?;
    let init = Init::of(config).map_err(SetupError::Init)?;
    let (user, mut init_pid) = make_namespaces(config, init.as_ref())?;
    // Process 1 is started early, so that it prepares itself during the remaining setup of the pod.
    if let Some(init) = init.as_ref().filter(|_| init_pid == 0) {
        init_pid = init.start().map_err(SetupError::Init)?;
    }
    if config.own_uts && !config.hostname.is_empty() {
        nix::unistd::sethostname(&config.hostname)
            .map_err(|source| SetupError::Hostname { name: config.hostname.clone(), source })?;
    }
    set_parameters(&config.sysctls.iter().collect(), user.as_ref())?;
    mount_shared_memory(config, user.as_ref())?;

    for name in ["containers", "state", "exits"] {
        let path = dir.join(name);
        fs::create_dir_all(&path).map_err(|source| SetupError::Directory { path, source })?;
    }
    let path = PathBuf::from(&config.socket);
    let listener = Listener::bind(&path).map_err(|source| SetupError::Listen { path, source })?;
    let init = init.map(|init| init.wait_until_ready(init_pid)).transpose().map_err(SetupError::Init)?;
    Ok(Pod { hierarchies, own_cgroups, host_mounts, signals, listener, init, user })
}

/// Makes the pod's namespaces. The mount namespace always belongs to the node's user namespace: the shim makes mounts
/// there that root of the pod is not permitted to make. Returns the pod's user namespace and the pid of process 1. The
/// pid is 0 unless process 1 had to be forked inside that namespace.
fn make_namespaces(
    config: &SandboxConfig,
    init: Option<&Init>,
) -> Result<(Option<UserNamespace>, i32), SetupError> {
    let mapping = Mapping::of(config);
    let wanted = namespaces(config);
    let flags = if mapping.is_some() { CloneFlags::CLONE_NEWNS } else { wanted };
    unshare(flags).map_err(|source| SetupError::Unshare { flags, source })?;
    // Later mounts of the agent, such as volumes, propagate here if the host shares its mounts. Mounts made
    // here do not propagate to the host.
    let none = None::<&str>;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_SLAVE, none).map_err(SetupError::Propagation)?;
    let Some(mapping) = mapping else { return Ok((None, 0)) };
    let inside = InnerNamespaces { flags: wanted - CloneFlags::CLONE_NEWNS, init };
    let (user, init) = user_namespace::make(mapping, &inside).map_err(SetupError::User)?;
    Ok((Some(user), init))
}

fn namespaces(config: &SandboxConfig) -> CloneFlags {
    let wanted = [
        (config.own_network, CloneFlags::CLONE_NEWNET),
        (config.own_ipc, CloneFlags::CLONE_NEWIPC),
        (config.own_uts, CloneFlags::CLONE_NEWUTS),
    ];
    let own = wanted.into_iter().filter(|(own, _)| *own).map(|(_, flag)| flag);
    own.fold(CloneFlags::CLONE_NEWNS, |flags, flag| flags | flag)
}

/// Receives the end of children and SIGTERM by a descriptor. The thread that starts the shim blocks all signals; no other
/// signal stays blocked.
fn receive_signals() -> nix::Result<SignalFd> {
    let mut set = SigSet::empty();
    set.add(Signal::SIGCHLD);
    set.add(Signal::SIGTERM);
    set.thread_set_mask()?;
    SignalFd::with_flags(&set, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)
}

/// Writes kernel parameters of the namespaces of this process.
pub(crate) fn set_parameters(
    parameters: &BTreeMap<&String, &String>,
    user: Option<&UserNamespace>,
) -> Result<(), SetupError> {
    for (name, value) in parameters {
        let failed = |source| SetupError::Sysctl { name: (*name).clone(), source };
        let path =
            parameter_path(name).ok_or_else(|| failed(io::Error::from(io::ErrorKind::InvalidInput)))?;
        let written = match (fs::write(&path, value), user) {
            // Some parameters can be written only by root of the user namespace that owns them.
            (Err(error), Some(user)) if error.kind() == io::ErrorKind::PermissionDenied => {
                user_namespace::as_its_root(user, || fs::write(&path, value))
            }
            (written, _) => written,
        };
        written.map_err(failed)?;
    }
    Ok(())
}

/// The path of a parameter below /proc/sys. Dots separate the parts of the name. A slash stands for a dot within a
/// part, as in sysctl(8). A name whose first separator is a slash is used as it is. `None` if the path would leave
/// /proc/sys.
fn parameter_path(name: &str) -> Option<PathBuf> {
    let dot_first = name.find('.').is_some_and(|dot| name.find('/').is_none_or(|slash| dot < slash));
    let path = if dot_first {
        name.chars()
            .map(|c| {
                if c == '.' {
                    '/'
                } else if c == '/' {
                    '.'
                } else {
                    c
                }
            })
            .collect()
    } else {
        name.to_owned()
    };
    let inside = !path.starts_with('/') && path.split('/').all(|part| !matches!(part, "" | "." | ".."));
    inside.then(|| Path::new("/proc/sys").join(path))
}

fn mount_shared_memory(config: &SandboxConfig, user: Option<&UserNamespace>) -> Result<(), SetupError> {
    if !config.own_ipc || config.shm_dir.is_empty() {
        return Ok(());
    }
    let path = Path::new(&config.shm_dir);
    let failed = |source| SetupError::SharedMemory { path: path.to_owned(), source };
    fs::create_dir_all(path).map_err(failed)?;
    let size = if config.shm_size == 0 { DEFAULT_SHM } else { config.shm_size };
    let Owner { uid, gid } = user.map(|user| user.mapping.root()).unwrap_or_default();
    let label = Some(config.mount_label.as_str()).filter(|label| !label.is_empty());
    let options = selinux::with_context(&format!("mode=1777,size={size},uid={uid},gid={gid}"), label);
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    mount(Some("shm"), path, Some("tmpfs"), flags, Some(options.as_str()))
        .map_err(|errno| failed(errno.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_received_signals_stay_blocked() {
        let thread = std::thread::spawn(|| {
            SigSet::all().thread_block().unwrap();
            let _signals = receive_signals().unwrap();
            SigSet::thread_get_mask().unwrap()
        });
        let mask = thread.join().unwrap();
        let blocked: Vec<Signal> = Signal::iterator().filter(|signal| mask.contains(*signal)).collect();
        assert_eq!(blocked, [Signal::SIGTERM, Signal::SIGCHLD]);
    }

    #[test]
    fn parameter_names_with_dots_or_slashes_stay_below_proc_sys() {
        let path = |name: &str| parameter_path(name).map(|p| p.to_string_lossy().into_owned());
        assert_eq!(path("net.ipv4.ip_forward").as_deref(), Some("/proc/sys/net/ipv4/ip_forward"));
        assert_eq!(path("net/ipv4/conf/eth0.1/x").as_deref(), Some("/proc/sys/net/ipv4/conf/eth0.1/x"));
        assert_eq!(path("net.ipv4.conf.eth0/1.x").as_deref(), Some("/proc/sys/net/ipv4/conf/eth0.1/x"));
        assert_eq!(path("../../etc/passwd"), None);
        assert_eq!(path("/etc/passwd"), None);
        assert_eq!(path(""), None);
    }

    #[test]
    fn containers_share_no_cgroup_with_the_shim_of_another_pod() {
        let base = std::env::temp_dir().join(format!("coracle-own-cgroups-{}", std::process::id()));
        let hierarchy = |name: &str, controllers| {
            let mount = base.join(name);
            fs::create_dir_all(&mount).unwrap();
            Hierarchy::new(&mount.to_string_lossy(), controllers)
        };
        // The creator moves containers out of the shim's cgroups only in hierarchies with controllers.
        let hybrid =
            [hierarchy("memory", "memory"), hierarchy("systemd", "name=systemd"), hierarchy("unified", "")];
        let own = OwnCgroups::make(&hybrid, "/node/shims", "1a").unwrap();
        let at = |paths: &[&str]| paths.iter().map(|path| base.join(path)).collect::<Vec<_>>();
        assert_eq!(own.v1, at(&["memory/node/shims", "systemd/node/shims/1a"]));
        assert_eq!(own.unified, at(&["unified/node/shims/1a"]));
        assert!(own.v1.iter().chain(&own.unified).all(|cgroup| cgroup.is_dir()));
        // On v2 alone, and on v1 alone, containers have cgroups of their own.
        let own = OwnCgroups::make(&hybrid[2..], "/node/shims", "1a").unwrap();
        assert_eq!((own.v1, own.unified), (vec![], at(&["unified/node/shims"])));
        let own = OwnCgroups::make(&hybrid[..1], "/node/shims", "1a").unwrap();
        assert_eq!((own.v1, own.entered_unified), (at(&["memory/node/shims"]), true));
        // systemd makes the cgroups in the hierarchies that it manages.
        let others = [hierarchy("freezer", "freezer"), hierarchy("rdma", "rdma"), hierarchy("misc", "misc")];
        let all = [&hybrid[..], &others].concat();
        let own = OwnCgroups::outside_scope(&all, "a-coracle.slice", "1a").unwrap();
        let slice = "a.slice/a-coracle.slice";
        let expect = [format!("freezer/{slice}"), format!("rdma/{slice}/1a"), format!("misc/{slice}/1a")];
        assert_eq!(own.v1, expect.map(|path| base.join(path)));
        assert!(own.v1.iter().all(|cgroup| cgroup.is_dir()) && own.unified.is_empty());
        fs::remove_dir_all(base).unwrap();
    }
}

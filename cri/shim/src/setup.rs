//! From an ordinary process to a pod: the steps in the order that the kernel wants them.

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
use crate::user_namespace::{self, Inside, Mapping, UserNamespace, UserNamespaceError};
use crate::wire::Listener;

const DEFAULT_SHM: u64 = 64 << 20;

/// The step that failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SetupError {
    #[error("begin a session of its own")]
    Session(#[source] nix::Error),
    #[error("take a name")]
    Name(#[source] io::Error),
    #[error("prepare the shim's cgroup")]
    Cgroup(#[source] CgroupError),
    #[error("make the shim's scope")]
    Scope(#[source] coracle_systemd::Error),
    #[error("become the reaper of orphans")]
    Subreaper(#[source] io::Error),
    #[error("receive signals")]
    Signals(#[source] nix::Error),
    #[error("keep the host's mount namespace at hand")]
    HostMounts(#[source] io::Error),
    #[error("make the pod's namespaces ({flags:?})")]
    Unshare { flags: CloneFlags, source: nix::Error },
    #[error("give the pod a user namespace")]
    User(#[source] UserNamespaceError),
    #[error("keep the pod's mounts from the host")]
    Propagation(#[source] nix::Error),
    #[error("set the host name {name:?}")]
    Hostname { name: String, source: nix::Error },
    #[error("set the kernel parameter {name}")]
    Sysctl { name: String, source: io::Error },
    #[error("mount the pod's shared memory at {}", .path.display())]
    SharedMemory { path: PathBuf, source: io::Error },
    #[error("start the init of the pod's pid namespace")]
    Init(#[source] io::Error),
    #[error("make the directory {}", .path.display())]
    Directory { path: PathBuf, source: io::Error },
    #[error("listen on {}", .path.display())]
    Listen { path: PathBuf, source: io::Error },
}

/// A process that has become a pod.
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
    /// The pod's own, if it is not the node's.
    pub(crate) user: Option<UserNamespace>,
}

/// The cgroups that the shim lives in, so that whatever ends the agent's own does not end the pod.
#[derive(Debug, Default)]
pub(crate) struct OwnCgroups {
    v1: Vec<PathBuf>,
    unified: Vec<PathBuf>,
    /// Born in the unified one.
    born: bool,
}

// === impl OwnCgroups ===

impl OwnCgroups {
    fn make(hierarchies: &[Hierarchy], path: &str) -> Result<Self, CgroupError> {
        if path.is_empty() {
            return Ok(Self { born: true, ..Self::default() });
        }
        let (unified, v1): (Vec<Hierarchy>, Vec<Hierarchy>) =
            hierarchies.iter().cloned().partition(Hierarchy::is_unified);
        let (v1, unified) = (cgroup::make(&v1, path)?, cgroup::make(&unified, path)?);
        Ok(Self { born: unified.is_empty(), v1, unified })
    }

    /// Where systemd has put us into a scope: those of v1 that it does not know. There all shims are in their slice's
    /// cgroup, which nobody need remove when one of them ends.
    fn beside_scope(hierarchies: &[Hierarchy], scope: &Scope) -> Result<Self, CgroupError> {
        let others: Vec<Hierarchy> = hierarchies.iter().filter(|h| !h.is_systemds()).cloned().collect();
        Ok(Self {
            v1: cgroup::make(&others, &unit::slice_path(&scope.slice))?,
            born: true,
            ..Self::default()
        })
    }

    /// Those that could not be entered without waiting.
    pub(crate) fn left(&self) -> &[PathBuf] {
        if self.born { &[] } else { &self.unified }
    }
}

/// The first step of all: who goes on is born in the right cgroup of v2, as a child of our own parent. Moved
/// there it would wait for an RCU grace period, 10 ms and more, and whoever moves anything holds up everybody
/// who makes, enters or removes a cgroup meanwhile.
pub(crate) fn be_born(config: &SandboxConfig) -> Result<(Fork, Vec<Hierarchy>, OwnCgroups), SetupError> {
    let hierarchies = cgroup::told(&config.hierarchies).map_err(SetupError::Cgroup)?;
    if let Some(scope) = Scope::parse(&config.shim_cgroup) {
        let mut systemd = Systemd::connect().map_err(SetupError::Scope)?;
        let entered = systemd.start_scope(&scope.unit(), &scope.slice, &[std::process::id()], &[]);
        entered.map_err(SetupError::Scope)?;
        let own = OwnCgroups::beside_scope(&hierarchies, &scope).map_err(SetupError::Cgroup)?;
        return Ok((Fork::Child, hierarchies, own));
    }
    let mut own = OwnCgroups::make(&hierarchies, &config.shim_cgroup).map_err(SetupError::Cgroup)?;
    let unified = own.unified.first().and_then(|cgroup| fs::File::open(cgroup).ok());
    let born = unified.map(|cgroup| kernel::clone_sibling_into(&cgroup.into()));
    let side = match born {
        Some(Ok(Fork::Parent(pid))) => Fork::Parent(pid),
        Some(Ok(Fork::Child)) => {
            own.born = true;
            Fork::Child
        }
        // A kernel before 5.7, or a cgroup that takes no processes: later, and by moving.
        Some(Err(_)) | None => Fork::Child,
    };
    Ok((side, hierarchies, own))
}

/// Becomes the pod that `config` describes.
pub(crate) fn enter(
    config: &SandboxConfig,
    dir: &Path,
    hierarchies: Vec<Hierarchy>,
    own_cgroups: OwnCgroups,
) -> Result<Pod, SetupError> {
    nix::unistd::setsid().map_err(SetupError::Session)?;
    // What a container's processes begin with, whoever started the agent.
    umask(Mode::from_bits_truncate(0o022));
    kernel::set_name(c"coracle-shim").map_err(SetupError::Name)?;
    cgroup::enter(&own_cgroups.v1).map_err(SetupError::Cgroup)?;
    // Without CAP_SYS_RESOURCE the value cannot fall below the one we were born with. Then that one
    // stays, which is what the agent has itself.
    let _ = fs::write("/proc/self/oom_score_adj", config.oom_score_adj.to_string());
    kernel::become_subreaper().map_err(SetupError::Subreaper)?;
    let signals = receive_signals().map_err(SetupError::Signals)?;

    let host_mounts = HostMounts::look().map_err(SetupError::HostMounts)?;
    let init = Init::of(config).map_err(SetupError::Init)?;
    let (user, mut init_pid) = make_namespaces(config, init.as_ref())?;
    // Early: it becomes what it is to be while the pod is made.
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
    let init = init.map(|init| init.settled(init_pid)).transpose().map_err(SetupError::Init)?;
    Ok(Pod { hierarchies, own_cgroups, host_mounts, signals, listener, init, user })
}

/// The mount namespace is the node's user namespace's in any case: in it the shim mounts what a pod's root
/// may not. Returns the pod's user namespace, and the pid of the init if that was to be made inside it.
fn make_namespaces(
    config: &SandboxConfig,
    init: Option<&Init>,
) -> Result<(Option<UserNamespace>, i32), SetupError> {
    let mapping = Mapping::of(config);
    let wanted = namespaces(config);
    let flags = if mapping.is_some() { CloneFlags::CLONE_NEWNS } else { wanted };
    unshare(flags).map_err(|source| SetupError::Unshare { flags, source })?;
    // Volumes that the agent mounts later arrive here where the host shares its mounts; nothing that is
    // mounted here leaves.
    let none = None::<&str>;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_SLAVE, none).map_err(SetupError::Propagation)?;
    let Some(mapping) = mapping else { return Ok((None, 0)) };
    let inside = Inside { flags: wanted - CloneFlags::CLONE_NEWNS, init };
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

fn receive_signals() -> nix::Result<SignalFd> {
    let mut set = SigSet::empty();
    set.add(Signal::SIGCHLD);
    set.add(Signal::SIGTERM);
    set.thread_block()?;
    SignalFd::with_flags(&set, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)
}

/// Writes kernel parameters of the namespaces that this process is in.
pub(crate) fn set_parameters(
    parameters: &BTreeMap<&String, &String>,
    user: Option<&UserNamespace>,
) -> Result<(), SetupError> {
    for (name, value) in parameters {
        let failed = |source| SetupError::Sysctl { name: (*name).clone(), source };
        let path =
            parameter_path(name).ok_or_else(|| failed(io::Error::from(io::ErrorKind::InvalidInput)))?;
        let written = match (fs::write(&path, value), user) {
            // Some of a namespace's parameters belong to its own root alone.
            (Err(error), Some(user)) if error.kind() == io::ErrorKind::PermissionDenied => {
                user_namespace::as_its_root(user, || fs::write(&path, value))
            }
            (written, _) => written,
        };
        written.map_err(failed)?;
    }
    Ok(())
}

/// Dots separate, and a slash stands for a dot within a part, as sysctl(8) has it; names that are
/// written with slashes throughout are taken as they are.
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
    let (uid, gid) = user.map_or((0, 0), |user| user.mapping.root());
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
    fn parameters_are_named_with_dots_or_slashes_and_stay_inside() {
        let path = |name: &str| parameter_path(name).map(|p| p.to_string_lossy().into_owned());
        assert_eq!(path("net.ipv4.ip_forward").as_deref(), Some("/proc/sys/net/ipv4/ip_forward"));
        assert_eq!(path("net/ipv4/conf/eth0.1/x").as_deref(), Some("/proc/sys/net/ipv4/conf/eth0.1/x"));
        assert_eq!(path("net.ipv4.conf.eth0/1.x").as_deref(), Some("/proc/sys/net/ipv4/conf/eth0.1/x"));
        assert_eq!(path("../../etc/passwd"), None);
        assert_eq!(path("/etc/passwd"), None);
        assert_eq!(path(""), None);
    }
}

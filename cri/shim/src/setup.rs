//! From an ordinary process to a pod: the steps in the order that the kernel wants them.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use coracle_proto::shim::SandboxConfig;
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};

use crate::cgroup::{self, CgroupError, Hierarchy};
use crate::kernel::{self, Fork};
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
    #[error("become the reaper of orphans")]
    Subreaper(#[source] io::Error),
    #[error("receive signals")]
    Signals(#[source] nix::Error),
    #[error("keep the host's mount namespace at hand")]
    HostMounts(#[source] io::Error),
    #[error("make the pod's namespaces ({flags:?})")]
    Unshare { flags: CloneFlags, source: nix::Error },
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
    /// The shim's own cgroups, made but not entered.
    pub(crate) own_cgroups: Vec<PathBuf>,
    pub(crate) host_mounts: OwnedFd,
    pub(crate) signals: SignalFd,
    pub(crate) listener: Listener,
    /// Pid of the shared pid namespace's init, or 0.
    pub(crate) init: i32,
}

/// Becomes the pod that `config` describes.
pub(crate) fn enter(config: &SandboxConfig, dir: &Path) -> Result<Pod, SetupError> {
    nix::unistd::setsid().map_err(SetupError::Session)?;
    kernel::set_name(c"coracle-shim").map_err(SetupError::Name)?;
    let hierarchies = cgroup::hierarchies().map_err(SetupError::Cgroup)?;
    let own_cgroups = match config.shim_cgroup.as_str() {
        "" => Vec::new(),
        path => cgroup::make(&hierarchies, path).map_err(SetupError::Cgroup)?,
    };
    // Without CAP_SYS_RESOURCE the value cannot fall below the one we were born with. Then that one
    // stays, which is what the agent has itself.
    let _ = fs::write("/proc/self/oom_score_adj", config.oom_score_adj.to_string());
    kernel::become_subreaper().map_err(SetupError::Subreaper)?;
    let signals = receive_signals().map_err(SetupError::Signals)?;

    let host_mounts = fs::File::open("/proc/self/ns/mnt").map_err(SetupError::HostMounts)?.into();
    let flags = namespaces(config);
    unshare(flags).map_err(|source| SetupError::Unshare { flags, source })?;
    // Volumes that the agent mounts later arrive here; nothing that is mounted here leaves.
    let none = None::<&str>;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_SLAVE, none).map_err(SetupError::Propagation)?;
    if config.own_uts && !config.hostname.is_empty() {
        nix::unistd::sethostname(&config.hostname)
            .map_err(|source| SetupError::Hostname { name: config.hostname.clone(), source })?;
    }
    set_parameters(&config.sysctls.iter().collect())?;
    mount_shared_memory(config)?;

    for name in ["containers", "state", "exits"] {
        let path = dir.join(name);
        fs::create_dir_all(&path).map_err(|source| SetupError::Directory { path, source })?;
    }
    let init = if config.share_pid { start_init().map_err(SetupError::Init)? } else { 0 };
    let path = PathBuf::from(&config.socket);
    let listener = Listener::bind(&path).map_err(|source| SetupError::Listen { path, source })?;
    Ok(Pod { hierarchies, own_cgroups, host_mounts, signals, listener, init })
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

fn set_parameters(parameters: &BTreeMap<&String, &String>) -> Result<(), SetupError> {
    for (name, value) in parameters {
        let failed = |source| SetupError::Sysctl { name: (*name).clone(), source };
        let path =
            parameter_path(name).ok_or_else(|| failed(io::Error::from(io::ErrorKind::InvalidInput)))?;
        fs::write(path, value).map_err(failed)?;
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

fn mount_shared_memory(config: &SandboxConfig) -> Result<(), SetupError> {
    if !config.own_ipc || config.shm_dir.is_empty() {
        return Ok(());
    }
    let path = Path::new(&config.shm_dir);
    let failed = |source| SetupError::SharedMemory { path: path.to_owned(), source };
    fs::create_dir_all(path).map_err(failed)?;
    let size = if config.shm_size == 0 { DEFAULT_SHM } else { config.shm_size };
    let options = format!("mode=1777,size={size}");
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    mount(Some("shm"), path, Some("tmpfs"), flags, Some(options.as_str()))
        .map_err(|errno| failed(errno.into()))
}

/// An init that does nothing: the kernel reaps for a process that ignores SIGCHLD.
fn start_init() -> io::Result<i32> {
    match kernel::clone(libc::CLONE_NEWPID, libc::SIGCHLD)? {
        Fork::Parent(pid) => Ok(pid),
        Fork::Child => run_init(),
    }
}

fn run_init() -> ! {
    kernel::reset_signals();
    let quiet = fs::OpenOptions::new().read(true).write(true).open("/dev/null");
    let quiet = quiet.and_then(|null| (0..=2).try_for_each(|fd| kernel::place(null.as_raw_fd(), fd)));
    if quiet.is_err() || kernel::die_with_parent().is_err() || kernel::set_name(c"coracle-init").is_err() {
        kernel::leave(1);
    }
    kernel::close_all_but(&[]);
    kernel::ignore_children();
    loop {
        nix::unistd::pause();
    }
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

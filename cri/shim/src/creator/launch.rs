//! From the creator to a container's first process: cgroups, namespaces, and the fork between them.

use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use libcontainer::oci_spec::runtime::{LinuxNamespaceType, Spec};
use nix::sched::{CloneFlags, setns};

use super::Plan;
use super::first::{self, First, Root};
use super::limits::{Cgroups, LimitError};
use super::unit::Unit;
use crate::console;
use crate::exec::limit;
use crate::kernel::{self, Fork};
use crate::report::{Speaker, Word};

#[derive(Debug, thiserror::Error)]
pub(super) enum LaunchError {
    #[error(transparent)]
    Limit(#[from] LimitError),
    #[error("tell of the container's limits")]
    Unit(#[from] coracle_systemd::Error),
    #[error("set the out-of-memory score {score}")]
    OomScore { score: i32, source: io::Error },
    #[error("connect to the one who wants the terminal")]
    Console(#[source] io::Error),
    #[error("set the resource limits")]
    ResourceLimits(#[source] nix::Error),
    #[error("join the namespace {}", .path.display())]
    Join { path: PathBuf, source: io::Error },
    #[error("become root of the pod's user namespace")]
    User(#[source] io::Error),
    #[error("hide from the container")]
    Hide(#[source] io::Error),
    #[error("start the container's first process")]
    Fork(#[source] io::Error),
}

/// Makes the container's first process, a child of the shim's, and says its pid. It says itself when it is
/// ready, or why it will not be.
pub(super) fn launch(
    plan: &Plan<'_>,
    spec: &Spec,
    (root, cgroup): (Root<'_>, &str),
    unit: Option<&mut Unit<'_>>,
    speaker: Speaker,
) -> Result<(), LaunchError> {
    let cgroups = Cgroups::make(plan.hierarchies, cgroup)?;
    let late = cgroups.limit(spec)?;
    coracle_fault::point("shim.creator-limited");
    let process = spec.process().as_ref();
    if let Some(score) = process.and_then(|process| process.oom_score_adj()) {
        fs::write("/proc/self/oom_score_adj", score.to_string())
            .map_err(|source| LaunchError::OomScore { score, source })?;
    }
    let console = plan.console.map(connect).transpose().map_err(LaunchError::Console)?;
    // Before a pid namespace is joined: who is born in one has another number for the pid that is to be said.
    enter(&cgroups, plan.shim, speaker)?;
    let own = join_namespaces(spec)?;
    let limits = process.and_then(|process| process.rlimits().as_deref()).unwrap_or_default();
    limit::apply(limits).map_err(LaunchError::ResourceLimits)?;
    // From here the pod's processes may see us.
    kernel::hide_from_proc().map_err(LaunchError::Hide)?;
    if let Some(user) = plan.user {
        setns(&user.fd, CloneFlags::CLONE_NEWUSER).map_err(|errno| LaunchError::User(errno.into()))?;
        kernel::set_ids(0, 0).map_err(LaunchError::User)?;
    }
    let first = First { plan, spec, root, console: console.as_ref(), speaker };
    match kernel::clone(own.bits() | libc::CLONE_PARENT, 0).map_err(LaunchError::Fork)? {
        Fork::Child => first::run(&first),
        Fork::Parent(pid) => {
            let limited = late.map_or(Ok(()), super::limits::Late::write).map_err(LaunchError::from);
            let limited = limited.and_then(|()| Ok(unit.map_or(Ok(()), Unit::tell)?));
            if limited.is_err() {
                // It has not been told to anybody, and waits in the cgroup that is removed.
                // Our sibling, which the shim waits for only after this process has ended or said its pid.
                let _ = kernel::pidfd_open(pid).and_then(|first| kernel::send_signal(&first, libc::SIGKILL));
            }
            limited?;
            speaker.say(&Word::Pid(pid));
            Ok(())
        }
    }
}

/// On v1 this process enters. On v2 another one goes on, born there: to be moved would mean to wait.
fn enter(cgroups: &Cgroups<'_>, shim: i32, speaker: Speaker) -> Result<(), LaunchError> {
    let born = cgroups
        .unified_directory()
        .and_then(|directory| File::open(directory).ok())
        .map(|directory| kernel::clone_sibling_into(&directory.into()));
    match born {
        Some(Ok(Fork::Parent(pid))) => {
            speaker.say(&Word::Successor(pid));
            kernel::leave(0)
        }
        Some(Ok(Fork::Child)) => {
            kernel::die_with(shim);
            Ok(())
        }
        // A kernel before 5.7.
        Some(Err(_)) | None => Ok(cgroups.enter()?),
    }
}

/// Joins those that the spec names, and says which the container gets of its own. A joined pid namespace is
/// that of children alone.
fn join_namespaces(spec: &Spec) -> Result<CloneFlags, LaunchError> {
    let namespaces = spec.linux().as_ref().and_then(|linux| linux.namespaces().as_deref());
    let mut own = CloneFlags::CLONE_NEWNS;
    for namespace in namespaces.unwrap_or_default() {
        let flag = match namespace.typ() {
            LinuxNamespaceType::Network => CloneFlags::CLONE_NEWNET,
            LinuxNamespaceType::Uts => CloneFlags::CLONE_NEWUTS,
            LinuxNamespaceType::Ipc => CloneFlags::CLONE_NEWIPC,
            LinuxNamespaceType::Pid => CloneFlags::CLONE_NEWPID,
            LinuxNamespaceType::Cgroup => CloneFlags::CLONE_NEWCGROUP,
            // The pod's, which is joined last; and those that `ordinary` does not let come here.
            LinuxNamespaceType::User | LinuxNamespaceType::Mount | LinuxNamespaceType::Time => continue,
        };
        match namespace.path() {
            None => own |= flag,
            Some(path) => {
                join(path, flag).map_err(|source| LaunchError::Join { path: path.clone(), source })?
            }
        }
    }
    Ok(own)
}

fn join(path: &Path, flag: CloneFlags) -> io::Result<()> {
    Ok(setns(File::open(path)?, flag)?)
}

fn connect(path: &Path) -> io::Result<OwnedFd> {
    let directory = File::open(path.parent().unwrap_or(Path::new("/")))?;
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    Ok(UnixStream::connect(console::short(&directory, &name))?.into())
}

//! The creator's part of a direct creation: cgroups, namespaces and the fork of the first process.

use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use libcontainer::oci_spec::runtime::{LinuxNamespaceType, Spec};
use nix::sched::{CloneFlags, setns};

use super::CreateRequest;
use super::first_process::{self, FirstProcess, Root};
use super::limits::{Cgroups, LimitError};
use super::systemd_scope::Unit;
use crate::console;
use crate::kernel::{self, Fork};
use crate::report::{Message, Reporter};
use crate::rlimits;

#[derive(Debug, thiserror::Error)]
pub(super) enum LaunchError {
    #[error(transparent)]
    Limit(#[from] LimitError),
    #[error("cannot pass the container's limits to systemd")]
    Unit(#[from] coracle_systemd::Error),
    #[error("cannot set the out-of-memory score {score}")]
    OomScore { score: i32, source: io::Error },
    #[error("cannot connect to the console socket")]
    Console(#[source] io::Error),
    #[error("cannot set the resource limits")]
    ResourceLimits(#[source] nix::Error),
    #[error("cannot join the namespace {}", .path.display())]
    Join { path: PathBuf, source: io::Error },
    #[error("cannot become root of the pod's user namespace")]
    User(#[source] io::Error),
    #[error("cannot hide the /proc entry of the creator from the container")]
    Hide(#[source] io::Error),
    #[error("cannot start the container's first process")]
    Fork(#[source] io::Error),
}

/// Arguments of a direct creation.
pub(super) struct Launch<'a> {
    pub(super) request: &'a CreateRequest<'a>,
    pub(super) spec: &'a Spec,
    pub(super) root: Root<'a>,
    /// The container's cgroup path.
    pub(super) cgroup: &'a str,
}

/// Makes the container's first process, a child of the shim, and reports its pid. The first process itself reports that
/// it is ready, or the reason of its failure.
pub(super) fn launch(
    launch: &Launch<'_>,
    unit: Option<&mut Unit<'_>>,
    reporter: Reporter,
) -> Result<(), LaunchError> {
    let Launch { request, spec, root, cgroup } = *launch;
    let cgroups = Cgroups::make(request.hierarchies, cgroup)?;
    let pids_limit = cgroups.limit(spec)?;
    coracle_fault::point("shim.creator-limited");
    let process = spec.process().as_ref();
    if let Some(score) = process.and_then(|process| process.oom_score_adj()) {
        fs::write("/proc/self/oom_score_adj", score.to_string())
            .map_err(|source| LaunchError::OomScore { score, source })?;
    }
    let console = request.console.map(connect_console).transpose().map_err(LaunchError::Console)?;
    // The cgroups are entered before a pid namespace is joined. A successor that is forked in the pid namespace would
    // report its pid in that namespace, not its pid on the host.
    enter(&cgroups, request.shim, reporter)?;
    let own = join_namespaces(spec)?;
    let limits = process.and_then(|process| process.rlimits().as_deref()).unwrap_or_default();
    rlimits::apply(limits).map_err(LaunchError::ResourceLimits)?;
    // From here on the pod's processes may see this process.
    kernel::hide_from_proc().map_err(LaunchError::Hide)?;
    if let Some(user) = request.user {
        setns(&user.fd, CloneFlags::CLONE_NEWUSER).map_err(|errno| LaunchError::User(errno.into()))?;
        kernel::set_ids(0, 0).map_err(LaunchError::User)?;
    }
    let first = FirstProcess { request, spec, root, console: console.as_ref(), reporter };
    match kernel::clone(own.bits() | libc::CLONE_PARENT, 0).map_err(LaunchError::Fork)? {
        Fork::Child => first_process::run(&first),
        Fork::Parent(pid) => {
            let limited =
                pids_limit.map_or(Ok(()), super::limits::PidsLimit::write).map_err(LaunchError::from);
            let limited = limited.and_then(|()| Ok(unit.map_or(Ok(()), Unit::set_limits)?));
            if limited.is_err() {
                // The shim has no pid of the first process yet, so the creator kills it. The process waits
                // in a cgroup that is about to be removed. It is the creator's sibling: the shim reaps it
                // only after the creator has ended or reported its pid. So the pid cannot have been reused.
                let _ = kernel::pidfd_open(pid).and_then(|first| kernel::send_signal(&first, libc::SIGKILL));
            }
            limited?;
            reporter.send(&Message::Pid(pid));
            Ok(())
        }
    }
}

/// Enters the cgroups. On v1 the creator moves itself. On v2 it forks a successor into the cgroup, because a move would
/// wait for an RCU grace period.
fn enter(cgroups: &Cgroups<'_>, shim: i32, reporter: Reporter) -> Result<(), LaunchError> {
    let forked = cgroups
        .unified_directory()
        .and_then(|directory| File::open(directory).ok())
        .map(|directory| kernel::clone_sibling_into(&directory.into()));
    match forked {
        Some(Ok(Fork::Parent(pid))) => {
            reporter.send(&Message::Successor(pid));
            kernel::leave(0)
        }
        Some(Ok(Fork::Child)) => {
            kernel::exit_with_parent(shim);
            Ok(())
        }
        // Linux before 5.7 has no CLONE_INTO_CGROUP.
        Some(Err(_)) | None => Ok(cgroups.enter()?),
    }
}

/// Joins the namespaces that the spec names by path. Returns the flags of the namespaces that the container gets for
/// itself. A joined pid namespace applies to children only.
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
            // The pod's user namespace is joined last. `direct_support` accepts no other mount or time
            // namespace.
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

fn connect_console(path: &Path) -> io::Result<OwnedFd> {
    let directory = File::open(path.parent().unwrap_or(Path::new("/")))?;
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    Ok(UnixStream::connect(console::short_socket_path(&directory, &name))?.into())
}

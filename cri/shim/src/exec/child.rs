//! The two forks of an exec, step by step in the order that the kernel requires.

use std::fs;
use std::io::{self, Read as _, Seek as _};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use coracle_proto::shim::error::Kind;
use libcontainer::oci_spec::runtime::Process;
use nix::sched::{CloneFlags, setns};

use super::{ExecRequest, ProcessSource};
use crate::call_error;
use crate::cgroup::{self, CgroupError};
use crate::creator::spec::{Host, adjust_process, host_uid, load};
use crate::identity::{self, IdentityError};
use crate::kernel::{self, Fork};
use crate::null;
use crate::process::ProcDirectory;
use crate::program;
use crate::report::Message;
use crate::rlimits;
use crate::seccomp::{self, Filter};
use crate::terminal;

/// The step that failed.
#[derive(Debug, thiserror::Error)]
enum ExecError {
    #[error("cannot receive the process of the exec")]
    Received(#[source] io::Error),
    #[error("cannot decode the process of the exec")]
    Process(#[source] serde_json::Error),
    #[error("cannot read the container's spec")]
    Spec(#[source] libcontainer::oci_spec::OciSpecError),
    #[error("cannot read the container's seccomp profile")]
    Filter(#[source] io::Error),
    #[error("cannot open the host's /dev/null")]
    Null(#[source] io::Error),
    #[error("cannot hide the exec's /proc entry from the container")]
    Hide(#[source] io::Error),
    #[error("cannot join the container's cgroup")]
    Cgroup(#[source] CgroupError),
    #[error("cannot set the out-of-memory score {score}")]
    OomScore { score: i32, source: io::Error },
    #[error("cannot set the resource limits")]
    Limits(#[source] nix::Error),
    #[error("cannot close the shim's descriptors")]
    Close(#[source] io::Error),
    #[error("cannot open the container's first process")]
    Target(#[source] io::Error),
    #[error("cannot read the container's user namespace")]
    UserNamespace(#[source] io::Error),
    #[error("cannot join the container's namespaces")]
    Namespaces(#[source] nix::Error),
    #[error("cannot fork in the container")]
    Fork(#[source] io::Error),
    #[error("cannot begin a session")]
    Session(#[source] nix::Error),
    #[error("cannot become a subreaper for orphans")]
    Adopt(#[source] io::Error),
    #[error("cannot connect the standard streams")]
    Stdio(#[source] io::Error),
    #[error("cannot set up the terminal of the exec")]
    Terminal(#[source] io::Error),
    #[error("cannot set the user {uid}:{gid}")]
    User { uid: u32, gid: u32, source: io::Error },
    #[error(transparent)]
    Identity(#[from] IdentityError),
}

/// Data and descriptors that the first fork prepares for the second fork.
struct Prepared<'a> {
    process: &'a Process,
    filter: Option<&'a Filter>,
    null: &'a OwnedFd,
}

/// Runs the first fork to its end.
pub(crate) fn run(request: &ExecRequest<'_>) -> ! {
    kernel::exit_with_parent(request.shim);
    kernel::reset_signals();
    // The command gets a keyring of its own, so it has no keys of the shim or of the shim's runtime. If the kernel
    // refuses, the command shares the shim's keyring, as a container's first process does.
    let _ = kernel::new_session_keyring();
    let stdio = request.stdio.into_iter().flatten().chain(request.terminal).chain([request.target]);
    let mut keep: Vec<RawFd> = stdio.map(AsRawFd::as_raw_fd).collect();
    keep.push(request.reporter.fd());
    keep.extend(request.process.file().map(AsRawFd::as_raw_fd));
    match kernel::close_all_but(&keep).map_err(ExecError::Close).and_then(|()| first(request)) {
        Ok(pid) => request.reporter.send(&Message::Pid(pid)),
        Err(error) => request.reporter.send(&Message::Failed(Kind::Internal, call_error::chain(&error))),
    }
    kernel::leave(0)
}

/// Reads and opens all files of the host before the namespaces change. After that no path is opened with more rights
/// than the container has. The only exception is the container's devpts, see [`terminal`].
fn first(request: &ExecRequest<'_>) -> Result<i32, ExecError> {
    let mut process = process(request.process)?;
    let spec = load(&request.dir.join("config.json")).map_err(ExecError::Spec)?;
    let filter =
        Filter::of(&spec, || fs::read(request.dir.join(seccomp::FILE))).map_err(ExecError::Filter)?;
    adjust_process(&mut process, &Host::detect());
    let null = null::open().map_err(ExecError::Null)?;
    let target = ProcDirectory::open(request.target, request.target_pid).map_err(ExecError::Target)?;
    cgroup::enter_child_of_first(&request.cgroups, request.cgroup, &target).map_err(ExecError::Cgroup)?;
    if let Some(score) = process.oom_score_adj() {
        fs::write("/proc/self/oom_score_adj", score.to_string())
            .map_err(|source| ExecError::OomScore { score, source })?;
    }
    rlimits::apply(process.rlimits().as_deref().unwrap_or_default()).map_err(ExecError::Limits)?;
    chown_pipes(request, host_uid(&spec, process.user().uid()));
    // From here on the container's processes can see this process.
    kernel::hide_from_proc().map_err(ExecError::Hide)?;
    let joined = namespaces(&target).map_err(ExecError::UserNamespace)?;
    // The container must not get a descriptor of a directory of the host.
    drop(target);
    setns(request.target, joined).map_err(ExecError::Namespaces)?;
    if joined.contains(CloneFlags::CLONE_NEWUSER) {
        // The previous ids are not mapped in the user namespace.
        kernel::set_ids(0, 0).map_err(|source| ExecError::User { uid: 0, gid: 0, source })?;
    }
    match kernel::clone(libc::CLONE_PARENT, 0).map_err(ExecError::Fork)? {
        Fork::Parent(pid) => Ok(pid),
        Fork::Child => second(request, &Prepared { process: &process, filter: filter.as_ref(), null: &null }),
    }
}

fn process(source: ProcessSource<'_>) -> Result<Process, ExecError> {
    let mut read = Vec::new();
    let bytes = match source {
        ProcessSource::Inline(bytes) => bytes,
        ProcessSource::File(file) => {
            let file = file.try_clone().map(fs::File::from);
            let content = file.and_then(|mut file| {
                file.rewind()?;
                file.read_to_end(&mut read)
            });
            content.map_err(ExecError::Received)?;
            &read
        }
    };
    serde_json::from_slice(bytes).map_err(ExecError::Process)
}

/// The namespaces to join. setns(2) refuses to join the current user namespace again. If the user namespace of the
/// container cannot be read, the exec fails: outside of it, the process would have the rights of the node.
fn namespaces(target: &ProcDirectory) -> io::Result<CloneFlags> {
    let all = CloneFlags::CLONE_NEWNS
        | CloneFlags::CLONE_NEWPID
        | CloneFlags::CLONE_NEWNET
        | CloneFlags::CLONE_NEWIPC
        | CloneFlags::CLONE_NEWUTS
        | CloneFlags::CLONE_NEWCGROUP;
    let own = match fs::read_link("/proc/self/ns/user") {
        // The kernel has no user namespaces.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(all),
        own => own?.into_os_string(),
    };
    Ok(if own == target.user_namespace()? { all } else { all | CloneFlags::CLONE_NEWUSER })
}

/// Runs the second fork to its end.
fn second(request: &ExecRequest<'_>, prepared: &Prepared<'_>) -> ! {
    let Prepared { process, filter, null } = *prepared;
    let connected = begin(request).and_then(|()| connect(request, process.user().uid(), null));
    let env = match connected.and_then(|()| Ok(identity::assume(process, filter)?)) {
        Ok(env) => env,
        Err(error) => {
            request.reporter.send(&Message::Failed(Kind::Internal, call_error::chain(&error)));
            kernel::leave(255)
        }
    };
    // The parent-death signal is set again after the change of ids, as in the container's first process: the
    // pod's processes must end with the shim.
    let _ = kernel::set_parent_death_signal();
    let (kind, message) = program::become_program(process.args().as_deref().unwrap_or_default(), &env);
    request.reporter.send(&Message::Failed(kind, message));
    kernel::leave(if kind == Kind::CommandNotFound { 127 } else { 126 })
}

fn begin(request: &ExecRequest<'_>) -> Result<(), ExecError> {
    nix::unistd::setsid().map_err(ExecError::Session)?;
    if request.adopts_orphans {
        kernel::become_subreaper().map_err(ExecError::Adopt)?;
    }
    Ok(())
}

fn connect(request: &ExecRequest<'_>, uid: u32, null: &OwnedFd) -> Result<(), ExecError> {
    if let Some(socket) = request.terminal {
        let root = fs::File::open("/").map_err(ExecError::Terminal)?;
        return terminal::set_up(&root, socket, uid).map(drop).map_err(ExecError::Terminal);
    }
    for (given, standard) in request.stdio.into_iter().zip(0..) {
        kernel::dup_to(given.unwrap_or(null).as_raw_fd(), standard).map_err(ExecError::Stdio)?;
    }
    Ok(())
}

/// Makes the user the owner of the pipes. Otherwise that user cannot open /dev/stdout. Other files stay unchanged,
/// because they may belong to another user.
fn chown_pipes(request: &ExecRequest<'_>, uid: u32) {
    for given in request.stdio.into_iter().flatten() {
        let is_pipe =
            nix::sys::stat::fstat(given).is_ok_and(|stat| stat.st_mode & libc::S_IFMT == libc::S_IFIFO);
        if is_pipe {
            let _ = nix::unistd::fchown(given, Some(uid.into()), None);
        }
    }
}

//! The two forks of an exec, each a straight line of steps in the order that the kernel wants.

use std::fs;
use std::io::{self, Read as _, Seek as _};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use coracle_proto::shim::error::Kind;
use libcontainer::oci_spec::runtime::Process;
use nix::sched::{CloneFlags, setns};

use super::{Plan, Told, limit};
use crate::cgroup::{self, CgroupError};
use crate::creator::spec::{Host, adjust_process, host_uid, load};
use crate::fault;
use crate::identity::{self, IdentityError};
use crate::kernel::{self, Fork};
use crate::null;
use crate::program;
use crate::report::Word;
use crate::seccomp::{self, Filter};
use crate::terminal;

/// The step that failed.
#[derive(Debug, thiserror::Error)]
enum ExecError {
    #[error("receive the process")]
    Received(#[source] io::Error),
    #[error("read the process")]
    Process(#[source] serde_json::Error),
    #[error("read the container's spec")]
    Spec(#[source] libcontainer::oci_spec::OciSpecError),
    #[error("read the container's seccomp profile")]
    Filter(#[source] io::Error),
    #[error("open the host's /dev/null")]
    Null(#[source] io::Error),
    #[error("hide from the container")]
    Hide(#[source] io::Error),
    #[error("join the container")]
    Cgroup(#[source] CgroupError),
    #[error("set the out-of-memory score {score}")]
    OomScore { score: i32, source: io::Error },
    #[error("set the resource limits")]
    Limits(#[source] nix::Error),
    #[error("close the shim's descriptors")]
    Close(#[source] io::Error),
    #[error("join the container's namespaces")]
    Namespaces(#[source] nix::Error),
    #[error("fork in the container")]
    Fork(#[source] io::Error),
    #[error("begin a session")]
    Session(#[source] nix::Error),
    #[error("adopt orphans")]
    Adopt(#[source] io::Error),
    #[error("connect the standard streams")]
    Stdio(#[source] io::Error),
    #[error("take the terminal")]
    Terminal(#[source] io::Error),
    #[error("set the user {uid}:{gid}")]
    User { uid: u32, gid: u32, source: io::Error },
    #[error(transparent)]
    Identity(#[from] IdentityError),
}

/// The first fork's whole life.
pub(crate) fn run(plan: &Plan<'_>) -> ! {
    kernel::die_with(plan.shim);
    kernel::reset_signals();
    let stdio = plan.stdio.into_iter().flatten().chain(plan.terminal).chain([plan.target]);
    let mut keep: Vec<RawFd> = stdio.map(AsRawFd::as_raw_fd).collect();
    keep.push(plan.speaker.fd());
    keep.extend(plan.process.file().map(AsRawFd::as_raw_fd));
    match kernel::close_all_but(&keep).map_err(ExecError::Close).and_then(|()| first(plan)) {
        Ok(pid) => plan.speaker.say(&Word::Pid(pid)),
        Err(error) => plan.speaker.say(&Word::Failed(Kind::Internal, fault::chain(&error))),
    }
    kernel::leave(0)
}

/// Reads and opens all that is the host's, before the namespaces change. From then on no path is opened with more
/// rights than the container has, but its devpts, see [`terminal`].
fn first(plan: &Plan<'_>) -> Result<i32, ExecError> {
    let mut process = process(plan.process)?;
    let spec = load(&plan.dir.join("config.json")).map_err(ExecError::Spec)?;
    let filter = Filter::of(&spec, || fs::read(plan.dir.join(seccomp::FILE))).map_err(ExecError::Filter)?;
    adjust_process(&mut process, &Host::look());
    let null = null::open().map_err(ExecError::Null)?;
    cgroup::enter_beside(&plan.cgroups, plan.cgroup, plan.target_pid).map_err(ExecError::Cgroup)?;
    if let Some(score) = process.oom_score_adj() {
        fs::write("/proc/self/oom_score_adj", score.to_string())
            .map_err(|source| ExecError::OomScore { score, source })?;
    }
    limit::apply(process.rlimits().as_deref().unwrap_or_default()).map_err(ExecError::Limits)?;
    give_to_user(plan, host_uid(&spec, process.user().uid()));
    // From here the container's processes can see us.
    kernel::hide_from_proc().map_err(ExecError::Hide)?;
    let joined = namespaces(plan.target_pid);
    setns(plan.target, joined).map_err(ExecError::Namespaces)?;
    if joined.contains(CloneFlags::CLONE_NEWUSER) {
        // What we were is nobody in there.
        kernel::set_ids(0, 0).map_err(|source| ExecError::User { uid: 0, gid: 0, source })?;
    }
    match kernel::clone(libc::CLONE_PARENT, 0).map_err(ExecError::Fork)? {
        Fork::Parent(pid) => Ok(pid),
        Fork::Child => second(plan, (&process, filter.as_ref()), &null),
    }
}

fn process(told: Told<'_>) -> Result<Process, ExecError> {
    let mut read = Vec::new();
    let bytes = match told {
        Told::Here(bytes) => bytes,
        Told::InFile(file) => {
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

/// A user namespace cannot be joined when one is in it already.
fn namespaces(pid: i32) -> CloneFlags {
    let all = CloneFlags::CLONE_NEWNS
        | CloneFlags::CLONE_NEWPID
        | CloneFlags::CLONE_NEWNET
        | CloneFlags::CLONE_NEWIPC
        | CloneFlags::CLONE_NEWUTS
        | CloneFlags::CLONE_NEWCGROUP;
    let theirs = fs::read_link(format!("/proc/{pid}/ns/user"));
    match (fs::read_link("/proc/self/ns/user"), theirs) {
        (Ok(ours), Ok(theirs)) if ours != theirs => all | CloneFlags::CLONE_NEWUSER,
        _ => all,
    }
}

/// The second fork's whole life.
fn second(plan: &Plan<'_>, (process, filter): (&Process, Option<&Filter>), null: &OwnedFd) -> ! {
    let connected = begin(plan).and_then(|()| connect(plan, process.user().uid(), null));
    let env = match connected.and_then(|()| Ok(identity::assume(process, filter)?)) {
        Ok(env) => env,
        Err(error) => {
            plan.speaker.say(&Word::Failed(Kind::Internal, fault::chain(&error)));
            kernel::leave(255)
        }
    };
    // As the container itself: nothing of a pod outlives its shim.
    let _ = kernel::die_with_parent();
    let (kind, message) = program::become_program(process.args().as_deref().unwrap_or_default(), &env);
    plan.speaker.say(&Word::Failed(kind, message));
    kernel::leave(if kind == Kind::CommandNotFound { 127 } else { 126 })
}

fn begin(plan: &Plan<'_>) -> Result<(), ExecError> {
    nix::unistd::setsid().map_err(ExecError::Session)?;
    if plan.adopts_orphans {
        kernel::become_subreaper().map_err(ExecError::Adopt)?;
    }
    Ok(())
}

fn connect(plan: &Plan<'_>, uid: u32, null: &OwnedFd) -> Result<(), ExecError> {
    if let Some(socket) = plan.terminal {
        let root = fs::File::open("/").map_err(ExecError::Terminal)?;
        return terminal::take(&root, socket, uid).map(drop).map_err(ExecError::Terminal);
    }
    for (given, standard) in plan.stdio.into_iter().zip(0..) {
        kernel::place(given.unwrap_or(null).as_raw_fd(), standard).map_err(ExecError::Stdio)?;
    }
    Ok(())
}

/// Gives the pipes to the user, who could not open /dev/stdout otherwise. Only pipes: another file may have an owner.
fn give_to_user(plan: &Plan<'_>, uid: u32) {
    for given in plan.stdio.into_iter().flatten() {
        let is_pipe =
            nix::sys::stat::fstat(given).is_ok_and(|stat| stat.st_mode & libc::S_IFMT == libc::S_IFIFO);
        if is_pipe {
            let _ = nix::unistd::fchown(given, Some(uid.into()), None);
        }
    }
}

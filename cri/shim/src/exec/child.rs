//! The two forks of an exec, each a straight line of steps in the order that the kernel wants.

use std::ffi::CString;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use coracle_proto::shim::error::Kind;
use libcontainer::oci_spec::runtime::{LinuxSeccomp, Process, Spec};
use libcontainer::syscall::syscall::create_syscall;
use libcontainer::{apparmor, capabilities, seccomp, tty};
use nix::sched::{CloneFlags, setns};

use super::{Plan, environment, limit, user};
use crate::cgroup::{self, CgroupError};
use crate::creator::spec::{Host, adjust_process};
use crate::fault;
use crate::kernel::{self, Fork};
use crate::program;
use crate::report::Word;

/// The step that failed.
#[derive(Debug, thiserror::Error)]
enum ExecError {
    #[error("read the process")]
    Process(#[source] serde_json::Error),
    #[error("read the container's spec")]
    Spec(#[source] libcontainer::oci_spec::OciSpecError),
    #[error("hide from the container")]
    Hide(#[source] io::Error),
    #[error("join the container")]
    Cgroup(#[source] CgroupError),
    #[error("set the out-of-memory score {score}")]
    OomScore { score: i32, source: io::Error },
    #[error("set the resource limits")]
    Limits(#[source] nix::Error),
    #[error("join the container's namespaces")]
    Namespaces(#[source] nix::Error),
    #[error("fork in the container")]
    Fork(#[source] io::Error),
    #[error("begin a session")]
    Session(#[source] nix::Error),
    #[error("connect the standard streams")]
    Stdio(#[source] io::Error),
    #[error("take the terminal")]
    Terminal(#[source] Box<dyn std::error::Error>),
    #[error("enter the working directory {path}")]
    Cwd { path: String, source: nix::Error },
    #[error("set the user {uid}:{gid}")]
    User { uid: u32, gid: u32, source: io::Error },
    #[error("apply the AppArmor profile")]
    Apparmor(#[source] Box<dyn std::error::Error>),
    #[error("set the capabilities")]
    Capabilities(#[source] Box<dyn std::error::Error>),
    #[error("forbid new privileges")]
    NoNewPrivileges(#[source] io::Error),
    #[error("load the seccomp profile")]
    Seccomp(#[source] Box<dyn std::error::Error>),
}

/// The first fork's whole life.
pub(crate) fn run(plan: &Plan<'_>) -> ! {
    kernel::reset_signals();
    let stdio = plan.stdio.into_iter().flatten().chain(plan.terminal).chain([plan.target]);
    let mut keep: Vec<RawFd> = stdio.map(AsRawFd::as_raw_fd).collect();
    keep.push(plan.speaker.fd());
    kernel::close_all_but(&keep);
    match first(plan) {
        Ok(pid) => plan.speaker.say(&Word::Pid(pid)),
        Err(error) => plan.speaker.say(&Word::Failed(Kind::Internal, fault::chain(&error))),
    }
    kernel::leave(0)
}

/// All that is read from the host is read here, before the namespaces change.
fn first(plan: &Plan<'_>) -> Result<i32, ExecError> {
    let mut process: Process = serde_json::from_slice(plan.process).map_err(ExecError::Process)?;
    let spec = Spec::load(plan.dir.join("config.json")).map_err(ExecError::Spec)?;
    let filter = spec.linux().as_ref().and_then(|linux| linux.seccomp().clone());
    adjust_process(&mut process, &Host::look());
    cgroup::put(&plan.cgroups, 0).map_err(ExecError::Cgroup)?;
    if let Some(score) = process.oom_score_adj() {
        fs::write("/proc/self/oom_score_adj", score.to_string())
            .map_err(|source| ExecError::OomScore { score, source })?;
    }
    limit::apply(process.rlimits().as_deref().unwrap_or_default()).map_err(ExecError::Limits)?;
    // From here the container's processes can see us.
    kernel::hide_from_proc().map_err(ExecError::Hide)?;
    setns(plan.target, namespaces(plan.target_pid)).map_err(ExecError::Namespaces)?;
    match kernel::clone(libc::CLONE_PARENT, 0).map_err(ExecError::Fork)? {
        Fork::Parent(pid) => Ok(pid),
        Fork::Child => second(plan, &process, filter.as_ref()),
    }
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
fn second(plan: &Plan<'_>, process: &Process, filter: Option<&LinuxSeccomp>) -> ! {
    let env = match prepare(plan, process, filter) {
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

fn prepare(
    plan: &Plan<'_>,
    process: &Process,
    filter: Option<&LinuxSeccomp>,
) -> Result<Vec<CString>, ExecError> {
    nix::unistd::setsid().map_err(ExecError::Session)?;
    let (uid, gid) = (process.user().uid(), process.user().gid());
    connect(plan, uid)?;
    if let Some(profile) = process.apparmor_profile() {
        apparmor::apply_profile(profile).map_err(|error| ExecError::Apparmor(error.into()))?;
    }
    if let Some(umask) = process.user().umask() {
        nix::sys::stat::umask(nix::sys::stat::Mode::from_bits_truncate(umask));
    }
    // As root first, and as the user when root may not.
    let cwd = || {
        let path = process.cwd();
        let failed = |source| ExecError::Cwd { path: path.display().to_string(), source };
        nix::unistd::chdir(path).map_err(failed)
    };
    let entered = cwd();
    let groups = process.user().additional_gids().clone().unwrap_or_default();
    let user = |source| ExecError::User { uid, gid, source };
    kernel::keep_capabilities(true).map_err(user)?;
    kernel::set_groups(&groups).map_err(user)?;
    kernel::set_ids(uid, gid).map_err(user)?;
    restrict(process, filter, || entered.or_else(|_| cwd()))?;
    let entries = process.env().as_deref().unwrap_or_default();
    Ok(environment(entries, || user::home(uid)))
}

/// Loading a filter needs CAP_SYS_ADMIN or no-new-privileges: without the latter it must come
/// before the capabilities go, with it as late as can be.
fn restrict(
    process: &Process,
    filter: Option<&LinuxSeccomp>,
    enter_cwd: impl FnOnce() -> Result<(), ExecError>,
) -> Result<(), ExecError> {
    let load = || match filter {
        Some(filter) => seccomp::initialize_seccomp(filter).map(drop),
        None => Ok(()),
    };
    let load = || load().map_err(|error| ExecError::Seccomp(error.into()));
    let no_new_privileges = process.no_new_privileges() == Some(true);
    let syscall = create_syscall();
    let failed = |error: libcontainer::syscall::SyscallError| ExecError::Capabilities(error.into());
    // What the change of the user took away, to the last step that needs it.
    capabilities::reset_effective(syscall.as_ref()).map_err(failed)?;
    if !no_new_privileges {
        load()?;
    }
    if let Some(sets) = process.capabilities() {
        capabilities::drop_privileges(sets, syscall.as_ref()).map_err(failed)?;
    }
    kernel::keep_capabilities(false).map_err(ExecError::NoNewPrivileges)?;
    enter_cwd()?;
    if no_new_privileges {
        kernel::no_new_privileges().map_err(ExecError::NoNewPrivileges)?;
        load()?;
    }
    Ok(())
}

fn connect(plan: &Plan<'_>, uid: u32) -> Result<(), ExecError> {
    if let Some(socket) = plan.terminal {
        // Made from the container's own devpts, so that it has a name in there.
        let made = tty::setup_console(create_syscall().as_ref(), socket.as_raw_fd(), false);
        made.map_err(|error| ExecError::Terminal(error.into()))?;
        let _ = nix::unistd::fchown(kernel::borrow(0), Some(uid.into()), None);
        return Ok(());
    }
    let null: OwnedFd =
        fs::File::options().read(true).write(true).open("/dev/null").map_err(ExecError::Stdio)?.into();
    for (given, standard) in plan.stdio.into_iter().zip(0..) {
        kernel::place(given.unwrap_or(&null).as_raw_fd(), standard).map_err(ExecError::Stdio)?;
        if given.is_some() {
            // So that the user can open /dev/stdout. Not everything that is given has an owner.
            let _ = nix::unistd::fchown(kernel::borrow(standard), Some(uid.into()), None);
        }
    }
    Ok(())
}

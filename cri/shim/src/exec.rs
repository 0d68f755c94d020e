//! Exec: an additional process in a running container.
//!
//! The shim implements exec itself, because the container library's exec drops the seccomp profile and does not join a
//! user namespace. An exec takes two forks. The first fork joins the container's cgroups and namespaces. The second
//! fork is made with CLONE_PARENT, so it is a child of the shim. It is in the container's pid namespace and executes the
//! program.

mod child;

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use coracle_proto::shim::{ExecState, Exit};

use crate::call_id::CallId;
use crate::report::{Report, Reporter};

pub(crate) use child::run;

/// The source of the OCI `process` object.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ProcessSource<'a> {
    /// The object is in the request.
    Inline(&'a [u8]),
    /// The object is in a file, because it may contain a large environment. The first fork reads the file, so
    /// that the object takes no memory of the shim.
    File(&'a OwnedFd),
}

/// Arguments of an exec, collected before the fork.
#[derive(Debug)]
pub(crate) struct ExecRequest<'a> {
    pub(crate) process: ProcessSource<'a>,
    /// The container's directory. The seccomp profile of the container's config.json applies to the exec too.
    pub(crate) dir: &'a Path,
    pub(crate) cgroups: Vec<PathBuf>,
    /// Cgroup path below each hierarchy's mount.
    pub(crate) cgroup: &'a str,
    /// The container's first process, whose namespaces are joined.
    pub(crate) target: &'a OwnedFd,
    pub(crate) target_pid: i32,
    /// Standard input, output and error. `None` for absent streams; with a terminal, all three are `None`.
    pub(crate) stdio: [Option<&'a OwnedFd>; 3],
    /// Socket to which the second fork sends the master of its new terminal.
    pub(crate) terminal: Option<&'a OwnedFd>,
    /// Whether the process becomes a subreaper: orphans among its descendants become its children.
    pub(crate) adopts_orphans: bool,
    /// The shim's pid.
    pub(crate) shim: i32,
    pub(crate) reporter: Reporter,
}

/// One exec, from its fork until its exit event is queued.
#[derive(Debug)]
pub(crate) struct Exec {
    pub(crate) container: u32,
    pub(crate) container_id: String,
    pub(crate) exec_id: String,
    /// Whether the agent waits for the end of the process (ExecSync), and kills the process after a timeout.
    pub(crate) awaited: bool,
    /// Pid of the process. 0 until the first fork reports the pid.
    pub(crate) pid: i32,
    pub(crate) report: Option<Report>,
    /// The exec call, to be answered when the program runs.
    pub(crate) call_id: Option<CallId>,
    /// Socket from which the terminal's master is received.
    pub(crate) console: Option<OwnedFd>,
    /// The exit of the process, if the process ended before its report was read.
    pub(crate) exit: Option<Exit>,
}

// === impl ProcessSource ===

impl<'a> ProcessSource<'a> {
    pub(crate) fn file(self) -> Option<&'a OwnedFd> {
        match self {
            Self::Inline(_) => None,
            Self::File(file) => Some(file),
        }
    }
}

// === impl Exec ===

impl Exec {
    /// State for the reply to the next agent's Hello. `None` unless the process runs and the agent waits for it.
    pub(crate) fn state(&self) -> Option<ExecState> {
        (self.awaited && self.pid > 0).then(|| ExecState {
            container_id: self.container_id.clone(),
            exec_id: self.exec_id.clone(),
            pid: self.pid,
        })
    }
}

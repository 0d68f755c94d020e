//! Another process in a running container.
//!
//! Our own code and not the container library's, whose exec drops the seccomp profile and does not
//! join a user namespace. Two forks: the first joins the container's cgroups and namespaces, the
//! second, made with CLONE_PARENT and so a child of the shim, is in the pid namespace and becomes
//! the program.

mod child;
pub(crate) mod limit;

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use coracle_proto::shim::{ExecState, Exit};

use crate::report::{Report, Speaker};
use crate::shim::Ticket;

pub(crate) use child::run;

/// Where the OCI `process` object is.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Told<'a> {
    Here(&'a [u8]),
    /// One with a large environment. Read by the first fork, so that it takes no memory of the shim.
    InFile(&'a OwnedFd),
}

/// Everything that the first fork needs to know.
#[derive(Debug)]
pub(crate) struct Plan<'a> {
    pub(crate) process: Told<'a>,
    /// Holds the container's config.json: its seccomp profile is the exec's too.
    pub(crate) dir: &'a Path,
    pub(crate) cgroups: Vec<PathBuf>,
    /// Their path below the mounts of their hierarchies.
    pub(crate) cgroup: &'a str,
    /// The container's first process, whose namespaces are joined.
    pub(crate) target: &'a OwnedFd,
    pub(crate) target_pid: i32,
    /// Standard input, output, error, as far as given; with a terminal none.
    pub(crate) stdio: [Option<&'a OwnedFd>; 3],
    /// Where the second fork sends the master of the terminal that it makes.
    pub(crate) terminal: Option<&'a OwnedFd>,
    /// Whether orphans among its descendants become its children while it lives.
    pub(crate) adopts_orphans: bool,
    /// The shim's pid.
    pub(crate) shim: i32,
    pub(crate) speaker: Speaker,
}

/// One exec, from its fork until its exit is on its way to the agent.
#[derive(Debug)]
pub(crate) struct Exec {
    pub(crate) container: u32,
    pub(crate) container_id: String,
    pub(crate) exec_id: String,
    /// Whether an agent waits for its end, and ends it when that takes too long.
    pub(crate) awaited: bool,
    /// 0 until the first fork said it.
    pub(crate) pid: i32,
    pub(crate) report: Option<Report>,
    /// Who waits to hear that the program runs.
    pub(crate) ticket: Option<Ticket>,
    /// Where the terminal's master comes from.
    pub(crate) console: Option<OwnedFd>,
    /// It ended before we heard that it ran.
    pub(crate) exit: Option<Exit>,
}

// === impl Told ===

impl<'a> Told<'a> {
    pub(crate) fn file(self) -> Option<&'a OwnedFd> {
        match self {
            Self::Here(_) => None,
            Self::InFile(file) => Some(file),
        }
    }
}

// === impl Exec ===

impl Exec {
    /// What the next agent is told, if it runs and somebody waits for its end.
    pub(crate) fn state(&self) -> Option<ExecState> {
        (self.awaited && self.pid > 0).then(|| ExecState {
            container_id: self.container_id.clone(),
            exec_id: self.exec_id.clone(),
            pid: self.pid,
        })
    }
}

//! One container, from the request to create it until it is deleted.
//!
//! ```text
//!   Creating ──► Created ──► Starting or Restoring ──► Running ──┐
//!      │            └────────────┴─────────────────────┴──► Draining ──► Exited
//!      └──► (removed: a failed creation leaves nothing)
//! ```
//! A deletion may begin in any state. It ends with the container removed.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::Instant;

use coracle_proto::shim::container_state::Phase as WirePhase;
use coracle_proto::shim::{ContainerState, Exit};

use crate::call_error::CallError;
use crate::call_id::CallId;
use crate::console::Console;
use crate::oom::OomEvents;
use crate::report::Report;
use crate::stdio::Stdio;

/// State of the container.
#[derive(Clone, Debug)]
pub(crate) enum Phase {
    /// A creator process makes the container.
    Creating {
        call_id: CallId,
        creator: i32,
        /// Pid of the container's first process. 0 until the creator reports the pid.
        first: i32,
        /// The first process has reported that it is ready.
        ready: bool,
    },
    /// The container's first process waits for the start signal.
    Created,
    /// The start signal is sent. The first process's report ends when its program runs, because the socket is
    /// close-on-exec.
    Starting {
        call_id: CallId,
    },
    /// CRIU restores the container's processes from a checkpoint. The first process, which never gets a start signal,
    /// provides mounts and streams meanwhile.
    Restoring {
        call_id: CallId,
        restorer: i32,
    },
    Running,
    /// The first process has ended. The shim still reads the container's output, until `until` at the latest.
    Draining {
        exit: Exit,
        until: Instant,
    },
    Exited {
        exit: Exit,
    },
}

/// The channel at which the first process waits for the start signal.
#[derive(Debug)]
pub(crate) enum StartChannel {
    /// A pipe: the process waits for one byte.
    Pipe(OwnedFd),
    /// The container library's own socket.
    Library,
}

/// A container of the pod.
#[derive(Debug)]
pub(crate) struct Container {
    pub(crate) id: String,
    pub(crate) phase: Phase,
    /// Pid of the container's first process, set when that process is ready. The process is a child of the shim, so its
    /// pid is not reused before the shim reaps it.
    pub(crate) pid: i32,
    /// The channel at which the first process waits for the start signal.
    pub(crate) start_channel: StartChannel,
    /// Cgroup path below each hierarchy's mount. Empty until the creator reports it.
    pub(crate) cgroup: String,
    /// Whether the container shares a pid namespace. Then the kernel does not kill its other processes when the first
    /// process ends.
    pub(crate) shares_pids: bool,
    /// OOM kills of the pod's cgroup before this container was created.
    pub(crate) pod_oom_kills: u64,
    /// OOM notifications of its cgroup. They are used if the cgroup may be removed before the shim reads the cgroup's
    /// counter, and the pod's cgroup has no counter.
    pub(crate) oom_events: Option<OomEvents>,
    /// Mount point of its overlay.
    pub(crate) target: Option<PathBuf>,
    pub(crate) report: Option<Report>,
    pub(crate) console: Option<Console>,
    pub(crate) stdio: Stdio,
    pub(crate) created_at: i64,
    pub(crate) started_at: i64,
    /// Working directory of CRIU during a restore.
    pub(crate) restored_in: Option<PathBuf>,
    pub(crate) deletion: Option<Deletion>,
}

/// A deletion in progress.
#[derive(Debug, Default)]
pub(crate) struct Deletion {
    /// Callers that wait for the end of the deletion.
    pub(crate) calls: Vec<CallId>,
    /// The create call that failed. It is answered with this error when the container is removed completely.
    pub(crate) failed: Option<(CallId, CallError)>,
    /// Pidfds of the cgroup's processes whose end is awaited.
    pub(crate) dying: Vec<OwnedFd>,
    /// Time of the next attempt, if no other event triggers an attempt before.
    pub(crate) retry_at: Option<Instant>,
    pub(crate) attempts: u32,
}

// === impl Container ===

impl Container {
    /// Whether the first process may still run.
    pub(crate) fn is_alive(&self) -> bool {
        match self.phase {
            Phase::Creating { .. } => true,
            Phase::Created | Phase::Starting { .. } | Phase::Restoring { .. } | Phase::Running => true,
            Phase::Draining { .. } | Phase::Exited { .. } => false,
        }
    }

    /// Time from which the container's output is read again, if reading is paused because the container writes too
    /// fast. `None` after the end of its first process, because the rest of the output has a deadline.
    pub(crate) fn paused_until(&self, now: Instant) -> Option<Instant> {
        self.is_alive().then(|| self.stdio.paused_until(now))?
    }

    pub(crate) fn description(&self) -> &'static str {
        match self.phase {
            Phase::Creating { .. } => "still being created",
            Phase::Created => "created but not started",
            Phase::Starting { .. } => "being started",
            Phase::Restoring { .. } => "being restored",
            Phase::Running => "running",
            Phase::Draining { .. } | Phase::Exited { .. } => "not running: it has exited",
        }
    }

    pub(crate) fn state(&self) -> ContainerState {
        let (phase, exit) = match &self.phase {
            Phase::Creating { .. } | Phase::Created => (WirePhase::Created, None),
            // `Draining` is reported as running. The exit event has the time of the exit.
            Phase::Starting { .. } | Phase::Restoring { .. } | Phase::Running | Phase::Draining { .. } => {
                (WirePhase::Running, None)
            }
            Phase::Exited { exit } => (WirePhase::Exited, Some(*exit)),
        };
        ContainerState {
            container_id: self.id.clone(),
            phase: phase.into(),
            pid: self.pid,
            created_at: self.created_at,
            started_at: self.started_at,
            exit,
        }
    }
}

//! One container, from the request to create it until it is deleted.
//!
//! ```text
//!   Creating ──► Created ──► Starting or Restoring ──► Running ──┐
//!      │            └────────────┴─────────────────────┴──► Draining ──► Exited
//!      └──► (gone: nothing is left of a creation that failed)
//! ```
//! A deletion may begin in any state; it ends with the container gone.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::Instant;

use coracle_proto::shim::container_state::Phase as WirePhase;
use coracle_proto::shim::{ContainerState, Exit};

use crate::console::Console;
use crate::fault::Fault;
use crate::oom::OomEvents;
use crate::report::Report;
use crate::shim::Ticket;
use crate::stdio::Stdio;

/// How far it has come.
#[derive(Clone, Debug)]
pub(crate) enum Phase {
    /// A creator works on it.
    Creating {
        ticket: Ticket,
        creator: i32,
        /// Its first process, or 0 until that is told.
        first: i32,
        /// That one has said that it is ready.
        ready: bool,
    },
    /// Its first process waits for the start.
    Created,
    /// The start was given; the end of its report says that the program runs.
    Starting {
        ticket: Ticket,
    },
    /// CRIU makes its processes from those of a checkpoint. The first process, which waits for a start that will
    /// not come, lends its mounts and streams meanwhile.
    Restoring {
        ticket: Ticket,
        restorer: i32,
    },
    Running,
    /// Its first process has ended; what it wrote is still being read, until then at most.
    Draining {
        exit: Exit,
        until: Instant,
    },
    Exited {
        exit: Exit,
    },
}

/// Where its first process waits for the start.
#[derive(Debug)]
pub(crate) enum Gate {
    /// For one byte.
    Pipe(OwnedFd),
    /// At the socket of the library, which made it.
    Library,
}

/// One container.
#[derive(Debug)]
pub(crate) struct Container {
    pub(crate) id: String,
    pub(crate) phase: Phase,
    /// Its first process, once that is ready. Ours to reap, so the number stays its own until then.
    pub(crate) pid: i32,
    /// What starts it.
    pub(crate) gate: Gate,
    /// Path below each hierarchy's mount; empty until the creator said it.
    pub(crate) cgroup: String,
    /// Whether the kernel leaves its other processes alone when the first one ends.
    pub(crate) shares_pids: bool,
    /// How many processes of the pod the kernel had killed for want of memory before there was this container.
    pub(crate) pod_oom_kills: u64,
    /// What tells that where its cgroup and the count may go before we look, and the pod has none.
    pub(crate) oom_events: Option<OomEvents>,
    /// Where its overlay is mounted.
    pub(crate) target: Option<PathBuf>,
    pub(crate) report: Option<Report>,
    pub(crate) console: Option<Console>,
    pub(crate) stdio: Stdio,
    pub(crate) created_at: i64,
    pub(crate) started_at: i64,
    /// Where CRIU works on it, while that restores it.
    pub(crate) restored_in: Option<PathBuf>,
    pub(crate) deletion: Option<Deletion>,
}

/// A deletion under way.
#[derive(Debug, Default)]
pub(crate) struct Deletion {
    /// Who waits for it.
    pub(crate) tickets: Vec<Ticket>,
    /// Who waits to hear why the container could not be created, once nothing of it is left.
    pub(crate) failed: Option<(Ticket, Fault)>,
    /// Processes of the cgroup whose end is awaited.
    pub(crate) dying: Vec<OwnedFd>,
    /// When to look again, if nothing tells us that it is time.
    pub(crate) again: Option<Instant>,
    pub(crate) looks: u32,
}

// === impl Container ===

impl Container {
    /// Whether its first process may still be there.
    pub(crate) fn is_alive(&self) -> bool {
        match self.phase {
            Phase::Creating { .. } => true,
            Phase::Created | Phase::Starting { .. } | Phase::Restoring { .. } | Phase::Running => true,
            Phase::Draining { .. } | Phase::Exited { .. } => false,
        }
    }

    pub(crate) fn words(&self) -> &'static str {
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
            // Not exited yet to anybody who asks: the event will say it.
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

//! Standard streams of processes in a pod, as passed over the shim's connection.

use std::os::fd::OwnedFd;

use coracle_proto::shim::reply;
use tokio::task::{JoinError, JoinHandle};

use super::error::Error;

/// Standard streams of a new process in a container.
#[derive(Debug)]
pub enum ExecStdio {
    /// A new terminal. Its master is returned in [`Started::terminal`].
    Terminal,
    /// Pipes. `None` stands for `/dev/null`.
    Pipes {
        /// Read end for the process's standard input.
        stdin: Option<OwnedFd>,
        /// Write end for its standard output.
        stdout: Option<OwnedFd>,
        /// Write end for its standard error.
        stderr: Option<OwnedFd>,
    },
    /// The outputs of a command whose caller waits. The command adopts the orphans among its descendants, so that the
    /// command can be killed with all processes that it started.
    Captured {
        /// Write end for its standard output.
        stdout: OwnedFd,
        /// Write end for its standard error.
        stderr: OwnedFd,
    },
}

/// A process started by [`Shim::exec`](super::Shim::exec).
#[derive(Debug)]
pub struct Started {
    /// Its pid, in the host's pid namespace.
    pub pid: i32,
    /// The terminal's master, if one was requested.
    pub terminal: Option<OwnedFd>,
}

/// The result of a start within the timeout.
#[derive(Debug)]
pub enum StartResult {
    /// The process runs.
    Started(Started),
    /// The shim has not answered within the timeout.
    PendingStart(PendingStart),
}

/// A late answer that may still arrive.
#[derive(Debug)]
pub struct PendingStart(pub(super) JoinHandle<Result<Answer, Error>>);

type Answer = (reply::Result, Vec<OwnedFd>);

// === impl PendingStart ===

impl PendingStart {
    /// Waits for the answer as long as the shim runs.
    ///
    /// # Errors
    /// If the process was not started, or the shim is gone.
    pub async fn started(self) -> Result<Started, Error> {
        Self::parse(self.0.await)
    }

    pub(super) fn parse(answer: Result<Result<Answer, Error>, JoinError>) -> Result<Started, Error> {
        match answer.map_err(|_ended| Error::gone())?? {
            (reply::Result::ExecStarted(started), fds) => {
                Ok(Started { pid: started.pid, terminal: fds.into_iter().next() })
            }
            (reply::Result::Error(error), _) => Err(Error::from(error)),
            (other, _) => Err(Error::unexpected(&other)),
        }
    }
}

/// The streams of a container to attach to.
#[derive(Clone, Copy, Debug, Default)]
pub struct AttachTo {
    /// Write to its standard input.
    pub stdin: bool,
    /// Read its standard output.
    pub stdout: bool,
    /// Read its standard error. A container with a terminal has no standard error.
    pub stderr: bool,
    /// Capacity of the pipe of each output in bytes; 0 means the maximum, 1 MiB. The shim drops a client that falls
    /// behind by more. Shims of earlier versions always use the maximum.
    pub output_capacity: u32,
}

/// Our ends of an attached container's streams. The outputs end when the container ends, or when the shim drops this
/// client because it reads too slowly.
#[derive(Debug, Default)]
pub struct Attached {
    /// A bidirectional stream socket, for a container with a terminal. The other fields are then `None`.
    pub terminal: Option<OwnedFd>,
    /// Write end of its standard input.
    pub stdin: Option<OwnedFd>,
    /// Read end of a copy of its standard output.
    pub stdout: Option<OwnedFd>,
    /// Read end of a copy of its standard error.
    pub stderr: Option<OwnedFd>,
}

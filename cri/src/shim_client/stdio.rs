//! What processes in a pod read and write, as it goes over the shim's connection.

use std::os::fd::OwnedFd;

use coracle_proto::shim::reply;
use tokio::task::{JoinError, JoinHandle};

use super::error::Error;

/// What a new process in a container reads and writes.
#[derive(Debug)]
pub enum ExecStdio {
    /// A new terminal; its master comes back in [`Started::terminal`].
    Terminal,
    /// The ends given here; what is `None` is `/dev/null`.
    Pipes {
        /// Read end for the process's standard input.
        stdin: Option<OwnedFd>,
        /// Write end for its standard output.
        stdout: Option<OwnedFd>,
        /// Write end for its standard error.
        stderr: Option<OwnedFd>,
    },
    /// For a command that is waited for, and killed with all that it started when that takes too long: it adopts
    /// the orphans among its descendants.
    Captured {
        /// Write end for its standard output.
        stdout: OwnedFd,
        /// Write end for its standard error.
        stderr: OwnedFd,
    },
}

/// A process that was started by [`Shim::exec`](super::Shim::exec).
#[derive(Debug)]
pub struct Started {
    /// Its pid, in the host's pid namespace.
    pub pid: i32,
    /// The terminal's master, when one was asked for.
    pub terminal: Option<OwnedFd>,
}

/// What became of the wish to start a process in its time.
#[derive(Debug)]
pub enum Begun {
    /// It runs.
    Started(Started),
    /// The shim has not answered.
    Late(Late),
}

/// An answer that comes too late, if it comes.
#[derive(Debug)]
pub struct Late(pub(super) JoinHandle<Result<Answer, Error>>);

type Answer = (reply::Result, Vec<OwnedFd>);

// === impl Late ===

impl Late {
    /// Waits for as long as the shim lives.
    ///
    /// # Errors
    /// It was not started, or the shim is gone.
    pub async fn started(self) -> Result<Started, Error> {
        Self::hear(self.0.await)
    }

    pub(super) fn hear(answer: Result<Result<Answer, Error>, JoinError>) -> Result<Started, Error> {
        match answer.map_err(|_ended| Error::gone())?? {
            (reply::Result::ExecStarted(started), fds) => {
                Ok(Started { pid: started.pid, terminal: fds.into_iter().next() })
            }
            (reply::Result::Error(error), _) => Err(Error::from(error)),
            (other, _) => Err(Error::unexpected(&other)),
        }
    }
}

/// Which of a container's streams to attach to.
#[derive(Clone, Copy, Debug, Default)]
pub struct AttachTo {
    /// Write to its standard input.
    pub stdin: bool,
    /// Read its standard output.
    pub stdout: bool,
    /// Read its standard error (with a terminal there is none).
    pub stderr: bool,
}

/// The ends of an attached container's streams. End of file on the outputs means that the
/// container ended or that this reader was too slow and was dropped.
#[derive(Debug, Default)]
pub struct Attached {
    /// A stream socket, both ways, when the container has a terminal; the rest is then `None`.
    pub terminal: Option<OwnedFd>,
    /// Write end of its standard input.
    pub stdin: Option<OwnedFd>,
    /// Read end of a copy of its standard output.
    pub stdout: Option<OwnedFd>,
    /// Read end of a copy of its standard error.
    pub stderr: Option<OwnedFd>,
}

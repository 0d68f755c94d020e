//! What processes in a pod read and write, as it goes over the shim's connection.

use std::os::fd::OwnedFd;

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

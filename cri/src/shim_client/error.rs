//! Errors of calls to a shim.

use coracle_proto::shim;

/// A failed call: its kind, and the chain of causes as text.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{message}")]
pub struct Error {
    /// The kind of the failure.
    pub kind: ErrorKind,
    /// The causes, outermost first, joined by ": ".
    pub message: String,
}

/// The kinds of failures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// The kernel or the container library refused.
    Internal,
    /// No such container or exec.
    NotFound,
    /// The id is in use.
    AlreadyExists,
    /// The request is invalid.
    Invalid,
    /// The container or exec is not in a state that allows the call.
    WrongState,
    /// The command does not exist in the container: exit code 127.
    CommandNotFound,
    /// The command exists but cannot be executed: exit code 126.
    CommandNotExecutable,
    /// No process listens on the port.
    ConnectionRefused,
    /// The shim does not support the call, for example because it is of an earlier version.
    Unsupported,
    /// The shim could not be started.
    Spawn,
    /// The connection ended, or there is no shim.
    Gone,
    /// The shim is alive but does not answer.
    Silent,
    /// The shim's answer violates the protocol.
    Protocol,
}

// === impl Error ===

impl Error {
    pub(super) fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into() }
    }

    pub(super) fn invalid(doing: &str, error: &dyn std::error::Error) -> Self {
        Self::new(ErrorKind::Invalid, format!("cannot {doing}: {error}"))
    }

    pub(super) fn too_large(length: usize, most: usize) -> Self {
        Self::new(ErrorKind::Invalid, format!("the request has {length} bytes; the maximum is {most}"))
    }

    pub(super) fn protocol(message: &str) -> Self {
        Self::new(ErrorKind::Protocol, message)
    }

    pub(super) fn gone() -> Self {
        Self::new(ErrorKind::Gone, "the connection to the shim has ended")
    }

    pub(crate) fn silent() -> Self {
        Self::new(ErrorKind::Silent, "the shim does not answer")
    }

    pub(super) fn unkillable(pid: i32) -> Self {
        Self::new(ErrorKind::Silent, format!("the killed shim (process {pid}) is in uninterruptible sleep"))
    }

    pub(super) fn unexpected(reply: &shim::reply::Result) -> Self {
        Self::new(ErrorKind::Protocol, format!("unexpected reply: {reply:?}"))
    }
}

impl From<shim::Error> for Error {
    fn from(error: shim::Error) -> Self {
        use shim::error::Kind;
        let kind = match error.kind() {
            Kind::Internal => ErrorKind::Internal,
            Kind::NotFound => ErrorKind::NotFound,
            Kind::AlreadyExists => ErrorKind::AlreadyExists,
            Kind::Invalid => ErrorKind::Invalid,
            Kind::WrongState => ErrorKind::WrongState,
            Kind::CommandNotFound => ErrorKind::CommandNotFound,
            Kind::CommandNotExecutable => ErrorKind::CommandNotExecutable,
            Kind::ConnectionRefused => ErrorKind::ConnectionRefused,
            Kind::Unsupported => ErrorKind::Unsupported,
        };
        Self { kind, message: error.message }
    }
}

//! Errors of a container runtime. Each variant needs another reaction of the caller.

use tonic::{Code, Status};

/// A call that the runtime did not carry out. The display text is the runtime's own message.
#[derive(Clone, Debug, thiserror::Error)]
pub enum RuntimeError {
    /// The sandbox, container or image does not exist.
    #[error("{0}")]
    NotFound(String),
    /// The runtime cannot be reached; the call may be repeated.
    #[error("{0}")]
    Unavailable(String),
    /// The call, or the command that it runs, did not end in time.
    #[error("{0}")]
    DeadlineExceeded(String),
    /// The request is invalid, or the object is in a state that does not allow it; a repetition does not help.
    #[error("{0}")]
    Invalid(String),
    /// A resource of the machine is used up: disk, memory, descriptors.
    #[error("{0}")]
    Exhausted(String),
    /// The runtime does not implement the call.
    #[error("{0}")]
    Unsupported(String),
    /// Any other failure.
    #[error("{0}")]
    Other(String),
}

impl RuntimeError {
    /// The runtime's message.
    #[must_use]
    pub fn message(&self) -> &str {
        match self {
            Self::NotFound(message)
            | Self::Unavailable(message)
            | Self::DeadlineExceeded(message)
            | Self::Invalid(message)
            | Self::Exhausted(message)
            | Self::Unsupported(message)
            | Self::Other(message) => message,
        }
    }

    /// The class of the error without the runtime's message, which may quote a command's output.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::NotFound(_) => "not found",
            Self::Unavailable(_) => "the runtime is not reachable",
            Self::DeadlineExceeded(_) => "deadline exceeded",
            Self::Invalid(_) => "invalid request",
            Self::Exhausted(_) => "resource exhausted",
            Self::Unsupported(_) => "not supported by the runtime",
            Self::Other(_) => "the runtime failed",
        }
    }
}

impl From<Status> for RuntimeError {
    fn from(status: Status) -> Self {
        let message = || status.message().to_owned();
        match status.code() {
            Code::NotFound => Self::NotFound(message()),
            Code::Unavailable => Self::Unavailable(message()),
            Code::DeadlineExceeded => Self::DeadlineExceeded(message()),
            Code::InvalidArgument | Code::FailedPrecondition | Code::OutOfRange | Code::AlreadyExists => {
                Self::Invalid(message())
            }
            Code::ResourceExhausted => Self::Exhausted(message()),
            Code::Unimplemented => Self::Unsupported(message()),
            Code::Ok
            | Code::Cancelled
            | Code::Unknown
            | Code::PermissionDenied
            | Code::Aborted
            | Code::Internal
            | Code::DataLoss
            | Code::Unauthenticated => Self::Other(message()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_become_variants_and_keep_their_message() {
        let error = |code| RuntimeError::from(Status::new(code, "text"));
        assert!(matches!(error(Code::NotFound), RuntimeError::NotFound(_)));
        assert!(matches!(error(Code::DeadlineExceeded), RuntimeError::DeadlineExceeded(_)));
        assert!(matches!(error(Code::ResourceExhausted), RuntimeError::Exhausted(_)));
        assert!(matches!(error(Code::Unimplemented), RuntimeError::Unsupported(_)));
        for code in 1..=16 {
            assert_eq!(error(Code::from_i32(code)).message(), "text");
            assert_eq!(error(Code::from_i32(code)).to_string(), "text");
        }
    }
}

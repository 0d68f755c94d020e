//! The one error that leaves this crate, and the kinds that callers decide by.

use crate::reference::InvalidReference;

/// Why an operation on images failed. Cheap to clone, for callers that share one pull share its failure.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    /// The reference is not one.
    #[error(transparent)]
    Reference(#[from] InvalidReference),
    /// No such image in the store.
    #[error("no image {name:?} in the store")]
    UnknownImage {
        /// The name or id that was asked for.
        name: String,
    },
}

/// What callers decide by: gRPC codes, `ErrImagePull` or `InvalidImageName`, retry or not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorKind {
    /// The registry does not have it, or the store does not.
    NotFound,
    /// The registry refuses these credentials, or wants some.
    Unauthorized,
    /// The registry cannot be reached, stalls, is overloaded or broken; trying later may help.
    Unavailable,
    /// The reference cannot be parsed.
    InvalidReference,
    /// Content is not what its digest says, or cannot be understood.
    Corrupt,
    /// Content breaks a safety rule or a limit: paths that climb out, bombs.
    Rejected,
    /// A format, platform or scheme that is not served here.
    Unsupported,
    /// The disk is full (or the quota used up).
    NoSpace,
    /// Another process has this store open.
    Locked,
    /// The machine refused: an I/O error, a missing privilege.
    Io,
}

// === impl Error ===

impl Error {
    /// What kind of failure this is.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Error::Reference(_) => ErrorKind::InvalidReference,
            Error::UnknownImage { .. } => ErrorKind::NotFound,
        }
    }

    /// The whole chain of causes in one line, for messages that leave the process.
    #[must_use]
    pub fn report(&self) -> String {
        report(self)
    }
}

/// Joins an error and its sources with colons.
pub(crate) fn report(error: &dyn std::error::Error) -> String {
    let mut line = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        line.push_str(": ");
        line.push_str(&cause.to_string());
        source = cause.source();
    }
    line
}

//! The public error of this crate, and its kinds.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use nix::errno::Errno;

use crate::reference::InvalidReference;

/// Error of an operation on images. Cheap to clone: all callers of one pull get its error.
///
/// `Display` names the operation only. [`Error::report`] and `source` give the causes.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    /// The reference is invalid.
    #[error(transparent)]
    Reference(#[from] InvalidReference),
    /// The store has no such image.
    #[error("no image {name:?} in the store")]
    UnknownImage {
        /// The requested name or id.
        name: String,
    },
    /// The store cannot be opened.
    #[error("cannot open the image store in {}", path.display())]
    Open {
        /// The store's directory.
        path: PathBuf,
        /// The cause.
        #[source]
        source: Cause,
    },
    /// A pull failed.
    #[error("cannot pull {reference}")]
    Pull {
        /// The normalised reference.
        reference: String,
        /// The cause.
        #[source]
        source: Cause,
    },
    /// An import failed.
    #[error("cannot import {}", path.display())]
    Import {
        /// The archive or layout.
        path: PathBuf,
        /// The cause.
        #[source]
        source: Cause,
    },
    /// An export failed.
    #[error("cannot export {image} to {}", path.display())]
    Export {
        /// The image.
        image: String,
        /// The archive to write.
        path: PathBuf,
        /// The cause.
        #[source]
        source: Cause,
    },
    /// The store cannot be changed.
    #[error("cannot {verb} the image {name}")]
    Change {
        /// The operation.
        verb: &'static str,
        /// The image.
        name: String,
        /// The cause.
        #[source]
        source: Cause,
    },
}

/// Cause of an [`Error`], with its kind.
#[derive(Debug, Clone)]
pub struct Cause {
    kind: ErrorKind,
    error: Arc<dyn std::error::Error + Send + Sync>,
}

/// Kind of an error. Callers map it to gRPC codes, to `ErrImagePull` or `InvalidImageName`, and decide about
/// retries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorKind {
    /// The registry or the store does not have the image.
    NotFound,
    /// The registry refuses the credentials, or requires credentials.
    Unauthorized,
    /// The registry is unreachable, stalled, overloaded or broken. A retry may succeed.
    Unavailable,
    /// The reference cannot be parsed.
    InvalidReference,
    /// Content does not match its digest, or cannot be parsed.
    Corrupt,
    /// Content violates a safety rule or a limit: a path outside the layer, a decompression bomb.
    Rejected,
    /// An unsupported format, platform or scheme.
    Unsupported,
    /// The disk is full, or the quota is used up.
    NoSpace,
    /// Another process has this store open.
    Locked,
    /// A local failure: I/O error, missing privilege, unusable configuration.
    Io,
}

// === impl Error ===

impl Error {
    /// The kind of this error.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Error::Reference(_) => ErrorKind::InvalidReference,
            Error::UnknownImage { .. } => ErrorKind::NotFound,
            Error::Open { source, .. }
            | Error::Pull { source, .. }
            | Error::Import { source, .. }
            | Error::Export { source, .. }
            | Error::Change { source, .. } => source.kind,
        }
    }

    /// The error with all its causes in one line, for messages to other processes.
    #[must_use]
    pub fn report(&self) -> String {
        report(self)
    }
}

/// Maximum bytes of a report. Registries and images control parts of the text.
const REPORT_MAX: usize = 4096;

/// Joins an error and its sources with ": ". Control characters are replaced, and the line is cut at
/// [`REPORT_MAX`].
pub(crate) fn report(error: &dyn std::error::Error) -> String {
    let mut line = coracle_error_chain::chain(error);
    line.truncate(line.floor_char_boundary(REPORT_MAX));
    line.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// Position of an error in a JSON document. The parser's message is left out, because it quotes the document. The
/// document may come from a server that only this machine can reach.
#[derive(Debug, thiserror::Error)]
#[error("{what} at line {line} column {column}")]
pub(crate) struct Malformed {
    what: &'static str,
    line: usize,
    column: usize,
}

impl From<serde_json::Error> for Malformed {
    fn from(error: serde_json::Error) -> Malformed {
        let what = match error.classify() {
            serde_json::error::Category::Data => "a value of the wrong type",
            serde_json::error::Category::Eof => "unexpected end of the document",
            serde_json::error::Category::Io | serde_json::error::Category::Syntax => "invalid JSON",
        };
        Malformed { what, line: error.line(), column: error.column() }
    }
}

// === impl Cause ===

impl Cause {
    /// The cause of a failed operation on images.
    pub(crate) fn new(kind: ErrorKind, error: impl std::error::Error + Send + Sync + 'static) -> Cause {
        Cause { kind, error: Arc::new(error) }
    }

    /// The kind of this error.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }
}

impl std::fmt::Display for Cause {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.error.fmt(f)
    }
}

impl std::error::Error for Cause {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.error.source()
    }
}

// === kinds of system errors ===

/// The kind of an I/O error.
pub(crate) fn io_kind(error: &io::Error) -> ErrorKind {
    errno_kind(error.raw_os_error().map_or(Errno::EIO, Errno::from_raw))
}

/// The kind of a failed system call.
pub(crate) fn errno_kind(errno: Errno) -> ErrorKind {
    match errno {
        Errno::ENOSPC | Errno::EDQUOT => ErrorKind::NoSpace,
        _ => ErrorKind::Io,
    }
}

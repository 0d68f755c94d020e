//! The one error that leaves this crate, and the kinds that callers decide by.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use nix::errno::Errno;

use crate::export::ExportError;
use crate::images::StoreError;
use crate::import::ImportError;
use crate::layers::LayerError;
use crate::manifest::ManifestError;
use crate::pull::PullError;
use crate::reference::InvalidReference;
use crate::unpack::{LinkError, UnpackError};

/// Why an operation on images failed. Cheap to clone, for callers that share one pull share its failure.
///
/// `Display` names the operation only; [`Error::report`] and `source` tell why.
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
    /// The store cannot be opened.
    #[error("cannot open the image store in {}", path.display())]
    Open {
        /// The store's directory.
        path: PathBuf,
        /// Why.
        #[source]
        source: Cause,
    },
    /// A pull failed.
    #[error("cannot pull {reference}")]
    Pull {
        /// What was to be pulled, normalised.
        reference: String,
        /// Why.
        #[source]
        source: Cause,
    },
    /// An import failed.
    #[error("cannot import {}", path.display())]
    Import {
        /// The archive or layout.
        path: PathBuf,
        /// Why.
        #[source]
        source: Cause,
    },
    /// An export failed.
    #[error("cannot export {image} to {}", path.display())]
    Export {
        /// The image.
        image: String,
        /// The archive that was to be.
        path: PathBuf,
        /// Why.
        #[source]
        source: Cause,
    },
    /// The store cannot be changed.
    #[error("cannot {verb} the image {name}")]
    Change {
        /// What was tried.
        verb: &'static str,
        /// The image.
        name: String,
        /// Why.
        #[source]
        source: Cause,
    },
}

/// What lies below an [`Error`], with its kind.
#[derive(Debug, Clone)]
pub struct Cause {
    kind: ErrorKind,
    error: Arc<dyn std::error::Error + Send + Sync>,
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
    /// The machine refused: an I/O error, a missing privilege, a configuration that cannot be used.
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
            Error::Open { source, .. }
            | Error::Pull { source, .. }
            | Error::Import { source, .. }
            | Error::Export { source, .. }
            | Error::Change { source, .. } => source.kind,
        }
    }

    /// The whole chain of causes in one line, for messages that leave the process.
    #[must_use]
    pub fn report(&self) -> String {
        report(self)
    }
}

/// Longest report in bytes: registries and images choose parts of the text.
const REPORT_MAX: usize = 4096;

/// Joins an error and its sources with colons. One line without control characters, cut when it is too long.
pub(crate) fn report(error: &dyn std::error::Error) -> String {
    let mut line = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        line.push_str(": ");
        line.push_str(&cause.to_string());
        source = cause.source();
    }
    line.truncate(line.floor_char_boundary(REPORT_MAX));
    line.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// Where a document is not as it should be. The words of the parser would quote the document, which may come from where
/// only this machine can ask.
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
            serde_json::error::Category::Data => "a value of the wrong kind",
            serde_json::error::Category::Eof => "the end of the text",
            serde_json::error::Category::Io | serde_json::error::Category::Syntax => "no JSON",
        };
        Malformed { what, line: error.line(), column: error.column() }
    }
}

// === impl Cause ===

impl Cause {
    /// What kind of failure this is.
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

impl From<StoreError> for Cause {
    fn from(error: StoreError) -> Cause {
        Cause { kind: store_kind(&error), error: Arc::new(error) }
    }
}

impl From<PullError> for Cause {
    fn from(error: PullError) -> Cause {
        Cause { kind: error.kind(), error: Arc::new(error) }
    }
}

impl From<ExportError> for Cause {
    fn from(error: ExportError) -> Cause {
        Cause { kind: error.kind(), error: Arc::new(error) }
    }
}

impl From<ImportError> for Cause {
    fn from(error: ImportError) -> Cause {
        Cause { kind: error.kind(), error: Arc::new(error) }
    }
}

// === kinds of what lies below ===

/// The kind of a failure of the store itself.
pub(crate) fn store_kind(error: &StoreError) -> ErrorKind {
    match error {
        StoreError::Layer(error) => layer_kind(error),
        StoreError::Record(error) => io_kind(&error.source),
        StoreError::Locked { .. } => ErrorKind::Locked,
        StoreError::Lock { source, .. } => io_kind(source),
        StoreError::Kernel => ErrorKind::Unsupported,
        StoreError::Stopped => ErrorKind::Io,
    }
}

/// The kind of a failure of the layers on disk.
pub(crate) fn layer_kind(error: &LayerError) -> ErrorKind {
    match error {
        LayerError::Disk { source, .. } => io_kind(source),
        LayerError::Sync { source, .. } => errno_kind(*source),
        LayerError::Commit(error) => layer_kind(error),
        LayerError::Collision { .. } => ErrorKind::Rejected,
        LayerError::Restate(error) => unpack_kind(error),
        LayerError::Archive(source) => io_kind(source),
        LayerError::View { source, .. } => errno_kind(*source),
        LayerError::Link { source, .. } => link_kind(source),
        LayerError::Deep { .. } => ErrorKind::Unsupported,
        LayerError::Stopped => ErrorKind::Io,
    }
}

/// The kind of a document's failure.
pub(crate) fn manifest_kind(error: &ManifestError) -> ErrorKind {
    match error {
        ManifestError::Damaged(_) | ManifestError::Config(_) | ManifestError::Count { .. } => {
            ErrorKind::Corrupt
        }
        ManifestError::Ambiguous
        | ManifestError::Layers(_)
        | ManifestError::Size { .. }
        | ManifestError::Nesting => ErrorKind::Rejected,
        ManifestError::Schema1 | ManifestError::Unsupported { .. } => ErrorKind::Unsupported,
        // To the user the image is not there, as with containerd.
        ManifestError::Platform { .. } => ErrorKind::NotFound,
    }
}

/// The kind of a layer's failure.
pub(crate) fn unpack_kind(error: &UnpackError) -> ErrorKind {
    match error {
        UnpackError::Archive(_) | UnpackError::Read(_) => ErrorKind::Corrupt,
        UnpackError::Escape { .. }
        | UnpackError::TooLarge(_)
        | UnpackError::WhiteoutName { .. }
        | UnpackError::WhiteoutDevice { .. }
        | UnpackError::LinkTarget { .. }
        | UnpackError::LinkOrder { .. } => ErrorKind::Rejected,
        UnpackError::Attribute { .. } => ErrorKind::Unsupported,
        UnpackError::Write { source, .. } => write_kind(*source),
    }
}

fn link_kind(error: &LinkError) -> ErrorKind {
    match error {
        LinkError::Target { .. } | LinkError::TooLarge(_) => ErrorKind::Rejected,
        LinkError::Write { source, .. } => write_kind(*source),
        LinkError::Open(source) => errno_kind(*source),
    }
}

fn write_kind(errno: Errno) -> ErrorKind {
    match errno {
        // Names and links that no file system takes.
        Errno::ENAMETOOLONG | Errno::ENOTDIR | Errno::ELOOP | Errno::EINVAL | Errno::EEXIST => {
            ErrorKind::Rejected
        }
        other => errno_kind(other),
    }
}

/// The kind of an error of the kernel's.
pub(crate) fn io_kind(error: &io::Error) -> ErrorKind {
    errno_kind(error.raw_os_error().map_or(Errno::EIO, Errno::from_raw))
}

fn errno_kind(errno: Errno) -> ErrorKind {
    match errno {
        Errno::ENOSPC | Errno::EDQUOT => ErrorKind::NoSpace,
        _ => ErrorKind::Io,
    }
}

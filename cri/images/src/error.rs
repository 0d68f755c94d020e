//! The public error of this crate, and its kinds.

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
    /// The registry refuses the credentials, or requires some.
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

/// Position of an error in a JSON document. The parser's own message would quote the document, which may come
/// from a server that only this machine can reach.
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

// === kinds of the causes ===

/// The kind of an error of the store.
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

/// The kind of an error of layers on disk.
pub(crate) fn layer_kind(error: &LayerError) -> ErrorKind {
    match error {
        LayerError::Disk { source, .. } => io_kind(source),
        LayerError::Sync { source, .. } => errno_kind(*source),
        LayerError::Commit(error) => layer_kind(error),
        LayerError::Collision { .. } => ErrorKind::Rejected,
        LayerError::DirectoryAttributes(error) => unpack_kind(error),
        LayerError::Archive(source) => io_kind(source),
        LayerError::View { source, .. } => errno_kind(*source),
        LayerError::Link { source, .. } => link_kind(source),
        LayerError::Deep { .. } => ErrorKind::Unsupported,
        LayerError::Stopped => ErrorKind::Io,
    }
}

/// The kind of an error of a manifest, index or configuration.
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
        // Reported as an absent image, as in containerd.
        ManifestError::Platform { .. } => ErrorKind::NotFound,
    }
}

/// The kind of an error of unpacking.
pub(crate) fn unpack_kind(error: &UnpackError) -> ErrorKind {
    match error {
        UnpackError::Archive(_) | UnpackError::Read(_) => ErrorKind::Corrupt,
        UnpackError::Escape { .. }
        | UnpackError::TooLarge(_)
        | UnpackError::WhiteoutName { .. }
        | UnpackError::WhiteoutDevice { .. }
        | UnpackError::DeviceNumber { .. }
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
        // Names and links that no file system accepts.
        Errno::ENAMETOOLONG | Errno::ENOTDIR | Errno::ELOOP | Errno::EINVAL | Errno::EEXIST => {
            ErrorKind::Rejected
        }
        other => errno_kind(other),
    }
}

/// The kind of an I/O error.
pub(crate) fn io_kind(error: &io::Error) -> ErrorKind {
    errno_kind(error.raw_os_error().map_or(Errno::EIO, Errno::from_raw))
}

fn errno_kind(errno: Errno) -> ErrorKind {
    match errno {
        Errno::ENOSPC | Errno::EDQUOT => ErrorKind::NoSpace,
        _ => ErrorKind::Io,
    }
}
